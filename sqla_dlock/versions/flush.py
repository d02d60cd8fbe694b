"""What a flush does for versioned rows beyond SQLAlchemy: it says who was stale, and writes many rows at once.

SQLAlchemy sends one UPDATE for each versioned row and tells a conflict by a count only. Here rows of the same kind are
locked with their versions checked, and written together, inside the flush and just before it would write the first of
them; it then finds nothing left to write. What cannot be written so is left to SQLAlchemy, row by row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import BindParameter, Delete, Engine, Update, event
from sqlalchemy.orm import InstanceState, Mapper, Session
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BinaryExpression

from sqla_dlock.versions.aggregates import roots_of_changes
from sqla_dlock.versions.conflicts import MAX_ROWS_PER_QUERY, find_version, require_versions, stale_row
from sqla_dlock.versions.mapping import VersionedMixin, key_columns, version_column, version_key
from sqla_dlock.versions.writes import (
    expected_version,
    forget_touch,
    is_plain,
    is_touched,
    plain_write,
    remember,
    send,
    touch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from sqla_dlock.versions.writes import Write

__all__ = ["is_unwatched"]


_FLUSH: Final = "dlock_flush"
"""Where a session (in `info`) and the context of its flush (in `attributes`) keep the `_Flush` that is under way."""


@dataclass(slots=True)
class _Flush:
    """A flush under way."""

    session: Session | None
    """None when the flush is over: a connection remembers its last flush, which must not keep the session alive."""
    context: Any
    roots: list[Any]
    """The roots that were counted up before the flush began to write."""
    may_batch: bool
    batches: dict[Mapper[Any], list[Any]] | None = None
    """The instances that may be written together, by the base mapper of their class; None before the first write."""
    late_roots: list[Any] = field(default_factory=list)
    """The roots of what other listeners have changed after ours: the next flush counts them up."""


_last_flushes: Final[WeakKeyDictionary[Connection, _Flush]] = WeakKeyDictionary()
"""The flush that wrote last on a connection, by which its statements are told from those of the application."""
_mappers: Final[WeakKeyDictionary[Any, Mapper[Any]]] = WeakKeyDictionary()


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _know_table(mapper: Mapper[Any], cls: type) -> None:
    _mappers.setdefault(version_column(mapper).table, mapper)


@event.listens_for(Session, "before_flush")
def _begin(session: Session, context: Any, instances: Any) -> None:
    roots = roots_of_changes(session)
    for root in roots:
        touch(root)
    flush = _Flush(session, context, roots, may_batch=instances is None)
    session.info[_FLUSH] = context.attributes[_FLUSH] = flush


@event.listens_for(Session, "after_flush")
def _end(session: Session, context: Any) -> None:
    if flush := context.attributes.get(_FLUSH):
        _find_late_roots(session, flush)
        _forget(session)


@event.listens_for(Session, "after_flush_postexec")
def _touch_late_roots(session: Session, context: Any) -> None:
    if flush := context.attributes.pop(_FLUSH, None):
        for root in flush.late_roots:
            if root in session:
                touch(root)


@event.listens_for(Session, "after_soft_rollback")
def _forget(session: Session, _: Any = None) -> None:
    if flush := session.info.pop(_FLUSH, None):
        flush.session = None


def _find_late_roots(session: Session, flush: _Flush) -> None:
    if roots := roots_of_changes(session):
        known = {id(root) for root in (*flush.roots, *flush.late_roots)}
        flush.late_roots += [root for root in roots if id(root) not in known]


def is_unwatched(session: Session, *events: str) -> bool:
    """Is there no listener, but ours, that would miss what is written beside the unit of work?"""
    return all(
        known.__module__.startswith("sqla_dlock.") for name in events for known in getattr(session.dispatch, name)
    )


def _batches(session: Session, flush: _Flush) -> dict[Mapper[Any], list[Any]]:
    found: dict[Mapper[Any], list[Any]] = defaultdict(list)
    # Most flushes write one row, and `session.dirty` is costly: the flush's own states are counted first.
    if flush.may_batch and len(flush.context.states) > 1 and is_unwatched(session, "after_flush"):
        for instance in session.dirty:
            if isinstance(instance, VersionedMixin):
                found[instance_state(instance).mapper.base_mapper].append(instance)
    return {mapper: instances for mapper, instances in found.items() if len(instances) > 1}


@event.listens_for(VersionedMixin, "before_update", propagate=True, raw=True)
def _before_update(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    _before_write(mapper, connection, state)
    instance = state.obj()
    version = expected_version(instance, "save")
    if forget_touch(state):
        setattr(instance, version_key(mapper), mapper.version_id_generator(version))  # type: ignore[misc, operator]


@event.listens_for(VersionedMixin, "before_delete", propagate=True, raw=True)
def _before_delete(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    _before_write(mapper, connection, state)
    expected_version(state.obj(), "delete")


@event.listens_for(VersionedMixin, "before_insert", propagate=True, raw=True)
def _before_insert(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """A new row has no version to be expected; where it replaces one that is deleted in the same flush it counts on."""
    _before_write(mapper, connection, state)
    state.dict.pop(version_key(mapper), None)
    state.committed_state.pop(version_key(mapper), None)


def _before_write(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    session: Any = state.session
    if flush := session.info.get(_FLUSH):
        if _last_flushes.get(connection) is not flush:
            _last_flushes[connection] = flush
        if flush.batches is None:  # not before: other listeners may have changed, added or expunged instances
            _find_late_roots(session, flush)
            flush.batches = _batches(session, flush)
        if batch := flush.batches.pop(mapper.base_mapper, None):
            _write_together(session, connection, batch)


def _write_together(session: Session, connection: Connection, instances: Sequence[Any]) -> None:
    """Lock and check all rows that are to be written, in the order of their keys; then write those that are alike."""
    alike: dict[Any, list[Write]] = defaultdict(list)
    expected: dict[Mapper[Any], list[tuple[Any, ...]]] = defaultdict(list)
    plain = {mapper for mapper in {instance_state(each).mapper for each in instances} if is_plain(session, mapper)}
    for each in instances:
        state: Any = instance_state(each)
        if state.mapper in plain and (write := plain_write(each)):
            alike[state.mapper, tuple(write.values)].append(write)
            version = write.version
        elif is_touched(each) or session.is_modified(each, include_collections=False):
            version = expected_version(each, "save")
        else:
            continue
        expected[_mappers[version_column(state.mapper).table]].append((*state.identity, version))
    for mapper, rows in expected.items():
        if len(rows) > 1:
            require_versions(session, connection, mapper, rows, "save")
    for (mapper, _), writes in alike.items():
        for start in range(0, len(writes) if len(writes) > 1 else 0, MAX_ROWS_PER_QUERY):
            _write_alike(session, connection, mapper, writes[start : start + MAX_ROWS_PER_QUERY])


def _write_alike(session: Session, connection: Connection, mapper: Mapper[Any], writes: Sequence[Write]) -> None:
    result = send(connection, mapper, writes)
    if connection.dialect.supports_sane_multi_rowcount and result.rowcount < len(writes):  # no row locks: SQLite
        found = [(write, find_version(connection, mapper, write.key)) for write in writes]
        next_version = version_key(mapper)
        write, version = next(((w, v) for w, v in found if v != w.values[next_version]), found[0])
        raise stale_row(session, mapper, write.key, expected=write.version, found=version, action="save")
    remember(session, mapper, writes, result)


@event.listens_for(Engine, "before_execute")
def _before_many(connection: Any, statement: Any, many: Any, params: Any, options: Any) -> None:
    """Find out who is stale while it can still be told: many rows give one count, and a deleted row is gone."""
    if many and (flushed := _flushed(connection, statement)):
        session, mapper, binds = flushed
        expected = [tuple([row[bind] for bind in binds]) for row in many]
        require_versions(session, connection, mapper, expected, _action(statement))


@event.listens_for(Engine, "after_execute")
def _after_one(*execution: Any) -> None:
    connection, statement, many, params, _, result = execution
    is_missed = not many and isinstance(statement, Update | Delete) and result.rowcount == 0  # asked first: it is quick
    if is_missed and (flushed := _flushed(connection, statement)):
        session, mapper, binds = flushed
        *parts, version = (params[bind] for bind in binds)
        key = tuple(parts)
        found = find_version(connection, mapper, key)
        raise stale_row(session, mapper, key, expected=version, found=found, action=_action(statement))


def _flushed(connection: Connection, statement: Any) -> tuple[Session, Mapper[Any], list[str]] | None:
    """Whose flush sends a statement that has to hit versioned rows, and where those stand; None if it is none."""
    if not isinstance(statement, Update | Delete):
        return None
    flush, mapper = _last_flushes.get(connection), _mappers.get(statement.table)
    session = flush.session if flush is not None else None
    if session is None or mapper is None:
        return None
    is_optional = isinstance(statement, Delete) and not mapper.base_mapper.confirm_deleted_rows
    binds = None if is_optional else _binds(statement, mapper)
    return None if binds is None else (session, mapper, binds)


def _binds(statement: Any, mapper: Mapper[Any]) -> list[str] | None:
    """The names of the parameters that are compared with the key and, the last, with the version.

    None for a statement that is not the flush's own: a listener may send others, which may find nothing. A flush names
    its parameters after their columns.
    """
    if statement.whereclause is None:
        return None
    asked = {
        node.left: node.right.key
        for node in visitors.iterate(statement.whereclause)
        if isinstance(node, BinaryExpression) and isinstance(node.right, BindParameter)
    }
    columns = (*key_columns(mapper), version_column(mapper))
    # An UPDATE calls its parameters "orders_id", by the label of the column, which has no public name.
    names = [column.key if isinstance(statement, Delete) else column._label for column in columns]  # noqa: SLF001
    return names if [asked.get(column) for column in columns] == names else None


def _action(statement: Any) -> str:
    return "delete" if isinstance(statement, Delete) else "save"
