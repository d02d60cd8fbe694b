"""HTTP preconditions for views: ETag from the version, If-Match before a change, without a race.

`check_preconditions` compares in memory, and the UPDATE of the same instance checks the version again; `@conditional`
compares under the row's lock, which the view's transaction keeps. `LockMiddleware` answers the errors with 412, 428 and
400.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ValidationError
from django.db import connections, models, router
from django.http import Http404, HttpResponseNotModified

from django_dlock.atomic_blocks import own_block
from django_dlock.comparisons import only_locked
from django_dlock.connections import in_transaction, roll_back_refusal
from django_dlock.errors import as_database_error
from django_dlock.lazy import unwrapped
from django_dlock.querysets import row_name
from django_dlock.versions import VersionedMixin, read_version
from django_dlock.views import pk
from dlock_core.errors import DLockError, NoSuchKey
from dlock_core.late import LateWork, runs_async
from dlock_core.web.decorators import Argument, finder
from dlock_core.web.preconditions import READ_METHODS, UNCONDITIONAL_METHODS, entity_tag, evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_preconditions", "conditional", "etag_of"]

F = TypeVar("F", bound="Callable[..., Any]")

_LATE_WORK: Final = LateWork("@conditional", "the transaction", "return a response with a list")


def etag_of(instance: models.Model, *, variant: str = "") -> str:
    """Return the ETag of a versioned instance as it was read or written, for `response["ETag"]`.

    `variant` distinguishes representations that one URL returns by Accept or by user. Raises TypeError for a model
    without a version, ValueError if the version was deferred.
    """
    instance = unwrapped(instance)
    require_version(type(instance))
    return tag_of_version(type(instance), instance.pk, read_version(instance), variant)


def check_preconditions(
    request: Any, instance: models.Model, *, required: bool = True, accept_weak: bool = False, variant: str = ""
) -> bool:
    """Check If-Match and If-None-Match against an instance that was just read; return True to answer 304 to a GET.

    There is no race if *this* instance is written afterwards, by `save_with_version()`, `save()` or `delete()`: they
    check the version again, and their StaleObject is answered with 412 as well. Do not read the instance again in
    between. Before any other kind of write, read it with `lock_row()`.

    Args:
        request: the request.
        instance: the object that the request reads or changes.
        required: whether a method that changes the object needs If-Match.
        accept_weak: accept W/ tags as well; GZipMiddleware and nginx turn our tags into weak ones.
        variant: as for `etag_of`.

    Raises:
        PreconditionFailed: the condition does not hold (412).
        PreconditionRequired: If-Match is missing (428).
        PreconditionMalformed: a condition cannot be read (400).
    """
    instance = unwrapped(instance)
    tag, name = etag_of(instance, variant=variant), row_name(type(instance), instance.pk)
    return _evaluate(request, instance, tag, name=name, required=required, accept_weak=accept_weak)


def conditional(
    model: type[models.Model],
    key: str | Argument = pk,
    *,
    required: bool = True,
    accept_weak: bool = False,
    variant: str = "",
    using: str | None = None,
) -> Callable[[F], F]:
    """Decorate the view of one object: reads get an ETag and 304, changes need If-Match.

    A request that changes the object runs in a transaction in which the row is locked (on SQLite the transaction itself
    is the lock), so everything that the view writes is based on the version in If-Match. It is rolled back, with that
    of ATOMIC_REQUESTS, by an exception, and by the response that REST framework makes of one. A request that reads gets
    the ETag from before the view ran. Works on function views, class-based views and their methods.

    Args:
        model: the model of the object.
        key: the view's argument that is the primary key; `arg("code", str.lower)` converts it first.
        required: whether a method that changes the object needs If-Match.
        accept_weak: accept W/ tags as well.
        variant: as for `etag_of`.
        using: the database; by default the one that the routers choose.

    Raises:
        TypeError: when decorating an async view, which cannot hold a transaction: use `check_preconditions` in it; and
            for a generator, or an answer to a change that is still to be read, such as a REST framework response with
            an iterator or a queryset.
        Http404: there is no such row.
        DLockError: as `check_preconditions` does.
    """
    require_version(model)
    argument = Argument(key) if isinstance(key, str) else key
    return _ConditionalView(model, argument, required, accept_weak, variant, using).decorate


@dataclass(frozen=True)
class _ConditionalView:
    """The options of `conditional`, and the wrapper of the view."""

    model: type[models.Model]
    key: Argument
    required: bool
    accept_weak: bool
    variant: str
    using: str | None

    def decorate(self, view: F) -> F:
        if runs_async(view, iscoroutinefunction) or getattr(view, "view_is_async", False):
            raise TypeError(
                f"@conditional: {getattr(view, '__name__', repr(view))} is async: use check_preconditions() in it"
            )
        if not isinstance(view, type):
            return cast("F", self._wrap(view))
        view.dispatch = self._wrap(view.dispatch)  # type: ignore[attr-defined]
        return view

    def _wrap(self, view: Callable[..., Any]) -> Callable[..., Any]:
        _LATE_WORK.refuse_function(view)
        find = finder(view, self.key.name, "@conditional")

        @wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = next(each for each in args[:2] if hasattr(each, "META"))
            if request.method in UNCONDITIONAL_METHODS:
                return view(*args, **kwargs)
            value = self._converted(find(args, kwargs))
            if request.method in READ_METHODS:
                return self._read(request, value, lambda: view(*args, **kwargs))
            alias = self.using or router.db_for_write(self.model)
            with own_block(alias):
                self._is_known(request, value, _current_tag(self.model, value, self.variant, alias=alias, lock=True))
                answer = _LATE_WORK.refuse_answer(
                    view, view(*args, **kwargs), "use check_preconditions() in an async view"
                )
                roll_back_refusal(answer, alias)
            # REST framework has met only the block above, in place of the transaction that it rolls back.
            if connections[alias].settings_dict["ATOMIC_REQUESTS"] and in_transaction(alias):
                roll_back_refusal(answer, alias)
            return answer

        return wrapper

    def _converted(self, value: Any) -> Any:
        try:
            return self.key.converted(value, self.model._meta.label)
        except NoSuchKey:
            raise _not_found(self.model, value) from None

    def _read(self, request: Any, value: Any, view: Callable[[], Any]) -> Any:
        alias = self.using or router.db_for_read(self.model)
        tag = _current_tag(self.model, value, self.variant, alias=alias, lock=False)
        response = HttpResponseNotModified() if self._is_known(request, value, tag) else view()
        if response.status_code in {200, 304}:
            response.headers.setdefault("ETag", tag)
        return response

    def _is_known(self, request: Any, value: Any, tag: str) -> bool:
        name = row_name(self.model, value)
        return _evaluate(request, None, tag, name=name, required=self.required, accept_weak=self.accept_weak)


def _evaluate(*args: Any, **options: Any) -> bool:
    try:
        return evaluate(*args, **options)
    except DLockError as error:
        raise as_database_error(error) from None


def _current_tag(model: type[models.Model], key: Any, variant: str, *, alias: str, lock: bool) -> str:
    try:
        rows = model._base_manager.using(alias).filter(pk=key)
    except (TypeError, ValueError, ValidationError):  # A URL may contain anything, such as "abc" for a number.
        raise _not_found(model, key) from None
    if lock:
        rows = only_locked(rows)
    found: Any = rows.order_by("pk").values_list("pk", model._dlock_version.name).first()  # type: ignore[attr-defined]
    if found is None:
        raise _not_found(model, key)
    number, version = found
    return tag_of_version(model, number, version, variant)


def _not_found(model: type[models.Model], key: Any) -> Http404:
    return Http404(f"{row_name(model, key)} does not exist.")


def tag_of_version(model: type[models.Model], key: Any, version: int, variant: str) -> str:
    """Return the ETag of a row in one of its versions."""
    table = cast("Any", model._meta.concrete_model)._meta.db_table
    return entity_tag(table, key, version, variant)


def require_version(model: Any) -> None:
    """Raise TypeError for a model whose `save()` checks no version, even if it has a VersionField."""
    if not (isinstance(model, type) and issubclass(model, VersionedMixin)):
        name = getattr(model, "__name__", model)
        raise TypeError(f"{name} has no version that is checked: add VersionedMixin to its bases")
