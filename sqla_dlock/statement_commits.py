"""Statements that commit although no COMMIT is sent: each write in AUTOCOMMIT, and DDL on MySQL and MariaDB.

An attempt of `retry_on_conflict` that has sent one is not repeated. SQLite is not here: its driver shows whether a
transaction is open, and `ConnectionTracker` asks it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dlock_core.sql.driver_errors import is_refusal
from dlock_core.sql.statement_kinds import commits_implicitly
from sqla_dlock.begun import is_autocommit, may_write

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

__all__ = ["may_have_changed", "reporting"]


def reporting(connection: Connection, note: Callable[[], None]) -> Callable[..., Any] | None:
    """Return what sends the statements of a connection, and calls `note()` for each that may have committed work.

    In doubt a statement counts as one that has. Return None where no statement commits by itself.
    """
    send = connection._execute_context  # noqa: SLF001 - the events come before the outcome of a statement is known
    if connection.dialect.name == "sqlite":
        return None
    if is_autocommit(connection):
        return partial(_send_in_autocommit, send, note)
    if connection.dialect.name in ("mysql", "mariadb"):
        return _ImplicitCommits(send, note)
    return None


def may_have_changed(answer: Any) -> bool:
    """Return, after a statement that may write, whether it has changed anything, as far as its number of rows tells.

    An UPDATE of a version that is not there any more has not. RETURNING does not tell before its rows are fetched.
    """
    return bool(answer.returns_rows or answer.rowcount != 0)


def _send_in_autocommit(send: Callable[..., Any], note: Callable[[], None], *args: Any, **more: Any) -> Any:
    _, _, statement, parameters, *_ = args
    if not may_write(str(statement)):
        return send(*args, **more)
    try:
        answer = send(*args, **more)
    except BaseException as error:
        if len(parameters or ()) > 1 or not is_refusal(error):
            note()
        raise
    if may_have_changed(answer):
        note()
    return answer


class _ImplicitCommits:
    """Sends the statements of one transaction on MySQL or MariaDB."""

    def __init__(self, send: Callable[..., Any], note: Callable[[], None]) -> None:
        self._send, self._note = send, note
        self._has_written = False

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Send a statement; if it commits, what was written before is committed even if it fails."""
        sql = str(args[2])
        self._has_written = self._has_written or may_write(sql)
        if self._has_written and commits_implicitly(sql):
            self._note()
        return self._send(*args, **more)
