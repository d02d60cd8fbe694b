"""Reads the histories and the databases, trusts neither locks nor workers, and lists every violation.

Each rule is a function from the facts to its violations. `probes` checks the promises about times after a storm.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.random_faults.history import Record
from tests.random_faults.items import STORES, Item
from tests.random_faults.store_faults import FORGETS

MISTAKES: Final = ("AlreadyHeld", "NotHeld", "SnapshotTooOld", "NotSupported")
"""Errors of dlock that no fault explains, but only a mistake in the worker or in dlock."""
WAIT_OVER_S: Final = 15.0
"""How far an acquire may exceed its `wait`: the database used first may be silent, and is given up after 12 s."""
STOP_SEEN_S: Final = 1.0
"""How late the runner may notice that a process has been stopped."""
MAX_FILES: Final = 150
"""The most files that an idle worker with ten stores and three databases may have open."""
ENOUGH_SECTIONS: Final = 60
"""The number of sections from which on it is judged whether a kind of worker gets anything done."""
MIN_DONE_SHARE: Final = 0.1
"""The least share of a worker kind's sections on one database: in the worst storms it is a quarter and more."""


@dataclass(frozen=True)
class Violation:
    """Something that dlock promises never to happen."""

    rule: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.text}"


@dataclass(frozen=True)
class Change:
    """A row of the journal: one committed change of an item."""

    item: str
    value: int
    seen: int
    section: str
    token: int
    shared: bool
    fence: int = 0
    """The token in the row after the change, if it carries its own fence."""


@dataclass(frozen=True)
class Event:
    """A committed event: an order was shipped or cancelled."""

    item: str
    number: int
    what: str
    section: str


@dataclass
class Facts:
    """Everything that a run has left: the records of the workers, and the contents of the databases."""

    records: list[Record]
    items: dict[str, Item]
    values: dict[str, int] = field(default_factory=dict)
    """Each item's value in its database."""
    changes: list[Change] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """The section of each write into a second database."""

    def of(self, *events: str) -> Iterator[Record]:
        return (record for record in self.records if record.event in events)


def no_update_is_lost(facts: Facts) -> Iterator[Violation]:
    """The changes of an item are numbered without a gap, and no two of them began from the same value."""
    by_item = _by_item(facts.changes)
    for key, value in facts.values.items():
        changes = by_item.get(key, [])
        numbers = Counter(change.value for change in changes)
        for number, times in numbers.items():
            if times > 1:
                both = ", ".join(change.section for change in changes if change.value == number)
                yield Violation("lost update", key, f"{both} all wrote {number}")
        if not any(times > 1 for times in numbers.values()) and len(changes) != value:
            yield Violation("lost update", key, f"it is at {value} after {len(changes)} changes")
        for change in changes:
            if change.seen != change.value - 1:
                yield Violation("lost update", key, f"{change.section} saw {change.seen} and wrote {change.value}")


def outcomes_are_true(facts: Facts) -> Iterator[Violation]:
    """What was reported as done is in the database, once for each item; what was reported as refused is not."""
    written = Counter((change.section, change.item) for change in facts.changes)
    for (section, key), times in written.items():
        if times > 1:
            yield Violation("done twice", section, f"it changed {key} {times} times")
    for section, times in Counter(facts.notes).items():
        if times > 1:
            yield Violation("done twice", section, f"it wrote {times} times into a second database")
    begun = {record.section: record.values for record in facts.of("begin")}
    for record in facts.of("end"):
        values = begun[record.section]
        if values["kind"].startswith("core"):
            continue
        there = [key for key in values["items"] if written[record.section, key]]
        if record.values["outcome"] == "ok" and len(there) < len(values["items"]):
            yield Violation("lost commit", record.section, f"it was told that {values['items']} are done: {there} are")
        if record.values["outcome"] == "refused" and there:
            error = f"{record.values['error']}: {record.values['detail']}"
            yield Violation("committed though refused", record.section, f"{there}; it was told {error}")
        if record.values["outcome"] == "unknown" and 0 < len(there) < len(values["items"]):
            yield Violation("half a transaction", record.section, f"of {values['items']} only {there} are there")


def no_order_has_two_ends(facts: Facts) -> Iterator[Violation]:
    """An order is shipped or cancelled, once."""
    ends = defaultdict(list)
    for event in facts.events:
        ends[event.item, event.number].append(event)
    for (key, number), events in ends.items():
        if len(events) > 1:
            told = " and ".join(f"{event.what} by {event.section}" for event in events)
            yield Violation("order with two ends", f"{key} order {number}", told)


def commits_are_in_the_order_of_tokens(facts: Facts) -> Iterator[Violation]:
    """No exclusive section commits after one with a greater token, and no shared one after a newer exclusive one."""
    for key, changes in _by_item(facts.changes).items():
        last: Change | None = None
        for change in sorted(changes, key=lambda change: change.value):
            if last is not None and change.token <= last.token and change.section != last.section:
                text = f"{change.section} with token {change.token} committed after {last.section} with {last.token}"
                yield Violation("committed out of token order", key, text)
            if not change.shared:
                last = change


def rows_remember_their_newest_holder(facts: Facts) -> Iterator[Violation]:
    """A row that carries its own fence has, after each change, at least the token under which it was changed."""
    unfenced = {record.section for record in facts.of("begin") if not record.values["options"].get("fence")}
    for change in facts.changes:
        is_behind = facts.items[change.item].is_fenced and change.fence < change.token
        if is_behind and change.section not in unfenced:
            text = f"{change.section} with token {change.token} left it with {change.fence}"
            yield Violation("fence that went back", change.item, text)


def tokens_grow(facts: Facts) -> Iterator[Violation]:
    """A lease that was requested after another was granted has a greater token."""
    exempt = stores_without_order(facts)
    granted: dict[str, int] = defaultdict(int)
    asked: dict[str, dict[str, int]] = {}
    for record in facts.of("begin", "granted"):
        if record.event == "begin":
            asked[record.section] = {key: granted[key] for key in record.values["items"]}
            continue
        for key, token in record.values["tokens"].items():
            if facts.items[key].store not in exempt and token <= asked[record.section][key]:
                text = f"{record.section} got token {token}, after {asked[record.section][key]} had been granted"
                yield Violation("token does not grow", key, text)
            granted[key] = max(granted[key], token)


def stores_without_order(facts: Facts) -> set[str]:
    """Return the stores that lost data and had a clock stepped: as documented, tokens may then become smaller."""
    return {store for store, kinds in _faults_of(facts).items() if "clock" in kinds and kinds & set(FORGETS)}


def stores_that_may_forget(facts: Facts) -> set[str]:
    """Return the stores that may lose a grant early: then a lock may have two holders, and the fence decides."""
    forgot = {store for store, kinds in _faults_of(facts).items() if kinds & {"clock", *FORGETS}}
    return forgot | {store for store, traits in STORES.items() if traits.ends_with_connection}


def _faults_of(facts: Facts) -> dict[str, set[str]]:
    happened: dict[str, set[str]] = defaultdict(set)
    for record in facts.of("fault"):
        happened[record.values["target"].rstrip("012")].add(record.values["kind"])
    return happened


def leases_do_not_overlap(facts: Facts) -> Iterator[Violation]:
    """Where a store forgets nothing, no two leases of a lock are certainly valid at once, unless both are shared."""
    granted = {record.section: record for record in facts.of("granted")}
    forgetful = stores_that_may_forget(facts)
    held: dict[str, list[tuple[float, float, str, bool]]] = defaultdict(list)
    for record in facts.of("end"):
        if (grant := granted.get(record.section)) is None or not record.values["sure"]:
            continue
        for key in grant.values["tokens"]:
            if facts.items[key].store not in forgetful and record.values["sure"] > grant.at:
                held[key].append((grant.at, record.values["sure"], record.section, record.values["shared"]))
    for key, spans in held.items():
        for (_, end, one, one_shares), (begin, _, other, other_shares) in _overlaps(sorted(spans)):
            if not (one_shares and other_shares):
                text = f"{one} surely held it until {end:.3f}, {other} had been granted it at {begin:.3f}"
                yield Violation("two holders", key, text)


def _overlaps(spans: list[Any]) -> Iterator[tuple[Any, Any]]:
    for place, one in enumerate(spans):
        for other in spans[place + 1 :]:
            if other[0] >= one[1]:
                break
            yield one, other


def errors_are_explained(facts: Facts) -> Iterator[Violation]:
    """Workers get only errors of dlock, drivers and the network, and none of MISTAKES."""
    begun = {record.section: record.values for record in facts.of("begin")}
    disturbed = {record.pid for record in facts.of("interrupt", "cancel")}
    for record in facts.of("end"):
        error, detail = record.values["error"], record.values["detail"]
        if record.values["strange"]:
            yield Violation("unexpected error", record.section, f"{error}: {detail}\n{record.values['strange']}")
        elif error == "SnapshotTooOld" and _asked_after_reading(begun[record.section], record.values["is_granted"]):
            pass  # its database keeps snapshots
        elif error in MISTAKES and not (error == "AlreadyHeld" and record.pid in disturbed):
            act = begun[record.section].get("act")
            yield Violation("unexpected error", record.section, f"{error}, in {act}: {detail}")
    for record in facts.of("died"):
        yield Violation("worker died", record.values["worker"], f"with exit code {record.values['code']}")
    for record in facts.of("fork"):
        if record.values["status"]:
            yield Violation(
                "fork", record.section, f"a child that tried to release ended with {record.values['status']}"
            )


def _asked_after_reading(begun: dict[str, Any], is_granted: bool) -> bool:
    """Return whether a section requested its lock inside a transaction: by its manner, or after losing its lease."""
    return begun.get("manner") == "inside" or (is_granted and begun.get("act") == "add_within")


def nobody_waits_beyond_the_bound(facts: Facts) -> Iterator[Violation]:
    """An acquire ends within its `wait` plus what databases and stores may need, whatever fails meanwhile."""
    begun = {record.section: record.values for record in facts.of("begin")}
    ended = {record.section: record.values for record in facts.of("end")}
    for section, seconds in times_over_wait(facts):
        if seconds > WAIT_OVER_S:
            text = f"asking for the lock took {seconds:.1f} s longer than its wait"
            yield Violation("stuck", section, f"{text}: {begun[section]}, and then {ended.get(section)}")


def times_over_wait(facts: Facts) -> Iterator[tuple[str, float]]:
    """Yield by how much each acquire exceeded its `wait`, unless its process was stopped in between."""
    stops = defaultdict(list)
    for record in facts.of("stop"):
        stops[record.values["stopped"]].append(record.at)
    begun = {record.section: record for record in facts.of("begin")}
    asked = {record.section: record.at for record in facts.of("end") if not record.values["is_granted"]}
    asked |= {record.section: record.at for record in facts.of("granted")}
    for section, at in asked.items():
        begin = begun[section]
        if not any(begin.at - STOP_SEEN_S < stop < at + STOP_SEEN_S for stop in stops[begin.pid]):
            yield section, at - begin.at - begin.values["options"]["wait"]


def every_kind_of_worker_gets_work_done(facts: Facts) -> Iterator[Violation]:
    """Each kind of worker has done some of its sections on each database: if all failed, nothing would be tested."""
    where = {
        record.section: (record.values["kind"], facts.items[record.values["items"][0]].database)
        for record in facts.of("begin")
    }
    ended = Counter(where[record.section] for record in facts.of("end"))
    done = Counter(where[record.section] for record in facts.of("end") if record.values["outcome"] == "ok")
    for (kind, database), times in ended.items():
        if times >= ENOUGH_SECTIONS and done[kind, database] < MIN_DONE_SHARE * times:
            yield Violation("nothing done", kind, f"of {times} sections on {database} only {done[kind, database]} were")


def descriptors_are_closed(facts: Facts) -> Iterator[Violation]:
    """An idle worker has few files and sockets open, whatever has happened to it."""
    for record in facts.of("idle"):
        if record.values["files"] > MAX_FILES:
            text = f"{record.values['files']} files and {record.values['threads']} threads when idle"
            yield Violation("left behind", f"process {record.pid}", text)


RULES: Final[tuple[Callable[[Facts], Iterator[Violation]], ...]] = (
    no_update_is_lost, outcomes_are_true, no_order_has_two_ends, commits_are_in_the_order_of_tokens, tokens_grow,
    rows_remember_their_newest_holder,
    leases_do_not_overlap, errors_are_explained, nobody_waits_beyond_the_bound,
    every_kind_of_worker_gets_work_done, descriptors_are_closed,
)  # fmt: skip


def check(facts: Facts) -> list[Violation]:
    """Return every violation of every rule."""
    facts.records.sort(key=lambda record: record.at)
    return [violation for rule in RULES for violation in rule(facts)]


def _by_item(changes: list[Change]) -> dict[str, list[Change]]:
    by_item: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_item[change.item].append(change)
    return by_item
