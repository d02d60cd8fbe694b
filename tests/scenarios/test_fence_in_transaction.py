"""The fence in its transaction: no update is lost, whatever the lock service does. Every interleaving is determined, step by step."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest

from dlock_core.errors import RowLocked, SnapshotTooOld, StaleToken
from dlock_core.transactions.retry import is_conflict
from tests.actors import outcome
from tests.scenarios.application import is_serialization_failure
from tests.scenarios.places import (
    EVERY,
    OTHER_DRIVERS,
    OTHER_SERVER_DRIVERS,
    SERVERS,
    committed,
    in_transaction,
    once,
    where,
)


@where(committed(SERVERS))
def test_without_a_fence_two_holders_lose_an_update(application, broken, holder):
    broken.tokens = iter([1, 2])
    a, b = holder(fence=False), holder(fence=False)
    a.acquire(), b.acquire()
    assert a.begin_and_read() == 0
    assert b.begin_and_read() == 0
    a.write_and_commit()
    b.write_and_commit()
    assert application.value() == 1


@where(in_transaction([*SERVERS, *OTHER_SERVER_DRIVERS]))
@pytest.mark.parametrize("exists", [True, False], ids=["row_exists", "first_row"])
def test_newer_holder_waits_at_its_admit_and_reads_what_the_older_one_wrote(application, broken, holder, exists):
    broken.tokens = iter([10, 11])
    if exists:
        application.add_fence()
    a, b = holder(), holder()
    a.acquire(), b.acquire()
    assert a.begin_and_read() == 0
    reading = b.start_reading()
    application.until_blocked()
    a.write_and_commit()
    assert outcome(reading) == 1
    b.write_and_commit()
    assert application.value() == 2


@where([*EVERY, *OTHER_DRIVERS])
def test_older_holder_is_refused_after_a_newer_one_and_writes_nothing(application, broken, holder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = holder(), holder()
    a.acquire(), b.acquire()
    assert b.begin_and_read() == 0
    b.write_and_commit()
    refused = outcome(a.start_reading())
    assert isinstance(refused, StaleToken)
    assert (refused.token, refused.highest) == (10, 11)
    a.rollback()
    assert application.value() == 1


@where([*EVERY, *OTHER_DRIVERS])
def test_older_holder_that_swallows_the_refusal_can_neither_write_nor_commit(application, broken, holder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = holder(), holder()
    a.acquire(), b.acquire()
    b.begin_and_read()
    b.write_and_commit()
    assert isinstance(outcome(a.start_reading()), StaleToken)
    with pytest.raises(StaleToken):
        a.write()
    # Django rolls back a transaction in which a statement has failed, without another error.
    with nullcontext() if application.place.orm == "django" else pytest.raises(StaleToken):
        a.commit()
    assert application.value() == 1


@where(in_transaction(EVERY))
def test_older_holder_that_a_broken_store_still_believes_in_starts_over_behind_the_newer_one(
    application, broken, holder
):
    broken.tokens = iter([10, 11, 3])
    a, b = holder(), holder()
    a.acquire(), b.acquire()
    assert b.begin_and_read() == 0
    b.write_and_commit()
    assert a.begin_and_read() == 1
    a.write_and_commit()
    assert application.value() == 2


@where(in_transaction(EVERY))
def test_greater_token_is_never_asked_for_after_something_was_read(application, broken, holder):
    broken.tokens = iter([10, 11, 12])
    a, b = holder(), holder()
    a.acquire(), b.acquire()
    assert a.begin_and_read() == 0
    a.write_and_commit()
    assert b.begin_and_read() == 1
    b.write_and_commit()
    assert isinstance(outcome(a.start_reading()), StaleToken)
    a.rollback()
    assert application.value() == 2


def acquire_in_a_savepoint(holder):
    """Acquire the lock and read in a savepoint that is rolled back, and the admit with it."""

    def step():
        with suppress(ZeroDivisionError), holder.session.savepoint():
            holder._acquire()
            holder._read()
            raise ZeroDivisionError

    holder.begin()
    holder.do(step)


@where(committed([*SERVERS, *OTHER_SERVER_DRIVERS]))
@pytest.mark.parametrize("then", ["writes", "commits"])
def test_admit_lost_with_its_savepoint_is_not_replaced_by_a_greater_token(application, broken, holder, then):
    """Databases release the row with the savepoint: a newer holder may be admitted in between, after we have read."""
    broken.tokens = iter([10, 11, 12])
    application.add_fence()
    a, b = holder(), holder()
    acquire_in_a_savepoint(a)
    assert a.seen == 0
    b.acquire()
    assert b.begin_and_read() == 0
    b.write_and_commit()
    with pytest.raises(StaleToken):
        a.write() if then == "writes" else a.commit()
    a.rollback()
    assert application.value() == 1


@where(once(EVERY))
@pytest.mark.parametrize("then", ["writes", "commits"])
def test_admit_lost_with_its_savepoint_is_repeated_before_anything_else(application, broken, holder, then):
    broken.tokens = iter([10])
    a = holder()
    acquire_in_a_savepoint(a)
    if then == "writes":
        a.write()
    a.commit()
    assert application.fences() == [("order:42", 10)]
    assert application.value() == (then == "writes")


@where(in_transaction([*SERVERS, *OTHER_SERVER_DRIVERS]))
@pytest.mark.parametrize("wait", [0, 0.6])
def test_newer_holder_gives_up_at_its_admit_when_its_wait_is_over(application, broken, holder, wait):
    broken.tokens = iter([10, 11])
    a, b = holder(), holder(wait=wait)
    a.acquire(), b.acquire()
    assert a.begin_and_read() == 0
    refused = outcome(b.start_reading())
    assert isinstance(refused, RowLocked)
    assert refused.waited <= 0.6
    b.rollback()
    a.write_and_commit()
    assert application.value() == 1


THREADS = [place for place in OTHER_SERVER_DRIVERS if place.orm == "sqlalchemy"]


@where([*SERVERS, *THREADS])
@pytest.mark.parametrize("form", ["transaction", "lease"])
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_session_has_its_own_lock_timeout_back(broken, holder, form, shared):
    broken.tokens = iter([10])
    a = holder(fence=form, shared=shared, lock_timeout=True)
    a.acquire()
    assert a.lock_timeout() == 77
    a.begin_and_read()
    assert a.lock_timeout() == 77
    a.commit()
    assert a.lock_timeout() == 77


@where(in_transaction([*SERVERS, *THREADS]))
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("ends", ["in_time", "too_late"])
def test_session_that_had_to_wait_has_its_own_lock_timeout_back(application, broken, holder, shared, ends):
    broken.tokens = iter([10, 11])
    application.add_fence(s_token=2)
    a, b = holder(), holder(shared=shared, wait=0.6 if ends == "too_late" else 20, lock_timeout=True)
    a.acquire(), b.acquire()
    a.begin_and_read()
    reading = b.start_reading()
    if ends == "in_time":
        application.until_blocked()
        a.write_and_commit()
        assert outcome(reading) == 1
        assert b.lock_timeout() == 77
    else:
        assert isinstance(outcome(reading), RowLocked)
    b.rollback()
    assert b.lock_timeout() == 77


@where([place for place in [*SERVERS, *THREADS] if place.level == "repeatable read"])
def test_lock_taken_after_the_snapshot_protects_nothing_and_is_refused(application, broken, holder):
    """SnapshotTooOld is needed: with "ignore", MariaDB loses an update under a lock that works."""
    broken.tokens = iter([10, 11, 12])
    careless, other = holder(snapshot="ignore"), holder()
    assert careless.begin_and_read() == 0
    other.acquire()
    other.begin_and_read()
    other.write_and_commit()
    with pytest.raises(SnapshotTooOld):
        careless.do(careless.session.lock("order", 42).acquire)
    if application.server == "mariadb":
        careless.acquire()
        assert careless.read() == 0
        careless.write_and_commit()
        assert application.value() == 1  # of two
    else:
        assert is_serialization_failure(outcome(careless.start_acquiring()))


@where([*EVERY, *OTHER_DRIVERS])
def test_two_transactions_under_one_lease_are_both_admitted(application, broken, holder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = holder(), holder()
    a.acquire()
    for expected in (0, 1):
        assert a.begin_and_read() == expected
        a.write_and_commit()
    b.acquire()
    assert b.begin_and_read() == 2
    b.write_and_commit()
    assert isinstance(outcome(a.start_reading()), StaleToken)
    a.rollback()
    assert application.value() == 3


@where([*EVERY, *OTHER_DRIVERS])
@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_row_that_a_newer_holder_has_created_refuses_the_older_one(application, broken, holder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = holder(application.parcel, 4711), holder(application.parcel, 4711, fence=form)
    a.acquire(), b.acquire()
    b.begin()
    b.do(b.session.add_parcel, 4711)
    b.commit()
    refused = outcome(a.start_reading())
    assert isinstance(refused, StaleToken)
    assert (refused.token, refused.highest) == (10, 11)


@where(committed([*SERVERS, *OTHER_SERVER_DRIVERS]))
def test_newer_holder_waits_for_the_older_one_although_somebody_else_has_created_the_row(application, broken, holder):
    broken.tokens = iter([10, 11])
    a, b = holder(application.parcel, 4711), holder(application.parcel, 4711)
    a.acquire(), b.acquire()
    assert a.begin_and_read() == 0
    somebody = application.session()
    with somebody.transaction():
        somebody.add_parcel(4711)
    somebody.close()
    reading = b.start_reading()
    application.until_blocked()
    a.write_and_commit()
    assert outcome(reading) == 1


@where([place for place in [*EVERY, *THREADS] if place.level != "DEFERRED"])
@pytest.mark.parametrize("same", [True, False], ids=["one_lock", "many_locks"])
def test_first_admits_at_the_same_time_end_well_or_in_a_conflict_to_be_retried(application, broken, same):
    broken.tokens = itertools.count(1)

    def add(session, number):
        with session.lock("new", 1 if same else number, wait=20), session.transaction():
            session.write(session.read() + 1 if same else 1)

    def create(session, number):
        for attempt in range(200):
            try:
                add(session, number)
            except Exception as error:
                if not is_conflict(error):
                    raise
            else:
                return attempt
        raise AssertionError("never succeeded")

    def create_some(start):
        session = application.session()
        try:
            return [create(session, start * 100 + number) for number in range(5)]
        finally:
            session.close()

    with ThreadPoolExecutor(4) as pool:
        assert len([attempts for done in pool.map(create_some, range(4)) for attempts in done]) == 20
    assert application.value() == (20 if same else 1)
    assert len(application.fences()) == (1 if same else 20)
