"""The fence of an AsyncSession: the admit runs inside SQLAlchemy's greenlet, on every driver for asyncio."""

import asyncio
import contextlib
import itertools
import uuid

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from dlock_core.errors import NotSupported, StaleToken
from sqla_dlock import alock, fencing, lock
from tests.chaos import EverybodyIn
from tests.leases import is_held
from tests.mysql_server import DIALECT
from tests.sqla_dlock.adders import add_counter, add_fence, fences, value
from tests.sqla_dlock.models import Counter, Delivery, Letter, Parcel, Ticket
from tests.sqla_dlock.parties import until_blocked
from tests.waiting import INNODB_REFRESH_S, auntil, until

FORMS = ["transaction", "lease"]
servers = pytest.mark.parametrize("async_engine", ["asyncpg", "psycopg_async", "aiomysql", "asyncmy"], indirect=True)
WITHIN = 60.0


@pytest.fixture
def others(async_engine, make_engine):
    """An engine for threads on the same database, with a counter "a" at 0: it shows what was committed."""
    name = async_engine.dialect.name
    engine = make_engine({DIALECT: "mariadb"}.get(name, name))
    add_counter(engine)
    return engine


@pytest.fixture
def broken():
    """A store that grants every request; `broken.tokens` are its next tokens."""
    return EverybodyIn()


async def auntil_blocked(others):
    await asyncio.wait_for(asyncio.to_thread(until_blocked, others), WITHIN)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("cls", "key"), [(Parcel, 7), (Letter, "é 'x'"), (Ticket, uuid.UUID(int=4711))])
async def test_row_is_its_own_fence(async_engine, others, store, form, cls, key):
    async with AsyncSession(async_engine) as session:
        session.add(cls(id=key))
        await session.commit()
        async with alock(session, cls, str(key), fence=form) as lease:
            await session.execute(update(cls).values(value=5))
            await session.commit()
        found = (await session.execute(select(cls.value, cls.dlock_token, cls.dlock_holder))).one()
    assert tuple(found) == (5, lease.token, lease.holder)
    assert fences(others) == [(lease.name, lease.token)]  # a row without a token asks the table once


async def test_lock_of_code_inside_run_sync_is_fenced_as_well(async_engine, others, broken):
    broken.tokens, broken.forgetful = iter([10]), True
    add_fence(others, token=99)

    def work(session):
        with lock(session, "order", 42, store=broken):
            session.execute(update(Counter).values(value=1))

    async with AsyncSession(async_engine) as session:
        with pytest.raises(StaleToken):
            await session.run_sync(work)
    assert value(others) == 0


@servers
@pytest.mark.parametrize("form", FORMS)
async def test_session_whose_connection_streams_its_results_is_fenced(async_engine, others, broken, form):
    broken.tokens = iter([10])
    streaming = async_engine.execution_options(stream_results=True)
    async with AsyncSession(streaming) as session, alock(session, "a", store=broken, fence=form):
        await session.execute(
            update(Counter).values(value=Counter.value + 1), execution_options={"stream_results": False}
        )
        await session.commit()
    assert value(others) == 1
    assert fences(others) == [("a", 10)]


@pytest.mark.parametrize("form", FORMS)
async def test_engine_in_autocommit_is_refused_before_anything_is_written(async_engine, others, broken, form):
    broken.tokens = itertools.count(10)
    automatic = async_engine.execution_options(isolation_level="AUTOCOMMIT")
    async with AsyncSession(automatic) as session:
        with pytest.raises(NotSupported, match="AUTOCOMMIT"):
            async with alock(session, "order", 42, store=broken, fence=form):
                await session.execute(update(Counter).values(value=1))
    assert value(others) == 0


@pytest.mark.parametrize("form", FORMS)
async def test_missing_table_says_how_to_make_it_and_the_lease_is_given_back(async_engine, others, store, form):
    fencing.metadata.drop_all(others)
    try:
        async with AsyncSession(async_engine) as session:
            with pytest.raises(DBAPIError) as caught:
                async with alock(session, "order", 42, fence=form):
                    await session.execute(select(Counter))
        assert "sqla_dlock.fencing.metadata.create_all()" in caught.value.__notes__[0]
        assert not is_held(store)
    finally:
        fencing.metadata.create_all(others)


# Cancelled while the admit waits


OPEN = {
    "postgresql": """SELECT count(*) FROM pg_stat_activity
        WHERE xact_start IS NOT NULL AND datname = current_database() AND pid <> pg_backend_pid()""",
    DIALECT: "SELECT count(*) FROM information_schema.innodb_trx",
}


def until_no_transaction(others):
    with others.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        until(lambda: not watcher.exec_driver_sql(OPEN[others.dialect.name]).scalar_one(), every=INNODB_REFRESH_S)


@contextlib.contextmanager
def blocked_fence(others):
    """Hold the row of the lock in another transaction."""
    add_fence(others)
    with others.connect() as other, other.begin():
        other.execute(update(fencing.table).values(s_token=0))
        yield


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, WITHIN)


@servers
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [False, True])
async def test_task_cancelled_while_its_admit_waits_leaves_no_lease_and_no_transaction(
    request, make_async_engine, async_engine, others, store, form, inside
):
    engine = make_async_engine(request.node.callspec.params["async_engine"], isolation_level="READ COMMITTED")

    async def work():
        async with AsyncSession(engine) as session:
            if inside:
                await session.execute(select(Delivery))
            async with alock(session, "order", 42, fence=form):
                await session.execute(update(Counter).values(value=1))
                await session.commit()

    with blocked_fence(others):
        task = asyncio.create_task(work())
        await auntil(lambda: is_held(store))  # MariaDB may still show a waiter of the test before
        await auntil_blocked(others)
        await cancelled(task)
        assert not is_held(store)
    await asyncio.wait_for(asyncio.to_thread(until_no_transaction, others), WITHIN)
    assert value(others) == 0
    await work()
    assert value(others) == 1


@servers
async def test_transaction_that_swallows_the_cancellation_of_its_admit_is_not_committed_without_it(
    async_engine, others, store
):
    async with AsyncSession(async_engine) as session, alock(session, "order", 42):
        with blocked_fence(others):
            task = asyncio.create_task(session.execute(update(Counter).values(value=1)))
            await auntil_blocked(others)
            await cancelled(task)
        with contextlib.suppress(Exception):
            await session.execute(update(Counter).values(value=2))
            await session.commit()
        await session.rollback()
    assert not is_held(store)
    (row,) = fences(others)
    assert value(others) == 0 or row[1] > 1
