"""The version that an instance in memory was read with.

SQLAlchemy keeps a version with the other columns of an instance, and may refresh it alone: after
`expire(instance, ["version"])`, or as a deferred column. Such a version is newer than the data, and checking it would
miss a lost update. So the listeners in this module record for each instance that this happened (`_READ_LATE`), and such
a version is refused.

Statements that write many rows change versions in memory, too: `note_overtaken`, `note_written`, `keeping_versions`.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy.orm import LoaderCallableStatus, Mapper, Session
from sqlalchemy.orm.attributes import instance_state, set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError

from sqla_dlock.begun import has_begun, is_autocommit
from sqla_dlock.versions.conflicts import lock_versions, stale_instance
from sqla_dlock.versions.mapping import counts_by_one, require_kind, set_by_update, version_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from sqlalchemy import Connection
    from sqlalchemy.orm import InstanceState

__all__ = [
    "expected_version",
    "forget_undone",
    "keeping_versions",
    "loaded_instances",
    "note_overtaken",
    "note_written",
    "read_version",
    "require_expected",
]

_READ_LATE: Final = "dlock_version_read_late"
_WRITTEN: Final = "dlock_version_written"
_ABSENT: Final = "dlock_columns_absent"


# Of every class, also one that was mapped before this module was imported: `save_with_version` needs no mixin.
@event.listens_for(Mapper, "refresh", raw=True)
def _on_refresh(state: InstanceState[Any], context: Any, names: Collection[str] | None) -> None:
    """Mark an instance whose version was read later than other columns, for which it then proves nothing."""
    if state.mapper.version_id_col is None:
        return
    name, left_out = version_key(state.mapper), _take_left_out(state)
    # Without a context nothing was read: a bulk UPDATE has incremented the version of the instance and of its row.
    if context is None:
        return
    if names is None and state.dict.get(name) != state.info.get(_WRITTEN):
        state.info.pop(_WRITTEN, None)  # The columns in memory are no longer those that we wrote with that version.
    # `names` are those that were missing in memory, and may still be: the query has read some of them only.
    read = state.dict.keys() - left_out if names is None else state.dict.keys() & set(names)
    if name not in read:
        return
    # A version that the database counts: a flush reads it back after its own write, unless RETURNING has brought it.
    if state.mapper.version_id_generator is False and context.session._flushing and state.modified:  # noqa: SLF001
        return
    is_mixed = any(_was_read(state, each) for each in _changeable(state.mapper) - read)
    if is_mixed and state.dict[name] != state.info.get(_WRITTEN):
        state.info[_READ_LATE] = True
    else:
        state.info.pop(_READ_LATE, None)


def _take_left_out(state: InstanceState[Any]) -> set[str]:
    """Return the columns in memory that the last query has left out, by `load_only` or `defer`.

    For each of them SQLAlchemy keeps a callable that loads it, even after it was loaded. What is in memory needs none,
    so it is removed here: the next one is that of the next query. Only a column that was not in memory before it, and
    was not assigned since, has been read by that query in spite of its callable, which is an earlier query's.
    """
    absent = state.info.pop(_ABSENT, ())
    if not state.callables:
        return set()
    present = {each for each in _changeable(state.mapper) if each in state.dict and each in state.callables}
    for each in present:
        del state.callables[each]
    state.info[_ABSENT] = tuple(state.callables)
    return {each for each in present if each not in absent or each in state.committed_state}


@event.listens_for(Mapper, "load", raw=True)
def _on_load(state: InstanceState[Any], context: Any) -> None:
    if state.callables and state.mapper.version_id_col is not None:
        state.info[_ABSENT] = tuple(state.callables)


@event.listens_for(Mapper, "after_update", raw=True)
def _on_updated(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """Keep the version that a flush wrote, with which all columns in memory belong together.

    An autoflush may come between a query and the loading of its rows. The rows then refresh the version of an instance
    that has just been written, and it is not late, because it is the version of that very write.
    """
    if mapper.version_id_col is not None:
        state.info[_WRITTEN] = state.dict.get(version_key(mapper))
        _take_left_out(state)


@event.listens_for(Session, "after_soft_rollback")
def forget_undone(session: Session, _: Any = None) -> None:
    """Forget the versions that flushes wrote to the instances which a rollback, also to a savepoint, has expired.

    Another user's write may give the row the same version.
    """
    for state in session.identity_map.all_states():
        if state.expired:
            state.info.pop(_WRITTEN, None)


def loaded_instances(session: Session, mapper: Mapper[Any], rows: Iterable[tuple[Any, ...]]) -> dict[Any, Any]:
    """Return the instances that a session has of these rows, each a key and a version, by their keys."""
    found = {row[:-1]: session.identity_map.get(mapper.identity_key_from_primary_key(row[:-1])) for row in rows}
    return {key: instance for key, instance in found.items() if instance is not None}


def note_overtaken(loaded: Mapping[Any, Any], rows: Iterable[tuple[Any, ...]]) -> None:
    """Refuse saves of instances that are older than the versions of these rows."""
    for *key, version in rows:
        if (instance := loaded.get(tuple(key))) is not None:
            state: Any = instance_state(instance)
            if state.dict.get(version_key(state.mapper), version) != version:
                state.info[_READ_LATE] = True


def note_written(
    session: Session,
    connection: Connection,
    mapper: Mapper[Any],
    loaded: Mapping[Any, Any],
    rows: Iterable[tuple[Any, ...]],
    *,
    options: Any,
) -> None:
    """Set the next versions of the instances of which an UPDATE by primary key has written the rows.

    SQLAlchemy gives them the versions that the UPDATE was given. It also forgets that a rollback to a savepoint undoes
    it, after which they have to be read again, and so do expired ones that were read meanwhile. One that is older than
    its row is not: a caller that decides by what it shows must not get past the refusal of its save.

    Args:
        session: Where the statement was executed.
        connection: Where the rows were written.
        mapper: The class of the rows.
        loaded: Those instances that the session has, by their keys.
        rows: The key of each row, followed by the version that it had.
        options: The execution options of the statement.
    """
    states: list[Any] = [instance_state(each) for each in loaded.values()]
    # As SQLAlchemy does after other UPDATEs.
    session._register_altered([each for each in states if _READ_LATE not in each.info])  # noqa: SLF001
    written = {
        tuple(key): loaded[tuple(key)]
        for *key, version in rows
        if tuple(key) in loaded and _is_current(instance_state(loaded[tuple(key)]), version)
    }
    next_versions = _next_versions(connection, mapper, written, options)
    derived = [each.key for each in set_by_update(mapper) if each.key != version_key(mapper)]
    for known, instance in written.items():
        if known in next_versions:
            set_committed_value(instance, version_key(mapper), next_versions[known])
            if derived:  # SQLAlchemy sets only what the statement was given.
                session.expire(instance, derived)
        else:
            instance_state(instance).info[_READ_LATE] = True


def _is_current(state: InstanceState[Any], version: Any) -> bool:
    name = version_key(state.mapper)
    return state.dict.get(name) == version and name not in state.committed_state and _READ_LATE not in state.info


def _next_versions(
    connection: Connection, mapper: Mapper[Any], written: Mapping[Any, Any], options: Any
) -> dict[Any, Any]:
    """Return the versions of the rows that an UPDATE has just written, by their keys.

    What a generator of the program's own has made is known to the rows only. They are locked up to the commit; after an
    UPDATE that commits by itself, another user may have written them already, and none is returned.
    """
    rows = [(*key, instance_state(each).dict[version_key(mapper)]) for key, each in written.items()]
    if counts_by_one(mapper):
        return {tuple(key): version + 1 for *key, version in rows}
    if not rows or is_autocommit(connection) or not has_begun(connection):
        return {}
    return {tuple(key): version for *key, version in lock_versions(connection, mapper, rows, "save", options)}


@contextmanager
def keeping_versions(mapper: Mapper[Any], instances: Iterable[Any]) -> Iterator[None]:
    """Keep the versions in memory that SQLAlchemy would expire after an UPDATE, and refuse saves of their instances.

    It expires what it cannot evaluate, or what was assigned. `merge()` compares nothing without a version in memory.
    Instances whose saves are refused already keep theirs, too: with that of their row, merge would take them for new.
    `instances`: all of which the version may expire, and perhaps others of other classes.
    """
    name = version_key(mapper)
    loaded = [each for each in instances if isinstance(each, mapper.class_) and name in vars(each)]
    states: list[Any] = [instance_state(each) for each in loaded]
    unread = LoaderCallableStatus.NO_VALUE
    versions = [state.committed_state.get(name, unread) for state in states]
    versions = [state.dict[name] if each is unread else each for state, each in zip(states, versions, strict=True)]
    yield
    for instance, state, version in zip(loaded, states, versions, strict=True):
        if name not in state.dict or _READ_LATE in state.info:
            set_committed_value(instance, name, version)
            state.info[_READ_LATE] = True


@lru_cache(maxsize=1024)
def _changeable(mapper: Mapper[Any]) -> frozenset[str]:
    keys = {mapper.get_property_by_column(column).key for column in mapper.primary_key}
    return frozenset(mapper.column_attrs.keys()) - keys


def _was_read(state: InstanceState[Any], name: str) -> bool:
    """Return whether a column in memory was read, and not only assigned to an instance that had expired.

    NO_VALUE alone is not enough: `flag_modified` leaves it, too, after a change in place of what was read.
    """
    is_blind = state.committed_state.get(name) is LoaderCallableStatus.NO_VALUE and name in state.expired_attributes
    return name in state.dict and not is_blind


def read_version(instance: Any) -> Any:
    """Return the version that the row had when the instance was read; an expired instance is read now as a whole.

    Raises ValueError for a version that was not read together with the other columns, because a check of it would
    prove nothing.
    """
    state: Any = instance_state(instance)
    name = version_key(state.mapper)
    if name not in state.dict and name in state.expired_attributes:
        # A flush would write the instance before it is checked, and with the version that is read now.
        with nullcontext() if state.session is None else state.session.no_autoflush:
            getattr(instance, name)
    if name not in state.dict or _READ_LATE in state.info:
        raise ValueError(
            f"{name!r} of {state.class_.__name__} was deferred, or read later than other columns, so nothing can be "
            "checked: read it together with them"
        )
    return state.committed_state.get(name, state.dict[name])


def expected_version(instance: Any, action: str) -> Any:
    """Return the version that the row must have now.

    Raises StaleObject if the caller has assigned another version: an assigned version is never written, it states which
    one the caller has seen. Raises ValueError as `read_version`.
    """
    state: Any = instance_state(instance)
    name = version_key(state.mapper)
    try:
        version = read_version(instance)
    except ObjectDeletedError as error:  # The instance had expired, and its row is gone.
        raise stale_instance(instance, expected=None, found=None, action=action) from error
    if name in state.committed_state:
        require_expected(instance, state.dict[name], version, action)
    return version


def require_expected(instance: Any, expected: Any, version: Any, action: str) -> None:
    """Raise StaleObject unless the instance has the version that the caller expects; TypeError if that is none."""
    require_kind(instance_state(instance).mapper, expected, version)
    if expected != version:
        raise stale_instance(instance, expected=expected, found=version, action=action)
