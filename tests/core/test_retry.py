import asyncio
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from datetime import timedelta
from typing import Any

import pytest

from dlock_core.errors import AcquireTimeout, DLockError, LeaseLost, RowLocked, StaleObject, StaleToken
from dlock_core.runtime import ASYNCIO, BLOCKING, run
from dlock_core.transactions.retry import AttemptedWork, Policy, claim_databases, is_conflict, is_retry, report, retry
from dlock_core.transactions.tie import Outcome
from tests.core.scripted import driver_error


class ByHand:
    """A runtime whose clock advances only in its pauses."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


class Work:
    """Raises the given errors in turn, then returns 42."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.runs = 0

    async def __call__(self) -> int:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return 42


def stale() -> StaleObject:
    return StaleObject("order", expected=1, found=2)


def one_after_the_other(*draws: float) -> Callable[[], float]:
    stream: Iterator[float] = iter(draws)
    return lambda: next(stream)


def postgresql(state: str) -> Exception:
    return driver_error("psycopg.errors", f"State{state}", sqlstate=state)


# -- which errors --


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (stale(), True),
        (StaleToken("a", token=1), True),
        (RowLocked("a"), True),
        (postgresql("40001"), True),
        (postgresql("40P01"), True),
        (postgresql("55P03"), True),
        (postgresql("57P01"), False),
        (postgresql("23505"), False),
        (AcquireTimeout("a", waited=1), False),
        (LeaseLost("a"), False),
        (DLockError("a"), False),
        (ValueError("a"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_conflict_is_what_a_new_transaction_may_cure(error: BaseException, expected: bool) -> None:
    assert is_conflict(error) is expected


def test_sqlalchemy_s_stale_data_is_a_conflict_and_another_s_is_none() -> None:
    own = driver_error("sqlalchemy.orm.exc", "StaleDataError", "expected to update 1 row(s); 0 were matched")
    derived = type("TheirStale", (type(own),), {"__module__": "shop.errors"})("stale")
    for error, expected in (
        (own, True),
        (derived, True),
        (driver_error("shop.errors", "StaleDataError"), False),
        (driver_error("sqlalchemy.orm.exc", "FlushError"), False),
    ):
        assert is_conflict(error) is expected


# -- the loop --


def test_work_is_done_again_until_it_ends_without_a_conflict() -> None:
    work = Work(stale(), postgresql("40P01"))
    assert run(retry(ByHand(), work, Policy(attempts=3))) == 42
    assert work.runs == 3


def test_last_conflict_is_raised_and_says_how_many_attempts_were_made() -> None:
    last = stale()
    work = Work(stale(), stale(), last)
    with pytest.raises(StaleObject) as caught:
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert caught.value is last
    assert caught.value.__notes__ == ["gave up after 3 attempts"]


@pytest.mark.parametrize(
    ("outcomes", "runs"),
    [
        ([], 2),
        ([Outcome.ROLLED_BACK], 2),
        ([Outcome.ROLLED_BACK, Outcome.COMMITTED], 1),
        ([Outcome.UNKNOWN, Outcome.ROLLED_BACK], 1),
    ],
)
def test_it_starts_over_only_when_every_transaction_of_the_attempt_is_known_to_be_rolled_back(outcomes, runs) -> None:
    made: list[int] = []

    async def work() -> None:
        made.append(1)
        for number, outcome in enumerate(outcomes):
            report(number, lambda outcome=outcome: AttemptedWork("work on 'a'", outcome))
        raise stale()

    with pytest.raises(StaleObject) as caught:
        run(retry(ByHand(), work, Policy(attempts=2)))
    assert len(made) == runs
    (note,) = caught.value.__notes__
    assert note.startswith("not tried again: work on 'a'" if runs == 1 else "gave up after 2 attempts")


def test_transaction_of_an_inner_loop_counts_for_the_outer_one() -> None:
    work = Work(stale())

    async def inner() -> int:
        report("a", lambda: AttemptedWork("work on 'a'", Outcome.COMMITTED))
        return 1

    async def outer() -> int:
        await retry(ByHand(), inner, Policy())
        return await work()

    with pytest.raises(StaleObject):
        run(retry(ByHand(), outer, Policy()))
    assert work.runs == 1


@pytest.mark.parametrize(
    ("outer", "inner", "allowed"), [("a", "a", False), ("ab", "b", False), ("a", "b", True), ("", "a", False)]
)
def test_attempt_inside_another_of_the_same_database_is_told(outer: str, inner: str, allowed: bool) -> None:
    async def inside() -> bool:
        return bool(claim_databases(frozenset(inner)))

    async def around() -> bool:
        assert claim_databases(frozenset(outer))
        return await retry(ByHand(), inside, Policy())

    assert run(retry(ByHand(), around, Policy())) is allowed


def test_work_knows_whether_it_runs_again() -> None:
    seen: list[bool] = []

    async def work() -> None:
        seen.append(is_retry())
        if len(seen) < 3:
            raise stale()

    assert is_retry() is False
    run(retry(ByHand(), work, Policy()))
    assert seen == [False, True, True]
    assert is_retry() is False


def test_what_outlives_the_work_with_its_context_does_not_run_again() -> None:
    contexts: list[Context] = []

    async def work() -> None:
        contexts.append(copy_context())
        if len(contexts) < 2:
            raise stale()

    run(retry(ByHand(), work, Policy()))
    assert [context.run(is_retry) for context in contexts] == [False, False]


def test_work_inside_a_retry_of_another_database_runs_again() -> None:
    seen: list[bool] = []

    async def inner() -> None:
        seen.append(is_retry())

    async def outer() -> None:
        await retry(ByHand(), inner, Policy())
        if len(seen) < 2:
            raise stale()

    run(retry(ByHand(), outer, Policy()))
    assert seen == [False, True]


def test_other_error_is_raised_at_once_and_without_a_note() -> None:
    work = Work(ValueError("no"))
    with pytest.raises(ValueError, match="no") as caught:
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert work.runs == 1
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_cancellation_is_never_retried(error: type[BaseException]) -> None:
    cancelled = error()
    cancelled.__cause__ = postgresql("40P01")
    work = Work(cancelled)
    with pytest.raises(error):
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert work.runs == 1


def test_pauses_grow_with_full_jitter() -> None:
    runtime = ByHand()
    run(retry(runtime, Work(*[stale() for _ in range(3)]), Policy(), draw=one_after_the_other(1.0, 0.5, 1.0)))
    assert runtime.pauses == pytest.approx([0.01, 0.01, 0.04])


def test_pauses_are_in_proportion_to_attempts_that_take_long() -> None:
    runtime = ByHand()
    work = Work(*[stale() for _ in range(4)])

    async def slow() -> int:
        runtime.time += 0.05
        return await work()

    run(retry(runtime, slow, Policy(), draw=lambda: 1.0))
    assert runtime.pauses == pytest.approx([0.2, 0.4, 0.8, 1.0])


def test_no_attempt_starts_after_the_deadline() -> None:
    runtime = ByHand()
    work = Work(*[stale() for _ in range(100)])
    with pytest.raises(StaleObject) as caught:
        run(retry(runtime, work, Policy(attempts=100, within=0.1), draw=lambda: 1.0))
    assert runtime.time - 1000 <= 0.1
    assert caught.value.__notes__ == ["gave up after 4 attempts"]  # pauses of 10, 20 and 40 ms; the next would be 80


def test_unless_told_otherwise_it_makes_ten_attempts_within_five_seconds() -> None:
    assert Policy() == Policy(attempts=10, within=5.0)
    runtime, work = ByHand(), Work(*[stale() for _ in range(100)])
    with pytest.raises(StaleObject):
        run(retry(runtime, work, Policy(), draw=lambda: 0.5))
    assert work.runs == 10
    assert max(runtime.pauses) == 0.5  # half of the longest, which is 1 s


def test_one_attempt_means_no_retry() -> None:
    work = Work(stale())
    with pytest.raises(StaleObject) as caught:
        run(retry(ByHand(), work, Policy(attempts=1)))
    assert caught.value.__notes__ == ["gave up after 1 attempt"]


async def test_same_loop_serves_asyncio() -> None:
    assert await retry(ASYNCIO, Work(stale()), Policy()) == 42


def test_same_loop_serves_threads() -> None:
    assert run(retry(BLOCKING, Work(stale()), Policy())) == 42


async def test_cancelling_the_pause_ends_the_loop() -> None:
    work = Work(*[stale() for _ in range(100)])
    paused = asyncio.Event()

    class Pausing(ByHand):
        async def sleep(self, seconds: float) -> None:
            paused.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(retry(Pausing(), work, Policy()))
    await paused.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.runs == 1


@pytest.mark.parametrize("attempts", [0, -1])
def test_no_attempt_at_all_is_refused(attempts: int) -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1"):
        Policy(attempts=attempts)


@pytest.mark.parametrize("attempts", [True, 2.0, "5", None, float("nan")])
def test_attempts_that_are_no_whole_number_are_refused(attempts: object) -> None:
    with pytest.raises(TypeError, match="attempts is a whole number"):
        Policy(attempts=attempts)


@pytest.mark.parametrize("within", [-1, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_deadline_that_makes_no_sense_is_refused(within: Any) -> None:
    with pytest.raises(ValueError, match="within must be None"):
        Policy(within=within)


@pytest.mark.parametrize("within", [True, "2", [2]])
def test_deadline_that_is_no_time_is_refused(within: Any) -> None:
    with pytest.raises(TypeError, match="within is seconds"):
        Policy(within=within)


def test_deadline_may_be_a_timedelta_or_none_at_all() -> None:
    assert run(retry(ByHand(), Work(stale()), Policy(within=timedelta(seconds=1)))) == 42
    assert run(retry(ByHand(), Work(stale()), Policy(within=None))) == 42
