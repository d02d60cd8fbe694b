"""Querysets that lock rows: `lock_row`, `lock_rows`, `select_for_share`.

A lock lasts until COMMIT or ROLLBACK, also when it was taken in a savepoint that is released.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from django.db import DatabaseError, connections
from django.db.models import Model, QuerySet
from django.db.models.sql import Query

from django_dlock.errors import RowLocked
from django_dlock.row_sql import RowLockQuery, require_row_locks, reword, waiting_in
from dlock_core import row_locks
from dlock_core.retry import Trouble, classify
from dlock_core.row_locks import HowToLock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.deadline import Seconds

__all__ = ["HowToLock", "RowLock", "RowLockQuerySet", "row_name"]

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
            if classify(error) is Trouble.LOCK_TIMEOUT:
                raise RowLocked(name, waited=time.monotonic() - started) from error
            raise

    def _ask(self, rows: QuerySet[Any], features: Any) -> QuerySet[Any]:
        locked = QuerySet.select_for_update(
            rows,
            nowait=self.at_once,
            skip_locked=self.skip_locked,
            of=_own_tables(rows) if features.has_select_for_update_of else (),
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
        found: list[M_co] = lock.fetch(row_name(self.model, pk), self.filter(pk=pk), list)
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


def _own_tables(rows: QuerySet[Any]) -> tuple[str, ...]:
    """Where other tables take part: what to lock, the model's own table and those it inherits from."""
    parents = rows.model._meta.concrete_model._meta.parents
    if not (parents or rows.query.select_related or len(rows.query.alias_map) > 1):
        return ()
    return ("self", *(link.name for link in parents.values() if link))
