"""Which errors mean "another transaction was faster, start over", and the loop that starts over.

It starts over only when every transaction that began in the attempt is known to be rolled back: the integrations
report each of them to the attempts that their context is in.
"""

from __future__ import annotations

import inspect
import math
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from dlock_core.errors import DLockError, RowLocked, StaleObject, StaleToken
from dlock_core.observability import hooks
from dlock_core.runtime import ASYNCIO, BLOCKING, RNG, full_jitter, run
from dlock_core.sql.driver_errors import DatabaseFailure, classify
from dlock_core.transactions.tie import Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

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
"""How often the work is done, at most, unless the caller says otherwise."""
WITHIN_S: Final = 5.0
"""Seconds after the first attempt in which others may start, unless the caller says otherwise."""

SWALLOWED: Final = (
    "retry_on_conflict: the function has swallowed an error that undid its transaction, so that nothing of what came "
    "before it would be committed: let the error pass, or, unless it is a deadlock, run the statement in a savepoint"
)
"""Why an attempt that ended without an error is refused."""

MIN_FIRST_PAUSE_S: Final = 0.01
"""Seconds to which the first pause is limited, at least."""
FIRST_PAUSE_IN_ATTEMPTS: Final = 4
"""To how many times the length of the attempt the first pause is limited, where that is more.

A slow or busy database needs longer pauses: without them those who come back meet each other again.
"""


def is_conflict(error: BaseException) -> bool:
    """Return whether doing all of the work again, in a new transaction, may well succeed."""
    if isinstance(error, StaleObject | StaleToken | RowLocked) or _is_stale_data(error):
        return True
    return classify(error) in (DatabaseFailure.DEADLOCK, DatabaseFailure.SERIALIZATION, DatabaseFailure.LOCK_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often to do work: at most `attempts` times, and never starting later than `within` seconds after the first.

    Raises TypeError or ValueError for `attempts` that are not a whole number from 1, and a `within` that is not finite.
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
    """A transaction in an attempt; `work` says of what, in errors: "work on 'default'"."""

    work: str
    outcome: Outcome | None = None
    """None while it is not known to have ended."""
    is_pending: Callable[[], bool] = bool
    """Says, once the attempt is over, whether work in it remains although no end was heard of."""

    def settle(self, outcome: Outcome) -> None:
        """Record how it has ended."""
        self.outcome = outcome

    def obstacle(self) -> str:
        """Return why its work may stand, as a part of a sentence; an empty text when it is undone."""
        if self.outcome is Outcome.COMMITTED:
            return f"{self.work} is committed"
        if self.outcome is Outcome.UNKNOWN:
            return f"{self.work} may be committed"
        if self.outcome is None and self.is_pending():
            return f"{self.work} is in a transaction that goes on"
        return ""


class RetryAttempt:
    """One run of the work, as a block: what began in it, in this context and in the threads that have copied it."""

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
        """Return why it must not be made again, as a part of a sentence; an empty text when nothing of it remains."""
        return next((reason for part in list(self.parts.values()) if (reason := part.obstacle())), "")


current_attempts: Final[ContextVar[tuple[RetryAttempt, ...]]] = ContextVar("dlock_attempts", default=())
"""The attempts that this context is in, the outermost first."""


def is_retry() -> bool:
    """Return whether the code that asks runs again because of a conflict; False outside of `retry_on_conflict`.

    Versions cost no lock while conflicts are rare, but those who want one row at the same time can lose it to each
    other again and again. A function that locks the row when it runs again waits in the row's queue instead, and then
    cannot lose it: under READ COMMITTED its second attempt is its last one.
    """
    return any(attempt.number > 1 and not attempt.is_over for attempt in current_attempts.get())


def report(key: object, make: Callable[[], AttemptedWork]) -> None:
    """Count a transaction, known by its key, as a part of all the attempts that this context is in."""
    inside = [attempt for attempt in current_attempts.get() if not attempt.is_over and key not in attempt.parts]
    if inside:
        part = make()
        for attempt in inside:
            attempt.parts[key] = part


def claim_databases(binds: frozenset[Hashable]) -> bool:
    """Assign databases to the innermost attempt; return False when an attempt around it has one of them already.

    No databases at all stand for those that are not known, which may be any.
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
    """Do `work` until it ends without a conflict, pausing with full jitter between attempts.

    The limit of the pauses begins at 10 ms, or at four times the length of the attempt, and doubles up to 1 s.

    The last conflict is raised, with a note that says how many attempts were made, or why it was not made again
    although there was time: something of it is, or may be, committed. Any other error, and a cancellation, is raised
    at once. `work` must undo what it did when it fails: open its own transaction in it.
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
    """Wrap `function` so that each call makes `attempt(args, kwargs)` until one ends without a conflict.

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
    """Raise TypeError for what cannot be done again as a whole: a generator function, a class, what is no function."""
    if not callable(function) or inspect.isclass(function):
        raise TypeError(f"retry_on_conflict decorates a function or method, not {function!r:.80}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function.__qualname__} is a generator: what it has yielded cannot be taken back")


def check_answer(answer: T) -> T:
    """Pass on what a blocking function has returned; raise TypeError for what would do its work after COMMIT."""
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("a blocking function answered with a coroutine, which would run after COMMIT: make it async")
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        raise TypeError("a function answered with a generator, which would run after COMMIT: return a list")
    return answer


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
    """SQLAlchemy's own error for a `version_id_col` that has moved; it is imported no more than a driver is."""
    names = [(kind.__module__, kind.__name__) for kind in type(error).__mro__]
    return ("sqlalchemy.orm.exc", "StaleDataError") in names
