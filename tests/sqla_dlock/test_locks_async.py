"""`alock(session, ...)`: the same promises for an AsyncSession, whichever task ends it."""

import asyncio
import logging

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import connect
from sqla_dlock import alock, lock
from sqla_dlock.tie import current
from tests.leases import events, is_held
from tests.mysql_server import DIALECT
from tests.proxy import Proxy
from tests.servers import free_port
from tests.sqla_dlock.models import Counter
from tests.waiting import auntil

postgresql_only = pytest.mark.parametrize("async_engine", ["asyncpg", "psycopg_async"], indirect=True)
aiosqlite_only = pytest.mark.parametrize("async_engine", ["aiosqlite"], indirect=True)


@pytest.fixture
async def session(async_engine):
    """A session in READ COMMITTED, where a lock may be requested after a read."""
    if async_engine.dialect.name == DIALECT:
        async_engine = async_engine.execution_options(isolation_level="READ COMMITTED")
    await (await async_engine.connect()).close()  # a short lease may not last until a driver has connected
    async with AsyncSession(async_engine) as session:
        yield session
    assert current(session.sync_session) == []


def order(session, **options):
    return alock(session, "order", 42, **options)


async def add(session, name):
    session.add(Counter(name=name))
    await session.flush()


async def names(engine):
    async with AsyncSession(engine) as session:
        return set(await session.scalars(text("SELECT name FROM counter")))


async def fence_token(session):
    return await session.scalar(text("SELECT token FROM dlock_fence WHERE name = 'order:42'"))


@pytest.mark.parametrize("fence", ["transaction", "lease", False])
async def test_lease_is_held_until_the_commit(async_engine, session, store, fence):
    async with order(session, fence=fence) as lease:
        await add(session, "a")
        assert await fence_token(session) == (lease.token if fence else None)
    assert is_held(store)
    await session.commit()
    assert not is_held(store)
    assert await names(async_engine) == {"a"}


@aiosqlite_only
async def test_block_of_what_a_task_acquired_is_refused_and_leaves_no_lease(session, store):
    with pytest.raises(TypeError, match="`async with` with the lock itself"):
        async with await order(session).acquire():
            pass
    assert not is_held(store)


async def test_acquire_is_held_to_the_end_of_the_next_transaction(session, store):
    lease = await order(session).acquire()
    await add(session, "a")
    assert await lease.release() is None
    await session.commit()
    assert not is_held(store)
    assert await lease.release() is Released.RELEASED


@pytest.mark.parametrize("end", ["rollback", "close", "reset", "invalidate"])
async def test_transaction_that_is_not_committed_releases(async_engine, session, store, end):
    async with order(session):
        await add(session, "a")
    assert is_held(store)
    await getattr(session, end)()
    assert not is_held(store)
    assert await names(async_engine) == set()


async def test_session_left_without_a_commit_releases(async_engine, store):
    async with AsyncSession(async_engine) as session:
        await order(session).acquire()
        await add(session, "a")
    assert not is_held(store)


async def test_lease_may_be_renewed_by_hand(session, store):
    async with order(session, ttl=5) as lease:
        await lease.renew(60)
        assert lease.remaining() > 50


async def test_sync_lock_inside_run_sync_is_the_same_lock(session, store):
    """Code that is written for a Session may run on an AsyncSession, and does not block its loop while it waits."""
    ticks = 0

    def work(inner: Session):
        with lock(inner, "order", 42):
            inner.add(Counter(name="a"))

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    with pytest.raises(TimeoutError):
        async with AsyncSession(session.bind) as other, order(other):
            before = ticks
            await session.run_sync(lambda inner: lock(inner, "order", 42, wait=0.1).acquire())
    assert ticks > before + 1
    ticking.cancel()
    await session.run_sync(work)
    assert is_held(store)
    await session.commit()
    assert not is_held(store)


async def test_no_increment_of_many_tasks_is_lost(async_engine, redis_store):
    makers = async_sessionmaker(async_engine)
    async with makers.begin() as session:
        session.add(Counter(id=1, name="a"))

    async def increment():
        async with makers() as session, alock(session, "counter", 1):
            counter = await session.get_one(Counter, 1)
            await asyncio.sleep(0)
            counter.value += 1
            await session.commit()

    await asyncio.gather(*(increment() for _ in range(12)))
    async with makers() as session:
        assert (await session.get_one(Counter, 1)).value == 12


async def test_waiting_task_that_is_cancelled_leaves_no_trace(async_engine, session, store):
    async with order(session), AsyncSession(async_engine) as second:
        waiting = asyncio.create_task(order(second).acquire())
        await auntil(lambda: run(store.inspect(BLOCKING, "order:42"))[0].waiters)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not run(store.inspect(BLOCKING, "order:42"))[0].waiters
        assert current(second.sync_session) == []
    assert not is_held(store)


async def test_cancelled_task_rolls_back_and_then_releases(async_engine, store):
    ready = asyncio.Event()

    async def work():
        async with AsyncSession(async_engine) as session, order(session):
            await add(session, "a")
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await ready.wait()
    assert is_held(store)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_held(store)
    assert await names(async_engine) == set()


@pytest.mark.parametrize("again", [1, 3])
async def test_release_is_finished_however_often_the_task_is_cancelled(async_engine, redis_store, redis_server, again):
    with Proxy(redis_server.port) as proxy, events() as journal:
        store, held = connect(f"redis://127.0.0.1:{proxy.port}/0"), []

        async def work():
            async with AsyncSession(async_engine) as session:
                await alock(session, "order", 42, store=store).acquire()
                await add(session, "a")
                held.append(proxy.hold_reply())
                await session.commit()

        task = asyncio.create_task(work())
        await auntil(lambda: held)
        await asyncio.to_thread(held[0].wait)
        for _ in range(again):
            task.cancel()
            await asyncio.sleep(0)
        held[0].release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert journal == ["acquired order:42", "released order:42"]
    assert await names(async_engine) == {"a"}


async def test_session_may_be_ended_by_another_task(async_engine, store):
    session = AsyncSession(async_engine)
    await asyncio.create_task(order(session).acquire())
    await asyncio.create_task(add(session, "a"))
    await asyncio.create_task(session.commit())
    assert not is_held(store)
    await session.close()


async def test_sync_session_that_is_closed_under_the_async_one_releases_all_the_same(async_engine, store):
    session = AsyncSession(async_engine)
    await order(session).acquire()
    session.sync_session.begin()
    session.sync_session.close()
    with events() as journal:
        await auntil(lambda: journal)
    assert not is_held(store)
    await session.close()


async def test_async_scoped_session_is_a_session(async_engine, store):
    registry = async_scoped_session(async_sessionmaker(async_engine), scopefunc=asyncio.current_task)
    async with order(registry):
        registry.add(Counter(name="a"))
        await registry.flush()
    assert is_held(store)
    await registry.remove()
    assert not is_held(store)


@postgresql_only
@pytest.mark.parametrize("fault", ["cut_request", "cut_reply"])
@pytest.mark.parametrize("fence", [True, False])
async def test_lease_is_kept_after_a_commit_that_may_have_worked(
    async_engine, make_async_engine, store, caplog, fault, fence
):
    """Without a fence, the transaction's number is unknown; with one, PostgreSQL is asked for its outcome."""
    from sqlalchemy.ext.asyncio import create_async_engine

    caplog.set_level(logging.INFO, logger="dlock")
    with Proxy(async_engine.url.port) as proxy:
        engine = create_async_engine(async_engine.url.set(port=proxy.port))
        async with AsyncSession(engine) as session:
            await order(session, fence=fence).acquire()
            await add(session, "a")
            getattr(proxy, fault)(matching=b"COMMIT")
            with pytest.raises((DBAPIError, OSError)):
                await session.commit()
        assert is_held(store) is not fence
        await engine.dispose()
    assert await names(async_engine) == ({"a"} if fault == "cut_reply" else set())


@aiosqlite_only
async def test_sync_session_is_a_type_error_before_any_io(async_engine):
    with pytest.raises(TypeError, match="use lock"):
        alock(Session(async_engine.sync_engine), "order", 42)


@aiosqlite_only
async def test_store_that_is_down_is_said_so(session):
    with pytest.raises(BackendUnavailable):
        await order(session, store=connect(f"redis://127.0.0.1:{free_port()}/0"), wait=0).acquire()
