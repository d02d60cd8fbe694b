"""Which instances an UPDATE or DELETE of many rows has written.

Of those, and of no others, SQLAlchemy increments the versions in memory, or takes the instances for deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BindParameter, ClauseElement, Delete, Engine, Update, bindparam, event, false, select, tuple_
from sqlalchemy.sql import visitors

from sqla_dlock.begun import has_begun, is_autocommit
from sqla_dlock.statements import is_on_class, plain, set_values
from sqla_dlock.stores import connection_for_writing
from sqla_dlock.versions.conflicts import in_parts, lock_versions
from sqla_dlock.versions.mapping import is_key_of_table, version_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Result
    from sqlalchemy.orm import Mapper, ORMExecuteState, Session

__all__ = ["MATCHES", "autoflush", "execute", "lock_matches", "option", "synchronize"]

MATCHES: Final = "dlock_matches"
"""The execution option, a `Write`, of an UPDATE or DELETE and of the SELECT by which SQLAlchemy finds its rows."""


@dataclass(frozen=True, slots=True)
class Write:
    """An UPDATE or DELETE that a session is executing."""

    session: Session
    is_delete: bool
    has_other_tables: bool
    """A DELETE whose condition needs other tables, which SQLAlchemy has to be told."""

    def has_returning(self, dialect: Any, mapper: Mapper[Any]) -> bool:
        """Return whether the statement itself returns the keys of its rows, as SQLAlchemy decides it."""
        table: Any = mapper.local_table
        if not (is_key_of_table(mapper) and table.implicit_returning):
            return False
        if not self.is_delete:
            return bool(dialect.update_returning)
        return bool(dialect.delete_returning and (dialect.delete_returning_multifrom or not self.has_other_tables))


def synchronize(execution: ORMExecuteState, mapper: Mapper[Any]) -> None:
    """Let SQLAlchemy increment the versions, or delete the instances, of those rows that the database has matched.

    By default it applies the WHERE clause to the instances. One that is stale may match, although its row does not: it
    would get the version that another user's write has given to the row, or be taken for deleted, and not be written.
    """
    if is_on_class(execution.statement) and option(execution, "synchronize_session", "auto"):
        session = execution.session
        # Fetching the keys of many rows takes time, and is in vain where the session has no instance of them.
        is_needed = session.new or any(isinstance(each, mapper.class_) for each in session.identity_map.values())
        is_needed = is_needed and not _has_values_in_parameters(execution, mapper)
        is_needed = is_needed and not _may_write_fewer(execution.statement)
        write = Write(session, execution.is_delete, option(execution, "is_delete_using", False))
        execution.update_execution_options(synchronize_session="fetch" if is_needed else False, **{MATCHES: write})


def _has_values_in_parameters(execution: ORMExecuteState, mapper: Mapper[Any]) -> bool:
    """Return whether parameters tell what a statement writes, of which SQLAlchemy evaluates none, or the first set.

    Such values would come out wrong in memory, with the version of the row: all instances stay as they are, and stale.
    """
    given = execution.parameters
    if not given or isinstance(given, list | tuple):
        return bool(given)
    names = {*mapper.columns.keys(), *(column.key for column in mapper.columns)}
    values = set_values(plain(execution.statement)).values() if execution.is_update else ()
    parts = (part for value in values if isinstance(value, ClauseElement) for part in visitors.iterate(value))
    is_replaced = any(isinstance(part, BindParameter) and part.key in given for part in parts)
    return is_replaced or (execution.is_update and not names.isdisjoint(given))


def _may_write_fewer(statement: Any) -> bool:
    """Return whether a statement may write fewer rows than it matches, as by MySQL's LIMIT or IGNORE.

    To lock all that match would be too much: all instances stay as they are, and stale.
    """
    write = plain(statement)
    is_extended = getattr(write, "_post_criteria_clause", None) is not None  # since SQLAlchemy 2.1
    return is_extended or bool(write._prefixes) or any(option.endswith("_limit") for option in write.dialect_kwargs)  # noqa: SLF001


def lock_matches(execution: ORMExecuteState) -> Result[Any] | None:
    """Lock the rows that a statement without RETURNING will match: until then another transaction could change them.

    Where no lock would last until then, as in AUTOCOMMIT, no row of an UPDATE counts as matched; of a DELETE, it is
    enough that a row is gone afterwards. In a sharded session nothing tells what a row was, so that none counts.
    """
    session: Session = execution.session
    statement: Any = execution.statement
    mapper: Mapper[Any] = execution.bind_arguments["mapper"]
    write: Write = execution.local_execution_options[MATCHES]
    if write.has_returning(session.get_bind(**execution.bind_arguments).dialect, mapper):
        return None  # SQLAlchemy sends no SELECT
    if session.connection_callable is not None:  # sharding
        execution.statement = statement.where(false())
        return None
    connection = connection_for_writing(session, mapper)  # The session itself might send a SELECT to a replica.
    # Each key, followed by its version, in the place of the identity token.
    statement = statement.with_only_columns(*mapper.primary_key, version_column(mapper))
    if not is_autocommit(connection) and has_begun(connection):
        statement = statement.with_for_update()
    elif not write.is_delete:
        statement = statement.where(false())
    return connection.execute(statement, execution.parameters, execution_options=execution.execution_options)


@event.listens_for(Engine, "after_execute")
def _keep_written(*execution: Any) -> None:
    """Of the rows that were locked for a statement, let SQLAlchemy synchronize those that it has changed or deleted.

    The SELECT may have found others than the statement wrote, by `func.rand()` for instance, or because a subquery
    reads a snapshot in a SELECT only.
    """
    connection, statement, _, _, options, result = execution
    if MATCHES in options and isinstance(statement, Update | Delete):
        orm = options["_sa_orm_update_options"]  # those of a DELETE, too
        mapper, identities = orm._subject_mapper, options[MATCHES].session.identity_map  # noqa: SLF001
        matched = orm._matched_rows or []  # noqa: SLF001
        if not is_key_of_table(mapper):
            result.context.returned_default_rows = None  # They would be taken for other keys.
        loaded = [tuple(row) for row in matched if mapper.identity_key_from_primary_key(row[:-1]) in identities]
        if options[MATCHES].is_delete:
            left = _find_rows(connection, mapper, loaded, options)
            written = [row for row in loaded if row[:-1] not in left]
        else:
            same = lock_versions(connection, mapper, loaded, "save", options)
            written = [row for row in loaded if row not in same]
        matched[:] = [(*row[:-1], None) for row in written]


def _find_rows(connection: Connection, mapper: Mapper[Any], rows: Sequence[Any], options: Any) -> set[Any]:
    """Return the keys, without the versions, of those rows that are in all tables of their class.

    A DELETE of a joined subclass deletes no row of the parent's table, which has the version.
    """
    left: set[Any] = set()
    keys = mapper.primary_key
    query = select(*keys).select_from(mapper.persist_selectable)
    query = query.where(tuple_(*keys).in_(bindparam("dlock_keys"))).with_for_update(key_share=True)
    for some in in_parts(rows):
        found = connection.execute(query, {"dlock_keys": [row[:-1] for row in some]}, execution_options=options)
        left.update(tuple(row) for row in found)
    return left


def execute(execution: ORMExecuteState) -> Result[Any]:
    """Execute a statement with its synchronization, so that what it has left in memory can be repaired.

    It is `invoke_statement()` without the argument that this gives to `get_bind()`, which a session's own may not take.
    """
    return execution.session._execute_internal(  # noqa: SLF001 - there is no public way
        execution.statement,
        execution.parameters,
        execution_options=execution.local_execution_options,
        bind_arguments=dict(execution.bind_arguments),
        _parent_execute_state=execution,
    )


def autoflush(execution: ORMExecuteState) -> None:
    """Flush before a statement, as SQLAlchemy does next: a flush is what sets the versions, and checks them."""
    if option(execution, "autoflush", True):
        execution.session._autoflush()  # noqa: SLF001 - there is no public way


def option(execution: ORMExecuteState, name: str, default: Any) -> Any:
    options = {**execution.statement.get_execution_options(), **execution.execution_options}
    return options.get(name, default)
