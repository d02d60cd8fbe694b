"""A call that one thread hands over to another."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dlock_core.runtime import Asyncio, Wakeup, refuse_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.runtime import Runtime

__all__ = ["Handover", "handed_over"]

T = TypeVar("T")

LOOK_AGAIN_S: Final = 1.0
"""Seconds after which a caller looks itself whether its call is over.

A signal handler that raises in asyncio's own code may lose the wake-up, and none comes in a child that a handler forks.
"""


class Handover(Generic[T]):
    """A call that another thread performs, unless its caller gives it up before it has begun.

    `concurrent.futures.Future` has a mutex, and a signal handler that raises in the caller's thread may leave that
    locked: `Condition.__enter__` is a Python function, which can be interrupted after it has acquired the mutex. The
    other thread, and every call that waits for this thread, would then hang. Here nothing has to be unlocked.
    """

    is_over = False

    def __init__(self, function: Callable[[], T]) -> None:
        self._not_begun = [function]
        """Emptied by the first of two: the thread that begins the call, or the caller that gives it up."""
        self._answer: T
        self._error: BaseException | None = None
        self._wakeup, self._pid = Wakeup(), os.getpid()
        self._future: asyncio.Future[None] | None = None
        """What a task waits for: not another task, which a program that cancels all of them would cancel, too."""

    def perform(self) -> None:
        """Call the function in this thread, unless that was given up."""
        try:
            function = self._not_begun.pop()
        except IndexError:
            return
        try:
            self._answer = function()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self._error = error
        self.is_over = True
        self._wakeup.set()
        if (future := self._future) is not None:
            with suppress(RuntimeError):  # Its loop is closed.
                future.get_loop().call_soon_threadsafe(_wake, future)

    def give_up(self) -> bool:
        """Return True if the call will never begin; False if it has begun."""
        try:
            self._not_begun.pop()
        except IndexError:
            return False
        return True

    def wait(self, seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Block until the call is over; return False after `seconds`."""
        return self.is_over or self._wakeup.wait(seconds)

    async def ended(self, runtime: Runtime) -> None:
        """Wait until the call is over, even while the task is being cancelled; raise RuntimeError in a forked child."""
        if not isinstance(runtime, Asyncio):
            while not self.wait(LOOK_AGAIN_S):
                self._refuse_in_child()
            return
        self._future = future = asyncio.get_running_loop().create_future()
        cancelled: asyncio.CancelledError | None = None
        while not self.is_over:
            try:
                await asyncio.wait([future], timeout=LOOK_AGAIN_S)
            except asyncio.CancelledError as error:
                cancelled = error
            self._refuse_in_child()
        if cancelled is not None:
            raise asyncio.CancelledError(*cancelled.args) from None

    def can_be_awaited(self, runtime: Runtime) -> bool:
        """Return False in a child that a handler has forked meanwhile, and in a task whose event loop has ended."""
        has_loop = not isinstance(runtime, Asyncio) or asyncio._get_running_loop() is not None  # noqa: SLF001 - documented for event loops
        return has_loop and self._pid == os.getpid()

    def _refuse_in_child(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(f"process {self._pid}, which forked this one, has begun this call")

    def outcome(self) -> T:
        """Return what the function has returned, or raise what it has raised, once."""
        error, self._error = self._error, None  # The traceback of the error has a reference to this object.
        try:
            if error is not None:
                raise error
            return self._answer
        finally:
            del error  # It has one to this frame, too.


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def handed_over(runtime: Runtime, begin: Callable[[Handover[T]], object], function: Callable[[], T]) -> T:
    """Return the outcome of a call that `begin` gives to another thread; at the end it is over, or never begins.

    A driver's call cannot be stopped from outside, only its connection can be destroyed. If a task that is cancelled,
    or a signal handler that raises, went on while the thread is still working, the next step would get the connection
    in the middle of this one, and would undo it before it is done.
    """
    refuse_at_exit()
    call, interrupt = Handover(function), None
    while True:  # Further interrupts are waited out, too, and the last one is raised. All calls are inside the `try`.
        try:
            if interrupt is None:
                begin(call)
            elif call.is_over or call.give_up() or not call.can_be_awaited(runtime):
                break
            await call.ended(runtime)
            if interrupt is None:
                return call.outcome()
        except GeneratorExit:  # In it, nothing can be awaited.
            call.give_up()
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised below
            interrupt = error
    try:
        raise interrupt
    finally:
        del interrupt  # Its traceback has a reference to this frame, which would keep the store until a collection.
