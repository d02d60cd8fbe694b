"""A blocking acquire in a running event loop is refused before any I/O: it would stop every task, even the holder's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.test import override_settings
from sqlalchemy.orm import Session

import django_dlock
import sqla_dlock.stores
from dlock_core import AsyncLock, Lock, MultiLock
from dlock_core.backends.memory import MemoryBackend
from dlock_core.stores import Store


@pytest.fixture
def makers() -> Any:
    """Ways to make a blocking lock on one store, by name."""
    backend = MemoryBackend()
    sqla = {"store": backend, "fence": False}
    with override_settings(DLOCK={"default": {"BACKEND": backend}}):
        yield {
            "core": lambda: Lock(backend, "order:42"),
            "several": lambda: MultiLock(backend, ["order:42", "order:43"]),
            "django": lambda: django_dlock.lock("order", 42, fence=False),
            "django together": lambda: django_dlock.lock(
                django_dlock.lock("a", fence=False), django_dlock.lock("b", fence=False)
            ),
            "sqlalchemy": lambda: sqla_dlock.lock(Session(), "order", 42, **sqla),
            "sqlalchemy together": lambda: sqla_dlock.lock(
                sqla_dlock.lock(Session(), "a", **sqla), sqla_dlock.lock(Session(), "b", **sqla)
            ),
        }


KINDS = ["core", "several", "django", "django together", "sqlalchemy", "sqlalchemy together"]


def refused(kind: str) -> Any:
    expected = SynchronousOnlyOperation if kind.startswith("django") else RuntimeError
    return pytest.raises(expected, match=r"would stop the event loop while it waits.*(use|await) ")


@pytest.mark.parametrize("kind", KINDS)
async def test_blocking_acquire_in_a_coroutine_is_refused(makers: Any, kind: str) -> None:
    lock = makers[kind]()
    with refused(kind), lock:
        pass
    with refused(kind):
        lock.acquire()


@pytest.mark.parametrize("kind", KINDS)
async def test_thread_of_a_coroutine_may_block(makers: Any, kind: str) -> None:
    def hold() -> None:
        with makers[kind]():
            pass

    await asyncio.to_thread(hold)
    await sync_to_async(hold)()


@pytest.mark.parametrize("kind", KINDS)
def test_coroutine_that_blocking_code_runs_is_a_coroutine(makers: Any, kind: str) -> None:
    async def hold() -> None:
        with refused(kind), makers[kind]():
            pass

    async_to_sync(hold)()
    with makers[kind]():  # no loop is running any more
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_environment_allows_it_for_notebooks(makers: Any, kind: str, monkeypatch: Any) -> None:
    variable = "DJANGO_ALLOW_ASYNC_UNSAFE" if kind.startswith("django") else "DLOCK_ALLOW_ASYNC_UNSAFE"
    monkeypatch.setenv(variable, "1")
    with makers[kind]():
        pass


async def test_one_try_that_waits_for_nobody_is_allowed() -> None:
    backend = MemoryBackend()
    lease = Lock(backend, "order:42").try_acquire()
    assert lease is not None
    lease.release()
    async with AsyncLock(backend, "order:42"):
        assert Lock(backend, "order:42").try_acquire() is None


async def test_blocking_code_under_an_async_session_waits_without_blocking(monkeypatch: Any) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    monkeypatch.setitem(sqla_dlock.stores._stores, "default", Store("default", MemoryBackend()))
    engine = create_async_engine("sqlite+aiosqlite://")

    def hold(session: Session) -> bool:
        with sqla_dlock.lock(session, "order", 42, fence=False) as lease:
            return not lease.lost

    async with AsyncSession(engine) as session:
        assert await session.run_sync(hold)
    await engine.dispose()
