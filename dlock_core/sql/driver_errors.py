"""What an error of a database driver means: one table for every question that dlock has about such an error.

The code that the server sent decides, never the text; only SQLite has no code for a missing table. No driver is
imported, because the class of an error has the name of its module. A new driver is one line in `_DRIVERS`.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "MAY_ROLL_BACK",
    "DatabaseFailure",
    "classify",
    "failure_of_statement",
    "is_plain_refusal",
    "is_refusal",
    "is_unsent",
    "warn_unless_known",
]

logger = logging.getLogger("dlock")


class DatabaseFailure(enum.Enum):
    """What a database error reports. The value of the first three is also the `reason` of a retry in the logs."""

    DEADLOCK = "deadlock"
    SERIALIZATION = "serialization failure"
    LOCK_TIMEOUT = "lock timeout"
    """Or NOWAIT: PostgreSQL and MariaDB use the same code for both."""
    DISCONNECT = "disconnect"
    """A COMMIT in progress may have been executed."""
    SESSION_TIMEOUT = "session timeout"
    """The server ended an idle session or an overlong transaction, so that no COMMIT was sent."""
    UNKNOWN_OUTCOME = "unknown outcome"
    """The server, or its client, does not know whether the statement was executed."""
    MISSING_TABLE = "missing table"
    MISSING_FUNCTION = "missing function"
    """Or the named schema is missing."""
    NO_ACCESS = "no access"
    """A wrong user, password or database, or a missing permission."""
    REFUSED = "refused"
    """Any other answer of the server; `classify` returns None for it."""


MAY_ROLL_BACK: Final = (DatabaseFailure.DEADLOCK, DatabaseFailure.SERIALIZATION, DatabaseFailure.LOCK_TIMEOUT)
"""Failures of a statement with which MySQL and MariaDB may roll back the whole transaction, and begin a new one."""

# https://www.postgresql.org/docs/current/errcodes-appendix.html; two characters stand for a class.
_SQLSTATES: Final = {
    "40P01": DatabaseFailure.DEADLOCK,
    "40001": DatabaseFailure.SERIALIZATION,
    "55P03": DatabaseFailure.LOCK_TIMEOUT,
    "08": DatabaseFailure.DISCONNECT,
    "57P01": DatabaseFailure.DISCONNECT,  # the administrator ended the session, or stopped the server
    "57P02": DatabaseFailure.DISCONNECT,  # another session crashed
    "57P03": DatabaseFailure.DISCONNECT,  # the server is starting or stopping
    "25P03": DatabaseFailure.SESSION_TIMEOUT,  # idle_in_transaction_session_timeout
    "25P04": DatabaseFailure.SESSION_TIMEOUT,  # transaction_timeout, which the server turns off before it commits
    "57P05": DatabaseFailure.SESSION_TIMEOUT,  # idle_session_timeout
    "40003": DatabaseFailure.UNKNOWN_OUTCOME,
    "42P01": DatabaseFailure.MISSING_TABLE,
    "42883": DatabaseFailure.MISSING_FUNCTION,
    "3F000": DatabaseFailure.MISSING_FUNCTION,
    "28": DatabaseFailure.NO_ACCESS,
    "3D000": DatabaseFailure.NO_ACCESS,
    "42501": DatabaseFailure.NO_ACCESS,
}
# https://mariadb.com/kb/en/mariadb-error-code-reference/
_MYSQL_NUMBERS: Final = {
    1213: DatabaseFailure.DEADLOCK,
    3058: DatabaseFailure.DEADLOCK,  # among GET_LOCKs, MySQL 8
    1206: DatabaseFailure.DEADLOCK,  # too many row locks for its memory: everything is rolled back, too
    1020: DatabaseFailure.SERIALIZATION,  # innodb_snapshot_isolation
    1205: DatabaseFailure.LOCK_TIMEOUT,
    3572: DatabaseFailure.LOCK_TIMEOUT,  # NOWAIT, MySQL 8
    # Not connected, shutdown, killed; by the client: no connection, gone, lost, lost with errno; idle for too long.
    **dict.fromkeys((0, 1053, 1927, 2002, 2003, 2006, 2013, 2055, 4031), DatabaseFailure.DISCONNECT),
    1180: DatabaseFailure.UNKNOWN_OUTCOME,  # an error during COMMIT
    1317: DatabaseFailure.UNKNOWN_OUTCOME,  # the statement was interrupted
    1146: DatabaseFailure.MISSING_TABLE,
    **dict.fromkeys((1044, 1045, 1049, 1142, 1698), DatabaseFailure.NO_ACCESS),
}
_MYSQL_CLIENT_NUMBERS: Final = range(2000, 3000)
_SQLITE_CODES: Final = {
    5: DatabaseFailure.LOCK_TIMEOUT,  # SQLITE_BUSY
    6: DatabaseFailure.LOCK_TIMEOUT,  # SQLITE_LOCKED
    517: DatabaseFailure.SERIALIZATION,  # SQLITE_BUSY_SNAPSHOT: it read before another connection wrote
}
_SQLITE_MISSING: Final = "no such table: "


def classify(error: BaseException) -> DatabaseFailure | None:
    """Return what a database error reports, or None for any other answer of the server and any other error.

    Errors that wrap or follow a driver's error (Django's, SQLAlchemy's, dlock's, "transaction is aborted") are
    unwrapped. An error of the application is not: the application decided to raise it.
    """
    for layer in _layers(error):
        trouble = _by_driver(layer) or _by_invalidation(layer)
        if trouble not in (None, DatabaseFailure.REFUSED):
            return trouble
    return None


def failure_of_statement(error: BaseException) -> DatabaseFailure | None:
    """Return what the database has answered to this one statement, or None for any other answer and any other error.

    Unlike `classify`, this ignores earlier errors: that of an earlier statement, which the program is just handling, or
    for which Django sends nothing more in the transaction.
    """
    trouble = _answer(error)
    return None if trouble is DatabaseFailure.REFUSED else trouble


def is_refusal(error: BaseException | None) -> bool:
    """Return whether the server itself refused a COMMIT, so that nothing was committed; False means unknown."""
    return _answer(error) not in (None, DatabaseFailure.DISCONNECT, DatabaseFailure.UNKNOWN_OUTCOME)


def is_plain_refusal(error: BaseException) -> bool:
    """Return whether the server has refused this one statement, and nothing more: its session goes on."""
    return _answer(error) is DatabaseFailure.REFUSED


def is_unsent(error: BaseException | None) -> bool:
    """Return whether asyncpg has sent nothing, because the server's last message, in between, has ended the session."""
    return type(error).__name__ == "InternalClientError"


def _answer(error: BaseException | None) -> DatabaseFailure | None:
    """Read the first error of a known driver in the chain of causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and type(error).__module__ != _SENDS_NOTHING:
        if _driver_of(error) is not None:
            return _by_driver(error)
        _warn_of_unknown_driver(error)
        seen.add(id(error))
        error = _cause(error)
    return None


def _layers(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen and _comes_from(error, *_DRIVERS, *_WRAPPERS):
        yield error
        seen.add(id(error))
        error = _cause(error) or (None if error.__suppress_context__ else error.__context__)


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    original = getattr(error, "orig", None) if _comes_from(error, "sqlalchemy") else None
    return original if isinstance(original, BaseException) else None


def _comes_from(error: BaseException, *packages: str) -> bool:
    modules = [f"{kind.__module__}." for kind in type(error).__mro__]
    return any(module.startswith(f"{package}.") for module in modules for package in packages)


def _driver_of(error: BaseException) -> str | None:
    return next((driver for driver in _DRIVERS if _comes_from(error, driver)), None)


def _by_driver(error: BaseException) -> DatabaseFailure | None:
    driver = _driver_of(error)
    return None if driver is None else _DRIVERS[driver](error)


def _by_sqlstate(error: Any) -> DatabaseFailure | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg 3 and asyncpg, psycopg2
    if state is None:  # The server sends a code with each error, so this one comes from the client.
        return DatabaseFailure.DISCONNECT if type(error).__name__ == "OperationalError" else None
    return _by_state(state)


def _by_psycopg2(error: Any) -> DatabaseFailure | None:
    """Read the `pgcode`; when a connection breaks in a statement, psycopg2 raises its general error without one."""
    if (state := getattr(error, "pgcode", None)) is None:
        return DatabaseFailure.DISCONNECT if type(error).__name__ in {"DatabaseError", "OperationalError"} else None
    return _by_state(state)


def _by_state(state: str) -> DatabaseFailure:
    return _SQLSTATES.get(state) or _SQLSTATES.get(state[:2]) or DatabaseFailure.REFUSED


def _by_number(error: Any) -> DatabaseFailure | None:
    number = error.args[0] if error.args else None
    if not isinstance(number, int):
        return None
    other = DatabaseFailure.UNKNOWN_OUTCOME if number in _MYSQL_CLIENT_NUMBERS else DatabaseFailure.REFUSED
    return _MYSQL_NUMBERS.get(number, other)


def _by_sqlite_code(error: Any) -> DatabaseFailure:
    """Read SQLite's code. The database is in this process, so that each error is its own answer."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    if str(error).startswith(_SQLITE_MISSING):
        return DatabaseFailure.MISSING_TABLE
    return _SQLITE_CODES.get(code) or _SQLITE_CODES.get(code & 0xFF) or DatabaseFailure.REFUSED


def _by_invalidation(error: Any) -> DatabaseFailure | None:
    """Report a lost connection that SQLAlchemy has recognised, by more indications than the driver's code."""
    is_lost = _comes_from(error, "sqlalchemy") and getattr(error, "connection_invalidated", False)
    return DatabaseFailure.DISCONNECT if is_lost else None


def _warn_of_unknown_driver(error: BaseException) -> None:
    package = type(error).__module__.partition(".")[0]
    is_database_error = any(kind.__name__ == "DatabaseError" for kind in type(error).__mro__)
    if is_database_error and not _comes_from(error, *_WRAPPERS):
        warn_unless_known(package)


def warn_unless_known(driver: str) -> None:
    """Log one warning for an unknown driver, named by its package or dialect: its failed COMMITs are unclear."""
    if driver in _KNOWN or driver in _warned:
        return
    _warned.add(driver)
    logger.warning(
        "dlock: the errors of the database driver %r are not known: the outcome of a failed COMMIT counts as unknown, "
        "its leases expire instead of being released, and no conflict is retried. Known drivers are %s",
        driver,
        ", ".join(_DRIVERS),
    )


_DRIVERS: Final[dict[str, Callable[[Any], DatabaseFailure | None]]] = {
    "psycopg": _by_sqlstate,
    "psycopg2": _by_psycopg2,
    "asyncpg": _by_sqlstate,
    "MySQLdb": _by_number,
    "pymysql": _by_number,  # its errors have an SQLSTATE too, but 40001 for a deadlock; aiomysql raises them as well
    "aiomysql": _by_number,
    "asyncmy": _by_number,
    "sqlite3": _by_sqlite_code,
    "aiosqlite": _by_sqlite_code,
}
_DIALECTS: Final = ("mysqldb", "psycopg_async", "pysqlite", "pysqlite_numeric", "pysqlcipher", "sqlite3.dbapi2")
"""The names that SQLAlchemy or Django have for drivers of the table, where they differ."""
_KNOWN: Final = {*_DRIVERS, *_DIALECTS}
_WRAPPERS: Final = ("django.db", "sqlalchemy", "django_dlock", "sqla_dlock", "dlock_core")
_SENDS_NOTHING: Final = "django.db.transaction"
"""The driver whose errors have as their cause the one that has broken the transaction."""
_warned: Final[set[str]] = set()
