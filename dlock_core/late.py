"""Work that would be done after the call of a decorated function, when its lock or transaction has ended: refused."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["LateWork"]

_ENQUEUES: Final = ("apply_async", "call_local", "send_with_options", "enqueue", "delay", "defer", "kiq")
"""Methods of tasks: of Celery, huey, dramatiq, Django, Prefect, procrastinate and taskiq, in this order."""


@dataclass(frozen=True)
class LateWork:
    """What a decorator refuses, because it covers a function only while it runs."""

    decorator: str
    """Its name in errors."""
    instead: str
    """What to do for a generator."""

    def refuse_function(self, function: Any) -> None:
        """Raise TypeError for what is no function, or one whose call only enqueues a task or makes a generator."""
        if _is_task(inspect.unwrap(function, stop=_is_task)):
            raise TypeError(
                f"{self.decorator} must stand below the decorator that makes a function a task, on the function "
                "itself: above it, it would cover the enqueueing, and not the work"
            )
        if not callable(function):
            made = type(function).__name__
            advice = f": put it below @{made}, on the function itself" if hasattr(function, "__get__") else ""
            raise TypeError(f"{self.decorator} decorates a function or method, not {function!r:.80}{advice}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{self.decorator} cannot cover the generator {function!r}, whose body runs after the call has "
                f"returned: {self.instead}"
            )


def _is_task(link: Any) -> bool:
    """Return whether it is an object that a queue has made of a function.

    RQ's `@job` gives the function itself a method; its worker finds the function by name, with all its decorators.
    """
    return not (inspect.isroutine(link) or isinstance(link, type)) and any(hasattr(link, name) for name in _ENQUEUES)
