"""Many rows on one page of the admin: inlines, and the list with `list_editable`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin

from django_dlock.forms import VERSION, versioned
from django_dlock.formsets import VersionedForms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.http import HttpRequest

__all__ = ["VersionedInlineMixin", "VersionedStackedInline", "VersionedTabularInline", "versioned_rows"]


class _Key(forms.BoundField):
    """The input of a row's key, and beside it its version: the admin's templates render no other hidden input."""

    def as_widget(self, *args: Any, **kwargs: Any) -> Any:
        return super().as_widget(*args, **kwargs) + self.form[VERSION].as_widget()


class _Rows(VersionedForms):
    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)
        if VERSION in form.fields:
            name = self._pk_field.name  # type: ignore[attr-defined]
            form._bound_fields_cache[name] = _Key(form, form.fields[name], name)


def versioned_rows(formset: Any, also_shown: Sequence[Any]) -> Any:
    """Make a formset class guard each row; a refused row refuses them all."""
    form = versioned(formset.form, also_shown=tuple(also_shown))
    return type(formset.__name__, (_Rows, formset), {"form": form})


class VersionedInlineMixin:
    """For an inline of a VersionedMixin model: a row that was changed meanwhile is neither overwritten nor deleted."""

    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        formset = super().get_formset(request, obj, **kwargs)  # type: ignore[misc]
        return versioned_rows(formset, self.get_readonly_fields(request, obj))  # type: ignore[attr-defined]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for name in super().get_fields(request, obj) if name != VERSION]  # type: ignore[misc]


class VersionedTabularInline(VersionedInlineMixin, admin.TabularInline):  # type: ignore[type-arg]
    """A TabularInline of a VersionedMixin model."""


class VersionedStackedInline(VersionedInlineMixin, admin.StackedInline):  # type: ignore[type-arg]
    """A StackedInline of a VersionedMixin model."""
