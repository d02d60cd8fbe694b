"""Optimistic locking for SQLAlchemy: a version column that each UPDATE and DELETE checks.

The check is part of the statement itself, `UPDATE … SET version = 4 WHERE id = 42 AND version = 3`, so that there is no
window between check and write. Each flush makes it. `save_with_version` saves one instance, and leaves the transaction
usable after a conflict, which a failed flush does not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import inspect
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import PassiveFlag, RelationshipDirection
from sqlalchemy.orm.attributes import get_history

from dlock_core.options import NOT_GIVEN
from dlock_core.sql.versions import require_sent
from sqla_dlock.stores import connection_for_writing, plain_async_session, plain_session
from sqla_dlock.versions import bulk, undone  # noqa: F401 - their listeners
from sqla_dlock.versions.aggregates import has_root, roots_of_changes
from sqla_dlock.versions.conflicts import StaleObject, find_version, require_versions, stale_instance
from sqla_dlock.versions.flush import has_only_our_listeners
from sqla_dlock.versions.in_memory import expected_version, require_expected
from sqla_dlock.versions.mapping import VersionedMixin, require_kind
from sqla_dlock.versions.writes import (
    is_touchable,
    is_touched,
    mark_flushed,
    needs_one_update,
    row_update,
    send_updates,
)
from sqla_dlock.versions.writes import touch as mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import InstanceState, Mapper, Session, scoped_session

    from sqla_dlock.versions.writes import RowUpdate

__all__ = [
    "StaleObject",
    "VersionedMixin",
    "adelete_with_version",
    "asave_with_version",
    "atouch",
    "delete_with_version",
    "save_with_version",
    "touch",
]


def save_with_version(session: Session | scoped_session[Any], instance: Any, *, expected: Any = NOT_GIVEN) -> None:
    """Write the changes of one instance; raise StaleObject if its row was changed or deleted since it was read.

    After StaleObject the transaction is usable, and the instance keeps its changes: another save conflicts again, and
    `session.refresh()` reads the row anew. Nothing is committed. Nothing is sent for an instance without changes (see
    `touch`). Other instances of the session stay unwritten, unless only a flush can save this one (several tables,
    listeners, changed relationships, a new instance): then all of them are checked first and flushed together.

    Args:
        session: The session that the instance belongs to.
        instance: An instance of a `VersionedMixin` class, or of a class with a `version_id_col`.
        expected: A version that the caller knows, for example from an ETag. A version that was assigned to the
            instance is expected as well.

    Raises StaleObject. Raises TypeError for a class without a version, an AsyncSession, or an expected version of
    another type than versions of the class have, such as text, or None as that of a payload without one. Raises
    ValueError for an instance that is not in this session, that is marked as deleted, or whose version was deferred or
    read later than other columns.
    """
    require_sent(expected)
    session = plain_session(session, "asave_with_version")
    state = _versioned_state(session, instance)
    if state.pending:
        _lock_and_check_dirty(session)
        session.flush()
        return
    _check_expected(instance, expected, "save")
    if not (session.is_modified(instance) or is_touched(instance)):
        return
    if write := _single_update(session, instance):
        _send_single(session, state.mapper, write)
    else:
        if is_touchable(state.mapper):
            mark(instance)  # a changed collection counts, too
        _lock_and_check_dirty(session)
        session.flush()


async def asave_with_version(
    session: AsyncSession | async_scoped_session[Any], instance: Any, *, expected: Any = NOT_GIVEN
) -> None:
    """Save one instance of an AsyncSession; see `save_with_version`."""
    plain = plain_async_session(session, "save_with_version")
    await plain.run_sync(save_with_version, instance, expected=expected)


def delete_with_version(session: Session | scoped_session[Any], instance: Any, *, expected: Any = NOT_GIVEN) -> None:
    """Delete one instance; raise StaleObject if its row was changed or deleted since it was read.

    After StaleObject the transaction is usable, and nothing is marked as deleted. Other changes of the session are
    checked and flushed along with it. The arguments and errors are those of `save_with_version`.
    """
    require_sent(expected)
    session = plain_session(session, "adelete_with_version")
    state = _versioned_state(session, instance)
    if state.pending:
        raise ValueError(f"this {type(instance).__name__} is not in the database yet: call session.expunge() instead")
    _check_expected(instance, expected, "delete")
    with session.no_autoflush:
        along = [each for each, *_ in state.mapper.cascade_iterator("delete", state) if each not in session.new]
        _lock_and_check_dirty(session, [instance, *along])
        session.delete(instance)
    session.flush()


async def adelete_with_version(
    session: AsyncSession | async_scoped_session[Any], instance: Any, *, expected: Any = NOT_GIVEN
) -> None:
    """Delete one instance of an AsyncSession; see `delete_with_version`."""
    plain = plain_async_session(session, "delete_with_version")
    await plain.run_sync(delete_with_version, instance, expected=expected)


def touch(session: Session | scoped_session[Any], instance: Any) -> None:
    """Increment the version with the next flush although nothing else changes, so that saves of older data conflict.

    Use it for a row on which a decision was based. It counts once per flush, together with other changes. The errors
    are those of `save_with_version`, and TypeError for a version that the database counts (version_id_generator=False).
    """
    session = plain_session(session, "atouch")
    if not _versioned_state(session, instance).pending:
        mark(instance)


async def atouch(session: AsyncSession | async_scoped_session[Any], instance: Any) -> None:
    """Increment the version of an instance of an AsyncSession; see `touch`. Awaits only for an expired instance."""
    await plain_async_session(session, "touch").run_sync(touch, instance)


def _versioned_state(session: Session, instance: Any) -> InstanceState[Any]:
    """Return the state of an instance; raises TypeError or ValueError if the session cannot save it."""
    try:
        state: Any = inspect(instance)
    except NoInspectionAvailable:
        state = None
    name = type(instance).__name__
    if getattr(state, "mapper", None) is None or state.mapper is state:
        raise TypeError(f"an instance of a mapped class is needed, and {name} is not one")
    if state.mapper.version_id_col is None:
        raise TypeError(f"{name} has no version: add VersionedMixin to its bases")
    if state.session is not session:
        where = "belongs to another session" if state.session else "is in no session: add() it or read it again"
        raise ValueError(f"this {name} {where}")
    if state.deleted or instance in session.deleted:
        raise ValueError(f"this {name} is marked as deleted, so it cannot be saved")
    return state  # type: ignore[no-any-return]


def _check_expected(instance: Any, expected: Any, action: str) -> None:
    if expected is not NOT_GIVEN:
        require_kind(inspect(instance).mapper, expected)  # before an expired instance is read
    version = expected_version(instance, action)
    if expected is not NOT_GIVEN:
        require_expected(instance, expected, version, action)


def _single_update(session: Session, instance: Any) -> RowUpdate | None:
    """Return the one UPDATE that saves an instance, or None if saving it takes a flush."""
    mapper = inspect(instance).mapper
    is_alone = (
        has_only_our_listeners(session, "before_flush", "after_flush", "after_flush_postexec")
        and not has_root(mapper)
        and needs_one_update(session, mapper)
    )
    write = row_update(instance) if is_alone else None
    return None if write is None or (session.new and _may_refer_to_new_row(mapper, write)) else write


def _may_refer_to_new_row(mapper: Mapper[Any], write: RowUpdate) -> bool:
    """Return whether an UPDATE sets a foreign key, which may be that of a row that the session has yet to insert."""
    return any(mapper.column_attrs[name].columns[0].foreign_keys for name in write.values)


def _send_single(session: Session, mapper: Mapper[Any], write: RowUpdate) -> None:
    connection = connection_for_writing(session, mapper)
    result = send_updates(connection, mapper, [write])
    if result.rowcount == 0:
        found = find_version(connection, mapper, write.key)
        raise stale_instance(write.instance, expected=write.version, found=found, action="save")
    mark_flushed(session, mapper, [write], result)


def _lock_and_check_dirty(session: Session, deleted: Sequence[Any] = ()) -> None:
    """Lock and check all rows that the following flush will write, so that the flush itself cannot conflict.

    A flush that fails rolls the transaction back, or leaves it unusable. A conflict that is found before the flush
    leaves everything as it was, and that is what `save_with_version` promises.

    Args:
        session: The session that is about to flush.
        deleted: Instances that the caller will delete, next to those that the session knows.
    """
    with session.no_autoflush:
        gone = {id(each): each for each in (*session.deleted, *deleted)}
        written = [each for each in session.dirty if is_touched(each) or session.is_modified(each)]
        rows = {id(each): each for each in (*written, *roots_of_changes(session)) if id(each) not in gone}
        for parent in (*rows.values(), *gone.values()):
            rows |= {
                id(each): each
                for each in _children_that_move(parent, is_gone=id(parent) in gone)
                if id(each) not in gone
            }
    _lock_and_check(session, rows.values(), "save")
    _lock_and_check(session, gone.values(), "delete")


def _children_that_move(parent: Any, *, is_gone: bool) -> Iterator[Any]:
    """Yield the children whose foreign key a flush changes, because they moved or because their parent is deleted."""
    for relationship in inspect(parent).mapper.relationships:
        if relationship.direction is RelationshipDirection.ONETOMANY and not relationship.viewonly:
            passive = PassiveFlag.PASSIVE_OFF if is_gone else PassiveFlag.PASSIVE_NO_INITIALIZE
            if not (is_gone and relationship.passive_deletes):
                history = get_history(parent, relationship.key, passive=passive)
                moved = history.sum() if is_gone else [*history.added, *history.deleted]
                yield from (each for each in moved if each is not None and inspect(each).persistent)


def _lock_and_check(session: Session, instances: Iterable[Any], action: str) -> None:
    expected: dict[tuple[Connection, Mapper[Any]], list[tuple[Any, ...]]] = defaultdict(list)
    connections: dict[Mapper[Any], Connection] = {}
    for each in instances:
        state: Any = inspect(each)
        mapper = state.mapper
        if mapper.version_id_col is not None:
            connection = connections.get(mapper)
            if connection is None:
                connection = connection_for_writing(session, mapper, each)
                if session.connection_callable is None:
                    connections[mapper] = connection
            expected[connection, mapper].append((*state.identity, expected_version(each, action)))
    for (connection, mapper), rows in expected.items():
        require_versions(session, connection, mapper, rows, action)
