"""Tells a COMMIT that the server has refused from one of which nobody knows whether it was carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from django.db import DatabaseError

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


def is_refusal(vendor: str, error: DatabaseError) -> bool:
    """Say whether `error` is the server's own answer to COMMIT, so that nothing was committed; False: unknown."""
    cause: Any = error.__cause__
    if vendor == "sqlite":
        return cause is not None
    if vendor == "mysql":
        return _is_refusing_errno(getattr(cause, "args", ()))
    sqlstate = getattr(cause, "sqlstate", None)
    return sqlstate is not None and not sqlstate.startswith(_DOUBTFUL_SQLSTATES)


def _is_refusing_errno(args: tuple[Any, ...]) -> bool:
    number = args[0] if args else None
    return isinstance(number, int) and number not in _CLIENT_ERRNOS and number not in _DOUBTFUL_ERRNOS
