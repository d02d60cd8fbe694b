"""The statements with which SQLite commits although none of them is a COMMIT.

Without autocommit, sqlite3 sends BEGIN only before INSERT, UPDATE, DELETE and REPLACE. To SQLite, a savepoint that
comes before those is the whole transaction, and its RELEASE a COMMIT; any other write is committed by itself.
"""

from __future__ import annotations

from typing import Any

from dlock_core.sql.statement_kinds import (
    commits_by_itself,
    ends_transaction,
    is_data_statement,
    savepoint_changes,
    surely_reads,
)

__all__ = ["ImplicitCommits"]


class ImplicitCommits:
    """Follows the statements of one transaction without autocommit.

    In doubt a statement counts as a commit: then a lost lease is refused earlier than necessary, and never too late.
    """

    def __init__(self) -> None:
        self._is_begun_by_savepoint = True
        """Whether a savepoint may have begun the open transaction; earlier statements are not known."""
        self._name: str | None = None
        """The name of that savepoint, None if it is not known, or if another one has it, too."""
        self._is_rollback = False
        """Whether the latest statement rolls back to that savepoint."""
        self._is_empty = False
        """Whether all work since that savepoint was rolled back."""
        self.has_written = True
        """Whether the open transaction may have changed anything: if not, its work may be repeated after a commit."""

    def is_next(self, driver: Any, sql: str) -> bool:
        """Return whether a statement may commit that is about to be sent; to be called before each one."""
        is_data = is_data_statement(sql)
        changes = [] if is_data else savepoint_changes(sql)
        was_empty, self._is_empty, self._is_rollback = self._is_empty, False, False
        if driver is not None and not driver.in_transaction:
            self._is_begun_by_savepoint = not (is_data or ends_transaction(sql))
            self._name = next((name for verb, name in changes if verb == "SAVEPOINT"), None)
            self.has_written = not surely_reads(sql)
            return commits_by_itself(sql)
        if not self._is_begun_by_savepoint:
            return False
        self.has_written = self.has_written or not surely_reads(sql)
        verbs = {verb for verb, name in changes if None in (name, self._name) or name == self._name}
        if "RELEASE" in verbs:
            return not was_empty  # Django releases a savepoint after its rollback: nothing is committed then.
        if ("SAVEPOINT", self._name) in changes:
            self._name = None
        self._is_rollback = self._name is not None and ("ROLLBACK", self._name) in changes
        return False

    def note_sent(self) -> None:
        """Record that the latest statement was executed."""
        self._is_empty = self._is_rollback
