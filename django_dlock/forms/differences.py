"""The conflict of a form whose object has changed, field by field: what it was, what the user wants, what it is now.

Values are compared and shown by their canonical texts (see `snapshot`), so that all three columns are comparable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from django.core.exceptions import ValidationError
from django.db.models import BooleanField, DecimalField, Field, JSONField, ManyToManyField, Model
from django.utils.formats import localize, number_format
from django.utils.text import capfirst
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _

from django_dlock.forms.snapshot import canonical_value
from django_dlock.versions import read_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django_dlock.forms.snapshot import FormSnapshot

__all__ = [
    "DELETE",
    "MINE",
    "THEIRS",
    "Conflict",
    "Difference",
    "compare",
    "compared_fields",
    "is_editable",
    "resubmitted",
]

DELETE: Final = "DELETE"  # Django's name for the check box of a formset
MINE: Final = "mine"
THEIRS: Final = "theirs"
SECRET_TEXT: Final = "•••"
CSRF_INPUT: Final = "csrfmiddlewaretoken"
Choice: TypeAlias = Literal["mine", "theirs"]
Form: TypeAlias = Any  # A VersionedModelForm, which imports this module.


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a conflict; the texts are for people."""

    name: str
    label: str
    was: str | None
    """The value that the page has shown; None if the page has only its digest."""
    mine: str | None
    """The value that the user wants; None for a field that the form only shows."""
    now: str
    choice: Choice | None
    """The side that alone has changed the field, or the side that the user has chosen."""
    radio: str
    """The name of the inputs that ask."""

    @property
    def is_asked(self) -> bool:
        return self.mine is not None


@dataclass(frozen=True, slots=True)
class Conflict:
    """What to show and to ask after a conflict, and the signed snapshot to submit with the answers (`version`)."""

    title: str
    differences: list[Difference]
    version_name: str
    version: str
    is_unanswered: bool
    """The user was asked, and has left a choice open."""
    uploads: list[tuple[str, str]]
    """Inputs whose file must be chosen again, with the name of that file: browsers do not resend files."""


def compared_fields(form: Form) -> Iterator[Any]:
    """Yield the model fields that the form edits or says it shows, except the key and the version."""
    meta = form._meta.model._meta
    for field in (*meta.fields, *meta.many_to_many):
        is_shown = field.name in form.fields or field.name in form.also_shown
        if is_shown and not field.primary_key and field is not form.instance._dlock_version:
            yield field


def compare(form: Form, snapshot: FormSnapshot, now: Model) -> list[Difference]:
    """Return the fields that saving would overwrite, and those that have changed and the form only shows."""
    found = [_difference(form, field, snapshot, now) for field in compared_fields(form)]
    differences = [difference for difference in [*found, _deletion(form)] if difference]
    if snapshot.version != read_version(now):  # The answers were given about another version.
        return differences
    return [replace(each, choice=form.answer(each.name) or each.choice) for each in differences]


def resubmitted(data: Any, conflicts: Iterable[Conflict], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the submitted data under a prefix, for hidden inputs, except what the inputs of the conflicts submit."""
    asked = {each.radio for conflict in conflicts for each in conflict.differences}
    asked |= {CSRF_INPUT, *(conflict.version_name for conflict in conflicts)}
    for name in data:
        if name.startswith(prefix) and name not in asked:
            yield from ((name, value) for value in _values(data, name))


def _values(data: Any, name: str) -> list[Any]:
    return list(data.getlist(name)) if hasattr(data, "getlist") else [data[name]]


def is_editable(form: Form, name: str) -> bool:
    """Return whether the user can change a field in the form."""
    return name in form.fields and not form.fields[name].disabled


def _difference(form: Form, field: Any, snapshot: FormSnapshot, now: Model) -> Difference | None:
    """Compare the three values of a field: on the page, wanted by the user, and in the database now (`current`)."""
    name, current = field.name, canonical_value(field, now)
    is_theirs = not snapshot.had(name, current)
    was = _show(form, field, snapshot.text(name)) if snapshot.knows(name) else None
    if form.is_to_be_deleted() or not is_editable(form, name):
        label, shown = capfirst(field.verbose_name), _show(form, field, current)
        return Difference(name, label, was, None, shown, None, "") if is_theirs else None
    wanted = form.wanted(field)
    if wanted == current:
        return None
    choice: Choice | None = None if is_theirs else MINE
    if snapshot.had(name, wanted):  # The user has not changed this field.
        choice = THEIRS
    mine, shown = _show(form, field, wanted), _show(form, field, current)
    return Difference(name, str(form[name].label), was, mine, shown, choice, form.radio(name))


def _deletion(form: Form) -> Difference | None:
    if not form.is_to_be_deleted():
        return None
    yes, no = _("Yes"), _("No")
    return Difference(DELETE, _("Delete"), no, yes, no, None, form.radio(DELETE))


def _show(form: Form, field: Any, text: str | None) -> str:
    if form.is_secret(field.name):
        return SECRET_TEXT
    return "" if not text else str(_readable(field, text, form.instance._state.db))


def _readable(field: Any, text: str, using: str | None) -> Any:
    """Return a canonical text for people: the label of a choice, the names of related objects, local time."""
    if isinstance(field, ManyToManyField):
        return ", ".join(map(str, _related(field, "pk", json.loads(text), using)))
    if field.remote_field:
        return next(iter(_related(field, field.target_field.name, [text], using)), text)
    if field.flatchoices:
        return {str(key): label for key, label in field.flatchoices}.get(text, text)
    if isinstance(field, BooleanField):
        return _("Yes") if text == "True" else _("No")
    if isinstance(field, JSONField):
        return json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    return _localized(field, text)


def _localized(field: Field[Any, Any], text: str) -> Any:
    try:
        value = field.to_python(text)
    except (ValidationError, ValueError, TypeError):
        return text
    if isinstance(value, datetime) and is_aware(value):
        value = localtime(value)
    if isinstance(field, DecimalField):
        return number_format(value, field.decimal_places)
    return localize(value)


def _related(field: Any, key: str, values: list[str], using: str | None) -> list[Model]:
    rows = field.remote_field.model._base_manager.using(using)
    return list(rows.filter(**{f"{key}__in": values}))
