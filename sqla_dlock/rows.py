"""Row locks: `lock_row(session, Order, 42)`, `lock_row(session, order)`, `lock_rows(session, Order, [1, 2])`.

Rows are locked and read where the session writes, even if its `get_bind` sends queries to a replica. The row of a
subclass with further tables is locked in those as well. A lock lasts until COMMIT or ROLLBACK of the session, even if
it was taken in a savepoint that has since been released. The values read under the lock replace those in the session's
memory.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from sqlalchemy import Select, and_, inspect, select, tuple_
from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.orm import Mapper

from dlock_core.errors import RowLocked
from dlock_core.options import NOT_GIVEN
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import RowLock
from sqla_dlock.row_sql import locking, require_row_locks, require_tables, require_transaction, waiting
from sqla_dlock.stores import bound_for_writing, connection_for_writing, plain_async_session, plain_session

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias, Unpack

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import InstanceState, InstrumentedAttribute, Session, scoped_session

    from dlock_core.sql.row_locks import RowLockOptions

__all__ = ["alock_row", "alock_rows", "lock_row", "lock_rows"]

if TYPE_CHECKING:
    IsTarget: TypeAlias = Callable[[InstanceState[Any]], bool]


def row_name(mapper: Mapper[Any], key: Iterable[object]) -> str:
    """Return the name of a row for an error, such as "Order(42)"."""
    return f"{mapper.class_.__name__}({', '.join(map(repr, key))})"


def one_row(session: Session, entity: Any, ident: Any) -> tuple[str, Mapper[Any], Select[Any], IsTarget]:
    """Return, for one row: its name, its class, the query that selects it, and whether an instance was read from it."""
    mapper, key = _identity(session, entity, ident)
    identity = mapper.identity_key_from_primary_key(key)
    found = select(mapper.class_).where(
        and_(*(column == value for column, value in zip(_keys(mapper), key, strict=True)))
    )
    return row_name(mapper, key), mapper, found, lambda state: state.key == identity


def many_rows(entity: Any, idents: Any, *, skip_locked: bool) -> tuple[Mapper[Any], Select[Any], IsTarget]:
    """Return, for many rows: their class, a query in the order of the keys, and whether an instance is one of them."""
    if isinstance(entity, Select):
        return _selected(entity, idents, skip_locked=skip_locked)
    mapper = _mapper(entity)
    if idents is NOT_GIVEN or isinstance(idents, str | bytes | Mapping) or not isinstance(idents, Iterable):
        raise TypeError(f"give the primary keys of {mapper.class_.__name__} as a list")
    keys = [_key(mapper, ident) for ident in idents]
    identities = {mapper.identity_key_from_primary_key(key) for key in keys}
    return mapper, by_keys(mapper, keys), lambda state: state.key in identities


def by_keys(mapper: Mapper[Any], keys: list[tuple[Any, ...]]) -> Select[Any]:
    """Return a query for the rows of a class with these primary keys, in the order of the keys."""
    columns = _keys(mapper)
    is_one = tuple_(*columns).in_(keys) if len(columns) > 1 else columns[0].in_([value for (value,) in keys])
    return select(mapper.class_).where(is_one).order_by(*columns)


def _selected(statement: Select[Any], idents: Any, *, skip_locked: bool) -> tuple[Mapper[Any], Select[Any], IsTarget]:
    """Return the same as `many_rows` for a query of the caller; a query that must wait gets the order of the keys."""
    (column, *others) = statement.column_descriptions
    entity = column.get("entity")
    if others or idents is not NOT_GIVEN or column["expr"] is not entity:
        raise TypeError("give a select of one mapped class, such as select(Order).where(...), and nothing else")
    mapper = _mapper(entity)
    if not skip_locked:
        if statement._has_row_limiting_clause:  # noqa: SLF001 - nothing public says whether a query has a limit
            raise ValueError("a limit picks rows in the order of the query, not of their keys: give skip_locked=True")
        statement = statement.order_by(None).order_by(*_keys(mapper))
    return mapper, statement, lambda state: state.mapper.isa(mapper)


def refuse_unsaved(session: Session, is_target: IsTarget) -> None:
    """Raise ValueError if the read under the lock would overwrite a change that the session has not written.

    With autoflush, only changes of the rows themselves count: the session is flushed first, but a change that was made
    before the lock was decided on data that may be old. Without autoflush any change counts, because rows of
    other classes may be loaded along.
    """
    for instance in session.dirty:
        state: InstanceState[Any] = inspect(instance)
        changed = [attribute.key for attribute in state.attrs if attribute.history.has_changes()]
        if changed and (is_target(state) or not session.autoflush):
            raise ValueError(
                f"{row_name(state.mapper, state.identity or ())} has changes that are not saved, "
                f"in {', '.join(changed)}: flush() or refresh() it before the lock, which would overwrite them"
            )


def _identity(session: Session, entity: Any, ident: Any) -> tuple[Mapper[Any], tuple[Any, ...]]:
    if isinstance(entity, type):
        mapper = _mapper(entity)
        if ident is NOT_GIVEN:
            raise TypeError(f"give the primary key of {entity.__name__} as well, or an instance alone")
        return mapper, _key(mapper, ident)
    if ident is not NOT_GIVEN:
        raise TypeError("give a mapped class and a primary key, or an instance alone")
    mapper = _mapper(type(entity))
    state: InstanceState[Any] = inspect(entity)
    if state.identity is None or not state.persistent or state.session is not session:
        words = ("transient", "pending", "deleted", "detached")
        condition = next((word for word in words if getattr(state, word)), "of another session")
        raise ValueError(
            f"this {mapper.class_.__name__} is {condition}, and only a row that this session has read or written can "
            "be locked: flush() or merge() it first, or give the class and the primary key"
        )
    return mapper, state.identity


def _mapper(entity: Any) -> Mapper[Any]:
    found: Any = inspect(entity, raiseerr=False) if isinstance(entity, type) else None
    if not isinstance(found, Mapper):
        raise TypeError(f"{entity!r:.80} is not a mapped class")
    return found


def _key(mapper: Mapper[Any], ident: Any) -> tuple[Any, ...]:
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    if isinstance(ident, Mapping) and set(ident) == set(names):
        return tuple(ident[name] for name in names)
    key = tuple(ident) if isinstance(ident, tuple | list) else (ident,)
    if len(key) != len(names) or isinstance(ident, Mapping):
        raise ValueError(
            f"{ident!r:.80} cannot be a primary key of {mapper.class_.__name__}: give ({', '.join(names)})"
        )
    return key


def _keys(mapper: Mapper[Any]) -> list[InstrumentedAttribute[Any]]:
    return [mapper.get_property_by_column(column).class_attribute for column in mapper.primary_key]


if TYPE_CHECKING:
    AnySession: TypeAlias = Session | scoped_session[Session]
    AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[AsyncSession]


O = TypeVar("O")  # noqa: E741 - an entity, as in SQLAlchemy's own annotations


@overload
def lock_row(
    session: AnySession, entity: type[O], ident: Any, *, skip_locked: Literal[True], **how: Unpack[RowLockOptions]
) -> O | None: ...
@overload
def lock_row(
    session: AnySession,
    entity: type[O],
    ident: Any,
    *,
    skip_locked: Literal[False] = ...,
    **how: Unpack[RowLockOptions],
) -> O: ...
@overload
def lock_row(
    session: AnySession, instance: O, /, *, skip_locked: Literal[True], **how: Unpack[RowLockOptions]
) -> O | None: ...
@overload
def lock_row(
    session: AnySession, instance: O, /, *, skip_locked: Literal[False] = ..., **how: Unpack[RowLockOptions]
) -> O: ...
def lock_row(session: AnySession, entity: Any, ident: Any = NOT_GIVEN, *, skip_locked: bool = False, **how: Any) -> Any:
    """Lock one row until the end of the transaction, and return its state under the lock.

    Pending changes of the session are flushed first, as before any query. SQLite has no row locks: there the write lock
    of the whole database is taken, which BEGIN IMMEDIATE has already taken. MariaDB also locks rows that the class
    loads by a join.

    Args:
        session: A Session or scoped_session, in a transaction or not: one begins with the lock.
        entity: A mapped class, or an instance of the session, which is refreshed.
        ident: The primary key, as for `session.get_one`; only with a class.
        skip_locked: Return None for a row that is locked or does not exist.
        how: Options that limit the lock:
            `wait` is in seconds (float or timedelta); None waits as long as the database does, 0 does not wait. MySQL
            and MariaDB round it up to whole seconds. `nowait=True` does not wait either.
            `shared=True` lets others read the row and lock it shared, but not write it. With `key=True` they may also
            write columns that are no key (PostgreSQL; elsewhere it is a plain shared lock).
            `no_key=False` on PostgreSQL also keeps others from inserting rows that refer to this one.

    Raises RowLocked if another transaction held the row for too long. On PostgreSQL the transaction must then be rolled
    back: lock inside `session.begin_nested()` to lose only the savepoint. Raises NoResultFound; ValueError for an
    instance that is not persistent or that would lose unsaved changes; NotSupported where nothing would be locked.
    Deadlocks and serialization failures remain SQLAlchemy's errors, which `retry_on_conflict` handles.
    """
    lock = RowLock(skip_locked=skip_locked, **how)
    session = plain_session(session, "alock_row")
    name, mapper, statement, is_target = one_row(session, entity, ident)
    refuse_unsaved(session, is_target)
    found = _fetch(session, mapper, statement, lock, name)
    if not found and not skip_locked:
        raise NoResultFound(f"{name} does not exist")
    return found[0] if found else None


@overload
def lock_rows(
    session: AnySession,
    entity: type[O],
    idents: Iterable[Any],
    *,
    skip_locked: bool = ...,
    **how: Unpack[RowLockOptions],
) -> list[O]: ...
@overload
def lock_rows(
    session: AnySession, statement: Select[Any], /, *, skip_locked: bool = ..., **how: Unpack[RowLockOptions]
) -> list[Any]: ...
def lock_rows(
    session: AnySession, entity: Any, idents: Any = NOT_GIVEN, *, skip_locked: bool = False, **how: Any
) -> Any:
    """Lock many rows in the order of their primary keys, so that two such calls never deadlock; returns a list.

    The options and errors are those of `lock_row`, but a row that does not exist is left out; `wait` is for each row.

    Args:
        session: A Session or scoped_session.
        entity: A mapped class, or a query such as `select(Order).where(...)`.
        idents: The primary keys; only with a class.
        skip_locked: Leave out rows that are locked. A query then keeps its own order and may have a limit, such as the
            next ten jobs that no other worker has.
        how: See `lock_row`.
    """
    lock = RowLock(skip_locked=skip_locked, **how)
    session = plain_session(session, "alock_rows")
    mapper, statement, is_target = many_rows(entity, idents, skip_locked=skip_locked)
    refuse_unsaved(session, is_target)
    return _fetch(session, mapper, statement, lock, mapper.class_.__name__)


@overload
async def alock_row(
    session: AnyAsyncSession, entity: type[O], ident: Any, *, skip_locked: Literal[True], **how: Unpack[RowLockOptions]
) -> O | None: ...
@overload
async def alock_row(
    session: AnyAsyncSession,
    entity: type[O],
    ident: Any,
    *,
    skip_locked: Literal[False] = ...,
    **how: Unpack[RowLockOptions],
) -> O: ...
@overload
async def alock_row(
    session: AnyAsyncSession, instance: O, /, *, skip_locked: Literal[True], **how: Unpack[RowLockOptions]
) -> O | None: ...
@overload
async def alock_row(
    session: AnyAsyncSession, instance: O, /, *, skip_locked: Literal[False] = ..., **how: Unpack[RowLockOptions]
) -> O: ...
async def alock_row(session: AnyAsyncSession, *what: Any, **how: Any) -> Any:
    """Lock one row for an AsyncSession; see `lock_row`."""
    return await plain_async_session(session, "lock_row").run_sync(lock_row, *what, **how)


@overload
async def alock_rows(
    session: AnyAsyncSession,
    entity: type[O],
    idents: Iterable[Any],
    *,
    skip_locked: bool = ...,
    **how: Unpack[RowLockOptions],
) -> list[O]: ...
@overload
async def alock_rows(
    session: AnyAsyncSession, statement: Select[Any], /, *, skip_locked: bool = ..., **how: Unpack[RowLockOptions]
) -> list[Any]: ...
async def alock_rows(session: AnyAsyncSession, *what: Any, **how: Any) -> Any:
    """Lock many rows for an AsyncSession; see `lock_rows`."""
    return await plain_async_session(session, "lock_rows").run_sync(lock_rows, *what, **how)


def _fetch(session: Session, mapper: Mapper[Any], statement: Select[Any], lock: RowLock, name: str) -> list[Any]:
    require_tables(mapper)
    with bound_for_writing(session):
        require_row_locks(session.get_bind(mapper.base_mapper).dialect)
    if session.autoflush:
        session.flush()
    started = time.monotonic()
    try:
        return _read(session, mapper, statement, lock)
    except DBAPIError as error:
        if failure_of_statement(error) is DatabaseFailure.LOCK_TIMEOUT:
            is_database = session.get_bind(mapper).dialect.name == "sqlite"
            raise RowLocked(name, waited=time.monotonic() - started, is_database=is_database) from error
        raise


def _read(session: Session, mapper: Mapper[Any], statement: Select[Any], lock: RowLock) -> list[Any]:
    """Lock and read the rows of a query, and then the rows of subclasses in further tables.

    A query of a base class does not join the tables of its subclasses, so their rows take a second query. With
    `skip_locked` that one may find fewer rows, and an instance counts as locked only if all its rows are.
    """
    connection = connection_for_writing(session, mapper)
    require_transaction(connection)
    with waiting(connection, mapper, lock):
        found = _locked(session, connection, mapper, statement, lock)
        for below, keys in _with_more_tables(mapper, found).items():
            locked = {id(each) for each in _locked(session, connection, below, by_keys(below, keys), lock)}
            found = [each for each in found if inspect(each).mapper is not below or id(each) in locked]
    return found


def _locked(
    session: Session, connection: Connection, mapper: Mapper[Any], statement: Select[Any], lock: RowLock
) -> list[Any]:
    locked = locking(statement, mapper, lock, connection)
    options = {"populate_existing": True, "autoflush": False}
    with bound_for_writing(session):
        bind = {"mapper": mapper.base_mapper}
        return list(session.scalars(locked, execution_options=options, bind_arguments=bind).unique())


def _with_more_tables(mapper: Mapper[Any], found: Iterable[Any]) -> dict[Mapper[Any], list[tuple[Any, ...]]]:
    """Return the keys of instances of subclasses with further tables, whose rows there must be locked as well."""
    keys: dict[Mapper[Any], list[tuple[Any, ...]]] = defaultdict(list)
    for each in found:
        state: Any = inspect(each)
        if len(state.mapper.tables) > len(mapper.tables):
            keys[state.mapper].append(state.identity)
    return keys
