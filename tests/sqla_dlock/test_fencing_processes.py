"""The fence under real processes that are stopped and go on: nothing is lost, whoever believes to hold the lock."""

import asyncio
import contextlib
import random
import threading

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dlock_core import connect
from dlock_core.errors import DLockError, RowLocked
from dlock_core.stores import Store
from dlock_core.transactions.retry import is_conflict
from sqla_dlock import alock, lock
from tests.chaos import Dice
from tests.processes import Worker, worker
from tests.sqla_dlock.adders import add_counter, value
from tests.sqla_dlock.engines import ASYNC, new_async_engine, new_engine
from tests.sqla_dlock.leases import is_held
from tests.sqla_dlock.models import Counter
from tests.waiting import until

WORKERS = 4
SECONDS = 1.5
SHORTEST, LONGEST = 0.05, 0.4
DRIVERS = ["sqlite", "postgresql", "mariadb", "asyncpg"]
THREADS = {"asyncpg": "postgresql"}
"""The driver by which a test looks at what another one did."""


def opened(url, **options):
    return Store("default", connect(url) if url else Dice(), **options)


# What runs in the other processes


def add_one(link, name, url, form, pause_at):
    """Add one to the counter; stand still at a point until the test says to go on. Tells how it ended."""
    store = opened(url, ttl=0.5, wait=20.0)

    def point(name):
        if name == pause_at:
            link.say(name)
            link.hear()

    try:
        if name in ASYNC:
            asyncio.run(add_async(name, store, form, point))
        else:
            add(name, store, form, point)
    except DLockError as error:
        return type(error).__name__
    return "done"


def add(name, store, form, point):
    engine = new_engine(name)
    try:
        with Session(engine) as session, lock(session, "order", 42, fence=form, store=store):
            point("granted")
            add_to(session, point)
            session.commit()
    finally:
        engine.dispose()


def add_to(session, point):
    seen = session.scalars(select(Counter.value)).one()
    point("read")
    session.execute(update(Counter).values(value=seen + 1))
    point("written")


async def add_async(name, store, form, point):
    engine = new_async_engine(name)
    try:
        async with AsyncSession(engine) as session, alock(session, "order", 42, fence=form, store=store):
            point("granted")
            await session.run_sync(add_to, point)
            await session.commit()
    finally:
        await engine.dispose()


def add_until_told(link, name, url, form):
    """Add one to the counter again and again; tells how often it was committed, and how often it was not."""
    store = opened(url, ttl=0.2, wait=1.0)
    if name in ASYNC:
        return asyncio.run(add_async_until_told(link, name, store, form))
    engine, results = new_engine(name), [0, 0]
    engine.connect().close()
    link.say("ready")
    while not link.pipe.poll():
        with counted(results), Session(engine) as session, lock(session, "order", 42, fence=form, store=store):
            add_to(session, go_on)
            session.commit()
    engine.dispose()
    return results


async def add_async_until_told(link, name, store, form):
    engine, results = new_async_engine(name), [0, 0]
    await (await engine.connect()).close()
    link.say("ready")
    while not link.pipe.poll():
        with counted(results):
            async with AsyncSession(engine) as session, alock(session, "order", 42, fence=form, store=store):
                await session.run_sync(add_to, go_on)
                await session.commit()
    await engine.dispose()
    return results


def go_on(_point):
    pass


@contextlib.contextmanager
def counted(results):
    try:
        yield
    except (DLockError, DBAPIError) as error:
        if not isinstance(error, DLockError) and not is_conflict(error):
            raise
        results[1] += 1
    else:
        results[0] += 1


def mix_until_told(link, name, form, shared):
    """Post one, sharing, or close: read in one transaction and write in the next; tells how often it was committed."""
    store, engine, results = opened(None, ttl=0.2, wait=1.0), new_engine(name), [0, 0]
    engine.connect().close()
    link.say("ready")
    while not link.pipe.poll():
        with (
            counted(results),
            Session(engine) as session,
            lock(session, "order", 42, fence=form, shared=shared, store=store),
        ):
            if shared:
                session.execute(update(Counter).values(value=Counter.value + 1))
            else:
                seen = session.scalars(select(Counter.value)).one()
                session.commit()
                session.execute(update(Counter).values(value=seen + 1))
            session.commit()
    engine.dispose()
    return results


# Stopped at one point, past the ttl


@pytest.fixture(params=DRIVERS)
def driver(request):
    """A driver of a database with a counter "a" at 0."""
    return request.param


@pytest.fixture
def engine(driver, make_engine):
    """It looks at the same database."""
    engine = make_engine(THREADS.get(driver, driver))
    add_counter(engine)
    return engine


def only(*drivers):
    return pytest.mark.parametrize("driver", drivers, indirect=True)


def gone_from(store):
    until(lambda: not is_held(store))


def add_now(engine, form):
    with Session(engine) as session, lock(session, "order", 42, fence=form, wait=20):
        add_to(session, go_on)
        session.commit()


@pytest.mark.parametrize("form", ["transaction", "lease", False])
def test_holder_stopped_before_its_transaction_cannot_begin_it_after_its_time(
    driver, engine, redis_server, redis_store, form
):
    with worker(add_one, driver, redis_server.url, form, "granted") as first:
        assert first.hear() == "granted"
        first.pause()
        gone_from(redis_store)
        add_now(engine, form)
        first.resume()
        first.say("go on")
        assert first.result() == "LeaseLost"
    assert value(engine) == 1


@only("postgresql", "mariadb", "asyncpg")
@pytest.mark.parametrize("point", ["read", "written"])
def test_holder_stopped_in_its_transaction_keeps_the_others_waiting_and_then_rolls_back(
    driver, engine, redis_server, redis_store, point
):
    with worker(add_one, driver, redis_server.url, "transaction", point) as first:
        assert first.hear() == point
        first.pause()
        gone_from(redis_store)
        with Session(engine) as session, pytest.raises(RowLocked), lock(session, "order", 42, wait=0.6):
            session.scalars(select(Counter.value)).one()
        first.resume()
        first.say("go on")
        assert first.result() == "LeaseLost"
    add_now(engine, "transaction")
    assert value(engine) == 1


@only("postgresql", "mariadb", "asyncpg")
def test_holder_stopped_in_its_transaction_blocks_no_one_with_a_fence_at_its_end(
    driver, engine, redis_server, redis_store
):
    with worker(add_one, driver, redis_server.url, "lease", "read") as first:
        assert first.hear() == "read"
        first.pause()
        gone_from(redis_store)
        add_now(engine, "lease")
        first.resume()
        first.say("go on")
        assert first.result() == "LeaseLost"
    assert value(engine) == 1


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_killed_holder_leaves_nothing_but_a_lease_that_runs_out(driver, engine, redis_server, redis_store, form):
    with worker(add_one, driver, redis_server.url, form, "written") as first:
        assert first.hear() == "written"
        first.kill()
    add_now(engine, form)
    assert value(engine) == 1


# Stopped at random


def torture(driver, url, form):
    """Processes add as fast as they can, one is always stopped for longer than a lease; (commits, refusals)."""
    return stopped_at_random([Worker(add_until_told, driver, url, form) for _ in range(WORKERS)])


def stopped_at_random(workers):
    pause, over = random.Random(4711), threading.Event()
    try:
        assert {one.hear() for one in workers} == {"ready"}
        timer = threading.Timer(SECONDS, over.set)
        timer.start()
        while not over.is_set():
            one = pause.choice(workers)
            one.pause()
            over.wait(pause.uniform(SHORTEST, LONGEST))
            one.resume()
            over.wait(SHORTEST)
        for one in workers:
            one.say("stop")
        results = [one.result() for one in workers]
    finally:
        for one in workers:
            with contextlib.suppress(ProcessLookupError):
                one.resume()
            one.kill()
            one.pipe.close()
    return sum(committed for committed, _ in results), sum(refused for _, refused in results)


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_no_update_is_lost_when_processes_are_stopped_at_random(driver, engine, redis_server, redis_store, form):
    committed, _ = torture(driver, redis_server.url, form)
    assert value(engine) == committed > 0


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_no_update_is_lost_when_the_lock_service_grants_everybody_everything(driver, engine, form):
    committed, _ = torture(driver, None, form)
    assert value(engine) == committed > 0


@only("sqlite", "postgresql", "mariadb")
@pytest.mark.parametrize("exclusive", ["transaction", "lease"])
def test_no_posting_is_lost_by_a_closing_when_the_lock_service_grants_everybody_everything(driver, engine, exclusive):
    closing = [Worker(mix_until_told, driver, exclusive, False) for _ in range(2)]
    posting = [Worker(mix_until_told, driver, shared, True) for shared in ("transaction", "lease")]
    committed, _ = stopped_at_random([*closing, *posting])
    assert value(engine) == committed > 0


@only("postgresql", "mariadb", "asyncpg")
def test_updates_are_lost_without_a_fence_when_the_lock_service_is_broken(driver, engine):
    committed, _ = torture(driver, None, False)
    assert value(engine) < committed
