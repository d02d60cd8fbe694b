"""How to lock a row: the options of `lock_row`, checked before any I/O, and what a wait is to each database."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from dlock_core.options import check_switches, wait_seconds

if TYPE_CHECKING:
    from dlock_core.options import Seconds

__all__ = [
    "MYSQL_LIMIT",
    "MYSQL_RESTORE",
    "POSTGRESQL_LIMIT",
    "POSTGRESQL_RESTORE",
    "RowLock",
    "RowLockOptions",
    "milliseconds",
    "whole_seconds",
]

# A scalar subquery: in a WHERE it is evaluated once, before the first row is found and locked.
POSTGRESQL_LIMIT: Final = (
    "(SELECT set_config('dlock.lock_timeout', current_setting('lock_timeout'), true) "
    "|| set_config('lock_timeout', {wait}, true))"
)
# Nothing to restore when the limit was never sent: a query that cannot find anything need not evaluate it.
POSTGRESQL_RESTORE: Final = (
    "SELECT set_config('lock_timeout', former, true), set_config('dlock.lock_timeout', '', true) "
    "FROM current_setting('dlock.lock_timeout', true) AS former WHERE former <> ''"
)
MYSQL_LIMIT: Final = "SET @dlock_wait = @@SESSION.innodb_lock_wait_timeout, @@SESSION.innodb_lock_wait_timeout = {wait}"
MYSQL_RESTORE: Final = "SET @@SESSION.innodb_lock_wait_timeout = @dlock_wait"

_LONGEST_MILLISECONDS: Final = 2**31 - 1
_LONGEST_SECONDS: Final = 100_000_000  # what innodb_lock_wait_timeout can be


class RowLockOptions(TypedDict, total=False):
    """The options of a row lock, but for `skip_locked`, which changes what is returned; `lock_row` explains them."""

    shared: bool
    nowait: bool
    wait: Seconds | None
    no_key: bool
    key: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLock:
    """How to lock rows; options that contradict each other raise ValueError."""

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
                "nowait, skip_locked and wait say different things about a locked row: give only one of them"
            )
        if self.key and not self.shared:
            raise ValueError("key=True is the weaker of two shared locks: give shared=True, too")

    @property
    def at_once(self) -> bool:
        """A row that is locked is refused without waiting."""
        return self.nowait or wait_seconds(self.wait) == 0

    @property
    def limit(self) -> float | None:
        """How many seconds to wait for each row; None for as long as the database does."""
        return wait_seconds(self.wait) or None


def milliseconds(wait: float) -> int:
    """Give the `lock_timeout` of PostgreSQL, `busy_timeout` of SQLite: at least 1, as 0 means something else there."""
    return max(1, min(math.ceil(min(wait, _LONGEST_SECONDS) * 1000), _LONGEST_MILLISECONDS))


def whole_seconds(wait: float) -> int:
    """Give the WAIT of MariaDB, `innodb_lock_wait_timeout` of MySQL: rounded up, at least 1."""
    return max(1, math.ceil(min(wait, _LONGEST_SECONDS)))
