"""Which statements leave committed work although no COMMIT is sent: each write in autocommit mode, and DDL on MySQL.

An attempt of `retry_on_conflict` that has sent one is not repeated. In doubt, a statement counts as one that has. What
a function that it calls has written cannot be seen, nor what the trigger of an UPDATE has if that finds no rows.
"""

from __future__ import annotations

import re
from typing import Final

from dlock_core.sql.driver_errors import is_refusal
from dlock_core.sql.statement_kinds import commits_implicitly, ends_transaction

__all__ = ["commits_work", "has_changed", "remains_after_error"]

_ONE_WRITE: Final = re.compile(
    r"\s*(?:(?:INSERT|UPDATE)\b(?!\s+OR\s+FAIL\b)|DELETE\b|WITH\b|MERGE\b|REPLACE\b)[^;]*", re.IGNORECASE
)
"""One statement, which the database undoes as a whole if it fails; CALL and DO may have committed before."""
_ONE_CHANGE_OF_ROWS: Final = re.compile(r"\s*(?:UPDATE|DELETE)\b[^;]*", re.IGNORECASE)
"""One statement that has changed nothing if it counts no rows; an INSERT may have a trigger that writes elsewhere."""


def has_changed(sql: str, rows: int | None, *, has_many_parameters: bool) -> bool:
    """Return whether a write in autocommit mode may have changed anything.

    Args:
        sql: The text of the statement.
        rows: How many rows it has counted; None if it returns rows, and counts them when they are fetched.
        has_many_parameters: Whether it was executed several times, of which a driver may report the last.
    """
    return rows != 0 or has_many_parameters or _ONE_CHANGE_OF_ROWS.fullmatch(sql) is None


def remains_after_error(sql: str, error: BaseException, *, has_many_parameters: bool) -> bool:
    """Return whether a write in autocommit mode may have changed anything although it has raised an error."""
    return has_many_parameters or _ONE_WRITE.fullmatch(sql) is None or not is_refusal(error)


def commits_work(sql: str, *, has_written: bool) -> bool:
    """Return whether MySQL and MariaDB commit work of the open transaction with a statement, even if that fails.

    After SET autocommit = 1, each statement that follows is committed.
    """
    return commits_implicitly(sql) and (has_written or not ends_transaction(sql))
