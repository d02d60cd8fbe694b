"""`lock(...)`: the lease lives until its transaction has ended, and the fence stands in that transaction."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings

from django_dlock import lock
from django_dlock.errors import AlreadyHeld, LeaseLost, StaleToken
from django_dlock.models import Fence
from dlock_core.backends.memory import MemoryBackend
from dlock_core.runtime import BLOCKING, run
from tests.testapp.models import Counter


@pytest.fixture
def store():
    backend = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 5, "WAIT": 5}}):
        yield backend


def is_held(store, name="order:42"):
    return bool(run(store.inspect(BLOCKING, name))[0].holders)


def test_outside_a_transaction_the_block_holds_the_lease(database, store):
    with lock("order", 42, using=database) as lease:
        assert is_held(store)
        assert lease.token > 0
    assert not is_held(store)


def test_lease_taken_in_a_transaction_is_held_until_commit(database, store):
    with transaction.atomic(using=database):
        with lock("order", 42, using=database):
            pass
        assert is_held(store)
        transaction.on_commit(lambda: seen.append(is_held(store)), using=database)
        seen = []
    assert seen == [False]
    assert not is_held(store)


def test_lease_taken_in_a_transaction_is_released_after_rollback(database, store):
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=database):
        with lock("order", 42, using=database):
            pass
        assert is_held(store)
        raise ZeroDivisionError
    assert not is_held(store)


def test_first_statement_of_a_transaction_admits_the_token(database, store):
    with lock("order", 42, using=database) as lease, transaction.atomic(using=database):
        assert not Fence.objects.using(database).filter(name="order:42", token__gt=lease.token).exists()
        assert Fence.objects.using(database).get(name="order:42").token == lease.token


def test_older_token_is_refused_and_nothing_is_written(database, store):
    Fence.objects.using(database).create(name="order:42", token=10**17, holder="x")
    Counter.objects.using(database).create(name="a")
    with lock("order", 42, using=database) as lease:
        store.force = lease
        with pytest.raises(StaleToken), transaction.atomic(using=database):
            from django_dlock.ties import current

            current()[0].transactions = 5  # not the first: no new token is asked for
            Counter.objects.using(database).update(value=1)
    assert Counter.objects.using(database).get(name="a").value == 0


def test_current_holder_of_a_store_that_lost_its_tokens_gets_a_greater_one(database, store):
    Fence.objects.using(database).create(name="order:42", token=10**17, holder="x")
    with lock("order", 42, using=database) as lease, transaction.atomic(using=database):
        Counter.objects.using(database).create(name="a")
        assert lease.token == 10**17 + 1


def test_lease_lost_before_commit_rolls_back(database, store):
    with pytest.raises(LeaseLost), lock("order", 42, using=database) as lease, transaction.atomic(using=database):
        Counter.objects.using(database).create(name="a")
        lease._held.lose("test")
    assert not Counter.objects.using(database).filter(name="a").exists()


def test_write_outside_a_transaction_is_refused_under_a_fenced_lease(database, store):
    with lock("order", 42, using=database), pytest.raises(TransactionManagementError):
        Counter.objects.using(database).create(name="a")
    with lock("order", 42, using=database, fence=False):
        Counter.objects.using(database).create(name="a")


def test_asking_again_outside_a_transaction_is_an_error_at_once_and_joins_inside(database, store):
    with lock("order", 42, using=database) as outer:
        with pytest.raises(AlreadyHeld):
            lock("order", 42, using=database).acquire()
        with transaction.atomic(using=database), lock("order", 42, using=database) as inner:
            assert inner.token == outer.token
        assert is_held(store)
    assert not is_held(store)


@pytest.mark.parametrize("shared", [False, True])
def test_lease_of_several_transactions_is_confirmed_at_each_commit(database, store, shared):
    Counter.objects.using(database).create(name="a")
    with lock("order", 42, using=database, fence="lease", shared=shared) as lease:
        for value in (1, 2):
            with transaction.atomic(using=database):
                Counter.objects.using(database).filter(name="a").update(value=value)
        Fence.objects.using(database).filter(name="order:42").update
        newer = Fence.objects.using(database).filter(name="order:42")
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT 1")
        values = {"token": lease.token + 5, "holder": "newer"}
        thread = threading.Thread(target=lambda: (newer.update(**values), connections[database].close()))
        thread.start()
        thread.join()
        with pytest.raises(StaleToken), transaction.atomic(using=database):
            Counter.objects.using(database).filter(name="a").update(value=3)
    assert Counter.objects.using(database).get(name="a").value == 2


def test_shared_leases_are_admitted_together(database, store):
    def other():
        with lock("order", 42, using=database, shared=True), transaction.atomic(using=database):
            seen.append(Counter.objects.using(database).count())
        connections[database].close()

    seen = []
    with lock("order", 42, using=database, shared=True), transaction.atomic(using=database):
        Counter.objects.using(database).count()
        if database != "default":
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
            assert seen == [0]
