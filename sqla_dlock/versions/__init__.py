"""Optimistic locking for SQLAlchemy: a version column that every UPDATE and DELETE checks.

The check is part of the statement itself, `UPDATE … SET version = 4 WHERE id = 42 AND version = 3`: no window. Every
flush makes it; `save_with_version` is a save of one instance that also leaves the transaction usable after a conflict.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import inspect
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm import PassiveFlag, RelationshipDirection
from sqlalchemy.orm.attributes import get_history

from sqla_dlock.stores import connection_for_writing, plain_async_session, plain_session
from sqla_dlock.versions import bulk  # noqa: F401 - its listener
from sqla_dlock.versions.aggregates import has_root, roots_of_changes
from sqla_dlock.versions.conflicts import StaleObject, find_version, require_versions, stale_instance
from sqla_dlock.versions.flush import is_unwatched
from sqla_dlock.versions.mapping import VersionedMixin
from sqla_dlock.versions.writes import (
    expected_version,
    is_plain,
    is_touched,
    plain_write,
    remember,
    require_expected,
    send,
)
from sqla_dlock.versions.writes import touch as mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import InstanceState, Mapper, Session, scoped_session

    from sqla_dlock.versions.writes import Write

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


def save_with_version(session: Session | scoped_session[Any], instance: Any, *, expected: Any = None) -> None:
    """Write what changed in one instance, or raise StaleObject when its row changed or went away since it was read.

    After StaleObject the transaction is usable and the instance as it was, with its changes: saving it again conflicts
    again, `session.refresh()` reads it anew. `expected` is a version that the caller knows, from an ETag for one.
    A version that was assigned to the instance is one that the caller expects, too. Nothing is committed, and nothing
    sent for an instance without changes (see `touch`). Other instances of the session stay unwritten, unless only a
    flush can save this one (several tables, listeners, changed relationships, a new instance): then all are checked
    first and flushed together.

    Raises TypeError for a class without a version, a session of the other kind, or a version that is text; ValueError
    for an instance that is not in this session, that is marked as deleted, or whose version was deferred, or read later
    than other columns.
    """
    session = plain_session(session, "asave_with_version")
    state = _owned(session, instance)
    if state.pending:
        _require_dirty(session)
        session.flush()
        return
    _compare(instance, expected, "save")
    if not (session.is_modified(instance) or is_touched(instance)):
        return
    if write := _plain(session, instance):
        _send(session, state.mapper, write)
    else:
        mark(instance)  # a changed collection counts, too
        _require_dirty(session)
        session.flush()


async def asave_with_version(
    session: AsyncSession | async_scoped_session[Any], instance: Any, *, expected: Any = None
) -> None:
    """Save as `save_with_version` does, for an AsyncSession."""
    plain = plain_async_session(session, "save_with_version")
    await plain.run_sync(save_with_version, instance, expected=expected)


def delete_with_version(session: Session | scoped_session[Any], instance: Any, *, expected: Any = None) -> None:
    """Delete one instance, or raise StaleObject when its row changed or went away since it was read.

    After StaleObject the transaction is usable and nothing is marked as deleted. Other changes of the session are
    checked and flushed with it. Errors as of `save_with_version`.
    """
    session = plain_session(session, "adelete_with_version")
    state = _owned(session, instance)
    if state.pending:
        raise ValueError(f"{type(instance).__name__} is not in the database yet: session.expunge() forgets it")
    _compare(instance, expected, "delete")
    with session.no_autoflush:
        along = [each for each, *_ in state.mapper.cascade_iterator("delete", state) if each not in session.new]
        _require_dirty(session, [instance, *along])
        session.delete(instance)
    session.flush()


async def adelete_with_version(
    session: AsyncSession | async_scoped_session[Any], instance: Any, *, expected: Any = None
) -> None:
    """Delete as `delete_with_version` does, for an AsyncSession."""
    plain = plain_async_session(session, "delete_with_version")
    await plain.run_sync(delete_with_version, instance, expected=expected)


def touch(session: Session | scoped_session[Any], instance: Any) -> None:
    """Count an instance up with the next flush although nothing of it changes: what a decision was made upon, say.

    Once per flush, together with other changes. Errors as of `save_with_version`.
    """
    session = plain_session(session, "atouch")
    if not _owned(session, instance).pending:
        mark(instance)


async def atouch(session: AsyncSession | async_scoped_session[Any], instance: Any) -> None:
    """Count up as `touch` does, for an AsyncSession; awaits only when the instance has expired."""
    await plain_async_session(session, "touch").run_sync(touch, instance)


def _owned(session: Session, instance: Any) -> InstanceState[Any]:
    try:
        state: Any = inspect(instance)
    except NoInspectionAvailable:
        state = None
    name = type(instance).__name__
    if getattr(state, "mapper", None) is None or state.mapper is state:
        raise TypeError(f"an instance of a mapped class is needed, not {name}")
    if state.mapper.version_id_col is None:
        raise TypeError(f"{name} has no version: add VersionedMixin to its bases")
    if state.session is not session:
        where = "belongs to another session" if state.session else "is in no session: add() it, or read it again"
        raise ValueError(f"this {name} {where}")
    if state.deleted or instance in session.deleted:
        raise ValueError(f"this {name} is marked as deleted")
    return state  # type: ignore[no-any-return]


def _compare(instance: Any, expected: Any, action: str) -> None:
    version = expected_version(instance, action)
    if expected is not None:
        require_expected(instance, expected, version, action)


def _plain(session: Session, instance: Any) -> Write | None:
    mapper = inspect(instance).mapper
    is_alone = (
        is_unwatched(session, "before_flush", "after_flush") and not has_root(mapper) and is_plain(session, mapper)
    )
    write = plain_write(instance) if is_alone else None
    return None if write is None or (session.new and _refers(mapper, write)) else write


def _refers(mapper: Mapper[Any], write: Write) -> bool:
    """Say whether what is written may refer to a row that is yet to be inserted."""
    return any(mapper.column_attrs[name].columns[0].foreign_keys for name in write.values)


def _send(session: Session, mapper: Mapper[Any], write: Write) -> None:
    connection = connection_for_writing(session, mapper)
    result = send(connection, mapper, [write])
    if result.rowcount == 0:
        found = find_version(connection, mapper, write.key)
        raise stale_instance(write.instance, expected=write.version, found=found, action="save")
    remember(session, mapper, [write], result)


def _require_dirty(session: Session, deleted: Sequence[Any] = ()) -> None:
    """Check and lock all that a flush is about to write, so that it cannot conflict; `deleted` will be deleted, too."""
    with session.no_autoflush:
        gone = {id(each): each for each in (*session.deleted, *deleted)}
        written = [each for each in session.dirty if is_touched(each) or session.is_modified(each)]
        rows = {id(each): each for each in (*written, *roots_of_changes(session)) if id(each) not in gone}
        for parent in (*rows.values(), *gone.values()):
            rows |= {id(each): each for each in _moved(parent, is_gone=id(parent) in gone) if id(each) not in gone}
    _require_all(session, rows.values(), "save")
    _require_all(session, gone.values(), "delete")


def _moved(parent: Any, *, is_gone: bool) -> Iterator[Any]:
    """Yield the children whose foreign key a flush changes because their collection has changed, or its owner goes."""
    for relationship in inspect(parent).mapper.relationships:
        if relationship.direction is RelationshipDirection.ONETOMANY and not relationship.viewonly:
            passive = PassiveFlag.PASSIVE_OFF if is_gone else PassiveFlag.PASSIVE_NO_INITIALIZE
            if not (is_gone and relationship.passive_deletes):
                history = get_history(parent, relationship.key, passive=passive)
                moved = history.sum() if is_gone else [*history.added, *history.deleted]
                yield from (each for each in moved if each is not None and inspect(each).persistent)


def _require_all(session: Session, instances: Iterable[Any], action: str) -> None:
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
