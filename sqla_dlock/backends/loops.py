"""An event loop in a separate thread, in which the connections of an asyncio driver live.

A connection of an asyncio driver belongs to one event loop. Leases do not: the watchdog renews them from its thread,
and a program may have several loops, one after the other or at once.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.util import greenlet_spawn

from dlock_core.backends.sql import handed_over, perform
from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, start_thread
from dlock_core.scheduler import after_fork_in_child
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.runtime import Runtime

__all__ = ["Loop"]

T = TypeVar("T")

CANCEL_AGAIN_S: Final = 0.5
"""Seconds after which a cancelled call that still waits is cancelled again."""


class Loop:
    """The loop; it runs as long as it has a connection or a call."""

    def __init__(self) -> None:
        self.begin()
        after_fork_in_child(self.begin)

    def begin(self) -> None:
        """Start empty; also in a forked child, which does not have its parent's threads."""
        self._inside: set[object] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Call a blocking function in SQLAlchemy's greenlet, to its end even if the task is cancelled."""
        # The garbage collector may run in the loop's own thread, and so may the finalizer that closes the connections
        # of a collected store. The loop cannot wait for itself: the connection is closed later, and there is no result.
        if not isinstance(runtime, Asyncio) and asyncio._get_running_loop() is self._loop is not None:  # noqa: SLF001 - the public one raises elsewhere
            self.spawn(partial(function, *args))
            return None  # type: ignore[return-value]
        return await handed_over(runtime, partial(self._begin, partial(function, *args)))

    def within(self, limit: float, function: Callable[[], T]) -> T:
        """Call a function inside a greenlet, within `limit` seconds; raises TimeoutError."""
        return await_(_within(limit, greenlet_spawn(function)))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a non-blocking function in the loop."""
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(function)

    def spawn(self, function: Callable[[], object]) -> None:
        """Call a function inside a greenlet, and do not wait for it."""
        outcome: Future[object] = Future()
        try:
            self._begin(function, outcome)
        except BaseException:
            outcome.cancel()  # So that the call leaves the loop if it has not begun.
            raise

    def read(
        self, number: int, come: Callable[[], list[str]], heard: Callable[[str], None], ended: Callable[[], None]
    ) -> None:
        """Call `heard` with the received data whenever a socket is readable, until `come` raises."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                for one in come():
                    heard(one)
            except Exception:  # noqa: BLE001 - any error means that the connection has ended
                loop.remove_reader(number)
                ended()

        loop.add_reader(number, read)

    def enter(self, guest: object) -> asyncio.AbstractEventLoop:
        """Keep the loop running until this guest, a connection or a call, leaves."""
        # No mutex: a signal handler that interrupted its owner would wait for the loop, and the loop for that mutex.
        self._inside.add(guest)  # From now on the loop cannot end.
        return self._loop or self._start()

    def _start(self) -> asyncio.AbstractEventLoop:
        started = asyncio.new_event_loop()
        try:
            start_thread(threading.Thread(target=_run, args=(started,), name="dlock-database-loop", daemon=True))
            self._loop = loop = self._loop or started  # A thread or a signal handler may have started another.
            return loop
        finally:
            if self._loop is not started:  # After an interrupt, too: the thread may be running.
                started.call_soon_threadsafe(started.stop)

    def leave(self, guest: object) -> None:
        """Leave the loop, which ends when it is empty.

        A connection may be closed twice, by a step that failed on it and by the driver, which reports its end. If the
        guests were only counted, the loop would end while another guest is inside, which would never get an answer.
        """
        self._inside.discard(guest)
        if not self._inside and self._loop is not None:
            loop, self._loop = self._loop, None  # Nothing is called before this: a later caller starts another.
            loop.call_soon_threadsafe(loop.stop)

    def _begin(self, function: Callable[[], T], outcome: Future[T]) -> None:
        outcome.add_done_callback(self.leave)  # First: an interrupt may prevent what comes next.
        loop = self.enter(outcome)
        loop.call_soon_threadsafe(lambda: loop.create_task(greenlet_spawn(perform, outcome, function)))


async def _within(limit: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.wait_for`, but cancel repeatedly: the clean-up may wait for the same silent server."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait([task], timeout=limit)
    if task.done():
        return task.result()
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    try:
        return task.result()  # it arrived at this very moment
    except (Exception, asyncio.CancelledError) as error:
        raise TimeoutError(f"no answer within {format_seconds(limit)}") from error


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Cancel what a driver has left running, such as asyncpg's request to a silent server to cancel a statement."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
