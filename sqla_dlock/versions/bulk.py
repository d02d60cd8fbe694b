"""ORM statements that write many rows of a versioned class: each increments the version, or is refused.

Core statements on the table, raw SQL and `session.bulk_insert_mappings` are not covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session
from sqlalchemy.sql import visitors

from dlock_core.errors import NotSupported
from sqla_dlock.versions.conflicts import require_versions
from sqla_dlock.versions.mapping import VersionedMixin, version_column, version_key

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper, ORMExecuteState

__all__: list[str] = []

_UPSERTS: Final = {"on_conflict_do_update": "update_values_to_set", "on_duplicate_key_update": "update"}
"""The clauses that turn an INSERT into an UPDATE, and the attribute in which each keeps what it sets."""


@event.listens_for(Session, "do_orm_execute")
def _on_bulk_statement(execution: ORMExecuteState) -> None:
    if not (execution.is_update or execution.is_insert):
        return
    mapper = execution.bind_mapper
    if mapper is None or not issubclass(mapper.class_, VersionedMixin):
        return
    if execution.is_insert:
        _refuse_upsert(execution.statement, mapper)
    elif isinstance(execution.parameters, list):
        if _strategy(execution) == "core_only":
            _refuse_assigned_versions(execution.parameters, mapper)
            execution.statement = _with_count(execution.statement, mapper)
        else:
            _require_versions(execution, execution.parameters, mapper)
    else:
        execution.statement = _with_count(execution.statement, mapper)


def _with_count(statement: Any, mapper: Mapper[Any]) -> Any:
    """Return an UPDATE that also increments the version, unless it sets the version itself."""
    version = version_column(mapper)
    name = version_key(mapper)
    if version.table is not mapper.local_table:
        raise NotSupported(
            f"update({mapper.class_.__name__}) cannot count {name!r} up, which is in the table "
            f"{version.table.name}: update the rows one by one"
        )
    if _sets(getattr(statement, "_values", None) or {}, version):
        return statement
    try:
        # With the attribute of the class, SQLAlchemy also increments the versions in memory. With the column it would
        # expire them, and the instances would then have the new version with data that was read with the old one.
        attribute = getattr(mapper.class_, name)
        return statement.values({attribute: attribute + 1})
    except InvalidRequestError as error:
        raise NotSupported(f"ordered_values() cannot be combined with counting {name!r} up: use values()") from error


def _strategy(execution: ORMExecuteState) -> str:
    options = {**execution.statement.get_execution_options(), **execution.execution_options}
    return str(options.get("dml_strategy", "auto"))


def _refuse_assigned_versions(rows: list[Any], mapper: Mapper[Any]) -> None:
    names = {version_key(mapper), version_column(mapper).key}
    if any(not names.isdisjoint(row) for row in rows):
        raise ValueError(
            f"{version_key(mapper)!r} would be written as it is given: leave it out, and the version counts up "
            'unchecked; or leave dml_strategy="core_only" out, and it is checked'
        )


def _require_versions(execution: ORMExecuteState, rows: list[Any], mapper: Mapper[Any]) -> None:
    """Check an UPDATE by primary key before it is sent: SQLAlchemy's own check cannot say which row was stale."""
    name = version_key(mapper)
    if not all(name in row for row in rows):
        raise ValueError(f"an UPDATE by primary key checks versions: give {name!r} as it was read in every row")
    keys = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    if all(key in row for row in rows for key in keys):  # SQLAlchemy itself refuses rows without a key.
        connection = execution.session.connection(bind_arguments={"mapper": mapper.base_mapper})
        expected = [tuple([row[each] for each in (*keys, name)]) for row in rows]
        require_versions(execution.session, connection, mapper, expected, "save")


def _refuse_upsert(statement: Any, mapper: Mapper[Any]) -> None:
    version = version_column(mapper)
    for clause in visitors.iterate(statement):
        kept: Any = getattr(clause, _UPSERTS.get(clause.__visit_name__, ""), None)
        if kept is not None and not _sets(dict(kept), version):
            raise NotSupported(
                f"an upsert of {mapper.class_.__name__} has to count its version up itself, by "
                f"set_={{..., {version.key!r}: {mapper.class_.__name__}.{version_key(mapper)} + 1}}"
            )


def _sets(values: Any, version: Any) -> bool:
    return any(getattr(column, "key", column) == version.key for column in values)
