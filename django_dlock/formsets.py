"""Formsets whose rows are guarded one by one, and saved all or none."""

from __future__ import annotations

from typing import Any

from django import forms

__all__ = ["BaseVersionedInlineFormSet", "BaseVersionedModelFormSet", "VersionedForms"]


class VersionedForms:
    """What formsets of VersionedModelForm have in common."""

    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)  # type: ignore[misc]
        form.is_row = True
        was_shown = form.is_bound and index is not None and index < self.initial_form_count()  # type: ignore[attr-defined]
        form.is_gone = was_shown and form.instance._state.adding

    def _should_delete_form(self, form: Any) -> bool:
        return not form.is_refused and super()._should_delete_form(form)  # type: ignore[misc]


class BaseVersionedModelFormSet(VersionedForms, forms.BaseModelFormSet):  # type: ignore[type-arg]
    """For `modelformset_factory(…, form=VersionedModelForm, formset=BaseVersionedModelFormSet)`: all rows or none."""


class BaseVersionedInlineFormSet(VersionedForms, forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """For `inlineformset_factory(…, form=VersionedModelForm, formset=BaseVersionedInlineFormSet)`: all rows or none."""
