"""A signal handler that raises while work is handed to another thread leaves neither a lease nor a thread."""

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from dlock_core import AsyncLock, Lock
from dlock_core.backends.sql import handed_over
from dlock_core.backends.table.backend import TableBackend
from dlock_core.runtime import ASYNCIO, BLOCKING, run, start_thread
from sqla_dlock.backends.table import from_engine
from tests.interrupts import SoftLimit, each_line
from tests.table_stores import URLS, server_of
from tests.waiting import until

pytestmark = [
    pytest.mark.usefixtures("garbage_is_collected"),
    # An interrupt in the end of a connection leaves it to the garbage collector, which closes it and warns.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HANDS_OVER = ("/dlock_core/backends/sql/threads.py", "/sqla_dlock/backends/loops.py", "/concurrent/futures/thread.py")
ASYNCIOS = ("/asyncio/base_events.py", "/asyncio/selector_events.py")


def loop_threads() -> int:
    return sum(thread.name == "dlock-database-loop" for thread in threading.enumerate())


@pytest.fixture(params=["asyncpg", "psycopg"])
def store(request: pytest.FixtureRequest) -> Iterator[TableBackend]:
    request.getfixturevalue(server_of("postgresql"))
    make: Any = create_async_engine if request.param == "asyncpg" else create_engine
    store = from_engine(make(URLS[request.param]))
    yield store
    store.close()


@pytest.mark.timeout(300)
def test_interrupt_while_work_is_handed_over_leaves_no_lease_and_no_thread(store: TableBackend) -> None:
    name = f"interrupts:{secrets.token_hex(4)}"

    async def in_task() -> None:
        async with AsyncLock(store, name, ttl=30, wait=0):
            pass

    def work() -> None:
        store.close()  # The next step opens a connection, and the loop begins anew.
        if asynchronous:
            asyncio.run(in_task())
        else:
            with Lock(store, name, ttl=30, wait=0):
                pass

    asynchronous = not hasattr(store.pool.connector, "_loop")
    places = 0
    for line, _, _ in each_line(work, HANDS_OVER if asynchronous else (*HANDS_OVER, *ASYNCIOS)):
        places += 1
        assert not [each for each in run(store.inspect(BLOCKING, name)) if each.holders], line
    assert places > 20
    store.close()
    until(lambda: not loop_threads())


@pytest.mark.parametrize("runtime", [BLOCKING, ASYNCIO])
def test_work_that_has_begun_is_over_when_the_interrupt_goes_on(runtime: Any) -> None:
    begun, interrupted, told = threading.Event(), threading.Event(), list[str]()

    def work(outcome: Future[None]) -> None:
        outcome.set_running_or_notify_cancel()
        begun.set()
        interrupted.wait(30)
        told.append("over")
        outcome.set_result(None)

    def begin(outcome: Future[None]) -> None:
        start_thread(threading.Thread(target=work, args=(outcome,)))
        begun.wait()
        told.append("interrupted")
        interrupted.set()
        raise SoftLimit

    async def hand_over() -> None:
        await handed_over(runtime, begin)

    with pytest.raises(SoftLimit):
        run(hand_over()) if runtime is BLOCKING else asyncio.run(hand_over())
    assert told == ["interrupted", "over"]


def test_work_that_has_not_begun_never_begins_after_an_interrupt() -> None:
    queue: list[Future[None]] = []

    def begin(outcome: Future[None]) -> None:
        queue.append(outcome)
        raise SoftLimit

    with pytest.raises(SoftLimit):
        run(handed_over(BLOCKING, begin))
    assert not queue[0].set_running_or_notify_cancel()
