"""`lock(...)` of both ORMs: the lease lives until the transactions that worked under it have ended, however they end."""

import logging
from contextlib import suppress

import pytest

from dlock_core.backend import Released
from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import AlreadyHeld, LeaseLost
from dlock_core.leases.lease import LeaseState
from tests.actors import WITHIN
from tests.databases import SESSION_ID, kill_session
from tests.leases import events, is_held, until_expired, until_waited_for
from tests.proxy import Proxy
from tests.scenarios.application import Place, in_order
from tests.scenarios.places import ASYNC, EVERY, once, where

EACH = [*once(EVERY), *ASYNC]
"""Each database of each ORM, and with asyncio."""
SERVERS = [place for place in EACH if "sqlite" not in place.driver]
OTHERS = [
    Place(orm, driver, "read committed")
    for orm, driver in [
        ("sqlalchemy", "psycopg2"),
        ("sqlalchemy", "pymysql"),
        ("asyncio", "psycopg_async"),
        ("asyncio", "asyncmy"),
    ]
]
WIDE = [*EACH, *OTHERS]
"""The same, and every other driver."""
SHORT = {"ttl": 0.25, "renew": False}


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def session(application):
    """A session of the test's thread that has already connected, because that may take longer than a short lease."""
    session = application.session()
    session.begin()
    session.rollback()
    yield session
    session.rollback()
    assert session.ties() == []
    session.close()


@pytest.fixture
def journal():
    """What happens to leases, in order; `session.note_ends(journal)` adds COMMIT and ROLLBACK."""
    with events() as entries:
        yield entries


def order(session, **options):
    return session.lock("order", 42, **options)


# The block, without a transaction


@where(EACH)
def test_block_outside_a_transaction_holds_the_lease_to_its_end(session, store):
    with order(session) as lease:
        assert is_held(store)
        assert lease.token > 0
        assert lease.name == "order:42"
    assert not is_held(store)


@where(EACH)
def test_block_that_raises_releases_and_lets_the_error_through(session, store):
    with pytest.raises(Sorry), order(session):
        raise Sorry
    assert not is_held(store)


@where(EACH)
def test_one_lock_object_may_be_used_again(session, store):
    block = order(session)
    with block as first:
        pass
    with block as second:
        assert second.token > first.token
    assert not is_held(store)


@where(EACH)
def test_lock_without_a_with_is_held_until_it_is_released(session, store):
    lease = order(session).acquire()
    assert is_held(store)
    assert session.call(lease.release) is Released.RELEASED
    assert not is_held(store)
    session.begin()
    session.add("b")
    session.commit()


@where(EACH)
def test_block_that_outlived_its_lease_without_a_transaction_is_not_called_a_success(session, store):
    with pytest.raises(LeaseLost), order(session, **SHORT) as lease:
        until_expired(lease, store)


@where(EACH)
def test_second_holder_waits_until_the_first_has_committed(session, store, holder):
    second = holder()
    with order(session) as lease:
        with session.transaction():
            session.write(1)
            acquiring = second.start_acquiring()
            until_waited_for(store)
            assert not acquiring.done()
        assert not acquiring.done()
    acquiring.result(WITHIN)
    assert second.lease.token > lease.token
    assert second.begin_and_read() == 1


# Each ending of a transaction


@where(WIDE)
def test_lease_in_the_transaction_is_released_after_its_commit(application, store, journal):
    session = application.session()
    session.note_ends(journal)
    with session.transaction():
        with order(session):
            session.add("b")
        journal.append("after the block")
        assert is_held(store)
    assert in_order(journal, "acquired order:42", "after the block", "COMMIT", "released order:42")
    session.close()


@where(WIDE)
def test_lease_before_the_transaction_is_released_after_its_commit(application, store, journal):
    session = application.session()
    session.note_ends(journal)
    with order(session), session.transaction():
        session.add("b")
    assert in_order(journal, "acquired order:42", "COMMIT", "released order:42")
    session.close()


@where(WIDE)
@pytest.mark.parametrize("how", ["block", "handle"])
def test_lease_that_is_left_inside_the_transaction_that_began_under_it_is_released_after_commit(
    application, store, journal, how
):
    session = application.session()
    session.note_ends(journal)
    if how == "block":
        with order(session):
            session.begin()
            session.add("b")
    else:
        lease = order(session).acquire()
        session.begin()
        session.add("b")
        assert session.call(lease.release) is None
    assert is_held(store)
    session.commit()
    assert in_order(journal, "acquired order:42", "COMMIT", "released order:42")
    session.close()


@where(WIDE)
def test_exception_rolls_back_and_then_releases(application, store, journal):
    session = application.session()
    session.note_ends(journal)
    with pytest.raises(Sorry), session.transaction(), order(session):
        session.add("b")
        raise Sorry
    assert in_order(journal, "acquired order:42", "ROLLBACK", "released order:42")
    assert application.names() == {"a"}
    session.close()


@where(EACH)
def test_acquire_inside_a_transaction_needs_no_release(session, store):
    with session.transaction():
        order(session).acquire()
        assert is_held(store)
    assert not is_held(store)


@where(EACH)
def test_many_transactions_under_one_lease_are_each_admitted(application, session, store):
    with order(session) as lease:
        for name in ("b", "c", "d"):
            with session.transaction():
                session.add(name)
            assert application.fence_token() == lease.token
            assert is_held(store)
        assert lease.remaining() > 0
    assert not is_held(store)
    assert application.names() == {"a", "b", "c", "d"}


# Savepoints


@where(WIDE)
def test_lease_of_a_savepoint_that_rolls_back_is_held_to_the_outer_end(application, session, store):
    with session.transaction():
        with pytest.raises(Sorry), session.savepoint(), order(session):
            raise Sorry
        assert is_held(store)
        session.add("b")
    assert not is_held(store)
    assert application.names() == {"a", "b"}


@where(EACH)
def test_lease_of_a_savepoint_that_is_released_is_held_to_the_outer_end(session, store):
    with session.transaction():
        with session.savepoint(), order(session):
            pass
        assert is_held(store)
    assert not is_held(store)


@where(EACH)
def test_lease_of_savepoints_in_savepoints_is_held_to_the_outer_end(application, session, store):
    with session.transaction():
        with session.savepoint():
            with pytest.raises(Sorry), session.savepoint(), session.savepoint(), order(session):
                session.add("undone")
                raise Sorry
            assert is_held(store)
            session.add("b")
        assert is_held(store)
    assert not is_held(store)
    assert application.names() == {"a", "b"}


@where(EACH)
def test_block_around_a_savepoint_waits_for_the_outer_commit(session, store):
    with session.transaction():
        with order(session), session.savepoint():
            session.add("b")
        assert is_held(store)
    assert not is_held(store)


FENCE_TOKEN = "SELECT token FROM dlock_fence WHERE name = 'order:42'"


@where(EACH)
@pytest.mark.parametrize("fence", ["transaction", "lease"])
def test_savepoint_that_took_the_admit_with_it_is_followed_by_another_admit(application, session, store, fence):
    with session.transaction():
        with pytest.raises(Sorry), session.savepoint(), order(session, fence=fence) as lease:
            assert session.ask(FENCE_TOKEN) == [(lease.token,)]
            raise Sorry
        assert session.ask(FENCE_TOKEN) == [(lease.token,)]
    assert application.fence_token() == lease.token


@where(EACH)
def test_savepoint_that_took_the_admit_with_it_is_admitted_before_commit_at_the_latest(application, session, store):
    with session.transaction(), pytest.raises(Sorry), session.savepoint(), order(session) as lease:
        raise Sorry
    assert application.fence_token() == lease.token


# Loss of the lease


@where(WIDE)
@pytest.mark.parametrize("fence", ["transaction", "lease", False])
def test_lease_lost_before_commit_rolls_back(application, session, store, fence):
    with pytest.raises(LeaseLost), order(session, fence=fence, **SHORT) as lease, session.transaction():
        session.add("b")
        until_expired(lease, store)
    assert application.names() == {"a"}


@where(EACH)
def test_lease_lost_before_commit_rolls_back_the_transaction_it_was_taken_in(application, session, store):
    with pytest.raises(LeaseLost), session.transaction():
        session.add("before")
        with order(session, **SHORT) as lease:
            session.add("b")
            until_expired(lease, store)
    assert application.names() == {"a"}


@where(EACH)
@pytest.mark.parametrize("fence", ["transaction", "lease", False])
def test_transaction_does_not_begin_under_a_lost_lease(application, session, store, fence):
    """Without a fence the loss is seen at COMMIT at the latest."""
    went_on = []
    with suppress(LeaseLost), order(session, fence=fence, **SHORT) as lease:
        until_expired(lease, store)
        with pytest.raises(LeaseLost), session.transaction():
            session.add("b")
            went_on.append(fence)
        with pytest.raises(LeaseLost):
            lease.ensure_held()
    assert went_on in ([], [False])
    assert application.names() == {"a"}


@where(EACH)
def test_the_next_holder_is_not_disturbed_by_one_that_lost_the_lease(session, store, holder):
    following = holder()
    with pytest.raises(LeaseLost), order(session, **SHORT) as lease:
        until_expired(lease, store)
        following.acquire()
    assert following.lease.remaining() > 0
    assert is_held(store)


# A COMMIT with an unknown outcome, and connections that die


@where(SERVERS)
@pytest.mark.parametrize("fault", ["cut_request", "cut_reply"])
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_lease_is_kept_after_a_commit_that_may_have_worked(application, store, caplog, fault, inside):
    """Without a fence, the transaction's number is unknown, by which PostgreSQL could be asked."""
    caplog.set_level(logging.INFO, logger="dlock")
    with Proxy(application.port) as network:
        far = application.session_behind(network.port)
        lock = order(far, fence=False)
        with pytest.raises(Exception) as caught:
            if inside:
                with far.transaction(), lock as lease:
                    lose_commit(far, network, fault)
            else:
                with lock as lease, far.transaction():
                    lose_commit(far, network, fault)
        assert not isinstance(caught.value, LeaseLost)
        far.close()
    assert is_held(store)
    assert lease._held.state is not LeaseState.HELD
    (line,) = [record.getMessage() for record in caplog.records if record.name == "dlock"]
    assert "unknown" in line
    assert "order:42" in line
    assert application.names() == ({"a", "b"} if fault == "cut_reply" else {"a"})


def lose_commit(session, network, fault):
    session.add("b")
    getattr(network, fault)(matching=b"COMMIT")


@where(SERVERS)
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_session_killed_in_the_transaction_releases(application, session, store, inside):
    blocks = [order(session), session.transaction()]
    with pytest.raises(Exception), blocks[inside], blocks[not inside]:
        session.add("b")
        application.kill(session)
        session.add("c")
    assert not is_held(store)
    assert application.names() == {"a"}


@where(SERVERS)
def test_session_killed_between_two_transactions_does_not_harm_the_lease(application, session, store):
    with order(session):
        with session.transaction():
            session.add("b")
            killed = session.ask(SESSION_ID[application.server])[0][0]
        kill_session(application.server, int(killed), application.ask)
        with pytest.raises(Exception), session.transaction():
            session.add("lost")
        session.close()
        with session.transaction():
            session.add("c")
        assert is_held(store)
    assert not is_held(store)
    assert application.names() == {"a", "b", "c"}


# Asking again


@where(EACH)
def test_asking_again_outside_a_transaction_is_an_error_at_once(session, store):
    with order(session):
        with pytest.raises(AlreadyHeld):
            order(session, wait=None).acquire()
        assert is_held(store)
    assert not is_held(store)


@where(EACH)
def test_asking_again_with_reentrant_joins(session, store):
    with order(session) as outer:
        with order(session, reentrant=True) as inner:
            assert (inner.token, inner.holder) == (outer.token, outer.holder)
        assert is_held(store)
    assert not is_held(store)


@where(EACH)
@pytest.mark.parametrize("first", [0, 1], ids=["outer_first", "inner_first"])
def test_joined_lease_is_released_by_the_last_to_leave_in_any_order(session, store, first):
    leases = [order(session).acquire(), order(session, reentrant=True).acquire()]
    assert session.call(leases[first].release) is None
    assert is_held(store)
    assert session.call(leases[1 - first].release) is Released.RELEASED
    assert not is_held(store)


@where(EACH)
def test_asking_again_inside_the_transaction_joins(session, store):
    with session.transaction():
        with order(session) as outer:
            pass
        with order(session) as inner:
            assert inner.token == outer.token
        assert is_held(store)
    assert not is_held(store)


@where(EACH)
@pytest.mark.parametrize("reentrant", [False, True], ids=["once", "reentrant"])
def test_shared_holder_is_refused_the_exclusive_lock_at_once(session, store, reentrant):
    with order(session, shared=True), pytest.raises(AlreadyHeld, match="cannot become an exclusive one") as refused:
        order(session, reentrant=reentrant).acquire()
    assert refused.value.shared


@where(EACH)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
def test_every_form_of_the_fence_may_join_every_other(application, session, store, inside):
    forms = ("transaction", "lease", False)
    for number, (outer, inner) in enumerate((outer, inner) for outer in forms for inner in forms):
        one = session.lock("order", number, fence=outer)
        two = session.lock("order", number, fence=inner, reentrant=True)
        if inside:
            with session.transaction(), one, two as lease:
                session.add_one()
        else:
            with one, two as lease, session.transaction():
                session.add_one()
        assert dict(application.fences()).get(f"order:{number}") == (lease.token if outer or inner else None)
        assert not is_held(store, f"order:{number}")


@where(EACH)
def test_other_locks_may_be_held_at_the_same_time(session, store):
    with order(session), session.lock("order", 43), session.transaction():
        session.add("b")
    assert not is_held(store)
    assert not is_held(store, "order:43")


# Stores


@where(EACH)
def test_stores_of_their_own_have_locks_of_their_own(application, session, store):
    first = order(session)
    with first:
        application.use_store(second := MemoryBackend())
        with order(session, fence=False):
            assert is_held(store)
            assert is_held(second)
        assert not is_held(second)
        assert is_held(store)
    assert not is_held(store)


@where(once(EVERY))
def test_option_that_is_assigned_to_a_lock_holds_for_its_next_acquire(session, store):
    lock = order(session)
    lock.shared, lock.ttl = True, 500.0
    with lock as lease:
        assert lease.shared
        assert lease.remaining() > 400
