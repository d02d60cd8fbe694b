"""UPDATEs of versioned rows that need no flush, for they change nothing but columns of one table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import ClauseElement, Table, bindparam
from sqlalchemy.orm import PassiveFlag
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from sqla_dlock.version_mapping import key_columns, version_column, version_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, CursorResult, Update
    from sqlalchemy.orm import InstanceState, Mapper, Session

__all__ = ["Write", "is_plain", "plain_write", "read_version", "refuse_deferred", "remember", "send"]


@dataclass(frozen=True, slots=True)
class Write:
    """One row to be written: `values` by attribute, the next version among them."""

    instance: Any
    key: tuple[Any, ...]
    version: Any
    values: Mapping[str, Any]


def refuse_deferred(state: InstanceState[Any]) -> None:
    """Raise ValueError when the version was left out of reading: reading it now would make the check void."""
    name = version_key(state.mapper)
    if name not in state.dict and name not in state.expired_attributes:
        raise ValueError(
            f"{name!r} of {state.class_.__name__} was deferred, so nothing can be checked: "
            "read it with the other columns"
        )


def read_version(instance: Any) -> Any:
    """The version that the row had when the instance was read; an expired one is read now, with all the rest."""
    state: Any = instance_state(instance)
    name = version_key(state.mapper)
    if name not in state.dict:
        refuse_deferred(state)
    if name not in state.committed_state:
        return getattr(instance, name)
    history = state.get_history(name, PassiveFlag.PASSIVE_NO_INITIALIZE)
    return (history.deleted or history.unchanged or history.added)[0]


def is_plain(session: Session, mapper: Mapper[Any]) -> bool:
    """Would a flush do no more for a row of this class than one UPDATE of one table?"""
    events, columns = mapper.dispatch, [each.columns for each in mapper.column_attrs]
    return (
        len(mapper.tables) == 1
        and isinstance(mapper.local_table, Table)
        and all(len(each) == 1 and each[0].table is mapper.local_table for each in columns)
        and callable(mapper.version_id_generator)
        and mapper.batch
        and mapper.eager_defaults is not True
        and len(list(events.before_update)) == 1  # ours
        and not list(events.after_update)
        and not list(mapper.class_manager.dispatch.refresh_flush)
        and session.connection_callable is None  # sharding
    )


def plain_write(instance: Any) -> Write | None:
    """What is to be written for an instance; None if nothing is, or if it takes a flush."""
    state: Any = instance_state(instance)
    values: dict[str, Any] = {}
    for name in list(state.committed_state):
        history = state.get_history(name, PassiveFlag.PASSIVE_NO_INITIALIZE)
        if not history.has_changes():
            continue
        if not _is_value(state.mapper, name, history.added):
            return None
        values[name] = history.added[0]
    if not values:
        return None
    version, name = read_version(instance), version_key(state.mapper)
    if name not in values:
        values[name] = state.mapper.version_id_generator(version)
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
