"""The wait-for graph shows who waits for whom over all kinds of locks, and every deadlock."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlock_core.inspect import Entry, cycles, waits
from dlock_core.inspect.correlate import correlate
from dlock_core.inspect.graph import related_to_leases
from dlock_core.inspect.sessions import DatabaseSession
from tests.inspect.people import holds
from tests.inspect.people import waits as waiting

PARTIES = "abcde"
MODES = st.sampled_from(["exclusive", "shared"])


@st.composite
def pictures(draw: st.DrawFn) -> list[Entry]:
    """Draw a few locks, each with its holders and its queue, as stores and databases may show them together."""
    found = []
    for name in ("x", "y", "z"):
        people = draw(st.permutations(PARTIES))
        held, queued = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        mode = "exclusive" if held == 1 and draw(st.booleans()) else "shared"
        found += [holds(one, name, mode=mode) for one in people[:held]]
        queue = people[held : held + queued]
        found += [waiting(one, name, place, mode=draw(MODES)) for place, one in enumerate(queue, 1)]
    return found


def in_the_way(entries: list[Entry]) -> set[tuple[str, str]]:
    """Return who waits for whom by definition: a waiter for every holder, and waiter ahead, that excludes it."""
    return {
        (one.actor, other.actor)
        for one, other in itertools.product(entries, entries)
        if one.role == "waiter"
        and (one.source, one.kind, one.name) == (other.source, other.kind, other.name)
        and (other.role == "holder" or other.position < one.position)
        and "exclusive" in (one.mode, other.mode)
    }


def deadlocked(edges: set[tuple[str, str]]) -> set[str]:
    """Return who is on a cycle, by trying all cycles."""
    return {
        one
        for length in range(1, len(PARTIES) + 1)
        for way in itertools.permutations(PARTIES, length)
        for one in way
        if all(edge in edges for edge in itertools.pairwise((*way, way[0])))
    }


@given(pictures())
def test_every_party_of_a_deadlock_is_named_and_nobody_else(entries: list[Entry]) -> None:
    edges = in_the_way(entries)
    found = cycles(entries)
    assert {wait.waiter.actor for cycle in found for wait in cycle.waits} == deadlocked(edges)
    for cycle in found:
        way = [wait.waiter.actor for wait in cycle.waits]
        assert len(way) == len(set(way))
        assert [wait.blocker.actor for wait in cycle.waits] == [*way[1:], way[0]]
        assert all(edge in edges for edge in itertools.pairwise((*way, way[0])))


@given(pictures())
def test_waits_lead_to_all_who_stand_in_the_way(entries: list[Entry]) -> None:
    found = {(wait.waiter.actor, wait.blocker.actor) for wait in waits(entries)}
    assert found <= in_the_way(entries)
    assert reach(found) == reach(in_the_way(entries))


def reach(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    while more := {(a, d) for (a, b), (c, d) in itertools.product(edges, edges) if b == c} - edges:
        edges = edges | more
    return edges


def test_cycle_is_told_in_words() -> None:
    entries = [
        holds("POST /orders/1/ship (shop)", "order:1"),
        waiting("POST /orders/1/ship (shop)", "shop_order 7", 1, kind="row", source="db"),
        holds("psql pid 4711, idle in transaction", "shop_order 7", kind="row", source="db"),
        waiting("psql pid 4711, idle in transaction", "order:1", 1),
    ]
    (cycle,) = cycles(entries)
    assert cycle.steps() == [
        "POST /orders/1/ship (shop) holds lease order:1 and waits for row shop_order 7",
        "psql pid 4711, idle in transaction holds row shop_order 7 and waits for lease order:1",
    ]
    step = cycle.as_dict()["steps"][0]
    assert step["has"] == {"kind": "lease", "source": "default", "name": "order:1", "role": "holder"}
    assert step["waits_for"] == {"kind": "row", "source": "db", "name": "shop_order 7", "role": "waiter"}
    assert cycle.as_dict()["text"] == cycle.steps()


def test_place_in_a_queue_can_be_what_others_wait_for() -> None:
    entries = [
        holds("reader", "x", mode="shared"), waiting("writer", "x", 1), waiting("late", "x", 2, mode="shared"),
        holds("late", "y"), waiting("writer", "y", 1),
    ]  # fmt: skip
    (cycle,) = cycles(entries)
    assert any("writer is queued before it for lease x" in step for step in cycle.steps())


def test_who_waits_for_what_it_holds_itself_is_a_deadlock() -> None:
    (cycle,) = cycles([holds("a", "x"), waiting("a", "x", 1)])
    assert cycle.steps() == ["a holds lease x and waits for lease x"]


@pytest.mark.parametrize("other", [{"source": "elsewhere"}, {"kind": "row"}])
def test_same_name_in_another_store_or_of_another_kind_is_another_lock(other: dict[str, str]) -> None:
    entries = [holds("a", "x"), waiting("b", "x", 1), holds("b", "y"), waiting("a", "y", 1, **other)]
    assert cycles(entries) == []


def test_names_with_control_characters_are_told_in_printable_words() -> None:
    name = "a\x1b[2J\nb\u202e"
    (cycle,) = cycles([holds("a", name), waiting("b", name, 1), holds("b", "y"), waiting("a", "y", 1)])
    assert all(step.isprintable() for step in cycle.steps())
    assert cycle.waits[1].waiter.name == name, "the name itself stays data"


def test_long_queue_costs_no_more_than_its_length() -> None:
    entries = [holds("0", "x"), *(waiting(str(place), "x", place) for place in range(1, 5001))]
    assert len(waits(entries)) < 3 * 5000
    assert cycles(entries) == []


def test_picture_of_one_lock_keeps_those_for_whom_its_parties_wait() -> None:
    lease, row = holds("a", "order:1"), waiting("a", "r 1", 1, kind="row")
    theirs = [holds("b", "r 1", kind="row"), waiting("b", "r 2", 1, kind="row"), holds("c", "r 2", kind="row")]
    nobody = [holds("d", "r 3", kind="row"), waiting("e", "r 3", 1, kind="row")]
    assert related_to_leases([lease, row, *theirs, *nobody]) == [lease, row, *theirs]


def test_database_that_tells_who_is_in_the_way_is_believed() -> None:
    """A table's locks have more modes than shared and exclusive: a reader does not block writers."""
    told = {"kind": "row", "source": "db"}
    entries = [
        holds("writer", "t", **told, mode="RowExclusiveLock"),
        holds("reader", "t", **told, mode="AccessShareLock"),
        waiting("index", "t", 1, **told, mode="ShareLock", blocked_by=("writer",)),
        waiting("alter", "t", 2, **told, mode="AccessExclusiveLock", blocked_by=("writer", "reader", "index")),
        holds("index", "order:1"),
        waiting("reader", "order:1", 1),
    ]
    found = [(wait.waiter.actor, wait.blocker.actor) for wait in waits(entries)]
    assert found == [
        ("index", "writer"), ("alter", "writer"), ("alter", "reader"), ("alter", "index"), ("reader", "index"),
    ]  # fmt: skip
    assert not cycles(entries)


def test_deadlock_inside_a_database_that_does_not_look_for_them_is_named() -> None:
    told = {"kind": "row", "source": "db"}
    entries = [waiting("a", "t", 1, **told, blocked_by=("b",)), waiting("b", "t", 2, **told, blocked_by=("a",))]
    (cycle,) = cycles(entries)
    assert [wait.waiter.actor for wait in cycle.waits] == ["a", "b"]


def test_parties_in_the_way_are_called_as_they_call_themselves() -> None:
    lease = holds("web/1/1", "order:1", owner={"own": ["pg:7/shop"]})
    told = {"kind": "row", "source": "db", "token": None}
    rows = [holds("pg:7/shop", "t", **told), waiting("pg:8/shop", "t", 1, **told, blocked_by=("pg:7/shop",))]
    found = correlate([lease], rows, {actor: DatabaseSession(actor, actor, {}) for actor in ("pg:7/shop", "pg:8/shop")})
    assert [(wait.waiter.actor, wait.blocker.actor) for wait in waits(found)] == [("pg:8/shop", "web/1/1")]
