"""Says whether a connection commits every statement by itself, so that nothing done on it lasts until a COMMIT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlock_core.errors import NotSupported

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["has_begun", "is_autocommit", "refuse_autocommit", "refuse_unbegun"]


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


def has_begun(connection: Connection) -> bool:
    """Say, after a write, whether it is part of a transaction: SQLite can be told to begin none. No I/O."""
    driver: Any = connection.connection.driver_connection
    return connection.dialect.name != "sqlite" or bool(driver.in_transaction)


def refuse_autocommit(connection: Connection, name: str) -> None:
    """Raise NotSupported where every statement commits by itself: what it writes could not be fenced."""
    if is_autocommit(connection):
        raise NotSupported(
            f"a session in AUTOCOMMIT cannot be fenced by the lock {name!r}: give it an engine with transactions, "
            "or pass fence=False if something else protects the data",
            name=name,
        )


def refuse_unbegun(connection: Connection, name: str) -> None:
    """Raise NotSupported when the admit was no part of a transaction: SQLite's driver was told to begin none."""
    if not has_begun(connection):
        raise NotSupported(
            f"this SQLite connection begins no transactions, so the lock {name!r} cannot fence what it writes: "
            "send BEGIN IMMEDIATE in the engine's event 'begin', or leave the driver's isolation_level alone",
            name=name,
        )
