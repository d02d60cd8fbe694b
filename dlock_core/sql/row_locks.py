"""How to lock a row: the options of `lock_row`, checked before any I/O, and the time limit of each database."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from dlock_core.options import check_switches, wait_seconds

if TYPE_CHECKING:
    from dlock_core.options import Seconds

__all__ = [
    "MAX_TIMEOUT_S",
    "MYSQL_LIMIT",
    "MYSQL_RESTORE",
    "POSTGRESQL_LIMIT",
    "POSTGRESQL_RESTORE",
    "RowLock",
    "RowLockOptions",
    "milliseconds",
    "whole_seconds",
]

# PostgreSQL evaluates a scalar subquery in a WHERE once, before it finds and locks the first row. So the locking
# statement itself sets the limit, without another round trip; `dlock.lock_timeout` keeps the former limit.
POSTGRESQL_LIMIT: Final = (
    "(SELECT set_config('dlock.lock_timeout', current_setting('lock_timeout'), true) "
    "|| set_config('lock_timeout', {wait}, true))"
)
# A query that cannot find a row may never evaluate the subquery: then there is nothing to restore.
POSTGRESQL_RESTORE: Final = (
    "SELECT set_config('lock_timeout', former, true), set_config('dlock.lock_timeout', '', true) "
    "FROM current_setting('dlock.lock_timeout', true) AS former WHERE former <> ''"
)
MYSQL_LIMIT: Final = "SET @dlock_wait = @@SESSION.innodb_lock_wait_timeout, @@SESSION.innodb_lock_wait_timeout = {wait}"
MYSQL_RESTORE: Final = "SET @@SESSION.innodb_lock_wait_timeout = @dlock_wait"

_MAX_TIMEOUT_MS: Final = 2**31 - 1
MAX_TIMEOUT_S: Final = 100_000_000
"""The largest innodb_lock_wait_timeout."""


class RowLockOptions(TypedDict, total=False):
    """The options of a row lock, which `lock_row` explains; `skip_locked`, which changes the result, is not one."""

    shared: bool
    nowait: bool
    wait: Seconds | None
    no_key: bool
    key: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLock:
    """How to lock rows; raises ValueError for options that contradict each other."""

    shared: bool = False
    nowait: bool = False
    skip_locked: bool = False
    wait: Seconds | None = None
    no_key: bool = True
    key: bool = False

    def __post_init__(self) -> None:
        wait_seconds(self.wait)
        check_switches(
            shared=self.shared,
            nowait=self.nowait,
            skip_locked=self.skip_locked,
            no_key=self.no_key,
            key=self.key,
        )
        if self.nowait + self.skip_locked + (self.wait is not None) > 1:
            raise ValueError(
                "nowait, skip_locked and wait each say what to do about a locked row: give only one of them"
            )
        if self.key and not self.shared:
            raise ValueError("key=True selects the weaker of two shared locks: give shared=True as well")

    @property
    def at_once(self) -> bool:
        """Whether a locked row is refused without a wait."""
        return self.nowait or wait_seconds(self.wait) == 0

    @property
    def limit(self) -> float | None:
        """The seconds to wait for each row; None for as long as the database waits."""
        return wait_seconds(self.wait) or None


def milliseconds(wait: float) -> int:
    """Return a wait as `lock_timeout` of PostgreSQL or `busy_timeout` of SQLite: at least 1, as 0 differs."""
    return max(1, min(math.ceil(min(wait, MAX_TIMEOUT_S) * 1000), _MAX_TIMEOUT_MS))


def whole_seconds(wait: float) -> int:
    """Return a wait as WAIT of MariaDB or `innodb_lock_wait_timeout` of MySQL: whole seconds, rounded up."""
    return max(1, math.ceil(min(wait, MAX_TIMEOUT_S)))
