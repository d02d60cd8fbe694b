"""The lease table with a clock that the test sets: each limit holds to the microsecond, unlike with a real one."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
from sqlalchemy import create_engine, text

from dlock_core.backend import AcquireRequest, Busy, Granted, Released, Renewal, RenewalFailure
from dlock_core.backends.sql import Connection
from dlock_core.backends.table import backend as module
from dlock_core.backends.table import statements
from dlock_core.backends.table.backend import MAX_POLL_INTERVAL_S, TableBackend
from dlock_core.backends.table.statements import KEPT, TEN_YEARS, Dialect
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from tests.sqla_dlock.parties import until_blocked
from tests.table_stores import URLS, table

TTL = 10_000_000
"""In microseconds, like all times here."""
START = time.time_ns() // 1000
AT_ONCE = LockOptions(TTL / 1e6, 0.0)

At = Callable[[int], None]


def at_moment(dialect: Dialect, moment: int) -> Dialect:
    def fixed(text: str) -> str:
        text = text.replace(statements._POSTGRESQL_NOW, f"CAST({moment} AS bigint)")
        return text.replace(statements._MYSQL_NOW, str(moment)).replace(statements._SQLITE_NOW, str(moment))

    texts = {each.name: getattr(dialect, each.name) for each in fields(dialect)}
    single = {name: fixed(text) for name, text in texts.items() if isinstance(text, str)}
    return replace(dialect, **single, take=tuple(map(fixed, dialect.take)))


@pytest.fixture(params=["default", "postgresql", "mariadb", "the words of MySQL"])
def store(request: pytest.FixtureRequest, django_db_blocker: pytest.FixtureRequest) -> Iterator[TableBackend]:
    backend = table(request, "mariadb" if request.param == "the words of MySQL" else request.param)
    with django_db_blocker.unblock():  # type: ignore[attr-defined]
        ask(backend, "DELETE FROM dlock_lease")
        yield backend
        ask(backend, "DELETE FROM dlock_lease")
    backend.close()


@pytest.fixture
def at(request: pytest.FixtureRequest, store: TableBackend, monkeypatch: pytest.MonkeyPatch) -> At:
    """Return a function that sets the database's clock, in microseconds after START."""
    words = dict(module.DIALECTS)
    if request.node.callspec.params["store"] == "the words of MySQL":
        words["mariadb"] = words["mysql"]
    monkeypatch.setattr(module, "GRANTS_PER_TIDYING", math.inf)  # no grant tidies by chance

    def set_clock(since_start: int) -> None:
        for vendor, dialect in words.items():
            monkeypatch.setitem(module.DIALECTS, vendor, at_moment(dialect, START + since_start))

    return set_clock


def ask(store: TableBackend, sql: str) -> list[tuple[object, ...]]:
    return run(store.pool.step(BLOCKING, "", lambda session: session.execute(sql)))


def asked(name: str = "a", **changes: object) -> AcquireRequest:
    return new_request(name, AT_ONCE)._replace(**changes)  # type: ignore[arg-type]


def granted(store: TableBackend, request: AcquireRequest) -> int:
    answer = run(store.try_acquire(BLOCKING, request))
    assert isinstance(answer, Granted)
    return answer.token


def refused(store: TableBackend, request: AcquireRequest) -> float:
    """Return the delay in seconds after which the refusal says to try again."""
    answer = run(store.try_acquire(BLOCKING, request))
    assert isinstance(answer, Busy)
    return round(answer.retry_after - 0.001, 6)


def renewed(store: TableBackend, request: AcquireRequest, token: int) -> bool:
    return run(store.renew(BLOCKING, [Renewal(request, Granted(token, request.ttl))])) != [RenewalFailure.LOST]


def test_lease_holds_until_the_microsecond_of_its_expiry(store: TableBackend, at: At) -> None:
    request = asked()
    at(0)
    token = granted(store, request)
    assert token >= START
    at(4_000_000)
    assert refused(store, asked()) == 6.0
    ((holder,),) = [state.holders for state in run(store.inspect(BLOCKING, "a"))]
    assert (holder.expires_in, holder.held_for) == (6.0, 4.0)
    assert run(store._look(BLOCKING, "a")) == 6.0
    at(TTL - 1)
    assert refused(store, asked()) == 0.005  # no less, so that no waiter polls too often
    assert [state.name for state in run(store.inspect(BLOCKING))] == ["a"]
    assert run(store.release(BLOCKING, asked(), Granted(token, 1.0))) is Released.STOLEN
    assert not renewed(store, asked(), token)
    assert not run(store.force_release(BLOCKING, "a", token + 1))
    assert renewed(store, request, token)
    assert run(store.force_release(BLOCKING, "a", token))
    assert run(store.inspect(BLOCKING)) == []


def test_lease_is_over_at_the_microsecond_of_its_expiry(store: TableBackend, at: At) -> None:
    request = asked()
    at(0)
    token = granted(store, request)
    at(TTL)
    assert run(store.inspect(BLOCKING)) == []
    assert run(store._look(BLOCKING, "a")) <= 0.0
    assert not renewed(store, request, token)
    assert not run(store.force_release(BLOCKING, "a", token))
    assert run(store.release(BLOCKING, request, Granted(token, 1.0))) is Released.EXPIRED
    assert granted(store, asked()) > token


def test_lease_that_is_asked_for_at_its_expiry_is_another_one(store: TableBackend, at: At) -> None:
    request = asked()
    at(0)
    token = granted(store, request)
    at(TTL - 1)
    assert granted(store, request) == token
    at(2 * TTL - 1)
    assert granted(store, request) > token
    ((holder,),) = [state.holders for state in run(store.inspect(BLOCKING, "a"))]
    assert (holder.expires_in, holder.held_for) == (10.0, 0.0)


def test_token_is_above_the_floor_and_stays_if_it_is_already(store: TableBackend, at: At) -> None:
    request = asked()
    at(0)
    token = granted(store, request)
    assert granted(store, request._replace(floor=token - 1)) == token
    assert granted(store, request._replace(floor=token)) == token + 1
    assert granted(store, request._replace(floor=token + 5)) == token + 6
    assert run(store.release(BLOCKING, request, Granted(token, 1.0))) is Released.RELEASED
    assert granted(store, asked(floor=token + 9)) == token + 10
    assert granted(store, asked("b", floor=token + 99)) == token + 100


def test_renewal_pushes_the_expiry_and_never_back(store: TableBackend, at: At) -> None:
    requests = [asked("a"), asked("b", ttl=1.0)]
    at(0)
    tokens = [granted(store, request) for request in requests]
    at(500_000)
    renewals = [Renewal(request, Granted(token, 1.0)) for request, token in zip(requests, tokens, strict=True)]
    late = renewals[0]._replace(request=requests[0]._replace(ttl=2.0))
    assert run(store.renew(BLOCKING, [late, renewals[1]])) == [2.0, 1.0]
    left = {state.name: state.holders[0].expires_in for state in run(store.inspect(BLOCKING))}
    assert left == {"a": 9.5, "b": 1.0}
    at(1_500_000)  # One lease has expired, the other has not.
    assert run(store.renew(BLOCKING, renewals)) == [10.0, RenewalFailure.LOST]


def test_newcomer_leaves_a_free_row_to_those_who_wait_until_their_mark_is_over(store: TableBackend, at: At) -> None:
    if store.pool.connector.vendor == "postgresql":
        pytest.skip("waiters are notified there")
    newcomer = asked(queue=True, fair=True)
    mark = int(2 * MAX_POLL_INTERVAL_S * 1e6)
    at(0)
    request = asked()
    token = granted(store, request)
    assert run(store._look(BLOCKING, "a")) == 10.0
    assert run(store.release(BLOCKING, request, Granted(token, 1.0))) is Released.RELEASED
    at(mark - 1)
    run(store.try_acquire(BLOCKING, newcomer))
    assert run(store.inspect(BLOCKING)) == []
    at(mark)
    assert granted(store, newcomer) > token


def test_mark_of_those_who_wait_is_made_anew_before_it_is_over(store: TableBackend, at: At) -> None:
    if store.pool.connector.vendor == "postgresql":
        interval = int(module.MAX_NOTIFIED_WAIT_S * 1e6)
    else:
        interval = int(MAX_POLL_INTERVAL_S * 1e6)
    at(0)
    granted(store, asked(ttl=60.0))
    for moment, mark in ((0, 2 * interval), (interval, 2 * interval), (interval + 1, 3 * interval + 1)):
        at(moment)
        assert run(store._look(BLOCKING, "a")) == round(60.0 - moment / 1e6, 6)
        assert ask(store, "SELECT wanted_until FROM dlock_lease") == [(START + mark,)]


def test_row_is_marked_by_nobody_once_it_is_free(store: TableBackend, at: At) -> None:
    def mark(session: Connection) -> None:
        words = module.DIALECTS[session.vendor]
        session.execute(words.note or words.look, {"name": "a", "sleep": 1_000_000})

    at(0)
    granted(store, asked())
    for moment, marked in ((TTL, 0), (TTL - 1, START + TTL - 1 + 2_000_000)):
        at(moment)
        run(store.pool.step(BLOCKING, "", mark))
        assert ask(store, "SELECT wanted_until FROM dlock_lease") == [(marked,)]


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_release_while_a_waiter_waits_to_mark_the_row_is_not_slept_through(store: TableBackend, at: At) -> None:
    at(0)
    granted(store, asked(ttl=60.0))
    assert run(store._look(BLOCKING, "a")) == 60.0
    at(int(1.2 * module.MAX_NOTIFIED_WAIT_S * 1e6))
    engine = create_engine(URLS["psycopg"])
    with engine.connect() as other, ThreadPoolExecutor(1) as threads:
        other.execute(text("UPDATE dlock_lease SET expires_at = 0"))
        look = threads.submit(run, store._look(BLOCKING, "a"))
        until_blocked(engine)
        other.commit()
        assert look.result(30) == 0.0
    engine.dispose()


def test_row_goes_when_it_was_not_used_for_as_long_as_the_clock_may_step_back(store: TableBackend, at: At) -> None:
    at(0)
    granted(store, asked("expired"))
    at(TTL)
    released = asked("released")
    run(store.release(BLOCKING, released, Granted(granted(store, released), 1.0)))
    granted(store, asked("token"))
    ask(store, f"UPDATE dlock_lease SET expires_at = 0, token = {START + TTL} WHERE name = 'token'")
    ask(store, "UPDATE dlock_lease SET token = 1 WHERE name <> 'token'")
    for moment, left in ((TTL + KEPT, 3), (TTL + KEPT + 1, 0)):
        at(moment)
        run(store.pool.step(BLOCKING, "", store._tidy))
        assert len(ask(store, "SELECT name FROM dlock_lease")) == left


def test_row_that_is_used_again_before_it_goes_stays_and_so_do_others(store: TableBackend, at: At) -> None:
    def forget(session: Connection) -> None:
        session.execute(module.DIALECTS[session.vendor].forget, {"name": "used"})

    at(0)
    for name in ("used", "unused"):
        granted(store, asked(name))
    at(TTL + KEPT + 1)
    granted(store, asked("used"))
    run(store.pool.step(BLOCKING, "", forget))
    assert ask(store, "SELECT name FROM dlock_lease ORDER BY name") == [("unused",), ("used",)]


def test_waiter_is_told_of_its_own_lock(store: TableBackend, at: At) -> None:
    at(0)
    for number, name in enumerate("abc", 1):
        granted(store, asked(name, ttl=number * 10.0))
    for name, left in (("b", 20.0), ("b", 20.0), ("c", 30.0)):  # The second time, the row is already marked.
        assert run(store._look(BLOCKING, name)) == left
    assert sorted(ask(store, "SELECT name FROM dlock_lease WHERE wanted_until > 0")) == [("b",), ("c",)]


def test_tokens_of_several_names_are_told_apart_where_the_clock_is_coarse(store: TableBackend, at: At) -> None:
    at(0)
    tokens = [granted(store, asked(name)) for name in "abc"]
    assert tokens == [START, *([START + 1, START + 2] if store.pool.connector.vendor == "sqlite" else [START, START])]


def test_token_that_no_clock_shows_within_ten_years_counts_for_nothing(store: TableBackend, at: At) -> None:
    at(0)
    for token, following in ((START + TEN_YEARS - 1, START + TEN_YEARS), (START + TEN_YEARS, START)):
        request = asked()
        run(store.release(BLOCKING, request, Granted(granted(store, request), 1.0)))
        ask(store, f"UPDATE dlock_lease SET token = {token}")
        later = asked()
        assert granted(store, later) == following
        run(store.release(BLOCKING, later, Granted(following, 1.0)))
