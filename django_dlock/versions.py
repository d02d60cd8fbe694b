"""Optimistic locking: a version column that every UPDATE checks and counts up.

The check is part of the UPDATE itself, `… SET version = 4 WHERE id = 42 AND version = 3`: one statement, no window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from asgiref.sync import sync_to_async
from django.db import connections, models, router, transaction
from django.db.models import F, Func
from django.db.models.query_utils import DeferredAttribute
from django.db.models.sql.where import AND

from django_dlock.connections import restore_on_rollback
from django_dlock.errors import StaleObject
from django_dlock.querysets import (
    READ,
    LockManager,
    VersionedQuerySet,
    assign,
    count_up,
    expected_version,
    found_versions,
    mark_late,
    read_version,
)
from dlock_core.observability.hooks import emit_conflict
from dlock_core.sql.versions import FIRST_VERSION_SQL, first_version

if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[int, int]
else:
    _BigIntegerField = models.BigIntegerField

__all__ = ["LockManager", "VersionField", "VersionedMixin", "VersionedQuerySet"]


class _NextVersion:
    """Stands in an UPDATE for the version that its guard allows."""


NEXT: Final = _NextVersion()


class _FirstVersion(Func):
    """The first version of a row that other software inserts."""

    def as_sql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:  # type: ignore[override]
        return FIRST_VERSION_SQL.get(connection.vendor, "1"), []


class _VersionAttribute(DeferredAttribute):
    """The version on an instance: what is assigned is what the caller expects; what was read is kept beside it."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        if instance is None:
            return self
        name, values = self.field.attname, vars(instance)
        if name not in values:
            super().__get__(instance, cls)
            mark_late(instance, self.field, [name])
        return values[name]

    def __set__(self, instance: Any, number: Any) -> None:
        assign(instance, self.field.attname, number)


class VersionField(_BigIntegerField):
    """Counts the writes of a row: one more after every UPDATE. Each row begins at the time of its INSERT.

    It is the time in microseconds, so that a row made anew under an old key never has a version that the old one had.
    `VersionedMixin` checks it; raw SQL and `bulk_create(update_conflicts=True)` write past it.
    """

    descriptor_class = _VersionAttribute

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Both defaults: without db_default other software cannot insert, without default a new instance has no number.
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
        if add:  # whatever the instance has: it may be a clone
            number = vars(model_instance)[self.attname] = first_version()
            return number
        # Models of migrations are without the mixin; their saves count, too.
        return NEXT if isinstance(model_instance, VersionedMixin) else F(self.attname) + 1


class VersionedMixin(models.Model):
    """A model whose rows are never saved over a change that the instance has not seen.

    To call the version something else, set `version = None` and add a `VersionField` of your own.
    Not covered: raw SQL, and what is written through a manager of yours that is not a `LockManager`.
    """

    _dlock_version: ClassVar[Any]  # the VersionField; Any, as a descriptor's type is what it gives

    version = VersionField()
    objects = LockManager()
    _dlock_rows = LockManager()  # the base manager: what SET_NULL and related managers write with counts, too

    class Meta:
        abstract = True

    def save(self, *args: Any, **options: Any) -> None:
        """As Django's, or raise StaleObject when the row changed or went away since this instance was read."""
        state = self._state
        if not state.adding:
            given = options.get("using") or (args[2] if len(args) > 2 else None)
            using = given or router.db_for_write(type(self), instance=self)
            if state.db != using and self._has_its_row_in(using):
                state.db = using  # a replica gave it: else Django would read deferred fields from there, and write them
        super().save(*args, **options)

    def save_with_version(self, *, expected: int | None = None, **options: Any) -> None:
        """Save, or raise StaleObject when the row changed or went away since this instance was read.

        `save()` does that, too; this also leaves a transaction around it usable. After StaleObject the instance is as
        it was: saving it again conflicts again, so read it anew. What signal handlers wrote before the conflict stays.
        `expected` is a version that the caller knows, from a form or an ETag for one; StaleObject if it is another one
        than was read. To assign it to `version` means the same.
        """
        self._compare(expected, "save")
        using = options.get("using") or router.db_for_write(type(self), instance=self)
        if self._meta.concrete_model._meta.parents:  # type: ignore[union-attr]  # the table of a parent may be written before the conflict shows
            with transaction.atomic(using=using):
                self.save(**options)
            return
        connection = connections[using]
        was_doomed = connection.needs_rollback
        try:
            self.save(**options)
        except StaleObject as error:
            if error.instance is self:  # an UPDATE of no row: nothing to roll back
                connection.needs_rollback = was_doomed
            raise

    async def asave_with_version(self, *, expected: int | None = None, **options: Any) -> None:
        """As `save_with_version`, in a thread."""
        await sync_to_async(self.save_with_version)(expected=expected, **options)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:  # noqa: FBT001, FBT002
        """As Django's, or raise StaleObject when the row changed or went away since this instance was read."""
        if self.pk is None:
            return super().delete(using, keep_parents)  # which says why not
        using = using or router.db_for_write(type(self), instance=self)
        name, expected = self._dlock_version.name, expected_version(self, "delete")
        with transaction.atomic(using=using):
            rows = self._version_rows(using).filter(**{name: expected})
            if not models.QuerySet.update(rows, **{name: expected + 1}):
                raise self._stale(using, "delete")
            count_up(self, using)  # a handler of pre_delete may save it
            return super().delete(using, keep_parents)

    def delete_with_version(self, *, expected: int | None = None, **options: Any) -> tuple[int, dict[str, int]]:
        """Delete as `delete()` does; a transaction around it stays usable after StaleObject.

        `expected` as of `save_with_version`.
        """
        self._compare(expected, "delete")
        return self.delete(**options)

    async def adelete_with_version(self, *, expected: int | None = None, **options: Any) -> tuple[int, dict[str, int]]:
        """As `delete_with_version`, in a thread."""
        return await sync_to_async(self.delete_with_version)(expected=expected, **options)

    def refresh_from_db(self, using: str | None = None, fields: Any = None, *args: Any, **kwargs: Any) -> None:
        """As Django's; a version read again without the other fields says nothing about them, and is refused then."""
        super().refresh_from_db(using, fields, *args, **kwargs)
        version = self._dlock_version
        if fields is None:
            vars(self).pop(READ, None)
        elif version.name in fields or version.attname in fields:
            mark_late(self, version, fields)

    def _compare(self, expected: int | None, action: str) -> None:
        """Find out what needs no statement, before Django would take it for a failure of the transaction."""
        if expected is not None and (not isinstance(expected, int) or isinstance(expected, bool)):
            raise TypeError(f"expected is a number, as versions of {type(self).__name__} are, not {expected!r:.80}")
        found = None if self._state.adding else expected_version(self, action)
        if expected not in (None, found):
            raise emit_conflict(StaleObject(self, expected=expected, found=found, action=action))

    def _do_update(self, base_qs: Any, using: str, pk_val: Any, values: Any, *how: Any) -> Any:  # type: ignore[override]
        version, table = self._dlock_version, base_qs.model._meta.concrete_model
        others = [value for value in values if value[0] is not version]
        is_raw = len(others) < len(values) and not any(value[2] is NEXT for value in values)
        if is_raw or table is not version.model:  # a fixture, another table
            updated = super()._do_update(base_qs, using, pk_val, values, *how)
            if not updated and issubclass(version.model, table) and self._has_its_row_in(using):
                raise self._stale(using, "save")  # Django would insert the row of a parent, and then ours
            return updated
        _, forced_update, *returning_fields = how  # the last since Django 6.0
        if self._state.adding and not forced_update:
            return []  # Django inserts next; an UPDATE could hit somebody else's row
        expected = expected_version(self, "save")
        rows = _only(base_qs, {version.model._meta.pk: pk_val, version: expected})
        values = [*others, (version, None, expected + 1)]
        updated = rows._update(values, *returning_fields)  # says how many, so that select_on_save has nothing to ask
        if updated:
            count_up(self, using)
        elif forced_update or self._has_its_row_in(using):
            raise self._stale(using, "save")
        return updated  # nothing in another database than the one it was read from: Django inserts it there

    def _has_its_row_in(self, using: str) -> bool:
        """Say whether this instance's row has to be in a database: it was read there, or from a replica of it."""
        state = self._state
        return not state.adding and (state.db == using or router.db_for_write(type(self), instance=self) == using)

    def _do_insert(self, manager: Any, using: str, *args: Any, **named: Any) -> Any:
        name, state = self._dlock_version.attname, self._state
        before = vars(self).get(name)
        is_copy = not state.adding and state.db != using
        try:
            inserted = super()._do_insert(  # type: ignore[misc]
                manager, using, *args, **named
            )
        except BaseException:
            vars(self)[name] = before
            raise
        if is_copy:
            restore_on_rollback(state, {"adding": False, "db": state.db}, using=using)
            restore_on_rollback(self, {name: before}, using=using)
        else:
            restore_on_rollback(state, {"adding": True}, using=using)
        vars(self).pop(READ, None)
        return inserted

    def _version_rows(self, using: str) -> Any:
        table = self._dlock_version.model
        return table._base_manager.using(using).filter(pk=self._get_pk_val(table._meta))

    def _stale(self, using: str, action: str) -> StaleObject:
        found = found_versions(self._version_rows(using), self._dlock_version)
        version = next(iter(found.values()), None)
        return emit_conflict(StaleObject(self, expected=read_version(self), found=version, action=action))


def _only(rows: Any, values: dict[Any, Any]) -> Any:
    """Filter a queryset that is ours alone; `filter()` would cost a third of the whole save."""
    table = rows.query.get_initial_alias()
    for field, value in values.items():
        rows.query.where.add(field.get_lookup("exact")(field.get_col(table), value), AND)
    return rows
