"""How a database session is called in the metadata of a lease, and in what its database tells of it."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["comment", "party"]

_PREFIX: Final = {"postgresql": "pg", "mysql": "my", "mariadb": "my"}


def party(vendor: str, connection: Any, database: str | None) -> str | None:
    """Name the session of a driver's connection, such as "pg:4711/shop", without asking it; None if it cannot be told.

    Behind a proxy that shares sessions the number is the proxy's own, and means nothing to the database.
    """
    prefix, number = _PREFIX.get(vendor), _number(connection)
    return f"{prefix}:{number}/{database}" if prefix and number and database else None


def _number(connection: Any) -> int | None:
    """Ask a connection of psycopg, psycopg2, asyncpg, mysqlclient, PyMySQL or aiomysql for its session's number."""
    info = getattr(connection, "info", None)  # of mysqlclient it is a method
    if (number := getattr(info, "backend_pid", None)) is not None:
        return int(number)
    for method in ("get_server_pid", "thread_id"):
        if (number := getattr(connection, method, None)) is not None:
            return int(number())
    return None


def comment(holder: str) -> str:
    """Write the mark of a holder, for statements under its lease where the session has no better place for it."""
    return f"/* dlock:{holder[:8]} */ "
