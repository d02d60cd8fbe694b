"""The snapshot trap: a lock asked for after the transaction took its snapshot protects nothing.

Under snapshot isolation MySQL and MariaDB lose updates in silence (REPEATABLE READ is their server's default, READ
COMMITTED is Django's); PostgreSQL answers 40001. SQLite refuses the write itself, at the admit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_dlock.errors import SnapshotTooOld
from django_dlock.statements import announcer
from django_dlock.transactions import has_spoken

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["refuse_old_snapshot"]

_FRESH: Final = ("read committed", "read uncommitted")
"""Isolation levels in which each statement sees what was committed before it."""


def refuse_old_snapshot(name: str, using: str) -> None:
    """Raise SnapshotTooOld when this thread's open transaction may read from before the lock; may ask the database."""
    isolation = _isolation(connections[using]) if has_spoken(using) else None
    if isolation is not None and isolation not in _FRESH:
        raise SnapshotTooOld(name, isolation=isolation.upper())


def _isolation(connection: BaseDatabaseWrapper) -> str | None:
    if connection.vendor == "postgresql":
        return str(_one(connection, "SHOW transaction_isolation"))
    if connection.vendor != "mysql":
        return None
    if (level := _level(connection)) in _FRESH:
        return level
    variable = "tx_isolation" if connection.mysql_is_mariadb else "transaction_isolation"  # type: ignore[attr-defined]
    return str(_one(connection, f"SELECT @@{variable}")).replace("-", " ").lower()


def _level(connection: BaseDatabaseWrapper) -> str:
    return str(getattr(connection, "isolation_level", None) or "")


def _one(connection: BaseDatabaseWrapper, sql: str) -> Any:
    with announcer(connection).quietly, connection.cursor() as cursor:
        cursor.execute(sql)
        row = cursor.fetchone()
        return row[0] if row else None
