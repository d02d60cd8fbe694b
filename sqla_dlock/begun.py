"""Whether the statements on a Connection are in a transaction of its database, as SQLAlchemy takes for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.errors import NotSupported
from dlock_core.sql.statement_kinds import surely_reads

if TYPE_CHECKING:
    from sqlalchemy import Connection

_LEGACY: Final = -1
"""sqlite3.LEGACY_TRANSACTION_CONTROL, which Python 3.11 does not have: not the PEP 249 mode, which begins at once."""

__all__ = [
    "begins_by_itself",
    "has_begun",
    "is_autocommit",
    "may_write",
    "no_fence_in_autocommit",
    "refuse_unbegun",
    "savepoint_may_begin",
]


def is_autocommit(connection: Connection) -> bool:
    """Return whether each statement commits, by the isolation level or by a setting made directly on the driver.

    No I/O. On SQLite, and before SQLAlchemy 2.0.43, only the isolation level is known.
    """
    dialect: Any = connection.dialect
    if connection._is_autocommit_isolation():  # noqa: SLF001 - the public way queries the server
        return True
    detect: Any = getattr(dialect, "detect_autocommit_setting", None)
    if detect is None or dialect.name == "sqlite":  # whose `isolation_level` says nothing about BEGIN
        return False
    try:
        return bool(detect(connection.connection.dbapi_connection))
    except NotImplementedError:
        return False


def has_begun(connection: Connection) -> bool:
    """Return, after a write, whether it is part of a transaction: SQLite can be set to begin none. No I/O."""
    if connection.dialect.name != "sqlite":
        return True
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


def begins_by_itself(connection: Connection) -> bool:
    """Return whether SQLite's driver begins a transaction before the first write, as it does by default."""
    driver: Any = connection.connection.driver_connection
    driver = getattr(driver, "_conn", driver)  # aiosqlite does not show all of it
    return driver.isolation_level is not None and getattr(driver, "autocommit", _LEGACY) == _LEGACY


def savepoint_may_begin(connection: Connection) -> bool:
    """Return whether SQLite's transaction may begin with a savepoint: unless the engine's event `begin` sends BEGIN."""
    return is_autocommit(connection) or begins_by_itself(connection) or not connection.dispatch.begin


def may_write(sql: str) -> bool:
    """Return whether a statement outside of a transaction may change, and commit, anything."""
    return not surely_reads(sql)


def no_fence_in_autocommit(name: str) -> NotSupported:
    """Return the error for a lock where every statement commits by itself: its writes could not be fenced."""
    return NotSupported(
        f"a session in AUTOCOMMIT cannot be fenced by the lock {name!r}: give it an engine with transactions, "
        "or pass fence=False if something else protects the data",
        name=name,
    )


def refuse_unbegun(connection: Connection, name: str) -> None:
    """Raise NotSupported if the admit was not part of a transaction: SQLite's driver was set to begin none."""
    if not has_begun(connection):
        raise NotSupported(
            f"this SQLite connection is in no transaction, so the lock {name!r} cannot fence its writes: roll back, "
            "if an error has ended it; if none has begun, send BEGIN IMMEDIATE in the engine's event 'begin', or leave "
            "the driver's isolation_level alone",
            name=name,
        )
