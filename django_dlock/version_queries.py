"""Querysets whose writes count versions up, and what a version is to them."""

from __future__ import annotations

from collections import defaultdict
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections, models, transaction
from django.db.models import F, Q

from django_dlock.errors import NotSupported, StaleObject
from django_dlock.row_queries import RowLockQuerySet, row_name
from django_dlock.transactions import on_rollback
from dlock_core.hooks import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LockManager", "VersionedQuerySet", "count_up", "found_versions", "read_version"]

M_co = TypeVar("M_co", bound=models.Model, covariant=True)


class VersionedQuerySet(RowLockQuerySet[M_co]):
    """A queryset whose writes count the version up; on a model without a version it is like any other."""

    def update(self, **values: Any) -> int:
        """As Django's, and each row gets its next version; nothing is checked: which version would you have read?"""
        if version := _version_of(self.model):
            values.setdefault(version.name, F(version.name) + 1)
        return super().update(**values)

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        """As Django's, but checks and counts the version of each object.

        All are written, or none and StaleObject is raised; a transaction around it stays usable.
        """
        version, objs, fields = _version_of(self.model), tuple(objs), tuple(fields)
        if version is None or not objs:
            return super().bulk_update(objs, fields, batch_size)
        if version.name in fields:
            raise ValueError(f"bulk_update() counts {version.name!r} by itself: leave it out of the fields")
        self._for_write = True
        with transaction.atomic(using=self.db):
            rows = sum(self._checked_update(batch, fields) for batch in self._batches(objs, fields, batch_size))
            if rows < len(objs):
                transaction.set_rollback(True, using=self.db)
        if rows < len(objs):
            raise self._first_stale(objs)
        for obj in objs:
            count_up(obj, self.db)
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
        if update_conflicts and _version_of(self.model):
            raise NotSupported(
                "bulk_create(update_conflicts=True) cannot count versions up: read the rows and save them"
            )
        return super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields)

    def _batches(self, objs: Sequence[Any], fields: Iterable[str], size: int | None) -> Iterator[Sequence[Any]]:
        meta = self.model._meta
        columns = [meta.pk, meta.pk, meta.pk, *map(meta.get_field, fields)]  # Django's two, and ours in the guard
        most = connections[self.db].ops.bulk_batch_size(columns, objs)
        size = min(size or most, most)
        return (objs[start : start + size] for start in range(0, len(objs), size))

    def _checked_update(self, objs: Sequence[Any], fields: Iterable[str]) -> int:
        by_version: dict[int, list[Any]] = defaultdict(list)
        for obj in objs:
            by_version[read_version(obj)].append(obj.pk)
        name = _version_of(self.model).name
        guard = reduce(or_, [Q(**{name: number, "pk__in": keys}) for number, keys in by_version.items()])
        return super(VersionedQuerySet, self.filter(guard)).bulk_update(objs, fields)

    def _first_stale(self, objs: Sequence[Any]) -> StaleObject:
        found = found_versions(self.filter(pk__in=[obj.pk for obj in objs]), _version_of(self.model))
        stale = next((obj for obj in objs if found.get(obj.pk) != read_version(obj)), objs[0])
        return refused(StaleObject(stale, expected=read_version(stale), found=found.get(stale.pk), action="update"))


_LockManager = models.Manager.from_queryset(VersionedQuerySet)


class LockManager(_LockManager[M_co]):
    """The manager of VersionedMixin and RowLockMixin: counts versions up, locks rows."""


def _version_of(model: type[models.Model]) -> Any:
    """Give the VersionField of a model, or None."""
    return getattr(model, "_dlock_version", None)


def read_version(instance: Any) -> int:
    """Give the version that the instance was read with; reading it now would make the check void."""
    version = instance._dlock_version
    number = vars(instance).get(version.attname)
    if not isinstance(number, int):
        state = f"is {number!r}" if version.attname in vars(instance) else "was deferred"
        raise ValueError(  # noqa: TRY004 - the type is right, the value is missing
            f"{row_name(type(instance), instance.pk)}: {version.name!r} {state}, so nothing can be checked"
        )
    return number


def count_up(instance: Any, using: str) -> None:
    """Do in memory what the UPDATE did, and undo it if it is rolled back."""
    name = instance._dlock_version.attname
    before = vars(instance)[name]
    setattr(instance, name, before + 1)
    on_rollback(partial(setattr, instance, name, before), using=using)


def found_versions(rows: models.QuerySet[Any], version: Any) -> dict[Any, int]:
    """What versions rows have now; on MySQL a plain SELECT may see the old ones, a locking one does not."""
    connection = connections[rows.db]
    if connection.vendor == "mysql" and connection.in_atomic_block:
        rows = rows.select_for_update()
    return dict(rows.values_list("pk", version.attname))
