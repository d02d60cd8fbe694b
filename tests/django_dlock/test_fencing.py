"""The fence: no update is lost, whatever the lock service does. Every interleaving is written down, step by step."""

import concurrent.futures
import contextlib
import itertools
import threading

import pytest
from django.db import DatabaseError, connections
from django.db.models import F
from django.db.transaction import TransactionManagementError, atomic
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_dlock import lock
from django_dlock.connections import on_end
from django_dlock.errors import LeaseLost, NotSupported, RowLocked, SnapshotTooOld, StaleObject, StaleToken
from django_dlock.fencing import RowFence
from django_dlock.models import Fence
from dlock_core.transactions.retry import DatabaseFailure, classify, is_conflict
from tests.chaos import EverybodyIn
from tests.django_dlock.conftest import flush
from tests.django_dlock.parties import Party, wait_until_blocked
from tests.django_dlock.sessions import rows
from tests.outcomes import give_up_waiting, outcome
from tests.testapp.models import Counter, Crate, HeavyParcel, Parcel
from tests.waiting import until

SERVERS = [
    ("postgresql", "read committed"),
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "read committed"),
    ("mariadb", "repeatable read"),
    ("mariadb", "serializable"),
]
EVERY = [*SERVERS, ("default", "IMMEDIATE"), ("default", "DEFERRED")]
MIXED = [pair for pair in EVERY if pair not in (("mariadb", "serializable"), ("default", "IMMEDIATE"))]
"""Where a reader does not keep writers out by itself."""
IN_TRANSACTION = [
    pair for pair in EVERY if pair not in (("postgresql", "repeatable read"), ("postgresql", "serializable"))
]
"""Where an exclusive holder is first admitted in its transaction: in PostgreSQL's snapshots it is announced before."""
FORMS = ["transaction", "lease"]


def levels(pairs):
    return pytest.mark.parametrize("alias", pairs, ids=lambda pair: "-".join(pair).replace(" ", "_"), indirect=True)


@pytest.fixture
def alias(request, isolated):
    """A database at an isolation level, with a counter "a" at 0."""
    made = isolated(*request.param)
    Counter.objects.using(made).create(name="a")
    return made


@pytest.fixture
def broken():
    """A store that grants everybody everything; `broken.tokens` are what it gives next."""
    backend = EverybodyIn()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 60, "WAIT": 20}}):
        yield backend


def is_postgresql_snapshot(alias):
    return alias.startswith("postgresql") and "committed" not in alias


def is_refusal(error, alias):
    """Under snapshots PostgreSQL answers for the fence, before the fence can."""
    return isinstance(error, StaleToken) or (
        is_postgresql_snapshot(alias) and classify(error) is DatabaseFailure.SERIALIZATION
    )


def value(alias):
    return Counter.objects.using(alias).get(name="a").value


class Adder(Party):
    """Adds one to the counter by reading it and writing it, under a lock, step by step in a thread of its own."""

    def __init__(self, alias, *parts, **options):
        self.alias = alias
        self.lock = lock(*(parts or ("order", 42)), using=alias, **options)

    def take(self):
        self.lease = self.now(self.lock.acquire)
        return self.lease.token

    def start(self):
        """Begin a transaction and read: what waits for another's lock waits here."""
        self.begin(self.alias)
        return self.do(self.read)

    def read(self):
        self.seen = value(self.alias)
        return self.seen

    def write(self):
        counter = Counter.objects.using(self.alias).filter(name="a")
        self.now(lambda: counter.update(value=self.seen + 1))

    def finish(self):
        self.write()
        self.commit()

    def release(self):
        self.now(self.lease.release)


@pytest.fixture
def adder():
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Adder(*args, **options))


# Without a fence


@levels([pair for pair in SERVERS if pair[1] == "read committed"])
def test_without_a_fence_two_holders_lose_an_update(alias, broken, adder):
    broken.tokens = iter([1, 2])
    a, b = adder(alias, fence=False), adder(alias, fence=False)
    a.take(), b.take()
    assert a.start().result() == 0
    assert b.start().result() == 0
    a.finish()
    b.finish()
    assert value(alias) == 1


# fence="transaction"


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("exists", [True, False])
def test_newer_holder_waits_at_its_admit_and_reads_what_the_older_one_wrote(alias, broken, adder, exists):
    broken.tokens = iter([10, 11])
    if exists:
        Fence.objects.using(alias).create(name="order:42", token=1, holder="x")
    a, b = adder(alias), adder(alias)
    a.take(), b.take()
    assert a.start().result() == 0
    reading = b.start()
    wait_until_blocked(alias)
    a.finish()
    seen = outcome(reading)
    if is_postgresql_snapshot(alias):
        assert classify(seen) is DatabaseFailure.SERIALIZATION
        b.rollback()
        assert b.start().result() == 1
    else:
        assert seen == 1
    b.finish()
    assert value(alias) == 2


@levels(EVERY)
def test_older_holder_is_refused_after_a_newer_one_and_writes_nothing(alias, broken, adder):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(alias), adder(alias)
    a.take(), b.take()
    assert b.start().result() == 0
    b.finish()
    refused = outcome(a.start())
    assert isinstance(refused, StaleToken)
    assert (refused.token, refused.highest) == (10, 11)
    a.rollback()
    assert value(alias) == 1


@levels(IN_TRANSACTION)
def test_older_holder_that_a_broken_store_still_believes_in_starts_over_behind_the_newer_one(alias, broken, adder):
    broken.tokens = iter([10, 11, 3])
    a, b = adder(alias), adder(alias)
    a.take(), b.take()
    assert b.start().result() == 0
    b.finish()
    assert a.start().result() == 1
    a.finish()
    assert value(alias) == 2


@levels(IN_TRANSACTION)
def test_greater_token_is_never_asked_for_after_something_was_read(alias, broken, adder):
    broken.tokens = iter([10, 11, 12])
    a, b = adder(alias), adder(alias)
    a.take(), b.take()
    assert a.start().result() == 0
    a.finish()
    assert b.start().result() == 1
    b.finish()
    refused = outcome(a.start())
    assert isinstance(refused, StaleToken)
    a.rollback()
    assert value(alias) == 2


@levels([("postgresql", "read committed"), ("mariadb", "read committed")])
def test_admit_lost_with_its_savepoint_is_not_replaced_by_a_greater_token(alias, broken, adder):
    """Databases let go of the row with the savepoint: somebody newer may come in between, after we have read."""
    broken.tokens = iter([10, 11, 12])
    Fence.objects.using(alias).create(name="order:42", token=1, holder="x")
    a, b = adder(alias), adder(alias)

    def take_in_a_savepoint():
        with contextlib.suppress(ZeroDivisionError), atomic(alias):
            a.lease = a.lock.acquire()
            a.read()
            raise ZeroDivisionError

    a.begin(alias)
    a.now(take_in_a_savepoint)
    assert a.seen == 0
    b.take()
    reading = b.start()
    assert reading.result() == 0
    b.finish()
    with pytest.raises(StaleToken):
        a.write()
    a.rollback()
    assert value(alias) == 1


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("default", "IMMEDIATE")])
@pytest.mark.parametrize(
    ("begin", "undo"),
    [
        ("SAVEPOINT x", "ROLLBACK TO SAVEPOINT x"),
        ("/* by hand */ SAVEPOINT X", "rollback  to x"),
        ("SAVEPOINT x", "/* twice */ ROLLBACK TO x; ROLLBACK TO SAVEPOINT x"),
    ],
)
def test_admit_undone_with_a_savepoint_by_hand_is_made_again(alias, store, begin, undo):
    if ";" in undo and not alias.startswith("postgresql"):
        pytest.skip("one statement at a time")
    with atomic(alias):
        rows(connections[alias], begin)
        lease = lock("order", 42, using=alias).acquire()
        rows(connections[alias], undo)
        Counter.objects.using(alias).update(value=1)
        assert Fence.objects.using(alias).get(name="order:42").token == lease.token
    assert Fence.objects.using(alias).get(name="order:42").token == lease.token


@levels([("postgresql", "read committed"), ("default", "IMMEDIATE")])
def test_admit_made_before_a_savepoint_by_hand_stays(alias, store):
    with atomic(alias), lock("order", 42, using=alias):
        rows(connections[alias], "SAVEPOINT x")
        with CaptureQueriesContext(connections[alias]) as sent:
            rows(connections[alias], "ROLLBACK TO SAVEPOINT x")
            Counter.objects.using(alias).update(value=1)
            rows(connections[alias], "RELEASE SAVEPOINT x")
        assert len(sent) == 3


def change(alias, name):
    rows(connections[alias], "UPDATE testapp_counter SET value = value + 1 WHERE name = %s", name)


def commit(alias):
    connections[alias].commit()


def be_the_victim(alias, a, other):
    """Change "a" in the open transaction, and have it rolled back by a deadlock; the error is swallowed."""
    Counter.objects.using(alias).create(name="b")
    other.begin(alias)
    many = [Counter(name=str(number)) for number in range(100)]
    other.now(lambda: Counter.objects.using(alias).bulk_create(many))  # it has done more: it is not the victim
    a.now(change, alias, "a")
    other.now(change, alias, "b")
    blocked = other.do(change, alias, "a")
    wait_until_blocked(alias)
    assert classify(outcome(a.do(change, alias, "b"))) is DatabaseFailure.DEADLOCK
    blocked.result(30)
    other.rollback()


@levels([("mariadb", "read committed")])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("then", ["reads", "writes", "commits"])
def test_transaction_that_a_deadlock_has_rolled_back_is_admitted_again_before_it_goes_on(
    alias, broken, adder, party, by_hand, then
):
    """MariaDB and MySQL roll all of it back, and a program that swallows the error goes on in a new transaction."""
    broken.tokens = iter([10])
    a, other, fence = adder(alias), party(), Fence.objects.using(alias).filter(name="order:42")

    def admitted():
        return [each.token for each in fence]

    a.take()
    if by_hand:
        a.now(lambda: connections[alias].set_autocommit(False))
    else:
        a.begin(alias)
    be_the_victim(alias, a, other)
    if then == "reads":
        assert a.now(admitted) == [10]
    elif then == "writes":
        a.now(change, alias, "a")
    if by_hand:
        a.now(commit, alias)
    else:
        a.commit()
    assert admitted() == [10]
    assert value(alias) == (then == "writes")


@levels([("mariadb", "read committed")])
def test_newer_holder_after_a_deadlock_refuses_the_transaction_that_goes_on(alias, broken, adder, party):
    broken.tokens = iter([10, 11])
    a, b, other = adder(alias), adder(alias), party()
    a.take(), b.take()
    a.begin(alias)
    be_the_victim(alias, a, other)
    assert b.start().result(30) == 0
    b.finish()
    assert isinstance(outcome(a.do(change, alias, "a")), StaleToken)
    a.rollback()
    assert value(alias) == 1


@levels([("mariadb", "read committed")])
def test_admit_stays_after_an_error_that_has_rolled_back_only_its_statement(alias, store, party):
    other = party()
    other.begin(alias)
    other.now(change, alias, "a")
    with atomic(alias), lock("order", 42, using=alias):
        rows(connections[alias], "SET SESSION innodb_lock_wait_timeout = 0")
        with pytest.raises(DatabaseError) as caught:
            change(alias, "a")
        assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT
        other.rollback()
        with CaptureQueriesContext(connections[alias]) as sent:
            change(alias, "a")
        assert len(sent) == 1
    assert value(alias) == 1


@levels([("default", "IMMEDIATE"), ("default", "DEFERRED")])
@pytest.mark.parametrize("form", FORMS)
def test_transaction_that_sqlite_has_rolled_back_by_itself_cannot_go_on(alias, store, form):
    """What comes after it would be committed statement by statement."""
    with lock("order", 42, using=alias, fence=form):
        with atomic(alias):
            change(alias, "a")
            with pytest.raises(DatabaseError):
                rows(connections[alias], "INSERT OR ROLLBACK INTO testapp_counter (name, value) VALUES ('a', 0)")
            with pytest.raises(TransactionManagementError):
                change(alias, "a")
        assert value(alias) == 0


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("wait", [0, 0.6])
def test_newer_holder_gives_up_at_its_admit_when_its_wait_is_over(alias, broken, adder, wait):
    broken.tokens = iter([10, 11])
    a, b = adder(alias), adder(alias, wait=wait)
    a.take(), b.take()
    assert a.start().result() == 0
    refused = outcome(b.start())
    assert isinstance(refused, RowLocked)
    assert refused.waited <= 0.6
    b.rollback()
    a.finish()
    assert value(alias) == 1


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [False, True])
def test_session_has_its_own_lock_timeout_back(alias, broken, adder, form, shared):
    broken.tokens = iter([10])
    a = adder(alias, fence=form, shared=shared)
    a.now(set_timeout, alias)
    a.take()
    assert a.now(timeout, alias) == 77
    a.start().result()
    assert a.now(timeout, alias) == 77
    a.commit()
    assert a.now(timeout, alias) == 77


@levels([pair for pair in SERVERS if pair in IN_TRANSACTION])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ends", ["in time", "too late"])
def test_session_that_had_to_wait_has_its_own_lock_timeout_back(alias, broken, adder, shared, ends):
    broken.tokens = iter([10, 11])
    Fence.objects.using(alias).create(name="order:42", token=1, holder="x", s_token=2)
    a, b = adder(alias), adder(alias, shared=shared, wait=0.6 if ends == "too late" else 20)
    b.now(set_timeout, alias)
    a.take(), b.take()
    a.start().result()
    reading = b.start()
    if ends == "in time":
        wait_until_blocked(alias)
        a.finish()
    if outcome(reading) == 1:
        assert b.now(timeout, alias) == 77
    b.rollback()
    assert b.now(timeout, alias) == 77


def set_timeout(alias):
    if alias.startswith("postgresql"):
        rows(connections[alias], "SET lock_timeout = '77s'")
    else:
        rows(connections[alias], "SET SESSION innodb_lock_wait_timeout = 77")


def timeout(alias):
    question = "SHOW lock_timeout" if alias.startswith("postgresql") else "SELECT @@SESSION.innodb_lock_wait_timeout"
    ((answer,),) = rows(connections[alias], question)
    return int(str(answer).removesuffix("s").replace("1min 17", "77").replace("77000m", "77"))


@levels([("mariadb", "repeatable read"), ("postgresql", "repeatable read")])
def test_lock_taken_after_the_snapshot_protects_nothing_and_is_refused(alias, broken, adder):
    """What SnapshotTooOld is for: with "ignore" MariaDB loses an update under a lock that works."""
    broken.tokens = iter([10, 11, 12])
    careless, other = adder(alias, snapshot="ignore"), adder(alias)
    assert careless.start().result() == 0
    other.take()
    other.start().result()
    other.finish()
    with pytest.raises(SnapshotTooOld):
        careless.now(lock("order", 42, using=alias).acquire)
    if alias.startswith("mariadb"):
        careless.take()
        assert careless.now(careless.read) == 0
        careless.finish()
        assert value(alias) == 1  # of two
    else:
        with pytest.raises(DatabaseError) as caught:
            careless.take()
        assert classify(caught.value) is DatabaseFailure.SERIALIZATION
        careless.rollback()


@levels([*SERVERS, ("default", "IMMEDIATE")])
@pytest.mark.parametrize("same", [True, False], ids=["one_lock", "many_locks"])
def test_first_admits_at_the_same_time_end_well_or_in_a_conflict_to_be_retried(alias, broken, same):
    broken.tokens = itertools.count(1)

    def create(number):
        for attempt in range(200):
            try:
                with lock("new", 1 if same else number, using=alias), atomic(alias):
                    counter = Counter.objects.using(alias).get(name="a")
                    Counter.objects.using(alias).filter(name="a").update(value=counter.value + 1 if same else 1)
            except DatabaseError as error:
                if not is_conflict(error):
                    raise
            else:
                return attempt
        raise AssertionError("never succeeded")

    def create_some(start):
        try:
            return [create(start * 100 + number) for number in range(5)]
        finally:
            connections.close_all()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len([attempts for done in pool.map(create_some, range(4)) for attempts in done]) == 20
    assert value(alias) == (20 if same else 1)
    assert Fence.objects.using(alias).count() == (1 if same else 20)


# fence="lease"


@levels(EVERY)
def test_older_holder_cannot_commit_once_a_newer_one_was_announced(alias, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(alias, fence="lease"), adder(alias, fence="lease")
    a.take()
    sqlite = alias.startswith("default")
    if not sqlite:
        assert a.start().result() == 0
    b.take()  # does not wait for a
    if sqlite:  # has one writer at a time
        assert a.start().result() == 0
    a.write()
    with pytest.raises(DatabaseError) as caught:
        a.commit()
    assert is_refusal(caught.value, alias)
    assert b.start().result() == 0
    b.finish()
    assert value(alias) == 1


@levels(SERVERS)
def test_newer_holder_is_not_announced_between_the_confirm_of_an_older_one_and_its_commit(alias, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(alias, fence="lease"), adder(alias, fence="lease")
    a.take()
    a.start().result()
    confirmed, go_on = threading.Event(), threading.Event()

    def stand_still():
        confirmed.set()
        go_on.wait(60)

    a.now(lambda: on_end(lambda _: None, using=alias, before_commit=stand_still))
    a.write()
    committing = a.do(a._atomic.__exit__, None, None, None)
    assert confirmed.wait(60)
    taking = b.do(b.lock.acquire)
    wait_until_blocked(alias)
    go_on.set()
    committing.result(60)
    b.lease = taking.result(60)
    assert b.start().result() == 1
    b.finish()
    assert value(alias) == 2


@levels(EVERY)
def test_lease_of_several_transactions_commits_each_of_them_until_it_is_overtaken(alias, broken, adder):
    broken.tokens = iter([10, 11])
    a, b = adder(alias, fence="lease"), adder(alias, fence="lease")
    a.take()
    for expected in (0, 1):
        assert a.start().result() == expected
        a.finish()
    b.take()
    a.start().result()
    a.write()
    with pytest.raises(StaleToken):
        a.commit()
    assert value(alias) == 2


@levels(EVERY)
def test_announce_behind_a_newer_holder_is_refused(alias, broken, adder):
    broken.tokens, broken.forgetful = iter([11, 10]), True
    a, b = adder(alias, fence="lease"), adder(alias, fence="lease")
    a.take()
    with pytest.raises(StaleToken):
        b.take()


@levels([pair for pair in EVERY if pair[1] != "DEFERRED"])
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_both_forms_refuse_each_other(alias, broken, adder, first, second):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    a, b = adder(alias, fence=first), adder(alias, fence=second)
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
    assert value(alias) == 1


# Shared leases


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inside", [False, True])
def test_shared_holders_read_at_the_same_time(alias, broken, adder, form, inside):
    broken.tokens = iter([10, 11])
    a, b = adder(alias, fence=form, shared=True), adder(alias, fence=form, shared=True)
    if inside:  # some shared holder has been there since the last exclusive one
        Fence.objects.using(alias).create(name="order:42", token=1, holder="x", s_token=2)
    for reader in (a, b):
        if inside:
            reader.begin(alias)
            reader.take()
            assert reader.now(reader.read) == 0
        else:
            reader.take()
            assert reader.start().result() == 0
    b.commit()
    if form == "lease" and not inside and is_postgresql_snapshot(alias):  # b's announce came after a's snapshot
        with pytest.raises(DatabaseError) as caught:
            a.commit()
        assert classify(caught.value) is DatabaseFailure.SERIALIZATION
    else:
        a.commit()


@levels(SERVERS)
def test_only_the_first_shared_holder_after_an_exclusive_one_writes_and_before_its_transaction(alias, broken, adder):
    broken.tokens = iter([10, 11, 12, 13])
    writer, *readers = adder(alias), *(adder(alias, shared=True) for _ in range(3))
    writer.take()
    writer.start().result()
    writer.finish()
    for reader in readers:
        reader.take()
    for reader in readers:
        assert reader.start().result() == 1
    assert mark_of(alias) == 11
    for reader in readers:
        reader.commit()


def mark_of(alias):
    return Fence.objects.using(alias).get(name="order:42").s_token


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("mariadb", "repeatable read")])
def test_first_shared_holder_that_asks_inside_a_transaction_keeps_the_others_waiting_to_its_end(alias, broken, adder):
    broken.tokens = iter([11, 12])
    Fence.objects.using(alias).create(name="order:42", token=10, holder="x")
    a, b = adder(alias, shared=True), adder(alias, shared=True)
    a.begin(alias)
    a.take()
    assert a.now(a.read) == 0
    b.begin(alias)
    taking = b.do(b.lock.acquire)
    wait_until_blocked(alias)
    a.commit()
    b.lease = taking.result(60)
    assert b.now(b.read) == 0
    b.commit()


# Shared against exclusive, in every mix of forms


@levels(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("transactions", [1, 2])
@pytest.mark.parametrize("exclusive", FORMS)
def test_older_exclusive_holder_and_a_newer_shared_one_never_both_commit_what_the_other_did_not_see(
    alias, broken, adder, exclusive, transactions, shared
):
    if alias.startswith("default") and (exclusive, transactions) == ("transaction", 1):
        pytest.skip("SQLite has one writer at a time")
    broken.tokens = iter([10, 11])
    a, b = adder(alias, fence=exclusive), adder(alias, fence=shared, shared=True, wait=0.6)
    a.take()
    assert a.start().result() == 0
    if transactions == 2:
        a.commit()
    posted = succeeds(lambda: post(b))
    closed = succeeds(lambda: close(a, in_another_transaction=transactions == 2))
    assert value(alias) == posted + closed == 1
    assert posted == (exclusive == "lease" or transactions == 2)


@levels(MIXED)
@pytest.mark.parametrize("shared", FORMS)
@pytest.mark.parametrize("exclusive", FORMS)
@pytest.mark.parametrize("token", [9, 12])
def test_shared_lease_of_two_transactions_is_refused_when_an_exclusive_one_was_between_them(
    alias, broken, adder, exclusive, shared, token
):
    broken.tokens, broken.forgetful = iter([7, 10, token]), True
    first, reader, writer = (
        adder(alias, shared=True),
        adder(alias, shared=True, fence=shared),
        adder(alias, fence=exclusive),
    )
    first.take()  # leaves the mark: 7
    reader.take()
    assert reader.start().result() == 0
    reader.commit()
    wrote = succeeds(lambda: (writer.take(), raise_if_error(writer.start()), writer.finish()))
    if not wrote and exclusive == "transaction" and not is_postgresql_snapshot(alias):
        writer.rollback()
    read = succeeds(lambda: close(reader, in_another_transaction=True))
    assert value(alias) == wrote + read == 1


def take_and_read(adder):
    """Take, begin and read in one step, whichever of them has to wait."""

    def step():
        adder.lease = adder.lock.acquire()
        adder._atomic = atomic(adder.alias)
        adder._atomic.__enter__()
        return adder.read()

    return adder.do(step)


def post(adder):
    """Add one without having read."""
    adder.take()
    raise_if_error(adder.start())
    counter = Counter.objects.using(adder.alias).filter(name="a")
    adder.now(lambda: counter.update(value=F("value") + 1))
    adder.commit()


def close(adder, *, in_another_transaction):
    """Write what follows from what was read before."""
    if in_another_transaction:
        adder.begin(adder.alias)
    adder.finish()


def raise_if_error(future):
    if isinstance(found := outcome(future), BaseException):
        raise found


def succeeds(work):
    """Whether a holder's work was committed; it may only fail in a conflict."""
    try:
        work()
    except DatabaseError as error:
        if not isinstance(error, LeaseLost | StaleToken | RowLocked | SnapshotTooOld) and not is_conflict(error):
            raise
        return False
    return True


@levels(SERVERS)
def test_newer_exclusive_holder_waits_for_shared_transactions(alias, broken, adder):
    broken.tokens = iter([10, 11])
    reader, writer = adder(alias, shared=True), adder(alias)
    reader.take()
    assert reader.start().result() == 0
    reading = take_and_read(writer)
    wait_until_blocked(alias)
    assert reader.now(reader.read) == 0
    reader.commit()
    assert outcome(reading) == 0
    writer.finish()
    assert value(alias) == 1


@levels(SERVERS)
@pytest.mark.parametrize("form", FORMS)
def test_exclusive_holder_that_waited_for_a_shared_one_sees_what_it_has_committed(alias, broken, adder, form):
    """It writes nothing that the shared one has written, so that the database sees no conflict."""
    broken.tokens = iter([10, 11])
    posting, closing = adder(alias, shared=True), adder(alias, fence=form)
    posting.take()
    posting.start().result()
    posting.write()
    reading = take_and_read(closing)
    wait_until_blocked(alias)
    posting.commit()
    assert outcome(reading) == 1
    closing.commit()


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_shared_holder_is_refused_under_a_newer_exclusive_one(alias, broken, adder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    reader, writer = adder(alias, shared=True, fence=form), adder(alias)
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
def test_older_exclusive_holder_is_refused_under_a_newer_shared_one(alias, broken, adder, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    writer, reader = adder(alias, fence=form), adder(alias, shared=True, fence="lease")
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
def test_first_shared_holder_waits_no_longer_than_its_wait_for_the_first_exclusive_one(alias, broken, adder):
    broken.tokens = iter([10, 11])
    writer, reader = adder(alias), adder(alias, shared=True, wait=0.6)
    writer.take()
    writer.start().result()
    with pytest.raises(RowLocked):
        reader.take()
    writer.rollback()


# Several locks


@levels(EVERY)
@pytest.mark.parametrize("stale", [1, 2])
def test_one_stale_lock_of_several_refuses_the_transaction(alias, broken, adder, stale):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    Fence.objects.using(alias).create(name=f"order:{stale}", token=99, holder="x")
    both = lock("order", 1, using=alias), lock("order", 2, using=alias)
    with pytest.raises(StaleToken, match=f"order:{stale}"), both[0], both[1], atomic(alias):
        Counter.objects.using(alias).update(value=1)
    assert value(alias) == 0


@levels(EVERY)
@pytest.mark.parametrize("inner", [{"shared": True}, {"fence": "lease"}, {"fence": "lease", "shared": True}, {}])
@pytest.mark.parametrize("outer", [{"shared": True}, {"fence": "lease"}, {}])
def test_lock_inside_a_lock_in_every_form(alias, broken, outer, inner):
    broken.tokens = iter([10, 11])
    with lock("order", 1, using=alias, **outer), lock("order", 2, using=alias, **inner), atomic(alias):
        Counter.objects.using(alias).update(value=1)
    assert value(alias) == 1


# A store that has lost its data and its time


@levels(EVERY)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seen", ["exclusive", "shared", "purged"])
def test_current_holder_of_a_store_that_lost_its_tokens_gets_a_greater_one(alias, store, seen, form, shared):
    highest = 2 * 10**15
    if seen == "purged":
        store._tokens = iter([10**15 + 1, highest + 1])
        Fence.objects.using(alias).create(name="", token=highest, holder="")
    else:
        tokens = {"token": highest} if seen == "exclusive" else {"token": 1, "s_token": highest}
        Fence.objects.using(alias).create(name="order:42", holder="x", **tokens)
    with lock("order", 42, using=alias, fence=form, shared=shared) as lease, atomic(alias):
        Counter.objects.using(alias).filter(name="a").update(value=1)
    assert value(alias) == 1
    if not (shared and seen == "shared"):
        assert lease.token > highest


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("default", "IMMEDIATE")])
@pytest.mark.parametrize("form", FORMS)
def test_holder_that_a_real_redis_has_forgotten_is_refused_behind_the_next_one(
    alias, redis_server, redis_store, adder, form
):
    a, b = adder(alias, fence=form), adder(alias, fence=form)
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
    assert value(alias) == 1


# The row itself as the fence


@pytest.fixture
def parcel(alias):
    return Parcel.objects.using(alias).create()


def fence_of(alias, model=Parcel):
    return model.objects.using(alias).values_list("dlock_token", "dlock_holder").get()


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_row_is_its_own_fence(alias, store, parcel, form):
    with lock(Parcel, parcel.pk, using=alias, fence=form) as lease, atomic(alias):
        row = Parcel.objects.using(alias).get()
        assert (row.dlock_token, row.dlock_holder) == (lease.token, lease.holder)
        row.value = 5
        row.save()
    assert fence_of(alias) == (lease.token, lease.holder)
    assert not Fence.objects.using(alias).exists()
    assert Parcel.objects.using(alias).get().value == 5


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_instance_that_was_read_before_does_not_lower_its_fence(alias, store, parcel, form):
    with lock(Parcel, parcel.pk, using=alias, fence=form) as lease, atomic(alias):
        parcel.value = 5
        parcel.save()
    parcel.save(update_fields=["value", "dlock_token", "dlock_holder"])
    assert fence_of(alias) == (lease.token, lease.holder)


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_stale_token_is_refused_by_the_row(alias, broken, parcel, form):
    broken.tokens, broken.forgetful = iter([10]), True
    Parcel.objects.using(alias).update(dlock_token=99, dlock_holder="x")
    with pytest.raises(StaleToken) as caught, lock(Parcel, parcel.pk, using=alias, fence=form), atomic(alias):
        Parcel.objects.using(alias).update(value=1)
    assert caught.value.highest == 99
    assert Parcel.objects.using(alias).get().value == 0


@levels(EVERY)
def test_row_that_was_overtaken_refuses_the_commit(alias, broken, parcel, party):
    broken.tokens = iter([10, 11])
    with lock(Parcel, parcel.pk, using=alias, fence="lease"):
        other = party()
        lease = other.now(lock(Parcel, parcel.pk, using=alias, fence="lease").acquire)
        with pytest.raises(StaleToken), atomic(alias):
            Parcel.objects.using(alias).update(value=1)
        other.now(lease.release)
    assert Parcel.objects.using(alias).get().value == 0


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_row_that_does_not_exist_yet_is_guarded_in_the_table(alias, store, form):
    with lock(Parcel, 4711, using=alias, fence=form) as lease, atomic(alias):
        Parcel.objects.using(alias).create(pk=4711)
    assert Fence.objects.using(alias).get().token == lease.token
    with lock(Parcel, 4711, using=alias, fence=form) as lease, atomic(alias):
        Parcel.objects.using(alias).update(value=1)
    assert fence_of(alias) == (lease.token, lease.holder)


@levels(SERVERS)
def test_newer_holder_of_a_row_that_does_not_exist_yet_reads_what_the_older_one_wrote(alias, broken, adder):
    """MariaDB's snapshot must not be taken by looking for the row: the wait is still to come."""
    broken.tokens = iter([10, 11])
    a, b = adder(alias, Parcel, 4711), adder(alias, Parcel, 4711)
    a.take(), b.take()
    assert a.start().result() == 0
    reading = b.start()
    wait_until_blocked(alias)
    a.finish()
    seen = outcome(reading)
    assert seen == 1 or classify(seen) is DatabaseFailure.SERIALIZATION
    b.rollback()


@levels([pair for pair in SERVERS if pair[0] == "postgresql" or pair[1] == "read committed"])
def test_row_that_appears_while_a_holder_waits_in_the_table_guards_that_holder_too(alias, broken, adder):
    broken.tokens = iter([10, 11, 12])
    a, b = (adder(alias, Parcel, 4711) for _ in range(2))
    c = adder(alias, Parcel, 4711, wait=0.6)
    a.take(), b.take()
    assert a.start().result() == 0
    reading = b.start()
    wait_until_blocked(alias)
    a.now(lambda: Parcel.objects.using(alias).create(pk=4711))
    a.finish()
    if is_postgresql_snapshot(alias):
        assert classify(outcome(reading)) is DatabaseFailure.SERIALIZATION
        b.rollback()
        reading = b.start()
    assert reading.result() == 1
    c.take()
    assert isinstance(outcome(c.start()), RowLocked)
    c.rollback()
    b.finish()
    assert value(alias) == 2


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("default", "DEFERRED")])
@pytest.mark.parametrize("second", [("testapp.parcel", 7), ("testapp.parcel", "7"), (Parcel, "7")])
@pytest.mark.parametrize("form", FORMS)
def test_one_lock_has_one_fence_however_it_was_named(alias, broken, adder, form, second):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    Parcel.objects.using(alias).create(pk=7)
    a, b = adder(alias, Parcel, 7, fence="lease"), adder(alias, *second, fence=form)
    assert a.lock.name == b.lock.name
    a.take()
    assert a.start().result() == 0
    b.take()
    raise_if_error(b.start())
    b.finish()
    a_commits = succeeds(a.finish)
    assert not a_commits
    assert value(alias) == 1
    assert fence_of(alias)[0] == 11


def test_text_that_is_no_key_of_a_fenced_model_names_a_lock_of_its_own():
    for parts in (("testapp.parcel", "all"), ("testapp.counter", 7), ("no.model", 7), ("testapp.parcel", 7, "x")):
        assert not isinstance(lock(*parts).fence, RowFence)
        lock(*parts, shared=True)


@levels(EVERY)
def test_row_may_be_deleted_under_its_lock(alias, store, parcel):
    with lock(Parcel, parcel.pk, using=alias), atomic(alias):
        parcel.delete()
    assert not Parcel.objects.using(alias).exists()


@levels(EVERY)
def test_row_that_is_gone_at_commit_cannot_confirm(alias, store, parcel):
    """It may have been a newer holder who deleted it."""
    with pytest.raises(StaleToken), lock(Parcel, parcel.pk, using=alias, fence="lease"), atomic(alias):
        parcel.delete()
    assert Parcel.objects.using(alias).exists()


@levels(EVERY)
def test_row_made_by_somebody_else_under_a_lease_is_confirmed_in_both_places(alias, broken, party):
    broken.tokens = iter([10, 11])
    with lock(Parcel, 4711, using=alias, fence="lease") as lease:
        party().now(lambda: Parcel.objects.using(alias).create(pk=4711))
        with atomic(alias):
            Parcel.objects.using(alias).update(value=1)
        assert fence_of(alias) == (lease.token, lease.holder)
        other = party()
        newer = other.now(lock(Parcel, 4711, using=alias, fence="lease").acquire)
        with pytest.raises(StaleToken), atomic(alias):
            Parcel.objects.using(alias).update(value=2)
        other.now(newer.release)
    assert Parcel.objects.using(alias).get().value == 1


@levels(EVERY)
def test_row_made_after_a_newer_holder_was_announced_in_the_table_does_not_let_the_older_one_commit(
    alias, broken, party
):
    broken.tokens = iter([10, 11])
    with lock(Parcel, 4711, using=alias, fence="lease"):
        other = party()
        newer = other.now(lock(Parcel, 4711, using=alias, fence="lease").acquire)
        party().now(lambda: Parcel.objects.using(alias).create(pk=4711, value=1))  # without a lock
        with pytest.raises(StaleToken), atomic(alias):
            Parcel.objects.using(alias).update(value=2)
        other.now(newer.release)
    assert Parcel.objects.using(alias).get().value == 1


@levels(SERVERS)
@pytest.mark.parametrize("wait", [0, 0.6])
@pytest.mark.parametrize("form", FORMS)
def test_wait_for_the_row_is_limited_by_wait(alias, broken, parcel, adder, party, form, wait):
    broken.tokens = iter([10, 11])
    blocker = party()
    blocker.begin(alias)
    blocker.now(lambda: Parcel.objects.using(alias).update(value=1))
    late = adder(alias, Parcel, parcel.pk, wait=wait, fence=form)
    late.now(set_timeout, alias)
    give_up_waiting(late, form, RowLocked)
    assert late.now(timeout, alias) == 77
    blocker.commit()


@pytest.fixture
def in_the_words_of_mysql(monkeypatch):
    pytest.importorskip("MySQLdb")
    from django.db.backends.mysql.base import DatabaseWrapper

    monkeypatch.setattr(DatabaseWrapper, "mysql_is_mariadb", False)


@levels([pair for pair in SERVERS if pair[0] == "mariadb"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [("order", 42), (Parcel, 7)], ids=["table", "row"])
def test_wait_on_mysql_is_limited_by_wait_and_its_session_has_its_own_limit_back(
    in_the_words_of_mysql, alias, broken, party, adder, form, parts
):
    broken.tokens = iter([10, 11])
    Parcel.objects.using(alias).create(pk=7)
    blocker, late = adder(alias, *parts), adder(alias, *parts, wait=0.6, fence=form)
    late.now(set_timeout, alias)
    blocker.take()
    blocker.start().result()
    give_up_waiting(late, form, RowLocked)
    assert late.now(timeout, alias) == 77
    blocker.rollback()


@levels(EVERY)
def test_inherited_row_is_guarded_in_one_update_of_its_parent(alias, store):
    """Django updates a parent's columns in two steps, and looks at the token only in the first."""
    heavy = HeavyParcel.objects.using(alias).create()
    sent = CaptureQueriesContext(connections[alias])
    with lock(HeavyParcel, heavy.pk, using=alias) as lease, atomic(alias), sent:
        HeavyParcel.objects.using(alias).update(kilos=5)
    assert fence_of(alias) == (lease.token, lease.holder)
    assert len([query for query in sent.captured_queries if "dlock_token" in query["sql"]]) == 1


@levels(EVERY)
def test_fence_and_version_on_one_row(alias, store):
    crate = Crate.objects.using(alias).create()
    stale = Crate.objects.using(alias).get()
    with lock(Crate, crate.pk, using=alias) as lease, atomic(alias):
        crate.value = 1
        crate.save_with_version()
    assert fence_of(alias, Crate) == (lease.token, lease.holder)
    with pytest.raises(StaleObject), lock(Crate, crate.pk, using=alias), atomic(alias):
        stale.save_with_version()
    crate.save_with_version()


def test_row_as_the_fence_of_a_shared_lock_is_refused_at_once():
    for parts in ((Parcel, 1), ("testapp.parcel", 1)):
        with pytest.raises(NotSupported, match=r"'testapp\.parcel:1' is the row itself.*shared.*another name"):
            lock(*parts, shared=True)
    lock(Parcel, 1, shared=True, fence=False)


def test_key_that_the_model_cannot_have_is_refused_at_once():
    with pytest.raises(ValueError, match="abc"):
        lock(Parcel, "abc")


# Loss of the lease in the middle of it all is seen without the fence, too


@levels(EVERY)
@pytest.mark.parametrize("form", [*FORMS, False])
def test_holder_whose_time_is_over_cannot_commit(alias, store, form):
    short = lock("order", 42, using=alias, fence=form, ttl=0.05, renew=False)
    with pytest.raises(LeaseLost), short as lease, atomic(alias):
        Counter.objects.using(alias).update(value=1)
        until(lambda: not lease.remaining())
    assert value(alias) == 0
