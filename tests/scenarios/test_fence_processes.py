"""The fence with real processes that are stopped and resumed: no update is lost, even if several believe that they hold the lock.

The forms of the fence are spread over the databases and the ways to fail: not every form meets every way everywhere.
"""

from collections.abc import Iterator

import pytest

from dlock_core.errors import RowLocked
from dlock_core.runtime import BLOCKING, run
from tests.processes import worker
from tests.scenarios.application import Place
from tests.scenarios.crew import Crew, add, add_one, close, post, serve, stop_at_random, work_until_told
from tests.scenarios.places import where
from tests.waiting import until

DJANGO = {
    driver: Place("django", driver, level)
    for driver, level in [
        ("sqlite", "IMMEDIATE"),
        ("postgresql", "read committed"),
        ("mariadb", "read committed"),
    ]
}
SQLALCHEMY = {
    driver: Place("sqlalchemy", driver, level)
    for driver, level in [
        ("sqlite", "IMMEDIATE"),
        ("postgresql", "read committed"),
        ("mariadb", "repeatable read"),
    ]
}
ASYNCPG = Place("asyncio", "asyncpg", "read committed")
SERVERS = [places[driver] for places in (DJANGO, SQLALCHEMY) for driver in ("postgresql", "mariadb")] + [ASYNCPG]
EVERY = [*DJANGO.values(), *SQLALCHEMY.values(), ASYNCPG]
FORMS = ("transaction", "lease", False)


def where_each(argument, pairs):
    """Run a scenario with one value at each place."""
    return pytest.mark.parametrize(
        ("application", argument), pairs, ids=lambda value: str(value).lower(), indirect=["application"]
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(processes: Crew) -> Iterator[Crew]:
    yield processes
    processes.tidy_up()


def until_expired(store):
    until(lambda: not run(store.inspect(BLOCKING, "order:42"))[0].holders)


def add_now(application, form):
    session = application.session()
    with session.lock("order", 42, fence=form, wait=20):
        add(session)
    session.close()


# Stopped at one point, past the ttl


@where_each("form", [(place, FORMS[number % 3]) for number, place in enumerate(EVERY)])
def test_holder_stopped_before_its_transaction_cannot_begin_it_after_its_time(
    application, crew, redis_server, redis_store, form
):
    first = crew.start(add_one, application.place, redis_server.url, form, "granted")
    assert first.hear() == "granted"
    first.pause()
    until_expired(redis_store)
    add_now(application, form)
    first.resume()
    first.say("go on")
    assert crew.end(first) == "LeaseLost"
    assert application.value() == 1


@where(SERVERS)
def test_holder_stopped_in_its_transaction_blocks_no_one_with_a_fence_at_its_end(
    application, crew, redis_server, redis_store
):
    first = crew.start(add_one, application.place, redis_server.url, "lease", "read")
    assert first.hear() == "read"
    first.pause()
    until_expired(redis_store)
    add_now(application, "lease")
    first.resume()
    first.say("go on")
    assert crew.end(first) in {"LeaseLost", "StaleToken"}
    assert application.value() == 1


@where_each("point", [(place, ("read", "written")[number % 2]) for number, place in enumerate(SERVERS)])
def test_holder_stopped_in_its_transaction_keeps_the_others_waiting_and_then_rolls_back(
    application, crew, redis_server, redis_store, point
):
    first = crew.start(add_one, application.place, redis_server.url, "transaction", point)
    assert first.hear() == point
    first.pause()
    until_expired(redis_store)
    session = application.session()
    with pytest.raises(RowLocked), session.lock("order", 42, wait=0.6), session.transaction():
        session.read()
    session.close()
    first.resume()
    first.say("go on")
    assert crew.end(first) == "LeaseLost"
    add_now(application, "transaction")
    assert application.value() == 1


@where_each("form", [(place, FORMS[number % 2]) for number, place in enumerate(EVERY)])
def test_killed_holder_leaves_nothing_but_a_lease_that_runs_out(application, redis_server, redis_store, form):
    with worker(serve) as first:
        first.say((add_one, (application.place, redis_server.url, form, "written")))
        assert first.hear() == "written"
        first.kill()
    add_now(application, form)
    assert application.value() == 1


# Stopped at random, in both forms at once


def add_in_both_forms(application, crew, url):
    """Have two workers of each form add to the counter, under locks of a Redis or of a store that grants everything (None)."""
    workers = [
        crew.start(work_until_told, application.place, url, add, {"fence": form})
        for form in ("transaction", "lease") * 2
    ]
    return stop_at_random(crew, workers, application)


@where(EVERY)
def test_no_update_is_lost_when_processes_are_stopped_at_random(application, crew, redis_server, redis_store):
    committed = add_in_both_forms(application, crew, redis_server.url)
    assert application.value() == committed > 0


@where(EVERY)
def test_no_update_is_lost_when_the_lock_service_grants_everybody_everything(application, crew):
    committed = add_in_both_forms(application, crew, None)
    assert application.value() == committed > 0


@where(EVERY)
def test_no_posting_is_lost_by_a_closing_when_the_lock_service_grants_everybody_everything(application, crew):
    """Posting shares the lock; closing holds it alone, and reads in one transaction what it writes in the next."""
    workers = [
        crew.start(work_until_told, application.place, None, work, {"fence": form, "shared": shared})
        for form in ("transaction", "lease")
        for work, shared in ((close, False), (post, True))
    ]
    committed = stop_at_random(crew, workers, application)
    assert application.value() == committed > 0


@where([DJANGO["mariadb"], SQLALCHEMY["postgresql"], ASYNCPG])
def test_updates_are_lost_without_a_fence_when_the_lock_service_is_broken(application, crew):
    """Shows that the scenarios above can fail."""
    workers = [crew.start(work_until_told, application.place, None, add, {"fence": False}) for _ in range(4)]
    committed = stop_at_random(crew, workers, application)
    assert application.value() < committed
