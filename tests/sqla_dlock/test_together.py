"""`lock(lock(...), lock(...))` and `alock` the same: several locks of any stores, sessions and databases, all or none."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import AcquireTimeout, LeaseLost
from dlock_core.stores import Store
from sqla_dlock import alock, lock, stores
from sqla_dlock.tie import current
from tests.leases import is_held
from tests.sqla_dlock.models import Counter
from tests.waiting import auntil

one_of_each = pytest.mark.parametrize("engine", ["sqlite", "postgresql", "mariadb"], indirect=True)
one_async = pytest.mark.parametrize("async_engine", ["asyncpg", "aiosqlite"], indirect=True)


@pytest.fixture
def held(monkeypatch):
    """Make two stores, "default" and "ledger"; yield a function that returns which accounts are held in them."""
    known = {alias: Store(alias, MemoryBackend(), 30, 20) for alias in ("default", "ledger")}
    monkeypatch.setattr(stores, "_stores", known)

    def held():
        return [
            f"{alias} {number}"
            for alias, store in known.items()
            for number in (1, 2)
            if is_held(store.backend, f"account:{number}")
        ]

    yield held
    assert held() == []


@pytest.fixture
def session(engine):
    with Session(engine) as session:
        yield session
    assert current(session) == []


@pytest.fixture
async def async_session(async_engine):
    async with AsyncSession(async_engine) as session:
        yield session
    assert current(session.sync_session) == []


def account(session, number, **options):
    return lock(session, "account", number, **options)


def aaccount(session, number, **options):
    return alock(session, "account", number, **options)


@one_of_each
def test_block_holds_all_until_the_transaction_has_ended(held, session):
    with lock(account(session, 2, store="ledger"), account(session, 1)) as leases:
        assert [lease.name for lease in leases] == ["account:2", "account:1"]
        session.add(Counter(name="written", value=1))
    assert held() == ["default 1", "ledger 2"]
    session.commit()
    assert held() == []


@one_of_each
def test_acquire_holds_all_until_the_transaction_has_ended(held, session):
    leases = lock(account(session, 1), account(session, 2)).acquire()
    assert held() == ["default 1", "default 2"]
    assert leases.remaining() > 0
    session.add(Counter(name="written", value=1))
    session.rollback()
    assert held() == []


def test_released_before_the_transaction_begins(held, make_engine):
    with Session(make_engine("sqlite")) as session:
        leases = lock(account(session, 1), account(session, 2)).acquire()
        leases.release()
        assert held() == []


@pytest.mark.parametrize("taken", [1, 2])
@one_of_each
def test_one_that_is_taken_leaves_none_held(held, engine, session, taken):
    with Session(engine) as other:
        theirs = account(other, taken).acquire()
        with pytest.raises(AcquireTimeout) as refused:
            lock(account(session, 1), account(session, 2), wait=0.05).acquire()
        assert refused.value.name == f"account:{taken}"
        assert held() == [f"default {taken}"]
        theirs.release()


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_two_sessions_of_two_databases_both_refuse_what_was_lost(held, make_engine, session):
    with Session(make_engine("sqlite")) as ledger:
        with lock(account(session, 1), account(ledger, 1, store="ledger")) as leases:
            session.add(Counter(name="here", value=1))
            ledger.add(Counter(name="there", value=1))
            session.flush()
            leases[1]._held.lose("in a test")
            with pytest.raises(LeaseLost):
                leases.ensure_held()
            with pytest.raises(LeaseLost):
                ledger.commit()
            ledger.rollback()
        session.rollback()


@one_of_each
def test_one_lock_of_one_session_named_twice_is_one_lease(held, session):
    with lock(account(session, 1), account(session, 1)) as (first, second):
        assert first.token == second.token
    assert held() == []


@one_of_each
def test_lock_that_joins_one_of_several_only_leaves_it(held, session):
    with lock(account(session, 1), account(session, 2)) as leases:
        with account(session, 1, reentrant=True):
            pass
        assert held() == ["default 1", "default 2"]
        assert leases.remaining() > 0
    assert held() == []


@one_of_each
def test_several_leave_the_one_that_another_lock_has_joined(held, session):
    leases = lock(account(session, 1), account(session, 2)).acquire()
    with account(session, 1, reentrant=True) as joined:
        leases.release()
        assert held() == ["default 1"]
        assert joined.remaining() > 0
    assert held() == []


@one_async
async def test_async_block_holds_all_until_the_transaction_has_ended(held, async_session):
    async with alock(aaccount(async_session, 2, store="ledger"), aaccount(async_session, 1)) as leases:
        assert [lease.name for lease in leases] == ["account:2", "account:1"]
        async_session.add(Counter(name="written", value=1))
    assert held() == ["default 1", "ledger 2"]
    await async_session.commit()
    assert held() == []


@one_async
async def test_async_lock_that_joins_one_of_several_only_leaves_it(held, async_session):
    async with alock(aaccount(async_session, 1), aaccount(async_session, 2)) as leases:
        async with aaccount(async_session, 1, reentrant=True):
            pass
        assert held() == ["default 1", "default 2"]
        async with aaccount(async_session, 2, reentrant=True) as joined:
            await leases.release()
            assert held() == ["default 2"]
            assert joined.remaining() > 0
    assert held() == []


@one_async
async def test_async_acquire_holds_all_until_the_transaction_has_ended(held, async_session):
    await alock(aaccount(async_session, 1), aaccount(async_session, 2)).acquire()
    assert held() == ["default 1", "default 2"]
    async_session.add(Counter(name="written", value=1))
    await async_session.commit()
    assert held() == []
    leases = await alock(aaccount(async_session, 1), aaccount(async_session, 2)).acquire()
    await leases.release()


@one_async
async def test_sync_locks_inside_run_sync_hold_all(held, async_session):
    def work(session):
        with lock(account(session, 1), account(session, 2)):
            assert held() == ["default 1", "default 2"]

    await async_session.run_sync(work)
    assert held() == []


@one_async
async def test_cancelled_while_it_waits_leaves_none_held(held, async_engine, async_session):
    async with AsyncSession(async_engine) as other, aaccount(other, 2):
        task = asyncio.create_task(alock(aaccount(async_session, 1), aaccount(async_session, 2), wait=None).acquire())
        await auntil(lambda: held() == ["default 1", "default 2"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held() == ["default 2"]


def test_locks_that_are_together_already_are_refused_among_others(held, make_engine):
    with Session(make_engine("sqlite")) as session:
        several, later = lock(account(session, 1), account(session, 2)), alock(aaccount(AsyncSession(), 1))
        for make, parts in (
            (lock, (several, account(session, 3))),
            (lock, (account(session, 3), several)),
            (lock, (several,)),
            (alock, (later,)),
        ):
            with pytest.raises(TypeError, match=r"are several locks already: pass each of them to one lock\(\)"):
                make(*parts)


def test_threads_locks_and_tasks_locks_are_not_mixed(held, make_engine):
    with Session(make_engine("sqlite")) as session:
        with pytest.raises(TypeError, match="every part must be a lock"):
            lock(account(session, 1), aaccount(AsyncSession(), 1))
        with pytest.raises(TypeError, match="every part must be a lock"):
            lock(account(session, 1), "account", 2)


@one_of_each
def test_two_sessions_cannot_hold_one_lock_together_unless_it_is_shared(held, engine, session):
    with Session(engine) as other:
        with pytest.raises(ValueError, match="two sessions cannot hold the lock 'account:1'"):
            lock(account(session, 1), account(other, 1)).acquire()
        with pytest.raises(ValueError, match="two sessions"):
            lock(account(session, 1, shared=True), account(other, 1, shared=True), account(session, 1)).acquire()
        assert held() == []
        leases = lock(account(session, 1, shared=True), account(other, 1, shared=True)).acquire()
        session.add(Counter(name="written", value=1))
        session.commit()
        assert [lease.remaining() > 0 for lease in leases] == [False, True]
        leases.release()


def test_stores_without_names_have_no_order_for_locks_of_one_name(make_engine):
    one, another = MemoryBackend(), MemoryBackend()
    with Session(make_engine("sqlite")) as session:
        with pytest.raises(ValueError, match="two stores that both have the alias ''"):
            lock(account(session, 1, store=one), account(session, 1, store=another)).acquire()
        with lock(account(session, 2, store=one), account(session, 1, store=another)) as leases:
            assert [lease.name for lease in leases] == ["account:2", "account:1"]
    assert not is_held(one, "account:2")
