"""Where a blocking driver runs: in the caller's thread, or in our own for a task; and the thread that reads NOTIFY."""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.backends.sql.handover import Handover, handed_over
from dlock_core.errors import format_seconds
from dlock_core.runtime import BLOCKING, Asyncio, run, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.connection import Connection
    from dlock_core.runtime import Runtime

__all__ = ["in_threads", "notifications", "read_in_thread", "within"]

T = TypeVar("T")

MAX_THREADS: Final = 1000
"""The threads for the tasks of a process: more than a database has connections, because each waiter keeps one.

They are not the event loop's, which may all be waiting for our locks."""

_executors: dict[int, ThreadPoolExecutor] = {}


async def in_threads(runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function, to its end even if the task is cancelled: until then its connection is in use."""
    if not isinstance(runtime, Asyncio):
        return function(*args)
    return await handed_over(runtime, lambda call: _executor().submit(call.perform), partial(function, *args))


def _executor() -> ThreadPoolExecutor:
    executor = _executors.get(os.getpid())  # a forked child has none of its parent's threads
    if executor is None:
        executor = _executors.setdefault(os.getpid(), ThreadPoolExecutor(MAX_THREADS, "dlock-database"))
    return executor


def within(limit: float, connect: Callable[[], Connection]) -> Connection:
    """Open a connection within `limit` seconds, even if its driver has no limits.

    A connection for which the caller no longer waits, because it is late or a signal handler has raised, is closed.
    """
    opened: list[Connection] = []  # Whoever takes the connection out of this list closes it.
    is_awaited = True

    def open_one() -> None:
        opened.append(connect())
        if not is_awaited:
            _close_late(opened)

    call = Handover(BLOCKING, open_one)
    try:
        start_thread(threading.Thread(target=call.perform, name="dlock-database-connect", daemon=True))
        if run(call.wait(limit)):
            call.outcome()
            return opened[0]
        is_awaited = False
        if (connection := _taken(opened)) is not None:  # It was opened at this very moment.
            return connection
    except BaseException:
        is_awaited = False
        _close_late(opened)
        raise
    raise TimeoutError(f"no connection within {format_seconds(limit)}")


def _close_late(opened: list[Connection]) -> None:
    if (connection := _taken(opened)) is not None:
        connection.close()


def _taken(opened: list[Connection]) -> Connection | None:
    try:
        return opened.pop()
    except IndexError:  # It is not open, or the other thread has taken it.
        return None


def read_in_thread(connection: Connection, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
    """Report each notification on a connection until it is aborted; it cannot be used otherwise from now on."""
    args = (connection, heard, ended)
    start_thread(threading.Thread(target=_read, args=args, name="dlock-database-listen", daemon=True))


def _read(connection: Connection, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
    with suppress(Exception):  # Any error means that the connection has ended.
        coming = select.poll()  # select() does not support file numbers above 1023
        coming.register(connection.driver, select.POLLIN)
        while True:
            coming.poll()
            for payload in notifications(connection.driver):
                heard(payload)
    connection.close()
    ended()


def notifications(driver: Any) -> list[str]:
    """Return the received notifications; raises the driver's error if the connection has ended."""
    if hasattr(driver, "pgconn") and hasattr(driver.pgconn, "consume_input"):
        driver.pgconn.consume_input()
        return [notify.extra.decode() for notify in iter(driver.pgconn.notifies, None)]
    driver.poll()  # psycopg2
    found, driver.notifies[:] = list(driver.notifies), []
    return [notify.payload for notify in found]
