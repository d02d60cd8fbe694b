"""Querysets and managers that lock rows (`lock_row`, `lock_rows`, `select_for_share`) and that count versions.

A lock lasts until COMMIT or ROLLBACK, also when it was taken in a savepoint that is released.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar, overload

from django.db import DatabaseError, connections, models, transaction
from django.db.models import F, Model, Q, QuerySet
from django.db.models.sql import Query

from django_dlock.connections import ABSENT, restore_on_rollback
from django_dlock.errors import NotSupported, RowLocked, StaleObject
from django_dlock.row_sql import RowLockQuery, own_tables, require_row_locks, reword, waiting_in
from dlock_core.observability.hooks import emit_conflict
from dlock_core.sql import row_locks
from dlock_core.sql.driver_errors import DatabaseFailure, classify
from dlock_core.sql.row_locks import RowLockOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dlock_core.options import Seconds

__all__ = ["RowLock", "RowLockOptions", "RowLockQuerySet", "row_name"]

M_co = TypeVar("M_co", bound=Model, covariant=True)
T = TypeVar("T")


class RowLock(row_locks.RowLock):
    """How to lock rows, checked before any I/O."""

    __slots__ = ()

    def fetch(self, name: str, rows: QuerySet[Any], read: Callable[[QuerySet[Any]], T]) -> T:
        """Read rows under this lock; `name` is for RowLocked, which says that others held them for too long."""
        rows._for_write = True  # type: ignore[attr-defined]  # a replica has other locks
        connection = connections[rows.db]
        require_row_locks(connection)
        started = time.monotonic()
        locked = self._ask(rows, connection.features)
        try:
            with waiting_in(locked, connection, self.limit):
                return read(locked)
        except DatabaseError as error:
            if classify(error) is DatabaseFailure.LOCK_TIMEOUT:
                is_database = connection.vendor == "sqlite"
                raise RowLocked(name, waited=time.monotonic() - started, is_database=is_database) from error
            raise

    def _ask(self, rows: QuerySet[Any], features: Any) -> QuerySet[Any]:
        locked = QuerySet.select_for_update(
            rows,
            nowait=self.at_once,
            skip_locked=self.skip_locked,
            of=own_tables(rows.model) if features.has_select_for_update_of else (),
            no_key=self.no_key and not self.shared and features.has_select_for_no_key_update,
        )
        if self.shared:
            reword(locked, strength="KEY SHARE" if self.key else "SHARE")
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
        """Lock one row until the end of the transaction, and read it as it is then.

        `shared` lets others read and lock shared, but not write. `wait` is seconds (float or timedelta), None for as
        long as the database waits, 0 the same as `nowait`; MySQL and MariaDB round it up to whole seconds.
        `skip_locked` returns None for a row that is locked or not there. `no_key=False` on PostgreSQL also keeps
        others from inserting rows that refer to it; `key` with `shared` there only keeps them from deleting the row or
        changing its key.

        Raises RowLocked when another transaction held the row for too long (on PostgreSQL the transaction, or its
        savepoint, must then be rolled back), DoesNotExist, TransactionManagementError outside a transaction,
        NotSupported where it would lock nothing.
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
        """Lock all rows of this queryset, in the order of their primary keys, so that two of these never deadlock.

        Options and errors as of `lock_row`; `wait` is for each row. With `skip_locked`, which waits for nobody, the
        queryset keeps its own order and may be sliced: the next ten jobs that no other worker has.
        """
        lock = RowLock(shared=shared, nowait=nowait, skip_locked=skip_locked, wait=wait, no_key=no_key, key=key)
        rows = self.all() if skip_locked else self.order_by("pk")
        return lock.fetch(self.model.__name__, rows, list)

    def select_for_share(
        self, *, nowait: bool = False, skip_locked: bool = False, of: Sequence[str] = (), key: bool = False
    ) -> Self:
        """As Django's `select_for_update`, but others may read and lock shared too: FOR SHARE.

        Without `of` it locks no rows of other tables that are joined, where the database can tell them apart.
        `key` on PostgreSQL is FOR KEY SHARE, which allows updates of other columns; elsewhere it is FOR SHARE.
        """
        locked = super().select_for_update(nowait=nowait, skip_locked=skip_locked, of=of)
        reword(locked, strength="KEY SHARE" if key else "SHARE")
        return locked

    def select_for_update(
        self,
        nowait: bool = False,  # noqa: FBT001, FBT002
        skip_locked: bool = False,  # noqa: FBT001, FBT002
        of: Sequence[str] = (),
        no_key: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """As Django's; after `select_for_share` it asks for the stronger lock."""
        locked = super().select_for_update(nowait, skip_locked, of, no_key)
        if isinstance(locked.query, RowLockQuery):
            locked.query = locked.query.chain(Query)
        return locked


def row_name(model: type[Model], pk: object) -> str:
    """Name a row in an error."""
    return f"{model.__name__}({pk!r})"


READ: Final = "_dlock_read"
"""Stands on an instance with the version that it was read with, after another one was assigned."""


class LateVersion(int):
    """A version that was read later than other fields of its row: it says nothing about them."""


class VersionedQuerySet(RowLockQuerySet[M_co]):
    """A queryset whose writes count the version up; on a model without a version it is like any other."""

    def update(self, **values: Any) -> int:
        """As Django's, and each row gets its next version; nothing is checked: which version would you have read?"""
        version = _version_of(self.model)
        if version is None:
            return super().update(**values)
        values.setdefault(version.name, F(version.name) + 1)
        if not _has_parents(self.model):
            return super().update(**values)
        self._for_write = True
        with transaction.atomic(using=self.db):  # of several tables, one UPDATE each
            return super().update(**values)

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        """As Django's, but checks and counts the version of each object.

        All are written, or none and StaleObject is raised; a transaction around it stays usable.
        """
        version, objs, fields = _version_of(self.model), tuple({id(obj): obj for obj in objs}.values()), tuple(fields)
        is_for_django = not objs or any(obj.pk is None for obj in objs) or (batch_size is not None and batch_size <= 0)
        if version is None or is_for_django:  # which says what is wrong
            return super().bulk_update(objs, fields, batch_size)
        if version.name in fields:
            raise ValueError(f"bulk_update() counts {version.name!r} by itself: leave it out of the fields")
        if len({obj.pk for obj in objs}) < len(objs):
            raise ValueError("bulk_update() was given the same row twice, in different objects: which one is right?")
        for obj in objs:
            expected_version(obj, "update")
        self._for_write = True
        with transaction.atomic(using=self.db):
            rows = 0
            if self._is_one_table() or self._lock_fresh(objs):
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

    def _is_one_table(self) -> bool:
        """Say whether one UPDATE can both check and write.

        Of several tables Django selects first what it updates then, or updates what a subquery finds: both are checked
        before the statement waits for the row, and not again after.
        """
        return not _has_parents(self.model) and self.all().query.count_active_tables() <= 1

    def _lock_fresh(self, objs: Sequence[Any]) -> bool:
        """Lock the rows of objects, in the order of their keys, and say whether all have their versions still."""
        features: Any = connections[self.db].features
        if not features.has_select_for_update:  # SQLite: between a read and a write of a transaction nobody writes
            return True
        version = _version_of(self.model)
        expected = {obj._get_pk_val(version.model._meta): read_version(obj) for obj in objs}
        rows: Any = models.QuerySet(version.model, using=self.db).filter(pk__in=expected).order_by("pk")
        locked = rows.select_for_update(no_key=features.has_select_for_no_key_update)
        return dict(locked.values_list("pk", version.attname)) == expected

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
        return emit_conflict(
            StaleObject(stale, expected=read_version(stale), found=found.get(stale.pk), action="update")
        )


_LockManager = models.Manager.from_queryset(VersionedQuerySet)


class LockManager(_LockManager[M_co]):
    """The manager of VersionedMixin and RowLockMixin: counts versions up, locks rows."""


def _version_of(model: type[models.Model]) -> Any:
    """Give the VersionField of a model, or None."""
    return getattr(model, "_dlock_version", None)


def _has_parents(model: Any) -> bool:
    """Say whether the rows of a model are in several tables."""
    return bool(model._meta.concrete_model._meta.parents)


def read_version(instance: Any) -> int:
    """Give the version that was read with the instance, or assigned; one read now would make the check void."""
    version = instance._dlock_version
    number = vars(instance).get(version.attname)
    if isinstance(number, LateVersion):
        raise ValueError(  # noqa: TRY004 - as below
            f"{row_name(type(instance), instance.pk)}: {version.name!r} was read later than other fields, so nothing "
            f"can be checked: read it with them, only(…, {version.name!r}), or all again, refresh_from_db()"
        )
    if not isinstance(number, int):
        state = f"is {number!r}" if version.attname in vars(instance) else "was deferred"
        raise ValueError(  # noqa: TRY004 - the type is right, the value is missing
            f"{row_name(type(instance), instance.pk)}: {version.name!r} {state}, so nothing can be checked"
        )
    return number


def expected_version(instance: Any, action: str) -> int:
    """Give the version that the row has to have, or raise StaleObject when another one than was read was assigned.

    A greater one, too: what was read, from a late replica perhaps, is older than what the caller has seen.
    """
    number = read_version(instance)
    read = vars(instance).get(READ, number)
    if read != number and not isinstance(read, LateVersion):
        raise emit_conflict(StaleObject(instance, expected=number, found=read, action=action))
    return number


def assign(instance: Any, name: str, number: Any) -> None:
    """Keep what was read beside what is assigned."""
    values = vars(instance)
    if name in values:
        values.setdefault(READ, values[name])
    values[name] = number


def set_read(instance: Any, number: int) -> None:
    """Have an instance know its row's version."""
    vars(instance)[instance._dlock_version.attname] = number
    vars(instance).pop(READ, None)


def mark_late(instance: Any, version: Any, fields: Collection[str]) -> None:
    """Note that these fields, the version among them, were read after others."""
    values = vars(instance)
    values.pop(READ, None)
    others = (each for each in instance._meta.concrete_fields if each is not version and not each.primary_key)
    if any(each.attname in values and not {each.name, each.attname} & set(fields) for each in others):
        values[version.attname] = LateVersion(values[version.attname])


def count_up(instance: Any, using: str) -> None:
    """Do in memory what the UPDATE did, and undo it if it is rolled back."""
    name = instance._dlock_version.attname
    before = vars(instance)[name]
    set_read(instance, before + 1)
    restore_on_rollback(instance, {name: before, READ: ABSENT}, using=using)


def found_versions(rows: models.QuerySet[Any], version: Any) -> dict[Any, int]:
    """What versions rows have now; on MySQL a plain SELECT may see the old ones, a locking one does not."""
    connection = connections[rows.db]
    if connection.vendor == "mysql" and connection.in_atomic_block:
        rows = rows.select_for_update()
    return dict(rows.values_list("pk", version.attname))
