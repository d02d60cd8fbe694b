"""The fence under real processes that are stopped and go on: nothing is lost, whoever believes to hold the lock."""

import contextlib
import random
import threading

import pytest
from django.conf import settings
from django.db import DatabaseError, connections
from django.db.models import F
from django.db.transaction import atomic

from django_dlock import lock
from django_dlock.errors import DLockError, RowLocked
from dlock_core.transactions.retry import is_conflict
from tests.chaos import Dice
from tests.django_dlock.parties import is_held
from tests.processes import Worker, worker
from tests.testapp.models import Counter
from tests.waiting import until

WORKERS = 4
SECONDS = 1.5
SHORTEST, LONGEST = 0.05, 0.4


# What runs in the other processes


def use_store(backend, **options):
    settings.DLOCK = {"default": {"BACKEND": backend, **options}}


def add_one(link, alias, url, form, pause_at):
    """Add one to the counter; stand still at a point until the test says to go on. Tells how it ended."""
    use_store(url)

    def point(name):
        if name == pause_at:
            link.say(name)
            link.hear()

    try:
        with lock("order", 42, using=alias, fence=form, ttl=0.5, wait=20):
            point("granted")
            with atomic(alias):
                counter = Counter.objects.using(alias).get(name="a")
                point("read")
                Counter.objects.using(alias).filter(name="a").update(value=counter.value + 1)
                point("written")
    except DLockError as error:
        return type(error).__name__
    return "done"


def add_until_told(link, alias, url, form):
    """Add one to the counter again and again; tells how often it was committed."""
    use_store(url or Dice(), TTL=0.2, WAIT=5)
    connections[alias].ensure_connection()
    link.say("ready")
    committed, refused = 0, 0
    while not link.pipe.poll():
        try:
            with lock("order", 42, using=alias, fence=form, wait=1), atomic(alias):
                counter = Counter.objects.using(alias).get(name="a")
                Counter.objects.using(alias).filter(name="a").update(value=counter.value + 1)
        except DatabaseError as error:
            if not isinstance(error, DLockError) and not is_conflict(error):
                raise
            refused += 1
        else:
            committed += 1
    connections.close_all()
    return committed, refused


def mix_until_told(link, alias, form, shared):
    """Post one, sharing, or close: read in one transaction and write in the next; tells how often it was committed."""
    use_store(Dice(), TTL=0.2, WAIT=5)
    connections[alias].ensure_connection()
    link.say("ready")
    committed, refused = 0, 0
    while not link.pipe.poll():
        try:
            with lock("order", 42, using=alias, fence=form, shared=shared, wait=1):
                post(alias) if shared else close(alias)
        except DatabaseError as error:
            if not isinstance(error, DLockError) and not is_conflict(error):
                raise
            refused += 1
        else:
            committed += 1
    connections.close_all()
    return committed, refused


def post(alias):
    with atomic(alias):
        Counter.objects.using(alias).filter(name="a").update(value=F("value") + 1)


def close(alias):
    with atomic(alias):
        seen = Counter.objects.using(alias).get(name="a").value
    with atomic(alias):
        Counter.objects.using(alias).filter(name="a").update(value=seen + 1)


# Stopped at one point, past the ttl


@pytest.fixture
def counter(database):
    return Counter.objects.using(database).create(name="a")


def gone_from(store):
    until(lambda: not is_held(store))


def add_now(database, form):
    with lock("order", 42, using=database, fence=form, wait=20), atomic(database):
        counter = Counter.objects.using(database).get(name="a")
        Counter.objects.using(database).filter(name="a").update(value=counter.value + 1)


@pytest.mark.parametrize("form", ["transaction", "lease", False])
def test_holder_stopped_before_its_transaction_cannot_begin_it_after_its_time(
    database, redis_server, redis_store, counter, form
):
    with worker(add_one, database, redis_server.url, form, "granted") as first:
        assert first.hear() == "granted"
        first.pause()
        gone_from(redis_store)
        add_now(database, form)
        first.resume()
        first.say("go on")
        assert first.result() == "LeaseLost"
    counter.refresh_from_db()
    assert counter.value == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_holder_stopped_in_its_transaction_blocks_no_one_with_a_fence_at_its_end(
    database, redis_server, redis_store, counter
):
    with worker(add_one, database, redis_server.url, "lease", "read") as first:
        assert first.hear() == "read"
        first.pause()
        gone_from(redis_store)
        add_now(database, "lease")
        first.resume()
        first.say("go on")
        assert first.result() in {"LeaseLost", "StaleToken"}
    counter.refresh_from_db()
    assert counter.value == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("point", ["read", "written"])
def test_holder_stopped_in_its_transaction_keeps_the_others_waiting_and_then_rolls_back(
    database, redis_server, redis_store, counter, point
):
    with worker(add_one, database, redis_server.url, "transaction", point) as first:
        assert first.hear() == point
        first.pause()
        gone_from(redis_store)
        with pytest.raises(RowLocked), lock("order", 42, using=database, wait=0.6), atomic(database):
            Counter.objects.using(database).get(name="a")
        first.resume()
        first.say("go on")
        assert first.result() == "LeaseLost"
    add_now(database, "transaction")
    counter.refresh_from_db()
    assert counter.value == 1


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_killed_holder_leaves_nothing_but_a_lease_that_runs_out(database, redis_server, redis_store, counter, form):
    with worker(add_one, database, redis_server.url, form, "written") as first:
        assert first.hear() == "written"
        first.kill()
    add_now(database, form)
    counter.refresh_from_db()
    assert counter.value == 1


# Stopped at random


def torture(database, url, form):
    """Processes add as fast as they can, one is always stopped for longer than a lease; (commits, refusals)."""
    return stopped_at_random([Worker(add_until_told, database, url, form) for _ in range(WORKERS)])


def stopped_at_random(workers):
    pause, over = random.Random(4711), threading.Event()
    try:
        assert {one.hear() for one in workers} == {"ready"}
        timer = threading.Timer(SECONDS, over.set)
        timer.start()
        while not over.is_set():
            one = pause.choice(workers)
            one.pause()
            over.wait(pause.uniform(SHORTEST, LONGEST))
            one.resume()
            over.wait(SHORTEST)
        for one in workers:
            one.say("stop")
        results = [one.result() for one in workers]
    finally:
        for one in workers:
            with contextlib.suppress(ProcessLookupError):
                one.resume()
            one.kill()
            one.pipe.close()
    return sum(committed for committed, _ in results), sum(refused for _, refused in results)


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_no_update_is_lost_when_processes_are_stopped_at_random(database, redis_server, redis_store, counter, form):
    committed, _ = torture(database, redis_server.url, form)
    counter.refresh_from_db()
    assert counter.value == committed > 0


@pytest.mark.parametrize("form", ["transaction", "lease"])
def test_no_update_is_lost_when_the_lock_service_grants_everybody_everything(database, counter, form):
    committed, _ = torture(database, None, form)
    counter.refresh_from_db()
    assert counter.value == committed > 0


@pytest.mark.parametrize("exclusive", ["transaction", "lease"])
def test_no_posting_is_lost_by_a_closing_when_the_lock_service_grants_everybody_everything(
    database, counter, exclusive
):
    closing = [Worker(mix_until_told, database, exclusive, False) for _ in range(2)]
    posting = [Worker(mix_until_told, database, shared, True) for shared in ("transaction", "lease")]
    committed, _ = stopped_at_random([*closing, *posting])
    counter.refresh_from_db()
    assert counter.value == committed > 0


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_updates_are_lost_without_a_fence_when_the_lock_service_is_broken(database, counter):
    committed, _ = torture(database, None, False)
    counter.refresh_from_db()
    assert counter.value < committed
