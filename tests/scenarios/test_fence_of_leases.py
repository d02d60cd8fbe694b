"""The fence at the end of each transaction under a lease, and shared leases: an overtaken holder cannot commit."""

import itertools
import threading

import pytest

from dlock_core.errors import LeaseLost, RowLocked, StaleToken
from tests.actors import WITHIN, outcome
from tests.scenarios.application import is_serialization_failure, succeeds
from tests.scenarios.conftest import flush
from tests.scenarios.places import EVERY, OTHER_DRIVERS, OTHER_SERVER_DRIVERS, SERVERS, Place, once, where
from tests.waiting import until

FORMS = ["transaction", "lease"]


# fence="lease"


@where([*EVERY, *OTHER_DRIVERS])
def test_older_holder_cannot_commit_once_a_newer_one_was_announced(application, broken, holder):
    broken.tokens = iter([10, 11])
    a, b = holder(fence="lease"), holder(fence="lease")
    a.acquire()
    if not application.is_sqlite:
        assert a.begin_and_read() == 0
    b.acquire()  # does not wait for a
    if application.is_sqlite:  # has one writer at a time
        assert a.begin_and_read() == 0
    a.write()
    with pytest.raises(Exception) as caught:
        a.commit()
    assert application.is_refusal(caught.value)
    assert b.begin_and_read() == 0
    b.write_and_commit()
    assert application.value() == 1


@where(SERVERS)
def test_newer_holder_is_not_announced_between_the_confirm_of_an_older_one_and_its_commit(application, broken, holder):
    broken.tokens = iter([10, 11])
    a, b = holder(fence="lease"), holder(fence="lease")
    a.acquire()
    a.begin_and_read()
    confirmed, go_on = threading.Event(), threading.Event()

    def stand_still():
        confirmed.set()
        go_on.wait(WITHIN)

    a.do(a.session.on_end, lambda _: None, before_commit=stand_still)
    a.write()
    committing = a.start(a.session.commit)
    assert confirmed.wait(WITHIN)
    acquiring = b.start_acquiring()
    application.until_blocked()
    go_on.set()
    committing.result(WITHIN)
    acquiring.result(WITHIN)
    assert b.begin_and_read() == 1
    b.write_and_commit()
    assert application.value() == 2


@where(EVERY)
def test_lease_of_several_transactions_commits_each_of_them_until_it_is_overtaken(application, broken, holder):
    broken.tokens = iter([10, 11])
    a, b = holder(fence="lease"), holder(fence="lease")
    a.acquire()
    for expected in (0, 1):
        assert a.begin_and_read() == expected
        a.write_and_commit()
    b.acquire()
    a.begin_and_read()
    a.write()
    with pytest.raises(StaleToken):
        a.commit()
    assert application.value() == 2


@where(EVERY)
@pytest.mark.parametrize("created", ["before_the_lease", "under_the_lease"])
def test_lease_cannot_commit_after_a_newer_holder_has_deleted_the_row_that_is_its_fence(
    application, broken, holder, created
):
    broken.tokens = iter([10, 11])
    a, b = holder(application.parcel, 4711, fence="lease"), holder(application.parcel, 4711)

    def create():
        with a.session.transaction():
            a.session.add_parcel(4711)

    for step in (create, a._acquire) if created == "before_the_lease" else (a._acquire, create):
        a.do(step)
    b.acquire()
    b.begin()
    b.do(b.session.ask, f"DELETE FROM {application.parcels}")
    b.commit()
    assert a.begin_and_read() == 0
    a.write()
    with pytest.raises(StaleToken):
        a.commit()
    assert application.value() == 0


@where(EVERY)
def test_announce_behind_a_newer_holder_is_refused(application, broken, holder):
    broken.tokens, broken.forgetful = iter([11, 10]), True
    a, b = holder(fence="lease"), holder(fence="lease")
    a.acquire()
    with pytest.raises(StaleToken):
        b.acquire()


@where(once(EVERY))
@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_token_that_the_store_gives_twice_lets_in_one_holder_or_shared_ones_only(
    application, broken, holder, first, second
):
    broken.tokens, broken.forgetful = iter([10, 10]), True
    a, b = holder(fence="lease", shared=first), holder(fence="lease", shared=second)
    a.acquire()
    with pytest.raises(StaleToken):
        b.acquire()


@where([place for place in EVERY if place.level != "DEFERRED"])
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_both_forms_refuse_each_other(application, broken, holder, first, second):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = holder(fence=first), holder(fence=second)
    a.acquire()
    b.acquire()
    assert b.begin_and_read() == 0
    b.write_and_commit()
    assert_refused(a, first)
    assert application.value() == 1


def assert_refused(older, form):
    """Assert that a holder is refused: at its end with fence="lease", at its beginning with fence="transaction"."""
    seen = outcome(older.start_reading())
    if form == "lease":
        assert seen == 1
        older.write()
        with pytest.raises(StaleToken):
            older.commit()
    else:
        assert isinstance(seen, StaleToken)
        older.rollback()


# Shared leases


@where([*SERVERS, *OTHER_SERVER_DRIVERS])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_shared_holders_read_at_the_same_time(application, broken, holder, form, inside):
    broken.tokens = iter([10, 11])
    # SQLAlchemy treats a transaction that has a connection as one that has read.
    a, b = (holder(fence=form, shared=True, snapshot="ignore" if inside else "raise") for _ in range(2))
    if inside:  # as if a shared holder had come since the last exclusive one
        application.add_fence(s_token=2)
    for reader in (a, b):
        if inside:
            reader.begin()
            reader.acquire()
            assert reader.read() == 0
        else:
            reader.acquire()
            assert reader.begin_and_read() == 0
    b.commit()
    if form == "lease" and not inside and application.is_postgresql_snapshot:  # b's announce came after a's snapshot
        with pytest.raises(Exception) as caught:
            a.commit()
        assert is_serialization_failure(caught.value)
    else:
        a.commit()


@where(SERVERS)
def test_only_the_first_shared_holder_after_an_exclusive_one_writes_and_before_its_transaction(
    application, broken, holder
):
    broken.tokens = iter([10, 11, 12, 13])
    writer, *readers = holder(), *(holder(shared=True) for _ in range(3))
    writer.acquire()
    writer.begin_and_read()
    writer.write_and_commit()
    for reader in readers:
        reader.acquire()
    for reader in readers:
        assert reader.begin_and_read() == 1
    assert application.shared_mark() == 11
    for reader in readers:
        reader.commit()


@where(
    [
        place
        for place in SERVERS
        if place.level == "read committed" or place == Place(place.orm, "mariadb", "repeatable read")
    ]
)
def test_first_shared_holder_that_asks_inside_a_transaction_keeps_the_others_waiting_to_its_end(
    application, broken, holder
):
    broken.tokens = iter([11, 12])
    application.add_fence(token=10)
    a, b = holder(shared=True, snapshot="ignore"), holder(shared=True, snapshot="ignore")
    a.begin()
    a.acquire()
    assert a.read() == 0
    b.begin()
    acquiring = b.start_acquiring()
    application.until_blocked()
    a.commit()
    acquiring.result(WITHIN)
    assert b.read() == 0
    b.commit()


# Shared against exclusive, in every mix of forms

MIXED = [
    place
    for place in EVERY
    if (place.driver, place.level) not in {("mariadb", "serializable"), ("sqlite", "IMMEDIATE")}
]
"""Places where a reader does not keep writers out by itself."""


@where(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("transactions", [1, 2])
@pytest.mark.parametrize("exclusive", FORMS)
def test_older_exclusive_holder_and_a_newer_shared_one_never_both_commit_what_the_other_did_not_see(
    application, broken, holder, exclusive, transactions, shared
):
    if application.is_sqlite and (exclusive, transactions) == ("transaction", 1):
        pytest.skip("SQLite has one writer at a time")
    broken.tokens = iter([10, 11])
    a, b = holder(fence=exclusive), holder(fence=shared, shared=True, wait=0.6)
    a.acquire()
    assert a.begin_and_read() == 0
    if transactions == 2:
        a.commit()
    posted = succeeds(lambda: post(b))
    closed = succeeds(lambda: close(a, in_another_transaction=transactions == 2))
    assert application.value() == posted + closed == 1
    assert posted == (exclusive == "lease" or transactions == 2)


@where(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("exclusive", FORMS)
@pytest.mark.parametrize("token", [9, 12])
def test_shared_lease_of_two_transactions_is_refused_when_an_exclusive_one_was_between_them(
    application, broken, holder, exclusive, shared, token
):
    broken.tokens, broken.forgetful = iter([7, 10, token]), True
    first, reader, writer = holder(shared=True), holder(shared=True, fence=shared), holder(fence=exclusive)
    first.acquire()  # leaves the mark: 7
    reader.acquire()
    assert reader.begin_and_read() == 0
    reader.commit()
    wrote = succeeds(lambda: (writer.acquire(), writer.begin_and_read(), writer.write_and_commit()))
    writer.rollback()
    read = succeeds(lambda: close(reader, in_another_transaction=True))
    assert application.value() == wrote + read == 1


def post(holder):
    """Add one without having read."""
    holder.acquire()
    holder.begin()
    holder.add_one()
    holder.commit()


def close(holder, *, in_another_transaction):
    """Write a value that depends on what was read before."""
    if in_another_transaction:
        holder.begin()
    holder.write_and_commit()


@where(SERVERS)
def test_newer_exclusive_holder_waits_for_shared_transactions(application, broken, holder):
    broken.tokens = iter([10, 11])
    reader, writer = holder(shared=True), holder()
    reader.acquire()
    assert reader.begin_and_read() == 0
    reading = writer.start_acquiring_and_reading()
    application.until_blocked()
    assert reader.read() == 0
    reader.commit()
    assert outcome(reading) == 0
    writer.write_and_commit()
    assert application.value() == 1


@where([*SERVERS, *OTHER_SERVER_DRIVERS])
@pytest.mark.parametrize("form", FORMS)
def test_exclusive_holder_that_waited_for_a_shared_one_sees_what_it_has_committed(application, broken, holder, form):
    """It writes nothing that the shared one has written, so that the database sees no conflict."""
    broken.tokens = iter([10, 11])
    posting, closing = holder(shared=True), holder(fence=form)
    posting.acquire()
    posting.begin_and_read()
    posting.write()
    reading = closing.start_acquiring_and_reading()
    application.until_blocked()
    posting.commit()
    assert outcome(reading) == 1
    closing.commit()


@where(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_shared_holder_is_refused_under_a_newer_exclusive_one(broken, holder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    reader, writer = holder(shared=True, fence=form), holder()
    reader.acquire()
    writer.acquire()
    writer.begin_and_read()
    writer.write_and_commit()
    seen = outcome(reader.start_reading())
    if form == "lease":
        assert seen == 1
        with pytest.raises(StaleToken):
            reader.commit()
    else:
        assert isinstance(seen, StaleToken)
        reader.rollback()


@where(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_older_exclusive_holder_is_refused_under_a_newer_shared_one(broken, holder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    writer, reader = holder(fence=form), holder(shared=True, fence="lease")
    writer.acquire()
    assert writer.begin_and_read() == 0
    writer.write_and_commit()
    reader.acquire()
    assert reader.begin_and_read() == 1
    reader.commit()
    assert_refused(writer, form)
    assert reader.begin_and_read() == 1
    reader.commit()


@where(SERVERS)
def test_first_shared_holder_waits_no_longer_than_its_wait_for_the_first_exclusive_one(broken, holder):
    broken.tokens = iter([10, 11])
    writer, reader = holder(), holder(shared=True, wait=0.6)
    writer.acquire()
    writer.begin_and_read()
    with pytest.raises(RowLocked):
        reader.acquire()
    writer.rollback()


# Several locks


@where(EVERY)
@pytest.mark.parametrize("stale", [1, 2])
def test_one_stale_lock_of_several_refuses_the_transaction(application, broken, stale):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    application.add_fence(name=f"order:{stale}", token=99)
    session = application.session()
    one, two = session.lock("order", 1), session.lock("order", 2)
    with pytest.raises(StaleToken, match=f"order:{stale}"), one, two, session.transaction():
        session.add_one()
    assert application.value() == 0
    session.close()


@where(EVERY)
@pytest.mark.parametrize("outer", [{"shared": True}, {"fence": "lease"}, {}], ids=["shared", "lease", "transaction"])
def test_lock_inside_a_lock_in_every_form(application, broken, outer):
    broken.tokens = iter(range(10, 100))
    session = application.session()
    for number, inner in enumerate([{"shared": True}, {"fence": "lease"}, {"fence": "lease", "shared": True}, {}], 1):
        one, two = session.lock("order", 1, **outer), session.lock("order", 1 + number, **inner)
        with one, two, session.transaction():
            session.add_one()
        assert application.value() == number
    session.close()


# A store that has lost its data and its time


@where([*EVERY, *OTHER_DRIVERS])
@pytest.mark.parametrize("seen", ["exclusive", "shared", "purged"])
def test_current_holder_of_a_store_that_lost_its_tokens_gets_a_greater_one(application, store, seen):
    highest = 2 * 10**15
    if seen == "purged":
        application.add_fence(name="", token=highest)
    session = application.session()
    for number, (form, shared) in enumerate(itertools.product(FORMS, [False, True]), 1):
        if seen == "purged":
            store._tokens = iter([10**15 + 1, highest + 1])
        else:
            tokens = {"token": highest} if seen == "exclusive" else {"token": 1, "s_token": highest}
            application.add_fence(name=f"order:{number}", **tokens)
        with session.lock("order", number, fence=form, shared=shared) as lease, session.transaction():
            session.write(number)
        assert application.value() == number
        if not (shared and seen == "shared"):
            assert lease.token > highest
    session.close()


@where(once(EVERY))
@pytest.mark.parametrize("form", FORMS)
def test_holder_that_a_real_redis_has_forgotten_is_refused_behind_the_next_one(
    application, redis_server, redis_store, holder, form
):
    a, b = holder(fence=form), holder(fence=form)
    first = a.acquire()
    flush(redis_server)
    assert b.acquire() > first
    assert b.begin_and_read() == 0
    b.write_and_commit()
    assert_refused(a, form)
    assert application.value() == 1


# Loss of the lease is seen without the fence, too


@where([*EVERY, *OTHER_DRIVERS])
@pytest.mark.parametrize("form", [*FORMS, False], ids=str)
def test_holder_whose_time_is_over_cannot_commit(application, store, form):
    session = application.session()
    session.begin()
    session.rollback()  # the first connection of a driver may last longer than a short lease
    short = session.lock("order", 42, fence=form, ttl=0.05, renew=False)
    with pytest.raises(LeaseLost), short as lease, session.transaction():
        session.write(1)
        until(lambda: not lease.remaining())
    assert application.value() == 0
    session.close()
