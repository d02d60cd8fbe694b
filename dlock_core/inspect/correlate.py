"""Correlates leases with the database sessions that belong to the same thread, task or request.

A session names the leases under which its transaction works, by the beginning of their holders or by their tokens (see
`DatabaseSession.lease_marks`). A lease's owner names the sessions that were open when it was requested: its thread's
`own`, those `in` whose transaction it was requested, and for an advisory lock the `session` that holds it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dlock_core.inspect.graph import Entry
    from dlock_core.inspect.sessions import DatabaseSession

__all__ = ["correlate"]

CLOCK_RESOLUTION_S: Final = 2.0
"""Tolerance when ages are compared: some stores report times in whole seconds."""


def correlate(
    leases: list[Entry], database_entries: list[Entry], sessions: Mapping[str, DatabaseSession]
) -> list[Entry]:
    """Return all entries; those of a lease and of a database session that belong together get the same `actor`.

    Without this step a deadlock through a lease and a row lock would be two waits of unrelated actors. The sessions
    are keyed by their actors.
    """
    if not sessions:
        return leases + database_entries
    groups = _ActorGroups()
    for lease_actor, session_actor in _links(leases, sessions):
        groups.merge(lease_actor, session_actor)
    if not groups:
        return leases + database_entries
    found = [_with_group(entry, groups) for entry in leases]
    descriptions = {entry.actor: entry.described for entry in reversed(found)}
    others = [_with_group(_described(entry, groups, descriptions, sessions), groups) for entry in database_entries]
    # A store that keeps its leases as advisory locks has listed these already, and knows more about them.
    listed = {(entry.name, entry.role, entry.actor) for entry in found}
    return found + [
        entry for entry in others if entry.kind == "row" or (entry.name, entry.role, entry.actor) not in listed
    ]


class _ActorGroups:
    """A union-find over actors; each group is represented by the actor of a lease."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._parents)

    def find(self, actor: str) -> str:
        while actor in self._parents:
            actor = self._parents[actor]
        return actor

    def merge(self, lease_actor: str, other: str) -> None:
        root, other = self.find(lease_actor), self.find(other)
        if root != other:
            self._parents[other] = root


def _links(leases: Iterable[Entry], sessions: Mapping[str, DatabaseSession]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a lease's actor and a session's actor that are the same thread, task or request."""
    actor_by_mark: dict[str, str] = {}
    leases_by_session: dict[str, list[tuple[Entry, bool]]] = defaultdict(list)
    for lease in leases:
        actor_by_mark |= {str(lease.owner.get("holder")): lease.actor, str(lease.token): lease.actor}
        for key in ("own", "in"):
            names = lease.owner.get(key)
            for name in names if isinstance(names, list) else ():
                leases_by_session[str(name)].append((lease, key == "own"))
        leases_by_session[str(lease.owner.get("session"))].append((lease, True))
    for actor, session in sessions.items():
        marked = {actor_by_mark[mark] for mark in session.lease_marks & actor_by_mark.keys()}
        for lease_actor in marked:
            yield lease_actor, actor
        for lease, is_own in (*leases_by_session.get(actor, ()), *leases_by_session.get(actor.partition("/")[0], ())):
            # A lease that was requested inside a session's transaction says less than a mark of the session itself,
            # because a pool may have lent the session to another thread since then.
            if is_own or (not marked and _is_still_in(lease, session)):
                yield lease.actor, actor


def _is_still_in(lease: Entry, session: DatabaseSession) -> bool:
    """Return whether the transaction in which the lease was requested may be the one that is open now.

    A transaction that began after the request is another one, perhaps of another thread.
    """
    age = session.transaction_age
    return age is not None and lease.seconds is not None and age + CLOCK_RESOLUTION_S >= lease.seconds


def _with_group(entry: Entry, groups: _ActorGroups) -> Entry:
    actor, blocked_by = groups.find(entry.actor), entry.blocked_by and tuple(map(groups.find, entry.blocked_by))
    if (actor, blocked_by) == (entry.actor, entry.blocked_by):
        return entry
    return replace(entry, actor=actor, blocked_by=blocked_by)


def _described(
    entry: Entry, groups: _ActorGroups, descriptions: Mapping[str, str], sessions: Mapping[str, DatabaseSession]
) -> Entry:
    """Describe a session as the owner of its lease describes itself."""
    actor = groups.find(entry.actor)
    if actor not in descriptions:
        return entry
    session = sessions[entry.actor]
    state = f" {session.owner['state']}" if session.owner.get("state") else ""
    return replace(entry, described=printable(f"{descriptions[actor]}, session {session.owner.get('pid', '')}{state}"))
