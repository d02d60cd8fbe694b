"""Forms that never overwrite a change which their user has not seen.

The form carries the signed version of the object it shows. When the object has changed by the time the form comes back,
nothing is saved: the form is invalid, and renders as a page of differences that lets the user choose.
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

from django_dlock.forms.differences import DELETE, MINE, THEIRS, Conflict, compare, is_editable, sent_again, watched
from django_dlock.forms.fields import Theirs, VersionInput
from django_dlock.forms.snapshot import Seen, Unseen, canonical, kept, stored
from django_dlock.querysets import read_version

__all__ = ["VERSION", "BaseVersionedInlineFormSet", "BaseVersionedModelFormSet", "VersionedModelForm", "versioned"]


if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[Any]
else:
    _ModelForm = forms.ModelForm


VERSION: Final = "dlock_version"

CHANGED: Final = _("This object was changed by somebody else after you had opened it. Nothing has been saved.")
GONE: Final = _("This object was deleted by somebody else after you had opened it: load the page again.")
UNANSWERED: Final = _("Choose for each field, whose value it shall have.")
UNSEEN: Final = _("The form does not say which version of the object it has shown. Load the page again.")


class VersionedModelForm(_ModelForm):
    """A ModelForm of a VersionedMixin model; errors have the codes "stale", "unanswered", "unseen", "gone".

    It guards what was read when the form was bound; `save()` then raises StaleObject for a change that came in between.
    `also_shown` names model fields that the page shows beside the form, `secret_fields` those whose values may not be
    sent along, as those of password inputs never are. Inputs that are no fields of the model are not compared.
    """

    dlock_version = VersionInput(required=False)

    also_shown: ClassVar[tuple[str, ...]] = ()
    secret_fields: ClassVar[tuple[str, ...]] = ()

    conflict: Conflict | None = None
    """What the user has to decide, after `is_valid()`."""
    is_row = False
    """One of many on a page: what its user has not touched is left alone."""
    is_gone = False
    """A row that the page has shown, and that is no more."""
    is_refused = False
    """Not to be saved or deleted, whatever else is right with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self.instance, "_dlock_version"):
            raise ImproperlyConfigured(f"{type(self).__name__} needs a model with VersionedMixin")
        self._next_version = ""
        if self.instance._state.adding:
            del self.fields[VERSION]
        else:
            self._read = read_version(self.instance)

    # The version

    def signed_version(self) -> str:
        """Give the signed text for the hidden input: as it came, until everything it asked about is answered."""
        if self.is_bound:
            return self._next_version or self._posted(VERSION)
        return self._sign()

    def _posted(self, name: str) -> Any:
        return self.data.get(self.add_prefix(name), "")

    def _sign(self) -> str:
        texts = {each.name: stored(each, self.instance) for each in watched(self)}
        keep = {name: kept(name, text, secret=self.is_secret(name)) for name, text in texts.items()}
        return Seen(self._read, keep).sign(self.instance)

    def is_secret(self, name: str) -> bool:
        """Say whether a field's value must not be sent along or shown."""
        widget = self.fields[name].widget if name in self.fields else None
        hides = getattr(widget, "input_type", "") == "password" or getattr(widget, "read_only", False)
        return hides or name in self.secret_fields

    # Answers

    def radio(self, name: str) -> str:
        """Give the name of the inputs that ask about a field."""
        return self.add_prefix(f"{VERSION}_{name}")

    def answer(self, name: str) -> Any:
        """Give "mine" or "theirs", or None where the user has not chosen."""
        answer = self.data.get(self.radio(name))
        return answer if answer in {MINE, THEIRS} else None

    def _taken(self) -> list[str]:
        seen = self._seen
        if seen is None or seen.version != self._read or not all(map(self.answer, seen.asked)):
            return []
        if seen.asked:
            self._next_version = self._sign()
        if DELETE in seen.asked and self.answer(DELETE) == THEIRS:  # keep it, as it is now
            return [DELETE, *(field.name for field in watched(self) if is_editable(self, field.name))]
        return [name for name in seen.asked if self.answer(name) == THEIRS and name in self.fields]

    def _take(self, names: list[str]) -> None:
        """Let fields keep what the database has."""
        self.initial.update(forms.model_to_dict(self.instance, fields=names))
        for name in names:
            field = self.fields[name]
            self._bound_fields_cache[name] = Theirs(self, field, name)  # type: ignore[attr-defined]
            field.disabled = not isinstance(field, forms.FileField)  # which without data keeps what it has

    # Cleaning

    def full_clean(self) -> None:
        if not self.is_bound or VERSION not in self.fields:
            super().full_clean()
            return
        self._seen = self._seen_by_user()
        taken = self._taken()
        self._take(taken)
        super().full_clean()
        self._set_changed([name for name in self.changed_data if name not in taken])
        for name in taken:
            self.fields[name].disabled = False

    def _set_changed(self, names: list[str]) -> None:
        self.__dict__["changed_data"] = names  # where Django caches it

    def _seen_by_user(self) -> Seen | None:
        try:
            return Seen.read(self._posted(VERSION), self.instance)
        except Unseen:
            return None

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]
        if self.is_gone:
            self.errors.clear()
            self._refuse(GONE, "gone")
        elif VERSION in self.fields:
            self._check()

    def _check(self) -> None:
        seen = self._seen
        if seen is None:
            self._refuse(UNSEEN, "unseen")
        elif seen.version != self._read:
            self._ask(seen, CHANGED, "stale")
        elif not all(map(self.answer, seen.asked)):
            self._ask(seen, UNANSWERED, "unanswered")

    def _ask(self, seen: Seen, message: Any, code: str) -> None:
        can_compare = not self.errors or self.is_to_be_deleted()
        if can_compare and self.is_row and not self._is_touched(seen):
            self._set_changed([])  # nothing to save, so nothing to overwrite
            return
        row = self._row()
        if row is None:
            self._refuse(GONE, "gone")
            return
        if can_compare:
            self.conflict = self._conflict(seen, row, is_unanswered=code == "unanswered")
        self._refuse(message, code)

    def _refuse(self, message: Any, code: str) -> None:
        self.is_refused = True
        self.add_error(None, ValidationError(message, code=code))

    def _row(self) -> Any:
        """Read the row again, where it will be written: cleaning a form has changed its instance."""
        model = type(self.instance)
        using = router.db_for_write(model, instance=self.instance)
        return model._base_manager.using(using).filter(pk=self.instance.pk).first()

    def _conflict(self, seen: Seen, row: Any, *, is_unanswered: bool) -> Conflict:
        differences = compare(self, seen, row)
        asked = [each.name for each in differences if each.is_asked]
        version = Seen(read_version(row), seen.kept, asked).sign(self.instance)
        files: Any = self.files
        uploads = [(name, files[name].name) for name in map(self.add_prefix, self.fields) if name in files]
        title = f"{capfirst(row._meta.verbose_name)}: {row}"
        return Conflict(title, differences, self.add_prefix(VERSION), version, is_unanswered, uploads)

    # What the user wants

    def wanted(self, field: Any) -> str | None:
        """Give the canonical text of what the user wants in a field."""
        if field.many_to_many:
            return canonical(field, self.cleaned_data[field.name])
        return stored(field, self.instance)

    def is_to_be_deleted(self) -> bool:
        return bool(self.cleaned_data.get(DELETE))

    def _is_touched(self, seen: Seen) -> bool:
        ours = (field for field in watched(self) if is_editable(self, field.name))
        return self.is_to_be_deleted() or any(not seen.shows(field.name, self.wanted(field)) for field in ours)

    # Rendering

    def render(self, template_name: Any = None, context: Any = None, renderer: Any = None) -> SafeString:
        """Render the form, or after a conflict the differences instead; `as_p()` and the like do so, too."""
        if self.conflict is None or context is not None:
            return super().render(template_name, context, renderer)
        hidden = list(sent_again(self.data, [self.conflict], self.add_prefix("")))
        context = {"form": self, "conflict": self.conflict, "hidden": hidden}
        return mark_safe(DjangoTemplates().render("django_dlock/conflict_form.html", context))  # noqa: S308 - a template's

    __str__ = __html__ = render


def versioned(form: Any, model: Any = None, **attributes: Any) -> Any:
    """Make a form class a VersionedModelForm, unless it is one; a form of no model becomes one of `model`."""
    if issubclass(form, forms.BaseModelForm):
        bases: tuple[type, ...] = (form,) if issubclass(form, VersionedModelForm) else (VersionedModelForm, form)
        return type(form)(form.__name__, bases, attributes)
    bases = (form,) if form is not forms.Form else ()
    return forms.modelform_factory(model, type("Form", (VersionedModelForm, *bases), attributes), fields=())


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
