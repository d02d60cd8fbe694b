"""What the inspector finds, holders and waiters of leases, row locks and advisory locks, and the graph of their waits.

No store or database sees a deadlock that spans two of them, because each knows only its own waits. No I/O here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Graph: TypeAlias = "dict[str, dict[str, Wait]]"
    """For each actor the actors that it waits for, with one wait for each."""

__all__ = ["Cycle", "Entry", "Unreadable", "Wait", "cycles", "related_to_leases", "waits"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A holder or a waiter of one lease, row lock or advisory lock; times in seconds, None if unknown.

    Names and owners are texts that other programs wrote: only `described` is certain to be one printable line.
    """

    kind: Literal["lease", "row", "advisory"]
    source: str
    """The alias of the store or database in which it was found."""
    name: str
    """The lock, the table and key of a row, or the key of an advisory lock."""
    role: Literal["holder", "waiter"]
    mode: str
    """"exclusive" or "shared"; for a row lock the database's own words where they say more."""
    owner: dict[str, Any]
    """What the actor says about itself.

    Of a lease: app, host, pid, thread or task, request. Of a database session: pid, state, query.
    """
    described: str
    """The owner in words, as one printable line."""
    token: int | None
    seconds: float | None
    """How long the lock has been held, or waited for."""
    expires_in: float | None
    position: int | None
    """Position in the queue, 1 for the first waiter; None for a holder."""
    actor: str
    """The thread, task or database session behind this entry; all its entries have the same text."""
    blocked_by: tuple[str, ...] | None = None
    """The actors that block a waiter, where a database reports them; None where `mode` and `position` show it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry as JSON data, with times rounded to milliseconds."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A store or database that could not be read; the reason is one line without a password."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A waiter, and the entry that blocks it: a holder, or an earlier waiter in the same queue."""

    waiter: Entry
    blocker: Entry


@dataclass(frozen=True, slots=True)
class Cycle:
    """A deadlock: each actor waits for the next and the last for the first, so none proceeds until one of them ends."""

    waits: tuple[Wait, ...]

    def steps(self) -> list[str]:
        """Return the deadlock in printable lines, one for each actor."""
        return [
            f"{_description(before.blocker, wait.waiter)} {_possession(before.blocker)} "
            f"and waits for {_label(wait.waiter)}"
            for before, wait in self._links()
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the deadlock as JSON data."""
        steps = [
            {
                "actor": wait.waiter.actor,
                "described": _description(before.blocker, wait.waiter),
                "has": _resource(before.blocker),
                "waits_for": _resource(wait.waiter),
            }
            for before, wait in self._links()
        ]
        return {"steps": steps, "text": self.steps()}

    def _links(self) -> Iterator[tuple[Wait, Wait]]:
        """Return for each actor the wait that it blocks, and the wait in which it is blocked."""
        return zip((self.waits[-1], *self.waits[:-1]), self.waits, strict=True)


def waits(entries: Iterable[Entry]) -> list[Wait]:
    """Return what blocks each waiter: the holders that exclude it, and the last waiters before it in its queue.

    Waiters further ahead are left out: they block those last waiters, and so they block this one indirectly.
    """
    return [wait for queue in _queues(entries) for wait in _waits_in_queue(*queue)]


def cycles(entries: Iterable[Entry]) -> list[Cycle]:
    """Return the deadlocks; every actor in one is part of at least one of the cycles, each of them a shortest one."""
    graph: Graph = defaultdict(dict)
    for wait in waits(entries):
        graph[wait.waiter.actor].setdefault(wait.blocker.actor, wait)
    found: list[Cycle] = []
    covered: set[str] = set()
    for actor in sorted(_candidates(graph)):
        if actor not in covered and (cycle := _shortest_cycle(graph, actor)):
            found.append(cycle)
            covered.update(wait.waiter.actor for wait in cycle.waits)
    return found


def related_to_leases(entries: list[Entry]) -> list[Entry]:
    """Return the leases, and the other entries of their actors and of all actors for which these wait."""
    actors = {entry.actor for entry in entries if entry.kind == "lease"}
    blockers: dict[str, set[str]] = defaultdict(set)
    for wait in waits(entries):
        blockers[wait.waiter.actor].add(wait.blocker.actor)
    todo = list(actors)
    while todo:
        todo += (new := blockers[todo.pop()] - actors)
        actors |= new
    return [entry for entry in entries if entry.kind == "lease" or entry.actor in actors]


def _queues(entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], list[Entry]]]:
    """Yield the holders and the waiters, in order, of each lock that has waiters."""
    locks: dict[tuple[str, ...], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for entry in entries:
        locks[entry.source, entry.kind, entry.name][entry.role == "waiter"].append(entry)
    for holders, waiters in locks.values():
        if waiters:
            yield holders, sorted(waiters, key=lambda waiter: waiter.position or 0)


def _waits_in_queue(holders: list[Entry], waiters: list[Entry]) -> Iterator[Wait]:
    if any(waiter.blocked_by is not None for waiter in waiters):
        yield from _reported_waits(holders, waiters)
        return
    for index, waiter in enumerate(waiters):
        for other in (*holders, *_last_before(waiters[:index])):
            if _excludes(other, waiter):
                yield Wait(waiter, other)


def _reported_waits(holders: list[Entry], waiters: list[Entry]) -> Iterator[Wait]:
    """Yield the waits that a database reports, whose locks have more than two modes.

    A waiter gets every holder that blocks it, even indirectly, because the database may name only the waiter ahead. Of
    the waiters ahead it gets only those that no other of them already stands for, so that a long queue yields a chain.
    """
    blockers = _all_blockers(waiters)
    for waiter in waiters:
        mine, covered = blockers[waiter.actor], set[str]()
        yield from (Wait(waiter, holder) for holder in holders if holder.actor in mine)
        for other in reversed(waiters):
            if other is not waiter and other.actor in mine and other.actor not in covered:
                yield Wait(waiter, other)
                covered |= blockers[other.actor]


def _all_blockers(waiters: Iterable[Entry]) -> dict[str, set[str]]:
    """Return for each waiter all actors that block it, directly or through an earlier waiter of the queue."""
    found: dict[str, set[str]] = {}
    for waiter in waiters:
        mine = found[waiter.actor] = set()
        for actor in reversed(waiter.blocked_by or ()):
            if actor not in mine:
                mine |= {actor} | found.get(actor, set())
    return found


def _last_before(ahead: list[Entry]) -> Iterator[Entry]:
    """Yield the nearest exclusive waiter ahead, and the shared ones after it, which do not wait for each other."""
    for other in reversed(ahead):
        yield other
        if not _is_shared(other):
            return


def _excludes(one: Entry, other: Entry) -> bool:
    return not (_is_shared(one) and _is_shared(other))


def _is_shared(entry: Entry) -> bool:
    return entry.mode == "shared"


def _candidates(graph: Graph) -> set[str]:
    """Return the actors that may be on a cycle.

    An actor that waits for nothing is on none, and neither is an actor that waits only for such actors: these are
    removed until none is left (Kahn's topological sort). So the search for cycles touches only what is deadlocked, or
    waits for a deadlock, and a listing without one stays linear.
    """
    waiting_for = {actor: set(others) for actor, others in graph.items()}
    waiters_of: dict[str, list[str]] = defaultdict(list)
    for actor, others in graph.items():
        for other in others:
            waiters_of[other].append(actor)
    free = [actor for actor in waiters_of if actor not in waiting_for]
    while free:
        done = free.pop()
        for actor in waiters_of[done]:
            waiting_for[actor].discard(done)
            if not waiting_for[actor]:
                del waiting_for[actor]
                free.append(actor)
    return set(waiting_for)


def _shortest_cycle(graph: Graph, actor: str) -> Cycle | None:
    """Return a shortest cycle through an actor, by breadth-first search, or None."""
    reached: dict[str, Wait] = {}
    todo = deque([actor])
    while todo:
        current = todo.popleft()
        for other, wait in graph.get(current, {}).items():
            if other not in reached:
                reached[other] = wait
                todo.append(other)
        if actor in reached:
            return _path_back(reached, actor)
    return None


def _path_back(reached: dict[str, Wait], actor: str) -> Cycle:
    path = [reached[actor]]
    while path[-1].waiter.actor != actor:
        path.append(reached[path[-1].waiter.actor])
    return Cycle(tuple(reversed(path)))


def _description(*entries: Entry) -> str:
    """Return the shortest description of an actor: a lease's, which does not repeat the database session."""
    return min((entry.described for entry in entries), key=len)


def _possession(entry: Entry) -> str:
    return f"{'holds' if entry.role == 'holder' else 'is queued before it for'} {_label(entry)}"


def _label(entry: Entry) -> str:
    return printable(f"{entry.kind} {entry.name}")


def _resource(entry: Entry) -> dict[str, str]:
    return {"kind": entry.kind, "source": entry.source, "name": entry.name, "role": entry.role}
