"""Which errors mean "somebody was faster, start over", and the loop that starts over.

A database error is told by its driver's code, never by its text. No driver is imported: a class knows its module.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core import hooks
from dlock_core.backoff import CHANCE, full_jitter
from dlock_core.errors import DLockError, RowLocked, StaleObject, StaleToken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dlock_core.deadline import Seconds
    from dlock_core.runtime import Runtime

__all__ = ["Policy", "Trouble", "classify", "is_conflict", "retry"]

T = TypeVar("T")


class Trouble(enum.Enum):
    """What a database error says about other transactions."""

    DEADLOCK = "deadlock"
    SERIALIZATION = "serialization failure"
    LOCK_TIMEOUT = "lock timeout"  # or NOWAIT: PostgreSQL and MariaDB give both the same code
    DISCONNECT = "disconnect"


_SQLSTATES: Final = {
    "40P01": Trouble.DEADLOCK,
    "40001": Trouble.SERIALIZATION,
    "55P03": Trouble.LOCK_TIMEOUT,
    "57P01": Trouble.DISCONNECT,  # the administrator ended the session
    "57P02": Trouble.DISCONNECT,  # another session crashed
    "57P03": Trouble.DISCONNECT,  # the server is starting or stopping
    "57P05": Trouble.DISCONNECT,  # idle_session_timeout
    "25P03": Trouble.DISCONNECT,  # idle_in_transaction_session_timeout
    "25P04": Trouble.DISCONNECT,  # transaction_timeout
}
_MYSQL_NUMBERS: Final = {
    1213: Trouble.DEADLOCK,
    3058: Trouble.DEADLOCK,  # among GET_LOCKs, MySQL 8
    1020: Trouble.SERIALIZATION,  # innodb_snapshot_isolation
    1205: Trouble.LOCK_TIMEOUT,
    3572: Trouble.LOCK_TIMEOUT,  # NOWAIT, MySQL 8
    **dict.fromkeys((0, 1053, 1927, 2002, 2003, 2006, 2013, 2055, 4031), Trouble.DISCONNECT),
}
_SQLITE_CODES: Final = {
    5: Trouble.LOCK_TIMEOUT,  # SQLITE_BUSY
    6: Trouble.LOCK_TIMEOUT,  # SQLITE_LOCKED
    517: Trouble.SERIALIZATION,  # SQLITE_BUSY_SNAPSHOT: it read before another connection wrote
}


def classify(error: BaseException) -> Trouble | None:
    """Say what trouble with other transactions a database error reports; None for any other error.

    Looks through the layers that wrap or hide a driver's error (Django, SQLAlchemy, dlock, "transaction is aborted"),
    but not through an error of the application: raising that was a decision.
    """
    for layer in _layers(error):
        for driver, read in _DRIVERS.items():
            if _comes_from(layer, driver) and (trouble := read(layer)):
                return trouble
    return None


def is_conflict(error: BaseException) -> bool:
    """Say whether doing all of the work again, in a new transaction, may well succeed."""
    if isinstance(error, StaleObject | StaleToken | RowLocked) or _is_stale_data(error):
        return True
    return classify(error) in (Trouble.DEADLOCK, Trouble.SERIALIZATION, Trouble.LOCK_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often to do work: at most `attempts` times, and never starting later than `within` seconds after the first.

    Raises TypeError or ValueError for `attempts` that are not a whole number from 1, and a `within` that is not finite.
    """

    attempts: int = 5
    within: Seconds | None = None

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise TypeError(f"attempts is a whole number, not {type(self.attempts).__name__}: {self.attempts!r:.80}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1 (one try, no retry), not {self.attempts}")
        _limit(self.within)


async def retry(
    runtime: Runtime,
    work: Callable[[], Awaitable[T]],
    policy: Policy,
    draw: Callable[[], float] = CHANCE.random,
    *,
    may_start_over: Callable[[BaseException], bool] = is_conflict,
) -> T:
    """Do `work` until it ends without a conflict, pausing with full jitter between attempts.

    The last conflict is raised, with a note that says how many attempts were made; any other error, and a cancellation,
    is raised at once. `work` must undo what it did when it fails: open its own transaction in it. `may_start_over`
    is asked what a conflict is.
    """
    give_up = runtime.now() + _limit(policy.within)
    attempt = 1
    while True:
        try:
            return await work()
        except Exception as error:
            if not may_start_over(error):
                raise
            pause = full_jitter(attempt, draw())
            if attempt == policy.attempts or runtime.now() + pause > give_up:
                error.add_note(f"gave up after {attempt} attempt{'s' * (attempt > 1)}")
                raise
            _tell(error, pause)
        await runtime.sleep(pause)
        attempt += 1


def _tell(error: BaseException, pause: float) -> None:
    name, trouble = (error.name, None) if isinstance(error, DLockError) else ("", classify(error))
    hooks.emit("retry", name, 0, pause, type(error).__name__ if trouble is None else trouble.value)


def _limit(within: Seconds | None) -> float:
    if within is None:
        return math.inf
    seconds = within.total_seconds() if isinstance(within, timedelta) else within
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"within is seconds (int or float), a timedelta or None, not {type(within).__name__}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"within must be None (no limit) or a finite number of seconds from 0, not {within!r}")
    return seconds


def _layers(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen and _comes_from(error, *_DRIVERS, *_WRAPPERS):
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_stale_data(error: BaseException) -> bool:
    """SQLAlchemy's own error for a `version_id_col` that has moved; it is imported no more than a driver is."""
    names = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    return ("sqlalchemy.orm.exc", "StaleDataError") in names


def _comes_from(error: BaseException, *packages: str) -> bool:
    modules = [f"{kind.__module__}." for kind in type(error).__mro__]
    return any(module.startswith(f"{package}.") for module in modules for package in packages)


def _by_sqlstate(error: Any) -> Trouble | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg 3 and asyncpg, psycopg2
    if state is None:  # the server sends one with every error: this one the client found out by itself
        return Trouble.DISCONNECT if type(error).__name__ == "OperationalError" else None
    return Trouble.DISCONNECT if state.startswith("08") else _SQLSTATES.get(state)


def _by_number(error: Any) -> Trouble | None:
    return _MYSQL_NUMBERS.get(error.args[0]) if error.args and isinstance(error.args[0], int) else None


def _by_sqlite_code(error: Any) -> Trouble | None:
    code = getattr(error, "sqlite_errorcode", None) or 0
    return _SQLITE_CODES.get(code) or _SQLITE_CODES.get(code & 0xFF)


def _by_invalidation(error: Any) -> Trouble | None:
    return Trouble.DISCONNECT if getattr(error, "connection_invalidated", False) else None


_DRIVERS: Final[dict[str, Callable[[Any], Trouble | None]]] = {
    "psycopg": _by_sqlstate,
    "psycopg2": _by_sqlstate,
    "asyncpg": _by_sqlstate,
    "MySQLdb": _by_number,
    "pymysql": _by_number,  # its errors have an SQLSTATE too, but 40001 for a deadlock
    "asyncmy": _by_number,
    "sqlite3": _by_sqlite_code,
    "sqlalchemy": _by_invalidation,  # it knows more signs of a lost connection than a driver's code
}
_WRAPPERS: Final = ("django.db", "dlock_core")
