"""`@locked("order", pk)`: view → lease → BEGIN → admit → work → check → COMMIT → release.

On a view it takes over ATOMIC_REQUESTS, so that the lease is outside the transaction. Where Django cannot see that (a
method, a ViewSet action, a decorator above that hides it) the transaction is open already and its end releases.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest

from django_dlock.locks import Lock
from django_dlock.transactions import in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.db.models import Model

__all__ = ["Argument", "locked", "pk"]

F = TypeVar("F", bound="Callable[..., Any]")


class Argument:
    """Stands for the argument of that name of the decorated function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


pk: Final = Argument("pk")
"""Stands for the `pk` argument of the decorated view."""


def locked(kind: str | type[Model], *arguments: Any, **options: Any) -> Callable[[F], F]:
    """Hold a lock while the function runs, and until its transaction has ended.

    `kind` is what is locked ("order", or a model class); every further part names an argument of the function (`pk`,
    or a text such as "order_id"), or is a value that is no text. Options are those of `lock`. For views (functions,
    classes, methods; Django's and DRF's; async), tasks (below the task's own decorator) and plain functions.

    With the fence in the transaction, the default, it opens one on `using` unless one is open, or the view is marked
    with non_atomic_requests. An async view runs without: its transactions are functions called by sync_to_async.

    Raises TypeError for an argument that the function does not have, where that can be known before it is called.
    """
    parts = (kind, *(Argument(part) if isinstance(part, str) else part for part in arguments))
    _refuse_mistakes(parts, options)

    def decorate(function: F) -> F:
        if isinstance(function, type):
            return cast("F", _locked_class(function, parts, options))
        return cast("F", _locked_function(function, parts, options))

    return decorate


def _refuse_mistakes(parts: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let a mistake in the decorator show when it is imported, not when the view is called."""
    Lock("kind", **options)
    for part in parts:
        if not isinstance(part, Argument):
            Lock(part)


class _TakenOver(set[str]):
    """Tells Django that we open the transactions of ATOMIC_REQUESTS; keeps the names that the view itself exempts."""

    def __contains__(self, alias: object) -> bool:
        return True

    def exempts(self, alias: str) -> bool:
        return super().__contains__(alias)


def _locked_class(view: type, parts: tuple[Any, ...], options: dict[str, Any]) -> type:
    if not callable(getattr(view, "dispatch", None)):
        raise TypeError(
            f"@locked goes on a class-based view, a method or a function; {view.__name__} has no dispatch()"
        )
    dispatch: Any = view.dispatch  # type: ignore[attr-defined]
    view.dispatch = _locked_function(dispatch, parts, options, is_async=getattr(view, "view_is_async", False))  # type: ignore[attr-defined]
    return view


def _locked_function(
    function: Callable[..., Any], parts: tuple[Any, ...], options: dict[str, Any], *, is_async: bool = False
) -> Callable[..., Any]:
    if hasattr(function, "apply_async"):
        raise TypeError("@locked goes below the decorator that makes a function a task, on the function itself")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"@locked cannot hold a lock for the generator {function!r}: it runs after it was called")
    find = _finder(function, [part.name for part in parts if isinstance(part, Argument)])

    def lock_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        values = (find(part.name, args, kwargs) if isinstance(part, Argument) else part for part in parts)
        return Lock(*values, **options)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lock = lock_for(args, kwargs)
        with lock:
            answer = _call_inside(_to_open(lock, args, exempt), function, args, kwargs)
            return _refuse_coroutine(function, answer)

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        async with lock_for(args, kwargs):
            return await function(*args, **kwargs)

    exempt = _exempted(getattr(function, "_non_atomic_requests", ()))
    made: Any = async_wrapper if is_async or iscoroutinefunction(function) else wrapper
    made._non_atomic_requests = exempt
    return cast("Callable[..., Any]", made)


def _exempted(aliases: Iterable[str]) -> _TakenOver:
    return _TakenOver(set.copy(aliases) if isinstance(aliases, set) else aliases)


def _to_open(lock: Lock, args: tuple[Any, ...], exempt: _TakenOver) -> Iterator[str]:
    """Tell on which databases a transaction is to be opened for a call."""
    is_request = any(isinstance(arg, HttpRequest) or hasattr(arg, "_request") for arg in args[:2])
    for alias in connections:
        fenced = alias == lock.using and lock.form == "transaction"
        asked = is_request and connections.settings[alias]["ATOMIC_REQUESTS"]
        if (fenced or asked) and not exempt.exempts(alias) and not in_transaction(alias):
            yield alias


def _call_inside(
    aliases: Iterator[str], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the function in a transaction on each of these databases."""
    for alias in aliases:
        with transaction.atomic(using=alias):
            return _call_inside(aliases, function, args, kwargs)
    return function(*args, **kwargs)


def _refuse_coroutine(function: Callable[..., Any], answer: Any) -> Any:
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError(
            f"@locked took {function!r} for a blocking function, but it answered with a coroutine: "
            "put it on the async view class itself, or on its async method"
        )
    return answer


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Look into what method_decorator makes of a bound method: it claims to have the signature of the unbound one."""
    is_bound = isinstance(function, functools.partial) and inspect.ismethod(function.func) and not function.args
    return function.func if is_bound else function  # type: ignore[attr-defined]


def _finder(function: Callable[..., Any], wanted: list[str]) -> Callable[[str, tuple[Any, ...], dict[str, Any]], Any]:
    """Make the function that finds an argument by name in a call; what can be known to be wrong is refused now."""
    parameters = list(inspect.signature(_without_partial(function)).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    places = {each.name: place for place, each in enumerate(positional)}
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    title = getattr(function, "__qualname__", repr(function))
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not open_ended and (unknown := [name for name in wanted if name not in names]):
        raise TypeError(f"@locked: {title} has no argument {unknown[0]!r}, only: {', '.join(names) or 'none'}")

    def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        if name in places and places[name] < len(args):
            return args[places[name]]
        if name in defaults:
            return defaults[name]
        known = ", ".join(kwargs) or "none"
        raise TypeError(f"@locked: {title} was called without an argument {name!r}; its named arguments: {known}")

    return find
