"""The fence: no update is lost, whatever the lock service does. Every interleaving is written down, step by step."""

import concurrent.futures
import contextlib
import itertools
import threading

import pytest
from sqlalchemy import create_engine, event, select, text, update
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from dlock_core.errors import DLockError, LeaseLost, NotSupported, RowLocked, SnapshotTooOld, StaleToken
from dlock_core.transactions.retry import DatabaseFailure, classify, is_conflict
from sqla_dlock import fencing, lock
from sqla_dlock.transactions import on_end
from tests.chaos import EverybodyIn
from tests.mysql_server import DIALECT
from tests.outcomes import outcome
from tests.sqla_dlock.adders import (
    Adder,
    add_counter,
    add_fence,
    fences,
    isolated,
    set_timeout,
    timeout,
    value,
    wait_until_blocked,
)
from tests.sqla_dlock.leases import expire, is_held
from tests.sqla_dlock.models import Counter, Delivery, Stock

SERVERS = [
    ("psycopg2", "read committed"),
    ("postgresql", "read committed"),
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "read committed"),
    ("mariadb", "repeatable read"),
    ("mariadb", "serializable"),
    ("pymysql", "repeatable read"),
]
SQLITE = [("sqlite", "IMMEDIATE"), ("sqlite", "DEFERRED")]
EVERY = [*SERVERS, *SQLITE]
COMMITTED = [pair for pair in SERVERS if pair[1] == "read committed"]
ONCE = [*COMMITTED, ("pymysql", "repeatable read"), ("sqlite", "IMMEDIATE")]
OUTER = [*COMMITTED, ("pymysql", "read committed"), ("sqlite", "IMMEDIATE")]
MIXED = [pair for pair in EVERY if pair not in (("mariadb", "serializable"), ("sqlite", "IMMEDIATE"))]
"""Where a reader does not keep writers out by itself."""
IN_TRANSACTION = [
    pair for pair in EVERY if pair not in (("postgresql", "repeatable read"), ("postgresql", "serializable"))
]
"""Where an exclusive holder is first admitted in its transaction: in PostgreSQL's snapshots it is announced before."""
FORMS = ["transaction", "lease"]


def levels(pairs):
    return pytest.mark.parametrize("engine", pairs, ids=lambda pair: "-".join(pair).replace(" ", "_"), indirect=True)


@pytest.fixture
def another(request, make_engine):
    """Make one more engine for the database and the isolation level of the test."""
    return lambda **options: isolated(make_engine, *request.node.callspec.params["engine"], **options)


@pytest.fixture
def engine(another):
    """A database at an isolation level, with a counter "a" at 0."""
    made = another()
    add_counter(made)
    return made


@pytest.fixture
def broken():
    """A store that grants everybody everything; `broken.tokens` are what it gives next."""
    return EverybodyIn()


@pytest.fixture
def adder(broken):
    with contextlib.ExitStack() as stack:
        yield lambda *args, store=broken, **options: stack.enter_context(Adder(*args, store=store, **options))


def is_snapshot(engine):
    return engine.dialect.name == "postgresql" and engine.dialect._on_connect_isolation_level != "READ COMMITTED"


def is_refusal(error, engine):
    """Under snapshots PostgreSQL answers for the fence, before the fence can."""
    return isinstance(error, StaleToken) or (is_snapshot(engine) and classify(error) is DatabaseFailure.SERIALIZATION)


def set_to(session, number):
    session.execute(update(Counter).values(value=number))


# Without a fence


@levels(COMMITTED)
def test_without_a_fence_two_holders_lose_an_update(engine, broken, adder):
    broken.tokens = iter([1, 2])
    a, b = adder(engine, fence=False), adder(engine, fence=False)
    a.take(), b.take()
    assert a.start().result() == 0
    assert b.start().result() == 0
    a.finish()
    b.finish()
    assert value(engine) == 1


# fence="transaction"


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("exists", [True, False])
def test_newer_holder_waits_at_its_admit_and_reads_what_the_older_one_wrote(engine, broken, adder, exists):
    broken.tokens = iter([10, 11])
    if exists:
        add_fence(engine)
    a, b = adder(engine), adder(engine)
    a.take(), b.take()
    assert a.start().result() == 0
    reading = b.start()
    wait_until_blocked(engine)
    a.finish()
    seen = outcome(reading)
    if is_snapshot(engine):
        assert classify(seen) is DatabaseFailure.SERIALIZATION
        b.rollback()
        assert b.start().result() == 1
    else:
        assert seen == 1
    b.finish()
    assert value(engine) == 2


@levels(EVERY)
def test_older_holder_is_refused_after_a_newer_one_and_writes_nothing(engine, broken, adder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(engine), adder(engine)
    a.take(), b.take()
    assert b.start().result() == 0
    b.finish()
    refused = outcome(a.start())
    assert isinstance(refused, StaleToken)
    assert (refused.token, refused.highest) == (10, 11)
    a.rollback()
    assert value(engine) == 1


@levels(EVERY)
def test_older_holder_that_swallows_the_refusal_can_neither_write_nor_commit(engine, broken, adder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(engine), adder(engine)
    a.take(), b.take()
    b.start().result()
    b.finish()
    assert isinstance(outcome(a.start()), StaleToken)
    with pytest.raises(StaleToken):
        a.write()
    with pytest.raises(StaleToken):
        a.commit()
    a.rollback()
    assert value(engine) == 1


@levels(IN_TRANSACTION)
def test_older_holder_that_a_broken_store_still_believes_in_starts_over_behind_the_newer_one(engine, broken, adder):
    broken.tokens = iter([10, 11, 3])
    a, b = adder(engine), adder(engine)
    a.take(), b.take()
    assert b.start().result() == 0
    b.finish()
    assert a.start().result() == 1
    a.finish()
    assert value(engine) == 2


@levels(IN_TRANSACTION)
def test_greater_token_is_never_asked_for_after_something_was_read(engine, broken, adder):
    broken.tokens = iter([10, 11, 12])
    a, b = adder(engine), adder(engine)
    a.take(), b.take()
    assert a.start().result() == 0
    a.finish()
    assert b.start().result() == 1
    b.finish()
    refused = outcome(a.start())
    assert isinstance(refused, StaleToken)
    a.rollback()
    assert value(engine) == 2


def take_in_a_savepoint(adder):
    """Take the lock and read in a savepoint that is rolled back, with all that the admit did."""
    with contextlib.suppress(ZeroDivisionError), adder.session.begin_nested():
        adder.session.execute(select(Delivery)).all()  # SQLAlchemy's savepoint begins with its first statement
        adder.lock.acquire()
        adder.read()
        raise ZeroDivisionError


@levels(COMMITTED)
@pytest.mark.parametrize("then", ["writes", "commits"])
def test_admit_lost_with_its_savepoint_is_not_replaced_by_a_greater_token(engine, broken, adder, then):
    """Databases let go of the row with the savepoint: somebody newer may come in between, after we have read."""
    broken.tokens = iter([10, 11, 12])
    add_fence(engine)
    a, b = adder(engine), adder(engine)
    a.now(take_in_a_savepoint, a)
    assert a.seen == 0
    b.take()
    reading = b.start()
    assert reading.result() == 0
    b.finish()
    with pytest.raises(StaleToken):
        a.write() if then == "writes" else a.commit()
    a.rollback()
    assert value(engine) == 1


@levels([*COMMITTED, ("sqlite", "IMMEDIATE")])
@pytest.mark.parametrize("then", ["writes", "commits"])
def test_admit_lost_with_its_savepoint_is_repeated_before_anything_else(engine, broken, adder, then):
    broken.tokens = iter([10])
    a = adder(engine)
    a.now(take_in_a_savepoint, a)
    if then == "writes":
        a.write()
    a.commit()
    assert fences(engine) == [("order:42", 10)]
    assert value(engine) == (then == "writes")


@levels([("mariadb", "read committed"), ("pymysql", "repeatable read")])
@pytest.mark.parametrize("nested", [False, True])
def test_transaction_that_a_deadlock_has_rolled_back_is_admitted_again_before_it_goes_on(engine, broken, nested):
    """MariaDB and MySQL roll all of it back, and whoever swallows the error goes on in a new transaction."""
    broken.tokens = iter([10])
    with Session(engine) as session, session.begin():
        session.add_all(Stock(id=number) for number in (1, 2))

    def change(connection, number):
        connection.execute(update(Stock).where(Stock.id == number).values(pieces=Stock.pieces + 1))

    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        engine.connect() as other,
        Session(engine) as session,
        lock(session, "order", 42, store=broken),
    ):
        change(session, 1)
        other.execute(Stock.__table__.insert(), [{"id": number} for number in range(100, 200)])  # not the victim
        change(other, 2)
        blocked = pool.submit(change, other, 1)
        with pytest.raises(DBAPIError), session.begin_nested() if nested else contextlib.nullcontext():
            change(session, 2)
        blocked.result(30)
        other.rollback()
        assert session.scalar(select(fencing.table.c.token).where(fencing.table.c.name == "order:42")) == 10
        session.commit()
    assert fences(engine) == [("order:42", 10)]


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("wait", [0, 0.6])
def test_newer_holder_gives_up_at_its_admit_when_its_wait_is_over(engine, broken, adder, wait):
    broken.tokens = iter([10, 11])
    a, b = adder(engine), adder(engine, wait=wait)
    a.take(), b.take()
    assert a.start().result() == 0
    refused = outcome(b.start())
    assert isinstance(refused, RowLocked)
    assert refused.waited <= 0.6
    b.rollback()
    a.finish()
    assert value(engine) == 1


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [False, True])
def test_session_has_its_own_lock_timeout_back(another, engine, broken, adder, form, shared):
    broken.tokens = iter([10])
    timed = another(pool_size=1, max_overflow=0)
    set_timeout(timed)
    a = adder(timed, fence=form, shared=shared)
    a.take()
    with timed.connect() as connection:
        assert timeout(connection) == 77
    a.start().result()
    assert a.now(timeout, a.session) == 77
    a.commit()
    with timed.connect() as connection:
        assert timeout(connection) == 77


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ends", ["in time", "too late"])
def test_session_that_had_to_wait_has_its_own_lock_timeout_back(another, engine, broken, adder, shared, ends):
    broken.tokens = iter([10, 11])
    add_fence(engine, s_token=2)
    timed = another(pool_size=1, max_overflow=0)
    set_timeout(timed)
    a, b = adder(engine), adder(timed, shared=shared, wait=0.6 if ends == "too late" else 20)
    a.take(), b.take()
    a.start().result()
    reading = b.start()
    if ends == "in time":
        wait_until_blocked(engine)
        a.finish()
    if outcome(reading) == 1:
        assert b.now(timeout, b.session) == 77
    b.rollback()
    with timed.connect() as connection:
        assert timeout(connection) == 77


@levels([("mariadb", "repeatable read"), ("pymysql", "repeatable read"), ("postgresql", "repeatable read")])
def test_lock_taken_after_the_snapshot_protects_nothing_and_is_refused(engine, broken, adder):
    """What SnapshotTooOld is for: with "ignore" MariaDB loses an update under a lock that works."""
    broken.tokens = iter([10, 11, 12])
    careless, other = adder(engine, snapshot="ignore"), adder(engine)
    assert careless.start().result() == 0
    other.take()
    other.start().result()
    other.finish()
    with pytest.raises(SnapshotTooOld):
        careless.now(lock(careless.session, "order", 42, store=broken).acquire)
    if engine.dialect.name == DIALECT:
        careless.take()
        assert careless.now(careless.read) == 0
        careless.finish()
        assert value(engine) == 1  # of two
    else:
        with pytest.raises(DBAPIError) as caught:
            careless.take()
        assert classify(caught.value) is DatabaseFailure.SERIALIZATION
        careless.rollback()


@levels([*SERVERS, ("sqlite", "IMMEDIATE")])
@pytest.mark.parametrize("same", [True, False], ids=["one_lock", "many_locks"])
def test_first_admits_at_the_same_time_end_well_or_in_a_conflict_to_be_retried(engine, broken, same):
    broken.tokens = itertools.count(1)

    def add(number):
        with Session(engine) as session, lock(session, "new", 1 if same else number, store=broken, wait=20):
            seen = session.scalars(select(Counter.value)).one()
            set_to(session, seen + 1 if same else 1)
            session.commit()

    def create(number):
        for attempt in range(200):
            try:
                add(number)
            except (DBAPIError, DLockError) as error:
                if not is_conflict(error):
                    raise
            else:
                return attempt
        raise AssertionError("never succeeded")

    def create_some(start):
        return [create(start * 100 + number) for number in range(5)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len([attempts for done in pool.map(create_some, range(4)) for attempts in done]) == 20
    assert value(engine) == (20 if same else 1)
    assert len(fences(engine)) == (1 if same else 20)


@levels(EVERY)
def test_two_transactions_under_one_lease_are_both_admitted(engine, broken, adder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(engine), adder(engine)
    a.take()
    for expected in (0, 1):
        assert a.start().result() == expected
        a.finish()
    b.take()
    assert b.start().result() == 2
    b.finish()
    assert isinstance(outcome(a.start()), StaleToken)
    a.rollback()
    assert value(engine) == 3


@levels(ONCE)
def test_statement_waits_for_the_admit_however_it_is_sent(engine, broken, adder):
    """A flush, a Core statement, a bulk insert, a statement on the session's connection: whatever comes first."""
    broken.tokens, broken.forgetful = itertools.count(10), True
    firsts = [
        lambda session: (session.add(Counter(name="b")), session.flush()),
        lambda session: session.execute(Counter.__table__.insert(), [{"name": "b", "value": 0}] * 2),
        lambda session: session.bulk_save_objects([Counter(name="b")]),
        lambda session: session.connection().exec_driver_sql("INSERT INTO counter (name, value) VALUES ('b', 0)"),
        lambda session: session.connection().connection.cursor().execute("INSERT INTO counter VALUES (7, 'b', 0)"),
    ]
    add_fence(engine, token=99)
    for first in firsts:
        late = adder(engine)
        late.take()
        with pytest.raises(StaleToken):
            late.now(first, late.session)
        late.rollback()
    with engine.connect() as connection:
        assert connection.execute(select(Counter.name)).all() == [("a",)]


# fence="lease"


@levels(EVERY)
def test_older_holder_cannot_commit_once_a_newer_one_was_announced(engine, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(engine, fence="lease"), adder(engine, fence="lease")
    a.take()
    sqlite = engine.dialect.name == "sqlite"
    if not sqlite:
        assert a.start().result() == 0
    b.take()  # does not wait for a
    if sqlite:  # has one writer at a time
        assert a.start().result() == 0
    a.write()
    with pytest.raises((StaleToken, DBAPIError)) as caught:
        a.commit()
    assert is_refusal(caught.value, engine)
    a.rollback()
    assert b.start().result() == 0
    b.finish()
    assert value(engine) == 1


@levels(SERVERS)
def test_newer_holder_is_not_announced_between_the_confirm_of_an_older_one_and_its_commit(engine, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(engine, fence="lease"), adder(engine, fence="lease")
    a.take()
    a.start().result()
    confirmed, go_on = threading.Event(), threading.Event()

    def stand_still():
        confirmed.set()
        go_on.wait(60)

    a.now(lambda: on_end(a.session, lambda _: None, before_commit=stand_still))
    a.write()
    committing = a.do(a.session.commit)
    assert confirmed.wait(60)
    taking = b.do(b.lock.__enter__)
    wait_until_blocked(engine)
    go_on.set()
    committing.result(60)
    taking.result(60)
    assert b.start().result() == 1
    b.finish()
    b.now(b.release)
    assert value(engine) == 2


@levels(EVERY)
def test_lease_of_several_transactions_commits_each_of_them_until_it_is_overtaken(engine, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(engine, fence="lease"), adder(engine, fence="lease")
    a.take()
    for expected in (0, 1):
        assert a.start().result() == expected
        a.finish()
    b.take()
    a.start().result()
    a.write()
    with pytest.raises(StaleToken):
        a.commit()
    assert value(engine) == 2


@levels(EVERY)
def test_announce_behind_a_newer_holder_is_refused(engine, broken, adder):
    broken.tokens, broken.forgetful = iter([11, 10]), True
    a, b = adder(engine, fence="lease"), adder(engine, fence="lease")
    a.take()
    with pytest.raises(StaleToken):
        b.take()


@levels([pair for pair in EVERY if pair[1] != "DEFERRED"])
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_both_forms_refuse_each_other(engine, broken, adder, first, second):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(engine, fence=first), adder(engine, fence=second)
    a.take()
    b.take()
    assert b.start().result() == 0
    b.finish()
    seen = outcome(a.start())
    if first == "lease":
        assert seen == 1
        a.write()
        with pytest.raises(StaleToken):
            a.commit()
    else:
        assert isinstance(seen, StaleToken)
        a.rollback()
    assert value(engine) == 1


# Shared leases


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [False, True])
def test_shared_holders_read_at_the_same_time(engine, broken, adder, form, inside):
    broken.tokens = iter([10, 11])
    a, b = adder(engine, fence=form, shared=True), adder(engine, fence=form, shared=True)
    if inside:  # some shared holder has been there since the last exclusive one
        add_fence(engine, s_token=2)
    for reader in (a, b):
        if inside:
            reader.now(reader.session.begin)
        reader.take()
        assert reader.start().result() == 0
    b.commit()
    if form == "lease" and is_snapshot(engine):  # b's announce came after a's snapshot
        with pytest.raises(DBAPIError) as caught:
            a.commit()
        assert classify(caught.value) is DatabaseFailure.SERIALIZATION
    else:
        a.commit()


@levels(SERVERS)
def test_only_the_first_shared_holder_after_an_exclusive_one_writes_and_before_its_transaction(engine, broken, adder):
    broken.tokens = iter([10, 11, 12, 13])
    writer, *readers = adder(engine), *(adder(engine, shared=True) for _ in range(3))
    writer.take()
    writer.start().result()
    writer.finish()
    for reader in readers:
        reader.take()
    for reader in readers:
        assert reader.start().result() == 1
    with engine.connect() as connection:
        assert connection.execute(select(fencing.table.c.s_token)).scalar_one() == 11
    for reader in readers:
        reader.commit()


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("mariadb", "repeatable read")])
def test_first_shared_holder_that_asks_inside_a_transaction_keeps_the_others_waiting_to_its_end(engine, broken, adder):
    broken.tokens = iter([11, 12])
    add_fence(engine, token=10)
    with engine.connect() as one, engine.connect() as other:
        a, b = adder(one, shared=True), adder(other, shared=True)
        a.take()
        assert a.start().result() == 0
        b.take()
        reading = b.start()
        wait_until_blocked(engine)
        a.commit()
        assert reading.result(60) == 0
        b.commit()
        for each in (a, b):
            each.now(each.release)
            each.now(each.session.close)


# Shared against exclusive, in every mix of forms


@levels(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("transactions", [1, 2])
@pytest.mark.parametrize("exclusive", FORMS)
def test_older_exclusive_holder_and_a_newer_shared_one_never_both_commit_what_the_other_did_not_see(
    engine, broken, adder, exclusive, transactions, shared
):
    if engine.dialect.name == "sqlite" and (exclusive, transactions) == ("transaction", 1):
        pytest.skip("SQLite has one writer at a time")
    broken.tokens = iter([10, 11])
    a, b = adder(engine, fence=exclusive), adder(engine, fence=shared, shared=True, wait=0.6)
    a.take()
    assert a.start().result() == 0
    if transactions == 2:
        a.commit()
    posted = succeeds(lambda: post(b))
    closed = succeeds(a.finish)
    a.rollback()
    assert value(engine) == posted + closed == 1
    assert posted == (exclusive == "lease" or transactions == 2)


@levels(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("exclusive", FORMS)
@pytest.mark.parametrize("token", [9, 12])
def test_shared_lease_of_two_transactions_is_refused_when_an_exclusive_one_was_between_them(
    engine, broken, adder, exclusive, shared, token
):
    broken.tokens, broken.forgetful = iter([7, 10, token]), True
    first, reader = adder(engine, shared=True), adder(engine, shared=True, fence=shared)
    writer = adder(engine, fence=exclusive)
    first.take()  # leaves the mark: 7
    reader.take()
    assert reader.start().result() == 0
    reader.commit()
    wrote = succeeds(lambda: (writer.take(), raise_if_error(writer.start()), writer.finish()))
    writer.rollback()
    read = succeeds(lambda: (raise_if_error(reader.do(reader.session.connection)), reader.finish()))
    reader.rollback()
    assert value(engine) == wrote + read == 1


def post(adder):
    """Add one without having read."""
    adder.take()
    adder.now(lambda: adder.session.execute(update(Counter).values(value=Counter.value + 1)))
    adder.commit()


def raise_if_error(future):
    if isinstance(found := outcome(future), BaseException):
        raise found


def take_and_read(adder):
    """Take and read in one step, whichever of them has to wait."""
    adder._is_taken = True
    return adder.do(lambda: (adder.lock.__enter__(), adder.read())[1])


def succeeds(work):
    """Whether a holder's work was committed; it may only fail in a conflict."""
    try:
        work()
    except (DLockError, DBAPIError) as error:
        if not isinstance(error, LeaseLost | SnapshotTooOld) and not is_conflict(error):
            raise
        return False
    return True


@levels(SERVERS)
def test_newer_exclusive_holder_waits_for_shared_transactions(engine, broken, adder):
    broken.tokens = iter([10, 11])
    reader, writer = adder(engine, shared=True), adder(engine)
    reader.take()
    assert reader.start().result() == 0
    reading = take_and_read(writer)
    wait_until_blocked(engine)
    assert reader.now(reader.read) == 0
    reader.commit()
    assert outcome(reading) == 0
    writer.finish()
    assert value(engine) == 1


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
def test_exclusive_holder_that_waited_for_a_shared_one_sees_what_it_has_committed(engine, broken, adder, form):
    """It writes nothing that the shared one has written, so that the database sees no conflict."""
    broken.tokens = iter([10, 11])
    posting, closing = adder(engine, shared=True), adder(engine, fence=form)
    posting.take()
    posting.start().result()
    posting.write()
    reading = take_and_read(closing)
    wait_until_blocked(engine)
    posting.commit()
    assert outcome(reading) == 1
    closing.commit()


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_shared_holder_is_refused_under_a_newer_exclusive_one(engine, broken, adder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    reader, writer = adder(engine, shared=True, fence=form), adder(engine)
    reader.take()
    writer.take()
    writer.start().result()
    writer.finish()
    seen = outcome(reader.start())
    if form == "lease":
        assert seen == 1
        with pytest.raises(StaleToken):
            reader.commit()
    else:
        assert isinstance(seen, StaleToken)
        reader.rollback()


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_older_exclusive_holder_is_refused_under_a_newer_shared_one(engine, broken, adder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    writer, reader = adder(engine, fence=form), adder(engine, shared=True, fence="lease")
    writer.take()
    assert writer.start().result() == 0
    writer.finish()
    reader.take()
    assert reader.start().result() == 1
    reader.commit()
    seen = outcome(writer.start())
    if form == "lease":
        writer.write()
        with pytest.raises(StaleToken):
            writer.commit()
    else:
        assert isinstance(seen, StaleToken)
    writer.rollback()
    assert reader.start().result() == 1
    reader.commit()


@levels(SERVERS)
def test_first_shared_holder_waits_no_longer_than_its_wait_for_the_first_exclusive_one(engine, broken, adder):
    broken.tokens = iter([10, 11])
    writer, reader = adder(engine), adder(engine, shared=True, wait=0.6)
    writer.take()
    writer.start().result()
    with pytest.raises(RowLocked):
        reader.take()
    writer.rollback()


# Several locks, engines, connections


@levels(EVERY)
@pytest.mark.parametrize("stale", [1, 2])
def test_one_stale_lock_of_several_refuses_the_transaction(engine, broken, stale):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    add_fence(engine, name=f"order:{stale}", token=99)
    with Session(engine) as session:
        both = [lock(session, "order", number, store=broken) for number in (1, 2)]
        with pytest.raises(StaleToken, match=f"order:{stale}"), both[0], both[1]:
            set_to(session, 1)
    assert value(engine) == 0


@levels(EVERY)
@pytest.mark.parametrize("inner", [{"shared": True}, {"fence": "lease"}, {"fence": "lease", "shared": True}, {}])
@pytest.mark.parametrize("outer", [{"shared": True}, {"fence": "lease"}, {}])
def test_lock_inside_a_lock_in_every_form(engine, broken, outer, inner):
    broken.tokens = iter([10, 11])
    with Session(engine) as session:
        locks = lock(session, "order", 1, store=broken, **outer), lock(session, "order", 2, store=broken, **inner)
        with locks[0], locks[1]:
            set_to(session, 1)
            session.commit()
    assert value(engine) == 1


@pytest.fixture
def ledger(make_engine):
    """A second database."""
    return make_engine("sqlite")


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
def test_engine_that_the_lock_does_not_protect_gets_no_fence(engine, ledger, broken):
    broken.tokens = iter([10])
    with (
        Session(engine, binds={Delivery: ledger, Stock: ledger, Counter: engine}) as session,
        lock(session, "order", 42, bind=Counter, store=broken),
    ):
        session.execute(select(Delivery)).all()
        set_to(session, 1)
        session.commit()
    assert fences(engine) == [("order:42", 10)]
    assert fences(ledger) == []


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
@pytest.mark.parametrize("stale", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_stale_lock_on_one_of_two_engines_commits_on_neither(engine, ledger, broken, stale, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    add_counter(ledger)
    with Session(engine, binds={Stock: ledger}) as session:
        locks = [
            lock(session, "order", 1, store=broken, fence=form),
            lock(session, "stock", 1, store=broken, fence=form, bind=ledger),
        ]
        with locks[0], locks[1]:
            if form == "lease":
                overtake(engine if stale == 1 else ledger, "order:1" if stale == 1 else "stock:1")
            else:
                add_fence(engine if stale == 1 else ledger, name="order:1" if stale == 1 else "stock:1", token=99)
            for bind in (engine, ledger):
                with contextlib.suppress(StaleToken):
                    session.execute(update(Counter).values(value=1), bind_arguments={"bind": bind})
            with pytest.raises(StaleToken):
                session.commit()
            session.rollback()
    assert (value(engine), value(ledger)) == (0, 0)


def overtake(engine, name):
    with engine.begin() as connection:
        connection.execute(update(fencing.table).where(fencing.table.c.name == name).values(token=99, holder="x"))


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
def test_two_leases_on_two_engines_protect_one_each(engine, ledger, broken):
    broken.tokens = iter([10, 11])
    add_counter(ledger)
    with Session(engine) as session:
        locks = lock(session, "order", 1, store=broken), lock(session, "stock", 1, store=broken, bind=ledger)
        with locks[0], locks[1]:
            for bind in (engine, ledger):
                session.execute(update(Counter).values(value=1), bind_arguments={"bind": bind})
            session.commit()
    assert (fences(engine), fences(ledger)) == ([("order:1", 10)], [("stock:1", 11)])
    assert (value(engine), value(ledger)) == (1, 1)


@levels([("mariadb", "repeatable read"), ("postgresql", "read committed")])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stale", [False, True])
def test_two_phase_commit_is_fenced_before_it_is_prepared(engine, broken, form, stale):
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            if connection.exec_driver_sql("SHOW max_prepared_transactions").scalar() == "0":
                pytest.skip("max_prepared_transactions is 0 on this server")
    broken.tokens, broken.forgetful = iter([10]), True
    with Session(engine, twophase=True) as session, lock(session, "order", 42, store=broken, fence=form):
        if stale and form == "lease":
            overtake(engine, "order:42")
        elif stale:
            add_fence(engine, token=99)
        if stale:
            with pytest.raises(StaleToken):
                set_to(session, 1)
                session.commit()
            session.rollback()
        else:
            set_to(session, 1)
            session.commit()
    assert value(engine) == (not stale)


MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


@levels(OUTER)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_session_on_a_connection_with_an_outer_transaction_is_fenced_in_it(engine, broken, mode, form):
    broken.tokens, broken.forgetful = iter([10]), True
    with engine.connect() as connection, connection.begin() as outer:
        with (
            Session(connection, join_transaction_mode=mode) as session,
            lock(session, "order", 42, store=broken, fence=form),
        ):
            set_to(session, 1)
            session.commit()
        if mode != "control_fully":
            outer.commit()
    assert value(engine) == 1
    assert fences(engine) == [("order:42", 10)]


@levels(OUTER)
@pytest.mark.parametrize("mode", MODES)
def test_session_on_a_connection_with_an_outer_transaction_is_refused_in_it(engine, broken, mode):
    broken.tokens, broken.forgetful = iter([10]), True
    add_fence(engine, token=99)
    with pytest.raises(StaleToken), engine.begin() as connection:
        with (
            Session(connection, join_transaction_mode=mode) as session,
            contextlib.suppress(StaleToken),
            lock(session, "order", 42, store=broken),
        ):
            set_to(session, 1)
        if mode == "control_fully":
            raise StaleToken("order:42", token=10)  # the session has rolled back itself
    assert value(engine) == 0


@levels([("postgresql", "read committed"), ("mariadb", "read committed")])
def test_outer_transaction_is_fenced_also_when_its_engine_was_named(engine, broken):
    broken.tokens, broken.forgetful = iter([10]), True
    with (
        pytest.raises(StaleToken),
        engine.begin() as connection,
        Session(connection) as session,
        lock(session, "order", 42, store=broken, fence="lease", bind=engine),
    ):
        overtake(engine, "order:42")
        if not fences(engine):
            add_fence(engine, token=99)
        set_to(session, 1)
        session.commit()
    assert value(engine) == 0


# What cannot be fenced


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_engine_in_autocommit_is_refused_before_anything_is_written(engine, broken, form):
    broken.tokens = itertools.count(10)
    automatic = engine.execution_options(isolation_level="AUTOCOMMIT")
    with (
        Session(automatic) as session,
        lock(session, "order", 42, store=broken, fence=form),
        pytest.raises(NotSupported, match="AUTOCOMMIT"),
    ):
        set_to(session, 1)
    with Session(automatic) as session, lock(session, "order", 42, store=broken, fence=False):
        set_to(session, 2)
        session.commit()
    assert value(engine) == 2


@pytest.mark.parametrize("name", ["postgresql", "mariadb", "pymysql"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.skipif(not hasattr(DefaultDialect, "detect_autocommit_setting"), reason="SQLAlchemy 2.0.43")
def test_connection_that_commits_behind_sqlalchemys_back_is_refused(make_engine, store, name, form):
    engine = make_engine(name, connect_args={"autocommit": True})
    with Session(engine) as session, lock(session, "order", 42, fence=form), pytest.raises(NotSupported):
        session.execute(text("SELECT 1"))


def make_read_only(engine):
    sql = {
        "postgresql": "SET default_transaction_read_only = on",
        DIALECT: "SET SESSION TRANSACTION READ ONLY",
        "sqlite": "PRAGMA query_only = ON",
    }[engine.dialect.name]

    @event.listens_for(engine, "connect")
    def connected(connection, _):
        cursor = connection.cursor()
        cursor.execute(sql)
        cursor.close()
        connection.commit()


@levels([*COMMITTED, ("pymysql", "repeatable read"), ("sqlite", "DEFERRED")])
@pytest.mark.parametrize("form", FORMS)
def test_database_that_may_not_be_written_says_so_and_the_lease_is_given_back(another, engine, store, form):
    read_only = another()
    make_read_only(read_only)
    with Session(read_only) as session, pytest.raises(DBAPIError) as caught, lock(session, "order", 42, fence=form):
        session.scalars(select(Counter)).all()
    assert "that may be written" in caught.value.__notes__[0]
    assert not is_held(store)
    with Session(read_only) as session, lock(session, "order", 42, fence=False):
        assert session.scalars(select(Counter.value)).one() == 0


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_missing_table_says_how_to_make_it_and_the_lease_is_given_back(engine, store, form):
    fencing.metadata.drop_all(engine)
    try:
        with (
            Session(engine) as session,
            pytest.raises(DBAPIError) as caught,
            lock(session, "order", 42, fence=form),
        ):
            session.scalars(select(Counter)).all()
        assert "sqla_dlock.fencing.metadata.create_all()" in caught.value.__notes__[0]
        assert not is_held(store)
    finally:
        fencing.metadata.create_all(engine)


# A store that has lost its data and its time


@levels(EVERY)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seen", ["exclusive", "shared", "purged"])
def test_current_holder_of_a_store_that_lost_its_tokens_gets_a_greater_one(engine, store, seen, form, shared):
    highest = 2 * 10**15
    if seen == "purged":
        store._tokens = iter([10**15 + 1, highest + 1])
        add_fence(engine, name="", token=highest)
    else:
        add_fence(engine, **({"token": highest} if seen == "exclusive" else {"token": 1, "s_token": highest}))
    with Session(engine) as session, lock(session, "order", 42, fence=form, shared=shared) as lease:
        set_to(session, 1)
        session.commit()
        assert value(engine) == 1
        if not (shared and seen == "shared"):
            assert lease.token > highest


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_holder_that_a_real_redis_has_forgotten_is_refused_behind_the_next_one(
    engine, redis_server, redis_store, adder, form
):
    a, b = adder(engine, fence=form, store=redis_store), adder(engine, fence=form, store=redis_store)
    first = a.take()
    flush(redis_server)
    assert b.take() > first
    assert b.start().result() == 0
    b.finish()
    refused = outcome(a.start())
    if form == "lease":
        a.write()
        with pytest.raises(StaleToken):
            a.commit()
    else:
        assert isinstance(refused, StaleToken)
        a.rollback()
    assert value(engine) == 1


def flush(server):
    import redis

    with redis.Redis(port=server.port) as client:
        client.flushall()


# Loss of the lease in the middle of it all is seen without the fence, too


@levels(EVERY)
@pytest.mark.parametrize("form", [*FORMS, False])
def test_holder_whose_time_is_over_cannot_commit(engine, store, form):
    with (
        Session(engine) as session,
        pytest.raises(LeaseLost),
        lock(session, "order", 42, fence=form, ttl=0.05, renew=False) as lease,
    ):
        set_to(session, 1)
        expire(lease, store)
        session.commit()
    assert value(engine) == 0


@levels([("mariadb", "repeatable read"), ("mariadb", "serializable"), ("pymysql", "repeatable read")])
@pytest.mark.parametrize("shared", [False, True])
def test_new_names_do_not_lock_each_other_out(engine, store, shared):
    """An UPDATE of a row that is not there would lock the gap for everybody else's INSERT: 43 of 100 were deadlocks."""
    add_fence(engine, token=0, name="")  # the floor, which `create_all` and Django's migration make
    barrier = threading.Barrier(4)

    def worker(number):
        for turn in range(20):
            barrier.wait(30)
            with Session(engine) as session, lock(session, "new", number, turn, shared=shared):
                session.connection()
                session.commit()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [None] * 4


def test_sqlite_that_begins_no_transaction_cannot_be_fenced_and_says_so(tmp_path, store):
    engine = create_engine(f"sqlite:///{tmp_path}/loose.sqlite3", connect_args={"isolation_level": None})
    for metadata in (Counter.metadata, fencing.metadata):
        metadata.create_all(engine)
    with Session(engine) as session, lock(session, "order", 42):
        with pytest.raises(NotSupported, match="BEGIN IMMEDIATE"):
            session.add(Counter(id=1))
            session.flush()
        session.rollback()
    with engine.connect() as connection:
        assert connection.scalars(select(Counter.id)).all() == []
    engine.dispose()


@levels(SERVERS[:1])
def test_lease_is_renewed_while_its_admit_waits(engine, store):
    add_fence(engine, token=0)
    lost = threading.Event()

    def worker():
        with Session(engine) as session:
            session.connection()
            order = lock(session, "order", 42, ttl=0.5, wait=30, snapshot="ignore", on_lost=lost.set)
            with order:
                session.add(Counter(name="admitted late"))
                session.commit()

    with engine.connect() as other, other.begin() as blocking, concurrent.futures.ThreadPoolExecutor(1) as pool:
        other.execute(update(fencing.table).values(s_token=0))
        working = pool.submit(worker)
        wait_until_blocked(engine)
        assert not lost.wait(1.0)
        blocking.rollback()
        working.result(30)
    assert not is_held(store)
