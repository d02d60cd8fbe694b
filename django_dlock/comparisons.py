"""Versions that the condition of a queryset compares: `filter(version=seen)`.

A database that has waited for a row evaluates the conditions on that row again, but neither those on other tables nor
subqueries, and Django writes what a subquery or an earlier SELECT has found. The rows are then locked before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, models
from django.db.models.deletion import Collector
from django.db.models.expressions import Col
from django.db.models.lookups import In
from django.db.models.sql import Query

from django_dlock.fencing import READ_COMMITTED, isolation_of_session
from django_dlock.row_sql import in_order_of_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "found_versions",
    "has_parents",
    "hashable",
    "is_one_table",
    "lock_matching",
    "lock_versions",
    "needs_lock",
    "only_locked",
]

# What a column is defined by may be more than the name of a type ("text COLLATE ..."), or no type at all ("bigserial").
_TYPE_OF_ARRAYS: Final = re.compile(
    r"(?!\w*serial)[\w.]+(\([\d, ]+\))?|double precision|timestamp with time zone", re.IGNORECASE
)


def needs_lock(rows: Any, version: Any, *, for_delete: bool = False) -> bool:
    """Return whether the condition of a queryset compares the version, and a write would not compare it again."""
    if rows.query.is_sliced or rows.query.combinator:
        return False  # Django refuses to write these.
    places = {is_nested for field, is_nested in _named_columns(rows.query.where) if field == version}
    if not places:
        return False
    is_read_first = for_delete and not Collector(using=rows.db, origin=rows).can_fast_delete(rows)
    return is_read_first or True in places or not is_one_table(rows)


def is_one_table(rows: Any) -> bool:
    """Return whether one UPDATE can both check and write.

    With several tables Django first selects the keys that it then updates, or updates what a subquery finds. Both read
    the version before the statement waits for the row, and do not read it again after the wait.
    """
    return not has_parents(rows.model) and rows.all().query.count_active_tables() <= 1


def has_parents(model: Any) -> bool:
    """Return whether the rows of a model are spread over several tables."""
    return bool(model._meta.concrete_model._meta.parents)


def lock_matching(rows: Any, version: Any) -> Any:
    """Lock the rows of a queryset in the open transaction, and return those that still match, by their keys.

    A version stands for a state of its row: what matched at a version still matches if the locked row has that version.
    Where it has another one, the condition is evaluated again, now that no other transaction can write the row. If that
    reads from an older snapshot (MariaDB and MySQL at REPEATABLE READ), the row does not match.
    """
    if not connections[rows.db].features.has_select_for_update:
        return rows  # SQLite: no other transaction can write between a read and a write of this one.
    rows = rows.all()
    rows.query.select_for_update = False  # Django drops it as well, and here it would lock in no order.
    key = version.model._meta.pk.name
    found = _by_key(rows, version, key)
    locked = lock_versions(found, version, rows.db)
    if found != locked:
        found = _by_key(_with_keys(rows, version, locked), version, key)
    return _with_keys(rows, version, [each for each in found if found[each] == locked[each]])


def only_locked(rows: Any) -> Any:
    """Return a queryset that locks the rows of another one, in the order of their keys, and no rows that it joins.

    An ordering of the model would join as well, and PostgreSQL locks no row that an outer join may not find.
    """
    connection = connections[rows.db]
    if rows.query.count_active_tables() > 1:
        rows = models.QuerySet(rows.model, using=rows.db).filter(pk__in=list(rows.values_list("pk", flat=True)))
    return in_order_of_keys(rows).select_for_update(no_key=connection.features.has_select_for_no_key_update)


def lock_versions(keys: Iterable[Any], version: Any, using: str) -> dict[Any, int]:
    """Lock rows of the table that has the version, in the order of their keys; return their versions by key."""
    rows: Any = _with_keys(models.QuerySet(version.model, using=using), version, keys)
    return _by_key(only_locked(rows), version)


def found_versions(rows: Any, version: Any) -> dict[Any, int]:
    """Return the current versions of rows, by their primary keys."""
    connection = connections[rows.db]
    is_mysql = connection.vendor == "mysql"
    in_transaction = is_mysql and (connection.in_atomic_block or not connection.get_autocommit())
    if in_transaction and isolation_of_session(connection) not in READ_COMMITTED:
        # A plain SELECT reads the old versions from the transaction's snapshot; a locking one reads the newest.
        rows = only_locked(rows)
    return _by_key(rows, version)


def _by_key(rows: Any, version: Any, key: str = "pk") -> dict[Any, int]:
    return {hashable(each): number for each, number in rows.values_list(key, version.name)}


def hashable(key: Any) -> Any:
    """Return a primary key as a key of a dict: that of an array or a JSON value is wrapped."""
    try:
        hash(key)
    except TypeError:
        return _Hashable(key)
    return key


class _Hashable:
    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return _hash(self.key)


def _hash(value: Any) -> int:
    """Return the same number for equal values: equal dicts may have their items in another order."""
    if isinstance(value, dict):
        return hash(frozenset((name, _hash(each)) for name, each in value.items()))
    if isinstance(value, list | tuple):
        return hash(tuple(map(_hash, value)))
    try:
        return hash(value)
    except TypeError:  # Such as a set, by a decoder of the program's own.
        return 0


def _plain(key: Any) -> Any:
    return key.key if isinstance(key, _Hashable) else key


def _with_keys(rows: Any, version: Any, keys: Iterable[Any]) -> Any:
    """Return the rows of a queryset that have one of these keys in the table that has the version."""
    key = version.model._meta.pk
    keys = [_plain(each) for each in keys]
    if isinstance(key, models.CompositePrimaryKey):
        return rows.filter(pk__in=keys)
    return rows.filter(_In(models.F(key.name), [key.get_prep_value(each) for each in keys]))


class _In(In):  # type: ignore[type-arg]
    """IN; on PostgreSQL all values are one array if it can be: it takes 65,535 parameters, and each one costs time."""

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        type_name = self.lhs.output_field.rel_db_type(connection)
        if not _TYPE_OF_ARRAYS.fullmatch(type_name):
            return super().as_sql(compiler, connection)
        column, parameters = self.process_lhs(compiler, connection)
        _, values = self.process_rhs(compiler, connection)
        return f"{column} = ANY(%s::{type_name}[])", [*parameters, list(values)]


def _named_columns(expression: Any, *, is_nested: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the field of each column that an expression names, and whether it is named in a subquery."""
    if isinstance(expression, Col):
        yield expression.target, is_nested
    elif isinstance(expression, Query):
        parts = (expression.where, *expression.select, *expression.annotations.values(), *expression.combined_queries)
        for part in parts:
            yield from _named_columns(part, is_nested=True)
    else:
        for part in getattr(expression, "get_source_expressions", list)():
            yield from _named_columns(part, is_nested=is_nested)
