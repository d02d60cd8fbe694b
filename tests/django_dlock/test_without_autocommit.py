"""Without autocommit a transaction begins with the first statement: a block may go on in further transactions."""

import contextlib

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_dlock import lock, locked
from django_dlock.errors import LeaseLost
from django_dlock.models import Fence
from dlock_core.backend import Released
from dlock_core.leases.lease import LeaseState
from tests.django_dlock.sessions import add, committed


class Sorry(Exception):
    """Raised by user code."""


HELD, RELEASED = ["acquired order:42"], ["acquired order:42", "released order:42"]


@pytest.fixture
def manual(database):
    """Return a database whose connection here is without autocommit."""
    transaction.set_autocommit(False, using=database)
    yield database
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)


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
