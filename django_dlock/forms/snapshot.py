"""What a page showed of an object: its version, and what stood in its fields, signed, as a text for a hidden input.

The text is bound to the object: one of another object, or a forged one, is refused. It is signed, not encrypted: of
long and of secret values it has only a digest, which can be compared and not read.
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

__all__ = ["Seen", "Unseen", "canonical", "kept", "stored"]

LONGEST: Final = 1000  # characters of a value that travel with the page
Kept: TypeAlias = "str | list[str] | None"  # a text, the digest of one in a list, or NULL


class Unseen(DLockError):
    """The request does not say, or not believably, which version of the object was on the page."""

    def __init__(self, instance: Model) -> None:
        name = f"{type(instance).__name__}({instance.pk})"
        super().__init__(f"which version of {name} was shown is missing or forged: load the page again", name=name)


@dataclass(frozen=True, slots=True)
class Seen:
    """The version that a page showed; what the fields had then (`kept`); and which of them it asks about (`asked`)."""

    version: int
    kept: dict[str, Kept] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def sign(self, instance: Model) -> str:
        return signing.dumps([self.version, self.kept, self.asked], salt=_salt(instance), compress=True)

    @classmethod
    def read(cls, text: Any, instance: Model) -> Seen:
        """Read what `sign` has written for the same object; raises Unseen for anything else."""
        try:
            return cls(*signing.loads(str(text or ""), salt=_salt(instance)))
        except (signing.BadSignature, ValueError, TypeError):
            raise Unseen(instance) from None

    def shows(self, name: str, text: str | None) -> bool:
        """Say whether the field had this text when the page was made."""
        before = self.kept.get(name)
        return before == _digest(name, text) if isinstance(before, list) else before == text

    def text(self, name: str) -> str | None:
        """Give what the field had, or None where that is not known."""
        before = self.kept.get(name)
        return before if isinstance(before, str) else None

    def knows(self, name: str) -> bool:
        """Say whether `text` is what the field had, and not merely missing."""
        return name in self.kept and not isinstance(self.kept[name], list)


def _salt(instance: Model) -> str:
    return f"django_dlock.forms.snapshot:{type(instance)._meta.concrete_model._meta.label_lower}:{instance.pk}"  # type: ignore[union-attr]


def kept(name: str, text: str | None, *, secret: bool = False) -> Kept:
    """Give what may travel with the page: the text itself, or its digest."""
    return _digest(name, text) if secret or (text and len(text) > LONGEST) else text


def _digest(name: str, text: str | None) -> list[str]:
    return [salted_hmac(f"django_dlock.forms.snapshot:{name}", json.dumps(text), algorithm="sha256").hexdigest()]


def stored(field: Field[Any, Any] | ManyToManyField[Any, Any], instance: Model) -> str | None:
    """Give the canonical text of a field of an instance."""
    return canonical(field, field.value_from_object(instance))


def canonical(field: Field[Any, Any] | ManyToManyField[Any, Any], value: Any) -> str | None:
    """Write a value so that equal ones have equal texts, whether they come from the database or from a form.

    Microseconds, which no form shows, are left out.
    """
    if value is None:
        return None
    if isinstance(field, ManyToManyField):
        return json.dumps(sorted(str(one.pk) for one in value))
    if getattr(value, "_committed", True) is False:  # an upload, perhaps by the name of the file that is there
        return str(_("%s (new)") % value.name)
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, datetime | time):
        return _in_utc(value).replace(microsecond=0).isoformat()
    text: Any = field.value_to_string(_holder(field.attname, value))
    plain = text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str)
    return plain.replace("\r\n", "\n")


def _in_utc(value: datetime | time) -> datetime | time:
    return value.astimezone(UTC) if isinstance(value, datetime) and is_aware(value) else value


def _holder(name: str, value: Any) -> Any:
    """Make what stands for an instance with one value."""
    return SimpleNamespace(**{name: value})
