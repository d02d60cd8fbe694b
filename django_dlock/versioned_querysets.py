"""Querysets and managers whose writes increment versions, and check those of the objects that they write."""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections, models, transaction
from django.db.models import F, Model, Q, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.fields.proxy import OrderWrt

from django_dlock.atomic_blocks import own_block
from django_dlock.comparisons import (
    found_versions,
    has_parents,
    hashable,
    is_one_table,
    lock_matching,
    lock_versions,
    needs_lock,
)
from django_dlock.connections import restore_on_rollback
from django_dlock.errors import NotSupported, StaleObject
from django_dlock.lazy import unwrapped
from django_dlock.querysets import RowLockQuerySet
from django_dlock.transactions import ABSENT, AttributeValues
from django_dlock.version_field import READ_VERSION
from dlock_core.observability.hooks import emit_conflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["CountingQuerySet", "LockManager", "VersionedQuerySet"]

M_co = TypeVar("M_co", bound=Model, covariant=True)


class CountingQuerySet(RowLockQuerySet[M_co]):
    """A queryset whose updates increment the version; on a model without a version it behaves like any other."""

    def update(self, **values: Any) -> int:
        """Update as Django does, and increment the version of each row, also over a version among the values."""
        version = _version_of(self.model)
        if version is None:
            return super().update(**values)
        if not _counts(values.get(version.name), version):
            values[version.name] = F(version.name) + 1
        self._for_write = True
        is_locked = needs_lock(self, version)
        if not is_locked and not has_parents(self.model):
            return super().update(**values)
        # Django sends one UPDATE for each table that the model inherits from, and only together may they take effect.
        with own_block(self.db):
            rows: Any = lock_matching(self, version) if is_locked else self
            self._result_cache = None
            return super(CountingQuerySet, rows).update(**values)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Delete as Django does; checks nothing but a version that the condition compares, `filter(version=seen)`."""
        version = _version_of(self.model)
        self._for_write = True
        if version is None or not needs_lock(self, version, for_delete=True):
            return super().delete()
        with own_block(self.db):
            self._result_cache = None
            return super(CountingQuerySet, lock_matching(self, version)).delete()

    delete.queryset_only = True  # type: ignore[attr-defined]  # as Django's: a manager has no delete()


class VersionedQuerySet(CountingQuerySet[M_co]):
    """A queryset whose writes increment the version, and which checks the versions of the objects that it writes."""

    def update(self, **values: Any) -> int:
        """Update as Django does, and increment the version of each row.

        Nothing is checked but a version that the condition compares, `filter(version=seen)`: a queryset stands for
        rows, not for states of rows that the caller has read. Raises NotSupported for a version among the values, such
        as a payload's, unless it counts: `F("version") + 1`.
        """
        version = _version_of(self.model)
        if version is not None and version.name in values and not _counts(values[version.name], version):
            raise NotSupported(
                f"update() of {self.model.__name__} cannot set {version.name!r} to a value of its own: leave it out, "
                f"or set it to F({version.name!r}) + 1; to compare it, filter({version.name}=...)"
            )
        return super().update(**values)

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        """Update as Django does, but check and increment the version of each object; return the number of rows.

        All objects are written, or none: then StaleObject is raised, and a surrounding transaction stays usable.
        """
        version, fields = _version_of(self.model), tuple(fields)
        objs = tuple({id(obj): obj for obj in map(unwrapped, objs)}.values())
        is_for_django = (
            not objs
            or not all(obj._is_pk_set() for obj in objs)  # noqa: SLF001 - Django's, for composite keys as well
            or (batch_size is not None and batch_size <= 0)
        )
        if version is None or is_for_django:  # Django reports what is wrong with the arguments.
            return super().bulk_update(objs, fields, batch_size)
        if self._is_order_of_keys(objs, fields):
            return super().bulk_update(objs, fields, batch_size)  # Our update() increments the versions.
        if version.name in fields:
            raise ValueError(f"bulk_update() increments {version.name!r} itself: leave it out of the fields")
        if len({hashable(obj.pk) for obj in objs}) < len(objs):
            raise ValueError("bulk_update() was given a row twice, as two objects: pass only the one to be written")
        for obj in objs:
            version.expected_version(obj, "update")
        self._for_write = True
        with own_block(self.db):
            rows = 0
            # SQLite needs no lock: no other transaction can write between a read and a write of this one.
            is_guarded = is_one_table(self) or not connections[self.db].features.has_select_for_update
            if is_guarded or self._lock_unchanged(objs):
                update = self._checked_update if is_guarded else super().bulk_update
                rows = sum(update(batch, fields) for batch in self._batches(objs, fields, batch_size))
            if rows < len(objs):
                # Some row is stale. The block is rolled back without an exception, so that the one raised below comes
                # from outside it and the surrounding transaction stays usable.
                transaction.set_rollback(True, using=self.db)
        if rows < len(objs):
            raise self._first_stale(objs)
        for obj in objs:
            version.count_up(obj, self.db)
        return rows

    def bulk_create(  # noqa: PLR0917 - Django's
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,  # noqa: FBT001, FBT002
        update_conflicts: bool = False,  # noqa: FBT001, FBT002
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        version = _version_of(self.model)
        if update_conflicts and version is not None:
            raise NotSupported(
                "bulk_create(update_conflicts=True) cannot increment versions: read the rows and save them"
            )
        objs, before = list(objs), AttributeValues()
        own: list[Any] = []
        if version is not None:
            own = [each for each in map(unwrapped, objs) if isinstance(each, self.model)]
        for obj in own:
            before.note(obj, {version.attname: vars(obj).get(version.attname, ABSENT)})
            # A clone, whose key Django may make up now, is not the row that it was read from.
            is_new = obj._state.adding or not obj._is_pk_set()  # noqa: SLF001 - Django's, for composite keys as well
            before.note(obj._state, {"adding": is_new, "db": obj._state.db})
        try:
            created = super().bulk_create(
                objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields
            )
        except BaseException:
            before.restore()  # Django inserts all rows or none, but after each part it marks the objects as inserted.
            raise
        for obj in created if version is not None else ():
            vars(obj).pop(READ_VERSION, None)  # The version that was assigned to it, or to its original.
            restore_on_rollback(obj._state, {"adding": True}, using=self.db)  # as after create()
        return created

    def _is_order_of_keys(self, objs: Iterable[Any], fields: Iterable[str]) -> bool:
        """Return whether this is `set_…_order([…])` of Django, which makes objects of keys and knows no versions."""
        is_order = all(isinstance(self.model._meta.get_field(each), OrderWrt) for each in fields)
        return is_order and all(obj._state.adding for obj in objs)

    def _batches(self, objs: Sequence[Any], fields: Iterable[str], size: int | None) -> Iterator[Sequence[Any]]:
        meta = self.model._meta
        # Django's statement contains each key twice, and our guard contains it once more.
        columns = [meta.pk, meta.pk, meta.pk, *map(meta.get_field, fields)]
        max_size = connections[self.db].ops.bulk_batch_size(columns, objs)
        size = min(size or max_size, max_size)
        return (objs[start : start + size] for start in range(0, len(objs), size))

    def _lock_unchanged(self, objs: Sequence[Any]) -> bool:
        """Lock the rows of objects in the order of their keys; return whether all of them still have their versions."""
        version = _version_of(self.model)
        keys = [hashable(obj._get_pk_val(version.model._meta)) for obj in objs]  # noqa: SLF001 - Django's
        expected = dict(zip(keys, map(version.read_version, objs), strict=True))
        return lock_versions(expected, version, self.db) == expected

    def _checked_update(self, objs: Sequence[Any], fields: Iterable[str]) -> int:
        """Update a batch where the versions are still those read; return the number of rows that were."""
        version = _version_of(self.model)
        keys_by_version: dict[int, list[Any]] = defaultdict(list)
        for obj in objs:
            keys_by_version[version.read_version(obj)].append(obj.pk)
        guard = reduce(or_, [Q(**{version.name: number, "pk__in": keys}) for number, keys in keys_by_version.items()])
        # Our update() adds the increment of the version to Django's UPDATE, which the guard limits to unchanged rows.
        return super(VersionedQuerySet, self.filter(guard)).bulk_update(objs, fields)

    def _first_stale(self, objs: Sequence[Any]) -> StaleObject:
        version = _version_of(self.model)
        found = found_versions(self.filter(pk__in=[obj.pk for obj in objs]), version)
        current = [(obj, found.get(hashable(obj.pk))) for obj in objs]
        stale, number = next((each for each in current if each[1] != version.read_version(each[0])), current[0])
        expected = version.read_version(stale)
        return emit_conflict(StaleObject(stale, expected=expected, found=number, action="update"))


_LockManager = models.Manager.from_queryset(VersionedQuerySet)


class LockManager(_LockManager[M_co]):
    """The manager of VersionedMixin and RowLockMixin: it increments versions and locks rows."""


def _version_of(model: type[models.Model]) -> Any:
    """Return the VersionField of a model, or None."""
    return getattr(model, "_dlock_version", None)


def _counts(value: Any, version: Any) -> bool:
    """Return whether a value for an UPDATE is the version itself plus a positive number."""
    if not isinstance(value, CombinedExpression) or value.connector != CombinedExpression.ADD:
        return False
    sides = (value.lhs, value.rhs)
    numbers = [each.value for each in sides if isinstance(each, Value)]
    return F(version.name) in sides and any(isinstance(number, int) and number > 0 for number in numbers)
