"""Where a blocking driver runs: in the caller's thread, or in our own for a task; and the thread that reads NOTIFY."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.connection import Connection
    from dlock_core.runtime import Runtime

__all__ = ["handed_over", "in_threads", "perform", "within"]

T = TypeVar("T")

MAX_THREADS: Final = 1000
"""The threads for the tasks of a process: more than a database has connections, because each waiter keeps one.

They are not the event loop's, which may all be waiting for our locks."""

_executors: dict[int, ThreadPoolExecutor] = {}


async def in_threads(runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function, to its end even if the task is cancelled: until then its connection is in use."""
    if not isinstance(runtime, Asyncio):
        return function(*args)
    return await handed_over(runtime, lambda outcome: _executor().submit(perform, outcome, function, *args))


async def handed_over(runtime: Runtime, begin: Callable[[Future[T]], object]) -> T:
    """Return the outcome of what `begin` has another thread do, which is over or never begins when this ends.

    A driver's call cannot be stopped from outside, only its connection can be destroyed. If a task that is cancelled,
    or a signal handler that raises, went on while the thread is still working, the next step would get the connection
    in the middle of this one, and would undo it before it is done.
    """
    outcome: Future[T] = Future()
    try:
        begin(outcome)
        return await _outcome(runtime, outcome)
    except BaseException:
        if not outcome.done() and not outcome.cancel():
            with suppress(Exception):
                await _outcome(runtime, outcome)
        raise


async def _outcome(runtime: Runtime, outcome: Future[T]) -> T:
    if isinstance(runtime, Asyncio):
        return await runtime.shield(asyncio.wrap_future(outcome))  # type: ignore[arg-type]  # A future needs no task.
    return outcome.result()


def perform(outcome: Future[T], function: Callable[..., T], *args: Any) -> None:
    """Call a function that was handed over, unless this was given up, and report its outcome."""
    if outcome.set_running_or_notify_cancel():
        try:
            answer = function(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the outcome
            outcome.set_exception(error)
        else:
            outcome.set_result(answer)


def _executor() -> ThreadPoolExecutor:
    executor = _executors.get(os.getpid())  # a forked child has none of its parent's threads
    if executor is None:
        executor = _executors.setdefault(os.getpid(), ThreadPoolExecutor(MAX_THREADS, "dlock-database"))
    return executor


def within(limit: float, connect: Callable[[], Connection]) -> Connection:
    """Open a connection within `limit` seconds, even if its driver has no limits.

    A connection for which the caller no longer waits, because it is late or a signal handler has raised, is closed.
    """
    opened: Future[Connection] = Future()
    try:
        start_thread(
            threading.Thread(target=_connect, args=(connect, opened), name="dlock-database-connect", daemon=True)
        )
        return opened.result(limit)
    except BaseException as error:
        is_late = opened.cancel()
        if isinstance(error, TimeoutError):
            if is_late:
                raise TimeoutError(f"no connection within {format_seconds(limit)}") from None
            return opened.result()  # it was opened at this very moment
        if not is_late and opened.exception() is None:  # A signal handler has raised.
            opened.result().close()
        raise


def _connect(connect: Callable[[], Connection], opened: Future[Connection]) -> None:
    try:
        connection = connect()
    except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the connection
        _settle(opened.set_exception, error)
    else:
        if not _settle(opened.set_result, connection):
            connection.close()


def _settle(settle: Callable[[Any], None], outcome: Any) -> bool:
    try:
        settle(outcome)
    except InvalidStateError:
        return False
    return True


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
