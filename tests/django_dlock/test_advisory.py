"""Locks inside the caller's own transaction, on PostgreSQL: they last exactly as long as it does."""

import concurrent.futures
import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_dlock import lock, locked
from django_dlock.conf import stores
from django_dlock.connections import in_transaction
from django_dlock.errors import AcquireTimeout, LeaseLost, NotSupported, SnapshotTooOld
from dlock_core.backend import Released
from dlock_core.backends.advisory import TransactionBackend
from dlock_core.backends.memory import MemoryBackend
from dlock_core.runtime import BLOCKING, run
from dlock_core.transactions.retry import DatabaseFailure, classify
from tests.django_dlock.parties import until_blocked
from tests.django_dlock.sessions import add, committed, kill_session, rows, second_session, session_id
from tests.processes import Link, worker
from tests.testapp.models import Counter

PG = "postgresql"
DLOCK = {
    "default": {"BACKEND": f"advisory://{PG}", "WAIT": 20},
    "session": {"BACKEND": f"advisory://{PG}", "OPTIONS": {"session": True}},
}


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def store(use_database) -> Iterator[TransactionBackend]:
    use_database(PG)
    with override_settings(DLOCK=DLOCK):
        yield stores["default"].backend


@pytest.fixture
def memory_store(store) -> Iterator[None]:
    """A store of leases in addition to it."""
    with override_settings(DLOCK={**DLOCK, "memory": {"BACKEND": MemoryBackend()}}):
        yield


def order(key: int = 42, **options: Any) -> Any:
    return lock("order", key, **{"using": PG, **options})


def is_free(party: Callable[[], Any], **options: Any) -> bool:
    """Return whether another session could get the lock now."""

    def ask() -> bool:
        try:
            with transaction.atomic(PG), order(wait=0, **options):
                return True
        except AcquireTimeout:
            return False

    return party().now(ask)


def take_and_wait(**options: Any) -> int:
    with transaction.atomic(PG), order(**options) as lease:
        return lease.token


# How it ends


def hold(link: Link, how: str) -> None:
    with override_settings(DLOCK=DLOCK):
        try:
            with transaction.atomic(PG), order() as lease:
                link.say(lease.token)
                link.hear()
                if how == "rollback":
                    raise Sorry
        except Sorry:
            pass
        connections.close_all()


@pytest.mark.parametrize("how", ["commit", "rollback", "kill"])
def test_another_process_has_the_lock_as_soon_as_the_transaction_is_over(store, party, how):
    with worker(hold, how) as holder:
        token = holder.hear()
        assert not is_free(party)
        next_one = party().do(take_and_wait)
        until_blocked(PG)
        assert not next_one.done()
        if how == "kill":
            holder.kill()
        else:
            holder.say("end")
        assert next_one.result(60) > token


def test_release_before_the_end_answers_that_it_is_not_the_time(store, party):
    with transaction.atomic(PG):
        lease = order().acquire()
        assert lease.release() is None
        assert lease.remaining() == float("inf")
        assert not is_free(party)
    assert lease.release() is Released.RELEASED
    assert not lease.lost
    assert is_free(party)


def test_lock_is_released_by_commit_itself(store, party, journal, follow):
    follow(PG)
    with transaction.atomic(PG), order():
        add(PG, "a")
    assert journal == ["BEGIN", "acquired order:42", "COMMIT", "released order:42"]


def test_rollback_is_a_release_and_no_loss(store, party, journal, follow):
    follow(PG)
    with pytest.raises(Sorry), transaction.atomic(PG):
        lease = order().acquire()
        raise Sorry
    assert journal == ["BEGIN", "acquired order:42", "ROLLBACK", "released order:42"]
    assert not lease.lost
    assert is_free(party)


def test_killed_session_ends_the_lock_and_its_work_is_not_committed(store, party):
    with pytest.raises(DatabaseError), transaction.atomic(PG), order() as lease:
        add(PG, "lost")
        kill_session(PG)
        assert is_free(party)
        add(PG, "after")
    assert lease.remaining() == 0.0
    assert committed(PG) == set()


def test_error_that_aborts_the_transaction_ends_the_lock_and_nothing_passes_after_it(store, party):
    with pytest.raises(TransactionManagementError), transaction.atomic(PG), order():
        add(PG, "undone")
        with pytest.raises(IntegrityError):
            Counter.objects.using(PG).create(name=None)
        assert is_free(party)
        add(PG, "after")
    assert committed(PG) == set()


def test_error_inside_a_savepoint_leaves_the_lock(store, party):
    with transaction.atomic(PG), order():
        with pytest.raises(IntegrityError), transaction.atomic(PG):
            Counter.objects.using(PG).create(name=None)
        assert not is_free(party)
        add(PG, "a")
    assert committed(PG) == {"a"}


# Savepoints


def roll_back_a_savepoint(inside: Callable[[], Any]) -> Any:
    with pytest.raises(Sorry), transaction.atomic(PG):
        found = inside()
        raise Sorry
    return found


def test_lock_that_goes_with_a_savepoint_is_lost_and_its_transaction_cannot_commit(store, party):
    with pytest.raises(LeaseLost, match="savepoint"), transaction.atomic(PG):
        lease = roll_back_a_savepoint(lambda: order().acquire())
        assert lease.lost
        assert is_free(party)
        add(PG, "unprotected")
    assert committed(PG) == set()


def test_block_that_was_left_before_the_savepoints_rollback_is_over(store, party):
    def inside() -> Any:
        with order() as lease:
            return lease

    with transaction.atomic(PG):
        lease = roll_back_a_savepoint(inside)
        assert lease.remaining() == 0.0
        assert is_free(party)
        add(PG, "elsewhere")
    assert committed(PG) == {"elsewhere"}


def test_lock_that_is_taken_again_after_the_savepoint_protects_the_commit(store, party):
    with transaction.atomic(PG):
        lost = roll_back_a_savepoint(lambda: order().acquire())
        again = order().acquire()
        assert again.token > lost.token
        assert not is_free(party)
        add(PG, "protected")
    assert committed(PG) == {"protected"}


def test_lock_taken_before_a_savepoint_survives_its_rollback(store, party):
    with transaction.atomic(PG), order() as lease:
        roll_back_a_savepoint(lambda: add(PG, "undone"))
        assert not lease.lost
        assert not is_free(party)


def test_lock_taken_in_a_savepoint_that_is_released_lasts_to_the_end(store, party):
    with transaction.atomic(PG):
        with transaction.atomic(PG):
            lease = order().acquire()
        assert lease.remaining() > 0.0
        assert not is_free(party)


# Waiting


@pytest.fixture
def holder(store, party) -> Iterator[Any]:
    """Another thread whose transaction holds the lock."""
    other = party()
    other.begin(PG)
    other.now(order().acquire)
    yield other
    other.rollback()


@pytest.mark.parametrize("wait", [0, 0.05])
def test_wait_that_runs_out_leaves_the_transaction_usable(holder, wait):
    with transaction.atomic(PG):
        add(PG, "before")
        with pytest.raises(AcquireTimeout, match="pid") as caught:
            order(wait=wait).acquire()
        add(PG, "after")
    assert committed(PG) == {"before", "after"}
    assert caught.value.waited >= wait


def test_time_limit_of_the_transaction_is_its_own_again_after_a_wait(holder, party):
    waiter = party()
    waiter.begin(PG)
    waiter.now(sql, "SET LOCAL lock_timeout = '7s'")
    with pytest.raises(AcquireTimeout):
        waiter.now(order(wait=0.05).acquire)
    assert waiter.now(sql, "SHOW lock_timeout") == [("7s",)]
    pending = waiter.do(order().acquire)
    until_blocked(PG)
    holder.rollback()
    pending.result(60)
    assert waiter.now(sql, "SHOW lock_timeout") == [("7s",)]
    waiter.rollback()
    holder.begin(PG)


def sql(statement: str) -> list[tuple[Any, ...]]:
    return rows(connections[PG], statement)


def test_deadlock_of_two_locks_is_found_by_the_database(store, party):
    first, second = party(), party()
    for other, key in ((first, 1), (second, 2)):
        other.begin(PG)
        other.now(order(key).acquire)
    pending = {first.do(order(2, wait=None).acquire): first, second.do(order(1, wait=None).acquire): second}
    (victim,), (other,) = concurrent.futures.wait(pending, 60, concurrent.futures.FIRST_COMPLETED)
    assert isinstance(victim.exception(), OperationalError)
    assert classify(victim.exception()) is DatabaseFailure.DEADLOCK
    pending[victim].rollback()
    assert other.result(60).token
    pending[other].rollback()


# Modes


def test_shared_locks_are_held_together_and_keep_exclusive_ones_out(store, party):
    with transaction.atomic(PG), order(shared=True) as lease:
        assert lease.shared
        assert is_free(party, shared=True)
        assert not is_free(party)


def test_asking_again_inside_the_transaction_joins(store, party):
    with transaction.atomic(PG):
        with order() as outer, order() as inner:
            assert (inner.token, inner.holder) == (outer.token, outer.holder)
        assert not is_free(party)


def test_session_lock_of_the_same_name_is_the_same_lock(store, party):
    with order(store="session", fence=False):
        assert not is_free(party)
    assert is_free(party)


def test_names_whose_keys_begin_alike_are_locks_of_their_own(store, party):
    first, second = 40808, 121100
    with transaction.atomic(PG), order(first):
        assert not is_free(party, key=first)
        assert is_free(party, key=second)


def test_several_are_held_together_in_one_transaction(store, party):
    with transaction.atomic(PG), lock(order(2), order(1)) as leases:
        assert [lease.name for lease in leases] == ["order:2", "order:1"]
        assert not is_free(party, key=1)
        assert not is_free(party, key=2)
    assert is_free(party, key=1)
    assert is_free(party, key=2)


def test_several_are_held_all_or_none(holder, party):
    with transaction.atomic(PG):
        with pytest.raises(AcquireTimeout):
            lock(order(1, wait=0), order(wait=0)).acquire()
        add(PG, "usable")
    assert committed(PG) == {"usable"}


def test_renewal_asks_whether_it_still_holds(store):
    with transaction.atomic(PG), order() as lease:
        lease.renew()
        assert lease.remaining() == float("inf")


# Where there is no such lock


def test_outside_a_transaction_it_is_refused_before_any_question(store):
    connections[PG].close()
    with pytest.raises(NotSupported, match=r"atomic\(\).*session=True"):
        order().acquire()
    assert connections[PG].connection is None


def test_async_code_is_outside_of_transactions(store):
    with pytest.raises(NotSupported, match="atomic"):
        async_to_sync(order().aacquire)()


@pytest.mark.parametrize("alias", ["default", "mariadb"])
def test_other_databases_are_refused_by_name(use_database, alias):
    use_database(alias)
    with (
        override_settings(DLOCK={"default": {"BACKEND": f"advisory://{alias}"}}),
        transaction.atomic(alias),
        pytest.raises(NotSupported, match=r"PostgreSQL.*session=True"),
    ):
        order(using=alias).acquire()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_snapshot_that_is_always_older_than_the_lock_is_refused(isolated, level):
    alias = isolated(PG, level)
    with override_settings(DLOCK={"default": {"BACKEND": f"advisory://{alias}"}}):
        with transaction.atomic(alias), pytest.raises(SnapshotTooOld, match=level.upper()):
            order(using=alias).acquire()
        with transaction.atomic(alias):
            assert order(using=alias, snapshot="ignore").acquire().remaining() > 0


def test_snapshot_that_is_older_is_refused_without_a_wait_for_the_holder(isolated, holder):
    alias = isolated(PG, "repeatable read")
    with override_settings(DLOCK={"default": {"BACKEND": f"advisory://{alias}"}}), transaction.atomic(alias):
        rows(connections[alias], "SELECT 1")
        with pytest.raises(SnapshotTooOld):
            order(using=alias, wait=1).acquire()


def test_lock_costs_one_statement_also_where_the_transaction_has_read_already(store):
    with transaction.atomic(PG):
        rows(connections[PG], "SELECT 1")
        with CaptureQueriesContext(connections[PG]) as sent, order():
            pass
    (statement,) = sent.captured_queries
    assert "pg_try_advisory_xact_lock" in statement["sql"]


# The fence


def fences(alias: str) -> list[tuple[Any, ...]]:
    with second_session(alias) as second:
        return rows(second, "SELECT name, token FROM dlock_fence WHERE name <> ''")


@pytest.mark.parametrize("fence", [True, "lease", False])
def test_no_fence_is_needed_where_one_commit_ends_both(store, fence):
    with transaction.atomic(PG), order(fence=fence):
        add(PG, "a")
    assert committed(PG) == {"a"}
    assert fences(PG) == []


def test_another_database_is_fenced_as_ever(store, use_database):
    use_database("default")
    with transaction.atomic(PG), transaction.atomic("default"), order(using="default") as lease:
        add("default", "a")
    assert fences("default") == [("order:42", lease.token)]


def test_commit_elsewhere_after_the_locks_own_transaction_is_refused(store, use_database):
    use_database("default")
    with pytest.raises(LeaseLost), transaction.atomic("default"), transaction.atomic(PG), order(using="default"):
        add("default", "late")
    assert committed("default") == set()


def test_transaction_elsewhere_that_does_nothing_under_the_lock_commits_after_it(store, use_database):
    """As with ATOMIC_REQUESTS on two databases, the outer one is committed last."""
    use_database("default")
    with transaction.atomic("default"):
        add("default", "before")
        with transaction.atomic(PG), order():
            add(PG, "a")
        add("default", "after")
    assert committed("default") == {"before", "after"}


def test_work_elsewhere_under_the_lock_that_is_committed_after_it_is_refused_with_the_reason(store, use_database):
    use_database("default")
    reason = "the transaction that held it, on 'postgresql', ended before this one"
    with pytest.raises(LeaseLost, match=reason), transaction.atomic("default"), transaction.atomic(PG), order():
        add("default", "late")
    assert committed("default") == set()


# Views and functions


@contextmanager
def atomic_requests() -> Iterator[None]:
    connections.settings[PG]["ATOMIC_REQUESTS"] = True
    try:
        yield
    finally:
        connections.settings[PG]["ATOMIC_REQUESTS"] = False


@locked("order", "order_id", using=PG)
def ship(order_id: int) -> bool:
    add(PG, "shipped")
    return in_transaction(PG)


def test_stacked_with_a_lock_inside_the_transaction_the_lease_is_taken_first_whichever_stands_above(
    store, memory_store, journal, follow
):
    follow(PG)
    inside = locked("order", 42, using=PG)
    outside = locked("customer", 8, using=PG, store="memory")
    for make in (lambda work: inside(outside(work)), lambda work: outside(inside(work))):
        journal.clear()
        make(lambda: journal.append(f"work {in_transaction(PG)}"))()
        begin = ["acquired customer:8", "BEGIN", "acquired order:42", "work True", "COMMIT"]
        assert (journal[:5], sorted(journal[5:])) == (begin, ["released customer:8", "released order:42"])


def view(request: Any, pk: int) -> Any:
    from django.http import HttpResponse

    return HttpResponse(str(ship(pk)))


urlpatterns = [path("orders/<int:pk>/", locked("order", "pk", using=PG)(view))]


def test_decorated_function_opens_the_transaction_that_it_locks_in(store, journal, follow):
    follow(PG)
    assert ship(42)
    assert journal == ["BEGIN", "acquired order:42", "COMMIT", "released order:42"]


@locked("order", "order_id")
def note_elsewhere(order_id: int) -> bool:
    add("default", "noted")
    return in_transaction(PG) and in_transaction("default")


def test_decorated_function_commits_the_locks_own_transaction_last(store, use_database):
    use_database("default")
    assert note_elsewhere(42)
    assert committed("default") == {"noted"}


def test_decorated_view_locks_inside_its_request_transaction(store, journal, follow):
    follow(PG)
    with atomic_requests(), override_settings(ROOT_URLCONF=__name__):
        assert Client().get("/orders/42/").content == b"True"
    assert journal == ["BEGIN", "acquired order:42", "COMMIT", "released order:42"]


def test_transaction_of_another_thread_does_not_end_the_lock(store, party):
    """The context may be copied into a thread that has its own connection."""

    def note() -> None:
        with connections[PG].cursor() as cursor:
            cursor.execute("SELECT 1")

    other = party()
    with transaction.atomic(PG):
        lease = order().acquire()
        context = contextvars.copy_context()
        other.now(context.run, transaction.atomic(PG)(note))
        assert not lease.lost
        assert not is_free(party)
    assert is_free(party)


# Seen from outside


def test_refusal_names_the_holder_and_not_who_waits(holder, store, party):
    waiter, third = party(), party()
    waiter.begin(PG)
    pending = waiter.do(order().acquire)
    until_blocked(PG)
    pid = holder.now(session_id, PG)
    third.begin(PG)
    with pytest.raises(AcquireTimeout) as caught:
        third.now(order(wait=0).acquire)
    assert f"pid {pid}" in caught.value.held_by
    third.rollback()
    holder.rollback()
    pending.result()
    waiter.rollback()


def test_holder_and_waiter_are_shown_by_name(holder, store, party):
    waiter = party()
    waiter.begin(PG)
    pending = waiter.do(order().acquire)
    until_blocked(PG)
    (state,) = [state for state in run(store.inspect(BLOCKING)) if state.name == "order:42"]
    assert [each.token > 0 for each in state.holders] == [True]
    assert len(state.waiters) == 1
    holder.rollback()
    pending.result(60)
    waiter.rollback()
    holder.begin(PG)


def test_name_is_told_by_the_session_until_the_transaction_ends(store):
    before = sql("SHOW application_name")
    with transaction.atomic(PG), order() as lease:
        ((name,),) = sql("SHOW application_name")
        assert name.endswith(f"dlock:{lease.token}#order:42")
    assert sql("SHOW application_name") == before


def test_forced_release_rolls_the_transaction_back_and_spares_newer_ones(store, party):
    with pytest.raises(DatabaseError), transaction.atomic(PG), order() as lease:
        add(PG, "lost")
        assert not run(store.force_release(BLOCKING, "order:42", lease.token + 1))
        assert run(store.force_release(BLOCKING, "order:42", lease.token))
        assert is_free(party)
        add(PG, "after")
    assert committed(PG) == set()
