"""Finds the leases and the database sessions that belong to the same thread, task or request.

A session tells the holders, or the tokens, under whose leases its transaction works. A lease tells the sessions that
were open when it was asked for, those that are its thread's `own`, and those `in` whose transaction it was; that of an
advisory lock its `session`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dlock_core.inspect.entries import Entry
    from dlock_core.inspect.sessions import DatabaseSession

__all__ = ["correlate"]

SLACK: Final = 2.0
"""Stores tell times to the second."""


def correlate(leases: list[Entry], of_databases: list[Entry], sessions: Mapping[str, DatabaseSession]) -> list[Entry]:
    """Give all entries, those of a lease and of a database session that belong together with the same `actor`."""
    if not sessions:
        return leases + of_databases
    same = _Same()
    for lease, actor in _links(leases, sessions):
        same.join(lease, actor)
    if not same:
        return leases + of_databases
    found = [_renamed(entry, same) for entry in leases]
    described = {entry.actor: entry.described for entry in reversed(found)}
    rest = [_renamed(_explained(entry, same, described, sessions), same) for entry in of_databases]
    told = {(entry.name, entry.role, entry.actor) for entry in found}
    # A store that keeps its leases as advisory locks has told them already.
    return found + [entry for entry in rest if entry.kind == "row" or (entry.name, entry.role, entry.actor) not in told]


class _Same:
    """Which actors are the same; each set goes by the name of a lease's actor."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def of(self, actor: str) -> str:
        while actor in self._names:
            actor = self._names[actor]
        return actor

    def join(self, lease: str, other: str) -> None:
        name, other = self.of(lease), self.of(other)
        if name != other:
            self._names[other] = name


def _links(leases: Iterable[Entry], sessions: Mapping[str, DatabaseSession]) -> Iterator[tuple[str, str]]:
    by_mark: dict[str, str] = {}
    by_session: dict[str, list[tuple[Entry, bool]]] = defaultdict(list)
    for lease in leases:
        by_mark |= {str(lease.owner.get("holder")): lease.actor, str(lease.token): lease.actor}
        for key in ("own", "in"):
            names = lease.owner.get(key)
            for actor in names if isinstance(names, list) else ():
                by_session[str(actor)].append((lease, key == "own"))
        by_session[str(lease.owner.get("session"))].append((lease, True))
    for actor, session in sessions.items():
        workers = {by_mark[mark] for mark in session.marks & by_mark.keys()}
        for worker in workers:
            yield worker, actor
        for lease, is_own in (*by_session.get(actor, ()), *by_session.get(actor.partition("/")[0], ())):
            if is_own or (not workers and _is_still_in(lease, session)):
                yield lease.actor, actor


def _is_still_in(lease: Entry, session: DatabaseSession) -> bool:
    """Say whether the transaction in which the lease was asked for is the one that is open now.

    Else a pool may have given the session to somebody else.
    """
    age = session.transaction_age
    return age is not None and lease.seconds is not None and age + SLACK >= lease.seconds


def _renamed(entry: Entry, same: _Same) -> Entry:
    actor, behind = same.of(entry.actor), entry.blocked_by and tuple(map(same.of, entry.blocked_by))
    return (
        entry if (actor, behind) == (entry.actor, entry.blocked_by) else replace(entry, actor=actor, blocked_by=behind)
    )


def _explained(
    entry: Entry, same: _Same, described: Mapping[str, str], sessions: Mapping[str, DatabaseSession]
) -> Entry:
    """Describe a session as the lease's owner describes itself."""
    actor = same.of(entry.actor)
    if actor not in described:
        return entry
    session = sessions[entry.actor]
    state = f" {session.owner['state']}" if session.owner.get("state") else ""
    words = printable(f"{described[actor]}, session {session.owner.get('pid', '')}{state}")
    return replace(entry, described=words)
