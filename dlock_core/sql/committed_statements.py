"""Which statements leave committed work although no COMMIT is sent: each write in autocommit mode, and DDL on MySQL.

An attempt of `retry_on_conflict` that has sent one is not repeated. In doubt, a statement counts as one that has. What
a function that it calls has written cannot be seen, nor what the trigger of an UPDATE has if that finds no rows.
"""

from __future__ import annotations

import re
from typing import Final

from dlock_core.sql.driver_errors import is_refusal
from dlock_core.sql.statement_kinds import commits_implicitly, ends_transaction, is_single

__all__ = ["commits_work", "has_changed", "remains_after_error"]

_UNDONE_AS_A_WHOLE: Final = re.compile(
    r"\W*(?:INSERT|UPDATE|DELETE|WITH|MERGE|REPLACE|ALTER|TRUNCATE|CREATE\b(?!.*\b(?:SELECT|OR\s+REPLACE)\b))\b"
    r"(?!.*\b(?:OR\s+FAIL|CONCURRENTLY)\b)",
    re.IGNORECASE,
)
"""What leaves nothing if it fails. CALL and DO may have committed before, and DROP may have dropped another table."""
_CHANGES_ROWS: Final = re.compile(r"\W*(?:UPDATE|DELETE)\b", re.IGNORECASE)
"""What has changed nothing if it counts no rows. An INSERT may have a trigger that writes elsewhere."""


def has_changed(sql: str, rows: int | None, *, has_many_parameters: bool) -> bool:
    """Return whether a write in autocommit mode may have changed anything.

    Args:
        sql: The text of the statement.
        rows: How many rows it has counted; None if it returns rows, and counts them when they are fetched.
        has_many_parameters: Whether it was executed several times, of which a driver may report the last.
    """
    return rows != 0 or has_many_parameters or not is_single(sql, _CHANGES_ROWS)


def remains_after_error(sql: str, error: BaseException, *, has_many_parameters: bool) -> bool:
    """Return whether a write in autocommit mode may have changed anything although it has raised an error."""
    return has_many_parameters or not is_refusal(error) or not is_single(sql, _UNDONE_AS_A_WHOLE)


def commits_work(sql: str, *, has_written: bool) -> bool:
    """Return whether MySQL and MariaDB commit work with a statement of a transaction, even if it fails, as DDL does.

    After SET autocommit = 1, it is what follows that is committed. `has_written` means that this statement, or one
    before it, may have written: without that, BEGIN and ROLLBACK have nothing to commit. DDL counts in any case,
    because what the driver's cursor, or a function, has written before cannot be seen.
    """
    return commits_implicitly(sql) and (has_written or not ends_transaction(sql))
