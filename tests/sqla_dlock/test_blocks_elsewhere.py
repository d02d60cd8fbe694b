"""A block that ends in another thread or task than the one it began in ends its own lease, and never another's."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dlock_core.backends.memory import MemoryBackend
from dlock_core.runtime import BLOCKING, run
from sqla_dlock import alock, lock
from tests.sqla_dlock.models import Counter


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


def held(store: MemoryBackend) -> int:
    return sum(len(state.holders) for state in run(store.inspect(BLOCKING)))


@pytest.mark.parametrize("shared", [False, True])
def test_generator_that_is_closed_in_another_thread_releases_its_lease(
    make_engine: Callable[..., Any], store: MemoryBackend, shared: bool
) -> None:
    engine = make_engine("sqlite")

    def stream(session: Session) -> Iterator[str]:
        with lock(session, "order", 42, shared=shared):
            session.add(Counter(name="streamed"))
            session.commit()
            yield "part"

    with Session(engine) as session:
        parts = stream(session)
        assert in_thread(lambda: next(parts)) == "part"
        assert held(store) == 1
        parts.close()
        assert held(store) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_lock_object_of_two_threads_that_is_left_elsewhere_takes_no_lease_of_the_other(
    make_engine: Callable[..., Any], store: MemoryBackend, shared: bool
) -> None:
    engine = make_engine("sqlite")
    first, second = Session(engine), Session(engine)
    mine = lock(first, "order", 42, shared=shared)
    theirs = lock(second, "order", 42 if shared else 43, shared=shared)
    mine.__enter__()
    in_thread(theirs.__enter__)
    assert held(store) == 2
    in_thread(lambda: mine.__exit__(None, None, None))
    assert held(store) == 1
    theirs.__exit__(None, None, None)
    assert held(store) == 0
    first.close()
    second.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_async_block_that_is_left_in_another_task_releases_its_lease(
    make_async_engine: Callable[..., Any], store: MemoryBackend, shared: bool
) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession

    async with AsyncSession(make_async_engine("aiosqlite")) as session:
        block = alock(session, "order", 42, shared=shared)
        await asyncio.create_task(block.__aenter__())
        session.add(Counter(name="dependency"))
        await session.commit()
        assert held(store) == 1
        await asyncio.create_task(block.__aexit__(None, None, None))
        assert held(store) == 0
