"""Keep the fence table small: old rows give way to one floor."""

from __future__ import annotations

from typing import Any

from django.db import connections

from dlock_core import fence_purge

__all__ = ["purge"]


def purge(using: str, days: int) -> int:
    """Purge the fence table of a database, see `dlock_core.fence_purge.purge`; not inside a transaction."""
    connection = connections[using]
    vendor = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor

    def execute(sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    return fence_purge.purge(execute, vendor, days)
