"""Flushes of versioned rows: naming the stale row, and writing many rows together.

SQLAlchemy sends one UPDATE for each versioned row, and detects a conflict only by the count of rows. This module locks
the rows of one class in one statement, in which their versions are read and compared, and writes them in another
(`_write_together`). That happens inside the flush, just before SQLAlchemy would write the first of them: it then finds
nothing left to write. Rows that cannot be written in this way are left to SQLAlchemy, one by one.

The course of a flush, by its listeners:

1. `_on_flush_begins` touches the roots of all that will be written, and remembers the flush.
2. `_before_update`, `_before_delete`, `_before_insert` come for each row. The first of them writes the batch.
3. `_check_before_many` and `_raise_after_one` see the statements that SQLAlchemy sends itself, and name the stale row.
4. `_on_flush_ends` and `_touch_late_roots` take care of what other listeners have changed since.
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

from sqla_dlock.begun import is_autocommit
from sqla_dlock.versions.aggregates import roots_of_changes
from sqla_dlock.versions.conflicts import (
    find_stale,
    find_version,
    in_parts,
    require_versions,
    stale_row,
)
from sqla_dlock.versions.in_memory import expected_version
from sqla_dlock.versions.mapping import VersionedMixin, key_columns, version_column, version_key
from sqla_dlock.versions.writes import (
    count_touch,
    is_touched,
    mark_flushed,
    needs_one_update,
    row_update,
    send_updates,
    touch,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from sqla_dlock.versions.writes import RowUpdate

__all__ = ["has_only_our_listeners"]


_FLUSH: Final = "dlock_flush"
"""Where a session (in `info`) and the context of its flush (in `attributes`) keep the `_Flush` that is under way."""


@dataclass(slots=True)
class _Flush:
    """A flush under way."""

    session: Session | None
    """None after the flush: a connection keeps a reference to its last flush, which must not keep the session alive."""
    context: Any
    roots: list[Any]
    """The roots whose versions were incremented before the flush began to write."""
    may_batch: bool
    batches: dict[Mapper[Any], list[Any]] | None = None
    """The instances that may be written together, by the base mapper of their class; None before the first write."""
    late_roots: list[Any] = field(default_factory=list)
    """The roots of instances that other listeners have changed after ours: the next flush increments them."""


_last_flushes: Final[WeakKeyDictionary[Connection, _Flush]] = WeakKeyDictionary()
"""The last flush on a connection, to distinguish its statements from those of the application."""
_mappers: Final[WeakKeyDictionary[Any, Mapper[Any]]] = WeakKeyDictionary()


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _register_table(mapper: Mapper[Any], cls: type) -> None:
    _mappers.setdefault(version_column(mapper).table, mapper)


@event.listens_for(Session, "before_flush")
def _on_flush_begins(session: Session, context: Any, instances: Any) -> None:
    roots = roots_of_changes(session)
    for root in roots:
        touch(root)
    # A sharded session writes each row to a shard of its own, which a batch would not.
    may_batch = instances is None and session.connection_callable is None
    flush = _Flush(session, context, roots, may_batch=may_batch)
    session.info[_FLUSH] = context.attributes[_FLUSH] = flush


@event.listens_for(Session, "after_flush")
def _on_flush_ends(session: Session, context: Any) -> None:
    if flush := context.attributes.get(_FLUSH):
        _find_late_roots(session, flush)
        _end_flush(session)


@event.listens_for(Session, "after_flush_postexec")
def _touch_late_roots(session: Session, context: Any) -> None:
    if flush := context.attributes.pop(_FLUSH, None):
        for root in flush.late_roots:
            if root in session:
                touch(root)


@event.listens_for(Session, "after_soft_rollback")
def _end_flush(session: Session, _: Any = None) -> None:
    if flush := session.info.pop(_FLUSH, None):
        flush.session = None


def _find_late_roots(session: Session, flush: _Flush) -> None:
    if roots := roots_of_changes(session):
        known = {id(root) for root in (*flush.roots, *flush.late_roots)}
        flush.late_roots += [root for root in roots if id(root) not in known]


def has_only_our_listeners(session: Session, *events: str) -> bool:
    """Return whether only dlock listens to these events: others would miss rows written outside the unit of work."""
    return all(
        known.__module__.startswith("sqla_dlock.") for name in events for known in getattr(session.dispatch, name)
    )


def _batches(session: Session, flush: _Flush) -> dict[Mapper[Any], list[Any]]:
    """Return the versioned instances of which a flush writes several, by the base mapper of their class."""
    found: dict[Mapper[Any], list[Any]] = defaultdict(list)
    # Most flushes write one row, and `session.dirty` is costly: the flush's own states are counted first.
    if flush.may_batch and len(flush.context.states) > 1 and has_only_our_listeners(session, "after_flush"):
        for instance in session.dirty:
            if isinstance(instance, VersionedMixin):
                found[instance_state(instance).mapper.base_mapper].append(instance)
    return {mapper: instances for mapper, instances in found.items() if len(instances) > 1}


@event.listens_for(VersionedMixin, "before_update", propagate=True, raw=True)
def _before_update(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    _before_write(mapper, connection, state)
    expected_version(state.obj(), "save")
    count_touch(state)


@event.listens_for(VersionedMixin, "before_delete", propagate=True, raw=True)
def _before_delete(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    _before_write(mapper, connection, state)
    expected_version(state.obj(), "delete")


@event.listens_for(VersionedMixin, "before_insert", propagate=True, raw=True)
def _before_insert(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """Drop a version that was assigned to a new instance: for a new row there is no version to expect.

    A row that replaces one which the same flush deletes becomes an UPDATE in SQLAlchemy, and continues from its
    version.
    """
    _before_write(mapper, connection, state)
    state.dict.pop(version_key(mapper), None)
    state.committed_state.pop(version_key(mapper), None)


def _before_write(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    session: Any = state.session
    if flush := session.info.get(_FLUSH):
        if _last_flushes.get(connection) is not flush:
            _last_flushes[connection] = flush
        # Not earlier than at the first write, since other listeners may have changed, added or expunged instances.
        if flush.batches is None:
            _find_late_roots(session, flush)
            flush.batches = _batches(session, flush)
        if (batch := flush.batches.pop(mapper.base_mapper, None)) and _can_check_many(connection):
            _write_together(session, connection, batch)


def _can_check_many(connection: Connection) -> bool:
    """Return whether a batch is checked up to its write: by the locks on its rows, or by the count of the rows."""
    return connection.dialect.supports_sane_multi_rowcount or not is_autocommit(connection)


def _write_together(session: Session, connection: Connection, instances: Sequence[Any]) -> None:
    """Lock and check all rows of a batch in the order of their keys, then write together those that are alike.

    Rows are alike if the same attributes change, so that one UPDATE with many sets of parameters serves them. The
    others are locked and checked here as well, before the first is written: so a conflict leaves no row half done, and
    two flushes of the same rows cannot deadlock.
    """
    alike: dict[Any, list[RowUpdate]] = defaultdict(list)
    expected: dict[Mapper[Any], list[tuple[Any, ...]]] = defaultdict(list)
    single = {
        mapper for mapper in {instance_state(each).mapper for each in instances} if needs_one_update(session, mapper)
    }
    for each in instances:
        state: Any = instance_state(each)
        if state.mapper in single and (write := row_update(each)):
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
        for some in in_parts(writes) if len(writes) > 1 else ():
            _write_alike(session, connection, mapper, some)


def _write_alike(session: Session, connection: Connection, mapper: Mapper[Any], writes: Sequence[RowUpdate]) -> None:
    result = send_updates(connection, mapper, writes)
    # The rows are locked since they were checked, except on SQLite and in AUTOCOMMIT: there the count decides.
    if connection.dialect.supports_sane_multi_rowcount and result.rowcount < len(writes):
        name = version_key(mapper)
        stale = find_stale(connection, mapper, [(*write.key, write.values[name]) for write in writes])
        key, found = (stale[0][:-1], stale[1]) if stale else (writes[0].key, writes[0].values[name])
        expected = next(write.version for write in writes if write.key == key)
        raise stale_row(session, mapper, key, expected=expected, found=found, action="save")
    mark_flushed(session, mapper, writes, result)


@event.listens_for(Engine, "before_execute")
def _check_before_many(connection: Any, statement: Any, many: Any, params: Any, options: Any) -> None:
    """Check the versions before an UPDATE or DELETE of many rows: afterwards a count cannot tell which was stale."""
    if many and (flushed := _find_flush(connection, statement)):
        session, mapper, binds = flushed
        expected = [tuple([row[bind] for bind in binds]) for row in many]
        require_versions(session, connection, mapper, expected, _action(statement))


@event.listens_for(Engine, "after_execute")
def _raise_after_one(*execution: Any) -> None:
    """Raise StaleObject, with the version found, after an UPDATE or DELETE of one row that has found no row."""
    connection, statement, many, params, _, result = execution
    is_missed = not many and isinstance(statement, Update | Delete) and result.rowcount == 0
    if is_missed and (flushed := _find_flush(connection, statement)):
        session, mapper, binds = flushed
        *parts, version = (params[bind] for bind in binds)
        key = tuple(parts)
        found = find_version(connection, mapper, key)
        raise stale_row(session, mapper, key, expected=version, found=found, action=_action(statement))


def _find_flush(connection: Connection, statement: Any) -> tuple[Session, Mapper[Any], list[str]] | None:
    """Return the session, class and parameters of a statement by which a flush writes versioned rows; else None."""
    if not isinstance(statement, Update | Delete):
        return None
    flush, mapper = _last_flushes.get(connection), _mappers.get(statement.table)
    session = flush.session if flush is not None else None
    if session is None or mapper is None:
        return None
    binds = _parameter_names(statement, mapper)
    return None if binds is None else (session, mapper, binds)


def _parameter_names(statement: Any, mapper: Mapper[Any]) -> list[str] | None:
    """Return the names of the parameters that are compared with the key and, as the last, with the version.

    None for a statement that is not the flush's own: a listener may send others on the same table, and those may find
    no row. A statement of the flush compares exactly these columns, with parameters that are named after them.
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
