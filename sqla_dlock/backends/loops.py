"""The event loop of this process, in a thread of its own, in which the connections of asyncio drivers live.

A connection of an asyncio driver belongs to one event loop. Leases do not: the watchdog renews them from its thread,
and a program may have several loops, one after the other or at once. The loop starts with the first call and runs as
long as the process: if it ended with its last connection, a call that comes at that moment could get no answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.util import greenlet_spawn

from dlock_core.backends.sql import Handover, handed_over
from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, start_thread
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.runtime import Runtime

__all__ = ["call_in_loop", "call_soon", "read", "spawn", "within"]

T = TypeVar("T")

CANCEL_AGAIN_S: Final = 0.5
"""Seconds after which a cancelled call that still waits is cancelled again."""

_loops: Final[dict[int, asyncio.AbstractEventLoop]] = {}
"""The loop, by the process: a forked child does not have its parent's threads."""


async def call_in_loop(runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in SQLAlchemy's greenlet, to its end even if the task is cancelled."""
    # The garbage collector may run in the loop's own thread, and so may the finalizer that closes the connections of a
    # collected store. The loop cannot wait for itself: the connection is closed later, and there is no result.
    if not isinstance(runtime, Asyncio) and asyncio._get_running_loop() is _loops.get(os.getpid(), runtime):  # noqa: SLF001 - the public one raises elsewhere
        spawn(partial(function, *args))
        return None  # type: ignore[return-value]
    return await handed_over(runtime, _begin, partial(function, *args))


def within(limit: float, function: Callable[[], T]) -> T:
    """Call a function inside a greenlet, within `limit` seconds; raises TimeoutError."""
    return await_(_within(limit, Handover(function)))


def call_soon(function: Callable[[], object]) -> None:
    """Schedule a non-blocking function in the loop."""
    _running().call_soon_threadsafe(function)


def spawn(function: Callable[[], object]) -> None:
    """Call a function inside a greenlet, and do not wait for it."""
    _begin(Handover(function))


def read(number: int, come: Callable[[], list[str]], heard: Callable[[str], None], ended: Callable[[], None]) -> None:
    """Call `heard` with the received data whenever a socket is readable, until `come` raises."""
    loop = asyncio.get_running_loop()

    def read_all() -> None:
        try:
            for one in come():
                heard(one)
        except Exception:  # noqa: BLE001 - any error means that the connection has ended
            loop.remove_reader(number)
            ended()

    loop.add_reader(number, read_all)


def _begin(call: Handover[Any]) -> None:
    loop = _running()
    loop.call_soon_threadsafe(lambda: loop.create_task(greenlet_spawn(call.perform)))


def _running() -> asyncio.AbstractEventLoop:
    return _loops.get(os.getpid()) or _started()


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    try:
        start_thread(threading.Thread(target=_run, args=(loop,), name="dlock-database-loop", daemon=True))
        return _loops.setdefault(os.getpid(), loop)  # A thread or a signal handler may have started another.
    finally:
        if _loops.get(os.getpid()) is not loop:  # After an interrupt, too: the thread may be running.
            loop.call_soon_threadsafe(loop.stop)


async def _within(limit: float, call: Handover[T]) -> T:
    """Like `asyncio.wait_for`, but cancel repeatedly: the clean-up may wait for the same silent server."""
    task = asyncio.ensure_future(greenlet_spawn(call.perform))
    await asyncio.wait([task], timeout=limit)
    if task.done():
        return call.outcome()
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    try:
        return call.outcome()  # it arrived at this very moment
    except (Exception, asyncio.CancelledError) as error:
        raise TimeoutError(f"no answer within {format_seconds(limit)}") from error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    is_stopped = False
    while not is_stopped:
        with suppress(BaseException):  # asyncio raises a SystemExit here, too, which a driver's callback may raise.
            loop.run_forever()
            is_stopped = True
    loop.close()
