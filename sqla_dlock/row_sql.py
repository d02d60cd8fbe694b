"""Row locks in the SQL of each database, where SQLAlchemy cannot express them or would silently omit them."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, Dialect, Join, Select, Table, delete, false, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql.selectable import FromGrouping

from dlock_core.errors import NotSupported
from dlock_core.sql import row_locks
from dlock_core.sql.row_locks import RowLock, milliseconds, whole_seconds
from sqla_dlock.begun import has_begun, is_autocommit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Mapper

__all__ = ["locking", "require_row_locks", "require_tables", "require_transaction", "waiting", "waiting_on_mysql"]

_MYSQL: Final = ("mysql", "mariadb")
_POSTGRESQL_LIMIT: Final = text(row_locks.POSTGRESQL_LIMIT.format(wait=":dlock_wait") + " IS NOT NULL")
_POSTGRESQL_RESTORE: Final = text(row_locks.POSTGRESQL_RESTORE)
_MYSQL_LIMIT: Final = text(row_locks.MYSQL_LIMIT.format(wait=":seconds"))
_MYSQL_RESTORE: Final = text(row_locks.MYSQL_RESTORE)


def require_row_locks(dialect: Dialect) -> None:
    """Raise NotSupported for a database whose row locks dlock does not support."""
    if dialect.name not in ("postgresql", "sqlite", *_MYSQL):
        raise NotSupported(f"dlock has no row locks for {dialect.name}, and SQLAlchemy might silently leave them out")


def require_tables(mapper: Mapper[Any]) -> None:
    """Raise NotSupported for a class that is selected from a query: no row lock reaches the rows below that."""
    mapper._check_configure()  # noqa: SLF001 - concrete classes are told apart only then
    if not _is_of_tables(mapper.selectable):
        raise NotSupported(
            f"{mapper.class_.__name__} is selected from a query (a concrete hierarchy, or a mapped subquery), in which "
            "a row lock locks nothing: lock the rows of the table itself, by "
            "session.execute(select(table).where(...).with_for_update())"
        )


def _is_of_tables(selected: Any) -> bool:
    if isinstance(selected, Join):
        return _is_of_tables(selected.left) and _is_of_tables(selected.right)
    return isinstance(selected, Table) or (isinstance(selected, FromGrouping) and _is_of_tables(selected.element))


def require_transaction(connection: Connection) -> None:
    """Raise NotSupported in AUTOCOMMIT, where the row would be unlocked before it is returned."""
    if is_autocommit(connection):
        raise NotSupported(
            "a row lock lasts until the end of its transaction, and this connection is in AUTOCOMMIT: "
            "use another isolation level"
        )


def locking(statement: Select[Any], mapper: Mapper[Any], lock: RowLock, connection: Connection) -> Select[Any]:
    """Return a query that locks the rows of a class, but not the rows that it joins, if SQL can distinguish them."""
    name = connection.dialect.name
    locked = statement.with_for_update(
        read=lock.shared,
        nowait=lock.at_once,
        skip_locked=lock.skip_locked,
        key_share=lock.key if lock.shared else lock.no_key,
        of=list(mapper.tables),
    )
    if lock.limit and name == "postgresql":
        return locked.where(_POSTGRESQL_LIMIT.bindparams(dlock_wait=str(milliseconds(lock.limit))))
    if lock.limit and _has_wait_clause(connection):
        return locked.suffix_with(text(f"WAIT {whole_seconds(lock.limit):d}"))
    return locked


def waiting(connection: Connection, mapper: Mapper[Any], lock: RowLock) -> AbstractContextManager[None]:
    """Return a context for a query of `locking`: it sets what the query itself cannot express, and restores it."""
    if connection.dialect.name == "sqlite":
        _lock_database(connection, mapper, lock)
    elif lock.limit and connection.dialect.name == "postgresql":
        return _restoring_on_postgresql(connection)
    elif lock.limit and not _has_wait_clause(connection):
        return waiting_on_mysql(connection, lock.limit)
    return nullcontext()


def _has_wait_clause(connection: Connection) -> bool:
    return bool(getattr(connection.dialect, "is_mariadb", False))


@contextmanager
def _restoring_on_postgresql(connection: Connection) -> Iterator[None]:
    yield
    # Not after an error: PostgreSQL then accepts nothing before a rollback, which restores the setting anyway.
    connection.execute(_POSTGRESQL_RESTORE)


@contextmanager
def waiting_on_mysql(connection: Connection, wait: float) -> Iterator[None]:
    """Limit how many seconds each statement inside the block waits for each lock."""
    connection.execute(_MYSQL_LIMIT, {"seconds": whole_seconds(wait)})
    try:
        yield
    finally:  # The setting belongs to the session of the database, so that no rollback restores it.
        with suppress(SQLAlchemyError):  # A lost connection, or one aborted by a cancellation, ends that session.
            connection.execute(_MYSQL_RESTORE)


def _lock_database(connection: Connection, mapper: Mapper[Any], lock: RowLock) -> None:
    """Take SQLite's only write lock; after BEGIN IMMEDIATE this transaction already has it.

    SQLite cannot report how a transaction began. But a DELETE of no rows takes the lock, and fails if another
    connection has written since this transaction first read.
    """
    with _busy_timeout(connection, lock):
        connection.execute(delete(mapper.tables[0]).where(false()))
    if not has_begun(connection):
        raise NotSupported(
            "SQLite has no row locks, and no transaction is open that could have locked the database: "
            "begin transactions with BEGIN IMMEDIATE (the event 'begin' of the engine)"
        )


@contextmanager
def _busy_timeout(connection: Connection, lock: RowLock) -> Iterator[None]:
    if not (lock.at_once or lock.skip_locked or lock.limit):
        yield
        return
    former = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {milliseconds(lock.limit) if lock.limit else 0:d}")
    try:
        yield
    finally:
        with suppress(SQLAlchemyError):  # the same as on MySQL
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {former:d}")
