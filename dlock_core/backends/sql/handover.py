"""A call that one thread hands over to another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from dlock_core.runtime import BLOCKING, Asyncio

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.runtime import Runtime

__all__ = ["Handover", "handed_over"]

T = TypeVar("T")


class Handover(Generic[T]):
    """A call that another thread performs, unless its caller gives it up before it has begun.

    `concurrent.futures.Future` has a mutex, and a signal handler that raises in the caller's thread may leave that
    locked: `Condition.__enter__` is a Python function, which can be interrupted after it has acquired the mutex. The
    other thread, and every call that waits for this thread, would then hang. Here nothing has to be unlocked.
    """

    is_over = False

    def __init__(self, runtime: Runtime, function: Callable[[], T]) -> None:
        # The other thread works in real time, even if the caller's clock is one that a test advances.
        self._runtime = runtime if isinstance(runtime, Asyncio) else BLOCKING
        self._signal = self._runtime.signal()
        self._not_begun = [function]
        """Emptied by whoever comes first: the thread that begins the call, or the caller who gives it up."""
        self._answer: T
        self._error: BaseException | None = None

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
        self._signal.set()

    def give_up(self) -> bool:
        """Return True if the call will never begin; False if it has begun."""
        try:
            self._not_begun.pop()
        except IndexError:
            return False
        return True

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until the call is over, even while the task is being cancelled; return False after `seconds`."""
        return self.is_over or await self._runtime.shield(self._runtime.wait(self._signal, seconds))

    def outcome(self) -> T:
        """Return what the function has returned, or raise what it has raised, once."""
        error, self._error = self._error, None  # The traceback of the error has a reference to this object.
        if error is not None:
            raise error
        return self._answer


async def handed_over(runtime: Runtime, begin: Callable[[Handover[T]], object], function: Callable[[], T]) -> T:
    """Return the outcome of a call that `begin` gives to another thread; at the end it is over, or never begins.

    A driver's call cannot be stopped from outside, only its connection can be destroyed. If a task that is cancelled,
    or a signal handler that raises, went on while the thread is still working, the next step would get the connection
    in the middle of this one, and would undo it before it is done.
    """
    call = Handover(runtime, function)
    try:
        begin(call)
        await call.wait()
    except BaseException:
        if not call.give_up():
            await call.wait()
        raise
    return call.outcome()
