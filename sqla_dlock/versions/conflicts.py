"""Conflicts of versions: the error, and the queries that lock rows and find the versions that they have now."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import bindparam, select, tuple_
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.exc import StaleDataError

from dlock_core import errors
from dlock_core.observability.hooks import emit_conflict
from sqla_dlock.versions.mapping import key_columns, version_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Select
    from sqlalchemy.orm import Mapper, Session

__all__ = [
    "StaleObject",
    "find_stale",
    "find_version",
    "in_parts",
    "lock_versions",
    "require_versions",
    "stale_instance",
    "stale_row",
]

T = TypeVar("T")

if TYPE_CHECKING:
    Key = tuple[Any, ...]
    Options = Mapping[str, Any] | None


MAX_ROWS_PER_QUERY: Final = 500
"""More rows are checked and written in several statements: databases limit the parameters of one."""


def in_parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield rows in parts that one statement takes."""
    for start in range(0, len(rows), MAX_ROWS_PER_QUERY):
        yield rows[start : start + MAX_ROWS_PER_QUERY]


class StaleObject(errors.StaleObject, StaleDataError):
    """The row was changed or deleted (`found` is None) since `instance` was read with version `expected`.

    It is also SQLAlchemy's StaleDataError, so that existing code which catches that error keeps working.
    """


def stale_row(
    session: Session, mapper: Mapper[Any], key: Key, *, expected: Any, found: Any, action: str
) -> StaleObject:
    """Return the error for a row of which only the key is known, and emit its event."""
    instance = session.identity_map.get(mapper.identity_key_from_primary_key(key))
    model = mapper.class_ if instance is None else None
    name = key[0] if len(key) == 1 else key
    return emit_conflict(StaleObject(instance, expected=expected, found=found, action=action, key=name, model=model))


def stale_instance(instance: Any, *, expected: Any, found: Any, action: str) -> StaleObject:
    """Return the error for an instance, and emit its event."""
    key = instance_state(instance).identity
    name = key[0] if key is not None and len(key) == 1 else key
    return emit_conflict(StaleObject(instance, expected=expected, found=found, action=action, key=name))


def find_version(connection: Connection, mapper: Mapper[Any], key: Key) -> Any:
    """Return the version that a row has now, or None if it is gone."""
    found = _find(connection, mapper, key, version_column(mapper))
    return None if found is None else found[0]


def compare_version(
    connection: Connection, mapper: Mapper[Any], key: Key, version: Any, options: Options = None
) -> tuple[Any, bool]:
    """Return the version that a row has now, or None if it is gone; and whether the database takes it for this one."""
    column = version_column(mapper)
    found = _find(connection, mapper, key, column, column == version, options=options)
    return (None, False) if found is None else (found[0], bool(found[1]))


def _find(connection: Connection, mapper: Mapper[Any], key: Key, *columns: Any, options: Options = None) -> Any:
    """Read a row as it is now.

    On MySQL and MariaDB it takes a locking SELECT: under REPEATABLE READ a plain one may show an older version.
    """
    query = select(*columns).where(*(column == part for column, part in zip(key_columns(mapper), key, strict=True)))
    if connection.dialect.name in {"mysql", "mariadb"}:
        query = query.with_for_update()
    return connection.execute(query, execution_options=options).first()


def require_versions(
    session: Session,
    connection: Connection,
    mapper: Mapper[Any],
    expected: Sequence[Key],
    action: str,
    *,
    options: Options = None,
) -> None:
    """Lock rows in the order of their keys, and raise StaleObject for the first whose version is not the expected one.

    The order makes deadlocks between two such flushes impossible. On SQLite nothing is locked, because a transaction
    that writes has the database for itself.

    Args:
        session: The session, which may have an instance for the error.
        connection: Where the rows are written.
        mapper: The class of the rows.
        expected: The key of each row, followed by its expected version as the last element.
        action: What the caller is about to do, "save" or "delete".
        options: The execution options of the statement that the caller is about to send, such as its schemas.
    """
    now = lock_versions(connection, mapper, expected, action, options)
    # Keys and versions that differ in Python may be equal to the database ("a" and "A"): it has the last word.
    differing = [row for row in expected if row not in now]
    if stale := find_stale(connection, mapper, differing, options):
        (*key, version), found = stale
        raise stale_row(session, mapper, tuple(key), expected=version, found=found, action=action)


def find_stale(
    connection: Connection, mapper: Mapper[Any], rows: Sequence[Key], options: Options = None
) -> tuple[Key, Any] | None:
    """Return the first of these rows, each a key and a version, that the database does not find; and its version now.

    Many rows are counted first, as a row that is found is exactly one of the table: only if some are missing is each
    one looked for.
    """
    for some in in_parts(rows):
        if len(some) > 1:
            same = connection.execute(_comparing_query(mapper), {"dlock_rows": some}, execution_options=options).all()
            if len(same) == len(some):
                continue
        for row in some:
            found, is_expected = compare_version(connection, mapper, row[:-1], row[-1], options)
            if not is_expected:
                return row, found
    return None


def lock_versions(
    connection: Connection, mapper: Mapper[Any], rows: Sequence[Key], action: str, options: Options = None
) -> set[Key]:
    """Lock rows in the order of their keys, and return each key with the version that its row has now.

    Each of the rows is given as its key and any version.
    """
    query = _locking_query(mapper, action)
    if len(rows) > MAX_ROWS_PER_QUERY:
        with suppress(TypeError):  # Keys that Python cannot compare are in the database's order within each query only.
            rows = sorted(rows)
    now: set[Key] = set()
    for some in in_parts(rows):
        keys = [row[0] if len(row) == 2 else row[:-1] for row in some]
        now.update(tuple(row) for row in connection.execute(query, {"dlock_keys": keys}, execution_options=options))
    return now


@lru_cache(maxsize=256)
def _locking_query(mapper: Mapper[Any], action: str) -> Select[Any]:
    columns = key_columns(mapper)
    wanted: Any = columns[0] if len(columns) == 1 else tuple_(*columns)
    query = select(*columns, version_column(mapper)).order_by(*columns)
    query = query.where(wanted.in_(bindparam("dlock_keys")))
    return query.with_for_update(key_share=action != "delete")


@lru_cache(maxsize=256)
def _comparing_query(mapper: Mapper[Any]) -> Select[Any]:
    """Return the query for the keys of those rows that have these versions now; locking, as `_find` has to be."""
    row = (*key_columns(mapper), version_column(mapper))
    wanted = tuple_(*row).in_(bindparam("dlock_rows"))
    return select(*key_columns(mapper)).where(wanted).with_for_update(key_share=True)
