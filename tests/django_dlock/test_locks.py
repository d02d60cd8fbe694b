"""`lock(...)`: the lease lives until its transactions have ended, however they end."""

import logging
import os
import unittest
import weakref
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.management import call_command
from django.db import InterfaceError, OperationalError, ProgrammingError, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.transaction import TransactionManagementError, atomic
from django.test import TestCase, TransactionTestCase, override_settings

from django_dlock import lock, locked
from django_dlock.conf import InvalidStore
from django_dlock.errors import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    LeaseLost,
    NotSupported,
    SnapshotTooOld,
    StaleToken,
)
from django_dlock.locks import release_forgotten
from django_dlock.models import Fence
from django_dlock.tie import current
from dlock_core.backend import Capabilities, RenewalFailure
from dlock_core.backends.memory import MemoryBackend
from dlock_core.leases.lease import LeaseState
from tests.django_dlock import sessions
from tests.django_dlock.sessions import add, committed, held_in_commit, rows
from tests.garbage import collect_garbage
from tests.leases import is_held, until_expired
from tests.mysql_server import mariadb_only
from tests.proxy import Proxy
from tests.testapp.models import Counter
from tests.waiting import until

servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    """No test leaves a lease to the next."""
    yield
    assert [tie.held.name for tie in current()] == []


@pytest.fixture
def dlock_log(caplog):
    caplog.set_level(logging.INFO, logger="dlock")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "dlock"]


def order(database, **options):
    return lock("order", 42, using=database, **options)


# The block, without a transaction


def test_one_lock_object_may_be_used_again_and_by_several_threads(database, store, party):
    shared = order(database, shared=True)
    other = party()
    with shared as ours:
        theirs = other.now(shared.__enter__)
        assert ours.holder != theirs.holder
        other.now(shared.__exit__, None, None, None)
        assert is_held(store)
    with shared as again:
        assert again.holder != ours.holder


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_walks_out_of_the_block_and_leaves_its_parents_lease_alone(database, store):
    block = order(database)
    with block as lease:
        connections[database].close()  # a child must not use its parent's connection
        if (child := os.fork()) == 0:
            status = 1
            try:
                block.__exit__(None, None, None)
                status = 2 if lease.remaining() else 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert is_held(store)
        with atomic(database):
            add(database, "a")
    assert not is_held(store)


# Each ending of a transaction


def test_commit_then_release_then_the_hooks(database, store, journal, follow):
    follow(database)
    with atomic(database):
        with order(database):
            pass
        transaction.on_commit(lambda: journal.append("on_commit"), using=database)
        assert is_held(store)
    assert journal == ["BEGIN", "acquired order:42", "COMMIT", "released order:42", "on_commit"]


def test_set_rollback_rolls_back_then_releases(database, store, journal, follow):
    follow(database)
    with atomic(database), order(database):
        transaction.set_rollback(True, using=database)
    assert journal == ["BEGIN", "acquired order:42", "ROLLBACK", "released order:42"]


def fence_token(database):
    return Fence.objects.using(database).filter(name="order:42").values_list("token", flat=True).first()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_manual_transaction_releases_at_its_end(database, store, end):
    transaction.set_autocommit(False, using=database)
    with order(database):
        add(database, "a")
    assert is_held(store)
    getattr(transaction, end)(using=database)
    assert not is_held(store)
    transaction.set_autocommit(True, using=database)
    assert committed(database) == ({"a"} if end == "commit" else set())


def test_manual_transactions_under_one_lease_are_each_admitted(database, store):
    with order(database) as lease:
        transaction.set_autocommit(False, using=database)
        for name in ("a", "b"):
            add(database, name)
            assert fence_token(database) == lease.token
            transaction.commit(using=database)
        transaction.set_autocommit(True, using=database)
        assert is_held(store)
    assert not is_held(store)
    assert committed(database) == {"a", "b"}


def test_connection_closed_in_a_manual_transaction_releases(database, store):
    transaction.set_autocommit(False, using=database)
    with order(database):
        add(database, "a")
    connections[database].close()
    assert not is_held(store)


def test_durable_block_may_be_inside_or_outside(database, store):
    with order(database), atomic(database, durable=True):
        add(database, "a")
    assert not is_held(store)
    with atomic(database, durable=True):
        with order(database):
            add(database, "b")
        assert is_held(store)
    assert not is_held(store)
    assert committed(database) == {"a", "b"}


# Several databases


def test_lease_is_not_released_before_a_transaction_on_another_database_has_ended(database, store, use_database):
    use_database("other")
    with atomic("other"):
        with order(database), atomic(database):
            add(database, "a")
        assert is_held(store)
    assert not is_held(store)


def test_lease_waits_for_a_transaction_on_another_database_that_began_under_it(database, store, use_database):
    use_database("other")
    began = atomic("other")
    with order(database):
        began.__enter__()
        add("other", "a")
    assert is_held(store)
    began.__exit__(None, None, None)
    assert not is_held(store)
    assert committed("other") == {"a"}


def test_lost_lease_refuses_the_commit_of_a_transaction_on_another_database_that_began_under_it(
    database, store, use_database
):
    use_database("other")
    # The lease may run out before its first transaction begins; then its block raises, too.
    with suppress(LeaseLost), order(database, ttl=0.25, renew=False) as lease:
        with pytest.raises(LeaseLost), atomic("other"):
            add("other", "a")
            until_expired(lease, store)
        with pytest.raises(LeaseLost), atomic("other"):
            add("other", "b")
    assert committed("other") == set()


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_lease_taken_inside_two_transactions_ends_with_the_last_of_them(database, store, use_database, first):
    use_database("other")
    inner, outer = atomic("other"), atomic(database)
    with outer:
        with inner:
            using = "other" if first == "inner" else database
            with lock("order", 42, using=using):
                pass
            assert is_held(store)
        assert is_held(store)
        with order(database) as joined:  # the lease counts as ours as long as it is held
            assert joined.remaining() > 0
    assert not is_held(store)


def test_savepoint_rolled_back_after_another_database_has_committed_is_admitted_again(database, store, use_database):
    use_database("other")
    with atomic(database):
        with pytest.raises(Sorry), atomic(database):
            with atomic("other"):
                lease = order(database).acquire()
            raise Sorry
        assert fence_token(database) == lease.token


def test_lease_lost_is_rolled_back_on_every_database_that_has_not_committed(database, store, use_database):
    use_database("other")
    with pytest.raises(LeaseLost), order(database, ttl=0.05, renew=False) as lease, atomic(database), atomic("other"):
        with lock("order", 42, using="other", reentrant=True):
            add("other", "a")
        add(database, "a")
        until_expired(lease, store)
    assert committed(database) == set()
    assert committed("other") == set()


# A COMMIT whose outcome is unknown


@postgresql_only
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("what", [sessions.interrupt, sessions.terminate_held])
def test_lease_is_kept_after_an_interrupt_inside_commit(database, store, what):
    lost = pytest.raises((KeyboardInterrupt, OperationalError))
    with held_in_commit(database, what), lost, order(database), atomic(database):
        add(database, "a")
    assert is_held(store)


@pytest.mark.parametrize("error", [KeyboardInterrupt, InterfaceError, ValueError])
def test_lease_is_kept_after_an_exception_inside_commit(database, store, error, dlock_log):
    interrupt_commit(database, error)
    with pytest.raises(error), atomic(database), order(database) as lease:
        add(database, "a")
    assert is_held(store)
    assert lease._held.state is not LeaseState.HELD
    assert "unknown" in dlock_log()[0]
    assert committed(database) == set()


def test_lease_of_an_unknown_commit_runs_out_and_the_next_holder_goes_on(database, store):
    interrupt_commit(database, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), atomic(database), order(database, ttl=1):
        add(database, "a")
    with order(database), atomic(database):  # waits for the lease to run out
        add(database, "b")
    assert committed(database) == {"b"}


def interrupt_commit(alias, error):
    connections[alias].close()
    del connections[alias]
    connection = connections[alias]
    work, pending = connection._commit, [error]

    def interrupted():
        if pending:
            raise pending.pop()
        work()

    vars(connection)["_commit"] = interrupted


# Test cases


@pytest.fixture
def in_testcase(database):
    """Run a function as the one test of a TestCase on the database."""

    def run_case(body, base=TestCase):
        class Case(base):
            databases = {database}

            def runTest(self):
                body(self)

        result = unittest.TestResult()
        unittest.TestSuite([Case()]).run(result)
        assert result.testsRun == 1
        for _, trace in result.failures + result.errors:
            pytest.fail(trace, pytrace=False)

    return run_case


@pytest.mark.parametrize("base", [TestCase, TransactionTestCase])
@pytest.mark.parametrize("fence", ["transaction", "lease", False])
def test_test_cases_behave_like_production(database, store, in_testcase, base, fence):
    def body(case):
        with order(database, fence=fence):
            assert is_held(store)
        assert not is_held(store)
        with order(database, fence=fence), atomic(database):
            add(database, "a")
        assert not is_held(store)
        with atomic(database):
            with order(database, fence=fence):
                add(database, "b")
            assert is_held(store)
        assert not is_held(store)
        with pytest.raises(Sorry), atomic(database), order(database, fence=fence):
            raise Sorry
        assert not is_held(store)
        with pytest.raises(LeaseLost), order(database, ttl=0.05, renew=False) as lease, atomic(database):
            add(database, "c")
            until_expired(lease, store)
        assert set(Counter.objects.using(database).values_list("name", flat=True)) == {"a", "b"}

    in_testcase(body, base)


def test_captured_hooks_of_a_test_case_run_without_the_lease(database, store, in_testcase):
    def body(case):
        seen = []
        with case.captureOnCommitCallbacks(using=database, execute=True) as callbacks:
            with atomic(database), order(database):
                transaction.on_commit(lambda: seen.append(is_held(store)), using=database)
            assert not is_held(store)
        assert len(callbacks) == 1
        assert seen == [False]

    in_testcase(body)


def test_lock_under_pytest_django_db(db, store):
    with order("default"), atomic():
        add("default", "a")
    with atomic():
        with order("default"):
            pass
        assert is_held(store)
    assert not is_held(store)


def test_lock_under_pytest_django_transactional_db(transactional_db, store):
    with atomic():
        with order("default"):
            pass
        assert is_held(store)
    assert not is_held(store)


# Requests for a lock that the caller holds


def test_asking_inside_a_transaction_under_the_lease_joins(database, store):
    with order(database) as outer:
        with atomic(database), order(database) as inner:
            assert inner.token == outer.token
        assert is_held(store)
    assert not is_held(store)


def test_exclusive_holder_joins_as_a_shared_one(database, store):
    with atomic(database), order(database) as outer, order(database, shared=True) as inner:
        assert inner.token == outer.token


@pytest.mark.parametrize("fence", ["transaction", "lease"])
def test_join_protects_another_database_too(database, store, use_database, fence):
    use_database("other")
    with order(database, fence=fence) as lease:
        with lock("order", 42, using="other", reentrant=True), atomic("other"):
            add("other", "a")
        with atomic(database), lock("order", 42, using="other", reentrant=True), atomic("other"):
            add("other", "b")
    assert fence_token("other") == lease.token
    assert committed("other") == {"a", "b"}


def test_another_thread_is_not_the_same_context(database, store, party):
    with order(database), pytest.raises(AcquireTimeout):
        party().now(lambda: order(database, wait=0).acquire())


# Without `with`, or forgotten


without_refusal = pytest.mark.parametrize("database", ["default", "mariadb"], indirect=True)
"""PostgreSQL's drivers refuse to turn autocommit on inside a transaction."""


@pytest.mark.parametrize("sql", ["COMMIT", "/* c */ rollback", "BEGIN"])
def test_transaction_under_a_lock_is_not_ended_past_django(database, store, sql):
    with order(database), atomic(database):
        add(database, "a")
        with (
            pytest.raises(TransactionManagementError, match="bypassing Django"),
            connections[database].cursor() as cursor,
        ):
            cursor.execute(sql)
        assert is_held(store)
    assert committed(database) == {"a"}


@pytest.mark.parametrize(
    ("database", "sql"),
    [
        ("postgresql", "/* a /* nested */ */ COMMIT"),
        ("postgresql", "ROLLBACK /* x /* y */ z */ TO a"),
        ("mariadb", "# x\nCOMMIT"),
        ("mariadb", "ROLLBACK # x\n TO a"),
        ("mariadb", "/*!ROLLBACK*/ /*!TO a */"),
        ("mariadb", "SET STATEMENT max_statement_time=1 FOR COMMIT"),
        ("mariadb", "SET autocommit=1"),
        ("mariadb", "FLUSH TABLES"),
        ("mariadb", "LOCK TABLES testapp_counter WRITE"),
        ("mariadb", "ANALYZE TABLE testapp_counter"),
        ("mariadb", "CREATE TABLE no_such_table (a int)"),
    ],
    indirect=["database"],
)
def test_disguised_or_implicit_end_of_a_transaction_under_a_lock_is_refused(database, store, sql):
    with order(database), atomic(database):
        add(database, "a")
        with (
            pytest.raises(TransactionManagementError, match="bypassing Django"),
            connections[database].cursor() as cursor,
        ):
            cursor.execute(sql)
        assert committed(database) == set()
    assert committed(database) == {"a"}


@mariadb_only
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("goes_on", [True, False])
def test_commit_that_a_procedure_may_have_sent_is_raised_by_the_next_statement_or_the_commit(database, store, goes_on):
    with order(database), atomic(database), connections[database].cursor() as cursor:
        add(database, "a")
        cursor.execute("EXECUTE IMMEDIATE 'SELECT 1'")  # ends nothing
        cursor.fetchall()
        add(database, "b")
    with (
        pytest.raises(TransactionManagementError, match="ended without Django"),
        order(database),
        atomic(database),
        connections[database].cursor() as cursor,
    ):
        add(database, "c")
        cursor.execute("EXECUTE IMMEDIATE 'COMMIT'")
        if goes_on:
            add(database, "d")
    assert committed(database) == {"a", "b", "c"}


@pytest.mark.parametrize("database", ["default", "postgresql"], indirect=True)
def test_commit_that_the_driver_has_sent_under_a_lock_is_raised_by_djangos_commit(database, store):
    with (
        pytest.raises(TransactionManagementError, match="ended without Django"),
        order(database),
        atomic(database),
    ):
        add(database, "a")
        connections[database].connection.commit()


@pytest.mark.parametrize(
    "sql", ["/* job */ UPDATE {0} SET value = 1", "SELECT 1; UPDATE {0} SET value = 1", "CALL f()"]
)
def test_disguised_write_without_a_transaction_is_refused(database, store, sql):
    with order(database), connections[database].cursor() as cursor, pytest.raises(TransactionManagementError):
        cursor.execute(sql.format(Counter._meta.db_table))


@without_refusal
def test_autocommit_that_is_turned_on_in_a_transaction_is_its_commit(database, store):
    transaction.set_autocommit(False, using=database)
    order(database).acquire()
    add(database, "a")
    transaction.set_autocommit(True, using=database)
    assert not is_held(store)
    assert committed(database) == {"a"}


@without_refusal
def test_autocommit_that_is_turned_on_in_a_transaction_stays_on(database, store):
    transaction.set_autocommit(False, using=database)
    with lock("order", 42, using=database):
        add(database, "ours")
        transaction.set_autocommit(True, using=database)
    add(database, "after")
    assert "after" in committed(database)
    with lock("order", 42, using=database), atomic(database):
        add(database, "in a block")
    add(database, "after the block")
    assert {"in a block", "after the block"} <= committed(database)


@without_refusal
def test_autocommit_that_is_turned_on_commits_nothing_under_a_lost_lease(database, store):
    transaction.set_autocommit(False, using=database)
    lease = order(database).acquire()
    add(database, "a")
    lease._held.lose("somebody else has it")
    with pytest.raises(LeaseLost):
        transaction.set_autocommit(True, using=database)
    transaction.set_autocommit(True, using=database)
    assert committed(database) == set()


@postgresql_only
def test_autocommit_that_is_refused_leaves_the_transaction_and_its_lease(database, store):
    transaction.set_autocommit(False, using=database)
    order(database).acquire()
    add(database, "a")
    with pytest.raises(ProgrammingError):
        transaction.set_autocommit(True, using=database)
    assert is_held(store)
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)
    assert not is_held(store)


@pytest.mark.parametrize("name", ["block", "locked"])
def test_acquire_that_joins_inside_a_transaction_is_left_with_it(database, store, name):
    def join_and_drop():
        with atomic(database):
            order(database).acquire()
            order(database).acquire()
        with atomic(database):
            assert is_held(store)

    if name == "block":
        with order(database):
            join_and_drop()
    else:
        locked("order", 42, using=database)(join_and_drop)()
    assert not is_held(store)
    assert current() == []


def test_joined_lease_that_was_released_by_hand_is_not_left_twice(database, store):
    with order(database):
        with atomic(database):
            order(database).acquire().release()
        assert is_held(store)
        with atomic(database), order(database) as joined:
            joined.release()
        assert is_held(store)
    assert not is_held(store)


def test_lease_that_nobody_keeps_lasts_as_long_as_its_request(database, store):
    order(database).acquire()
    collect_garbage()
    with pytest.raises(AlreadyHeld):
        order(database).acquire()
    assert release_forgotten() == ["order:42"]
    assert not is_held(store)


def outside_of_requests(work):
    """Call a function as a task or command does, whose context no request will end."""
    return Context().run(work)


def drop(lease):
    """Drop the last reference to a lease."""
    with pytest.warns(ResourceWarning, match="'order:.* was never released: it runs out by itself"):  # noqa: PT031
        lease.clear()
        collect_garbage()


@pytest.mark.parametrize("together", [False, True])
def test_lease_that_is_dropped_outside_of_a_request_warns_and_runs_out(database, store, together):
    def task():
        one = order(database, ttl=1)
        drop([(lock(one, lock("order", 1, using=database, ttl=1)) if together else one).acquire()])
        until(lambda: not is_held(store))
        with order(database, wait=0), atomic(database):
            add(database, "a")

    outside_of_requests(task)
    assert committed(database) == {"a"}


def test_lease_that_is_dropped_in_a_transaction_that_works_under_it_is_released_after_its_commit(database, store):
    def task():
        lease = [order(database).acquire()]
        with atomic(database):
            add(database, "a")
            lease.clear()
            collect_garbage()
            assert is_held(store)
            assert Fence.objects.using(database).filter(name="order:42").exists()
        assert not is_held(store)

    outside_of_requests(task)


def test_thread_that_begins_after_a_lease_was_dropped_works_on(database, store, party):
    def task():
        drop([order(database).acquire()])
        other = party()
        other.now(partial(copy_context().run, partial(add_committed, database)))

    outside_of_requests(task)


def add_committed(database):
    with atomic(database):
        add(database, "a")


@pytest.mark.parametrize("parts", [("order", 42), (lock("order", 42), lock("order", 1))])
def test_block_of_what_acquire_returned_is_refused_and_leaves_no_lease(store, parts):
    with pytest.raises(TypeError, match="`with` with the lock itself"), lock(*parts).acquire():
        pass
    assert not is_held(store)


async def test_block_of_what_a_task_acquired_is_refused_and_leaves_no_lease(store):
    with pytest.raises(TypeError, match="`async with` with the lock itself"):
        async with await lock("order", 42).aacquire():
            pass
    assert not is_held(store)


def test_forgotten_leases_are_released_and_named(database, store):
    lock("order", 1, using=database).acquire()
    lock("order", 2, using=database).acquire()
    assert release_forgotten() == ["order:1", "order:2"]
    assert not is_held(store, "order:1")
    assert release_forgotten() == []


def test_lease_of_an_open_transaction_is_not_forgotten(database, store):
    with atomic(database):
        order(database).acquire()
        assert release_forgotten() == []
        assert is_held(store)


def test_forgotten_lease_with_an_open_transaction_is_released_by_its_end(database, store):
    order(database).acquire()
    with atomic(database):
        add(database, "a")
        assert release_forgotten() == ["order:42"]
        assert is_held(store)
    assert not is_held(store)


# Mistakes are found before any I/O


class Untouchable(MemoryBackend):
    """A store that must not be asked."""

    async def try_acquire(self, *args, **kwargs):
        raise AssertionError("the store was asked")


@pytest.fixture
def untouchable():
    with override_settings(DLOCK={"default": {"BACKEND": Untouchable()}}):
        yield


@pytest.mark.usefixtures("untouchable")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ttl": 0}, ValueError),
        ({"ttl": -1}, ValueError),
        ({"ttl": float("nan")}, ValueError),
        ({"ttl": float("inf")}, ValueError),
        ({"ttl": True}, TypeError),
        ({"ttl": "30"}, TypeError),
        ({"wait": -1}, ValueError),
        ({"wait": float("nan")}, ValueError),
        ({"wait": float("inf")}, ValueError),
        ({"wait": False}, TypeError),
        ({"wait": "1"}, TypeError),
        ({"fence": "table"}, ValueError),
        ({"fence": None}, ValueError),
        ({"fence": 1}, ValueError),
        ({"snapshot": "restart"}, ValueError),
        ({"snapshot": None}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_wrong_option_is_refused_by_name(options, error):
    (name,) = options
    with pytest.raises(error, match=name):
        lock("order", 42, **options)


@pytest.mark.usefixtures("untouchable")
@pytest.mark.parametrize(
    "parts", [(), ("",), ("order", ""), ("order", None), ("order", True), ("order", 1.0), ("x" * 513,)]
)
def test_name_that_is_none_is_refused(parts):
    with pytest.raises((ValueError, TypeError), match="name"):
        lock(*parts)


@pytest.mark.usefixtures("untouchable")
def test_instance_is_no_name():
    with pytest.raises(TypeError, match=r"lock\(Counter, key\)"):
        lock("counter", Counter(pk=1))


@pytest.mark.parametrize(
    "hostile", ["{order}:1", "a\nb", "a\r\n", "*", "%2A", "a:b", "é😀", "\x00", "..", "a b", "'; --"]
)
def test_hostile_text_is_a_name_like_any_other(database, store, hostile):
    with lock("order", hostile, using=database) as lease, atomic(database):
        add(database, "a")
    assert lease.name.isascii()
    assert lease.name.count(":") == 1
    assert Fence.objects.using(database).get().name == lease.name


def test_names_differ_when_their_parts_do(database, store):
    with lock("a b", using=database), lock("a", "b", using=database), lock("A", "b", using=database), atomic(database):
        add(database, "a")
    assert Fence.objects.using(database).count() == 3


@pytest.mark.usefixtures("untouchable")
@pytest.mark.parametrize("snapshot", ["raise", "ignore"])
async def test_missing_database_is_refused_before_the_store_is_asked(snapshot):
    wrong = lock("order", 42, using="nowhere", snapshot=snapshot)
    with pytest.raises(Exception, match="nowhere"):
        await wrong.aacquire()
    with pytest.raises(Exception, match="nowhere"):
        await sync_to_async(wrong.acquire)()


def test_missing_store_is_named(database, store):
    with pytest.raises(InvalidStore, match="backup"):
        order(database, store="backup").acquire()


def test_shared_lock_in_a_store_without_them_is_refused_before_it_is_asked(database):
    class Exclusive(Untouchable):
        capabilities = Capabilities()

    with override_settings(DLOCK={"default": {"BACKEND": Exclusive()}}), pytest.raises(NotSupported, match="shared"):
        order(database, shared=True).acquire()


def test_two_stores_have_locks_of_their_own(database, store):
    second = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": store}, "second": {"BACKEND": second}}):
        with order(database), order(database, store="second", fence=False):
            assert is_held(store)
            assert is_held(second)
        assert not is_held(second)


def test_ttl_and_wait_come_from_the_store_unless_given(database):
    backend = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 300, "WAIT": 0}}):
        with order(database) as lease:
            assert 200 < lease.remaining() <= 300
        with order(database, ttl=3000) as lease:
            assert 2000 < lease.remaining() <= 3000


# A store that cannot be reached


@pytest.fixture
def flaky(redis_server):
    """A real Redis behind a network that can be cut."""
    with Proxy(redis_server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with override_settings(DLOCK={"default": {"BACKEND": url, "TTL": 30, "WAIT": 0}}):
            yield proxy


@pytest.fixture
def nobody():
    """A store at a port where no server listens."""
    from tests.servers import free_port

    with override_settings(DLOCK={"default": {"BACKEND": f"redis://127.0.0.1:{free_port()}/0", "WAIT": 0}}):
        yield


@pytest.mark.usefixtures("nobody")
def test_store_down_inside_a_transaction_leaves_nothing_half_committed(database):
    with pytest.raises(BackendUnavailable), atomic(database):
        add(database, "a")
        order(database).acquire()
    assert committed(database) == set()


@pytest.mark.usefixtures("nobody")
def test_store_down_that_the_program_expects_leaves_the_transaction_usable(database):
    with atomic(database):
        add(database, "a")
        with pytest.raises(BackendUnavailable):
            order(database).acquire()
        add(database, "b")
    assert committed(database) == {"a", "b"}


def test_store_lost_after_the_commit_does_not_spoil_it(database, flaky, dlock_log):
    with atomic(database):
        with lock("flaky", database, using=database):
            add(database, "a")
        flaky.refuse()
    assert committed(database) == {"a"}
    assert any("runs out" in line for line in dlock_log())


def test_handle_whose_release_failed_is_not_kept_by_its_context(database, flaky):
    lease = lock("forgotten handle", database, using=database).acquire()
    flaky.refuse()
    with suppress(BackendUnavailable):
        lease.release()
    handle = weakref.ref(lease)
    del lease
    collect_garbage()
    assert handle() is None


# A failed acquire leaves no obligation


@servers_only
def test_acquire_that_failed_at_the_fence_does_not_hinder_the_commit(database, store):
    Fence.objects.using(database).create(name="order:42", token=10**17, holder="x")
    with atomic(database):
        add(database, "a")
        with pytest.raises(StaleToken):
            refuse_greater_tokens(store, order(database).acquire)
        assert not is_held(store)
        add(database, "b")
    assert committed(database) == {"a", "b"}


def refuse_greater_tokens(store, acquire):
    """Acquire from a store that has forgotten the holder when a greater token is requested."""
    renew = store.renew

    async def forgotten(runtime, renewals):
        return [RenewalFailure.LOST for _ in renewals]

    store.renew = forgotten
    try:
        return acquire()
    finally:
        store.renew = renew


# The snapshot trap


LEVELS = [
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "repeatable read"),
    ("mariadb", None),  # the server's default
]


@pytest.fixture(params=LEVELS, ids=str)
def snapshotting(request, isolated):
    """A database and level at which a transaction reads from a snapshot that it takes once."""
    return isolated(*request.param)


def read(alias):
    return list(Counter.objects.using(alias).values_list("name", "value"))


@pytest.mark.usefixtures("untouchable")
def test_lock_after_a_read_is_refused_before_the_store_is_asked(snapshotting):
    with pytest.raises(SnapshotTooOld, match="snapshot='ignore'"), atomic(snapshotting):
        read(snapshotting)
        order(snapshotting).acquire()


@pytest.mark.usefixtures("untouchable")
def test_lock_after_a_read_is_refused_through_async_to_sync_too(snapshotting):
    with pytest.raises(SnapshotTooOld), atomic(snapshotting):
        read(snapshotting)
        async_to_sync(order(snapshotting).aacquire)()


def test_lock_after_a_read_is_granted_to_who_knows_better(snapshotting, store):
    with atomic(snapshotting):
        read(snapshotting)
        with order(snapshotting, snapshot="ignore"):
            pass
        assert is_held(store)
    assert not is_held(store)


def test_lock_before_the_first_read_is_granted(snapshotting, store):
    with atomic(snapshotting), order(snapshotting):
        add(snapshotting, "a")
    with order(snapshotting), atomic(snapshotting):
        add(snapshotting, "b")


def test_lock_in_an_inner_block_before_the_first_read_is_granted(snapshotting, store):
    with atomic(snapshotting), atomic(snapshotting), order(snapshotting):
        add(snapshotting, "a")


def test_second_lock_in_a_transaction_that_has_only_been_admitted_is_refused(snapshotting, store):
    with pytest.raises(SnapshotTooOld), atomic(snapshotting), lock("order", 1, using=snapshotting):
        read(snapshotting)
        lock("order", 2, using=snapshotting).acquire()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_second_lock_after_the_first_one_was_admitted_is_refused_where_the_admit_takes_the_snapshot(
    isolated, store, level
):
    alias = isolated("postgresql", level)
    with pytest.raises(SnapshotTooOld), atomic(alias), lock("order", 1, using=alias):
        lock("order", 2, using=alias).acquire()


@pytest.mark.parametrize("level", ["repeatable read", None])
def test_second_lock_after_the_first_one_was_admitted_is_granted_where_the_admit_takes_none(
    isolated, store, party, level
):
    alias = isolated("mariadb", level)
    add(alias, "a")
    with atomic(alias), lock("order", 1, using=alias):
        party().now(lambda: Counter.objects.using(alias).update(value=1))
        with lock("order", 2, using=alias):
            assert read(alias) == [("a", 1)]


@mariadb_only
def test_read_behind_set_statement_is_a_read(isolated, store):
    alias = isolated("mariadb", "repeatable read")
    with pytest.raises(SnapshotTooOld), atomic(alias):
        rows(connections[alias], "SET STATEMENT max_statement_time = 60 FOR SELECT 1")
        order(alias).acquire()


def test_join_after_a_read_is_no_new_lock(snapshotting, store):
    with atomic(snapshotting), order(snapshotting):
        read(snapshotting)
        with order(snapshotting):
            add(snapshotting, "a")


@pytest.mark.parametrize("level", ["read committed", "read uncommitted"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_lock_after_a_read_is_granted_where_each_statement_sees_what_is_committed(isolated, store, server, level):
    alias = isolated(server, level)
    with atomic(alias):
        read(alias)
        with order(alias):
            add(alias, "a")


@servers_only
def test_isolation_set_by_the_transaction_itself_counts(database, store):
    with pytest.raises(SnapshotTooOld), atomic(database):
        if database == "postgresql":
            rows(connections[database], "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        else:
            connections[database].isolation_level = None
            rows(connections[database], "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        read(database)
        order(database).acquire()


def test_deferred_sqlite_that_has_read_before_another_wrote_is_refused(isolated, store, party):
    alias = isolated("default", "DEFERRED")
    add(alias, "a")
    with pytest.raises(SnapshotTooOld), atomic(alias):
        read(alias)
        party().now(lambda: Counter.objects.using(alias).update(value=1))
        order(alias).acquire()
    assert not is_held(store)


LAST_OF_AUTH = ("auth", "0012_alter_user_first_name_max_length")


@pytest.mark.parametrize("form", [True, "lease"])
def test_migrations_under_a_fence_are_refused_before_they_begin(database, store, form):
    with order(database, fence=form), pytest.raises(NotSupported, match=r"order:42.*fence=False around migrate"):
        call_command("migrate", "auth", "0011", database=database, verbosity=0)
    assert LAST_OF_AUTH in MigrationRecorder(connections[database]).applied_migrations()


def test_migrations_under_a_lock_without_a_fence_are_made_and_noted(database, store):
    recorder = MigrationRecorder(connections[database])
    with order(database, fence=False):
        call_command("migrate", "auth", "0011", database=database, verbosity=0)
        assert LAST_OF_AUTH not in recorder.applied_migrations()
        call_command("migrate", "auth", database=database, verbosity=0)
    assert LAST_OF_AUTH in recorder.applied_migrations()


def test_write_outside_a_transaction_is_refused_under_a_fence(database, store):
    with order(database):
        with pytest.raises(TransactionManagementError, match="order:42"):
            add(database, "a")
        with atomic(database):
            add(database, "b")
    with order(database, fence=False):
        add(database, "c")
    assert committed(database) == {"b", "c"}


@pytest.mark.parametrize(
    "write",
    [
        "WITH one AS (SELECT 1) UPDATE testapp_counter SET value = 1",
        "with x as (select 1)\ndelete from testapp_counter",
    ],
)
def test_write_behind_a_common_table_expression_is_refused_outside_a_transaction_too(database, store, write):
    with lock("order", 42, using=database), connections[database].cursor() as cursor:
        with pytest.raises(TransactionManagementError):
            cursor.execute(write)
        cursor.execute("WITH one AS (SELECT 1 AS n) SELECT n FROM one")
        assert cursor.fetchone() == (1,)


def test_watchdog_keeps_to_the_shorter_ttl_of_a_renewal(store):
    with lock("order", 42, fence=False, ttl=30) as lease:
        before = lease._held.renewal_tick
        lease.renew(ttl=1)
        assert lease._held.renewal_tick < before


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_procedure_with_an_answer_can_be_called_under_a_lock(database, store):
    with connections[database].cursor() as cursor:
        cursor.execute("CREATE PROCEDURE answering() BEGIN SELECT 1; SELECT 2; END")
    try:
        with order(database), atomic(database), connections[database].cursor() as cursor:
            add(database, "a")
            cursor.execute("CALL answering()")
            assert cursor.fetchall() == ((1,),)
            cursor.execute("SELECT 3")  # on the same cursor, which skips the other result sets
            assert cursor.fetchall() == ((3,),)
        assert committed(database) == {"a"}
    finally:
        with connections[database].cursor() as cursor:
            cursor.execute("DROP PROCEDURE answering")
