"""A runtime whose clock a test advances: the waits and retries of the engine take no time and always go the same way."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from dlock_core.leases.handles import Lease
from dlock_core.runtime import run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.leases.lock import Lock

__all__ = ["ManualRuntime"]

T = TypeVar("T")


class ManualRuntime:
    """A runtime in which each wait advances the clock, and the actions planned with `at` happen on the way, in order.

    Pass `runtime.now` to a MemoryBackend as its clock, and acquire its locks with `acquire`, so that the store and the
    leases share one time. A wait without limit that no planned action can end raises RuntimeError instead of hanging.
    """

    def __init__(self, start: float = 1_000.0) -> None:
        self._time = start
        self._order = itertools.count()
        self._plans: list[tuple[float, int, Callable[[], object]]] = []

    def now(self) -> float:
        """Return the time of the clock, in seconds."""
        return self._time

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Call `action` when the clock reaches this moment."""
        heapq.heappush(self._plans, (moment, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Advance the clock by so many seconds."""
        self._turn_to(self._time + seconds, threading.Event())

    def acquire(self, lock: Lock) -> Lease:
        """Hold a lock as `lock.acquire()` does, but wait on this clock, on which the lease also runs out.

        Raises ValueError unless the lock has `renew=False`: the renewal in the background follows the real clock. Call
        `lease.renew()` instead.
        """
        if lock.renew:
            raise ValueError("renewal follows the real clock: make the lock with renew=False, and call lease.renew()")
        waiting = lock._hold(self, threading.current_thread(), Lease)  # noqa: SLF001 - as the lock's own `acquire`
        return self.run(waiting)  # type: ignore[return-value]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits only through this runtime, and return its result."""
        return run(coroutine)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function at once."""
        return function(*args)

    async def sleep(self, seconds: float) -> None:
        """Advance the clock instead of sleeping."""
        self.advance(seconds)

    def signal(self) -> threading.Event:
        """Return a new signal, which a planned action may set."""
        return threading.Event()

    async def wait(self, signal: Any, seconds: float) -> bool:
        """Advance the clock until the signal is set, or by so many seconds; returns whether it is set."""
        return self._turn_to(self._time + seconds, signal)

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end: nothing can interrupt it here."""
        return await coroutine

    def run_in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run the coroutine at once instead of in the background."""
        run(coroutine)

    def _turn_to(self, end: float, signal: threading.Event) -> bool:
        while not signal.is_set() and self._plans and self._plans[0][0] <= end:
            moment, _, action = heapq.heappop(self._plans)
            self._time = max(self._time, moment)
            action()
        if not signal.is_set():
            if end == math.inf:
                raise RuntimeError(
                    "this wait would never end, because no action is planned that could end it: plan one with at()"
                )
            self._time = end
        return signal.is_set()
