"""Querysets that lock rows: `lock_row`, `lock_rows`, `select_for_share`.

A row lock lasts until COMMIT or ROLLBACK, even when it was taken in a savepoint that is released.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from django.db import DatabaseError, connections
from django.db.models import Model, QuerySet
from django.db.models.sql import Query

from django_dlock.errors import RowLocked
from django_dlock.row_sql import (
    RowLockQuery,
    exchange_query,
    in_order_of_keys,
    own_tables,
    refuse_combined,
    refuse_groups,
    refuse_lost_lock,
    require_row_locks,
    set_lock_clause,
    waiting_in,
)
from dlock_core.sql import row_locks
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import RowLockOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.options import Seconds

__all__ = ["RowLock", "RowLockOptions", "RowLockQuerySet", "row_name"]

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
        rows = self.all() if skip_locked else in_order_of_keys(self)
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
