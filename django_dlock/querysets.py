"""Querysets and managers that lock rows (`lock_row`, `lock_rows`, `select_for_share`) and that increment versions.

A row lock lasts until COMMIT or ROLLBACK, even when it was taken in a savepoint that is released.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from django.db import DatabaseError, connections, models, transaction
from django.db.models import F, Model, Q, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.fields.proxy import OrderWrt
from django.db.models.sql import Query

from django_dlock.comparisons import (
    found_versions,
    has_parents,
    hashable,
    is_one_table,
    lock_matching,
    lock_versions,
    needs_lock,
)
from django_dlock.errors import NotSupported, RowLocked, StaleObject
from django_dlock.lazy import unwrapped
from django_dlock.row_sql import (
    RowLockQuery,
    exchange_query,
    own_tables,
    refuse_combined,
    refuse_groups,
    refuse_lost_lock,
    require_row_locks,
    set_lock_clause,
    waiting_in,
)
from dlock_core.observability.hooks import emit_conflict
from dlock_core.sql import row_locks
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import RowLockOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dlock_core.options import Seconds

__all__ = [
    "CountingQuerySet",
    "LockManager",
    "RowLock",
    "RowLockOptions",
    "RowLockQuerySet",
    "VersionedQuerySet",
    "row_name",
]

M_co = TypeVar("M_co", bound=Model, covariant=True)
T = TypeVar("T")
RowsT = TypeVar("RowsT", bound=QuerySet[Any])


class RowLock(row_locks.RowLock):
    """How to lock rows, checked before any I/O."""

    __slots__ = ()

    def fetch(self, name: str, rows: QuerySet[Any], read: Callable[[QuerySet[Any]], T]) -> T:
        """Return what `read` makes of the locked rows; raises RowLocked(`name`) if others hold them for too long."""
        refuse_combined(rows.query)
        rows._for_write = True  # type: ignore[attr-defined]  # noqa: SLF001 - a lock on a replica would exclude nobody
        connection = connections[rows.db]
        require_row_locks(connection)
        refuse_groups(connection, rows.query)
        started = time.monotonic()
        locked = self._with_lock_clause(rows, connection.features)
        try:
            with waiting_in(locked, connection, self.limit):
                return read(locked)
        except DatabaseError as error:
            if failure_of_statement(error) is DatabaseFailure.LOCK_TIMEOUT:
                is_database = connection.vendor == "sqlite"
                raise RowLocked(name, waited=time.monotonic() - started, is_database=is_database) from error
            raise

    def _with_lock_clause(self, rows: QuerySet[Any], features: Any) -> QuerySet[Any]:
        locked = QuerySet.select_for_update(
            rows,
            nowait=self.at_once,
            skip_locked=self.skip_locked,
            of=own_tables(rows.model) if features.has_select_for_update_of else (),
            no_key=self.no_key and not self.shared and features.has_select_for_no_key_update,
        )
        if self.shared:
            set_lock_clause(locked, strength="KEY SHARE" if self.key else "SHARE")
        return locked


class RowLockQuerySet(QuerySet[M_co]):
    """A queryset that can lock what it finds."""

    @overload
    def lock_row(
        self, pk: Any, *, skip_locked: Literal[True], shared: bool = ..., no_key: bool = ..., key: bool = ...
    ) -> M_co | None: ...
    @overload
    def lock_row(
        self,
        pk: Any,
        *,
        shared: bool = ...,
        nowait: bool = ...,
        skip_locked: Literal[False] = ...,
        wait: Seconds | None = ...,
        no_key: bool = ...,
        key: bool = ...,
    ) -> M_co: ...
    def lock_row(
        self,
        pk: Any,
        *,
        shared: bool = False,
        nowait: bool = False,
        skip_locked: bool = False,
        wait: Seconds | None = None,
        no_key: bool = True,
        key: bool = False,
    ) -> M_co | None:
        """Lock one row until the end of the transaction, and return its current state.

        Args:
            pk: the primary key of the row.
            shared: let others read the row and lock it shared, but not write it.
            nowait: raise RowLocked at once if the row is locked.
            skip_locked: return None for a row that is locked or does not exist.
            wait: seconds (float or timedelta) to wait for the lock; None: as long as the database is configured to
                wait; 0: the same as `nowait`. MySQL and MariaDB round it up to whole seconds.
            no_key: PostgreSQL only; False also keeps others from inserting rows that refer to this one.
            key: PostgreSQL only, with `shared`; keeps others only from deleting the row or changing its key.

        Raises:
            RowLocked: another transaction held the row for too long. On PostgreSQL the transaction, or its savepoint,
                must then be rolled back.
            DoesNotExist: there is no such row.
            TransactionManagementError: no transaction is open.
            NotSupported: the database would lock nothing.
        """
        lock = RowLock(shared=shared, nowait=nowait, skip_locked=skip_locked, wait=wait, no_key=no_key, key=key)
        found: list[M_co] = lock.fetch(row_name(self.model, pk), self.filter(pk=pk).order_by(), list)
        if not found and not skip_locked:
            raise self.model.DoesNotExist(  # type: ignore[attr-defined]
                f"{row_name(self.model, pk)} does not exist."
            )
        return found[0] if found else None

    def lock_rows(
        self,
        *,
        shared: bool = False,
        nowait: bool = False,
        skip_locked: bool = False,
        wait: Seconds | None = None,
        no_key: bool = True,
        key: bool = False,
    ) -> list[M_co]:
        """Lock all rows of this queryset and return them, in the order of their primary keys.

        Because of that order two such calls never deadlock with each other. Options and errors are those of `lock_row`;
        `wait` applies to each row. With `skip_locked`, which never waits, the queryset keeps its own order and may be
        sliced: the next ten jobs that no other worker has locked.
        """
        lock = RowLock(shared=shared, nowait=nowait, skip_locked=skip_locked, wait=wait, no_key=no_key, key=key)
        rows = self.all() if skip_locked else self.order_by("pk")
        return lock.fetch(self.model.__name__, rows, list)

    def select_for_share(
        self, *, nowait: bool = False, skip_locked: bool = False, of: Sequence[str] = (), key: bool = False
    ) -> Self:
        """Lock as Django's `select_for_update` does, but FOR SHARE: others may read the rows, and lock them shared.

        Without `of` it locks no rows of joined tables, where the database can tell them apart. `key` on PostgreSQL
        is FOR KEY SHARE, which allows updates of other columns; elsewhere it is FOR SHARE.
        """
        refuse_combined(self.query)
        locked = super().select_for_update(nowait=nowait, skip_locked=skip_locked, of=of)
        set_lock_clause(locked, strength="KEY SHARE" if key else "SHARE")
        return locked

    def select_for_update(
        self,
        nowait: bool = False,  # noqa: FBT001, FBT002
        skip_locked: bool = False,  # noqa: FBT001, FBT002
        of: Sequence[str] = (),
        no_key: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """Lock as Django does; after `select_for_share` this requests the stronger lock."""
        refuse_combined(self.query)
        locked = super().select_for_update(nowait, skip_locked, of, no_key)
        if isinstance(locked.query, RowLockQuery):
            exchange_query(locked, Query)
        return locked

    def __and__(self, other: Any) -> Self:
        return _keeping_locks(super().__and__(other), self, other)

    def __or__(self, other: Any) -> Self:
        return _keeping_locks(super().__or__(other), self, other)

    def __xor__(self, other: Any) -> Self:
        combined: Self = super().__xor__(other)  # type: ignore[misc]
        return _keeping_locks(combined, self, other)

    def union(self, *other_qs: Any, all: bool = False) -> Self:
        return _keeping_locks(super().union(*other_qs, all=all), self, *other_qs)

    def intersection(self, *other_qs: Any) -> Self:
        return _keeping_locks(super().intersection(*other_qs), self, *other_qs)

    def difference(self, *other_qs: Any) -> Self:
        return _keeping_locks(super().difference(*other_qs), self, *other_qs)


def _keeping_locks(combined: RowsT, first: Any, *others: Any) -> RowsT:
    """Return a combination of querysets if it locks what they would; an empty one that is added has no rows to lock."""
    others = tuple(each for each in others if not each.query.is_empty())
    if combined.query.combinator and first.query.select_for_update and not others:
        return first.all()  # type: ignore[no-any-return]
    refuse_lost_lock(combined.query, *(part.query for part in (first, *others)))
    return combined


def row_name(model: type[Model], pk: object) -> str:
    """Return the name of a row for error messages, such as "Order(42)"."""
    return f"{model.__name__}({pk!r})"


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
        with transaction.atomic(using=self.db):
            rows: Any = lock_matching(self, version) if is_locked else self
            self._result_cache = None
            return super(CountingQuerySet, rows).update(**values)

    def delete(self) -> tuple[int, dict[str, int]]:
        """Delete as Django does; checks nothing but a version that the condition compares, `filter(version=seen)`."""
        version = _version_of(self.model)
        self._for_write = True
        if version is None or not needs_lock(self, version, for_delete=True):
            return super().delete()
        with transaction.atomic(using=self.db):
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
        is_for_django = not objs or any(obj.pk is None for obj in objs) or (batch_size is not None and batch_size <= 0)
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
        with transaction.atomic(using=self.db):
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
        if update_conflicts and _version_of(self.model):
            raise NotSupported(
                "bulk_create(update_conflicts=True) cannot increment versions: read the rows and save them"
            )
        return super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields)

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
