"""The fence loses no update, whatever the lock service does. Every interleaving is written down, step by step."""

import contextlib

import pytest
from django.db import DatabaseError, connections
from django.db.migrations.state import ModelState, ProjectState
from django.db.transaction import TransactionManagementError, atomic
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_dlock import lock
from django_dlock.errors import LeaseLost, NotSupported, RowLocked, SnapshotTooOld, StaleObject, StaleToken
from django_dlock.fencing import RowFence
from django_dlock.models import Fence
from dlock_core.transactions.retry import DatabaseFailure, classify, is_conflict
from tests.chaos import EverybodyIn
from tests.django_dlock.parties import Party, until_blocked
from tests.django_dlock.sessions import rows
from tests.mysql_server import mariadb_only
from tests.outcomes import give_up_waiting, outcome
from tests.testapp.models import Counter, Crate, HeavyParcel, Parcel

SERVERS = [
    ("postgresql", "read committed"),
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "read committed"),
    ("mariadb", "repeatable read"),
    ("mariadb", "serializable"),
]
EVERY = [*SERVERS, ("default", "IMMEDIATE"), ("default", "DEFERRED")]
FORMS = ["transaction", "lease"]


PG, MARIADB, SQLITE = ("postgresql", "read committed"), ("mariadb", "read committed"), ("default", "IMMEDIATE")


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
    """A store that grants every request; `broken.tokens` are the tokens of its next grants."""
    backend = EverybodyIn()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 60, "WAIT": 20}}):
        yield backend


def is_postgresql_snapshot(alias):
    return alias.startswith("postgresql") and "committed" not in alias


def value(alias):
    return Counter.objects.using(alias).get(name="a").value


class Adder(Party):
    """Adds one to the counter by reading it and writing it, under a lock, step by step in its own thread."""

    def __init__(self, alias, *parts, **options):
        self.alias, self.lease = alias, None
        self.lock = lock(*(parts or ("order", 42)), using=alias, **options)

    def __exit__(self, *error):
        if self.lease is not None:
            self.release()
        super().__exit__(*error)

    def take(self):
        self.lease = self.now(self.lock.acquire)
        return self.lease.token

    def start(self):
        """Begin a transaction and read; if another's lock is in the way, this read waits for it."""
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


# fence="transaction"


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("default", "IMMEDIATE")])
@pytest.mark.parametrize(
    ("begin", "undo"),
    [
        ("SAVEPOINT x", "ROLLBACK TO SAVEPOINT x"),
        ("/* by hand */ SAVEPOINT X", "rollback  to x"),
        ("SAVEPOINT x", "/* twice */ ROLLBACK TO x; ROLLBACK TO SAVEPOINT x"),
        ("SAVEPOINT x", "ROLLBACK /* what */ TO /* which */ x"),
        ("SAVEPOINT -- its name\nx", "ROLLBACK TO\n-- its name\nSAVEPOINT x"),
        ('SAVEPOINT "-x"', 'ROLLBACK TO "-x"'),
    ],
)
def test_admit_undone_with_a_savepoint_by_hand_is_made_again(alias, store, begin, undo):
    if ";" in undo and not alias.startswith("postgresql"):
        pytest.skip("one statement at a time")
    if '"' in undo and alias.startswith("mariadb"):
        pytest.skip("it quotes names otherwise")
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


@pytest.mark.parametrize(
    ("alias", "before", "after", "undo"),
    [
        (PG, "SAVEPOINT a$1", "SAVEPOINT a$2", "ROLLBACK TO a$1"),
        (MARIADB, "SAVEPOINT a$1", "SAVEPOINT a$2", "ROLLBACK TO a$1"),
        (PG, 'SAVEPOINT "A"', "SAVEPOINT a", 'ROLLBACK TO "A"'),
        (PG, 'SAVEPOINT "a""1"', 'SAVEPOINT "a""2"', 'ROLLBACK TO "a""1"'),
        (PG, "SAVEPOINT a", "RELEASE b", "ROLLBACK TO a"),
        pytest.param(
            *(MARIADB, "SAVEPOINT a1", "SELECT 1", "EXECUTE IMMEDIATE 'ROLLBACK TO a1'"),
            marks=mariadb_only,
        ),
        (SQLITE, "SAVEPOINT 'a1'", "SELECT 1", "ROLLBACK TO 'a1'"),
        (SQLITE, "SAVEPOINT [a 1]", "SAVEPOINT [a 2]", "ROLLBACK TO [a 1]"),
    ],
    indirect=["alias"],
)
def test_admit_undone_by_a_rollback_whose_savepoint_is_hard_to_read_is_made_again(alias, store, before, after, undo):
    with atomic(alias):
        rows(connections[alias], before)
        lease = lock("order", 42, using=alias).acquire()
        if after.startswith("RELEASE"):  # it ends the newer savepoint of the same name, too
            rows(connections[alias], "SAVEPOINT b")
            rows(connections[alias], before)
        rows(connections[alias], after)
        rows(connections[alias], undo)
    assert Fence.objects.using(alias).get(name="order:42").token == lease.token


def change(alias, name):
    rows(connections[alias], "UPDATE testapp_counter SET value = value + 1 WHERE name = %s", name)


def commit(alias):
    connections[alias].commit()


def be_the_victim(alias, a, other):
    """Change "a" in the open transaction, and have it rolled back by a deadlock; the error is swallowed."""
    Counter.objects.using(alias).create(name="b")
    other.begin(alias)
    many = [Counter(name=str(number)) for number in range(100)]
    other.now(lambda: Counter.objects.using(alias).bulk_create(many))  # it has done more work, so it is not the victim
    a.now(change, alias, "a")
    other.now(change, alias, "b")
    blocked = other.do(change, alias, "a")
    until_blocked(alias)
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
    """Later statements would be committed one by one."""
    with lock("order", 42, using=alias, fence=form):
        with atomic(alias):
            change(alias, "a")
            with pytest.raises(DatabaseError):
                rows(connections[alias], "INSERT OR ROLLBACK INTO testapp_counter (name, value) VALUES ('a', 0)")
            with pytest.raises(TransactionManagementError):
                change(alias, "a")
        assert value(alias) == 0


def set_timeout(alias):
    if alias.startswith("postgresql"):
        rows(connections[alias], "SET lock_timeout = '77s'")
    else:
        rows(connections[alias], "SET SESSION innodb_lock_wait_timeout = 77")


def timeout(alias):
    question = "SHOW lock_timeout" if alias.startswith("postgresql") else "SELECT @@SESSION.innodb_lock_wait_timeout"
    ((answer,),) = rows(connections[alias], question)
    return int(str(answer).removesuffix("s").replace("1min 17", "77").replace("77000m", "77"))


# Shared against exclusive, in every mix of forms


def raise_if_error(future):
    if isinstance(found := outcome(future), BaseException):
        raise found


def succeeds(work):
    """Return whether a holder's work was committed; it may fail only in a conflict."""
    try:
        work()
    except DatabaseError as error:
        if not isinstance(error, LeaseLost | StaleToken | RowLocked | SnapshotTooOld) and not is_conflict(error):
            raise
        return False
    return True


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
    assert Parcel.objects.using(alias).get().value == 5


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_table_is_asked_only_until_the_row_has_its_first_token(alias, store, parcel, form):
    with lock(Parcel, parcel.pk, using=alias, fence=form) as first, atomic(alias):
        Parcel.objects.using(alias).update(value=1)
    sent = CaptureQueriesContext(connections[alias])
    with sent, lock(Parcel, parcel.pk, using=alias, fence=form) as lease, atomic(alias):
        Parcel.objects.using(alias).update(value=2)
    assert not [query for query in sent.captured_queries if "dlock_fence" in query["sql"]]
    assert Fence.objects.using(alias).get().token == first.token
    assert fence_of(alias) == (lease.token, lease.holder)


@levels([PG, MARIADB, SQLITE])
def test_model_inside_a_migration_has_the_fence_of_its_row(alias, store, parcel):
    state = ProjectState()
    state.add_model(ModelState.from_model(Parcel))
    with lock(state.apps.get_model("testapp", "Parcel"), parcel.pk, using=alias) as lease, atomic(alias):
        Parcel.objects.using(alias).update(value=1)
    assert fence_of(alias) == (lease.token, lease.holder)


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_lease_that_deletes_its_own_row_is_told_how_to_do_it(alias, store, parcel, form):
    refused = pytest.raises(StaleToken, match="is gone with a row") if form == "lease" else contextlib.nullcontext()
    with refused, lock(Parcel, parcel.pk, using=alias, fence=form), atomic(alias):
        parcel.delete()
    assert Parcel.objects.using(alias).exists() == (form == "lease")


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
    """The look-up of the row must not take MariaDB's snapshot, because the wait is still to come."""
    broken.tokens = iter([10, 11])
    a, b = adder(alias, Parcel, 4711), adder(alias, Parcel, 4711)
    a.take(), b.take()
    assert a.start().result() == 0
    reading = b.start()
    until_blocked(alias)
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
    until_blocked(alias)
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
    """A newer holder may have deleted it."""
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
    """Django would update a parent's columns in two steps, and check the token only in the first."""
    heavy = HeavyParcel.objects.using(alias).create()
    with lock(HeavyParcel, heavy.pk, using=alias), atomic(alias):
        HeavyParcel.objects.using(alias).update(kilos=4)
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
