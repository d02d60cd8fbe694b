"""Which errors mean "another transaction was faster, retry", and the loop that retries.

It retries only if every transaction that began in the attempt is known to be rolled back: the integrations report each
transaction to the attempts of their context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from dlock_core.errors import DLockError, RowLocked, StaleObject, StaleToken
from dlock_core.flow import flow_variable
from dlock_core.late import LateWork
from dlock_core.observability import hooks
from dlock_core.runtime import ASYNCIO, BLOCKING, RNG, full_jitter, run
from dlock_core.sql.driver_errors import DatabaseFailure, classify
from dlock_core.transactions.tie import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from contextvars import ContextVar

    from dlock_core.options import Seconds
    from dlock_core.runtime import Runtime

__all__ = [
    "ATTEMPTS",
    "SWALLOWED",
    "WITHIN_S",
    "AttemptedWork",
    "Policy",
    "RetryAttempt",
    "check_answer",
    "check_function",
    "claim_databases",
    "current_attempts",
    "is_conflict",
    "is_retry",
    "report",
    "retry",
    "with_retry",
]

T = TypeVar("T")

ATTEMPTS: Final = 10
"""Default for the largest number of attempts."""
WITHIN_S: Final = 5.0
"""Default for the number of seconds after the start of the first attempt in which others may start."""

SWALLOWED: Final = (
    "retry_on_conflict: the function has swallowed an error that undid its transaction, so that nothing of what came "
    "before it would be committed: let the error pass, or, unless it is a deadlock, run the statement in a savepoint"
)
"""Why an attempt that ended without an error is refused."""

_LATE_WORK: Final = LateWork(
    "retry_on_conflict", "COMMIT", "return a list, because what is yielded cannot be taken back"
)

MIN_FIRST_PAUSE_S: Final = 0.01
"""Smallest limit of the first pause, in seconds."""
FIRST_PAUSE_IN_ATTEMPTS: Final = 4
"""Limit of the first pause as a multiple of the attempt's duration, if that is longer.

A slow or busy database needs longer pauses: without them the retries collide again.
"""


def is_conflict(error: BaseException) -> bool:
    """Return whether repeating all of the work in a new transaction is likely to succeed."""
    if isinstance(error, StaleObject | StaleToken | RowLocked) or _is_stale_data(error):
        return True
    return classify(error) in (DatabaseFailure.DEADLOCK, DatabaseFailure.SERIALIZATION, DatabaseFailure.LOCK_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often to attempt work: at most `attempts` times, none starting later than `within` seconds after the first.

    Raises TypeError or ValueError if `attempts` is not a whole number from 1, or `within` is not finite.
    """

    attempts: int = ATTEMPTS
    within: Seconds | None = WITHIN_S

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise TypeError(f"attempts is a whole number, not {type(self.attempts).__name__}: {self.attempts!r:.80}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1 (one try, no retry), not {self.attempts}")
        _limit(self.within)


@dataclass(eq=False, slots=True)
class AttemptedWork:
    """A transaction in an attempt; `work` describes it in errors: "work on 'default'"."""

    work: str
    outcome: Outcome | None = None
    """None until it is known to have ended."""
    is_pending: Callable[[], bool] = bool
    """Returns, once the attempt is over, whether its work remains although no end was reported."""

    def settle(self, outcome: Outcome) -> None:
        """Record how it has ended."""
        self.outcome = outcome

    def obstacle(self) -> str:
        """Return why its work may remain, as a part of a sentence; an empty text if it is undone."""
        if self.outcome is Outcome.COMMITTED:
            return f"{self.work} is committed"
        if self.outcome is Outcome.UNKNOWN:
            return f"{self.work} may be committed"
        if self.outcome is None and self.is_pending():
            return f"{self.work} is in a transaction that goes on"
        return ""


class RetryAttempt:
    """One run of the work, as a block, with the transactions begun in this context and in threads that copied it."""

    def __init__(self, number: int) -> None:
        self.number = number
        """1 is the first."""
        self.binds: frozenset[Hashable] = frozenset()
        self.parts: dict[object, AttemptedWork] = {}
        self.is_over = False

    def __enter__(self) -> Self:
        self._token = current_attempts.set((*current_attempts.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        current_attempts.reset(self._token)

    def obstacle(self) -> str:
        """Return why it must not be repeated, as a part of a sentence; an empty text if nothing of it remains."""
        return next((reason for part in list(self.parts.values()) if (reason := part.obstacle())), "")


current_attempts: Final[ContextVar[tuple[RetryAttempt, ...]]] = flow_variable("dlock_attempts", ())
"""The attempts of this context, the outermost first."""


def is_retry() -> bool:
    """Return whether the calling code is being retried after a conflict; False outside of `retry_on_conflict`.

    Versions need no lock while conflicts are rare, but writers of the same row can overtake each other again and again.
    A function that locks the row when it is retried waits in the row's queue instead, and then cannot be overtaken:
    under READ COMMITTED its second attempt is its last one.
    """
    return any(attempt.number > 1 and not attempt.is_over for attempt in current_attempts.get())


def report(key: object, make: Callable[[], AttemptedWork]) -> None:
    """Count a transaction, identified by its key, as a part of all attempts of this context."""
    inside = [attempt for attempt in current_attempts.get() if not attempt.is_over and key not in attempt.parts]
    if inside:
        part = make()
        for attempt in inside:
            attempt.parts[key] = part


def claim_databases(binds: frozenset[Hashable]) -> bool:
    """Assign databases to the innermost attempt; return False if an attempt around it already has one of them.

    An empty set means that the databases are not known, and may be any.
    """
    *around, own = current_attempts.get()
    own.binds = binds
    return all(outer.is_over or (binds and outer.binds and not binds & outer.binds) for outer in around)


async def retry(
    runtime: Runtime,
    work: Callable[[], Awaitable[T]],
    policy: Policy,
    draw: Callable[[], float] = RNG.random,
) -> T:
    """Repeat `work` until it ends without a conflict, pausing with full jitter between attempts.

    The limit of the pauses begins at 10 ms, or at four times the length of the attempt, and doubles up to 1 s.

    Raises the last conflict, with a note that says how many attempts were made, or why the work was not retried
    although there was time: a part of it is, or may be, committed. Any other error, and a cancellation, is raised at
    once. `work` must undo its effects when it fails: it has to open its own transaction.
    """
    give_up = runtime.now() + _limit(policy.within)
    number = 1
    while True:
        attempt, began = RetryAttempt(number), runtime.now()
        try:
            with attempt:
                return await work()
        except Exception as error:
            if not is_conflict(error):
                raise
            if obstacle := attempt.obstacle():
                error.add_note(f"not tried again: {obstacle}")
                raise
            now = runtime.now()
            pause = full_jitter(number, draw(), base=max(MIN_FIRST_PAUSE_S, FIRST_PAUSE_IN_ATTEMPTS * (now - began)))
            if number == policy.attempts or now + pause > give_up:
                error.add_note(f"gave up after {number} attempt{'s' * (number > 1)}")
                raise
            _tell(error, pause)
        await runtime.sleep(pause)
        number += 1


def with_retry(
    function: Callable[..., Any], policy: Policy, attempt: Callable[..., Any], *, is_async: bool
) -> Callable[..., Any]:
    """Wrap `function` so that each call repeats `attempt(args, kwargs)` until one ends without a conflict.

    Args:
        function: What the user decorates; its name and docstring are kept.
        policy: How often, and for how long.
        attempt: Opens a transaction and calls `function` in it; a coroutine function if `is_async`.
        is_async: Wait by yielding to the event loop.
    """

    @wraps(function)
    def blocking(*args: Any, **kwargs: Any) -> Any:
        async def work() -> Any:
            return attempt(args, kwargs)

        return run(retry(BLOCKING, work, policy))

    @wraps(function)
    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        return await retry(ASYNCIO, partial(attempt, args, kwargs), policy)

    return awaiting if is_async else blocking


def check_function(function: Any) -> None:
    """Raise TypeError for what cannot be retried as a whole: a task, a generator, a class, anything but a function."""
    _LATE_WORK.refuse_function(function)


def check_answer(function: Any, answer: Any) -> Any:
    """Return the result of a function; raise TypeError if it would do its work after COMMIT."""
    return _LATE_WORK.refuse_answer(function, answer, "make the function async, and await it there")


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


def _is_stale_data(error: BaseException) -> bool:
    """Whether this is SQLAlchemy's error for a changed `version_id_col`; SQLAlchemy is not imported for the check."""
    names = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    return ("sqlalchemy.orm.exc", "StaleDataError") in names
