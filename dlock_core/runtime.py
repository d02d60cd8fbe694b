"""How we wait: by blocking the thread, or by yielding to asyncio.

Every algorithm is written once, as a coroutine that awaits only a runtime. With `Blocking` nothing ever suspends, so
`run` finishes the coroutine with a single send and no event loop. The clock comes from the runtime as well, so that a
test can turn it by hand.
"""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["ASYNCIO", "BLOCKING", "Asyncio", "Blocking", "Runtime", "Signal", "blocking", "clock", "run"]

T = TypeVar("T")
P = ParamSpec("P")

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # a suspended machine's leases run out, too


_behind: Final[set[asyncio.Future[Any]]] = set()

clock: Final = partial(time.clock_gettime, _CLOCK)
"""Gives seconds on a clock that never steps back and goes on while the machine sleeps."""


class Signal(Protocol):
    """A private wake-up: set once, from any thread."""

    def set(self) -> None:
        """Wake whoever waits for it."""


class Runtime(Protocol):
    """A way to wait."""

    def now(self) -> float:
        """Give the monotonic time in seconds."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a client's function and wait for its answer."""

    async def sleep(self, seconds: float) -> None:
        """Wait for a time."""

    def signal(self) -> Signal:
        """Make a wake-up that belongs to this thread or task."""

    async def wait(self, signal: Any, seconds: float) -> bool:
        """Wait until the signal is set (True), or for a time (False)."""

    def shield(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Finish a clean-up, even while the task is being cancelled."""

    def behind(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Have a clean-up finished while the caller goes on; it must not raise."""


class Blocking:
    """Waits by blocking the thread; nothing it awaits ever suspends."""

    now = staticmethod(clock)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        answer = function(*args)
        if hasattr(answer, "__await__"):  # a coroutine object is truthy: it would pass for a granted lease
            raise TypeError("an asyncio client was given to a blocking lock: use AsyncLock, or a blocking client")
        return answer

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this is what blocking means

    def signal(self) -> threading.Event:
        return threading.Event()

    async def wait(self, signal: Any, seconds: float) -> bool:
        return bool(signal.wait(min(seconds, threading.TIMEOUT_MAX)))

    def shield(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return coroutine

    def behind(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        threading.Thread(target=run, args=(coroutine,), name="dlock-behind", daemon=True).start()


class _LoopEvent(asyncio.Event):
    """An asyncio event that other threads may set."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = asyncio.get_running_loop()

    def set(self) -> None:
        if not self._owner.is_closed():
            self._owner.call_soon_threadsafe(super().set)


class Asyncio:
    """Waits by yielding to the event loop."""

    now = staticmethod(clock)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        answer = function(*args)
        if not isawaitable(answer):
            raise TypeError("a blocking client was given to an AsyncLock: use Lock, or an asyncio client")
        return await answer

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def signal(self) -> _LoopEvent:
        return _LoopEvent()

    async def wait(self, signal: Any, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return bool(await signal.wait())
        except TimeoutError:
            return False

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coroutine)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:  # told to hurry, but a half-done clean-up is an orphan
                cancelled = error
        if cancelled is not None:
            raise cancelled from None if task.cancelled() else task.exception()
        return task.result()

    def behind(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(coroutine)
        _behind.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(_behind.discard)


BLOCKING = Blocking()
ASYNCIO = Asyncio()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Finish a coroutine that never suspends, with no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        coroutine.close()
    raise RuntimeError("a blocking call tried to suspend: an asyncio runtime was given to it")


def blocking(step: Callable[Concatenate[Runtime, P], Coroutine[Any, Any, T]], *args: P.args, **options: P.kwargs) -> T:
    """Finish a step of the engine in this thread."""
    return run(step(BLOCKING, *args, **options))
