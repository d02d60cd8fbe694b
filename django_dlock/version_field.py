"""The field that counts the writes of a row, and the version that an instance has of it: when it was read, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.db.models import F, Func
from django.db.models.query_utils import DeferredAttribute

from django_dlock.connections import restore_on_rollback
from django_dlock.errors import StaleObject
from django_dlock.lazy import unwrapped
from django_dlock.querysets import row_name
from django_dlock.refresh import is_key
from django_dlock.transactions import ABSENT
from dlock_core.observability.hooks import emit_conflict
from dlock_core.sql.versions import FIRST_VERSION_SQL, first_version

if TYPE_CHECKING:
    from collections.abc import Collection

    _BigIntegerField = models.BigIntegerField[int, int]
else:
    _BigIntegerField = models.BigIntegerField

__all__ = [
    "NEXT",
    "PARTIAL",
    "READ_VERSION",
    "SentVersion",
    "VersionField",
    "has_had",
    "has_written",
    "is_undone",
    "last_undo",
    "latest_version",
    "read_version",
    "row_key",
]

_FIRST_OWN: Final = "_dlock_first_own"
"""Attribute of an instance that keeps the version before the first of its own writes, if no other write came after."""
_OWN_WRITES: Final = "_dlock_own_writes"
"""Attribute of an instance that keeps the first and the last version of each chain of its own writes, newest last.

Other writes came between two chains. Unlike what is read, they remain when the instance is read again."""
_MAX_CHAINS: Final = 10
"""How many chains an instance remembers: of one that lives long, the older ones are of no use to anyone."""
_LAST_UNDO: Final = "_dlock_last_undo"
"""Attribute of an instance that is another object after each rollback of a write of it."""
_UNDONE: Final = "_dlock_undone"
"""Attribute of an instance that a write had changed which was rolled back: its values are not those of the row."""
PARTIAL: Final = "_dlock_partial"
"""Attribute of an instance during a save that does not write all of its values."""
READ_VERSION: Final = "_dlock_read"
"""Attribute of an instance that keeps the version it was read with after another version was assigned."""


class _NextVersion:
    """Placeholder in an UPDATE for the version that its guard allows."""


NEXT: Final = _NextVersion()


class LateVersion(int):
    """A version that an instance got later than other fields of its row, so it says nothing about them."""


class AssignedVersion(int):
    """A version that was assigned to an instance, with the one that was read before.

    Django makes the parent of a multi-table instance of the values of its attributes, which are all that it gets.
    """

    read: Any


class SentVersion(int):
    """A version that a client has sent: no conflict with the writes of an instance that was once compared with it.

    A view may save an instance several times, and its own writes count the version up from there. Without a comparison
    its writes may be those of another request: an instance may outlive its request.
    """

    def __init__(self, _: int) -> None:
        self._compared: list[Any] = []

    def __deepcopy__(self, _: Any) -> SentVersion:
        return self

    def __reduce__(self) -> Any:
        return SentVersion, (int(self),)  # Another process has other instances.

    def note_compared(self, instance: Any) -> None:
        """Remember that an instance was found to have this version."""
        self._compared.append(instance)

    def is_met(self, instance: Any) -> bool:
        """Return whether an instance was compared before, and only its own writes have come after this version."""
        return any(each is instance for each in self._compared) and has_had(instance, int(self))


class _FirstVersion(Func):
    """Database default: the first version of a row that other software inserts."""

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return FIRST_VERSION_SQL.get(connection.vendor, "1"), []


class _VersionAttribute(DeferredAttribute):
    """The version on an instance: an assigned value is what the caller expects; the value read is kept next to it.

    A version that was deferred is late, however it comes: read on demand, read along with that of other instances
    (FETCH_PEERS), or assigned.
    """

    field: VersionField

    def __set__(self, instance: Any, number: Any) -> None:
        if isinstance(number, SentVersion):
            if number.is_met(instance):
                return
            if number == latest_version(instance):
                number.note_compared(instance)
            number = int(number)
        name, values = self.field.attname, vars(instance)
        former = values.get(name, ABSENT)
        values[name] = number
        if isinstance(former, LateVersion):
            values[name] = _marked(number, is_late=True)
        elif former is not ABSENT:
            read = values.setdefault(READ_VERSION, former)
            if isinstance(number, int):
                values[name] = assigned = AssignedVersion(number)
                assigned.read = read
        elif not instance._state.adding:  # An instance that is being made gets all its fields now, one by one.
            self.field.mark_read(instance, (name,))
        elif isinstance(number, AssignedVersion):
            values[READ_VERSION] = number.read


def _marked(number: Any, *, is_late: bool) -> Any:
    if not isinstance(number, int):
        return number  # What is no version is refused when it is read.
    return LateVersion(number) if is_late else int(number)


class VersionField(_BigIntegerField):
    """A counter of the writes of a row: every UPDATE increments it. A row starts at the time of its INSERT.

    The time is in microseconds, so that a row created again under an old key never gets a version that the old row had.
    `VersionedMixin` checks the version; raw SQL and `bulk_create(update_conflicts=True)` bypass it.
    """

    descriptor_class = _VersionAttribute

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Both defaults are needed: other software inserts by db_default, and a new instance gets its number by default.
        kwargs.update(default=first_version, db_default=_FirstVersion(), editable=False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        for fixed in ("default", "db_default", "editable"):
            kwargs.pop(fixed, None)
        return name, "django_dlock.models.VersionField", args, kwargs

    def contribute_to_class(self, cls: type[models.Model], name: str, private_only: bool = False) -> None:  # noqa: FBT001, FBT002
        super().contribute_to_class(cls, name, private_only)
        cls._dlock_version = self  # type: ignore[attr-defined]
        if hasattr(cls, "_dlock_rows") and not cls._meta.base_manager_name:
            cls._meta.base_manager_name = "_dlock_rows"

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001
        if add:  # The instance may be a clone: whatever version it carries belongs to the original.
            for name in (_FIRST_OWN, _OWN_WRITES, _UNDONE):
                vars(model_instance).pop(name, None)
            number = vars(model_instance)[self.attname] = first_version()
            return number
        # The models inside migrations do not have the mixin's methods, but their saves must increment the version, too.
        return NEXT if hasattr(model_instance, "save_with_version") else F(self.attname) + 1

    def read_version(self, instance: Any) -> int:
        """Return the version that was read with the instance, or assigned to it.

        Never queries: a version that is read now would make the check void. Raises ValueError if the version was
        deferred, or came later than other fields.
        """
        number = vars(instance).get(self.attname)
        if isinstance(number, LateVersion):
            raise ValueError(  # noqa: TRY004 - as below
                f"{row_name(type(instance), instance.pk)}: {self.name!r} was read or assigned later than other fields, "
                f"so nothing can be checked: read it together with them, only(…, {self.name!r}), or refresh them all"
            )
        if not isinstance(number, int):
            state = f"is {number!r:.80}" if self.attname in vars(instance) else "was deferred"
            advice = "read the instance with its version, or call refresh_from_db()"
            if number is not None:
                advice = "a version is a number, so assign that of a text as int(text)"
            raise ValueError(  # noqa: TRY004 - the type is right, the value is missing
                f"{row_name(type(instance), instance.pk)}: {self.name!r} {state}, so nothing can be checked: {advice}"
            )
        return number

    def expected_version(self, instance: Any, action: str) -> int:
        """Return the version that the row must have; raise StaleObject if the caller assigned another than was read.

        A greater one as well: the instance, which may come from a lagging replica, is older than what the caller saw.
        """
        number = self.read_version(instance)
        read = vars(instance).get(READ_VERSION, number)
        if read != number:
            raise emit_conflict(StaleObject(instance, expected=number, found=read, action=action))
        return number

    def mark_read(self, instance: Any, fields: Collection[str]) -> None:
        """Record that the version was read with `fields`, which include it: it is late if other fields were not."""
        values = vars(instance)
        values.pop(_UNDONE, None)
        if values.pop(READ_VERSION, ABSENT) != values[self.attname]:
            values.pop(_FIRST_OWN, None)  # The same version proves that no other write came in between.
        others = (each for each in instance._meta.concrete_fields if each is not self and not is_key(each))
        is_late = any(each.attname in values and each.attname not in fields for each in others)
        values[self.attname] = _marked(values[self.attname], is_late=is_late)

    def count_up(self, instance: Any, using: str) -> None:
        """Increment the version in memory as the UPDATE did, and restore it if the UPDATE is rolled back."""
        values, name = vars(instance), self.attname
        before, first, writes = values[name], values.get(_FIRST_OWN, ABSENT), values.get(_OWN_WRITES, ())
        former = {name: before, READ_VERSION: ABSENT, _FIRST_OWN: first, _OWN_WRITES: writes}
        former |= {_UNDONE: True, _LAST_UNDO: object()}
        restore_on_rollback(instance, former, using=using)  # First: an interrupt may prevent what comes next.
        values[name] = before + 1
        values[_OWN_WRITES] = _with_write(writes, before)
        values.setdefault(_FIRST_OWN, before)
        values.pop(READ_VERSION, None)
        if PARTIAL not in values:
            values.pop(_UNDONE, None)


def row_key(instance: Any) -> tuple[type[models.Model], Any]:
    """Return the same for all instances of a row, also those of a proxy of the model."""
    return instance._meta.concrete_model, instance.pk


def is_undone(instance: Any) -> bool:
    """Return whether the last write of an instance was rolled back, and it was not read or wholly written since."""
    return _UNDONE in vars(instance) or instance._state.adding


def last_undo(instance: Any) -> object:
    """Return an object that is another one after each rollback of a write of an instance."""
    return vars(instance).get(_LAST_UNDO)


def has_had(instance: Any, version: int) -> bool:
    """Return whether an instance has this version, or had it before writes that were all its own."""
    current = latest_version(instance)
    return isinstance(current, int) and vars(instance).get(_FIRST_OWN, current) <= version <= current


def has_written(instance: Any, version: int, *, later_than: int) -> bool:
    """Return whether an instance was saved when its row had a version, or later by one of its own writes after that.

    It may have been read again since. Only a write that has led to a version after `later_than` counts.
    """
    chains = vars(instance).get(_OWN_WRITES, ())
    return any(first <= version < last and last > later_than for first, last in chains)


def _with_write(chains: tuple[tuple[int, int], ...], before: int) -> tuple[tuple[int, int], ...]:
    """Return the chains of writes after one more, of the version that the row had before it."""
    if chains and chains[-1][1] == before:
        return *chains[:-1], (chains[-1][0], before + 1)
    return *chains[1 - _MAX_CHAINS :], (before, before + 1)


def latest_version(instance: Any) -> Any:
    """Return the version that an instance was read or written with, also a late one, whatever was assigned since."""
    values = vars(instance)
    return values.get(READ_VERSION, values.get(instance._dlock_version.attname))


def read_version(instance: Any) -> int:
    """Return the version that was read with an instance; raises ValueError as `VersionField.read_version` does."""
    instance = unwrapped(instance)
    number: int = instance._dlock_version.read_version(instance)
    return number
