"""Names of locks from the arguments of a decorated function; mistakes show as early as possible, when decorating."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from dlock_core.errors import NoSuchKey
from dlock_core.late import LateWork, runs_later
from dlock_core.names import join, plain_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlock_core.names import Kind

__all__ = [
    "LATE_WORK",
    "Argument",
    "NameTemplate",
    "arg",
    "finder",
    "placeholders",
    "refuse_bare",
]

LATE_WORK: Final = LateWork("@locked", "the call", "write `with lock(...)` inside it")
"""What `@locked` refuses."""

_JSON_TYPES: Final = frozenset({str, int, float, bool, list, type(None)})
"""The types of values in JSON, except for objects: they have no items and no attributes that name a lock."""
_NUMBERS: Final = frozenset({int, float, Decimal})

Read = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""A function that reads a value out of the arguments of a call."""


class Argument:
    """A placeholder for an argument of the decorated function; see `arg`."""

    def __init__(self, name: str, kind: Callable[[Any], Any] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of an argument is text, not {type(name).__name__}")
        if kind is not None and (not callable(kind) or runs_later(kind)):
            raise TypeError(f"the type of the argument {name!r} is a type or a function, not {kind!r:.80}")
        self.name, self.kind = name, kind

    def __repr__(self) -> str:
        return self.name

    def as_(self, kind: Callable[[Any], Any]) -> Argument:
        """Return a placeholder with a type: with `pk.as_(int)`, "42", "042" and "+42" in a URL are one lock.

        `kind` is a type or a function. A value that it refuses with ValueError raises NoSuchKey, which is a 404.
        """
        return Argument(self.name, kind)

    @property
    def root(self) -> str:
        """The name of the argument itself."""
        return self.name.partition(".")[0]

    def converted(self, value: Any, label: str) -> Any:
        """Return the value converted to `kind`; None stays None. Raises NoSuchKey for a value that `kind` refuses."""
        if value is None or self.kind is None or (isinstance(self.kind, type) and isinstance(value, self.kind)):
            return value
        try:
            return self.kind(plain_number(value) if self.kind in _NUMBERS else value)
        except (ValueError, ArithmeticError):
            raise NoSuchKey(label, key=value) from None


def arg(name: str, kind: Callable[[Any], Any] | None = None) -> Argument:
    """Return a placeholder for an argument of the function that is decorated.

    Use it as `@locked("order", arg("order_id", int))`.

    "order.pk" refers to an attribute or item of the argument. `kind` is a type, or a function that converts; see
    `Argument.as_`.
    """
    return Argument(name, kind)


def placeholders(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Return the parts with a placeholder for every text; raises TypeError for a part that is a coroutine function."""
    for part in parts:
        if runs_later(part):
            raise TypeError(f"@locked: {part!r} cannot name a lock: it has to be a plain function that returns a key")
    return tuple(Argument(part) if isinstance(part, str) else part for part in parts)


def refuse_bare(kind: Any, *, is_model: bool) -> None:
    """Raise TypeError for a decorator without parentheses, which would take the function for the thing to be locked."""
    if callable(kind) and not is_model:
        name = getattr(kind, "__name__", type(kind).__name__)
        raise TypeError(f'@locked does not say what to lock: write @locked("order", "order_id") above {name}')


class NameTemplate:
    """The parts of a lock's name, some of which come from each call of a function.

    An `Argument` is looked up in the call, a function is called with the arguments of the call, and any other part is
    used unchanged. `kind_of` identifies models; `from_url` returns the texts that a router took from the URL.
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
        self._untyped = set(_untyped(parts, kind_of))
        kind = kind_of(parts[0])
        self._label = str(parts[0]) if kind is None else kind.label
        readers = [self._reader(function, position) for position in range(len(parts))]
        self._readers = [(position, read) for position, read in enumerate(readers) if read is not None]

    def __call__(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `make(*parts)` for a call; a TypeError or ValueError names the function and the argument at fault."""
        values = [*self._parts]
        for position, read in self._readers:
            values[position] = read(args, kwargs)
        try:
            return make(*values)
        except (TypeError, ValueError) as error:
            if isinstance(error, NoSuchKey):
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"@locked on {self._title}: {self._at_fault(values)}{error}") from error

    def _reader(self, function: Callable[..., Any], position: int) -> Read | None:
        """Return what reads a part out of a call; None if it is the same for all calls."""
        part = self._parts[position]
        if is_function(part):
            return lambda args, kwargs: LATE_WORK.refuse_answer(
                part, part(*args, **kwargs), "use a plain function that returns a key"
            )
        if not isinstance(part, Argument):
            return None
        find = finder(function, part.name)

        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                value = find(args, kwargs)
            except _NotInData as error:
                raise NoSuchKey(self._label, key=None, reason=str(error)) from None
            if isinstance(value, str) and position in self._untyped:
                self._warn_of_text(part, value, args, kwargs)
            return value if part.kind is None else part.converted(value, self._label)

        return read

    def _warn_of_text(self, part: Argument, value: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(value is each for each in self._from_url(args, kwargs)):
            return
        self._untyped.clear()  # One warning for each function is enough.
        example = "pk.as_(int)" if part.name == "pk" else f"arg({part.name!r}, int)"
        warnings.warn(
            f"@locked on {self._title}: {part.name!r} is a text from the URL, where 42, 042 and +42 may be one row but "
            f"are three locks. Declare its type, {example} (str, if the text itself is the key), put the model before "
            "it, or let the route convert it",
            RuntimeWarning,
            stacklevel=2,
        )

    def _at_fault(self, values: list[Any]) -> str:
        """Return a text that names the first part which cannot be part of a lock's name."""
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
    """Return whether a part is a function that returns a key."""
    return callable(part) and not isinstance(part, type)


def _untyped(parts: Sequence[Any], kind_of: Callable[[Any], Kind | None]) -> Iterator[int]:
    """Yield the positions of arguments that neither a type nor a model before them converts."""
    converted = 0
    for position, part in enumerate(parts):
        kind = kind_of(part)
        converted = len(kind.converters) + 1 if kind is not None else converted
        if isinstance(part, Argument) and part.kind is None and converted <= 0:
            yield position
        converted -= 1


def finder(function: Callable[..., Any], name: str, decorator: str = "@locked") -> Read:
    """Return a function that finds an argument in a call; raises TypeError if there cannot be such an argument."""
    root, *path = name.split(".")
    title = getattr(function, "__qualname__", repr(function))
    try:
        parameters = list(inspect.signature(_without_partial(function)).parameters.values())
    except ValueError:
        raise TypeError(
            f"{decorator}: {title} does not show its arguments: put the decorator below the one that returned it"
        ) from None
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if root not in names and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise TypeError(f"{decorator}: {title} has no argument {name!r}, only: {', '.join(names) or 'none'}")
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    position = positional.index(root) if root in positional else sys.maxsize
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if root in kwargs:
            value = kwargs[root]
        elif position < len(args):
            value = args[position]
        elif root in defaults:
            value = defaults[root]
        else:
            known, (called, advice) = ", ".join(kwargs) or "none", _of_call(function, title, args)
            raise TypeError(
                f"{decorator}: {called} was called without an argument {root!r}; its named arguments: {known}{advice}"
            )
        return _follow(value, path) if path else value

    return find


def _of_call(function: Callable[..., Any], title: str, args: tuple[Any, ...]) -> tuple[str, str]:
    """Return what was called, for an error, and what to do: all routes of a view share the `dispatch` of its class."""
    if getattr(function, "__name__", "") != "dispatch":
        return title, ""
    view = getattr(_without_partial(function), "__self__", args[0] if args else function)
    return f"{type(view).__qualname__}.dispatch", ". If only some of its methods have it, decorate those"


class _NotInData(LookupError):
    """The data that a client has sent, such as JSON, has no such item."""


def _follow(value: Any, path: list[str]) -> Any:
    for key in path:
        if isinstance(value, Mapping) and value.get(key) is not None:  # JSON's null is no value either.
            value = value[key]
        elif isinstance(value, Mapping) or type(value) in _JSON_TYPES:
            raise _NotInData(f"the request has no {'.'.join(path)}")
        else:
            value = getattr(value, key)
    return value


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the bound method in a partial: with functools.wraps, the partial has the signature of the unbound one."""
    is_bound = isinstance(function, functools.partial) and inspect.ismethod(function.func) and not function.args
    return function.func if is_bound else function  # type: ignore[attr-defined]
