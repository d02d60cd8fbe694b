"""Row locks in SQL that Django cannot express: shared ones, and limits to the wait.

Django writes FOR UPDATE at the end of a query; a `RowLockQuery` replaces that clause by another one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.db.models.sql import Query
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.where import AND, ExtraWhere
from django.db.transaction import TransactionManagementError

from django_dlock.errors import NotSupported
from dlock_core.sql import row_locks
from dlock_core.sql.database import cursor_of
from dlock_core.sql.row_locks import milliseconds, whole_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "RowLockQuery",
    "exchange_query",
    "in_order_of_keys",
    "own_tables",
    "refuse_combined",
    "refuse_groups",
    "refuse_lost_lock",
    "require_row_locks",
    "set_lock_clause",
    "waiting",
    "waiting_in",
]

_POSTGRESQL_LIMIT: Final = row_locks.POSTGRESQL_LIMIT.format(wait="%s")
_MYSQL_LIMIT: Final = row_locks.MYSQL_LIMIT.format(wait="%s")


class RowLockQuery(Query):
    """A query whose FOR UPDATE becomes FOR SHARE, or has a limit to its wait."""

    dlock_strength = "UPDATE"
    dlock_wait: int | None = None

    def get_compiler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the database's own compiler, extended by our clauses."""
        compiler: Any = super().get_compiler(*args, **kwargs)
        compiler.__class__ = _with_row_locks(compiler.__class__)
        return compiler


def refuse_combined(query: Any) -> None:
    """Raise NotSupported for a union, intersection or difference: Django omits its lock clause, or locks some parts."""
    if query.combinator:
        raise NotSupported(
            f"{query.combinator}() gives rows that no database can lock: combine the conditions instead, as by "
            "filter(Q(...) | Q(...)), or lock the rows of each queryset"
        )


def refuse_groups(connection: Any, query: Any) -> None:
    """Raise NotSupported for a query with GROUP BY or DISTINCT on PostgreSQL, which locks none of its rows."""
    if connection.vendor == "postgresql" and (query.group_by is not None or query.distinct):
        name = query.model.__name__
        raise NotSupported(
            "PostgreSQL locks no rows of a query with an aggregate or distinct(): use a manager or a queryset without "
            f"them, or {name}.lock_row() of an instance, which uses none"
        )


def refuse_lost_lock(combined: Any, *parts: Any) -> None:
    """Raise NotSupported if a combination of queries would not lock its rows as each part that locks would."""
    locks = {_lock_of(part) for part in parts} - {None}
    if locks:
        refuse_combined(combined)
    if locks - {_lock_of(combined)} and not combined.is_empty():
        raise NotSupported(
            "Django keeps at most the lock of the first queryset of a combination: "
            "put the lock after the combination, as in (a | b).select_for_update()"
        )


def _lock_of(query: Any) -> tuple[object, ...] | None:
    """Return what distinguishes the lock clause of a query from others; None if it has none."""
    if not query.select_for_update:
        return None
    return (
        query.select_for_update_nowait,
        query.select_for_update_skip_locked,
        tuple(query.select_for_update_of),
        query.select_for_no_key_update,
        getattr(query, "dlock_strength", RowLockQuery.dlock_strength),
    )


def set_lock_clause(locked: Any, **words: Any) -> None:
    """Set the words of a queryset's lock clause: `strength` ("SHARE", "KEY SHARE") or `wait` (seconds)."""
    if type(locked.query) not in (Query, RowLockQuery):
        raise NotSupported(f"dlock cannot lock the rows of a {type(locked.query).__name__}")
    exchange_query(locked, RowLockQuery)
    vars(locked.query).update({f"dlock_{key}": word for key, word in words.items()})


def exchange_query(rows: Any, kind: type[Query]) -> None:
    """Exchange the query of a queryset for one of another class, and leave the kind of its rows as it is.

    Django's own setter makes dicts of all rows that are no instances.
    """
    rows._query = rows.query.chain(kind)  # noqa: SLF001 - as above


class _RowLockCompiler(SQLCompiler):
    qualify: Any  # Django's: the condition on window functions

    def as_sql(self, *args: Any, **kwargs: Any) -> Any:
        query: Any = self.query
        if query.select_for_update:
            require_row_locks(self.connection)
            refuse_groups(self.connection, query)
            if not query.select_for_update_of and self.connection.features.has_select_for_update_of:
                query = self.query = query.chain()
                query.select_for_update_of = own_tables(query.model)
        sql, params = super().as_sql(*args, **kwargs)
        if not query.select_for_update or not self.connection.features.has_select_for_update:
            return sql, params
        if self.qualify:
            raise NotSupported(
                "a filter by a window function gives rows that dlock cannot lock in this way: read their keys first, "
                f"then lock the rows of {query.model.__name__}.objects.filter(pk__in=keys)"
            )
        of = self.get_select_for_update_of_arguments()
        nowait, skip_locked = query.select_for_update_nowait, query.select_for_update_skip_locked
        written = self.connection.ops.for_update_sql(nowait, skip_locked, of, query.select_for_no_key_update)
        head, _, tail = sql.rpartition(written)  # A subquery may have a lock clause as well; ours is the last.
        return head + _clause(self.connection, query, of) + tail, params


def in_order_of_keys(rows: Any) -> Any:
    """Return a queryset in the order of its primary keys, in which every caller locks rows.

    Raises NotSupported for a slice, whose own order says which rows it has.
    """
    if rows.query.is_sliced:
        raise NotSupported(
            "a slice cannot be locked in the order of its keys: add skip_locked=True, or lock the rows whose keys you "
            "have read from it, filter(pk__in=[...])"
        )
    found = rows.order_by("pk")
    found.query.standard_ordering = True  # `reverse()` outlasts a new order
    return found


def own_tables(model: Any) -> tuple[str, ...]:
    """Return the values of `of` for a model's table and its parents' tables, so that joined tables stay unlocked."""
    return ("self", *(link.name for link in model._meta.concrete_model._meta.parents.values() if link))


@lru_cache
def _with_row_locks(kind: Any) -> Any:
    return type(f"RowLock{kind.__name__}", (_RowLockCompiler, kind), {})


def _clause(connection: Any, query: Any, of: list[str]) -> str:
    words = [_strength(connection, query)]
    if of:
        words.append("OF " + ", ".join(of))
    if query.select_for_update_nowait:
        words.append("NOWAIT")
    if query.select_for_update_skip_locked:
        words.append("SKIP LOCKED")
    if query.dlock_wait is not None:
        words.append(f"WAIT {query.dlock_wait:d}")
    return " ".join(words)


def _strength(connection: Any, query: Any) -> str:
    if query.dlock_strength == "UPDATE":
        return "FOR NO KEY UPDATE" if query.select_for_no_key_update else "FOR UPDATE"
    if connection.vendor == "postgresql":
        return f"FOR {query.dlock_strength}"
    if connection.vendor == "mysql":
        return "LOCK IN SHARE MODE" if connection.mysql_is_mariadb else "FOR SHARE"
    raise NotSupported(f"{connection.display_name} has no shared row locks that dlock supports")


def require_row_locks(connection: Any) -> None:
    """Raise TransactionManagementError outside a transaction, and NotSupported where a row lock would protect nothing.

    SQLite has no row locks, but a transaction that began IMMEDIATE or EXCLUSIVE has locked the whole database.
    """
    if connection.get_autocommit():
        raise TransactionManagementError(
            "a row lock lasts until the end of its transaction, and no transaction is open: "
            "lock inside transaction.atomic(), or use locked_row()"
        )
    if connection.features.has_select_for_update:
        return
    mode = getattr(connection, "transaction_mode", None)
    began_locked = connection.in_atomic_block and connection.commit_on_exit and mode in ("IMMEDIATE", "EXCLUSIVE")
    if not began_locked:
        raise NotSupported(
            f"{connection.display_name} has no row locks, and this transaction has not locked the database: "
            f"set DATABASES[{connection.alias!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'"
        )


def waiting(connection: Any, wait: float | None) -> AbstractContextManager[None]:
    """Limit how long each statement inside the block waits for each lock (seconds), and restore the limit after it.

    None and 0 limit nothing. Nothing is done on SQLite, where a transaction that may lock a row has already locked the
    database. Raises NotSupported on other databases than PostgreSQL, MariaDB, MySQL and SQLite.
    """
    if not wait or not connection.features.has_select_for_update:
        return nullcontext()
    if connection.vendor == "postgresql":
        return _waiting_on_postgresql(connection, wait)
    if connection.vendor == "mysql":
        return _waiting_on_mysql(connection, wait)
    raise NotSupported(f"dlock cannot limit the wait for a row lock on {connection.display_name}: use nowait=True")


def waiting_in(locked: Any, connection: Any, wait: float | None) -> AbstractContextManager[None]:
    """Limit the wait as `waiting` does, for one queryset: where its query can say so, no further statement is sent."""
    if wait and connection.vendor == "postgresql":
        locked.query.where.add(ExtraWhere([f"{_POSTGRESQL_LIMIT} IS NOT NULL"], [str(milliseconds(wait))]), AND)
        return _restoring_on_postgresql(connection)
    if wait and connection.vendor == "mysql" and connection.mysql_is_mariadb:
        set_lock_clause(locked, wait=whole_seconds(wait))
        return nullcontext()
    return waiting(connection, wait)


@contextmanager
def _waiting_on_postgresql(connection: Any, wait: float) -> Iterator[None]:
    _execute(connection, f"SELECT {_POSTGRESQL_LIMIT}", str(milliseconds(wait)))
    with _restoring_on_postgresql(connection):
        yield


@contextmanager
def _restoring_on_postgresql(connection: Any) -> Iterator[None]:
    try:
        yield
    except ObjectDoesNotExist:
        _execute(connection, row_locks.POSTGRESQL_RESTORE)
        raise
    # Not after a database error: PostgreSQL then accepts nothing before a rollback, and that restores the setting.
    _execute(connection, row_locks.POSTGRESQL_RESTORE)


@contextmanager
def _waiting_on_mysql(connection: Any, wait: float) -> Iterator[None]:
    _execute(connection, _MYSQL_LIMIT, whole_seconds(wait))
    try:
        yield
    finally:
        # The setting belongs to the session, so no rollback restores it. Django's cursor would refuse the statement
        # after an error in the block, so it goes through the driver's.
        if connection.connection is not None:
            with suppress(connection.Database.Error), cursor_of(connection.connection) as cursor:
                cursor.execute(row_locks.MYSQL_RESTORE)


def _execute(connection: Any, sql: str, *params: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
