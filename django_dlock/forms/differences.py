"""A form whose object was changed meanwhile, field by field: what it was, what the user wants, what it is now.

Values are compared and shown by their canonical texts (see `snapshot`), so that each column means the same.
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

from django_dlock.forms.snapshot import stored
from django_dlock.querysets import read_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django_dlock.forms.snapshot import Seen

__all__ = ["DELETE", "MINE", "THEIRS", "Conflict", "Difference", "compare", "is_editable", "sent_again", "watched"]

DELETE: Final = "DELETE"  # Django's name for the check box of a formset
MINE: Final = "mine"
THEIRS: Final = "theirs"
SECRET: Final = "•••"
CSRF: Final = "csrfmiddlewaretoken"
Choice: TypeAlias = Literal["mine", "theirs"]
Form: TypeAlias = Any  # a VersionedModelForm, which is made of this


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a conflict; the texts are for people, `was` is None where the page did not keep it.

    `mine` is None for a field that the form only shows. `choice` is what one of both sides alone has changed, or what
    the user has chosen.
    """

    name: str
    label: str
    was: str | None
    mine: str | None
    now: str
    choice: Choice | None
    radio: str
    """The name of the inputs that ask."""

    @property
    def is_asked(self) -> bool:
        return self.mine is not None


@dataclass(frozen=True, slots=True)
class Conflict:
    """What to show and to ask, and the signed version (`version`) to send along with the answers."""

    title: str
    differences: list[Difference]
    version_name: str
    version: str
    is_unanswered: bool
    """The user was asked, and has left something open."""
    uploads: list[tuple[str, str]]
    """Inputs whose file has to be chosen again, with the name it had."""


def watched(form: Form) -> Iterator[Any]:
    """Give the fields of the model that the form lets edit or says it shows; never its key or its version."""
    meta = form._meta.model._meta
    for field in (*meta.fields, *meta.many_to_many):
        is_shown = field.name in form.fields or field.name in form.also_shown
        if is_shown and not field.primary_key and field is not form.instance._dlock_version:
            yield field


def compare(form: Form, seen: Seen, now: Model) -> list[Difference]:
    """Give the fields that would be overwritten, and those that changed beside the form."""
    found = [_difference(form, field, seen, now) for field in watched(form)]
    differences = [difference for difference in [*found, _deletion(form)] if difference]
    if seen.version != read_version(now):  # what was answered was another question
        return differences
    return [replace(each, choice=form.answer(each.name) or each.choice) for each in differences]


def sent_again(data: Any, conflicts: Iterable[Conflict], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Give all that a request has sent under a prefix, for hidden inputs, but for what the conflicts ask themselves."""
    asked = {each.radio for conflict in conflicts for each in conflict.differences}
    asked |= {CSRF, *(conflict.version_name for conflict in conflicts)}
    for name in data:
        if name.startswith(prefix) and name not in asked:
            yield from ((name, value) for value in _values(data, name))


def _values(data: Any, name: str) -> list[Any]:
    return list(data.getlist(name)) if hasattr(data, "getlist") else [data[name]]


def is_editable(form: Form, name: str) -> bool:
    return name in form.fields and not form.fields[name].disabled


def _difference(form: Form, field: Any, seen: Seen, now: Model) -> Difference | None:
    name, current = field.name, stored(field, now)
    is_theirs = not seen.shows(name, current)
    was = _show(form, field, seen.text(name)) if seen.knows(name) else None
    if form.is_to_be_deleted() or not is_editable(form, name):
        label, shown = capfirst(field.verbose_name), _show(form, field, current)
        return Difference(name, label, was, None, shown, None, "") if is_theirs else None
    wanted = form.wanted(field)
    if wanted == current:
        return None
    choice: Choice | None = None if is_theirs else MINE
    if seen.shows(name, wanted):
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
        return SECRET
    return "" if not text else str(_readable(field, text, form.instance._state.db))


def _readable(field: Any, text: str, using: str | None) -> Any:
    """Make a canonical text readable: the label of a choice, the names of related objects, local time."""
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
