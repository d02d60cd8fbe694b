"""The version that an instance was read with, and single UPDATEs of one table that need no flush.

SQLAlchemy keeps a version with the other columns of an instance, and may refresh it alone: after
`expire(instance, ["version"])`, or as a deferred column. Such a version is newer than the data, and checking it would
miss a lost update. So the listeners in this module record for each instance that this happened (`_READ_LATE`), and such
a version is refused.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ClauseElement, Table, bindparam, event
from sqlalchemy.orm import LoaderCallableStatus, Mapper, PassiveFlag
from sqlalchemy.orm.attributes import flag_dirty, instance_state, set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError

from sqla_dlock.connections import has_begun, is_autocommit
from sqla_dlock.versions.conflicts import lock_versions, stale_instance
from sqla_dlock.versions.mapping import VersionedMixin, counts_by_one, key_columns, version_column, version_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, CursorResult, Update
    from sqlalchemy.orm import InstanceState, Session

__all__ = [
    "COUNTED",
    "RowUpdate",
    "count_touch",
    "expected_version",
    "forget_touch",
    "is_touchable",
    "is_touched",
    "keeping_versions",
    "mark_flushed",
    "needs_one_update",
    "no_number",
    "note_overtaken",
    "note_written",
    "read_version",
    "require_expected",
    "row_update",
    "send_updates",
    "touch",
]

COUNTED: Final = "dlock_counted"
"""The execution option of a statement that counts versions, or that a session has counted or refused."""
_READ_LATE: Final = "dlock_version_read_late"
_WRITTEN: Final = "dlock_version_written"
_TOUCHED: Final = "dlock_touched"


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """One row to write: `values` by the names of the attributes, the next version among them."""

    instance: Any
    key: tuple[Any, ...]
    version: Any
    values: Mapping[str, Any]


# Of every class, also one that was mapped before this module was imported: `save_with_version` needs no mixin.
@event.listens_for(Mapper, "refresh", raw=True)
def _on_refresh(state: InstanceState[Any], context: Any, names: Collection[str] | None) -> None:
    """Mark an instance whose version was read later than other columns, for which it then proves nothing."""
    if state.mapper.version_id_col is None:
        return
    name, left_out = version_key(state.mapper), _take_left_out(state)
    is_read = name not in left_out if names is None else name in names
    # Without a context nothing was read: a bulk UPDATE has incremented the version of the instance and of its row.
    if context is None or not is_read:
        return
    # A version that the database counts: a flush reads it back after its own write, unless RETURNING has brought it.
    if state.mapper.version_id_generator is False and context.session._flushing and state.modified:  # noqa: SLF001
        return
    unread = left_out if names is None else _changeable(state.mapper).difference(names)
    if name not in state.dict or (names is None and state.dict[name] != state.info.get(_WRITTEN)):
        state.info.pop(_WRITTEN, None)  # The columns in memory are no longer those that we wrote with that version.
    if any(_was_read(state, each) for each in unread) and state.dict[name] != state.info.get(_WRITTEN):
        state.info[_READ_LATE] = True
    else:
        state.info.pop(_READ_LATE, None)


def _take_left_out(state: InstanceState[Any]) -> set[str]:
    """Return the columns in memory that the last query has left out, by `load_only` or `defer`.

    For each of them SQLAlchemy keeps a callable that loads it, even after it was loaded. What is in memory needs none,
    so it is removed here: the next one is that of the next query.
    """
    if not state.callables:
        return set()
    left_out = {each for each in _changeable(state.mapper) if each in state.dict and each in state.callables}
    for each in left_out:
        del state.callables[each]
    return left_out


@event.listens_for(Mapper, "after_update", raw=True)
def _on_updated(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """Keep the version that a flush wrote, with which all columns in memory belong together.

    An autoflush may come between a query and the loading of its rows. The rows then refresh the version of an instance
    that has just been written, and it is not late, because it is the version of that very write.
    """
    if mapper.version_id_col is not None:
        state.info[_WRITTEN] = state.dict.get(version_key(mapper))
        _take_left_out(state)


def note_overtaken(session: Session, mapper: Mapper[Any], key: tuple[Any, ...], version: Any) -> None:
    """Refuse saves of an instance that is older than this version, which SQLAlchemy is about to give to it."""
    instance = session.identity_map.get(mapper.identity_key_from_primary_key(key))
    if instance is not None:
        state: Any = instance_state(instance)
        if state.dict.get(version_key(state.mapper), version) != version:
            state.info[_READ_LATE] = True


def note_written(
    session: Session, connection: Connection, mapper: Mapper[Any], rows: Sequence[tuple[Any, ...]], options: Any
) -> None:
    """Set the next versions of the instances of which an UPDATE by primary key has written the rows.

    SQLAlchemy gives them the versions that the UPDATE was given. It also forgets that a rollback to a savepoint undoes
    it. Each of the rows is given as its key and the version that it had.
    """
    written = {}
    for *key, version in rows:
        instance = session.identity_map.get(mapper.identity_key_from_primary_key(tuple(key)))
        if instance is not None and _is_current(instance_state(instance), version):
            written[tuple(key)] = instance
    next_versions = _next_versions(connection, mapper, written, options)
    for known, instance in written.items():
        if known in next_versions:
            set_committed_value(instance, version_key(mapper), next_versions[known])
        else:
            instance_state(instance).info[_READ_LATE] = True
    session._register_altered([instance_state(each) for each in written.values()])  # noqa: SLF001 - as SQLAlchemy does after other UPDATEs


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
def keeping_versions(session: Session, mapper: Mapper[Any]) -> Iterator[None]:
    """Keep the versions in memory that SQLAlchemy expires after an UPDATE, and refuse saves of their instances.

    It expires what it cannot evaluate, or what was assigned. `merge()` compares nothing without a version in memory.
    """
    name = version_key(mapper)
    loaded = [each for each in session.identity_map.values() if isinstance(each, mapper.class_) and name in vars(each)]
    states: list[Any] = [instance_state(each) for each in loaded]
    unread = LoaderCallableStatus.NO_VALUE
    versions = [state.committed_state.get(name, unread) for state in states]
    versions = [state.dict[name] if each is unread else each for state, each in zip(states, versions, strict=True)]
    yield
    for instance, state, version in zip(loaded, states, versions, strict=True):
        if name not in state.dict:
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
    if name not in state.dict or state.info.get(_READ_LATE):
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
    """Raise StaleObject unless the instance has the version that the caller expects; TypeError if that is no number."""
    if isinstance(version, int) and not isinstance(expected, int):
        raise no_number(type(instance), expected)
    if expected != version:
        raise stale_instance(instance, expected=expected, found=version, action=action)


def no_number(model: type, expected: Any) -> TypeError:
    """Return the error for an expected version that is no number, of a class whose versions are numbers."""
    return TypeError(f"the expected version is a number, as versions of {model.__name__} are, not {expected!r:.80}")


def touch(instance: Any) -> None:
    """Mark an instance whose version the next flush increments once, although nothing else changes.

    Raises TypeError for a version that the database counts, which it does only if a column changes.
    """
    state: Any = instance_state(instance)
    if not is_touchable(state.mapper):
        raise TypeError(
            f"the database counts the version of {state.class_.__name__} (version_id_generator=False), which touch() "
            "cannot make it do: change a column instead"
        )
    read_version(instance)
    state.info[_TOUCHED] = True
    flag_dirty(instance)


def is_touchable(mapper: Mapper[Any]) -> bool:
    """Return whether the version of a class is counted by the program, and not by the database."""
    return callable(mapper.version_id_generator)


def is_touched(instance: Any) -> bool:
    """Return whether an instance is marked by `touch` for the next flush."""
    return _TOUCHED in instance_state(instance).info


def forget_touch(state: InstanceState[Any]) -> bool:
    """Remove the mark of `touch`, and return whether there was one."""
    return bool(state.info.pop(_TOUCHED, False))


@event.listens_for(Mapper, "expire", raw=True)
def _forget_touch(state: InstanceState[Any], names: Collection[str] | None) -> None:
    if names is None and state.mapper.version_id_col is not None:
        forget_touch(state)


@event.listens_for(Mapper, "before_update", raw=True)
def _count_touch(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """Count a touch of a class without the mixin, whose flushes have no other listener of ours before they write."""
    if mapper.version_id_col is not None and not issubclass(mapper.class_, VersionedMixin):
        count_touch(state)


def count_touch(state: InstanceState[Any]) -> None:
    """Let the UPDATE of a touched instance, which is about to be sent, increment its version."""
    if forget_touch(state):
        instance: Any = state.obj()
        next_version: Any = state.mapper.version_id_generator
        setattr(instance, version_key(state.mapper), next_version(read_version(instance)))


def needs_one_update(session: Session, mapper: Mapper[Any]) -> bool:
    """Return whether a flush of one row of this class would do no more than one UPDATE of one table.

    Only then may `save_with_version` and the batches of a flush bypass SQLAlchemy's unit of work: nothing that it would
    do for the row is omitted.
    """
    events, columns = mapper.dispatch, [each.columns for each in mapper.column_attrs]
    return (
        len(mapper.tables) == 1
        and isinstance(mapper.local_table, Table)
        and all(len(each) == 1 and each[0].table is mapper.local_table for each in columns)
        and mapper.batch
        and mapper.eager_defaults is not True
        and len(list(events.before_update)) == 2  # only ours
        and len(list(events.after_update)) == 1
        and not list(mapper.class_manager.dispatch.refresh_flush)
        and session.connection_callable is None  # sharding
    )


def row_update(instance: Any) -> RowUpdate | None:
    """Return the UPDATE of an instance; None if nothing has changed, or if the change takes a flush."""
    state: Any = instance_state(instance)
    version_name = version_key(state.mapper)
    values: dict[str, Any] = {}
    for name in list(state.committed_state):
        history = state.get_history(name, PassiveFlag.PASSIVE_NO_INITIALIZE)
        if name == version_name or not history.has_changes():
            continue
        if not _is_plain_value(state.mapper, name, history.added):
            return None
        values[name] = history.added[0]
    if not values and not is_touched(instance):
        return None
    version = expected_version(instance, "save")
    values[version_name] = state.mapper.version_id_generator(version)
    return RowUpdate(instance, state.identity, version, values)


def _is_plain_value(mapper: Mapper[Any], name: str, added: Sequence[Any]) -> bool:
    if not added or isinstance(added[0], ClauseElement) or hasattr(added[0], "__clause_element__"):
        return False
    return name in mapper.column_attrs and not mapper.column_attrs[name].columns[0].primary_key


def send_updates(connection: Connection, mapper: Mapper[Any], writes: Sequence[RowUpdate]) -> CursorResult[Any]:
    """Update rows of one class with values for the same attributes, each only if it still has its version."""
    statement, compared = _update_statement(mapper)
    # The values are named after their columns, as in SQLAlchemy's own UPDATEs: a default may look them up by that name.
    names = (*(mapper.columns[name].key for name in writes[0].values), *compared)
    rows = [dict(zip(names, (*write.values.values(), *write.key, write.version), strict=True)) for write in writes]
    return connection.execute(statement, rows if len(rows) > 1 else rows[0])


@lru_cache(maxsize=256)
def _update_statement(mapper: Mapper[Any]) -> tuple[Update, tuple[str, ...]]:
    """Return the UPDATE of a row, and the names of the parameters that it compares with the key and the version.

    No column has these names. They are of lower-case letters and digits only, which SQLAlchemy makes of no other
    character of a column's name.
    """
    table: Any = mapper.local_table
    free = (name for number in count() if (name := f"dlock{number}") not in table.columns)
    compared = {next(free): column for column in (*key_columns(mapper), version_column(mapper))}
    conditions = (column == bindparam(name, type_=column.type) for name, column in compared.items())
    return table.update().where(*conditions).execution_options(**{COUNTED: True}), tuple(compared)


def mark_flushed(session: Session, mapper: Mapper[Any], writes: Sequence[RowUpdate], result: CursorResult[Any]) -> None:
    """Set the attributes of instances to what was written, as a flush would.

    The instances stay in `session.dirty`, so that a rollback to a savepoint makes them read their rows again.
    """
    sent: Any = result.last_updated_params()
    by_database = [each for each in mapper.column_attrs if _is_set_by_update(each.columns[0])]
    for write, row in zip(writes, sent if len(writes) > 1 else [sent], strict=True):
        forget_touch(instance_state(write.instance))
        for name, value in write.values.items():
            set_committed_value(write.instance, name, value)
        for each in by_database:
            if each.key not in write.values:
                _show_database_value(session, write.instance, each, row)


def _is_set_by_update(column: Any) -> bool:
    return column.onupdate is not None or column.server_onupdate is not None


def _show_database_value(session: Session, instance: Any, attribute: Any, row: Mapping[str, Any]) -> None:
    column = attribute.columns[0].key
    if column in row:
        set_committed_value(instance, attribute.key, row[column])
    else:
        session.expire(instance, [attribute.key])
