"""Actors for tests: threads that take one step at a time, on request, so that a test determines every interleaving.

The terms are those of the contract suite's harness (`dlock_core.testing.contract.harness`).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

WITHIN: Final = 60.0
"""Seconds that a step may last."""


class Actor:
    """One thread, with its own connections and leases."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def start(self, step: Callable[..., Any], *args: Any, **options: Any) -> "Future[Any]":
        """Start a step, and return its Future."""
        return self._thread.submit(step, *args, **options)

    def do(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a step to its end, and return its result or raise its error."""
        return self.start(step, *args, **options).result(WITHIN)

    def close(self) -> None:
        self._thread.shutdown()


def outcome(future: "Future[Any]") -> Any:
    """Wait for the end of a step, and return its result or its error."""
    error = future.exception(WITHIN)
    return future.result() if error is None else error


def raise_error(future: "Future[Any]") -> None:
    """Wait for the end of a step that may fail, and raise its error."""
    future.result(WITHIN)
