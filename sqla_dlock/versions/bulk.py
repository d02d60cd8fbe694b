"""ORM statements that write many rows of a versioned class: each increments the version, or is refused.

Statements on the table that name no attribute of the class, except upserts, raw SQL and `session.bulk_insert_mappings`
are not covered.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
    ColumnClause,
    ColumnElement,
    Delete,
    Engine,
    Insert,
    Update,
    event,
    type_coerce,
)
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import FromStatement, Session
from sqlalchemy.util import immutabledict

from dlock_core.errors import NotSupported
from sqla_dlock.statements import (
    inserted_columns,
    is_on_class,
    is_replace,
    joined_by_values,
    other_mappers,
    places,
    plain,
    set_values,
    upsert_conditions,
    upserted_values,
    without_alias,
    without_lambda,
    writes_in_ctes,
    written_mapper,
    written_tables,
)
from sqla_dlock.versions.aggregates import (
    is_of_flush,
    may_be_counted,
    refuse_child_writes,
    refuse_join,
    versioned_class,
)
from sqla_dlock.versions.by_key import update_by_key
from sqla_dlock.versions.in_memory import keeping_versions
from sqla_dlock.versions.mapping import VersionedMixin, is_number, version_column, version_key
from sqla_dlock.versions.matches import MATCHES, autoflush, execute, lock_matches, option, synchronize
from sqla_dlock.versions.writes import COUNTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Result
    from sqlalchemy.orm import Mapper, ORMExecuteState

__all__: list[str] = []


@event.listens_for(Session, "do_orm_execute")
def _on_bulk_statement(execution: ORMExecuteState) -> Result[Any] | None:
    if MATCHES in execution.local_execution_options:
        return lock_matches(execution)
    if execution.is_select:
        return None
    mapper = _versioned_mapper(execution.statement, is_by_key=_is_by_key(execution))
    if not (execution.is_update or execution.is_insert or execution.is_delete):
        return None
    # Of the statement: an UPDATE by primary key does not receive the options of its execution.
    execution.statement = without_lambda(execution.statement).execution_options(**{COUNTED: True})
    return None if mapper is None else _count_or_refuse(execution, mapper)


def _count_or_refuse(execution: ORMExecuteState, mapper: Mapper[Any]) -> Result[Any] | None:
    statement: Any = execution.statement
    if execution.is_insert:
        _refuse_insert(plain(statement), mapper, _raw_rows(execution))
    elif execution.is_delete:
        if not isinstance(execution.parameters, list):  # SQLAlchemy itself refuses a list.
            synchronize(execution, mapper)
    elif isinstance(execution.parameters, list):
        if _is_by_key(execution):
            return update_by_key(execution, execution.parameters, mapper)
        _refuse_assigned_versions(execution.parameters, mapper)
        synchronize(execution, mapper)
        return _count(execution, mapper)
    else:
        given = execution.parameters or {}
        _refuse_version_parameter(given if isinstance(given, tuple) else [given], mapper)
        synchronize(execution, mapper)
        return _count(execution, mapper)
    return None


def _is_by_key(execution: ORMExecuteState) -> bool:
    """Return whether each set of parameters of an UPDATE has the key of its row, as SQLAlchemy decides it."""
    is_list = isinstance(execution.parameters, list) and execution.is_update and not execution.is_from_statement
    is_bulk = is_list and option(execution, "dml_strategy", "auto") in {"auto", "bulk"}
    return is_bulk and is_on_class(execution.statement)


def _count(execution: ORMExecuteState, mapper: Mapper[Any]) -> Result[Any]:
    """Execute an UPDATE that also increments the version."""
    is_given = bool(_given(execution.statement, version_column(mapper)))
    execution.statement = _with_count(execution.statement, mapper)
    session = execution.session
    autoflush(execution)
    # The count that was added to a number is evaluated in memory: only where a version was assigned, it expires.
    is_evaluated = is_number(version_column(mapper)) and not is_given
    with keeping_versions(mapper, session.dirty if is_evaluated else session.identity_map.values()):
        return execute(execution)


@event.listens_for(Engine, "before_cursor_execute")
def _refuse_uncounted_ctes(*execution: Any) -> None:
    """Refuse a write in a CTE, which may be anywhere in a statement, that counts no version."""
    for statement in writes_in_ctes(execution[4]):
        _refuse_uncounted(statement, "in a CTE")


@event.listens_for(Engine, "before_execute")
def _refuse_uncounted_core(_connection: Any, statement: Any, many: Any, params: Any, options: Any) -> None:
    """Refuse a statement on a class that a Connection executes by itself, with no session that would add a count."""
    statement = plain(statement)
    if not isinstance(statement, Update | Insert | Delete) or COUNTED in options:
        return
    # A flush writes tables, with a cache of its own. A program may set that option, too.
    if is_on_class(statement) or not is_of_flush(statement.table, options.get("compiled_cache")):
        _refuse_uncounted(statement, "on a Connection", [*many, params])


def _refuse_uncounted(statement: Any, where: str, rows: Sequence[Any] = ()) -> None:
    """Refuse a statement to which no count can be added, unless it counts the versions itself, or writes none.

    `rows`: the parameters with which it is executed.
    """
    mapper = _versioned_mapper(statement)
    if mapper is None:
        return
    if isinstance(statement, Insert):
        _refuse_insert(statement, mapper, rows)
    elif isinstance(statement, Update):
        writer = f"update({mapper.class_.__name__})"
        version = _countable_version(statement, mapper, writer)
        if not _counts(_given(statement, version), mapper, writer):
            raise NotSupported(
                f"{writer} {where} has to count its version up itself, by "
                f"values(..., {version_key(mapper)}={mapper.class_.__name__}.{version_key(mapper)} + 1)"
            )
        _refuse_version_parameter(rows, mapper)


def _versioned_mapper(statement: Any, *, is_by_key: bool = False) -> Mapper[Any] | None:
    """Return the versioned class that a statement writes, if any; refuse what no count could make sound.

    A statement that writes no table with versions to count is not looked through, which takes longer than the rest.
    """
    tables = written_tables(statement)
    if not may_be_counted(tables):
        return None
    mapper = written_mapper(statement)
    refuse_join(statement, mapper, tables, is_by_key=is_by_key)
    refuse_child_writes(statement, mapper)
    mapper = mapper or _overwritten_class(statement)
    _refuse_alias_and_other_classes(statement, mapper)
    _refuse_blind_comparison(statement, mapper)
    return mapper if mapper is not None and _is_versioned(mapper) else None


def _overwritten_class(statement: Any) -> Mapper[Any] | None:
    """Return the versioned class of which an INSERT on the table overwrites rows, although it names no attribute.

    Of attributes among the `index_elements`, SQLAlchemy keeps only the columns, so that all upserts have to count.
    """
    insert = plain(statement)
    if isinstance(insert, Insert) and (is_replace(insert) or any(upserted_values(insert))):
        return versioned_class(insert.table)
    return None


def _refuse_alias_and_other_classes(statement: Any, own: Mapper[Any] | None) -> None:
    """Refuse an UPDATE of an alias, and one that sets columns of another class as well, as MySQL can.

    SQLAlchemy cannot synchronize an alias: it would take all instances for matched.
    """
    update = plain(statement)
    if not isinstance(update, Update):
        return
    if own is not None and _is_versioned(own) and update.table is not without_alias(update.table):
        name = own.class_.__name__
        raise NotSupported(
            f"an UPDATE of an alias of {name} cannot count its version up: send update({name}), and use the alias in "
            "its subqueries"
        )
    if other := next((each.class_.__name__ for each in other_mappers(update) if _is_versioned(each)), None):
        raise NotSupported(
            f"an UPDATE of another class would not count the versions of {other}: send update({other}) by itself"
        )


def _refuse_blind_comparison(statement: Any, mapper: Mapper[Any] | None) -> None:
    """Refuse a condition that names the version elsewhere than in the row that is written.

    PostgreSQL waits for a row, and then evaluates again only the conditions on that row itself: not those on another
    table or an alias, nor what a subquery has found.
    """
    write = plain(statement)
    if mapper is None or not _is_versioned(mapper):
        return
    if any(_blind_places(write, version_column(mapper))):
        name = f"{mapper.class_.__name__}.{version_key(mapper)}"
        raise NotSupported(
            f"{name} in a subquery, an alias or the table of a parent would not be compared again after a wait for a "
            f"row: compare {name} in where(...) itself, or read the rows and save or delete them one by one"
        )


def _blind_places(write: Any, version: Any) -> Iterator[bool]:
    """Yield, for each place where a condition of a statement names a version, whether it is none in the row itself."""
    if isinstance(write, Insert):  # Outside of a subquery, the condition of an upsert can only name its two rows.
        yield from (is_nested for each in upsert_conditions(write) for _, is_nested in places(each, version))
        return
    for condition in write._where_criteria:  # noqa: SLF001 - nothing public
        yield from (is_nested or table != write.table for table, is_nested in places(condition, version))
    # What SET names of another table is no condition; but a subquery that it joins to the rows has conditions.
    for joined in joined_by_values(write) if isinstance(write, Update) else ():
        yield from (is_nested for _, is_nested in places(joined, version))


def _is_versioned(mapper: Mapper[Any]) -> bool:
    return issubclass(mapper.class_, VersionedMixin)


def _with_count(statement: Any, mapper: Mapper[Any]) -> Any:
    """Return an UPDATE that also increments the version, unless it sets the version itself."""
    if isinstance(statement, FromStatement):
        counted = statement._generate()  # noqa: SLF001 - there is no public way
        counted.element = _with_count(plain(statement), mapper)
        return counted
    name, writer = version_key(mapper), f"update({mapper.class_.__name__})"
    version = _countable_version(statement, mapper, writer)
    # With the attribute of the class, SQLAlchemy also increments the versions in memory. With the column it would
    # expire them, and the instances would then have the new version with data that was read with the old one.
    attribute = getattr(mapper.class_, name)
    given = _given(statement, version)
    if _counts(given, mapper, writer):
        if is_number(version):
            return statement
        # A stale instance must not get the version of its row. SQLAlchemy evaluates no type_coerce() in memory, so that
        # the instance keeps the version that it has, and cannot be saved.
        return _with_values(statement, {attribute: type_coerce(given[0], version.type)})
    if given:
        raise NotSupported(
            f"{writer} cannot set {name!r} to a value of its own: leave it out, or set it to "
            f"{mapper.class_.__name__}.{name} + 1"
        )
    try:
        return _with_values(statement, {attribute: attribute + 1})
    except InvalidRequestError as error:
        raise NotSupported(f"ordered_values() cannot be combined with counting {name!r} up: use values()") from error


def _countable_version(statement: Any, mapper: Mapper[Any], writer: str) -> Any:
    """Return the column of the version, which one statement can only count up if it is in the table that it writes.

    MariaDB and MySQL would take another table's for a join without a condition, and move the versions of all rows.
    """
    version = version_column(mapper)
    # Not the table of the class, as an UPDATE of a parent's table has the class that its WHERE names; and not the same
    # object, as the ORM annotates tables.
    if version.table != without_alias(plain(statement).table):
        raise NotSupported(
            f"{writer} cannot count {version_key(mapper)!r} up, which is in the table {version.table.name}: update the "
            "rows one by one"
        )
    return version


def _with_values(statement: Any, values: dict[Any, Any]) -> Any:
    """Return an UPDATE that sets further values, also one of a `lambda_stmt()`, whose copies cannot be added to."""
    if type(statement._values) is dict:  # noqa: SLF001
        statement = statement._generate()  # noqa: SLF001
        statement._values = immutabledict(statement._values)  # noqa: SLF001
    return statement.values(values)


def _given(statement: Any, version: Any) -> list[Any]:
    """Return what an UPDATE sets the version to, if it sets it itself."""
    columns = {version, version.key}
    return [value for column, value in set_values(plain(statement)).items() if column in columns]


def _counts(given: list[Any], mapper: Mapper[Any], writer: str) -> bool:
    """Return whether a version is set, and each time to itself plus a positive number.

    Raises NotSupported for another kind of version than a number, which nothing can count up, unless it is set anew.
    """
    version = version_column(mapper)
    if is_number(version):
        return bool(given) and all(_is_increment(each, version) for each in given)
    if not given or any(isinstance(each, ColumnElement) and each in {version} for each in given):
        raise NotSupported(
            f"{writer} cannot count {version_key(mapper)!r} up, which is no number: set it to a value that no row has "
            "had"
        )
    return True


def _is_increment(value: Any, version: Any) -> bool:
    if not isinstance(value, BinaryExpression) or value.operator is not add:
        return False
    sides = (value.left, value.right)
    return version in set(sides) and any(isinstance(number := _number(each), int) and number > 0 for each in sides)


def _number(value: Any) -> Any:
    """Return the number that an expression is, unless a parameter may replace it when the statement is executed."""
    if isinstance(value, BindParameter):
        return value.value if value.unique else None
    is_digits = isinstance(value, ColumnClause) and value.is_literal and value.name.isdecimal()
    return int(value.name) if is_digits else None


def _refuse_version_parameter(rows: Sequence[Any], mapper: Mapper[Any]) -> None:
    """Refuse a version among the parameters of an UPDATE of many rows: it would be dropped, and not be checked."""
    if _names_version(rows, mapper):
        raise NotSupported(
            f"{version_key(mapper)!r} among the parameters of update({mapper.class_.__name__}) would not be checked: "
            "leave it out, or compare it in where(...) by a parameter of another name"
        )


def _refuse_assigned_versions(rows: Sequence[Any], mapper: Mapper[Any]) -> None:
    if _names_version(rows, mapper):
        raise ValueError(
            f"{version_key(mapper)!r} would be written as it is given: leave it out, and the version counts up "
            "unchecked; or leave dml_strategy out, and it is checked"
        )


def _names_version(rows: Sequence[Any], mapper: Mapper[Any]) -> bool:
    """Return whether one of these rows names the version, by its attribute or its column."""
    version = version_column(mapper)
    names = {version_key(mapper), version, version.key}
    return any(not names.isdisjoint(row) for row in rows)


def _raw_rows(execution: ORMExecuteState) -> Sequence[Any]:
    """Return the parameters of an INSERT that are written as they are given.

    From others SQLAlchemy drops the version, as it does for an instance that is added.
    """
    is_of_orm = bool(plain(execution.statement)._propagate_attrs)  # noqa: SLF001 - on a table, it may be plain Core
    if is_of_orm and not execution.is_from_statement and option(execution, "dml_strategy", "auto") in {"auto", "bulk"}:
        return []
    rows: Any = execution.parameters or []
    return [rows] if isinstance(rows, dict) else rows


def _refuse_insert(statement: Any, mapper: Mapper[Any], rows: Sequence[Any]) -> None:
    """Refuse an INSERT that sets a version: of a new row, which may be an older one's, or back, of one that is there.

    `rows`: the parameters that are written as they are given.
    """
    name = mapper.class_.__name__
    if is_replace(statement):
        raise NotSupported(
            f"REPLACE of {name} would set the version of a row back: update it, or insert it with "
            "on_conflict_do_update()"
        )
    if is_number(version_column(mapper)) and _names_version([inserted_columns(statement), *rows], mapper):
        raise NotSupported(
            f"insert({name}) cannot set {version_key(mapper)!r}, which may be that of an older row of this key: leave "
            f"it out, or give the rows to session.execute(insert({name}), [...]), where each begins with a new one"
        )
    for values in upserted_values(statement):
        writer = f"an upsert of {name}"
        version = _countable_version(statement, mapper, writer)
        # Of the child of an aggregate, an attribute would be refused in a statement on the table.
        is_column = not is_on_class(statement) and version.table is mapper.local_table
        counted = f"{name}.{f'__table__.c.{version.key}' if is_column else version_key(mapper)}"
        if not _counts([values[version.key]] if version.key in values else [], mapper, writer):
            raise NotSupported(
                f"{writer} has to count its version up itself, by set_={{..., {version.key!r}: {counted} + 1}}"
            )
