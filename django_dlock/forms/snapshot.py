"""What a page has shown of an object, its version and the values of its fields, as a signed text for a hidden input.

The text is bound to the object: a text of another object, or a forged one, is refused. It is signed, not encrypted. Of
long and of secret values it contains only a digest, which can be compared but not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, time
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.core import signing
from django.db.models import Field, ManyToManyField
from django.utils.crypto import salted_hmac
from django.utils.timezone import is_aware
from django.utils.translation import gettext as _

from dlock_core.errors import DLockError

if TYPE_CHECKING:
    from django.db.models import Model

__all__ = ["FormSnapshot", "SnapshotMissing", "canonical_text", "canonical_value", "for_page"]

MAX_VALUE_LENGTH: Final = 1000
"""Characters of a value that is sent along with the page; of a longer one only the digest is."""
PageValue: TypeAlias = "str | list[str] | None"
"""The canonical text of a value, or its digest in a list, or None for NULL."""


class SnapshotMissing(DLockError):
    """The request does not say, or says with a wrong signature, which version of the object the page has shown."""

    def __init__(self, instance: Model) -> None:
        name = f"{instance._meta.object_name}({instance.pk})"
        super().__init__(
            f"the version of {name} that the page has shown is missing or forged: load the page again", name=name
        )


@dataclass(frozen=True, slots=True)
class FormSnapshot:
    """The version that a page has shown, with the values of its fields and the names of those that it asks about.

    It travels with the page instead of staying on the server: a form may be open for days, in several tabs, and be sent
    to any process. So the server needs no state to know which fields the user has changed and which have changed since.
    """

    version: int
    values: dict[str, PageValue] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def sign(self, instance: Model) -> str:
        """Return the text for the hidden input, which `read` accepts for the same object only."""
        return signing.dumps([self.version, self.values, self.asked], salt=_salt(instance), compress=True)

    @classmethod
    def read(cls, text: Any, instance: Model) -> FormSnapshot:
        """Return what `sign` has written for the same object; raises SnapshotMissing for any other text."""
        try:
            return cls(*signing.loads(str(text or ""), salt=_salt(instance)))
        except (signing.BadSignature, ValueError, TypeError):
            raise SnapshotMissing(instance) from None

    def had(self, name: str, text: str | None) -> bool:
        """Return whether the field had this canonical text when the page was rendered."""
        before = self.values.get(name)
        return before == _digest(name, text) if isinstance(before, list) else before == text

    def text(self, name: str) -> str | None:
        """Return the canonical text that the field had, or None if it was NULL or is not known."""
        before = self.values.get(name)
        return before if isinstance(before, str) else None

    def knows(self, name: str) -> bool:
        """Return whether `text` is the field's value, rather than None because only a digest was sent."""
        return name in self.values and not isinstance(self.values[name], list)


def _salt(instance: Model) -> str:
    return f"django_dlock.forms.snapshot:{instance._meta.concrete_model._meta.label_lower}:{instance.pk}"  # type: ignore[union-attr]


def for_page(name: str, text: str | None, *, secret: bool = False) -> PageValue:
    """Return the form in which a value is sent along with the page: its text, or the digest of a long or secret one."""
    return _digest(name, text) if secret or (text and len(text) > MAX_VALUE_LENGTH) else text


def _digest(name: str, text: str | None) -> list[str]:
    return [salted_hmac(f"django_dlock.forms.snapshot:{name}", json.dumps(text), algorithm="sha256").hexdigest()]


def canonical_value(field: Field[Any, Any] | ManyToManyField[Any, Any], instance: Model) -> str | None:
    """Return the canonical text of a field of an instance."""
    return canonical_text(field, field.value_from_object(instance))


def canonical_text(field: Field[Any, Any] | ManyToManyField[Any, Any], value: Any) -> str | None:
    """Return a text that is the same for equal values, whether they come from the database or from a form.

    Microseconds are left out, because no form shows them.
    """
    if value is None:
        return None
    if isinstance(field, ManyToManyField):
        return json.dumps(sorted(str(one.pk) for one in value))
    if getattr(value, "_committed", True) is False:
        # An upload. It may have the name of the stored file, and must not look equal to it.
        return str(_("%s (new)") % value.name)
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, datetime | time):
        return _in_utc(value).replace(microsecond=0).isoformat()
    # value_to_string() reads the value from an instance, so it is given one that has nothing else.
    text: Any = field.value_to_string(SimpleNamespace(**{field.attname: value}))  # type: ignore[arg-type]
    plain = text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str)
    return plain.replace("\r\n", "\n")


def _in_utc(value: datetime | time) -> datetime | time:
    return value.astimezone(UTC) if isinstance(value, datetime) and is_aware(value) else value
