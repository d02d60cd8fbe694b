"""ORM statements that write many rows of a versioned class: they count its version up, or are refused.

Core statements on the table, raw SQL and `session.bulk_insert_mappings` pass by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session
from sqlalchemy.sql import visitors

from dlock_core.errors import NotSupported
from sqla_dlock.version_mapping import VersionedMixin, version_column, version_key

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper, ORMExecuteState

__all__: list[str] = []

_UPSERTS: Final = {"on_conflict_do_update": "update_values_to_set", "on_duplicate_key_update": "update"}
"""What turns an INSERT into an UPDATE, and where it keeps what that sets."""


@event.listens_for(Session, "do_orm_execute")
def _count(execution: ORMExecuteState) -> None:
    if not (execution.is_update or execution.is_insert):
        return
    mapper = execution.bind_mapper
    if mapper is None or not issubclass(mapper.class_, VersionedMixin):
        return
    if execution.is_insert:
        _refuse_upsert(execution.statement, mapper)
    elif isinstance(execution.parameters, list):
        _require_versions(execution.parameters, mapper)
    else:
        execution.statement = _counting(execution.statement, mapper)


def _counting(statement: Any, mapper: Mapper[Any]) -> Any:
    version = version_column(mapper)
    name = version_key(mapper)
    if version.table is not mapper.local_table:
        raise NotSupported(
            f"update({mapper.class_.__name__}) cannot count {name!r}, which stands in {version.table.name}: "
            "update rows one by one"
        )
    if _sets(getattr(statement, "_values", None) or {}, version):
        return statement
    try:
        # The class's attribute, not its column: SQLAlchemy then counts instances in memory as well. It would expire
        # the version of others, and they would read the new one beside what they had read with the old.
        attribute = getattr(mapper.class_, name)
        return statement.values({attribute: attribute + 1})
    except InvalidRequestError as error:
        raise NotSupported(f"ordered_values() leaves no room to count {name!r} up: use values()") from error


def _require_versions(rows: list[Any], mapper: Mapper[Any]) -> None:
    name = version_key(mapper)
    if not all(name in row for row in rows):
        raise ValueError(f"an UPDATE by primary key checks versions: give {name!r} as it was read in every row")


def _refuse_upsert(statement: Any, mapper: Mapper[Any]) -> None:
    version = version_column(mapper)
    for clause in visitors.iterate(statement):
        kept: Any = getattr(clause, _UPSERTS.get(clause.__visit_name__, ""), None)
        if kept is not None and not _sets(dict(kept), version):
            raise NotSupported(
                f"an upsert of {mapper.class_.__name__} has to count its version up itself: "
                f"set_={{..., {version.key!r}: {mapper.class_.__name__}.{version_key(mapper)} + 1}}"
            )


def _sets(values: Any, version: Any) -> bool:
    return any(getattr(column, "key", column) == version.key for column in values)
