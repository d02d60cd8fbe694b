"""An UPDATE by primary key: `session.execute(update(Order), rows)`, where each row brings its key and its version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.engine.result import null_result

from dlock_core.errors import NotSupported
from sqla_dlock.statements import set_values
from sqla_dlock.versions.conflicts import require_versions
from sqla_dlock.versions.in_memory import keeping_versions, loaded_instances, note_overtaken, note_written
from sqla_dlock.versions.mapping import require_kind, version_key
from sqla_dlock.versions.matches import autoflush, execute, option

if TYPE_CHECKING:
    from sqlalchemy import Result
    from sqlalchemy.orm import Mapper, ORMExecuteState

__all__ = ["update_by_key"]


def update_by_key(execution: ORMExecuteState, rows: list[Any], mapper: Mapper[Any]) -> Result[Any]:
    """Check an UPDATE by primary key before it is sent: SQLAlchemy's own check cannot say which row was stale."""
    name, session = version_key(mapper), execution.session
    if not rows:
        return _update_no_row(execution, mapper)
    if not all(name in row for row in rows):
        raise ValueError(f"an UPDATE by primary key checks versions: give {name!r} as it was read in every row")
    keys = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    if not all(key in row for row in rows for key in keys):
        return execute(execution)  # SQLAlchemy itself refuses rows without a key.
    expected = [tuple([row[each] for each in (*keys, name)]) for row in rows]
    for *_, version in expected:
        require_kind(mapper, version)
    autoflush(execution)
    if session.connection_callable is not None:
        raise NotSupported(
            f"an UPDATE by primary key of {mapper.class_.__name__} cannot check versions in a sharded session, because "
            "no row tells its shard: change instances and flush them"
        )
    connection = session.connection(bind_arguments={"mapper": mapper.base_mapper})
    options = execution.statement.get_execution_options()
    require_versions(session, connection, mapper, expected, "save", options=options)
    loaded = loaded_instances(session, mapper, expected)
    note_overtaken(loaded, expected)
    with keeping_versions(mapper, loaded.values()):
        result = execute(execution)
    if option(execution, "synchronize_session", "auto"):
        note_written(session, connection, mapper, loaded, expected, options=options)
    return result


def _update_no_row(execution: ORMExecuteState, mapper: Mapper[Any]) -> Result[Any]:
    """Write nothing for an empty list of rows, as SQLAlchemy does for a class without a version."""
    if set_values(execution.statement):
        raise ValueError(
            f"an UPDATE by primary key of an empty list writes no row of {mapper.class_.__name__}: leave the list out, "
            "and values() are written to the rows that where(...) matches"
        )
    return null_result()
