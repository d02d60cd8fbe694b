"""Forms that never overwrite a change which their user has not seen.

The form carries a signed snapshot of the object that it shows. If the object has changed by the time the form is
submitted, nothing is saved: the form is invalid, and renders as a table of differences that lets the user choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from django import forms
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import router
from django.forms.renderers import DjangoTemplates
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from django_dlock.errors import StaleObject
from django_dlock.forms.differences import (
    DELETE,
    MINE,
    THEIRS,
    Conflict,
    compare,
    compared_fields,
    is_editable,
    resubmitted,
)
from django_dlock.forms.snapshot import FormSnapshot, SnapshotMissing, canonical_text, canonical_value, for_page
from django_dlock.lazy import unwrapped
from django_dlock.version_field import has_had, has_written, latest_version, row_key
from django_dlock.versions import VersionedMixin, read_version, require_unchanged
from dlock_core.observability.hooks import emit_conflict

__all__ = ["VERSION", "BaseVersionedInlineFormSet", "BaseVersionedModelFormSet", "VersionedModelForm", "versioned"]


if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Any]
    _ModelFormSet = forms.BaseModelFormSet[Any, Any]
else:
    _ModelForm, _ModelFormSet = forms.ModelForm, forms.BaseModelFormSet


VERSION: Final = "dlock_version"
"""The name of the hidden input with the snapshot."""

CHANGED: Final = _("This object was changed by someone else after you opened it. Nothing has been saved.")
GONE: Final = _("This object was deleted by someone else after you opened it. Load the page again.")
UNANSWERED: Final = _("Choose a value for each field.")
VERSION_MISSING: Final = _("The form does not say which version of the object it has shown. Load the page again.")


class VersionInput(forms.CharField):
    """The hidden input with the snapshot, which the form reads itself."""

    widget = forms.HiddenInput

    def get_bound_field(self, form: Any, field_name: str) -> forms.BoundField:
        return _BoundVersion(form, self, field_name)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


class _BoundVersion(forms.BoundField):
    form: VersionedModelForm

    def value(self) -> Any:
        return self.form.signed_version()


class _DatabaseValue(forms.BoundField):
    """A field for which the user has chosen the value in the database over their own."""

    data = None

    def value(self) -> Any:
        return self.field.prepare_value(self.initial)


class VersionedModelForm(_ModelForm):
    """A ModelForm of a VersionedMixin model that asks its user about changes made since the page was rendered.

    The form compares the snapshot on the page with the object that was read for this request. A change between that
    and `save()` raises StaleObject from `save()`. Inputs that are not fields of the model are not compared.

    Its errors have the codes "stale" (the object has changed), "unanswered" (a choice is open), "gone" (the object was
    deleted) and "version_missing" (no snapshot, or a forged one).
    """

    dlock_version = VersionInput(required=False)

    also_shown: ClassVar[tuple[str, ...]] = ()
    """Model fields that the page shows next to the form."""
    secret_fields: ClassVar[tuple[str, ...]] = ()
    """Fields whose values are neither sent along nor shown; those of password inputs never are."""

    conflict: Conflict | None = None
    """What the user has to decide, after `is_valid()`; None if there is nothing to decide."""
    is_row = False
    """The form is one of several rows on a page: it is ignored if its user has not changed it."""
    is_gone = False
    """The page has shown a row that has been deleted since."""
    is_refused = False
    """The form must be neither saved nor deleted, even if it has no other errors or is marked for deletion."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instance = unwrapped(self.instance)
        if not isinstance(self.instance, VersionedMixin):
            raise ImproperlyConfigured(f"{type(self).__name__} needs a model with VersionedMixin")
        self._next_version = ""
        self._given, self._is_addition = self.instance, self.instance._state.adding
        if self._is_addition:
            self.fields.pop(VERSION, None)
        else:
            self._version_read = self._version_checked = read_version(self.instance)
            self._key = row_key(self.instance)

    # The version

    def signed_version(self) -> str:
        """Return the text for the hidden input: the submitted one until everything that it asked about is answered."""
        if self.is_bound:
            return self._next_version or self._posted(VERSION)
        return self._sign()

    def _posted(self, name: str) -> Any:
        return self.data.get(self.add_prefix(name), "")

    def _sign(self) -> str:
        texts = {each.name: canonical_value(each, self.instance) for each in compared_fields(self)}
        values = {name: for_page(name, text, secret=self.is_secret(name)) for name, text in texts.items()}
        return FormSnapshot(self._version_read, values).sign(self.instance)

    def is_secret(self, name: str) -> bool:
        """Return whether a field's value must not be sent along or shown."""
        widget = self.fields[name].widget if name in self.fields else None
        hides = getattr(widget, "input_type", "") == "password" or getattr(widget, "read_only", False)
        return hides or name in self.secret_fields

    # Answers

    def radio(self, name: str) -> str:
        """Return the name of the inputs that ask about a field."""
        return self.add_prefix(f"{VERSION}_{name}")

    def answer(self, name: str) -> Any:
        """Return "mine" or "theirs", or None if the user has not chosen."""
        answer = self.data.get(self.radio(name))
        return answer if answer in {MINE, THEIRS} else None

    def _declined_fields(self) -> list[str]:
        """Return the fields for which the user has chosen the value in the database."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.version != self._version_read or not all(map(self.answer, snapshot.asked)):
            return []  # The answers, if any, were given about another version: everything is asked again.
        if snapshot.asked:
            self._next_version = self._sign()
        if DELETE in snapshot.asked and self.answer(DELETE) == THEIRS:  # Keep the object as it is now.
            return [DELETE, *(field.name for field in compared_fields(self) if is_editable(self, field.name))]
        return [name for name in snapshot.asked if self.answer(name) == THEIRS and name in self.fields]

    def _keep_database_values(self, names: list[str]) -> None:
        """Let cleaning take the values of these fields from the database instead of from the submitted data."""
        self.initial.update(forms.model_to_dict(self.instance, fields=names))
        for name in names:
            field = self.fields[name]
            self._bound_fields_cache[name] = _DatabaseValue(self, field, name)  # type: ignore[attr-defined]
            # Django cleans a disabled field from its initial value. A FileField has no value to clean, and without
            # an upload keeps its file.
            field.disabled = not isinstance(field, forms.FileField)

    # Cleaning

    def full_clean(self) -> None:
        """Clean as Django does, with the values in the database where the user has chosen them."""
        if self.instance is not self._given and not self.instance._state.adding:
            raise ImproperlyConfigured(f"{type(self).__name__} shows another object's version: pass instance= to it")
        if not self.is_bound or self._is_addition:
            super().full_clean()
            return
        if VERSION not in self.fields:
            raise ImproperlyConfigured(
                f"{type(self).__name__} has lost its version, without which it would overwrite the changes of others: "
                f"keep {VERSION!r} in self.fields"
            )
        self._snapshot = self._submitted_snapshot()
        declined = self._declined_fields()
        self._keep_database_values(declined)
        super().full_clean()
        self._set_changed([name for name in self.changed_data if name not in declined])
        for name in declined:
            self.fields[name].disabled = False

    def _set_changed(self, names: list[str]) -> None:
        self.__dict__["changed_data"] = names  # Django caches the property there.

    def _submitted_snapshot(self) -> FormSnapshot | None:
        try:
            return FormSnapshot.read(self._posted(VERSION), self.instance)
        except SnapshotMissing:
            return None

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]
        if self.is_gone:
            self.errors.clear()
            self._refuse(GONE, "gone")
        elif not self._is_addition:
            self._check()

    def _check(self) -> None:
        snapshot, self._version_checked = self._snapshot, latest_version(self.instance)
        if snapshot is None:
            self._refuse(VERSION_MISSING, "version_missing")
        elif snapshot.version != self._version_read or self._has_changed_meanwhile():
            self._ask(snapshot, CHANGED, "stale")
        elif not all(map(self.answer, snapshot.asked)):
            self._ask(snapshot, UNANSWERED, "unanswered")

    def _has_changed_meanwhile(self) -> bool:
        """Return whether the instance was read again in place, also by `clean()`, after others had changed the row."""
        return not has_had(self.instance, self._version_read)

    def save(self, commit: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Django
        """Save as Django does; raises StaleObject if the instance was read again since, after others had changed it."""
        if self.is_bound:
            self.require_known(self.instance)
        return super().save(commit=commit)

    def require_known(self, instance: Any, action: str = "save") -> None:
        """Raise StaleObject if an instance of the form's row was read after a change that the form does not know."""
        if self._is_addition or instance._state.adding or row_key(instance) != self._key:
            return  # It is a copy, of which the form knows no version.
        if not self._knows(instance):
            found = latest_version(instance)
            raise emit_conflict(StaleObject(instance, expected=self._version_read, found=found, action=action))

    def _knows(self, instance: Any) -> bool:
        """Return whether only writes of the instance have changed the row, or it was read again after such a write.

        The write has compared the version that the form knows. What is read afterwards, such as what the model's
        `save()` has computed by a query, replaces the form's values in the instance, and is not overwritten by them.
        """
        version, own = self._version_read, self.instance
        if has_had(instance, version) or has_written(instance, version, later_than=self._version_checked):
            return True
        return instance is not own and has_had(own, read_version(instance)) and self._knows(own)

    def _ask(self, snapshot: FormSnapshot, message: Any, code: str) -> None:
        can_compare = not self.errors or self.is_to_be_deleted()
        if can_compare and self.is_row and not self._is_touched(snapshot):
            self._set_changed([])  # There is nothing to save in this row, so nothing can be overwritten.
            return
        row = self._row()
        if row is None:
            self._refuse(GONE, "gone")
            return
        if can_compare:
            self.conflict = self._conflict(snapshot, row, is_unanswered=code == "unanswered")
        self._refuse(message, code)

    def _refuse(self, message: Any, code: str) -> None:
        self.is_refused = True
        if self.is_to_be_deleted():  # A formset does not validate the forms that it deletes.
            self.cleaned_data[DELETE] = False
        self.add_error(None, ValidationError(message, code=code))

    def _row(self) -> Any:
        """Read the row again from the database where it will be written, because cleaning has changed the instance."""
        model = type(self.instance)
        using = router.db_for_write(model, instance=self.instance)
        return model._base_manager.using(using).filter(pk=self.instance.pk).first()

    def _conflict(self, snapshot: FormSnapshot, row: Any, *, is_unanswered: bool) -> Conflict:
        differences = compare(self, snapshot, row)
        asked = [each.name for each in differences if each.is_asked]
        # The next answer is about the version of this row, but still about what the user had on the page at first.
        version = FormSnapshot(read_version(row), snapshot.values, asked).sign(self.instance)
        files: Any = self.files
        uploads = [(name, files[name].name) for name in map(self.add_prefix, self.fields) if name in files]
        title = f"{capfirst(row._meta.verbose_name)}: {row}"
        return Conflict(title, differences, self.add_prefix(VERSION), version, is_unanswered, uploads)

    # What the user wants

    def wanted(self, field: Any) -> str | None:
        """Return the canonical text of the value that the user wants a field to have."""
        if field.many_to_many:
            return canonical_text(field, self.cleaned_data[field.name])
        return canonical_value(field, self.instance)

    def is_to_be_deleted(self) -> bool:
        return bool(self.cleaned_data.get(DELETE))

    def _is_touched(self, snapshot: FormSnapshot) -> bool:
        """Return whether the user has changed anything since the page was rendered."""
        editable = (field for field in compared_fields(self) if is_editable(self, field.name))
        return self.is_to_be_deleted() or any(not snapshot.had(field.name, self.wanted(field)) for field in editable)

    # Rendering

    def render(self, template_name: Any = None, context: Any = None, renderer: Any = None) -> SafeString:
        """Render the form, or after a conflict the differences instead; `as_p()` and the like do the same."""
        if self.conflict is None or context is not None:
            return super().render(template_name, context, renderer)
        hidden = list(resubmitted(self.data, [self.conflict], self.add_prefix("")))
        context = {"form": self, "conflict": self.conflict, "hidden": hidden}
        return mark_safe(DjangoTemplates().render("django_dlock/conflict_form.html", context))  # noqa: S308 - a template's

    __str__ = __html__ = render


def versioned(form: Any, model: Any = None, **attributes: Any) -> Any:
    """Return a VersionedModelForm class made of a form class, with these attributes.

    A form without a model becomes one of `model`. Changes that were made to `base_fields` are kept.
    """
    if not issubclass(form, forms.BaseModelForm):
        bases: tuple[type, ...] = (form,) if form is not forms.Form else ()
        return forms.modelform_factory(model, type("Form", (VersionedModelForm, *bases), attributes), fields=())
    is_versioned = issubclass(form, VersionedModelForm)
    if is_versioned and all(getattr(form, name) == value for name, value in attributes.items()):
        return form
    bases = (form,) if is_versioned else (VersionedModelForm, form)
    made: Any = type(form)(form.__name__, bases, attributes)
    made.base_fields = {**form.base_fields, VERSION: VersionedModelForm.base_fields[VERSION]}
    return made


class VersionedForms:
    """The common base of formsets of VersionedModelForm."""

    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)  # type: ignore[misc]
        if not isinstance(form, VersionedModelForm):
            raise ImproperlyConfigured(
                f"{type(self).__name__} guards forms with a version, not {type(form).__name__}: pass "
                "form=VersionedModelForm to the factory, or a form that is derived from it"
            )
        form.is_row = True
        was_shown = form.is_bound and index is not None and index < self.initial_form_count()  # type: ignore[attr-defined]
        form.is_gone = was_shown and form.instance._state.adding


class CheckedDeletion(_ModelFormSet):
    """A base of formsets of VersionedModelForm, to the right, so that a row is checked after their own code has run."""

    def save_existing_objects(self, commit: bool = True) -> Any:  # noqa: FBT001, FBT002 - as in Django
        """Save and delete as Django does; raises StaleObject first if others have changed a row that will be deleted.

        A `delete()` of the model's own may write the next of these rows by a query, to close a gap in an order.
        """
        if commit and self.can_delete:
            for form in self.deleted_forms:  # They may be of several classes, of which some have a `delete()`.
                if not form.instance._state.adding:
                    require_unchanged(form.instance)
        return super().save_existing_objects(commit)

    def delete_existing(self, obj: Any, commit: bool = True) -> None:  # noqa: FBT001, FBT002 - as in Django
        """Delete as Django does; raises StaleObject if the row was read again since, after others had changed it."""
        for form in self.initial_forms:
            if form.instance == obj:
                form.require_known(obj, "delete")
        super().delete_existing(obj, commit)


class BaseVersionedModelFormSet(VersionedForms, CheckedDeletion):
    """The formset for `modelformset_factory(…, form=VersionedModelForm, formset=…)`: one refused row refuses all."""


class BaseVersionedInlineFormSet(VersionedForms, forms.BaseInlineFormSet, CheckedDeletion):  # type: ignore[type-arg]
    """The formset for `inlineformset_factory(…, form=VersionedModelForm, formset=…)`: one refused row refuses all."""
