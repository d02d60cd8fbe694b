"""A lease and a database session are linked only if it is certain that they belong together."""

import json
from dataclasses import replace

from dlock_core import owner
from dlock_core.inspect.correlate import correlate
from dlock_core.inspect.sessions import DatabaseSession
from dlock_core.sql.database import comment
from tests.inspect.people import holds, waits

SESSION = "pg:4711/shop"


def session(actor=SESSION, *, age=5.0, **owner):
    return DatabaseSession(actor, "psql pid 4711", {"pid": 4711, "state": "active", **owner}, age)


def lease(actor, holder, *, seconds=1.0, **owner):
    return holds(actor, "order:1", owner={"holder": holder, **owner}, described=f"GET / ({actor})", seconds=seconds)


def row(actor=SESSION):
    return waits(actor, "shop_order 7", 1, kind="row", described="psql pid 4711, active")


def actors(leases, sessions, rows=None):
    found = correlate(leases, [row()] if rows is None else rows, {one.actor: one for one in sessions})
    return [entry.actor for entry in found]


def test_session_that_names_a_holder_belongs_to_its_lease():
    one = lease("web1/1/1", "1a2b3c4d")
    (_, mine) = correlate([one], [row()], {SESSION: session(application_name="shop dlock:1a2b3c4d")})
    assert mine.actor == "web1/1/1"
    assert mine.described == "GET / (web1/1/1), session 4711 active"


def test_statement_that_names_a_holder_belongs_to_its_lease():
    query = comment("1a2b3c4d" + "0" * 24) + "SELECT 1"
    assert actors([lease("a", "1a2b3c4d")], [session(query=query)]) == ["a", "a"]


def test_sessions_that_are_a_threads_own_belong_to_it():
    assert actors([lease("a", "h", own=[SESSION])], [session(age=None)]) == ["a", "a"]


def test_session_of_a_pool_belongs_to_a_lease_while_that_transaction_is_open():
    assert actors([lease("a", "h", **{"in": [SESSION]}, seconds=4.0)], [session(age=5.0)]) == ["a", "a"]


def test_session_of_a_pool_that_began_another_transaction_belongs_to_nobody_we_know():
    assert actors([lease("a", "h", **{"in": [SESSION]}, seconds=60.0)], [session(age=5.0)]) == ["a", SESSION]
    assert actors([lease("a", "h", **{"in": [SESSION]})], [session(age=None)]) == ["a", SESSION]


def test_what_a_session_says_now_counts_more_than_what_a_lease_said_of_it():
    leases = [lease("a", "00000000", **{"in": [SESSION]}), lease("b", "1a2b3c4d")]
    assert actors(leases, [session(application_name="dlock:1a2b3c4d")]) == ["a", "b", "b"]


def test_task_and_the_thread_that_works_for_it_are_one_party():
    leases = [lease("task", "1a2b3c4d"), lease("thread", "h", own=[SESSION])]
    assert len(set(actors(leases, [session(application_name="dlock:1a2b3c4d")]))) == 1


def test_unknown_holders_and_sessions_change_nothing():
    assert actors([lease("a", "h")], [session(application_name="x dlock:ffffffff")]) == ["a", SESSION]
    assert actors([lease("a", "h", own=["my:1/other", 7, None], **{"in": 5})], [session()]) == ["a", SESSION]


def test_owner_text_tells_sessions_and_stays_short():
    text = owner.text(own=("pg:4711/shop",), inside=("my:38/dlock",))
    assert json.loads(text)["own"] == ["pg:4711/shop"]
    assert json.loads(text)["in"] == ["my:38/dlock"]
    assert len(text) - len(owner.text()) < 60


def test_session_that_names_a_token_belongs_to_its_lease():
    one = replace(lease("a", "h"), token=1795273023779603)
    assert actors([one], [session(application_name="shop dlock:1795273023779603#order:1")]) == ["a", "a"]


def test_session_that_works_under_several_leases_belongs_to_all():
    leases = [lease("task", "1a2b3c4d"), lease("thread", "5e6f7a8b")]
    assert len(set(actors(leases, [session(application_name="dlock:1a2b3c4d dlock:5e6f7a8b")]))) == 1
