"""Row locks: `lock_row(session, Order, 42)`, `lock_row(session, order)`, `lock_rows(session, Order, [1, 2])`.

A lock lasts until COMMIT or ROLLBACK of the session, also when it was taken in a savepoint that is released. What is
read under it is read anew, over what the session had in memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from sqlalchemy.exc import DBAPIError, NoResultFound

from dlock_core.errors import RowLocked
from dlock_core.retry import Trouble, classify
from dlock_core.row_locks import RowLock
from sqla_dlock.row_sql import locking, require_row_locks, require_transaction, waiting
from sqla_dlock.row_targets import NOT_GIVEN, many_rows, one_row, refuse_unsaved
from sqla_dlock.sessions import plain_async_session, plain_session

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias, Unpack

    from sqlalchemy import Select
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Mapper, Session, scoped_session

    from dlock_core.row_locks import HowToLock

    AnySession: TypeAlias = Session | scoped_session[Session]
    AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[AsyncSession]

__all__ = ["alock_row", "alock_rows", "lock_row", "lock_rows"]

O = TypeVar("O")  # noqa: E741 - an entity, as in SQLAlchemy's own annotations


@overload
def lock_row(
    session: AnySession, entity: type[O], ident: Any, *, skip_locked: Literal[True], **how: Unpack[HowToLock]
) -> O | None: ...
@overload
def lock_row(
    session: AnySession, entity: type[O], ident: Any, *, skip_locked: Literal[False] = ..., **how: Unpack[HowToLock]
) -> O: ...
@overload
def lock_row(
    session: AnySession, instance: O, /, *, skip_locked: Literal[True], **how: Unpack[HowToLock]
) -> O | None: ...
@overload
def lock_row(
    session: AnySession, instance: O, /, *, skip_locked: Literal[False] = ..., **how: Unpack[HowToLock]
) -> O: ...
def lock_row(session: AnySession, entity: Any, ident: Any = NOT_GIVEN, *, skip_locked: bool = False, **how: Any) -> Any:
    """Lock one row until the end of the transaction, and give it as it is then.

    `entity` is a mapped class and `ident` its primary key, as for `session.get_one`; or `entity` is an instance of the
    session, which is refreshed. What the session has not written yet is flushed first, as before any query.

    `shared` lets others read and lock shared, but not write; with `key` as well they may also write what is no key
    (PostgreSQL; elsewhere it is a plain shared lock). `wait` is seconds (float or timedelta), None for as long as the
    database waits, 0 the same as `nowait`; MySQL and MariaDB round it up to whole seconds. `skip_locked` returns None
    for a row that is locked or not there. `no_key=False` on PostgreSQL also keeps others from inserting rows that
    refer to it. MariaDB locks rows that the class loads by a join as well.

    SQLite has no row locks: there it takes the write lock of the whole database, as BEGIN IMMEDIATE has done already.

    Raises RowLocked when another transaction held the row for too long (on PostgreSQL the transaction must then be
    rolled back: lock inside `session.begin_nested()` to lose only that), NoResultFound, ValueError for an instance that
    is not persistent or would lose unsaved changes, NotSupported where it would lock nothing. Deadlocks and
    serialization failures stay SQLAlchemy's errors; `retry_on_conflict` knows them.
    """
    lock = RowLock(skip_locked=skip_locked, **how)
    session = plain_session(session, "alock_row")
    name, mapper, statement, is_meant = one_row(session, entity, ident)
    refuse_unsaved(session, is_meant)
    found = _fetch(session, mapper, statement, lock, name)
    if not found and not skip_locked:
        raise NoResultFound(f"{name} does not exist")
    return found[0] if found else None


@overload
def lock_rows(
    session: AnySession, entity: type[O], idents: Iterable[Any], *, skip_locked: bool = ..., **how: Unpack[HowToLock]
) -> list[O]: ...
@overload
def lock_rows(
    session: AnySession, statement: Select[Any], /, *, skip_locked: bool = ..., **how: Unpack[HowToLock]
) -> list[Any]: ...
def lock_rows(
    session: AnySession, entity: Any, idents: Any = NOT_GIVEN, *, skip_locked: bool = False, **how: Any
) -> Any:
    """Lock many rows, in the order of their primary keys, so that two of these never deadlock.

    Give a mapped class and primary keys, of which those that do not exist are left out; or `select(Order).where(...)`.
    Options and errors as of `lock_row`; `wait` is for each row. With `skip_locked`, which waits for nobody, a select
    keeps its own order and may have a limit: the next ten jobs that no other worker has.
    """
    lock = RowLock(skip_locked=skip_locked, **how)
    session = plain_session(session, "alock_rows")
    mapper, statement, is_meant = many_rows(entity, idents, skip_locked=skip_locked)
    refuse_unsaved(session, is_meant)
    return _fetch(session, mapper, statement, lock, mapper.class_.__name__)


@overload
async def alock_row(
    session: AnyAsyncSession, entity: type[O], ident: Any, *, skip_locked: Literal[True], **how: Unpack[HowToLock]
) -> O | None: ...
@overload
async def alock_row(
    session: AnyAsyncSession,
    entity: type[O],
    ident: Any,
    *,
    skip_locked: Literal[False] = ...,
    **how: Unpack[HowToLock],
) -> O: ...
@overload
async def alock_row(
    session: AnyAsyncSession, instance: O, /, *, skip_locked: Literal[True], **how: Unpack[HowToLock]
) -> O | None: ...
@overload
async def alock_row(
    session: AnyAsyncSession, instance: O, /, *, skip_locked: Literal[False] = ..., **how: Unpack[HowToLock]
) -> O: ...
async def alock_row(session: AnyAsyncSession, *what: Any, **how: Any) -> Any:
    """Lock one row as `lock_row` does, for an AsyncSession."""
    return await plain_async_session(session, "lock_row").run_sync(lock_row, *what, **how)


@overload
async def alock_rows(
    session: AnyAsyncSession,
    entity: type[O],
    idents: Iterable[Any],
    *,
    skip_locked: bool = ...,
    **how: Unpack[HowToLock],
) -> list[O]: ...
@overload
async def alock_rows(
    session: AnyAsyncSession, statement: Select[Any], /, *, skip_locked: bool = ..., **how: Unpack[HowToLock]
) -> list[Any]: ...
async def alock_rows(session: AnyAsyncSession, *what: Any, **how: Any) -> Any:
    """Lock many rows as `lock_rows` does, for an AsyncSession."""
    return await plain_async_session(session, "lock_rows").run_sync(lock_rows, *what, **how)


def _fetch(session: Session, mapper: Mapper[Any], statement: Select[Any], lock: RowLock, name: str) -> list[Any]:
    require_row_locks(session.get_bind(mapper).dialect)
    if session.autoflush:
        session.flush()
    started = time.monotonic()
    try:
        return _read(session, mapper, statement, lock)
    except DBAPIError as error:
        if classify(error) is Trouble.LOCK_TIMEOUT:
            raise RowLocked(name, waited=time.monotonic() - started) from error
        raise


def _read(session: Session, mapper: Mapper[Any], statement: Select[Any], lock: RowLock) -> list[Any]:
    bind = {"mapper": mapper}
    connection = session.connection(bind_arguments=bind)
    require_transaction(connection)
    with waiting(connection, mapper, lock):
        locked = locking(statement, mapper, lock, connection)
        options = {"populate_existing": True, "autoflush": False}
        return list(session.scalars(locked, execution_options=options, bind_arguments=bind).unique())
