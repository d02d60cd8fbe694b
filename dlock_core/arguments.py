"""Arguments of a decorated function that name its lock; what can be known to be wrong shows when it is decorated."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Argument", "Find", "fill", "finder", "placeholders", "refuse_coroutine", "refuse_late"]

Find = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Find an argument by name in a call."""


class Argument:
    """Stands for the argument of that name of the decorated function; "order.pk" for an attribute or item of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    @property
    def root(self) -> str:
        """The name of the argument itself."""
        return self.name.partition(".")[0]


def placeholders(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Take every text for the name of an argument, and everything else as it is."""
    return tuple(Argument(part) if isinstance(part, str) else part for part in parts)


def fill(parts: Iterable[Any], find: Find, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Put the arguments of a call where parts stand for them."""
    return (find(part.name, args, kwargs) if isinstance(part, Argument) else part for part in parts)


def refuse_late(function: Callable[..., Any]) -> None:
    """Raise TypeError for what would run after the lease that is held around its call."""
    if hasattr(function, "apply_async"):
        raise TypeError("@locked goes below the decorator that makes a function a task, on the function itself")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"@locked cannot hold a lock for the generator {function!r}: it runs after it was called")


def refuse_coroutine(function: Callable[..., Any], answer: Any, instead: str) -> Any:
    """Pass on what a blocking function answered; raises TypeError, and tells what to do instead, if it was none."""
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError(
            f"@locked took {function!r} for a blocking function, but it answered with a coroutine: {instead}"
        )
    return answer


def finder(function: Callable[..., Any], wanted: Iterable[str]) -> Find:
    """Make the function that finds arguments in calls; raises TypeError if one that is wanted cannot be there."""
    parameters = list(inspect.signature(_without_partial(function)).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    places = {each.name: place for place, each in enumerate(positional)}
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    title = getattr(function, "__qualname__", repr(function))
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not open_ended and (unknown := [name for name in wanted if Argument(name).root not in names]):
        raise TypeError(f"@locked: {title} has no argument {unknown[0]!r}, only: {', '.join(names) or 'none'}")

    def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        root, *path = name.split(".")
        if root in kwargs:
            return _follow(kwargs[root], path)
        if root in places and places[root] < len(args):
            return _follow(args[places[root]], path)
        if root in defaults:
            return _follow(defaults[root], path)
        known = ", ".join(kwargs) or "none"
        raise TypeError(f"@locked: {title} was called without an argument {root!r}; its named arguments: {known}")

    return find


def _follow(value: Any, path: list[str]) -> Any:
    return functools.reduce(lambda at, key: at[key] if isinstance(at, Mapping) else getattr(at, key), path, value)


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Look into a partial of a bound method: dressed by functools.wraps it has the signature of the unbound one."""
    is_bound = isinstance(function, functools.partial) and inspect.ismethod(function.func) and not function.args
    return function.func if is_bound else function  # type: ignore[attr-defined]
