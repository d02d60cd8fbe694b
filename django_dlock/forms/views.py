"""Class-based views that change or delete only the version that their user has seen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.views.generic import View
from django.views.generic.detail import SingleObjectMixin
from django.views.generic.edit import BaseFormView, DeletionMixin, FormMixin

from django_dlock.atomic_blocks import own_block
from django_dlock.bases import guard_override, guards, require_left_of
from django_dlock.errors import StaleObject
from django_dlock.forms import VersionedModelForm, versioned
from django_dlock.lazy import unwrapped
from django_dlock.versions import require_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.models import QuerySet
    from django.http import HttpRequest

__all__ = ["VersionedEditMixin"]

T = TypeVar("T")


def read_from_write_database(rows: QuerySet[Any], request: HttpRequest) -> QuerySet[Any]:
    """Return the queryset of a POST on the database that will be written.

    A replica may not have the newest version yet.
    """
    if request.method == "POST" and rows._db is None:  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        return rows.using(router.db_for_write(rows.model))
    return rows


def again_when_stale(view: Callable[[], T], *, unless: Callable[[], bool] = lambda: False) -> T:
    """Call a view, and once more if the object changed after the view had read it: then it finds the difference.

    Both calls have to be in a transaction, so that nothing of a call that fails remains. `unless` says, after a call
    that has failed, whether it did something that must not be done twice.
    """
    try:
        return view()
    except StaleObject:
        if unless():
            raise
        return view()


@guards
def _versioned_class(get_form_class: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: versioned(get_form_class(self), _model_of(self))


def _model_of(view: Any) -> Any:
    """Return the model of a view: a view with its own `get_object()` may name it by its form only, or nowhere."""
    options = getattr(getattr(view, "form_class", None), "_meta", None)
    if model := getattr(options, "model", None):
        return model
    try:
        return view.get_queryset().model
    except ImproperlyConfigured:
        return type(unwrapped(getattr(view, "object", None) or view.get_object()))


@guards
def _requiring_version(get_form: Callable[..., Any]) -> Callable[..., Any]:
    def requiring(self: Any, *args: Any, **kwargs: Any) -> Any:
        form = get_form(self, *args, **kwargs)
        if not isinstance(form, VersionedModelForm):
            raise ImproperlyConfigured(
                f"get_form() of {type(self).__name__} returns a form that would overwrite the changes of others: "
                f"derive {type(form).__name__} from VersionedModelForm, or return it from get_form_class()"
            )
        return form

    return requiring


class VersionedEditMixin:
    """A mixin for UpdateView and DeleteView, to the left of them; the template renders `{{ form }}` and a button.

    An object that has changed since the page was shown is neither saved nor deleted: the page is shown again, with the
    differences. A change during the request itself is found as well. The HTTP method DELETE, which has no form, is
    refused. The form class of your own `get_form_class()` is guarded as well. A `get_form()` of yours has to return a
    VersionedModelForm: for any other form it raises ImproperlyConfigured, before anything is shown or written.
    """

    http_method_names = [method for method in View.http_method_names if method != "delete"]  # noqa: RUF012 - Django's

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for guarded in (View, SingleObjectMixin, FormMixin):
            require_left_of(guarded, VersionedEditMixin, cls)
        if BaseFormView in cls.__mro__ and SingleObjectMixin not in cls.__mro__:
            raise TypeError(
                f"{cls.__name__} edits no object that VersionedEditMixin could guard: make it an UpdateView or "
                "DeleteView in place of a FormView; in a FormView without the mixin, use a VersionedModelForm"
            )
        guard_override(cls, "get_form_class", _versioned_class)
        guard_override(cls, "get_form", _requiring_version)

    def get_queryset(self) -> Any:
        return read_from_write_database(super().get_queryset(), self.request)  # type: ignore[attr-defined, misc]

    @_versioned_class
    def get_form_class(self) -> Any:
        return super().get_form_class()  # type: ignore[misc]

    @_requiring_version
    def get_form(self, form_class: Any = None) -> Any:
        return super().get_form(form_class)  # type: ignore[misc]

    def get_form_kwargs(self) -> dict[str, Any]:
        return {"instance": self.object, **super().get_form_kwargs()}  # type: ignore[attr-defined, misc]

    def form_valid(self, form: Any) -> Any:
        """Save or delete as Django does; raises StaleObject if the object was read again after a change of others."""
        if isinstance(self, DeletionMixin) and isinstance(form, VersionedModelForm):
            instance = unwrapped(self.object)
            form.require_known(instance, "delete")
            require_unchanged(instance)
        return super().form_valid(form)  # type: ignore[misc]

    def post(self, *args: Any, **kwargs: Any) -> Any:
        in_transaction = own_block(router.db_for_write(_model_of(self)))
        return again_when_stale(partial(in_transaction(super().post), *args, **kwargs))  # type: ignore[misc]
