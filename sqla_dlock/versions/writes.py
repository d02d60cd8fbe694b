"""UPDATEs of one table that need no flush: of one row, or of many with values for the same attributes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ClauseElement, Table, bindparam, event
from sqlalchemy.orm import Mapper, PassiveFlag
from sqlalchemy.orm.attributes import flag_dirty, instance_state, set_committed_value

from sqla_dlock.versions.in_memory import expected_version, read_version
from sqla_dlock.versions.mapping import VersionedMixin, key_columns, set_by_update, version_column, version_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from sqlalchemy import Connection, CursorResult, Update
    from sqlalchemy.orm import InstanceState, Session

__all__ = [
    "COUNTED",
    "RowUpdate",
    "count_touch",
    "forget_touch",
    "is_touchable",
    "is_touched",
    "mark_flushed",
    "needs_one_update",
    "row_update",
    "send_updates",
    "touch",
]

COUNTED: Final = "dlock_counted"
"""The execution option of a statement that counts versions, or that a session has counted or refused."""
_TOUCHED: Final = "dlock_touched"


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """One row to write: `values` by the names of the attributes, the next version among them."""

    instance: Any
    key: tuple[Any, ...]
    version: Any
    values: Mapping[str, Any]


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

    The session notes them, as after a flush, so that a rollback to a savepoint makes them read their rows again.
    """
    session._register_altered([instance_state(each.instance) for each in writes])  # noqa: SLF001 - nothing public
    sent: Any = result.last_updated_params()
    for write, row in zip(writes, sent if len(writes) > 1 else [sent], strict=True):
        forget_touch(instance_state(write.instance))
        for name, value in write.values.items():
            set_committed_value(write.instance, name, value)
        for each in set_by_update(mapper):
            if each.key not in write.values:
                _show_database_value(session, write.instance, each, row)


def _show_database_value(session: Session, instance: Any, attribute: Any, row: Mapping[str, Any]) -> None:
    column = attribute.columns[0].key
    if column in row:
        set_committed_value(instance, attribute.key, row[column])
    else:
        session.expire(instance, [attribute.key])
