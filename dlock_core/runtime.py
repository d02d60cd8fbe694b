"""How to wait: by blocking the thread, or by yielding to asyncio.

Every algorithm is written once, as a coroutine that awaits only a runtime. With `Blocking` nothing ever suspends, so
`run` finishes the coroutine with a single send and no event loop. The clock comes from the runtime as well, so that a
test can advance it by hand.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = [
    "ASYNCIO",
    "BLOCKING",
    "Asyncio",
    "Blocking",
    "DatabaseRuntime",
    "Runtime",
    "Signal",
    "Wakeup",
    "begin_task",
    "clock",
    "refuse_at_exit",
    "refuse_in_loop",
    "run",
    "start_thread",
    "within",
]

T = TypeVar("T")

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # leases of a suspended machine run out, too


_background_tasks: Final[set[asyncio.Future[Any]]] = set()

clock: Final = partial(time.clock_gettime, _CLOCK)
"""Return seconds on a clock that never steps back and keeps running while the machine is suspended."""


def refuse_in_loop(instead: str) -> None:
    """Raise RuntimeError if an event loop is running: a blocking wait there stops every task, including the holder's.

    DLOCK_ALLOW_ASYNC_UNSAFE in the environment allows it, for notebooks, whose loop runs nothing else.
    """
    # Documented for event loops: unlike get_running_loop() it raises no exception, which would cost time on each
    # acquire.
    running = asyncio._get_running_loop()  # noqa: SLF001
    if running is not None and not os.environ.get("DLOCK_ALLOW_ASYNC_UNSAFE"):
        raise RuntimeError(f"a blocking lock would stop the event loop while it waits: {instead}, or asyncio.to_thread")


class Signal(Protocol):
    """A private wake-up: set once, from any thread."""

    def set(self) -> None:
        """Wake the thread or task that waits for this signal."""


class Runtime(Protocol):
    """A way to wait."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a client's function and wait for its answer."""

    async def sleep(self, seconds: float) -> None:
        """Wait for a time."""

    def signal(self) -> Signal:
        """Return a new wake-up that belongs to this thread or task."""

    async def wait(self, signal: Any, seconds: float) -> bool:
        """Wait until the signal is set, and return True; return False after `seconds`."""

    def shield(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Finish a clean-up, even while the task is being cancelled."""

    def run_in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Finish a clean-up in the background, while the caller continues; it must not raise."""


class DatabaseRuntime(Runtime, Protocol):
    """A runtime that can also call code where the caller's database connection may be used: for integrations.

    It is one object, so that no function has to take "how to wait", "where to send statements" and "how to release at
    the end of a transaction" as three parameters that must match.
    """

    async def call_database(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that may send statements, in the thread or greenlet that owns the connection."""

    def finish(self, step: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T | None:
        """Execute `step(runtime, *args)` from code that cannot await, such as the end of a transaction.

        Returns None if the step can only be started, because the caller cannot wait for its answer.
        """


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; an exception of a signal handler is raised as it is.

    A handler that raises in `Thread.start` may leave its bookkeeping half done: the error that follows, from which it
    is cut out here, says nothing to the program. The thread may be running nevertheless.
    """
    refuse_at_exit()
    try:
        thread.start()
    except (KeyError, RuntimeError) as error:  # RuntimeError: also if there are too many threads
        if error.__context__ is not None and "start new thread" not in str(error):
            raise error.__context__ from None
        raise


def refuse_at_exit() -> None:
    """Raise RuntimeError if the interpreter is ending: its other threads no longer run, and would not answer."""
    if sys.is_finalizing():
        raise RuntimeError("the interpreter is ending: release locks before, for example in an atexit function")


class Wakeup:
    """A wake-up of one thread: a lock that can be acquired once the wake-up is set.

    `threading.Event` has a mutex, which an interrupt in `wait` could leave locked, so that `set` hangs. And
    `SimpleQueue.get` of Python 3.11 and 3.12 never ends if a signal handler returns after its timeout.
    """

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        with suppress(RuntimeError):  # It is set already.
            self._unset.release()

    def clear(self) -> None:
        self._unset.acquire(blocking=False)

    def wait(self, seconds: float) -> bool:
        if not self._unset.acquire(timeout=max(0.0, seconds)):
            return False
        self.set()  # It stays set.
        return True


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

    def signal(self) -> Wakeup:
        return Wakeup()

    async def wait(self, signal: Any, seconds: float) -> bool:
        return bool(signal.wait(min(seconds, threading.TIMEOUT_MAX)))

    def shield(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return coroutine

    async def call_database(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def finish(self, step: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return run(step(self, *args))

    def run_in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        start_thread(threading.Thread(target=run, args=(coroutine,), name="dlock-background", daemon=True))


class _LoopEvent(asyncio.Event):
    """An asyncio event that other threads may set."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = asyncio.get_running_loop()

    def set(self) -> None:
        with suppress(RuntimeError):  # The loop is closed.
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
            return bool(await within(seconds, signal.wait()))
        except TimeoutError:
            return False

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coroutine)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:  # remembered, because a half-done clean-up leaves an orphan
                cancelled = error
        if cancelled is not None:
            raise cancelled from None if task.cancelled() else task.exception()
        return task.result()

    def run_in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(coroutine)
        _background_tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(_background_tasks.discard)


BLOCKING = Blocking()
ASYNCIO = Asyncio()


class _Timeout(asyncio.Timeout):  # type: ignore[misc]
    """A timeout whose timer has no effect once it is over, even if the timer was not cancelled."""

    is_over = False

    def _on_timeout(self) -> None:
        if not self.is_over:
            super()._on_timeout()  # type: ignore[misc]


_EXPIRING: Final = asyncio.timeouts._State.EXPIRING  # type: ignore[attr-defined]  # noqa: SLF001


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    """Await this for at most this many seconds; raises TimeoutError.

    The end of `asyncio.timeout` may be interrupted: then its timer would cancel the task later, whatever the task is
    doing by then, or the request to cancel it would stay counted, and a TaskGroup could repeat it. The timer is
    disarmed before anything is called in our `finally`: a signal handler may run at each call.
    """
    timeout = _Timeout(asyncio.get_running_loop().time() + seconds)
    try:
        async with timeout:
            return await awaited
    finally:
        timeout.is_over = True
        if timeout._state is _EXPIRING:  # type: ignore[attr-defined]  # It has cancelled the task, and not taken it back.
            timeout._task.uncancel()  # type: ignore[attr-defined]  # noqa: SLF001


def begin_task(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Begin a task that serves many callers of the running loop, in a new context.

    So the task does not keep the contents of the first caller's context, such as a request, alive; and asyncio does not
    complain if the loop is closed while the task waits.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - as asyncio.gather does it
    return task


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends to its end, without an event loop.

    Nothing is called between the end of the coroutine and our return: signal handlers run after calls, and one that
    raised there would lose the result, which may be a lease.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a blocking call tried to suspend: an asyncio runtime was given to it")


RNG: Final = random.SystemRandom()
"""A separate source of jitter, so that a program which seeds `random` gets the numbers that it expects."""


def full_jitter(attempt: int, draw: float, *, base: float = 0.01, cap: float = 1.0) -> float:
    """Return the seconds to wait after the failed attempt number `attempt` (1 is the first).

    A uniform choice between 0 and a limit that is `base` and doubles with each attempt, up to `cap`, so that attempts
    which have collided spread out. Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    doublings = min(attempt - 1, 60)  # beyond it every cap is reached, and a float would overflow
    return draw * min(cap, base * 2.0**doublings)
