import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import MySQLdb
import psycopg
import pytest

from dlock_core.errors import AcquireTimeout, DLockError, LeaseLost, RowLocked, StaleObject, StaleToken
from dlock_core.retry import Policy, Trouble, classify, is_conflict, retry
from dlock_core.runtime import ASYNCIO, BLOCKING, run


class ByHand:
    """A runtime whose clock stands still but for its pauses."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


class Work:
    """Fails as it is told to, then answers 42."""

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


def driver_error(module: str, name: str, *args: object, **attributes: object) -> Exception:
    """An error as a driver that is not installed here raises it."""
    kind = type(name, (Exception,), {"__module__": module, **attributes})
    return kind(*args)


# -- which errors --


@pytest.mark.parametrize(
    ("state", "trouble"),
    [
        ("40P01", Trouble.DEADLOCK),
        ("40001", Trouble.SERIALIZATION),
        ("55P03", Trouble.LOCK_TIMEOUT),
        ("57P01", Trouble.DISCONNECT),
        ("25P03", Trouble.DISCONNECT),
        ("08006", Trouble.DISCONNECT),
        ("57014", None),
        ("23505", None),
        ("25P02", None),
    ],
)
def test_postgresql_errors_are_told_by_sqlstate(state: str, trouble: Trouble | None) -> None:
    assert classify(psycopg.errors.lookup(state)() if state[:2] != "08" else sqlstate_error(state)) is trouble
    assert classify(driver_error("asyncpg.exceptions", "PostgresError", sqlstate=state)) is trouble
    assert classify(driver_error("psycopg2.errors", "OperationalError", pgcode=state)) is trouble


def sqlstate_error(state: str) -> psycopg.Error:
    return type("Lost", (psycopg.OperationalError,), {"sqlstate": state})()


def test_postgresql_error_that_the_server_did_not_send_is_a_disconnect() -> None:
    assert classify(psycopg.OperationalError("the connection is closed")) is Trouble.DISCONNECT
    assert classify(psycopg.ProgrammingError("bad placeholder")) is None


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (1213, Trouble.DEADLOCK),
        (1205, Trouble.LOCK_TIMEOUT),
        (3572, Trouble.LOCK_TIMEOUT),
        (1020, Trouble.SERIALIZATION),
        (2006, Trouble.DISCONNECT),
        (2013, Trouble.DISCONNECT),
        (1969, None),
        (1062, None),
    ],
)
def test_mysql_errors_are_told_by_number(number: int, trouble: Trouble | None) -> None:
    assert classify(MySQLdb.OperationalError(number, "text")) is trouble
    assert classify(driver_error("pymysql.err", "OperationalError", number, "text")) is trouble


def test_number_goes_before_sqlstate_because_pymysql_calls_a_deadlock_40001() -> None:
    error = driver_error("pymysql.err", "OperationalError", 1213, "Deadlock found", sqlstate="40001")
    assert classify(error) is Trouble.DEADLOCK


def test_number_of_another_library_s_error_means_nothing() -> None:
    assert classify(KeyError(1213)) is None
    assert classify(driver_error("redis.exceptions", "ResponseError", 1205)) is None
    assert classify(driver_error("pymysqlite.err", "OperationalError", 1213)) is None


def test_sqlite_busy_is_a_lock_timeout(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(tmp_path / "a", timeout=0)) as other, pytest.raises(sqlite3.Error) as caught:
            other.execute("BEGIN IMMEDIATE")
    assert classify(caught.value) is Trouble.LOCK_TIMEOUT


def test_sqlite_write_after_an_overtaken_read_is_a_serialization_failure(tmp_path: Path) -> None:
    def open_it() -> Any:
        return closing(sqlite3.connect(tmp_path / "a", isolation_level=None, timeout=0))

    with open_it() as one, open_it() as other:
        one.execute("PRAGMA journal_mode=WAL")
        one.execute("CREATE TABLE t (x)")
        one.execute("BEGIN")
        one.execute("SELECT * FROM t").fetchall()
        other.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(sqlite3.Error) as caught:
            one.execute("INSERT INTO t VALUES (2)")
    assert classify(caught.value) is Trouble.SERIALIZATION


def test_sqlite_error_of_another_kind_is_none() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(sqlite3.Error) as caught:
        connection.execute("SELECT nonsense")
    assert classify(caught.value) is None


def test_layers_of_frameworks_are_looked_through() -> None:
    wrapper = driver_error("sqlalchemy.exc", "DBAPIError", "wrapped")
    wrapper.__cause__ = psycopg.errors.DeadlockDetected()
    assert classify(wrapper) is Trouble.DEADLOCK


@pytest.mark.parametrize(
    ("driver", "name", "trouble"),
    [
        (
            driver_error("asyncmy.errors", "OperationalError", 1213, "Deadlock found"),
            "OperationalError",
            Trouble.DEADLOCK,
        ),
        (driver_error("pymysql.err", "OperationalError", 1205, "Timeout"), "OperationalError", Trouble.LOCK_TIMEOUT),
        (driver_error("asyncpg.exceptions", "X", sqlstate="40001"), "DBAPIError", Trouble.SERIALIZATION),
        (driver_error("psycopg2.errors", "X", pgcode="55P03"), "OperationalError", Trouble.LOCK_TIMEOUT),
    ],
)
def test_sqlalchemy_s_layers_are_looked_through_for_every_driver(
    driver: Exception, name: str, trouble: Trouble
) -> None:
    adapted = driver_error("sqlalchemy.dialects.postgresql.asyncpg", "AsyncAdapt_asyncpg_dbapi.Error")
    wrapper = driver_error("sqlalchemy.exc", name, connection_invalidated=False)
    adapted.__cause__, wrapper.__cause__ = driver, adapted
    assert classify(wrapper) is trouble


def test_connection_that_sqlalchemy_has_given_up_is_a_disconnect() -> None:
    wrapper = driver_error("sqlalchemy.exc", "DBAPIError", "wrapped", connection_invalidated=True)
    wrapper.__cause__ = driver_error("asyncpg.exceptions._base", "InterfaceError", "connection is closed")
    assert classify(wrapper) is Trouble.DISCONNECT
    assert not is_conflict(wrapper)


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
    assert classify(own) is None


def test_aborted_transaction_does_not_hide_the_first_error() -> None:
    aborted = psycopg.errors.InFailedSqlTransaction()
    aborted.__context__ = psycopg.errors.SerializationFailure()
    assert classify(aborted) is Trouble.SERIALIZATION


def test_error_of_the_application_is_not_looked_through() -> None:
    for link in ("__cause__", "__context__"):
        decided = ValueError("the customer must be told")
        setattr(decided, link, psycopg.errors.DeadlockDetected())
        assert classify(decided) is None


def test_errors_that_explain_each_other_in_a_circle_end() -> None:
    one, other = psycopg.InterfaceError(), psycopg.InterfaceError()
    one.__context__, other.__context__ = other, one
    assert classify(one) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (stale(), True),
        (StaleToken("a", token=1), True),
        (RowLocked("a"), True),
        (psycopg.errors.SerializationFailure(), True),
        (psycopg.errors.DeadlockDetected(), True),
        (psycopg.errors.LockNotAvailable(), True),
        (psycopg.errors.AdminShutdown(), False),
        (psycopg.errors.UniqueViolation(), False),
        (AcquireTimeout("a", waited=1), False),
        (LeaseLost("a"), False),
        (DLockError("a"), False),
        (ValueError("a"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_conflict_is_what_a_new_transaction_may_cure(error: BaseException, expected: bool) -> None:
    assert is_conflict(error) is expected


# -- the loop --


def test_work_is_done_again_until_it_ends_without_a_conflict() -> None:
    work = Work(stale(), psycopg.errors.DeadlockDetected())
    assert run(retry(ByHand(), work, Policy(attempts=3))) == 42
    assert work.runs == 3


def test_last_conflict_is_raised_and_says_how_many_attempts_were_made() -> None:
    last = stale()
    work = Work(stale(), stale(), last)
    with pytest.raises(StaleObject) as caught:
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert caught.value is last
    assert caught.value.__notes__ == ["gave up after 3 attempts"]


def test_caller_may_refuse_to_start_over() -> None:
    work = Work(stale(), stale())
    with pytest.raises(StaleObject) as caught:
        run(retry(ByHand(), work, Policy(), may_start_over=lambda error: work.runs < 2))
    assert work.runs == 2
    assert not hasattr(caught.value, "__notes__")


def test_other_error_is_raised_at_once_and_without_a_note() -> None:
    work = Work(ValueError("no"))
    with pytest.raises(ValueError, match="no") as caught:
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert work.runs == 1
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_cancellation_is_never_retried(error: type[BaseException]) -> None:
    cancelled = error()
    cancelled.__cause__ = psycopg.errors.DeadlockDetected()
    work = Work(cancelled)
    with pytest.raises(error):
        run(retry(ByHand(), work, Policy(attempts=3)))
    assert work.runs == 1


def test_pauses_grow_with_full_jitter() -> None:
    runtime = ByHand()
    run(retry(runtime, Work(*[stale() for _ in range(3)]), Policy(), draw=one_after_the_other(1.0, 0.5, 1.0)))
    assert runtime.pauses == pytest.approx([0.01, 0.01, 0.04])


def test_no_attempt_starts_after_the_deadline() -> None:
    runtime = ByHand()
    work = Work(*[stale() for _ in range(100)])
    with pytest.raises(StaleObject) as caught:
        run(retry(runtime, work, Policy(attempts=100, within=0.1), draw=lambda: 1.0))
    assert runtime.time - 1000 <= 0.1
    assert caught.value.__notes__ == ["gave up after 4 attempts"]  # pauses of 10, 20 and 40 ms; the next would be 80


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
