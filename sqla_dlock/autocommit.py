"""Says whether a connection commits every statement by itself, so that nothing done on it lasts until a COMMIT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["is_autocommit"]


def is_autocommit(connection: Connection) -> bool:
    """Say whether it does, by its isolation level or by what its driver was told behind SQLAlchemy's back.

    No I/O. On SQLite, and before SQLAlchemy 2.0.43, the isolation level is all that can be known.
    """
    return connection._is_autocommit_isolation() or _is_told_by_driver(connection)  # the public way asks the server


def _is_told_by_driver(connection: Connection) -> bool:
    detect: Any = getattr(connection.dialect, "detect_autocommit_setting", None)
    if detect is None or connection.dialect.name == "sqlite":  # whose `isolation_level` says nothing about BEGIN
        return False
    try:
        return bool(detect(connection.connection.dbapi_connection))
    except NotImplementedError:
        return False
