"""Without autocommit a transaction begins with the first statement: a block may go on in further transactions."""

import contextlib

import pytest
from django.db import DatabaseError, connections, transaction
from django.test import override_settings

from django_dlock import lock, locked
from django_dlock.errors import LeaseLost, StaleToken
from django_dlock.models import Fence
from dlock_core.backend import Released
from dlock_core.leases.lease import LeaseState
from tests.django_dlock.sessions import add, committed, rows, second_session


class Sorry(Exception):
    """Raised by user code."""


INSERT = "INSERT INTO testapp_counter (name, value) SELECT 'by hand ' || count(*), 0 FROM testapp_counter"
HELD, RELEASED = ["acquired order:42"], ["acquired order:42", "released order:42"]


@pytest.fixture
def manual(database):
    """Return a database whose connection here is without autocommit."""
    transaction.set_autocommit(False, using=database)
    yield database
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)


def run_elsewhere(using, sql, *params):
    with second_session(using) as other:
        rows(other, sql, *params)


def alone(using, fence):
    return lock("order", 42, using=using, fence=fence)


def one_of_two(using, fence):
    return lock(alone(using, fence), lock("customer", 7, using=using, fence=False))


@pytest.mark.parametrize("fence", [True, "lease", False])
@pytest.mark.parametrize("make", [alone, one_of_two])
@pytest.mark.parametrize("end", [transaction.commit, transaction.rollback])
def test_block_holds_its_lease_to_its_end_over_several_transactions(store, manual, journal, fence, make, end):
    def of_order():
        return [entry for entry in journal if entry.endswith("order:42")]

    with make(manual, fence):
        for number in range(3):
            add(manual, str(number))
            end(using=manual)
            assert of_order() == HELD
        add(manual, "the last")
    assert of_order() == HELD
    end(using=manual)
    assert of_order() == RELEASED


def test_decorated_function_holds_its_lease_over_several_transactions(store, manual, journal):
    @locked("order", "order_id", using=manual)
    def ship(order_id):
        add(manual, "packed")
        transaction.commit(using=manual)
        assert journal == HELD
        add(manual, "shipped")

    ship(42)
    assert journal == HELD
    transaction.commit(using=manual)
    assert journal == RELEASED
    assert committed(manual) == {"packed", "shipped"}


def test_each_transaction_of_a_block_is_refused_once_a_newer_holder_was_admitted(store, manual):
    with pytest.raises(LeaseLost), lock("order", 42, using=manual) as lease:
        add(manual, "first")
        transaction.commit(using=manual)
        lease._held.until = 0.0  # as after a pause
        add(manual, "second")
    transaction.rollback(using=manual)
    assert committed(manual) == {"first"}


def test_refused_block_leaves_the_connection_usable(store, manual):
    with pytest.raises(LeaseLost), lock("order", 42, using=manual) as lease:
        add(manual, "first")
        transaction.commit(using=manual)
        lease._held.until = 0.0  # as after a pause
        with transaction.atomic(using=manual):
            add(manual, "second")
    transaction.rollback(using=manual)
    add(manual, "third")
    transaction.commit(using=manual)
    assert committed(manual) == {"first", "third"}


def test_savepoint_that_is_the_first_statement_is_admitted_again_after_its_rollback(store, manual):
    with lock("order", 42, using=manual) as lease:
        for number in range(2):
            with pytest.raises(Sorry), transaction.atomic(using=manual):
                add(manual, "undone")
                raise Sorry
            add(manual, str(number))
            transaction.commit(using=manual)
        assert Fence.objects.using(manual).get(name="order:42").token == lease.token
        transaction.rollback(using=manual)
    assert committed(manual) == {"0", "1"}


def test_atomic_that_comes_first_in_a_later_transaction_of_a_block_is_part_of_that_transaction(store, manual):
    """SQLite would otherwise take its savepoint for a transaction, and commit it at its end."""
    with lock("order", 42, using=manual):
        for end in (transaction.commit, transaction.rollback):
            with transaction.atomic(using=manual):
                add(manual, end.__name__)
            assert end.__name__ not in committed(manual)
            end(using=manual)
    assert committed(manual) == {"commit"}


@contextlib.contextmanager
def lock_around(using, fence):
    transaction.set_autocommit(True, using=using)
    with lock("order", 42, using=using, fence=fence) as lease:
        transaction.set_autocommit(False, using=using)
        with transaction.atomic(using=using):
            yield lease


@contextlib.contextmanager
def lock_of_several_transactions(using, fence):
    with lock("order", 42, using=using, fence=fence) as lease:
        transaction.commit(using=using)
        with transaction.atomic(using=using):
            yield lease


@contextlib.contextmanager
def lock_inside(using, fence):
    with transaction.atomic(using=using), lock("order", 42, using=using, fence=fence) as lease:
        yield lease


@contextlib.contextmanager
def lock_left(using, fence):
    with transaction.atomic(using=using):
        with lock("order", 42, using=using, fence=fence) as lease:
            pass
        yield lease


on_sqlite = pytest.mark.parametrize("database", ["default"], indirect=True)
every_fence = pytest.mark.parametrize("fence", [True, "lease", False])


@on_sqlite
@every_fence
@pytest.mark.parametrize("order", [lock_around, lock_of_several_transactions, lock_inside, lock_left])
@pytest.mark.parametrize("inner", ["none", "released", "rolled back"])
def test_atomic_whose_end_is_a_commit_to_sqlite_is_refused_when_the_lease_is_lost(store, manual, fence, order, inner):
    with pytest.raises(LeaseLost):
        with order(manual, fence) as lease:
            add(manual, "refused")
            if inner != "none":
                with contextlib.suppress(Sorry), transaction.atomic(using=manual):
                    add(manual, "inside")
                    if inner == "rolled back":
                        raise Sorry
            lease._held.until = 0.0  # as after a pause
        transaction.commit(using=manual)  # only after an admit, which has begun a transaction, is the end no commit
    assert committed(manual) == set()
    assert not connections[manual].needs_rollback
    transaction.rollback(using=manual)
    add(manual, "later")
    transaction.commit(using=manual)
    assert committed(manual) == {"later"}


@on_sqlite
def test_savepoint_of_an_unknown_name_is_refused_at_its_end_although_one_inside_was_rolled_back(store, manual):
    with lock("order", 42, using=manual, fence=False) as lease:
        rows(connections[manual], 'SAVEPOINT "Import"')
        add(manual, "refused")
        with contextlib.suppress(Sorry), transaction.atomic(using=manual):
            raise Sorry
        lease._held.until = 0.0  # as after a pause
        with pytest.raises(LeaseLost):
            rows(connections[manual], 'RELEASE SAVEPOINT "Import"')
        transaction.rollback(using=manual)
    assert committed(manual) == set()


@on_sqlite
@every_fence
@pytest.mark.parametrize("order", [lock_around, lock_of_several_transactions, lock_inside, lock_left])
def test_error_in_an_atomic_that_has_begun_the_transaction_is_not_replaced_by_the_loss_of_the_lease(
    store, manual, fence, order
):
    with pytest.raises(Sorry), order(manual, fence) as lease:
        add(manual, "undone")
        lease._held.until = 0.0  # as after a pause
        raise Sorry
    assert not connections[manual].needs_rollback
    with contextlib.suppress(LeaseLost):
        transaction.commit(using=manual)
    assert committed(manual) == set()


@on_sqlite
def test_atomic_whose_end_is_a_commit_to_sqlite_is_refused_when_a_newer_holder_was_announced(store, manual):
    """The lease is still valid as far as its holder knows, as after the store has lost its data."""
    with pytest.raises(StaleToken), lock_around(manual, "lease") as lease:
        run_elsewhere(manual, "UPDATE dlock_fence SET s_token = %s", lease.token + 1)
        add(manual, "refused")
    transaction.rollback(using=manual)
    assert committed(manual) == set()


@on_sqlite
@every_fence
@pytest.mark.parametrize(
    "statements",
    [
        ["SAVEPOINT a", INSERT, "RELEASE a"],
        ["savepoint A", INSERT, "/* end */ release savepoint a"],
        ['SAVEPOINT "what a name"', INSERT, 'RELEASE "what a name"'],
        ["SAVEPOINT a", INSERT, "SAVEPOINT b", INSERT, "RELEASE a"],
        ["SAVEPOINT a", INSERT, "ROLLBACK TO a", INSERT, "RELEASE a"],
        ["SAVEPOINT a", INSERT, "SAVEPOINT a", INSERT, "ROLLBACK TO a", "RELEASE a", "RELEASE a"],
        [f"WITH one AS (SELECT 1) {INSERT}"],
        [f"WITH [it's] AS (SELECT 1) {INSERT}, [it's]"],
        ["CREATE TABLE by_hand (id integer)"],
    ],
    ids=" ".join,
)
def test_statement_with_which_sqlite_commits_is_refused_when_the_lease_is_lost(store, manual, fence, statements):
    with pytest.raises(LeaseLost):
        with lock("order", 42, using=manual, fence=fence) as lease, connections[manual].cursor() as cursor:
            transaction.commit(using=manual)
            cursor.execute("SELECT 1")  # the transaction is tied to the lease
            for number, statement in enumerate(statements, 1):
                if number == len(statements):
                    lease._held.until = 0.0  # as after a pause
                cursor.execute(statement)
        transaction.commit(using=manual)
    transaction.rollback(using=manual)
    assert committed(manual) == set()
    assert "by_hand" not in connections[manual].introspection.table_names()
    transaction.rollback(using=manual)


@on_sqlite
def test_savepoint_whose_rollback_was_not_sent_is_refused_at_its_end(store, manual):
    def prevent(*_):
        raise Sorry

    with lock("order", 42, using=manual, fence=False) as lease:
        rows(connections[manual], "SAVEPOINT a")
        add(manual, "refused")
        with connections[manual].execute_wrapper(prevent), pytest.raises(Sorry):
            rows(connections[manual], "ROLLBACK TO a")
        lease._held.until = 0.0  # as after a pause
        with pytest.raises(LeaseLost):
            rows(connections[manual], "RELEASE a")
        transaction.rollback(using=manual)
    assert committed(manual) == set()


@on_sqlite
@every_fence
def test_savepoint_from_before_autocommit_was_turned_off_is_refused_at_its_end(store, database, fence):
    connection = connections[database]
    transaction.set_autocommit(False, using=database)
    with lock("order", 7, using=database, fence=False):
        add(database, "earlier")
        transaction.commit(using=database)
    transaction.set_autocommit(True, using=database)
    rows(connection, "SAVEPOINT a")
    transaction.set_autocommit(False, using=database)
    with lock("order", 42, using=database, fence=fence) as lease:
        add(database, "refused")
        lease._held.until = 0.0  # as after a pause
        with pytest.raises(LeaseLost):
            rows(connection, "RELEASE a")
        transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)
    assert committed(database) == {"earlier"}


@on_sqlite
@every_fence
def test_work_after_an_atomic_whose_end_was_a_commit_to_sqlite_is_still_locked_and_admitted_anew(
    store, manual, journal, fence
):
    with lock_inside(manual, fence) as lease:
        add(manual, "first")
    assert committed(manual) == {"first"}
    assert journal == HELD
    run_elsewhere(manual, "DELETE FROM dlock_fence")
    add(manual, "second")
    assert fence is not True or Fence.objects.using(manual).get(name="order:42").token == lease.token
    transaction.rollback(using=manual)
    assert journal == RELEASED
    assert committed(manual) == {"first"}


@on_sqlite
@every_fence
@pytest.mark.parametrize("statement", ["nonsense", "SELECT 1 FROM nowhere"])
def test_failed_first_statement_has_rolled_back_nothing(store, manual, fence, statement):
    """sqlite3 has not begun a transaction at that time, which is no sign that the statement has ended one."""
    with transaction.atomic(using=manual, savepoint=False), lock("order", 42, using=manual, fence=fence):
        with contextlib.suppress(DatabaseError):
            rows(connections[manual], statement)
        assert not connections[manual].needs_rollback
        add(manual, "kept")
    transaction.commit(using=manual)
    assert committed(manual) == {"kept"}


@on_sqlite
@every_fence
def test_failed_statement_that_has_rolled_back_the_work_before_it_is_noticed(store, manual, fence):
    with transaction.atomic(using=manual, savepoint=False), lock("order", 42, using=manual, fence=fence):
        undone = add(manual, "undone")
        with contextlib.suppress(DatabaseError):
            rows(connections[manual], f"INSERT OR ROLLBACK INTO testapp_counter VALUES ({undone.pk}, 'b', 0)")
        assert connections[manual].needs_rollback
    transaction.rollback(using=manual)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)  # the others take one statement at a time
@pytest.mark.parametrize("fence", [True, "lease", False])
def test_savepoint_with_another_statement_behind_it_is_refused_as_well(store, manual, fence):
    with pytest.raises(LeaseLost), lock("order", 42, using=manual, fence=fence) as lease:
        add(manual, "first")
        transaction.commit(using=manual)
        lease._held.until = 0.0  # as after a pause
        with connections[manual].cursor() as cursor:
            cursor.execute("SAVEPOINT a; SELECT 1")
    transaction.rollback(using=manual)
    assert not connections[manual].in_atomic_block


def test_block_that_is_left_with_an_error_in_a_later_transaction_is_still_renewed(store, manual):
    held = None
    with pytest.raises(Sorry), lock("order", 42, using=manual) as lease:
        held = lease._held
        transaction.commit(using=manual)
        add(manual, "second")
        raise Sorry
    assert held.state is LeaseState.HELD
    transaction.commit(using=manual)
    assert held.ended is Released.RELEASED


def test_what_acquire_returned_ends_with_its_transaction(store, manual, journal):
    lock("order", 42, using=manual).acquire()
    add(manual, "first")
    transaction.commit(using=manual)
    assert journal == RELEASED


def test_block_that_outlives_its_atomic_does_not_refuse_what_follows(store, database):
    done = []
    with contextlib.ExitStack() as stack, transaction.atomic(using=database):
        transaction.on_commit(lambda: done.append(committed(database)), using=database)
        stack.enter_context(lock("order", 42, using=database))
        add(database, "shipped")
        transaction.on_commit(lambda: done.append(list(Fence.objects.using(database).all())), using=database)
    assert len(done) == 2


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_block_is_refused_more_work_once_the_transaction_that_held_its_lock_has_ended(manual):
    with override_settings(DLOCK={"default": {"BACKEND": f"advisory://{manual}"}}):
        with pytest.raises(LeaseLost, match="the transaction that held it"), lock("order", 42, using=manual):
            add(manual, "first")
            transaction.commit(using=manual)
            add(manual, "second")
        transaction.rollback(using=manual)
        with lock("order", 42, using=manual):
            add(manual, "third")
        transaction.commit(using=manual)
        add(manual, "fourth")
        transaction.commit(using=manual)
    assert committed(manual) == {"first", "third", "fourth"}
