"""Optimistic locking for SQLAlchemy: a version column that every UPDATE and DELETE checks.

The check is part of the statement itself, `UPDATE … SET version = 4 WHERE id = 42 AND version = 3`: no window. Every
flush makes it; `save_with_version` is a save of one instance that also leaves the transaction usable after a conflict.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import inspect
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.orm.exc import ObjectDeletedError

from dlock_core.hooks import refused
from sqla_dlock import version_statements  # noqa: F401 - its listener
from sqla_dlock.sessions import plain_async_session, plain_session
from sqla_dlock.stale import StaleObject, find_version, require_versions
from sqla_dlock.version_children import count_up, has_root
from sqla_dlock.version_flush import is_unwatched
from sqla_dlock.version_mapping import VersionedMixin
from sqla_dlock.version_writes import is_plain, plain_write, read_version, remember, send

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import InstanceState, Mapper, Session, scoped_session

    from sqla_dlock.version_writes import Write

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
    Nothing is committed, and nothing sent for an instance without changes (see `touch`). Other instances of the session
    stay unwritten, unless only a flush can save this one (several tables, listeners, changed relationships, a new
    instance): then all are checked first and flushed together.

    Raises TypeError for a class without a version, a session of the other kind, or a version that is text; ValueError
    for an instance that is not in this session, that is marked as deleted, or whose version was deferred.
    """
    session = plain_session(session, "asave_with_version")
    state = _owned(session, instance)
    _compare(instance, expected, "save")
    if state.pending:
        session.flush()
    elif session.is_modified(instance):
        if write := _plain(session, instance):
            _send(session, state.mapper, write)
        else:
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
    _require(session, state.mapper, [instance], "delete")
    _require_dirty(session)
    with session.no_autoflush:
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
        count_up(instance)


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
    state = inspect(instance)
    version = None if state.pending else _read(instance, expected, action)
    if isinstance(version, int) and not isinstance(expected, int | None):
        raise TypeError(f"expected is a number, as versions of {type(instance).__name__} are, not {expected!r:.80}")
    if expected is not None and expected != version:
        raise _stale(instance, expected=expected, found=version, action=action)


def _read(instance: Any, expected: Any, action: str) -> Any:
    try:
        return read_version(instance)
    except ObjectDeletedError as error:
        raise _stale(instance, expected=expected, found=None, action=action) from error


def _stale(instance: Any, *, expected: Any, found: Any, action: str) -> StaleObject:
    key = inspect(instance).identity
    name = key[0] if key is not None and len(key) == 1 else key
    return refused(StaleObject(instance, expected=expected, found=found, action=action, key=name))


def _plain(session: Session, instance: Any) -> Write | None:
    mapper = inspect(instance).mapper
    is_alone = (
        is_unwatched(session, "before_flush", "after_flush") and not has_root(mapper) and is_plain(session, mapper)
    )
    return plain_write(instance) if is_alone else None


def _send(session: Session, mapper: Mapper[Any], write: Write) -> None:
    connection = _connection(session, mapper)
    result = send(connection, mapper, [write])
    if result.rowcount == 0:
        found = find_version(connection, mapper, write.key)
        raise _stale(write.instance, expected=write.version, found=found, action="save")
    remember(session, mapper, [write], result)


def _require_dirty(session: Session) -> None:
    """Check and lock all that a flush is about to write, so that it cannot conflict."""
    _require_all(session, [each for each in session.dirty if session.is_modified(each)], "save")
    _require_all(session, session.deleted, "delete")


def _require_all(session: Session, instances: Iterable[Any], action: str) -> None:
    by_mapper: dict[Mapper[Any], list[Any]] = defaultdict(list)
    for each in instances:
        if inspect(each).mapper.version_id_col is not None:
            by_mapper[inspect(each).mapper].append(each)
    for mapper, some in by_mapper.items():
        _require(session, mapper, some, action)


def _require(session: Session, mapper: Mapper[Any], instances: list[Any], action: str) -> None:
    expected = [(*inspect(each).identity, read_version(each)) for each in instances]
    require_versions(session, _connection(session, mapper), mapper, expected, action)


def _connection(session: Session, mapper: Mapper[Any]) -> Connection:
    return session.connection(bind_arguments={"mapper": mapper})
