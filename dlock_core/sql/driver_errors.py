"""What an error of a database driver means: one table for every question that dlock asks about one.

An error is told by the code that the server sent, never by its text; SQLite alone has no code for a missing table.
No driver is imported: an error's class knows its module. A new driver is one line in `_DRIVERS`.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MAY_ROLL_BACK", "Trouble", "classify", "is_refusal", "warn_unless_known"]

logger = logging.getLogger("dlock")


class Trouble(enum.Enum):
    """What a database error reports."""

    DEADLOCK = "deadlock"
    SERIALIZATION = "serialization failure"
    LOCK_TIMEOUT = "lock timeout"  # or NOWAIT: PostgreSQL and MariaDB give both the same code
    DISCONNECT = "disconnect"  # a COMMIT that was under way may have been carried out
    TIMED_OUT = "session timed out"  # the server ended an idle session or an overlong transaction: no COMMIT was sent
    DOUBT = "doubt"  # the server, or its client, does not know whether the statement was carried out
    MISSING_TABLE = "missing table"
    NO_ACCESS = "no access"  # a wrong user, password, database or permission
    REFUSED = "refused"  # any other answer of the server; `classify` gives None for it


MAY_ROLL_BACK: Final = (Trouble.DEADLOCK, Trouble.SERIALIZATION, Trouble.LOCK_TIMEOUT)
"""Errors of a statement with which MySQL and MariaDB roll back the whole transaction, and go on in a new one."""

# https://www.postgresql.org/docs/current/errcodes-appendix.html; two characters stand for a class.
_SQLSTATES: Final = {
    "40P01": Trouble.DEADLOCK,
    "40001": Trouble.SERIALIZATION,
    "55P03": Trouble.LOCK_TIMEOUT,
    "08": Trouble.DISCONNECT,
    "57P01": Trouble.DISCONNECT,  # the administrator ended the session, or stopped the server
    "57P02": Trouble.DISCONNECT,  # another session crashed
    "57P03": Trouble.DISCONNECT,  # the server is starting or stopping
    "25P03": Trouble.TIMED_OUT,  # idle_in_transaction_session_timeout
    "25P04": Trouble.TIMED_OUT,  # transaction_timeout, which the server turns off before it commits
    "57P05": Trouble.TIMED_OUT,  # idle_session_timeout
    "40003": Trouble.DOUBT,
    "42P01": Trouble.MISSING_TABLE,
    "28": Trouble.NO_ACCESS,
    "3D000": Trouble.NO_ACCESS,
    "42501": Trouble.NO_ACCESS,
}
# https://mariadb.com/kb/en/mariadb-error-code-reference/
_MYSQL_NUMBERS: Final = {
    1213: Trouble.DEADLOCK,
    3058: Trouble.DEADLOCK,  # among GET_LOCKs, MySQL 8
    1020: Trouble.SERIALIZATION,  # innodb_snapshot_isolation
    1205: Trouble.LOCK_TIMEOUT,
    3572: Trouble.LOCK_TIMEOUT,  # NOWAIT, MySQL 8
    # Not connected, shutdown, killed; by the client: no connection, gone, lost, lost with errno; idle for too long.
    **dict.fromkeys((0, 1053, 1927, 2002, 2003, 2006, 2013, 2055, 4031), Trouble.DISCONNECT),
    1180: Trouble.DOUBT,  # an error during COMMIT
    1317: Trouble.DOUBT,  # the statement was interrupted
    1146: Trouble.MISSING_TABLE,
    **dict.fromkeys((1044, 1045, 1049, 1142, 1698), Trouble.NO_ACCESS),
}
_MYSQL_CLIENT_NUMBERS: Final = range(2000, 3000)
_SQLITE_CODES: Final = {
    5: Trouble.LOCK_TIMEOUT,  # SQLITE_BUSY
    6: Trouble.LOCK_TIMEOUT,  # SQLITE_LOCKED
    517: Trouble.SERIALIZATION,  # SQLITE_BUSY_SNAPSHOT: it read before another connection wrote
}
_SQLITE_MISSING: Final = "no such table: "


def classify(error: BaseException) -> Trouble | None:
    """Return what a database error reports; None for an error that is no trouble of those, or no database's.

    The layers that wrap or hide a driver's error (Django, SQLAlchemy, dlock, "transaction is aborted") are looked
    through, but not an error of the application: raising that was a decision.
    """
    for layer in _layers(error):
        trouble = _by_driver(layer) or _by_invalidation(layer)
        if trouble not in (None, Trouble.REFUSED):
            return trouble
    return None


def is_refusal(error: BaseException | None) -> bool:
    """Return whether an error of COMMIT is the server's own answer, so that nothing was committed; False: unknown.

    The first error in the chain of causes that a known driver has raised decides.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if _driver_of(error) is not None:
            return _by_driver(error) not in (None, Trouble.DISCONNECT, Trouble.DOUBT)
        _warn_of_unknown_driver(error)
        seen.add(id(error))
        error = _cause(error)
    return False


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


def _by_driver(error: BaseException) -> Trouble | None:
    driver = _driver_of(error)
    return None if driver is None else _DRIVERS[driver](error)


def _by_sqlstate(error: Any) -> Trouble | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg 3 and asyncpg, psycopg2
    if state is None:  # the server sends one with every error: this one the client found out by itself
        return Trouble.DISCONNECT if type(error).__name__ == "OperationalError" else None
    return _by_state(state)


def _by_psycopg2(error: Any) -> Trouble | None:
    """Read its `pgcode`; of a connection that breaks in a statement it knows no more than that there was an error."""
    if (state := getattr(error, "pgcode", None)) is None:
        return Trouble.DISCONNECT if type(error).__name__ in {"DatabaseError", "OperationalError"} else None
    return _by_state(state)


def _by_state(state: str) -> Trouble:
    return _SQLSTATES.get(state) or _SQLSTATES.get(state[:2]) or Trouble.REFUSED


def _by_number(error: Any) -> Trouble | None:
    number = error.args[0] if error.args else None
    if not isinstance(number, int):
        return None
    other = Trouble.DOUBT if number in _MYSQL_CLIENT_NUMBERS else Trouble.REFUSED
    return _MYSQL_NUMBERS.get(number, other)


def _by_sqlite_code(error: Any) -> Trouble:
    """Read SQLite's code; it is the database itself, in this process, so that every error is its answer."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    if str(error).startswith(_SQLITE_MISSING):
        return Trouble.MISSING_TABLE
    return _SQLITE_CODES.get(code) or _SQLITE_CODES.get(code & 0xFF) or Trouble.REFUSED


def _by_invalidation(error: Any) -> Trouble | None:
    """SQLAlchemy knows more signs of a lost connection than a driver's code."""
    is_lost = _comes_from(error, "sqlalchemy") and getattr(error, "connection_invalidated", False)
    return Trouble.DISCONNECT if is_lost else None


def _warn_of_unknown_driver(error: BaseException) -> None:
    package = type(error).__module__.partition(".")[0]
    is_database_error = any(kind.__name__ == "DatabaseError" for kind in type(error).__mro__)
    if is_database_error and not _comes_from(error, *_WRAPPERS):
        warn_unless_known(package)


def warn_unless_known(driver: str) -> None:
    """Warn, once, of a driver by the name of its package or of its dialect: how its transactions end is not known."""
    if driver in _KNOWN or driver in _warned:
        return
    _warned.add(driver)
    logger.warning(
        "dlock: the errors of the database driver %r are not known: whether a COMMIT that failed was carried out "
        "counts as unknown, its leases run out instead of being released, and no conflict is tried again; known are %s",
        driver,
        ", ".join(_DRIVERS),
    )


_DRIVERS: Final[dict[str, Callable[[Any], Trouble | None]]] = {
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
"""What SQLAlchemy or Django call drivers of the table, where it is another name."""
_KNOWN: Final = {*_DRIVERS, *_DIALECTS}
_WRAPPERS: Final = ("django.db", "sqlalchemy", "django_dlock", "sqla_dlock", "dlock_core")
_warned: Final[set[str]] = set()
