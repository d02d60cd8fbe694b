"""Locks inside the session's own transaction, on PostgreSQL: they last exactly as long as it does."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from dlock_core.backend import Released
from dlock_core.errors import AcquireTimeout, LeaseLost, NotSupported, SnapshotTooOld
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import Store
from sqla_dlock import alock, lock, locked
from sqla_dlock.backends.advisory import from_engine
from sqla_dlock.tie import current
from tests.garbage import collect_garbage
from tests.processes import Link, worker
from tests.sqla_dlock.engines import new_engine
from tests.sqla_dlock.leases import in_order, note_ends
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.sessions import committed, kill_session, session_id
from tests.waiting import auntil, until

WAITING = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
COUNTERS = "SELECT name FROM counter ORDER BY name"
FENCES = "SELECT name, token FROM dlock_fence WHERE name <> ''"


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine("postgresql")


@pytest.fixture
def store(engine: Engine) -> Iterator[Store]:
    backend = from_engine(engine)
    yield Store("advisory", backend, wait=20.0)
    backend.close()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session
    assert current(session) == []


@pytest.fixture
def order(store: Store) -> Callable[..., Any]:
    return lambda session, key=42, **options: lock(session, "order", key, **{"store": store, **options})


@pytest.fixture
def is_free(engine: Engine, order: Callable[..., Any]) -> Callable[..., bool]:
    """Whether another session could have the lock now."""

    def ask(**options: Any) -> bool:
        with Session(engine) as other:
            try:
                order(other, wait=0, **options).acquire()
            except AcquireTimeout:
                return False
            return True

    return ask


def until_blocked(engine: Engine) -> None:
    until(lambda: committed(engine, WAITING))


# How it ends


def hold(link: Link, how: str) -> None:
    engine = new_engine("postgresql")
    with Session(engine) as session, lock(session, "order", 42, store=Store("advisory", from_engine(engine))) as lease:
        link.say(lease.token)
        link.hear()
        getattr(session, how)()
    engine.dispose()


@pytest.mark.parametrize("how", ["commit", "rollback", "kill"])
def test_another_process_has_the_lock_as_soon_as_the_transaction_is_over(session, engine, order, is_free, how):
    with worker(hold, how) as holder, ThreadPoolExecutor(1) as thread:
        token = holder.hear()
        assert not is_free()
        next_one = thread.submit(lambda: order(session).acquire().token)
        until_blocked(engine)
        if how == "kill":
            holder.kill()
        else:
            holder.say("end")
        assert next_one.result(60) > token


def test_lease_that_is_kept_does_not_keep_a_transaction_that_could_not_be_rolled_back(engine, order, is_free):
    """A signal handler that raises while an answer is awaited has this effect: psycopg then refuses the ROLLBACK."""
    leases = []
    with pytest.raises(DBAPIError), Session(engine) as session, order(session) as lease:
        leases.append(lease)
        session.connection().connection.driver_connection.pgconn.send_query(b"SELECT 1")
    collect_garbage()
    until(is_free)


def test_lock_is_released_by_commit_itself(engine, session, order, is_free, journal):
    note_ends(engine, journal)
    with order(session) as lease:
        session.add(Counter(name="a"))
        assert not is_free()
        session.commit()
        assert is_free()
    assert lease.remaining() == 0.0
    assert not lease.lost
    assert lease.release() is Released.RELEASED
    assert in_order(journal, "acquired order:42", "COMMIT", "released order:42")


def test_release_before_the_end_answers_that_it_is_not_the_time(session, order, is_free):
    lease = order(session).acquire()
    assert lease.release() is None
    assert not is_free()
    session.rollback()
    assert lease.release() is Released.RELEASED
    assert is_free()


def test_what_begins_in_the_block_after_the_commit_is_not_protected_and_cannot_be_committed(engine, session, order):
    with order(session):
        session.commit()
        session.add(Counter(name="late"))
        with pytest.raises(LeaseLost):
            session.commit()
        session.rollback()
        with order(session):
            session.add(Counter(name="in time"))
            session.commit()
    assert committed(engine, COUNTERS) == [("in time",)]


def test_killed_session_ends_the_lock_and_its_work_is_not_committed(engine, session, order, is_free):
    with pytest.raises(DBAPIError), order(session) as lease:
        session.add(Counter(name="lost"))
        session.flush()
        kill_session(engine, session_id(session.connection()))
        assert is_free()
        session.commit()
    session.rollback()
    assert lease.remaining() == 0.0
    assert committed(engine, COUNTERS) == []


def test_error_that_aborts_the_transaction_ends_the_lock_and_nothing_passes_after_it(engine, session, order, is_free):
    with order(session):
        session.add(Counter(id=1))
        session.flush()
        session.expunge_all()
        session.add(Counter(id=1, name="again"))
        with pytest.raises(IntegrityError):
            session.flush()
        assert is_free()
        with pytest.raises(PendingRollbackError):
            session.commit()
        session.rollback()
    assert committed(engine, COUNTERS) == []


# Savepoints


def test_lock_that_goes_with_a_savepoint_is_lost_at_once_and_its_transaction_cannot_commit(session, order, is_free):
    session.begin()
    savepoint = session.begin_nested()
    with order(session) as lease:
        savepoint.rollback()
        assert lease.lost
        assert is_free()
        with pytest.raises(LeaseLost, match="savepoint"):
            session.commit()
        session.rollback()


def test_block_that_was_left_before_the_savepoints_rollback_is_over(engine, session, order, is_free):
    with session.begin():
        with pytest.raises(Sorry), session.begin_nested(), order(session) as lease:
            raise Sorry
        assert lease.remaining() == 0.0
        assert is_free()
        session.add(Counter(name="elsewhere"))
    assert committed(engine, COUNTERS) == [("elsewhere",)]


def test_lock_goes_with_the_savepoint_around_the_one_that_was_released(session, order, is_free):
    session.begin()
    outer = session.begin_nested()
    with session.begin_nested():
        lease = order(session).acquire()
    assert not is_free()
    outer.rollback()
    assert lease.remaining() == 0.0
    assert is_free()
    session.commit()


def test_deeper_savepoint_that_is_rolled_back_leaves_the_lock(session, order, is_free):
    with session.begin(), session.begin_nested(), order(session) as lease:
        deeper = session.begin_nested()
        session.execute(text("SELECT 1"))  # this makes the savepoint on the database
        deeper.rollback()
        assert not lease.lost
        assert not is_free()


# Waiting


@pytest.fixture
def holder(engine: Engine, order: Callable[..., Any]) -> Iterator[Session]:
    with Session(engine) as other:
        order(other).acquire()
        yield other


@pytest.mark.parametrize("wait", [0, 0.05])
def test_wait_that_runs_out_leaves_the_transaction_usable(engine, session, order, holder, wait):
    session.execute(text("SET LOCAL lock_timeout = '7s'"))
    session.add(Counter(name="before"))
    session.flush()
    with pytest.raises(AcquireTimeout, match="pid"):
        order(session, wait=wait).acquire()
    assert session.scalar(text("SHOW lock_timeout")) == "7s"
    session.add(Counter(name="after"))
    session.commit()
    assert committed(engine, COUNTERS) == [("after",), ("before",)]


def test_time_limit_of_the_transaction_is_its_own_again_after_a_wait(engine, session, order, holder):
    session.execute(text("SET LOCAL lock_timeout = '7s'"))
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(order(session).acquire)
        until_blocked(engine)
        holder.commit()
        pending.result(60)
    assert session.scalar(text("SHOW lock_timeout")) == "7s"


# Modes, and where there is no such lock


def test_shared_locks_are_held_together_and_keep_exclusive_ones_out(session, order, is_free):
    with order(session, shared=True):
        assert is_free(shared=True)
        assert not is_free()


def test_asking_again_inside_the_transaction_joins(session, order):
    with order(session) as outer, order(session) as inner:
        assert (inner.token, inner.holder) == (outer.token, outer.holder)


def test_session_in_autocommit_has_no_transaction_to_lock_in(engine, order):
    with (
        Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session,
        pytest.raises(NotSupported, match="session=True"),
    ):
        order(session).acquire()


@pytest.mark.parametrize("name", ["sqlite", "mariadb"])
def test_other_databases_are_refused_by_name(make_engine, order, name):
    engine = make_engine(name)
    backend = from_engine(engine)
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with Session(engine) as session, pytest.raises(NotSupported, match=r"PostgreSQL.*session=True"):
        order(session, store=backend).acquire()
    assert not [each for each in sent if "advisory" in each]
    backend.close()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_snapshot_that_is_always_older_than_the_lock_is_refused(engine, order, level):
    strict = engine.execution_options(isolation_level=level)
    with Session(strict) as session, pytest.raises(SnapshotTooOld, match=level):
        order(session).acquire()
    with Session(strict) as session:
        assert order(session, snapshot="ignore").acquire().remaining() > 0


def test_connection_that_was_given_to_the_session_is_the_one_that_locks(engine, order, is_free):
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection) as session:
            order(session).acquire()
            session.commit()
        assert not is_free()
        transaction.commit()
        assert is_free()


# The fence


@pytest.mark.parametrize("fence", [True, "lease", False])
def test_no_fence_is_needed_where_one_commit_ends_both(engine, session, order, fence):
    with order(session, fence=fence):
        session.add(Counter(name="a"))
        session.commit()
    assert committed(engine, COUNTERS) == [("a",)]
    assert committed(engine, FENCES) == []


def test_another_database_is_fenced_as_ever(make_engine, order):
    elsewhere = make_engine("sqlite")
    with Session(elsewhere) as session, order(session) as lease:
        session.add(Counter(name="a"))
        session.commit()
    assert committed(elsewhere, FENCES) == [("order:42", lease.token)]


def test_decorated_function_locks_in_its_sessions_transaction(session, store, is_free):
    @locked("order", "order_id", store=store)
    def ship(session: Session, order_id: int) -> None:
        assert not is_free()

    ship(session, 42)
    assert not is_free()
    session.commit()
    assert is_free()


def test_forced_release_rolls_the_transaction_back(engine, session, order, store, is_free):
    lease = order(session).acquire()
    session.add(Counter(name="lost"))
    session.flush()
    (state,) = run(store.backend.inspect(BLOCKING, "order:42"))
    assert [holder.token for holder in state.holders] == [lease.token]
    assert run(store.backend.force_release(BLOCKING, "order:42", lease.token))
    assert is_free()
    with pytest.raises(DBAPIError):
        session.commit()
    session.rollback()
    assert committed(engine, COUNTERS) == []


# asyncio


@pytest.fixture(params=["asyncpg", "psycopg_async"])
async def async_engine(request: pytest.FixtureRequest, make_async_engine: Callable[..., AsyncEngine]) -> AsyncEngine:
    return make_async_engine(request.param)


@pytest.fixture
async def async_store(async_engine: AsyncEngine) -> AsyncIterator[Store]:
    backend = from_engine(async_engine)
    yield Store("advisory", backend, wait=20.0)
    await asyncio.to_thread(backend.close)


def aorder(session: AsyncSession, store: Store, **options: Any) -> Any:
    return alock(session, "order", 42, store=store, **options)


async def auntil_blocked(engine: Engine) -> None:
    await asyncio.to_thread(until_blocked, engine)


async def test_next_task_has_the_lock_as_soon_as_the_transaction_is_over(engine, async_engine, async_store):
    async with (
        AsyncSession(async_engine) as first,
        AsyncSession(async_engine) as second,
        aorder(first, async_store) as lease,
    ):
        next_one = asyncio.create_task(aorder(second, async_store).acquire())
        await auntil_blocked(engine)
        await first.commit()
        assert (await next_one).token > lease.token


async def test_wait_that_runs_out_leaves_the_asyncio_transaction_usable(engine, async_engine, async_store):
    async with AsyncSession(async_engine) as first, AsyncSession(async_engine) as second:
        await aorder(first, async_store).acquire()
        second.add(Counter(name="before"))
        await second.flush()
        with pytest.raises(AcquireTimeout):
            await aorder(second, async_store, wait=0.05).acquire()
        await second.commit()
    assert committed(engine, COUNTERS) == [("before",)]


async def test_several_locks_open_the_sessions_first_connection(async_engine, async_store):
    await async_engine.dispose()
    async with AsyncSession(async_engine) as session:
        orders = [alock(session, "order", number, store=async_store) for number in (1, 2)]
        async with alock(*orders) as leases:
            assert [lease.name for lease in leases] == ["order:1", "order:2"]
            await session.commit()


async def test_cancelled_waiter_leaves_its_place(engine, async_engine, async_store):
    async with AsyncSession(async_engine) as first, AsyncSession(async_engine) as second:
        await aorder(first, async_store).acquire()
        waiter = asyncio.create_task(aorder(second, async_store, wait=None).acquire())
        await auntil_blocked(engine)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await auntil(lambda: not committed(engine, WAITING))
        await first.commit()
    async with AsyncSession(async_engine) as third:
        assert (await aorder(third, async_store, wait=0).acquire()).token


async def test_lock_that_goes_with_a_savepoint_is_lost_in_asyncio_too(async_engine, async_store):
    async with AsyncSession(async_engine) as session:
        await session.begin()
        savepoint = await session.begin_nested()
        async with aorder(session, async_store) as lease:
            await savepoint.rollback()
            assert lease.lost
            with pytest.raises(LeaseLost):
                await session.commit()
            await session.rollback()


async def test_store_of_an_engine_for_threads_is_refused_to_an_async_session_before_it_blocks_the_loop(
    store, make_async_engine
):
    async with AsyncSession(make_async_engine("asyncpg")) as session:
        with pytest.raises(NotSupported, match="transactions of an Engine, and an AsyncSession cannot"):
            await alock(session, "order", 42, store=store).acquire()


async def test_session_of_the_store_s_own_engine_is_fine_in_the_greenlet_of_an_async_connection(
    engine, store, make_async_engine
):
    """As in a migration that `env.py` of Alembic runs by `connection.run_sync()`."""

    def migrate(_: object) -> None:
        with Session(engine) as session, lock(session, "order", 42, store=store):
            session.execute(text("SELECT 1"))
            session.commit()

    async with make_async_engine("asyncpg").connect() as connection:
        await connection.run_sync(migrate)


def test_lock_of_a_session_of_a_thread_needs_no_greenlet(engine):
    program = """
import sys
sys.modules["greenlet"] = None
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqla_dlock import lock
from sqla_dlock.backends.advisory import from_engine
from sqla_dlock.stores import Store
engine = create_engine(sys.argv[1])
for made in (Store("advisory", from_engine(engine)), Store("session", from_engine(engine, session=True))):
    with Session(engine) as session, lock(session, "order", 42, store=made, fence=False):
        session.execute(text("SELECT 1"))
        session.commit()
"""
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_store_of_an_engine_for_asyncio_is_refused_to_a_session_of_a_thread(make_engine, make_async_engine):
    store = Store("advisory", from_engine(make_async_engine("asyncpg")), wait=0)

    def acquire():
        with Session(make_engine("postgresql")) as session:
            lock(session, "order", 42, store=store).acquire()

    with pytest.raises(NotSupported, match="transactions of an AsyncEngine, and a Session cannot"):
        await asyncio.to_thread(acquire)
