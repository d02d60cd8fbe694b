"""Arguments of a decorated function that name its lock; what can be known to be wrong shows when it is decorated."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dlock_core.errors import NoSuchKey
from dlock_core.names import join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlock_core.names import Kind

__all__ = [
    "Argument",
    "NameTemplate",
    "arg",
    "finder",
    "placeholders",
    "refuse_bare",
    "refuse_coroutine",
    "refuse_late",
]

Find = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""Find an argument by name in a call."""


class Argument:
    """Stands for the argument of that name of the decorated function; see `arg`."""

    def __init__(self, name: str, kind: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of an argument is text, not {type(name).__name__}")
        if kind is not None and (not callable(kind) or inspect.iscoroutinefunction(kind)):
            raise TypeError(f"the type of the argument {name!r} is a type or a function, not {kind!r:.80}")
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return self.name

    def as_(self, kind: Callable[[Any], Any]) -> Argument:
        """Convert what a call gives: `pk.as_(int)`, so that "42", "042" and "+42" of a URL are one lock.

        `kind` is a type or a function; what it refuses with a ValueError raises NoSuchKey, which is a 404.
        """
        return Argument(self.name, kind)

    @property
    def root(self) -> str:
        """The name of the argument itself."""
        return self.name.partition(".")[0]

    def converted(self, value: Any, label: str) -> Any:
        """Give the value as what it is to be; None as it is."""
        if value is None or self.kind is None or (isinstance(self.kind, type) and isinstance(value, self.kind)):
            return value
        try:
            return self.kind(value)
        except (ValueError, ArithmeticError):
            raise NoSuchKey(label, key=value) from None


def arg(name: str, kind: Callable[[Any], Any] | None = None) -> Argument:
    """Stand for an argument of the decorated function, and tell its type.

    Use it as `@locked("order", arg("order_id", int))`. "order.pk" stands for an attribute or item of the argument.
    `kind` is a type, or a function that converts; see `Argument.as_`.
    """
    return Argument(name, kind)


def placeholders(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Take every text for the name of an argument, and everything else as it is; raises TypeError for a coroutine."""
    for part in parts:
        if inspect.iscoroutinefunction(part) or inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part):
            raise TypeError(f"@locked: {part!r} cannot name a lock: it has to be a plain function that returns a key")
    return tuple(Argument(part) if isinstance(part, str) else part for part in parts)


def refuse_bare(kind: Any, *, is_model: bool) -> None:
    """Raise TypeError for a decorator without parentheses, which takes the function for what is locked."""
    if callable(kind) and not is_model:
        name = getattr(kind, "__name__", type(kind).__name__)
        raise TypeError(f'@locked has to be told first what is locked: @locked("order", "order_id") above {name}')


class NameTemplate:
    """The parts of a lock's name, some of which each call of a function gives.

    An `Argument` is looked up in the call, a function is called with the arguments of the call, and anything else is
    what it is. `kind_of` tells which parts are models; `from_url` gives the texts that a router took out of the URL.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parts: Sequence[Any],
        kind_of: Callable[[Any], Kind | None],
        from_url: Callable[[tuple[Any, ...], dict[str, Any]], Iterable[Any]],
    ) -> None:
        self._title = getattr(function, "__qualname__", repr(function))
        self._parts, self._from_url = parts, from_url
        self._find = finder(function, [part.name for part in parts if isinstance(part, Argument)])
        self._untyped = set(_untyped(parts, kind_of))
        kind = kind_of(parts[0])
        self._label = str(parts[0]) if kind is None else kind.label

    def __call__(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the lock of a call; a TypeError or ValueError names the function and the argument at fault."""
        values = [self._value(place, part, args, kwargs) for place, part in enumerate(self._parts)]
        try:
            return make(*values)
        except (TypeError, ValueError) as error:
            if isinstance(error, NoSuchKey):
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"@locked on {self._title}: {self._at_fault(values)}{error}") from error

    def _value(self, place: int, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(part, Argument):
            value = self._find(part.name, args, kwargs)
            if place in self._untyped and isinstance(value, str):
                self._warn_of_text(part, value, args, kwargs)
            return part.converted(value, self._label)
        if is_function(part):
            return refuse_coroutine(part, part(*args, **kwargs), "let it be a plain function that returns a key")
        return part

    def _warn_of_text(self, part: Argument, value: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(value is each for each in self._from_url(args, kwargs)):
            return
        self._untyped.clear()  # once for each function is enough
        example = "pk.as_(int)" if part.name == "pk" else f"arg({part.name!r}, int)"
        warnings.warn(
            f"@locked on {self._title}: {part.name!r} came as a text out of the URL, where 42, 042 and +42 may be one "
            f"row but are three locks: say its type, {example} (str, if the text itself is the key), put the model "
            "before it, or let the route convert it",
            RuntimeWarning,
            stacklevel=2,
        )

    def _at_fault(self, values: list[Any]) -> str:
        """Name the first part that no lock could have."""
        for part, value in zip(self._parts, values, strict=True):
            if isinstance(part, Argument) or is_function(part):
                try:
                    join("part", value)
                except (TypeError, ValueError):
                    return (
                        f"the argument {part.name!r}: " if isinstance(part, Argument) else f"what {part!r} returned: "
                    )
        return ""


def is_function(part: Any) -> bool:
    """Tell whether a part is called to name a lock."""
    return callable(part) and not isinstance(part, type)


def _untyped(parts: Sequence[Any], kind_of: Callable[[Any], Kind | None]) -> Iterator[int]:
    """Give the places of arguments that neither a type nor a model before them converts."""
    converted = 0
    for place, part in enumerate(parts):
        kind = kind_of(part)
        converted = len(kind.converters) + 1 if kind is not None else converted
        if isinstance(part, Argument) and part.kind is None and converted <= 0:
            yield place
        converted -= 1


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
