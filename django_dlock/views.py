"""`@locked("order", pk)`: view → lease → BEGIN → admit → work → check → COMMIT → release.

On a view it takes over ATOMIC_REQUESTS, so that the lease is outside the transaction. Where Django cannot see the
decorator (on a method, a ViewSet action, below a decorator that hides it) the transaction is already open, and its end
releases the lease.

Of several `@locked` on one function, the innermost opens the transactions of all of them, once every lease is held.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.http import HttpRequest
from django.views import View

from django_dlock.conf import stores
from django_dlock.connections import in_transaction, roll_back_refusal
from django_dlock.errors import as_database_error
from django_dlock.locks import Lock, refuse_in_loop
from django_dlock.names import kind_of
from dlock_core.errors import DLockError
from dlock_core.flow import flow_variable
from dlock_core.late import runs_async
from dlock_core.runtime import BLOCKING
from dlock_core.transactions.tied_lease import reraise
from dlock_core.web.decorators import (
    LATE_WORK,
    Argument,
    NameTemplate,
    arg,
    is_function,
    placeholders,
    refuse_bare,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextvars import ContextVar

    from django.db.models import Model

__all__ = ["Argument", "arg", "locked", "pk"]

F = TypeVar("F", bound="Callable[..., Any]")

_IS_OUTER: Final = "_dlock_locked"
"""An attribute of a function with `@locked`; decorators that use functools.wraps pass it on."""

pk: Final = Argument("pk")
"""Stands for the `pk` argument of the decorated view; `pk.as_(int)` for its value as a number."""


def locked(kind: str | type[Model], *arguments: Any, **options: Any) -> Callable[[F], F]:
    """Hold a lock while the function runs, and until its transaction has ended.

    `kind` is what is locked: a model class, or a text such as "order". Every further part names an argument of the
    function (`pk`, or a text such as "order_id"; "order.pk" for an attribute of it), or is a function that is called
    with all arguments of the call and returns the part, or is a value other than text. With a model, every spelling of
    a key is one lock; with a text, declare the type: `pk.as_(int)`, `arg("order_id", int)`. A value that cannot be such
    a key raises NoSuchKey, which views answer with 404. Unconverted text from the URL causes one RuntimeWarning.

    A `TemplateResponse`, as of every generic view, is rendered after the view and without the lock: read what it shows
    in the view, as by `list(...)`, or return `response.render()`.

    Options are those of `lock`. For views (functions, classes, methods; Django's and DRF's; async), tasks (below the
    task's own decorator) and plain functions.

    With the fence in the transaction, the default, it opens one on the lock's database (`using`, or that of the model)
    unless one is open, or the view is marked with non_atomic_requests. An async view runs without one: its transactions
    are functions called by sync_to_async. The transaction is rolled back by an exception, and by the response that REST
    framework makes of one.

    Raises TypeError for an argument that the function does not have, as early as that can be known, and for an answer
    that is still to be read: a generator, an iterator such as `map`, a queryset, or a REST framework response with one.
    """
    refuse_bare(kind, is_model=kind_of(kind) is not None)
    parts = (kind, *placeholders(arguments))
    _refuse_mistakes(parts, options)

    def decorate(function: F) -> F:
        if isinstance(function, type):
            return cast("F", _locked_class(function, parts, options))
        return cast("F", _locked_function(function, parts, options))

    return decorate


def _refuse_mistakes(parts: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise the error of a wrong option or part when the view is imported, not when it is called."""
    Lock("kind", **options)
    for part in parts:
        if not isinstance(part, Argument) and not is_function(part):
            Lock(part, using=DEFAULT_DB_ALIAS)  # the routers are not loaded for an import


class _NonAtomic(set[str]):
    """Tells Django that it must not open the transactions of ATOMIC_REQUESTS: `@locked` opens them inside the lease.

    Its members are the databases that the view itself exempts, with `transaction.non_atomic_requests`.
    """

    def __contains__(self, alias: object) -> bool:
        return True


def _locked_class(view: type, parts: tuple[Any, ...], options: dict[str, Any]) -> type:
    own: Any = getattr(view, "dispatch", None)
    if not callable(own):
        raise TypeError(
            f"@locked goes on a class-based view, a method or a function; {view.__name__} has no dispatch()"
        )
    locked_dispatch = _locked_function(own, parts, options, is_async=getattr(view, "view_is_async", False))

    @functools.wraps(locked_dispatch)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_setup(self)
        return locked_dispatch(self, *args, **kwargs)

    view.dispatch = markcoroutinefunction(dispatch) if iscoroutinefunction(locked_dispatch) else dispatch  # type: ignore[attr-defined]
    return view


def _refuse_setup(view: Any) -> None:
    """Raise TypeError for a view with its own setup(), which Django calls before dispatch(), and so before the lock."""
    if getattr(type(view), "setup", View.setup) is not View.setup:
        name = type(view).__qualname__
        raise TypeError(
            f"@locked on a class locks dispatch(), and {name}.setup() runs before that and may read what is locked: "
            "move what it does into dispatch(); or, if it reads nothing of the kind, lock the method, "
            '@method_decorator(locked(...), name="dispatch")'
        )


def _locked_function(
    function: Callable[..., Any], parts: tuple[Any, ...], options: dict[str, Any], *, is_async: bool = False
) -> Callable[..., Any]:
    LATE_WORK.refuse_function(function)
    make = Lock("kind", **options)._renamed  # noqa: SLF001 - not for applications, which use Lock's options
    name = NameTemplate(function, parts, kind_of, _url_arguments)

    def lock_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        try:
            return name(make, args, kwargs)  # type: ignore[no-any-return]
        except DLockError as error:
            reraise(error, as_database_error)

    undecorated = inspect.unwrap(function)
    is_outer = getattr(function, _IS_OUTER, False)
    is_fenced = options.get("fence", True) in (True, "transaction")

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lock = lock_for(args, kwargs)
        home, aliases = _home(lock), _atomic_requests(args)
        if is_fenced:
            aliases.add(lock.using)
        if home is not None:
            aliases.add(home)
        aliases -= non_atomic  # its members, which `in` hides from Django
        plan = _Plan.beyond_outer(undecorated, aliases)
        if home is not None:  # It locks inside a transaction, which the innermost `@locked` opens.
            return go_on(plan._replace(locks=(*plan.locks, lock)), args, kwargs)
        refuse_in_loop()
        with lock._new_acquire(BLOCKING):  # noqa: SLF001 - a separate block, which needs no `Blocks`
            return go_on(plan, args, kwargs)

    def go_on(plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _plan_of_outer.set(plan if is_outer else None)
        try:
            return call(*args, **kwargs) if is_outer else plan.carry_out(call, args, kwargs)
        finally:
            _plan_of_outer.reset(token)

    def call(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        return LATE_WORK.refuse_answer(function, answer, "put it on the async view class, or on its async method")

    @functools.wraps(function)
    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        async with lock_for(args, kwargs):
            return LATE_WORK.refuse_answer(function, await function(*args, **kwargs), "await it in the function")

    exempt = getattr(function, "_non_atomic_requests", ())
    non_atomic = _NonAtomic(set.copy(exempt) if isinstance(exempt, set) else exempt)
    opens_no_transaction = is_async or runs_async(function, iscoroutinefunction)
    made: Any = async_wrapper if opens_no_transaction else wrapper
    made._non_atomic_requests = non_atomic  # noqa: SLF001 - where Django reads it
    setattr(made, _IS_OUTER, not opens_no_transaction)
    return cast("Callable[..., Any]", made)


def _url_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the values that Django's resolver took from the URL of a view's request."""
    for each in (*args[:2], kwargs.get("request")):
        match = getattr(each, "resolver_match", None)
        if match is not None:
            yield from (*match.args, *match.kwargs.values())


def _atomic_requests(args: tuple[Any, ...]) -> set[str]:
    """Return the databases on which a view runs in a transaction by ATOMIC_REQUESTS; none if it is not a view."""
    found: set[str] = set()
    for each in args[:2]:
        if isinstance(each, HttpRequest) or hasattr(each, "_request"):
            for alias, settings in connections.settings.items():
                if settings["ATOMIC_REQUESTS"]:
                    found.add(alias)
            break
    return found


def _home(lock: Lock) -> str | None:
    """Return the database in whose transaction the store locks, for a store that does."""
    store = stores.created.get(lock.store) or stores[lock.store]
    database: str | None = store.backend.capabilities.transaction_database
    return database


class _Plan(NamedTuple):
    """The steps of the innermost `@locked` of a stack once every lease is held: transactions, and locks inside them."""

    function: Any
    """The decorated function."""
    aliases: frozenset[str]
    """The databases on which a transaction is opened."""
    locks: tuple[Lock, ...] = ()
    """The locks inside a transaction, from the outermost decorator to the innermost."""

    @classmethod
    def beyond_outer(cls, function: Any, aliases: set[str]) -> _Plan:
        """Return the plan of a `@locked` with these databases, combined with the plan of the outer one of this call."""
        outer = _plan_of_outer.get()
        if outer is None or outer.function is not function:
            return cls(function, frozenset(aliases))
        return cls(function, outer.aliases | aliases, outer.locks)

    def carry_out(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function in these transactions, under these locks."""
        if not self.locks and len(self.aliases) == 1:
            (alias,) = self.aliases
            if in_transaction(alias):
                return function(*args, **kwargs)
            with transaction.atomic(using=alias):
                return roll_back_refusal(function(*args, **kwargs), alias)
        homes = [_home(lock) for lock in self.locks]
        for alias in sorted(connections, key=lambda alias: alias not in homes):  # the outermost is committed last
            if alias in self.aliases and not in_transaction(alias):
                with transaction.atomic(using=alias):
                    inner = self._replace(aliases=self.aliases - {alias})
                    return roll_back_refusal(inner.carry_out(function, args, kwargs), alias)
        if self.locks:
            with self.locks[0]:
                return self._replace(locks=self.locks[1:]).carry_out(function, args, kwargs)
        return function(*args, **kwargs)


_plan_of_outer: ContextVar[_Plan | None] = flow_variable("dlock_plan_of_outer", None)
"""The plan that the outer `@locked` of a stack passes to the next one."""
