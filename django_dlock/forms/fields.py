"""The hidden input with a form's version, and inputs that show what the database has."""

from __future__ import annotations

from typing import Any

from django import forms

__all__ = ["Theirs", "VersionInput"]


class VersionInput(forms.CharField):
    """The hidden input with what the page has shown; the form itself reads it."""

    widget = forms.HiddenInput

    def get_bound_field(self, form: Any, field_name: str) -> forms.BoundField:
        return _BoundVersion(form, self, field_name)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class _BoundVersion(forms.BoundField):
    form: Any  # a VersionedModelForm, which is made of this

    def value(self) -> Any:
        return self.form.signed_version()


class Theirs(forms.BoundField):
    """A field for which the user has taken what is in the database."""

    data = None

    def value(self) -> Any:
        return self.field.prepare_value(self.initial)
