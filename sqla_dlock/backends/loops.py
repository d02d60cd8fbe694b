"""An event loop in a separate thread, in which the connections of an asyncio driver live.

A connection of an asyncio driver belongs to one event loop. Leases do not: the watchdog renews them from its thread,
and a program may have several loops, one after the other or at once.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.util import greenlet_spawn

from dlock_core.backends.sql import Handover, handed_over
from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, clock, start_thread
from dlock_core.scheduler import after_fork_in_child
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.runtime import Runtime

__all__ = ["Loop"]

T = TypeVar("T")

CANCEL_AGAIN_S: Final = 0.5
"""Seconds after which a cancelled call that still waits is cancelled again."""
EXIT_LIMIT_S: Final = 1.0
"""Seconds for which the end of the interpreter waits for the calls of all loops."""
EXIT_DELAY_S: Final = 0.2
"""Seconds by which calls of other threads are delayed at the exit: nearly always, Python has ended them by then."""

_open_loops: Final[set[asyncio.AbstractEventLoop]] = set()
"""The loops of this process; a forked child begins without any."""


@after_fork_in_child
def _leave_to_parent() -> None:
    """In a forked child, disarm the finalizers of loops: they would change the set of sockets that the parent polls."""
    for loop in _open_loops:
        with suppress(AttributeError):  # of other loops than asyncio's own
            loop._closed = True  # type: ignore[attr-defined]  # noqa: SLF001
    _open_loops.clear()


class _Exit:
    """The end of the interpreter."""

    delays_until = -math.inf
    """Until when calls of other threads than the main thread are delayed."""


class Loop:
    """The loop of one store; it starts with the first call, and runs as long as something refers to this object.

    Each store has its own, so that a blocking event listener of one engine delays no other engine's leases.
    """

    def __init__(self) -> None:
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}
        """The loop, by the process: a forked child does not have its parent's threads."""

    def __del__(self) -> None:
        # No call can come any more: connections and the callers of this loop refer to this object.
        if (loop := self._loops.get(os.getpid())) is not None and not sys.is_finalizing():
            loop.call_soon_threadsafe(loop.stop)

    async def call(self, runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Call a blocking function in SQLAlchemy's greenlet, to its end even if the task is cancelled."""
        # The garbage collector may run in the loop's own thread, and so may the finalizer that closes the connections
        # of a collected store. The loop cannot wait for itself: the connection is closed later, and there is no result.
        running = asyncio._get_running_loop()  # noqa: SLF001 - the public one raises elsewhere
        if not isinstance(runtime, Asyncio) and running is not None and running is self._loops.get(os.getpid()):
            self.spawn(partial(function, *args))
            return None  # type: ignore[return-value]
        if clock() < _Exit.delays_until and threading.current_thread() is not threading.main_thread():
            await runtime.sleep(EXIT_DELAY_S)
        return await handed_over(runtime, self._begin, partial(function, *args))

    def within(self, limit: float, function: Callable[[], T]) -> T:
        """Call a function inside a greenlet, within `limit` seconds; raises TimeoutError."""
        return await_(_within(limit, Handover(function)))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a non-blocking function in the loop."""
        self._running().call_soon_threadsafe(function)

    def spawn(self, function: Callable[[], object]) -> None:
        """Call a function inside a greenlet, and do not wait for it."""
        self._begin(Handover(function))

    def read(
        self, number: int, come: Callable[[], list[str]], heard: Callable[[str], None], ended: Callable[[], None]
    ) -> None:
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

    def _begin(self, call: Handover[Any]) -> None:
        loop = self._running()
        loop.call_soon_threadsafe(lambda: loop.create_task(greenlet_spawn(call.perform)))

    def _running(self) -> asyncio.AbstractEventLoop:
        return self._loops.get(os.getpid()) or self._started()

    def _started(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        try:
            start_thread(threading.Thread(target=_run, args=(loop,), name="dlock-database-loop", daemon=True))
            return self._loops.setdefault(os.getpid(), loop)  # A thread or a signal handler may have started another.
        finally:
            if self._loops.get(os.getpid()) is not loop:  # After an interrupt, too: the thread may be running.
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
    _open_loops.add(loop)
    while not is_stopped:
        with suppress(BaseException):  # asyncio raises a SystemExit here, too, which a driver's callback may raise.
            loop.run_forever()
            is_stopped = True
    try:
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        _open_loops.discard(loop)
        loop.close()


@atexit.register
def _wait_for_tasks() -> None:
    """Let the loops finish what they do in the background, such as closing a connection, before the interpreter ends.

    Python ends a thread that wants to go on after that. If the thread is inside a greenlet, the process crashes. So
    other threads begin nothing more for a moment. Later they may: a function that the program calls at the exit may
    wait for such a thread.
    """
    _Exit.delays_until = clock() + 2 * EXIT_LIMIT_S
    waiting = []
    for loop in list(_open_loops):
        done: Future[None] = Future()
        with suppress(RuntimeError):  # The loop has just ended.
            loop.call_soon_threadsafe(_report_done, done)
            waiting.append(done)
    wait(waiting, EXIT_LIMIT_S)


def _report_done(done: Future[None]) -> None:
    task = asyncio.ensure_future(_tasks_done(EXIT_LIMIT_S))
    task.add_done_callback(lambda _: done.set_result(None))


async def _tasks_done(limit: float) -> None:
    if others := _other_tasks():
        await asyncio.wait(others, timeout=limit)


async def _end_tasks() -> None:
    """Cancel what a driver has left running, such as asyncpg's request to a silent server to cancel a statement."""
    for task in _other_tasks():
        task.cancel()
    await _tasks_done(CANCEL_AGAIN_S)


def _other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}
