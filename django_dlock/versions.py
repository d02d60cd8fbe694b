"""Optimistic locking: a version column that every UPDATE checks and increments.

The check is part of the UPDATE itself, `… SET version = 4 WHERE id = 42 AND version = 3`: one statement, no window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections, models, router
from django.db.models.sql.where import AND

from django_dlock import historical  # noqa: F401 - its receiver
from django_dlock.atomic_blocks import own_block
from django_dlock.comparisons import found_versions
from django_dlock.connections import restore_on_rollback
from django_dlock.errors import NotSupported, StaleObject
from django_dlock.refresh import fields_read, is_key
from django_dlock.transactions import ABSENT
from django_dlock.version_field import NEXT, PARTIAL, READ_VERSION, VersionField, is_undone, read_version
from django_dlock.versioned_querysets import LockManager, VersionedQuerySet
from dlock_core.observability.hooks import emit_conflict
from dlock_core.options import NOT_GIVEN, NotGiven
from dlock_core.sql.versions import require_sent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = [
    "LockManager",
    "VersionField",
    "VersionedMixin",
    "VersionedQuerySet",
    "read_version",
    "require_unchanged",
]

_FORCED: Final = "_dlock_forced"
"""Attribute of an instance during a save with force_update, which Django does not pass to the tables of its parents."""
_COPIED: Final = "_dlock_copied"
"""Attribute of an instance while it is copied into another database: the version that it has in its own.

Django 6.1 gives it that of the copy before `_do_insert` is called."""

_KEEPS_BLOCK: Final = "_dlock_keeps_block"
"""Attribute of an instance during `save_with_version`: a conflict of its own leaves the surrounding block usable."""


class VersionedMixin(models.Model):
    """A model whose rows are never saved over a change that the instance has not seen.

    To use another column name, set `version = None` and declare your own `VersionField`.
    Not covered: raw SQL, and writes through a manager of yours that is not a `LockManager`.
    """

    _dlock_version: ClassVar[Any]  # The VersionField; Any, because the type of a descriptor is the type of its value.

    version = VersionField()
    objects = LockManager()
    _dlock_rows = LockManager()  # The base manager, so that SET_NULL and related managers increment versions too.

    class Meta:
        abstract = True

    def save(self, *args: Any, **options: Any) -> None:
        """Save as Django does, or raise StaleObject if the row was changed or deleted since this instance was read."""
        state = self._state
        if not state.adding:
            using = _alias(options, args[2:3]) or router.db_for_write(type(self), instance=self)
            if state.db != using and self._has_its_row_in(using):
                # The instance comes from a replica. Django would read deferred fields from there, and write what it
                # found, which may be older than the row.
                state.db = using
        super().save(*args, **options)

    def save_base(self, *args: Any, **options: Any) -> None:
        """Save as Django does, but with force_update insert a row in none of the tables of a model."""
        state, marks = self._state, dict[str, Any]()
        if options.get("force_update"):
            marks[_FORCED] = True
        if is_undone(self) and self._dlock_leaves_out(options.get("update_fields")):
            marks[PARTIAL] = True
        if not state.adding and options.get("using") not in (None, state.db):
            marks[_COPIED] = {
                each: vars(self).get(each, ABSENT) for each in (self._dlock_version.attname, READ_VERSION)
            }
        marks = {name: value for name, value in marks.items() if name not in vars(self)}  # A handler may save it again.
        vars(self).update(marks)
        connection = connections[options.get("using") or DEFAULT_DB_ALIAS]
        was_doomed = connection.needs_rollback
        try:
            super().save_base(*args, **options)
        except StaleObject as error:
            # Django dooms the surrounding block after any DatabaseError inside save(). Our own conflict was an UPDATE
            # that matched no row, so there is nothing to roll back. Another instance's conflict, raised by a signal
            # handler, may have left work behind: then the block stays doomed.
            if _KEEPS_BLOCK in vars(self) and error.instance is self:
                connection.needs_rollback = was_doomed
            raise
        finally:
            for mark in marks:
                vars(self).pop(mark, None)

    def _dlock_leaves_out(self, update_fields: Collection[str] | None) -> bool:
        """Return whether a save does not write all the values that the instance has."""
        if update_fields is None:
            return False
        written = frozenset(update_fields)
        others = (each for each in self._meta.concrete_fields if each is not self._dlock_version and not is_key(each))
        return any(each.attname in vars(self) and written.isdisjoint((each.name, each.attname)) for each in others)

    def save_with_version(self, *, expected: int | NotGiven = NOT_GIVEN, **options: Any) -> None:
        """Save, or raise StaleObject if the row was changed or deleted since this instance was read.

        `save()` does the same; this method also leaves a surrounding transaction usable. After StaleObject the instance
        is unchanged: saving it again conflicts again, so read it again first. Anything that signal handlers wrote
        before the conflict stays written.

        Args:
            expected: the version that the caller knows, from a form or an ETag; StaleObject if the instance was read
                with another one. Assigning it to `version` means the same.
            **options: those of `save()`.

        Raises:
            StaleObject: the row has another version, or is gone.
            TypeError: `expected` is no number, such as the None of a payload without a version.
            ValueError: the version was deferred, so nothing can be checked.
        """
        is_insert = self._state.adding and not (options.get("force_update") or options.get("update_fields"))
        self._check_expected(expected, "save", is_insert=is_insert)
        using = options.get("using") or router.db_for_write(type(self), instance=self)
        if self._meta.concrete_model._meta.parents:  # type: ignore[union-attr]
            # A row in several tables takes several UPDATEs, and those before the conflict must be undone.
            with own_block(using):
                self.save(**options)
            return
        vars(self)[_KEEPS_BLOCK] = True
        try:
            self.save(**options)
        finally:
            vars(self).pop(_KEEPS_BLOCK, None)

    save_with_version.alters_data = True  # type: ignore[attr-defined]

    async def asave_with_version(self, *, expected: int | NotGiven = NOT_GIVEN, **options: Any) -> None:
        """Await `save_with_version`, which runs in a thread."""
        await sync_to_async(self.save_with_version)(expected=expected, **options)

    asave_with_version.alters_data = True  # type: ignore[attr-defined]

    def delete(self, *args: Any, **options: Any) -> tuple[int, dict[str, int]]:
        """Delete as Django does; raise StaleObject if the row was changed or deleted since this instance was read.

        What the caller gave is passed on as it is: the next class may delete softly, and have options of its own.
        """
        if not self._is_pk_set():  # type: ignore[attr-defined]
            return super().delete(*args, **options)  # Django explains why an unsaved instance cannot be deleted.
        using = _alias(options, args[:1]) or router.db_for_write(type(self), instance=self)
        version = self._dlock_version
        expected = version.expected_version(self, "delete")
        with own_block(using):
            # Django's DELETE has no place for a guard. This UPDATE checks the version and locks the row until COMMIT,
            # so that nothing can change between it and the DELETE.
            rows = _one_table(self._version_rows(using)).filter(**{version.name: expected})
            if not models.QuerySet.update(rows, **{version.name: expected + 1}):
                raise self._stale(using, "delete")
            version.count_up(self, using)  # A handler of pre_delete may save this instance.
            return super().delete(*args, **options)

    def delete_with_version(
        self, *, expected: int | NotGiven = NOT_GIVEN, **options: Any
    ) -> tuple[int, dict[str, int]]:
        """Delete as `delete()` does; a surrounding transaction stays usable after StaleObject.

        A `delete()` of your own may read the row again, and delete or mark it in any way: the row is compared before it
        is called. If its own `save()` then conflicts, Django dooms a surrounding transaction as after any `save()`.
        `expected` and the errors are those of `save_with_version`.
        """
        self._check_expected(expected, "delete")
        require_unchanged(self, options.get("using"))
        return self.delete(**options)

    delete_with_version.alters_data = True  # type: ignore[attr-defined]

    async def adelete_with_version(
        self, *, expected: int | NotGiven = NOT_GIVEN, **options: Any
    ) -> tuple[int, dict[str, int]]:
        """Await `delete_with_version`, which runs in a thread."""
        return await sync_to_async(self.delete_with_version)(expected=expected, **options)

    adelete_with_version.alters_data = True  # type: ignore[attr-defined]

    def refresh_from_db(self, using: str | None = None, fields: Any = None, from_queryset: Any = None) -> None:
        """Refresh as Django does; a version that is read again without the other fields is refused when saving."""
        fields = None if fields is None else set(fields)
        read = fields_read(self, fields, from_queryset)
        super().refresh_from_db(using, fields, from_queryset=from_queryset)
        if self._dlock_version.attname in read:
            self._dlock_version.mark_read(self, read)

    def _dlock_restored(self) -> None:
        """Forget the parents that Django has made of this instance, with the version that was rolled back.

        Django makes them anew when they are asked for, as it does after `save()`.
        """
        concrete: Any = self._meta.concrete_model
        for link in concrete._meta.parents.values():
            if link is not None and link.is_cached(self):
                link.delete_cached_value(self)

    def _check_expected(self, expected: int | NotGiven, action: str, *, is_insert: bool = False) -> None:
        """Raise StaleObject for a conflict that needs no statement.

        Inside `save()` Django would take the same error for a failed statement, and doom the transaction.
        """
        require_sent(expected)
        if expected is not NOT_GIVEN and (not isinstance(expected, int) or isinstance(expected, bool)):
            raise TypeError(f"expected is a number, as versions of {type(self).__name__} are, not {expected!r:.80}")
        found = None if is_insert else self._dlock_version.expected_version(self, action)
        if expected not in (NOT_GIVEN, found):
            raise emit_conflict(
                StaleObject(self, expected=expected, found=found, action=action, was_read=not is_insert)
            )

    def _save_table(  # noqa: PLR0917 - Django's
        self,
        raw: bool = False,  # noqa: FBT001, FBT002
        cls: Any = None,
        force_insert: bool = False,  # noqa: FBT001, FBT002
        force_update: bool = False,  # noqa: FBT001, FBT002
        using: str | None = None,
        update_fields: Any = None,
    ) -> Any:
        """Save in one table as Django does, but try no UPDATE for a key that is made up now, by a default.

        The instance is a clone, or was deleted. Django has taken the keys of a child and its parents from each other.
        """
        is_forced = force_insert or force_update or update_fields
        if not is_forced and any(
            (each.has_default() or each.has_db_default()) and getattr(self, each.attname) is None
            for each in cls._meta.pk_fields
        ):
            force_insert = True
        return super()._save_table(raw, cls, force_insert, force_update, using, update_fields)  # type: ignore[misc]

    def _do_update(self, base_qs: Any, using: str, pk_val: Any, values: Any, *how: Any) -> Any:  # type: ignore[override]
        """Send Django's UPDATE of one table, guarded by the version where this table has the version column."""
        version, table = self._dlock_version, base_qs.model._meta.concrete_model
        others = [value for value in values if value[0] is not version]
        is_raw = len(others) < len(values) and not any(value[2] is NEXT for value in values)
        if is_raw or table is not version.model:
            # A fixture brings its own version, and the table of a parent or child has none: neither is guarded.
            updated = super()._do_update(base_qs, using, pk_val, values, *how)
            if not updated and issubclass(version.model, table) and self._has_its_row_in(using):
                raise self._stale(using, "save")  # Otherwise Django would insert the parent's row, and then ours.
            return updated
        _, forced_update, *returning_fields = how  # Django 6.0 added the last of these.
        if self._state.adding and not (forced_update or _FORCED in vars(self)):
            return []  # Django inserts next. An UPDATE could hit an existing row with the same key.
        expected = version.expected_version(self, "save")
        rows = _filtered(base_qs, {version.model._meta.pk: pk_val, version: expected})
        values = [*others, (version, None, expected + 1)]
        # _update() returns the number of rows, which also answers what select_on_save would ask with another query.
        updated = rows._update(values, *returning_fields)  # noqa: SLF001 - what Django itself calls here
        if updated:
            version.count_up(self, using)
        elif forced_update or self._has_its_row_in(using):
            raise self._stale(using, "save")
        return updated  # Without a row in a database other than the one it was read from, Django inserts it there.

    def _has_its_row_in(self, using: str) -> bool:
        """Return whether the row must exist in a database: the instance was read there, or from a replica of it.

        A forced update says so itself.
        """
        if _FORCED in vars(self):
            return True
        state = self._state
        return not state.adding and (state.db == using or router.db_for_write(type(self), instance=self) == using)

    def _do_insert(self, manager: Any, using: str, *args: Any, **named: Any) -> Any:
        """Insert as Django does; a rollback restores the version and `_state`, so that saving again works."""
        name, state, values = self._dlock_version.attname, self._state, vars(self)
        copied = values.get(_COPIED)
        before = {name: values.get(name)} if copied is None else copied
        try:
            inserted = super()._do_insert(  # type: ignore[misc]
                manager, using, *args, **named
            )
        except BaseException:
            values.pop(name, None)
            values.update({each: value for each, value in before.items() if value is not ABSENT})
            raise
        if copied is None:
            restore_on_rollback(state, {"adding": True}, using=using)
        else:
            restore_on_rollback(state, {"adding": False, "db": state.db}, using=using)
            restore_on_rollback(self, copied, using=using)
        values.pop(READ_VERSION, None)
        return inserted

    def _version_rows(self, using: str) -> Any:
        table = self._dlock_version.model
        return table._base_manager.using(using).filter(pk=self._get_pk_val(table._meta))

    def _stale(self, using: str, action: str) -> StaleObject:
        found = found_versions(self._version_rows(using), self._dlock_version)
        version = next(iter(found.values()), None)
        return emit_conflict(StaleObject(self, expected=read_version(self), found=version, action=action))


def require_unchanged(instance: Any, using: str | None = None) -> None:
    """Raise StaleObject if others have changed a row since it was read, before a `delete()` of the model's own.

    Such a method may read the row again, into this instance or another, or write it by a query: that must not renew
    what its caller knows. What others commit later it reads itself, if it reads the row again. The `delete()` of the
    mixin is not preceded by this: it compares where it locks the row.

    Nothing is locked, so that the method may take leases, locks and transactions in any order; except in a transaction
    on MySQL and MariaDB that reads from a snapshot, where only a locking SELECT reads what the method would overwrite.
    """
    if type(instance).delete is VersionedMixin.delete or not instance._is_pk_set():  # noqa: SLF001 - Django's
        return
    version = instance._dlock_version
    expected = version.expected_version(instance, "delete")
    using = using or router.db_for_write(type(instance), instance=instance)
    key = instance._get_pk_val(version.model._meta)  # noqa: SLF001 - a method of this module calls it, too
    # Not by the base manager: a change may have hidden the row from that. An ordering could join other tables.
    rows: Any = models.QuerySet(version.model, using=using).filter(pk=key).order_by()
    found = next(iter(found_versions(rows, version).values()), None)
    if found != expected:
        raise emit_conflict(StaleObject(instance, expected=expected, found=found, action="delete"))


def _alias(options: Mapping[str, Any], args: Sequence[Any]) -> str | None:
    """Return the database that a caller has named, in Django's way; other classes have other positional arguments."""
    given = next(iter(args), None)
    return options.get("using") or (given if isinstance(given, str) and given in connections else None)


def _filtered(rows: Any, values: dict[Any, Any]) -> Any:
    """Add conditions to a queryset that nothing else uses; `filter()` would cost a third of the whole save."""
    table = _one_table(rows).query.get_initial_alias()
    for field, value in values.items():
        rows.query.where.add(field.get_lookup("exact")(field.get_col(table), value), AND)
    return rows


def _one_table(rows: Any) -> Any:
    """Return rows of a base manager; raise NotSupported for joined ones, because of what `is_one_table` says."""
    if rows.query.count_active_tables() > 1:
        name = rows.model.__name__
        raise NotSupported(
            f"the base manager of {name} joins another table, so a version would not be compared again after a wait "
            f"for a row: set base_manager_name in the Meta of {name} to a LockManager without such a condition"
        )
    return rows
