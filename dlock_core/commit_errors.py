"""Tells an answer to COMMIT that the server has refused from one of which nobody knows whether it was carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_refusal"]

# The server may have committed before it broke off: https://www.postgresql.org/docs/current/errcodes-appendix.html
_DOUBTFUL_SQLSTATES: Final = (
    "08",  # connection exceptions
    "40003",  # statement completion unknown
    "57P01",  # admin shutdown, also pg_terminate_backend()
    "57P02",  # crash shutdown
    "57P03",  # cannot connect now
)
# https://mariadb.com/kb/en/mariadb-error-code-reference/
_DOUBTFUL_ERRNOS: Final = frozenset(
    {
        0,  # the client was not connected
        1053,  # server shutdown in progress
        1180,  # got error … during COMMIT
        1317,  # query execution was interrupted
        1927,  # connection was killed
    }
)
_CLIENT_ERRNOS: Final = range(2000, 3000)


def is_refusal(error: BaseException | None) -> bool:
    """Say whether `error` is the server's own answer to COMMIT, so that nothing was committed; False: unknown.

    The first in its chain of causes that a known driver has raised decides: psycopg, asyncpg, mysqlclient, PyMySQL,
    aiomysql, asyncmy, sqlite3, aiosqlite.
    """
    while error is not None:
        module = type(error).__module__.partition(".")[0]
        if rule := _RULES.get(module):
            return rule(error)
        error = error.__cause__
    return False


def _has_refusing_sqlstate(error: Any) -> bool:
    sqlstate = getattr(error, "sqlstate", None)
    return sqlstate is not None and not sqlstate.startswith(_DOUBTFUL_SQLSTATES)


def _has_refusing_errno(error: Any) -> bool:
    number = error.args[0] if error.args else None
    return isinstance(number, int) and number not in _CLIENT_ERRNOS and number not in _DOUBTFUL_ERRNOS


def _is_local(_: object) -> bool:
    return True  # it is the database itself, in this process


_RULES: Final[dict[str, Callable[[Any], bool]]] = {
    "psycopg": _has_refusing_sqlstate,
    "asyncpg": _has_refusing_sqlstate,
    "MySQLdb": _has_refusing_errno,
    "pymysql": _has_refusing_errno,
    "aiomysql": _has_refusing_errno,
    "asyncmy": _has_refusing_errno,
    "sqlite3": _is_local,
    "aiosqlite": _is_local,
}
