"""What a flush does for versioned rows beyond SQLAlchemy: it says who was stale, and writes many rows at once.

SQLAlchemy sends one UPDATE for each versioned row and tells a conflict by a count only. Here rows of the same kind are
locked with their versions checked, and written together, inside the flush and just before it would write the first of
them; it then finds nothing left to write. What cannot be written so is left to SQLAlchemy, row by row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from sqlalchemy import BindParameter, Delete, Engine, Update, event, inspect
from sqlalchemy.orm import Mapper, Session, object_session
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BinaryExpression

from sqla_dlock.stale import AT_ONCE, find_version, require_versions, stale_row
from sqla_dlock.version_children import count_up_roots
from sqla_dlock.version_mapping import VersionedMixin, key_columns, version_column
from sqla_dlock.version_writes import is_plain, plain_write, refuse_deferred, remember, send

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection

    from sqla_dlock.version_writes import Write

__all__ = ["is_unwatched"]


@dataclass
class _Flush:
    """A flush under way; the rows that it may write together, by the root of their hierarchy of classes."""

    batches: dict[Mapper[Any], list[Any]] = field(default_factory=dict)


_flushes: Final[WeakKeyDictionary[Session, _Flush]] = WeakKeyDictionary()
_writers: Final[WeakKeyDictionary[Connection, ref[Session]]] = WeakKeyDictionary()
_mappers: Final[WeakKeyDictionary[Any, Mapper[Any]]] = WeakKeyDictionary()


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _know_table(mapper: Mapper[Any], cls: type) -> None:
    _mappers.setdefault(version_column(mapper).table, mapper)


@event.listens_for(Session, "before_flush")
def _begin(session: Session, context: Any, instances: Any) -> None:
    count_up_roots(session)
    _flushes[session] = _Flush(_batches(session) if instances is None else {})


@event.listens_for(Session, "after_flush")
def _end(session: Session, context: Any) -> None:
    _flushes.pop(session, None)


@event.listens_for(Session, "after_soft_rollback")
def _fail(session: Session, transaction: Any) -> None:
    _flushes.pop(session, None)


def is_unwatched(session: Session) -> bool:
    """Is there no listener that would miss what is written beside the unit of work?"""
    return all(known is _end for known in session.dispatch.after_flush)


def _batches(session: Session) -> dict[Mapper[Any], list[Any]]:
    found: dict[Mapper[Any], list[Any]] = defaultdict(list)
    if is_unwatched(session):
        for instance in session.dirty:
            if isinstance(instance, VersionedMixin):
                found[inspect(instance).mapper.base_mapper].append(instance)
    return {mapper: instances for mapper, instances in found.items() if len(instances) > 1}


@event.listens_for(VersionedMixin, "before_update", propagate=True)
def _before_update(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    session = _note_writer(connection, target)
    flush = _flushes.get(session)
    if flush and (batch := flush.batches.pop(mapper.base_mapper, None)):
        _write_together(session, connection, batch)
    refuse_deferred(target)


@event.listens_for(VersionedMixin, "before_delete", propagate=True)
def _before_delete(mapper: Mapper[Any], connection: Connection, target: Any) -> None:
    _note_writer(connection, target)
    refuse_deferred(target)


def _note_writer(connection: Connection, target: Any) -> Session:
    session: Any = object_session(target)
    _writers[connection] = ref(session)
    return session  # type: ignore[no-any-return]


def _write_together(session: Session, connection: Connection, instances: Sequence[Any]) -> None:
    alike: dict[Any, list[Write]] = defaultdict(list)
    for instance in instances:
        mapper: Mapper[Any] = inspect(instance).mapper
        if is_plain(session, mapper) and (write := plain_write(instance)):
            alike[mapper, tuple(write.values)].append(write)
    for (mapper, _), writes in alike.items():
        for start in range(0, len(writes) if len(writes) > 1 else 0, AT_ONCE):
            some = writes[start : start + AT_ONCE]
            result = send(connection, mapper, some)
            remember(session, mapper, some, result)


@event.listens_for(Engine, "before_execute")
def _before_many(connection: Any, statement: Any, many: Any, params: Any, options: Any) -> None:
    """Find out who is stale while it can still be told: many rows give one count, and a deleted row is gone."""
    if many and (flushed := _flushed(connection, statement)):
        session, mapper = flushed
        expected = [_guard(statement, mapper, row) for row in many]
        require_versions(session, connection, mapper, expected, _action(statement))


@event.listens_for(Engine, "after_execute")
def _after_one(  # noqa: PLR0917 - SQLAlchemy's signature
    connection: Any,
    statement: Any,
    many: Any,
    params: Any,
    options: Any,
    result: Any,
) -> None:
    if not many and (flushed := _flushed(connection, statement)) and result.rowcount == 0:
        session, mapper = flushed
        key, version = _guard(statement, mapper, params)
        found = find_version(connection, mapper, key)
        raise stale_row(session, mapper, key, expected=version, found=found, action=_action(statement))


def _flushed(connection: Connection, statement: Any) -> tuple[Session, Mapper[Any]] | None:
    """Whose flush sends a statement that has to hit versioned rows; None if it is none."""
    if not isinstance(statement, Update | Delete):
        return None
    writer, mapper = _writers.get(connection), _mappers.get(statement.table)
    session = writer() if writer else None
    if session is None or mapper is None or session not in _flushes:
        return None
    is_optional = isinstance(statement, Delete) and not mapper.base_mapper.confirm_deleted_rows
    return None if is_optional else (session, mapper)


def _guard(statement: Any, mapper: Mapper[Any], params: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The key and the version that a statement asks for."""
    asked = dict(_comparisons(statement.whereclause, params))
    return tuple(asked[column] for column in key_columns(mapper)), asked[version_column(mapper)]


def _comparisons(clause: Any, params: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for node in visitors.iterate(clause):
        if isinstance(node, BinaryExpression) and isinstance(node.right, BindParameter):
            yield node.left, params[node.right.key]


def _action(statement: Any) -> str:
    return "delete" if isinstance(statement, Delete) else "save"
