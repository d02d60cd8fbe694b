"""Where a blocking driver runs: in the caller's thread, or in our own for a task; and the thread that reads NOTIFY."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.backends.sql.handover import Handover, handed_over
from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, refuse_at_exit, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.connection import Connection
    from dlock_core.runtime import Runtime

__all__ = ["in_threads", "notifications", "read_in_thread", "within"]

T = TypeVar("T")

MAX_THREADS: Final = 1000
"""The threads for the tasks of a process: more than a database has connections, because each waiter keeps one.

They are not the event loop's, which may all be waiting for our locks."""


class WorkerThreads:
    """Threads that perform calls: an idle one, or a new one.

    `ThreadPoolExecutor.submit` has mutexes that a signal handler which raises may leave locked (see `Handover`), one of
    them in common with all executors of the process; and the end of the interpreter waits for its threads.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Handover[Any]] = SimpleQueue()
        self._threads: set[int] = set()
        self._idle: set[int] = set()

    def perform(self, call: Handover[Any]) -> None:
        """Hand a call to an idle thread, or to a new one; return at once."""
        self._calls.put(call)
        self._ensure()

    def _ensure(self) -> None:
        """Start a thread if more calls are waiting than threads are idle.

        A caller that has added a call and a thread that has taken one both check, each after its own change. So a call
        that was added while the thread still counted as idle is seen by the thread.
        """
        if self._calls.qsize() > len(self._idle) and len(self._threads) < MAX_THREADS:
            start_thread(threading.Thread(target=self._serve, name="dlock-database", daemon=True))

    def _serve(self) -> None:
        me = threading.get_ident()
        self._threads.add(me)
        while True:
            self._idle.add(me)
            call = self._calls.get()
            self._idle.discard(me)
            with suppress(RuntimeError):  # There can be no more threads: the others will take the calls.
                self._ensure()
            call.perform()
            del call


_threads: Final[dict[int, WorkerThreads]] = {}
"""The threads, by the process: a forked child has none of its parent's."""


async def in_threads(runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function, to its end even if the task is cancelled: until then its connection is in use."""
    if not isinstance(runtime, Asyncio):
        return function(*args)
    threads = _threads.get(os.getpid()) or _threads.setdefault(os.getpid(), WorkerThreads())
    return await handed_over(runtime, threads.perform, partial(function, *args))


def within(limit: float, connect: Callable[[], Connection]) -> Connection:
    """Open a connection within `limit` seconds, even if its driver has no limits.

    A connection for which the caller no longer waits, because it is late or a signal handler has raised, is closed.
    Raises OSError if no thread can be started.
    """
    opened: list[Connection] = []  # The thread that takes the connection out of this list uses or closes it.
    is_awaited = True

    def open_one() -> None:
        opened.append(connect())
        if not is_awaited:
            _close_late(opened)

    call = Handover(open_one)
    try:
        _start(call)
        if call.wait(limit):
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


def _start(call: Handover[None]) -> None:
    refuse_at_exit()
    try:
        start_thread(threading.Thread(target=call.perform, name="dlock-database-connect", daemon=True))
    except RuntimeError as error:  # There can be no more threads.
        raise OSError(f"it cannot be connected to: {error}") from error


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
