"""Who waits for whom, over leases, row locks and advisory locks together; pure.

No store or database sees a deadlock that goes through two of them: each knows its own waits only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlock_core.inspect.entries import Entry

    Graph: TypeAlias = "dict[str, dict[str, Wait]]"

__all__ = ["Cycle", "Wait", "cycles", "related_to_leases", "waits"]


@dataclass(frozen=True, slots=True)
class Wait:
    """One who waits, and what stands in its way: a holder, or a waiter before it in the queue."""

    waiter: Entry
    blocker: Entry


@dataclass(frozen=True, slots=True)
class Cycle:
    """Parties of whom each waits for the next, and the last for the first: none goes on before one of them ends."""

    waits: tuple[Wait, ...]

    def steps(self) -> list[str]:
        """Tell the cycle in printable lines, one for each actor."""
        return [
            f"{_who(before.blocker, wait.waiter)} {_has(before.blocker)} and waits for {_label(wait.waiter)}"
            for before, wait in self._turns()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Give the cycle as JSON takes it."""
        steps = [
            {
                "actor": wait.waiter.actor,
                "described": _who(before.blocker, wait.waiter),
                "has": _resource(before.blocker),
                "waits_for": _resource(wait.waiter),
            }
            for before, wait in self._turns()
        ]
        return {"steps": steps, "text": self.steps()}

    def _turns(self) -> Iterator[tuple[Wait, Wait]]:
        """The wait that each actor stands in the way of, and its own."""
        return zip((self.waits[-1], *self.waits[:-1]), self.waits, strict=True)


def waits(entries: Iterable[Entry]) -> list[Wait]:
    """Find what stands in the way of each waiter: the holders that exclude it, and the last before it in its queue.

    Who is further ahead stands in the way of those, and so in its way, too.
    """
    return [wait for queue in _queues(entries) for wait in _waits(*queue)]


def cycles(entries: Iterable[Entry]) -> list[Cycle]:
    """Find deadlocks: every actor that is in one is named in at least one, by a shortest way round."""
    graph: Graph = defaultdict(dict)
    for wait in waits(entries):
        graph[wait.waiter.actor].setdefault(wait.blocker.actor, wait)
    found: list[Cycle] = []
    named: set[str] = set()
    for actor in sorted(_knotted(graph)):
        if actor not in named and (cycle := _shortest(graph, actor)):
            found.append(cycle)
            named.update(wait.waiter.actor for wait in cycle.waits)
    return found


def related_to_leases(entries: list[Entry]) -> list[Entry]:
    """Keep the leases, and of the other entries those of their actors and of all for whom these wait."""
    actors = {entry.actor for entry in entries if entry.kind == "lease"}
    behind: dict[str, set[str]] = defaultdict(set)
    for wait in waits(entries):
        behind[wait.waiter.actor].add(wait.blocker.actor)
    todo = list(actors)
    while todo:
        todo += (new := behind[todo.pop()] - actors)
        actors |= new
    return [entry for entry in entries if entry.kind == "lease" or entry.actor in actors]


def _queues(entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], list[Entry]]]:
    """Give the holders of each lock that is waited for, and its waiters in order."""
    locks: dict[tuple[str, ...], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for entry in entries:
        locks[entry.source, entry.kind, entry.name][entry.role == "waiter"].append(entry)
    for holders, waiters in locks.values():
        if waiters:
            yield holders, sorted(waiters, key=lambda waiter: waiter.position or 0)


def _waits(holders: list[Entry], waiters: list[Entry]) -> Iterator[Wait]:
    if any(waiter.blocked_by is not None for waiter in waiters):
        yield from _told(holders, waiters)
        return
    for position, waiter in enumerate(waiters):
        for other in (*holders, *_last_before(waiters[:position])):
            if _excludes(other, waiter):
                yield Wait(waiter, other)


def _told(holders: list[Entry], waiters: list[Entry]) -> Iterator[Wait]:
    """As a database tells it, whose locks have more modes than two; also the holders behind whom one is indirectly."""
    ways = _ways(waiters)
    for waiter in waiters:
        way, covered = ways[waiter.actor], set[str]()
        yield from (Wait(waiter, holder) for holder in holders if holder.actor in way)
        for other in reversed(waiters):
            if other is not waiter and other.actor in way and other.actor not in covered:
                yield Wait(waiter, other)
                covered |= ways[other.actor]


def _ways(waiters: Iterable[Entry]) -> dict[str, set[str]]:
    """Give everybody who has to go on before each waiter can, as far as the queue tells it."""
    ways: dict[str, set[str]] = {}
    for waiter in waiters:
        way = ways[waiter.actor] = set()
        for actor in reversed(waiter.blocked_by or ()):
            if actor not in way:
                way |= {actor} | ways.get(actor, set())
    return ways


def _last_before(ahead: list[Entry]) -> Iterator[Entry]:
    """Give the nearest exclusive waiter ahead, and the shared ones after it, who do not wait for each other."""
    for other in reversed(ahead):
        yield other
        if not _is_shared(other):
            return


def _excludes(one: Entry, other: Entry) -> bool:
    return not (_is_shared(one) and _is_shared(other))


def _is_shared(entry: Entry) -> bool:
    return entry.mode == "shared"


def _knotted(graph: Graph) -> set[str]:
    """Give the actors that may be on a cycle: who waits for nobody is on none, nor is who waits only for such."""
    waiting_for = {actor: set(others) for actor, others in graph.items()}
    behind: dict[str, list[str]] = defaultdict(list)
    for actor, others in graph.items():
        for other in others:
            behind[other].append(actor)
    free = [actor for actor in behind if actor not in waiting_for]
    while free:
        done = free.pop()
        for actor in behind[done]:
            waiting_for[actor].discard(done)
            if not waiting_for[actor]:
                del waiting_for[actor]
                free.append(actor)
    return set(waiting_for)


def _shortest(graph: Graph, actor: str) -> Cycle | None:
    """Find a shortest way from an actor back to itself."""
    reached: dict[str, Wait] = {}
    todo = deque([actor])
    while todo:
        here = todo.popleft()
        for other, wait in graph.get(here, {}).items():
            if other not in reached:
                reached[other] = wait
                todo.append(other)
        if actor in reached:
            return _way_back(reached, actor)
    return None


def _way_back(reached: dict[str, Wait], actor: str) -> Cycle:
    way = [reached[actor]]
    while way[-1].waiter.actor != actor:
        way.append(reached[way[-1].waiter.actor])
    return Cycle(tuple(reversed(way)))


def _who(*entries: Entry) -> str:
    """Describe an actor; a lease says it without the database session."""
    return min((entry.described for entry in entries), key=len)


def _has(entry: Entry) -> str:
    return f"{'holds' if entry.role == 'holder' else 'is queued before it for'} {_label(entry)}"


def _label(entry: Entry) -> str:
    return printable(f"{entry.kind} {entry.name}")


def _resource(entry: Entry) -> dict[str, str]:
    return {"kind": entry.kind, "source": entry.source, "name": entry.name, "role": entry.role}
