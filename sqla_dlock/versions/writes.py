"""The version that an instance was read with, and UPDATEs that need no flush: of nothing but columns of one table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ClauseElement, Table, bindparam, event
from sqlalchemy.orm import LoaderCallableStatus, PassiveFlag
from sqlalchemy.orm.attributes import flag_dirty, instance_state, set_committed_value
from sqlalchemy.orm.exc import ObjectDeletedError

from sqla_dlock.versions.conflicts import stale_instance
from sqla_dlock.versions.mapping import VersionedMixin, key_columns, version_column, version_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import Connection, CursorResult, Update
    from sqlalchemy.orm import InstanceState, Mapper, Session

__all__ = [
    "Write",
    "expected_version",
    "forget_touch",
    "is_plain",
    "is_touched",
    "plain_write",
    "read_version",
    "remember",
    "require_expected",
    "send",
    "touch",
]

_LATE: Final = "dlock_version_read_late"
_WRITTEN: Final = "dlock_version_written"
_TOUCHED: Final = "dlock_touched"


@dataclass(frozen=True, slots=True)
class Write:
    """One row to be written: `values` by attribute, the next version among them."""

    instance: Any
    key: tuple[Any, ...]
    version: Any
    values: Mapping[str, Any]


@event.listens_for(VersionedMixin, "refresh", propagate=True, raw=True)
def _note_late(state: InstanceState[Any], context: Any, names: Collection[str] | None) -> None:
    """Note a version that is read later than other columns of its row: it says nothing of them."""
    name = version_key(state.mapper)
    if context is None or (names is not None and name not in names):  # an UPDATE that counts in memory has no context
        return
    if name not in state.dict or (names is None and state.dict[name] != state.info.get(_WRITTEN)):
        state.info.pop(_WRITTEN, None)  # its columns are no longer those that were written
    is_late = names is not None and any(_was_read(state, each) for each in _changeable(state.mapper).difference(names))
    if is_late and state.dict[name] != state.info.get(_WRITTEN):
        state.info[_LATE] = True
    else:
        state.info.pop(_LATE, None)


@event.listens_for(VersionedMixin, "after_update", propagate=True, raw=True)
def _note_written(mapper: Mapper[Any], connection: Connection, state: InstanceState[Any]) -> None:
    """Note with which version all columns in memory are known: an autoflush may come between a query and its rows."""
    state.info[_WRITTEN] = state.dict.get(version_key(mapper))


@lru_cache(maxsize=1024)
def _changeable(mapper: Mapper[Any]) -> frozenset[str]:
    keys = {mapper.get_property_by_column(column).key for column in mapper.primary_key}
    return frozenset(mapper.column_attrs.keys()) - keys


def _was_read(state: InstanceState[Any], name: str) -> bool:
    return name in state.dict and state.committed_state.get(name) is not LoaderCallableStatus.NO_VALUE


def read_version(instance: Any) -> Any:
    """Return the version that the row had when the instance was read; an expired one is read now, with all the rest.

    Raises ValueError for a version that was not read together with the rest: it would make the check void.
    """
    state: Any = instance_state(instance)
    name = version_key(state.mapper)
    if name not in state.dict and name in state.expired_attributes:
        getattr(instance, name)
    if name not in state.dict or state.info.get(_LATE):
        raise ValueError(
            f"{name!r} of {state.class_.__name__} was deferred, so nothing can be checked: "
            "read it with the other columns"
        )
    return state.committed_state.get(name, state.dict[name])


def expected_version(instance: Any, action: str) -> Any:
    """Return the version that the row has to have now; raise StaleObject when the caller has assigned another.

    An assigned version is never written: it says which one the caller has seen.
    """
    state: Any = instance_state(instance)
    name = version_key(state.mapper)
    try:
        version = read_version(instance)
    except ObjectDeletedError as error:  # it had expired
        raise stale_instance(instance, expected=None, found=None, action=action) from error
    if name in state.committed_state:
        require_expected(instance, state.dict[name], version, action)
    return version


def require_expected(instance: Any, expected: Any, version: Any, action: str) -> None:
    """Raise StaleObject unless a version that the caller expects is that of the instance; TypeError if it is none."""
    if isinstance(version, int) and not isinstance(expected, int):
        raise TypeError(
            f"the expected version is a number, as versions of {type(instance).__name__} are, not {expected!r:.80}"
        )
    if expected != version:
        raise stale_instance(instance, expected=expected, found=version, action=action)


def touch(instance: Any) -> None:
    """Have the next flush count an instance up, once, although nothing of it changes."""
    state: Any = instance_state(instance)
    read_version(instance)
    state.info[_TOUCHED] = True
    flag_dirty(instance)


def is_touched(instance: Any) -> bool:
    """Say whether the next flush is to count the instance up."""
    return _TOUCHED in instance_state(instance).info


def forget_touch(state: InstanceState[Any]) -> bool:
    """Take the wish to count up back, and say whether there was one."""
    return bool(state.info.pop(_TOUCHED, False))


@event.listens_for(VersionedMixin, "expire", propagate=True, raw=True)
def _forget_touch(state: InstanceState[Any], names: Collection[str] | None) -> None:
    if names is None:
        forget_touch(state)


def is_plain(session: Session, mapper: Mapper[Any]) -> bool:
    """Would a flush do no more for a row of this class than one UPDATE of one table?"""
    events, columns = mapper.dispatch, [each.columns for each in mapper.column_attrs]
    return (
        len(mapper.tables) == 1
        and isinstance(mapper.local_table, Table)
        and all(len(each) == 1 and each[0].table is mapper.local_table for each in columns)
        and mapper.batch
        and mapper.eager_defaults is not True
        and len(list(events.before_update)) == 1  # ours
        and len(list(events.after_update)) == 1
        and not list(mapper.class_manager.dispatch.refresh_flush)
        and session.connection_callable is None  # sharding
    )


def plain_write(instance: Any) -> Write | None:
    """Return what is to be written for an instance; None if nothing is, or if it takes a flush."""
    state: Any = instance_state(instance)
    version_name = version_key(state.mapper)
    values: dict[str, Any] = {}
    for name in list(state.committed_state):
        history = state.get_history(name, PassiveFlag.PASSIVE_NO_INITIALIZE)
        if name == version_name or not history.has_changes():
            continue
        if not _is_value(state.mapper, name, history.added):
            return None
        values[name] = history.added[0]
    if not values and not is_touched(instance):
        return None
    version = expected_version(instance, "save")
    values[version_name] = state.mapper.version_id_generator(version)
    return Write(instance, state.identity, version, values)


def _is_value(mapper: Mapper[Any], name: str, added: Sequence[Any]) -> bool:
    if not added or isinstance(added[0], ClauseElement) or hasattr(added[0], "__clause_element__"):
        return False
    return name in mapper.column_attrs and not mapper.column_attrs[name].columns[0].primary_key


def send(connection: Connection, mapper: Mapper[Any], writes: Sequence[Write]) -> CursorResult[Any]:
    """Write rows of one class and the same attributes, each only if it still has its version."""
    names = tuple(writes[0].values)
    binds = [f"dlock_{name}" for name in names] + [f"dlock_key{i}" for i in range(len(writes[0].key))]
    rows = [
        dict(zip(binds, (*write.values.values(), *write.key), strict=True)) | {"dlock_expected": write.version}
        for write in writes
    ]
    return connection.execute(_update(mapper, names), rows if len(rows) > 1 else rows[0])


@lru_cache(maxsize=256)
def _update(mapper: Mapper[Any], names: tuple[str, ...]) -> Update:
    keys = [column == bindparam(f"dlock_key{i}", type_=column.type) for i, column in enumerate(key_columns(mapper))]
    version = version_column(mapper)
    guard = version == bindparam("dlock_expected", type_=version.type)
    values: Any = {mapper.column_attrs[name].columns[0]: bindparam(f"dlock_{name}") for name in names}
    table: Any = mapper.local_table
    return table.update().where(*keys, guard).values(values)  # type: ignore[no-any-return]


def remember(session: Session, mapper: Mapper[Any], writes: Sequence[Write], result: CursorResult[Any]) -> None:
    """Have instances show what was written, as after a flush.

    They stay among the session's dirty ones: so a savepoint that is rolled back makes them read their rows again.
    """
    sent: Any = result.last_updated_params()
    by_database = [each for each in mapper.column_attrs if _is_set_by_update(each.columns[0])]
    for write, row in zip(writes, sent if len(writes) > 1 else [sent], strict=True):
        forget_touch(instance_state(write.instance))
        for name, value in write.values.items():
            set_committed_value(write.instance, name, value)
        for each in by_database:
            if each.key not in write.values:
                _show(session, write.instance, each, row)


def _is_set_by_update(column: Any) -> bool:
    return column.onupdate is not None or column.server_onupdate is not None


def _show(session: Session, instance: Any, attribute: Any, row: Mapping[str, Any]) -> None:
    column = attribute.columns[0].key
    if column in row:
        set_committed_value(instance, attribute.key, row[column])
    else:
        session.expire(instance, [attribute.key])
