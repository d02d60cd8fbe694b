"""A runtime whose clock is turned by hand: the engine's waits and retries run in no time, and always the same way."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from dlock_core.runtime import run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["ManualRuntime"]

T = TypeVar("T")


class ManualRuntime:
    """Whoever waits turns the clock; what was planned with `at` happens on the way, in order.

    Give `runtime.now` to a MemoryBackend as its clock, so that store and engine live in the same time. A wait without
    an end that nothing planned can end is an error, not a hang.
    """

    def __init__(self, start: float = 1_000.0) -> None:
        self._time = start
        self._order = itertools.count()
        self._plans: list[tuple[float, int, Callable[[], object]]] = []

    def now(self) -> float:
        """Give the time of the clock that is turned by hand."""
        return self._time

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Call `action` when the clock gets to this moment."""
        heapq.heappush(self._plans, (moment, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Turn the clock."""
        self._turn_to(self._time + seconds, threading.Event())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Finish a coroutine that waits only through this runtime."""
        return run(coroutine)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call at once."""
        return function(*args)

    async def sleep(self, seconds: float) -> None:
        """Turn the clock instead of sleeping."""
        self.advance(seconds)

    def signal(self) -> threading.Event:
        """Make a wake-up; what was planned may set it."""
        return threading.Event()

    async def wait(self, signal: Any, seconds: float) -> bool:
        """Turn the clock to the moment when the signal is set, or by so many seconds."""
        return self._turn_to(self._time + seconds, signal)

    async def shield(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Finish it: nothing can interrupt here."""
        return await coroutine

    def behind(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Finish it at once."""
        run(coroutine)

    def _turn_to(self, end: float, signal: threading.Event) -> bool:
        while not signal.is_set() and self._plans and self._plans[0][0] <= end:
            moment, _, action = heapq.heappop(self._plans)
            self._time = max(self._time, moment)
            action()
        if not signal.is_set():
            if end == math.inf:
                raise RuntimeError("this wait would never end: nothing is planned that could end it")
            self._time = end
        return signal.is_set()
