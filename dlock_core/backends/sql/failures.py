"""What an error of a database means to somebody who asks for a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.errors import BackendUnavailable
from dlock_core.owner import printable

if TYPE_CHECKING:
    from dlock_core.backends.sql.port import Connector

__all__ = ["unavailable"]

_MISSING: Final = ("42P01", 1146)
_REFUSED: Final = (
    "28",  # wrong user or password
    "3D000",  # no such database
    "42501",  # no permission
    *(1044, 1045, 1049, 1142, 1698),  # the same, in MySQL and MariaDB
    *_MISSING,
)


def unavailable(name: str, connector: Connector, error: BaseException, *, idle: bool) -> BackendUnavailable:
    """Say why the database gave no answer; `idle`: the connection had been idle, so a new one may work at once."""
    code = _code(error)
    reason = f"{connector.title}: {_first_line(error)}"
    if _is(code, _MISSING):
        reason = f"{connector.title} has no table for it: run {connector.remedy}"
    return BackendUnavailable(name, reason=reason, broken=idle, refused=_is(code, _REFUSED))


def _is(code: str | int, known: tuple[str | int, ...]) -> bool:
    return code in known or (isinstance(code, str) and code[:2] in known)


def _code(error: BaseException) -> str | int:
    """The SQLSTATE of PostgreSQL, or the number of MySQL; an empty text for what the client found out by itself."""
    of: Any = error
    while of is not None:
        code = getattr(of, "sqlstate", None) or getattr(of, "pgcode", None)
        number = of.args[0] if of.args else None
        if isinstance(number, int):  # MySQL's drivers: some know an SQLSTATE, too, which says less
            return number
        if isinstance(code, str):
            return code
        of = of.__cause__
    return ""


def _first_line(error: BaseException) -> str:
    words = str(error).strip() or type(error).__name__
    return printable(words.splitlines()[0])
