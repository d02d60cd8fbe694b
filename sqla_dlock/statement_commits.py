"""Sends the statements of a Connection, and reports those that commit work although no COMMIT is sent.

SQLAlchemy passes every statement to `Connection._execute_context(dialect, constructor, statement, parameters, options,
statement, parameters, ...)`, whose arguments are called `args` here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dlock_core.sql.committed_statements import commits_work, has_changed, remains_after_error
from sqla_dlock.begun import is_autocommit, may_write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection

__all__ = ["may_have_changed", "may_remain", "reporting"]


def reporting(connection: Connection, note: Callable[[], None]) -> Callable[..., Any] | None:
    """Return what sends the statements of a connection, and calls `note()` for each that may have committed work.

    Return None where no statement commits by itself, and for SQLite, whose driver shows whether a transaction is open:
    `ConnectionTracker` asks it.
    """
    send = connection._execute_context  # noqa: SLF001 - the events come before the outcome of a statement is known
    if connection.dialect.name == "sqlite":
        return None
    if is_autocommit(connection):
        return partial(_send_in_autocommit, send, note)
    if connection.dialect.name in ("mysql", "mariadb"):
        return _OnMySQL(send, note).send
    return None


def may_have_changed(args: Sequence[Any], answer: Any) -> bool:
    """Return whether a write outside of a transaction, by its arguments and answer, may have changed anything."""
    rows = None if answer.returns_rows else answer.rowcount
    return has_changed(str(args[2]), rows, has_many_parameters=_has_many_parameters(args))


def may_remain(args: Sequence[Any], error: BaseException) -> bool:
    """Return whether a write outside of a transaction may have changed anything although it has raised an error."""
    return remains_after_error(str(args[2]), error, has_many_parameters=_has_many_parameters(args))


def _has_many_parameters(args: Sequence[Any]) -> bool:
    return len(args) > 6 and len(args[6]) > 1  # the fourth has them too, but not for the driver's own SQL


def _send_in_autocommit(send: Callable[..., Any], note: Callable[[], None], *args: Any, **more: Any) -> Any:
    if not may_write(str(args[2])):
        return send(*args, **more)
    try:
        answer = send(*args, **more)
    except BaseException as error:
        if may_remain(args, error):
            note()
        raise
    if may_have_changed(args, answer):
        note()
    return answer


class _OnMySQL:
    """Sends the statements of one transaction on MySQL or MariaDB."""

    def __init__(self, send: Callable[..., Any], note: Callable[[], None]) -> None:
        self._send, self._note = send, note
        self._has_written = False

    def send(self, *args: Any, **more: Any) -> Any:
        sql = str(args[2])
        self._has_written = self._has_written or may_write(sql)
        if commits_work(sql, has_written=self._has_written):
            self._note()
        return self._send(*args, **more)
