"""Work that a call only begins, and that is done after it or never: decorators and callbacks refuse it."""

from __future__ import annotations

import contextlib
import inspect
import itertools as it
from dataclasses import dataclass
from functools import lru_cache, partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LateWork", "kind_of_late", "runs_async", "runs_later"]

_ENQUEUES: Final = ("apply_async", "call_local", "send_with_options", "enqueue", "delay", "defer", "kiq")
"""Methods of tasks: of Celery, huey, dramatiq, Django, Prefect, procrastinate and taskiq, in this order."""

_LATE_FUNCTIONS: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_MANAGERS: Final = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)  # noqa: SLF001 - no other name
_LAZY: Final[tuple[type, ...]] = (
    map, filter, zip, enumerate, it.accumulate, it.chain, it.compress, it.cycle, it.dropwhile, it.filterfalse,
    it.groupby, it.islice, it.pairwise, it.starmap, it.takewhile, it.zip_longest,
    getattr(it, "batched", it.chain),  # since Python 3.12
)  # fmt: skip
"""Iterators that do their work, or that of the iterators they read, when they are read; over a list, too: nothing tells
the two apart."""
_NOT_YET_RUN: Final = (*_LAZY, CoroutineType, GeneratorType, AsyncGeneratorType, *_MANAGERS)
"""What a call returns whose body has not run; a streaming response is none of them, because its author knows."""
_QUERIES: Final = {
    ("django.db.models.query", "QuerySet"),
    ("django.db.models.query", "RawQuerySet"),
    ("sqlalchemy.orm.query", "Query"),
}
"""Classes of queries that are sent when they are read; known by name, because no framework is imported for this."""
_RENDERED_LATER: Final = ("rest_framework.response", "Response")
"""A response that keeps its data, and reads them when it is rendered, after the view."""


@dataclass(frozen=True)
class LateWork:
    """What a decorator refuses, because it covers a function only while it runs."""

    decorator: str
    """Its name in errors."""
    end: str
    """The moment until which it covers the function's work."""
    instead: str
    """What to write in place of a generator."""

    def refuse_function(self, function: Any) -> None:
        """Raise TypeError for what is no function, or one whose call only makes an object, a task or a generator."""
        function = _bare(function)
        if inspect.isclass(function):
            raise TypeError(
                f"{self.decorator} decorates a function or method, not {function!r:.80}, of which it would cover only "
                "the constructor: put it on the method that does the work"
            )
        if _is_task(inspect.unwrap(function, stop=_is_task)):
            raise TypeError(
                f"{self.decorator} must stand below the decorator that makes a function a task, on the function "
                "itself: above it, it would cover the enqueueing, and not the work"
            )
        if not callable(function):
            made = type(function).__name__
            advice = f": put it below @{made}, on the function itself" if hasattr(function, "__get__") else ""
            raise TypeError(f"{self.decorator} decorates a function or method, not {function!r:.80}{advice}")
        inner = inspect.unwrap(function, stop=_may_exhaust)
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise TypeError(
                f"{self.decorator} cannot cover the generator {function!r}, whose body runs after {self.end}: "
                f"{self.instead}"
            )

    def refuse_answer(self, function: Any, answer: Any, if_coroutine: str) -> Any:
        """Return the answer of a call; raises TypeError, with advice, if the work is still to be done."""
        is_response = _keeps_data(answer)
        kind = kind_of_late(getattr(answer, "data", None) if is_response else answer)
        if not kind:
            return answer
        advice = {"coroutine": if_coroutine}.get(kind, self.instead)
        if is_response or kind in ("lazy iterator", "query"):
            advice = "return a list of it"
        returned = f"Response with a {kind}" if is_response else kind
        raise TypeError(f"{self.decorator}: {function!r} returned a {returned}, which runs after {self.end}: {advice}")


def runs_later(function: Any) -> bool:
    """Return whether a call of the function certainly runs nothing: it makes a coroutine or a generator."""
    return any(is_late(each) for is_late in _LATE_FUNCTIONS for each in _called(function))


def runs_async(function: Any, is_marked: Callable[[Any], bool] = inspect.iscoroutinefunction) -> bool:
    """Return whether a call of the function, or of an object with a `__call__`, makes a coroutine.

    `is_marked`: the framework's own test of a function, if the framework marks them.
    """
    return any(map(is_marked, (function, *_called(function))))


def kind_of_late(answer: Any) -> str:
    """Return what a call has made in place of running, such as "coroutine"; an empty text if the answer is a result."""
    if not isinstance(answer, _NOT_YET_RUN):
        return "query" if _is_unread_query(answer) else ""
    if isinstance(answer, CoroutineType):
        answer.close()  # Python would warn that it was never awaited.
        return "coroutine"
    if isinstance(answer, _LAZY):
        return "lazy iterator"
    return "context manager" if isinstance(answer, _MANAGERS) else "generator"


def _keeps_data(answer: Any) -> bool:
    """Return whether it is a response whose data are read when it is rendered."""
    return _RENDERED_LATER in _class_names(answer.__class__)


def _is_unread_query(answer: Any) -> bool:
    """Return whether it is a query that is sent when it is read; Django's keeps its rows, and is sent once or never."""
    if _QUERIES.isdisjoint(_class_names(answer.__class__)) or getattr(answer, "_result_cache", None) is not None:
        return False
    return not (hasattr(answer, "query") and getattr(answer.query, "is_empty", bool)())


@lru_cache(maxsize=64)  # It is asked at every call of a decorated function, about few classes.
def _class_names(kind: type) -> frozenset[tuple[str, str]]:
    return frozenset((each.__module__, each.__name__) for each in kind.__mro__)


def _bare(function: Any) -> Any:
    """Return the function in a partial or staticmethod: what its call does is decided by the function."""
    while isinstance(function, partial | staticmethod):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def _called(function: Any) -> tuple[Any, Any]:
    """Return what a call may run: the function itself, and the `__call__` of an object."""
    function = _bare(function)
    return function, getattr(type(function), "__call__", None)  # noqa: B004 - it is asked whether it is async


def _may_exhaust(link: Any) -> bool:
    """Return whether a decorator may run the generator that it wraps; those of contextlib pass it on."""
    return getattr(link, "__globals__", None) is not vars(contextlib)


def _is_task(link: Any) -> bool:
    """Return whether it is an object that a queue has made of a function.

    RQ's `@job` gives the function itself a method; its worker finds the function by name, with all its decorators.
    """
    return not (inspect.isroutine(link) or isinstance(link, type)) and any(hasattr(link, name) for name in _ENQUEUES)
