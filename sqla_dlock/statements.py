"""What a statement writes where it is easily overlooked: in an upsert's clause, in CTEs, and in other tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import CTE, ColumnElement, Delete, Insert, Join, SelectBase, Update
from sqlalchemy.orm import FromStatement
from sqlalchemy.sql import coercions, roles, visitors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Mapper

__all__ = [
    "inserted_columns",
    "is_on_class",
    "is_replace",
    "joined_by_values",
    "other_mappers",
    "places",
    "plain",
    "set_values",
    "upsert_conditions",
    "upserted_values",
    "without_alias",
    "without_lambda",
    "writes_in_ctes",
    "written_mapper",
    "written_tables",
]

_CLAUSES: Final = {"on_conflict_do_update": "update_values_to_set", "on_duplicate_key_update": "update"}
"""The clauses that turn an INSERT into an UPDATE, and the attribute in which each keeps what it sets."""


def plain(statement: Any) -> Any:
    """Return the statement that is sent, for a `lambda_stmt()` or a SELECT from an UPDATE or INSERT."""
    statement = without_lambda(statement)
    return without_lambda(statement.element) if isinstance(statement, FromStatement) else statement


def without_lambda(statement: Any) -> Any:
    """Return the statement that a `lambda_stmt()` makes, which itself is neither an Update nor an Insert."""
    while getattr(statement, "_is_lambda_element", False):
        statement = statement._resolved  # noqa: SLF001 - there is no public way
    return statement


def set_values(statement: Any) -> dict[Any, Any]:
    """Return what `values()` or `ordered_values()` of an UPDATE set, by columns, or by names that are no attributes."""
    ordered = getattr(statement, "_ordered_values", None)  # before SQLAlchemy 2.1
    return dict(statement._values or ordered or ())  # noqa: SLF001 - nothing public tells what a statement sets


def joined_by_values(statement: Any) -> Iterator[Any]:
    """Yield each table, alias or subquery that the values of an UPDATE name, except in scalar subqueries."""
    for value in set_values(statement).values():
        yield from getattr(value, "_from_objects", ())


def inserted_columns(statement: Any) -> Iterator[Any]:
    """Yield the columns, or their names, that `values()` or `from_select()` of an INSERT set."""
    yield from statement._values or statement._select_names or ()  # noqa: SLF001 - nothing public tells
    for row in chain.from_iterable(statement._multi_values):  # noqa: SLF001
        yield from row if isinstance(row, Mapping) else islice(statement.table.c, len(row))


def is_replace(statement: Any) -> bool:
    """Return whether an INSERT replaces the row that has its key, such as SQLite's INSERT OR REPLACE."""
    return any("REPLACE" in str(prefix).upper() for prefix, _ in statement._prefixes)  # noqa: SLF001 - nothing public


def upserted_values(statement: Any) -> Iterator[dict[str, Any]]:
    """Yield what each such clause of an INSERT sets, by the keys of the columns."""
    for _, values in _upserts(statement):
        # MySQL's clause keeps attributes as they are given, whose names may differ from those of their columns.
        yield {coercions.expect_as_key(roles.DMLColumnRole, each): value for each, value in dict(values).items()}


def upsert_conditions(statement: Any) -> Iterator[Any]:
    """Yield the condition of each such clause on the row that is there."""
    for clause, _ in _upserts(statement):
        if (condition := getattr(clause, "update_whereclause", None)) is not None:
            yield condition


def _upserts(statement: Any) -> Iterator[tuple[Any, Any]]:
    clauses = statement._post_values_clause  # noqa: SLF001 - nothing public; those of its CTEs are not its own
    for clause in () if clauses is None else visitors.iterate(clauses):
        values: Any = getattr(clause, _CLAUSES.get(clause.__visit_name__, ""), None)
        if values is not None:
            yield clause, values


def writes_in_ctes(context: Any) -> Iterator[Any]:
    """Yield each UPDATE, INSERT and DELETE in a CTE of the statement that is executed in this context.

    The compiled statement tells whether there are any, so that other statements cost nothing. But SQLAlchemy shares it
    among statements that differ in their literals only, so the writes themselves are found in the statement.
    """
    if getattr(getattr(context, "compiled", None), "ctes", None):
        for part, _ in _parts(without_lambda(context.invoked_statement)):
            if isinstance(part, CTE) and isinstance(part.element, Update | Insert | Delete):
                yield part.element


def written_mapper(statement: Any) -> Mapper[Any] | None:
    """Return the class that an UPDATE, INSERT or DELETE writes; None for other statements.

    One on a table writes the class of which an attribute is named anywhere in it; None if none is.
    """
    statement = plain(statement)
    if not isinstance(statement, Update | Insert | Delete):
        return None
    if (entity := statement.table._annotations.get("parententity")) is not None:  # noqa: SLF001 - nothing public
        return entity.mapper  # type: ignore[no-any-return]
    table, subject = without_alias(statement.table), statement._propagate_attrs.get("plugin_subject")  # noqa: SLF001
    # SQLAlchemy takes the first class that it comes across for the subject, which may be one that is only read.
    if subject is not None and table in subject.mapper.tables:
        return subject.mapper  # type: ignore[no-any-return]
    return next((each for each in _named(statement) if table in each.tables), None)


def _named(statement: Any) -> Iterator[Mapper[Any]]:
    """Yield the classes of which a statement names attributes, also by an alias."""
    for part, _ in _parts(statement):
        if (mapper := getattr(part, "_annotations", {}).get("parentmapper")) is not None:
            yield mapper


def is_on_class(statement: Any) -> bool:
    """Return whether an UPDATE, INSERT or DELETE is of a class, as `update(Order)` is, and not of its table."""
    return "parententity" in plain(statement).table._annotations  # noqa: SLF001


def written_tables(statement: Any) -> set[Any]:
    """Return the tables that an UPDATE, INSERT or DELETE writes, without aliases.

    They are its target, or all tables of a join, and those of the columns that an UPDATE sets.
    """
    statement = plain(statement)
    if not isinstance(statement, Update | Insert | Delete):
        return set()
    target = without_alias(statement.table)
    tables = set(_tables_of(target)) if isinstance(target, Join) else {target}
    if isinstance(statement, Update):
        for column in set_values(statement):
            if (table := getattr(column, "table", None)) is not None:
                tables.add(without_alias(table))
    return tables


def _tables_of(joined: Any) -> Iterator[Any]:
    table = without_alias(joined)
    if isinstance(table, Join):
        yield from chain(_tables_of(table.left), _tables_of(table.right))
    else:
        yield table


def other_mappers(statement: Any) -> Iterator[Mapper[Any]]:
    """Yield each further class of which an UPDATE sets a column in another table, as MySQL and MariaDB can."""
    statement = plain(statement)
    columns = set_values(statement) if isinstance(statement, Update) else ()
    others = [column for column in columns if getattr(column, "table", None) not in (None, statement.table)]
    own = written_mapper(statement) if others else None
    for column in others:
        if own is None or column.table not in own.tables:
            named, table = column._annotations.get("parentmapper"), without_alias(column.table)  # noqa: SLF001
            # Of a column of the table only, the class is one of which the statement names an attribute elsewhere.
            yield from [named] if named is not None else (each for each in _named(statement) if table in each.tables)


def places(clause: Any, column: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each table, alias or subquery by which a clause names a column, and whether it does so in a subquery."""
    for part, is_nested in _parts(clause):
        table = getattr(part, "table", None)
        # The columns of a whole table or class that a subquery selects are no parts of it: only their lineage tells.
        if table is not None and isinstance(part, ColumnElement) and part.shares_lineage(column):
            yield table, is_nested


def _parts(clause: Any) -> Iterator[tuple[Any, bool]]:
    """Yield a clause and all that it consists of, once each, and whether it is in a subquery."""
    left = deque([(clause, False)])
    seen: dict[tuple[int, bool], Any] = {}
    while left:
        part, is_nested = left.popleft()
        if (id(part), is_nested) not in seen:
            seen[id(part), is_nested] = part  # Kept, so that no other part gets its id.
            yield part, is_nested
            is_nested = is_nested or isinstance(part, SelectBase)
            left.extend((each, is_nested) for each in chain(part.get_children(), _overlooked(part)))


def _overlooked(part: Any) -> Iterator[Any]:
    """Yield what SQLAlchemy's own traversal leaves out: the subquery of a column, and the rows of an INSERT of many."""
    if (table := getattr(part, "table", None)) is not None:
        yield table
    for row in chain.from_iterable(part._multi_values) if isinstance(part, Insert) else ():  # noqa: SLF001
        each = chain(row, row.values()) if isinstance(row, Mapping) else row
        yield from (value for value in each if hasattr(value, "get_children"))


def without_alias(table: Any) -> Any:
    """Return the table that an alias of it, or an alias of its alias, stands for; as given otherwise."""
    while (element := getattr(table, "element", None)) is not None:
        table = element
    return table
