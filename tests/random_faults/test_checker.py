"""The checker finds each kind of violation in a made-up history, and none in a good one."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.random_faults.checker import Change, Event, Facts, check
from tests.random_faults.history import History, Record, Recorder
from tests.random_faults.items import every_item
from tests.random_faults.schedule import FAULTS_PER_S, STORM_S, plan
from tests.random_faults.worker import is_expected

KEY = "redis-0"
_moments: Iterator[int] = itertools.count(1)


def record(event: str, section: str = "", pid: int = 1, **values: Any) -> Record:
    return Record(float(next(_moments)), event, section, pid, values)


def section(
    name: str,
    token: int,
    *,
    outcome: str = "ok",
    key: str = KEY,
    kind: str = "django",
    error: str = "",
    shared: bool = False,
) -> list[Record]:
    begin = record("begin", name, kind=kind, items=[key], options={"wait": 100.0})
    granted = record("granted", name, tokens={key: token})
    sure = float(next(_moments))
    told = {"error": error, "detail": "", "strange": "", "shared": shared, "is_granted": True}
    return [begin, granted, record("end", name, outcome=outcome, sure=sure, **told)]


def change(
    name: str, value: int, token: int, *, seen: int | None = None, key: str = KEY, shared: bool = False
) -> Change:
    return Change(key, value, value - 1 if seen is None else seen, name, token, shared)


def facts(
    *sections: list[Record], changes: list[Change], value: int | None = None, events: list[Event] | None = None
) -> Facts:
    records = [each for one in sections for each in one]
    at = len(changes) if value is None else value
    return Facts(records, every_item(), {KEY: at}, changes, events or [])


def rules(found: Facts) -> set[str]:
    return {violation.rule for violation in check(found)}


def test_a_good_history_has_no_violation() -> None:
    first = [*section("a", 10), *section("b", 11), *section("c", 12, shared=True)]
    last = [*section("d", 13, outcome="unknown"), *section("e", 14, outcome="refused")]
    changes = [change("a", 1, 10), change("b", 2, 11), change("c", 3, 12, shared=True), change("d", 4, 13)]
    events = [Event(KEY, 0, "shipped", "a"), Event(KEY, 1, "cancelled", "b")]
    assert not check(facts(first, last, changes=changes, events=events))


def test_two_sections_that_began_from_one_value_are_a_lost_update() -> None:
    both = section("a", 10), section("b", 11)
    assert rules(facts(*both, changes=[change("a", 1, 10), change("b", 1, 11)], value=1)) == {"lost update"}


def test_a_change_that_was_overwritten_by_nobody_is_a_lost_update() -> None:
    assert rules(facts(section("a", 10), changes=[change("a", 1, 10)], value=2)) == {"lost update"}


def test_a_section_that_wrote_over_what_it_had_not_seen() -> None:
    both = section("a", 10), section("b", 11)
    assert "lost update" in rules(facts(*both, changes=[change("a", 1, 10), change("b", 2, 11, seen=0)]))


def test_work_that_was_done_twice() -> None:
    assert rules(facts(section("a", 10), changes=[change("a", 1, 10), change("a", 2, 10)])) == {"done twice"}


def test_a_commit_that_was_reported_and_is_not_there() -> None:
    assert rules(facts(section("a", 10), changes=[])) == {"lost commit"}


def test_a_commit_that_was_reported_as_refused() -> None:
    refused = section("a", 10, outcome="refused", error="LeaseLost")
    assert rules(facts(refused, changes=[change("a", 1, 10)])) == {"committed though refused"}


def test_an_unknown_outcome_is_no_violation_either_way() -> None:
    unknown = section("a", 10, outcome="unknown", error="OperationalError")
    assert not check(facts(unknown, changes=[change("a", 1, 10)]))
    assert not check(facts(unknown, changes=[]))


def test_an_order_that_was_shipped_and_cancelled() -> None:
    events = [Event(KEY, 0, "shipped", "a"), Event(KEY, 0, "cancelled", "b")]
    both = section("a", 10), section("b", 11)
    assert rules(facts(*both, changes=[change("a", 1, 10), change("b", 2, 11)], events=events)) == {
        "order with two ends"
    }


def test_a_commit_after_that_of_a_newer_holder() -> None:
    old, new = (
        record("begin", "a", kind="django", items=[KEY], options={"wait": 0}),
        record("begin", "b", kind="django", items=[KEY], options={"wait": 0}),
    )
    found = facts([old, new], changes=[change("b", 1, 11), change("a", 2, 10)])
    assert rules(found) == {"committed out of token order"}


def test_shared_holders_commit_in_any_order_among_themselves_but_not_after_a_newer_exclusive_one() -> None:
    begun = [record("begin", name, kind="sqla", items=[KEY], options={"wait": 0}) for name in "abc"]
    shared = [change("b", 1, 11, shared=True), change("a", 2, 10, shared=True)]
    assert not check(facts(begun, changes=shared))
    late = [change("c", 1, 12), change("a", 2, 10, shared=True)]
    assert rules(facts(begun, changes=late)) == {"committed out of token order"}


def test_a_row_whose_fence_went_back_unless_it_was_changed_without_a_fence() -> None:
    key = "redis-row"
    begun = record("begin", "a", kind="django", items=[key], options={"wait": 0, "fence": True})
    kept, lost = (dataclasses.replace(change("a", 1, 10, key=key), fence=fence) for fence in (10, 9))
    assert not check(facts([begun], changes=[kept], value=0))
    assert rules(facts([begun], changes=[lost], value=0)) == {"fence that went back"}
    begun.values["options"]["fence"] = False
    assert not check(facts([begun], changes=[lost], value=0))


def test_a_token_that_does_not_grow() -> None:
    both = section("a", 10), section("b", 10, outcome="refused")
    assert rules(facts(*both, changes=[change("a", 1, 10)])) == {"token does not grow"}


def test_tokens_of_a_store_that_lost_data_and_whose_clock_was_stepped_are_not_judged() -> None:
    faults = [record("fault", kind=kind, target="redis") for kind in ("flush", "clock")]
    both = section("a", 11), section("b", 10, outcome="refused")
    assert not check(facts(faults, *both, changes=[change("a", 1, 11)]))


@pytest.mark.parametrize(("key", "overlap_is_wrong"), [("etcd-0", True), ("redis-0", False)])
def test_leases_that_overlap_are_wrong_where_the_store_forgets_nothing(key: str, overlap_is_wrong: bool) -> None:
    forgets = [record("fault", kind="flush", target="redis")]
    first, second = section("a", 10, key=key, kind="core"), section("b", 11, key=key, kind="core")
    first[2].values["sure"] = second[2].at
    assert rules(facts(forgets, first, second, changes=[])) == ({"two holders"} if overlap_is_wrong else set())


def test_shared_leases_may_overlap() -> None:
    first, second = (
        section(name, token, key="etcd-0", kind="core", shared=True) for name, token in (("a", 10), ("b", 11))
    )
    first[2].values["sure"] = second[2].at
    assert not check(facts(first, second, changes=[]))


def test_errors_that_no_fault_explains() -> None:
    mistake = section("a", 10, outcome="refused", error="AlreadyHeld")
    assert rules(facts(mistake, changes=[])) == {"unexpected error"}
    assert not check(facts([record("interrupt")], mistake, changes=[]))
    assert rules(facts([record("died", worker="django-0.0", code=-11)], changes=[])) == {"worker died"}
    assert rules(facts([record("fork", "a", status=256)], changes=[])) == {"fork"}


def test_a_wrong_statement_is_unexpected_and_a_connection_out_of_step_is_not() -> None:
    wrong = type("ProgrammingError", (Exception,), {"__module__": "MySQLdb"})
    assert not is_expected(wrong(1064, "You have an error in your SQL syntax"))
    assert is_expected(wrong(2014, "Commands out of sync; you can't run this command now"))


@pytest.mark.parametrize(
    ("act", "manner", "is_explained"), [("add", "", False), ("add", "inside", True), ("add_within", "", True)]
)
def test_a_snapshot_is_too_old_only_for_a_section_that_asks_after_it_has_read(
    act: str, manner: str, is_explained: bool
) -> None:
    refused = section("a", 10, outcome="refused", error="SnapshotTooOld")
    refused[0].values.update(act=act, manner=manner)
    assert rules(facts(refused, changes=[])) == (set() if is_explained else {"unexpected error"})


def test_an_acquire_that_takes_longer_than_its_wait_unless_its_process_stood_still() -> None:
    stuck = section("a", 10, outcome="refused")
    late = [stuck[0], dataclasses.replace(stuck[1], at=stuck[0].at + 120), stuck[2]]
    assert rules(facts(late, changes=[])) == {"stuck"}
    stop = Record(stuck[0].at + 1, "stop", "", 1, {"stopped": 1})
    assert not check(facts([stop], late, changes=[]))


@pytest.mark.parametrize(("done", "is_wrong"), [(0, True), (5, True), (6, False)])
def test_a_kind_of_worker_that_gets_next_to_nothing_done(done: int, is_wrong: bool) -> None:
    key = "version-0"  # a row with a version: the checker judges no grants
    ended = [
        section(f"a{n}", n, key=key, outcome="ok" if n < done else "refused", error="DLockError") for n in range(60)
    ]
    changes = [change(f"a{n}", n + 1, n, key=key) for n in range(done)]
    found = Facts(
        [each for one in ended for each in one if each.event != "granted"], every_item(), {key: done}, changes
    )
    assert rules(found) == ({"nothing done"} if is_wrong else set())


def test_files_that_stay_open() -> None:
    assert rules(facts([record("idle", cycle=1, files=1000, threads=5)], changes=[])) == {"left behind"}
    assert not check(facts([record("idle", cycle=1, files=50, threads=5)], changes=[]))


def test_a_history_is_read_up_to_its_last_whole_line(tmp_path: Any) -> None:
    Recorder(tmp_path / "one.history").write("begin", "a", kind="core")
    with (tmp_path / "one.history").open("a") as file:
        file.write('{"at": 1.0, "ev')
    history = History(tmp_path)
    assert [each.event for each in history.more()] == ["begin"]
    assert history.more() == []


def test_a_seed_draws_the_same_faults_and_every_store_has_its_turn() -> None:
    stores = ["redis", "etcd", "redlock", "table"]
    assert plan(7, 2, stores, 8) == plan(7, 2, stores, 8) != plan(8, 2, stores, 8)
    storms = plan(7, 2, stores, 8)
    assert {store for storm in storms[:2] for store in storm.stores} == set(stores)
    assert all(len(storm.faults) > STORM_S * FAULTS_PER_S / 2 for storm in storms)
