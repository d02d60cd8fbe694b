"""The sessions of a database, and entries made of the locks that they hold or wait for; pure, no I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dlock_core.inspect.graph import Entry
from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["AwaitedLock", "DatabaseLocks", "DatabaseSession", "HeldLock", "Kind", "make_entries"]

Kind: TypeAlias = Literal["row", "advisory"]
_Lock: TypeAlias = tuple[Kind, str]

MAX_UNCONTENDED_LOCKS: Final = 500
"""Locks without waiters that are listed per database; the rest is only counted."""

_MARK: Final = re.compile(r"\bdlock:([0-9a-f]{8}|[0-9]{15,}(?=#))(?!\w)|/\* dlock \S+ ([0-9a-f]{8})")
"""A session's mark of its lease: the beginning of the holder, which the fence and an advisory lock's comment write, or
the token in an advisory lock's label."""


@dataclass(frozen=True, slots=True)
class DatabaseSession:
    """A database session, or a prepared transaction; ages in seconds."""

    actor: str
    """Such as "pg:4711/shop", the form in which the owner of a lease names its sessions."""
    title: str
    owner: dict[str, Any]
    transaction_age: float | None = None

    @property
    def lease_marks(self) -> set[str]:
        """The leases under which the session works, as its label and query show them: beginnings of holders, tokens."""
        texts = (str(self.owner.get(key) or "") for key in ("application_name", "query"))
        return {first or second for text in texts for first, second in _MARK.findall(text)}

    def described(self) -> str:
        """Return the session in words, as one printable line."""
        state = self.owner.get("state")
        return printable(f"{self.title}, {state}" if state else self.title)


@dataclass(frozen=True, slots=True)
class AwaitedLock:
    """A lock that a session waits for, and the actors that block it."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None
    blocked_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a session holds, with or without waiters."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DatabaseLocks:
    """What was found in one database; `left_out` counts the locks without waiters that are not listed."""

    sessions: Mapping[str, DatabaseSession] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    left_out: int = 0


def make_entries(
    source: str, sessions: Mapping[str, DatabaseSession], wanted: Iterable[AwaitedLock], held: Iterable[HeldLock]
) -> DatabaseLocks:
    """Return the entries: each lock with waiters, its holders before its queue, and then the locks without waiters."""
    queues: dict[_Lock, list[AwaitedLock]] = defaultdict(list)
    for one in wanted:
        queues[one.kind, one.name].append(one)
    known = {(one.kind, one.name, one.actor): one for one in held}
    contended = [entry for lock, queue in queues.items() for entry in _contended(source, sessions, known, lock, queue)]
    uncontended = [one for one in known.values() if (one.kind, one.name) not in queues]
    listed = [_holder(source, sessions, one) for one in uncontended[:MAX_UNCONTENDED_LOCKS]]
    return DatabaseLocks(sessions, contended + listed, len(uncontended) - len(listed))


def _contended(
    source: str,
    sessions: Mapping[str, DatabaseSession],
    known: Mapping[tuple[Kind, str, str], HeldLock],
    lock: _Lock,
    queue: list[AwaitedLock],
) -> Iterator[Entry]:
    waiting = {one.actor for one in queue}
    # A database may name a blocker whose own lock it does not list, as PostgreSQL does for row locks. Whatever blocks
    # and does not wait itself is taken for a holder. A dict keeps the order that the database reported.
    holders = {actor: None for one in queue for actor in one.blocked_by if actor not in waiting}
    holders |= {actor: None for kind, name, actor in known if (kind, name) == lock}
    for actor in holders:
        age = sessions[actor].transaction_age if actor in sessions else None
        yield _holder(source, sessions, known.get((*lock, actor)) or HeldLock(actor, *lock, "exclusive", age))
    for position, one in enumerate(sorted(queue, key=lambda one: _queue_order(one, waiting)), 1):
        yield _entry(source, sessions, one, "waiter", position)


def _queue_order(one: AwaitedLock, waiting: set[str]) -> tuple[int, float]:
    """Return the sort key of a waiter: those blocked by fewer other waiters first, then those that waited longer."""
    return len(waiting.intersection(one.blocked_by)), -(one.seconds or 0.0)


def _holder(source: str, sessions: Mapping[str, DatabaseSession], held: HeldLock) -> Entry:
    return _entry(source, sessions, held, "holder", None)


def _entry(
    source: str,
    sessions: Mapping[str, DatabaseSession],
    one: HeldLock | AwaitedLock,
    role: Literal["holder", "waiter"],
    position: int | None,
) -> Entry:
    # It ended between two queries.
    session = sessions.get(one.actor) or DatabaseSession(one.actor, f"session {one.actor}", {})
    seconds = None if one.seconds is None else max(0.0, one.seconds)
    return Entry(
        one.kind, source, one.name, role, one.mode, session.owner, session.described(), None, seconds, None, position,
        one.actor, one.blocked_by if isinstance(one, AwaitedLock) else None,
    )  # fmt: skip
