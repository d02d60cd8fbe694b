"""Statements of ours on a connection of Django: logged and wrapped as the application's are, on one cursor for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.backends.utils import CursorDebugWrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["send"]


def send(connection: Any, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
    """Send a statement with `%(name)s` parameters; return the number of rows changed, and the first row of its answer.

    The number counts only where the statement has no answer.
    """
    if connection.vendor == "postgresql":
        cursor = _cursor_of(connection)
        cursor.execute(sql, params)
        answer = cursor.cursor  # The driver's: it has the whole answer, so that no error is left to be translated.
        return (0, answer.fetchone()) if sql.startswith(("SELECT", "WITH")) else (answer.rowcount, None)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        answer = cursor.cursor
        return answer.rowcount, answer.fetchone() if answer.description else None


def _cursor_of(connection: Any) -> Any:
    """Return a cursor that is kept for the next statement: to make one costs as much as all the rest.

    A new one is made where that would examine the connection, or where it would be of another kind: one that logs, or
    what a tool has put in the place of `connection.cursor`.
    """
    if "cursor" in vars(connection):
        return connection.cursor()
    driver, cursor = vars(connection).get("_dlock_cursor", (None, None))
    if (
        cursor is None
        or driver is not connection.connection
        or (connection.health_check_enabled and not connection.health_check_done)
        or isinstance(cursor, CursorDebugWrapper) is not connection.queries_logged
    ):
        cursor = connection.cursor()
        vars(connection)["_dlock_cursor"] = connection.connection, cursor
    return cursor
