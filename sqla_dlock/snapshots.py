"""The snapshot trap: a lock asked for after the transaction took its snapshot protects nothing.

Under REPEATABLE READ, their default, MySQL and MariaDB lose updates in silence; PostgreSQL answers 40001. SQLite
refuses the write itself, at the admit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlock_core.errors import SnapshotTooOld
from sqla_dlock.roots import is_of_test

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

__all__ = ["refuse_old_snapshot"]

_FRESH: Final = ("READ COMMITTED", "READ UNCOMMITTED", "AUTOCOMMIT")
"""Isolation levels in which each statement sees what was committed before it."""


def refuse_old_snapshot(name: str, connections: Iterable[Connection]) -> None:
    """Raise SnapshotTooOld when a transaction on one of them may read from before the lock; asks the database."""
    for connection in connections:
        if connection.dialect.name in ("postgresql", "mysql", "mariadb") and not is_of_test(connection):
            isolation = str(connection.get_isolation_level())
            if isolation not in _FRESH:
                raise SnapshotTooOld(name, isolation=isolation)
