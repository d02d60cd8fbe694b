"""`@locked("order", pk)`: view → lease → BEGIN → admit → work → check → COMMIT → release.

On a view it takes over ATOMIC_REQUESTS, so that the lease is outside the transaction. Where Django cannot see that (a
method, a ViewSet action, a decorator above that hides it) the transaction is open already and its end releases.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.http import HttpRequest

from django_dlock.locks import Lock
from django_dlock.transactions import in_transaction
from dlock_core.arguments import Argument, fill, finder, placeholders, refuse_coroutine, refuse_late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.db.models import Model

__all__ = ["Argument", "locked", "pk"]

F = TypeVar("F", bound="Callable[..., Any]")

pk: Final = Argument("pk")
"""Stands for the `pk` argument of the decorated view."""


def locked(kind: str | type[Model], *arguments: Any, **options: Any) -> Callable[[F], F]:
    """Hold a lock while the function runs, and until its transaction has ended.

    `kind` is what is locked ("order", or a model class); every further part names an argument of the function (`pk`,
    or a text such as "order_id"; "order.pk" for an attribute of it), or is a value that is no text. Options are those
    of `lock`. For views (functions, classes, methods; Django's and DRF's; async), tasks (below the task's own
    decorator) and plain functions.

    With the fence in the transaction, the default, it opens one on `using` unless one is open, or the view is marked
    with non_atomic_requests. An async view runs without: its transactions are functions called by sync_to_async.

    Raises TypeError for an argument that the function does not have, where that can be known before it is called.
    """
    parts = (kind, *placeholders(arguments))
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
    refuse_late(function)
    find = finder(function, [part.name for part in parts if isinstance(part, Argument)])

    def lock_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        return Lock(*fill(parts, find, args, kwargs), **options)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lock = lock_for(args, kwargs)
        aliases = _to_open(lock, args, exempt)
        if lock.home is not None:
            return _call_inside(aliases, _holding(lock, call), args, kwargs)
        with lock:
            return _call_inside(aliases, call, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        return refuse_coroutine(function, answer, "put it on the async view class, or on its async method")

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        async with lock_for(args, kwargs):
            return await function(*args, **kwargs)

    exempt = _exempted(getattr(function, "_non_atomic_requests", ()))
    made: Any = async_wrapper if is_async or iscoroutinefunction(function) else wrapper
    made._non_atomic_requests = exempt
    return cast("Callable[..., Any]", made)


def _holding(lock: Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    def holding(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return holding


def _exempted(aliases: Iterable[str]) -> _TakenOver:
    return _TakenOver(set.copy(aliases) if isinstance(aliases, set) else aliases)


def _to_open(lock: Lock, args: tuple[Any, ...], exempt: _TakenOver) -> Iterator[str]:
    """Tell on which databases a transaction is to be opened for a call."""
    is_request = any(isinstance(arg, HttpRequest) or hasattr(arg, "_request") for arg in args[:2])
    for alias in sorted(connections, key=lambda alias: alias != lock.home):  # the outermost is committed last
        fenced = alias == lock.home or (alias == lock.using and lock.form == "transaction")
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
