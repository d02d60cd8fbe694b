"""What a database tells of its sessions, in its own terms; turned into entries here, for all databases alike."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dlock_core.inspect.entries import Entry
from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Held", "Kind", "Reading", "Session", "Wanted", "read"]

Kind: TypeAlias = Literal["row", "advisory"]
_Lock: TypeAlias = tuple[Kind, str]

MOST: Final = 500
"""Of the locks that nobody waits for, so many are told."""

_MARK: Final = re.compile(r"\bdlock:([0-9a-f]{8}|[0-9]{15,}(?=#))(?!\w)|/\* dlock \S+ ([0-9a-f]{8})")
"""The beginning of a holder's id, written by the fence or an advisory lock's comment; or the token in its label."""


@dataclass(frozen=True, slots=True)
class Session:
    """A database session, or a prepared transaction; ages in seconds."""

    party: str
    """Such as "pg:4711/shop", as it stands in the metadata of a lease, too."""
    title: str
    owner: dict[str, Any]
    transaction_age: float | None = None

    @property
    def marks(self) -> set[str]:
        """What the session tells of the leases under which it works: holders' beginnings, and tokens."""
        texts = (str(self.owner.get(key) or "") for key in ("application_name", "query"))
        return {first or second for text in texts for first, second in _MARK.findall(text)}

    def described(self) -> str:
        state = self.owner.get("state")
        return printable(f"{self.title}, {state}" if state else self.title)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A lock that a session waits for, and the parties that stand in its way."""

    party: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A lock that a session holds, whether or not anybody waits for it."""

    party: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What was found in one database; `left_out` counts the locks that nobody waits for and that are not told."""

    sessions: Mapping[str, Session] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    left_out: int = 0


def read(source: str, sessions: Mapping[str, Session], wanted: Iterable[Wanted], held: Iterable[Held]) -> Reading:
    """Make entries: each lock that is waited for with its holders and its queue, then what else is held."""
    queues: dict[_Lock, list[Wanted]] = defaultdict(list)
    for one in wanted:
        queues[one.kind, one.name].append(one)
    known = {(one.kind, one.name, one.party): one for one in held}
    contended = [entry for lock, queue in queues.items() for entry in _contended(source, sessions, known, lock, queue)]
    rest = [one for one in known.values() if (one.kind, one.name) not in queues]
    free = [_holder(source, sessions, one) for one in rest[:MOST]]
    return Reading(sessions, contended + free, len(rest) - len(free))


def _contended(
    source: str,
    sessions: Mapping[str, Session],
    known: Mapping[tuple[Kind, str, str], Held],
    lock: _Lock,
    queue: list[Wanted],
) -> Iterator[Entry]:
    waiting = {one.party for one in queue}
    holders = {party: None for one in queue for party in one.behind if party not in waiting}
    holders |= {party: None for kind, name, party in known if (kind, name) == lock}
    for party in holders:
        age = sessions[party].transaction_age if party in sessions else None
        yield _holder(source, sessions, known.get((*lock, party)) or Held(party, *lock, "exclusive", age))
    for place, one in enumerate(sorted(queue, key=lambda one: _turn(one, waiting)), 1):
        yield _entry(source, sessions, one, "waiter", place)


def _turn(one: Wanted, waiting: set[str]) -> tuple[int, float]:
    """Order a queue: who is behind more of the others comes later; then who has waited longer comes first."""
    return len(waiting.intersection(one.behind)), -(one.seconds or 0.0)


def _holder(source: str, sessions: Mapping[str, Session], held: Held) -> Entry:
    return _entry(source, sessions, held, "holder", None)


def _entry(
    source: str,
    sessions: Mapping[str, Session],
    one: Held | Wanted,
    role: Literal["holder", "waiter"],
    place: int | None,
) -> Entry:
    session = sessions.get(one.party) or Session(one.party, f"session {one.party}", {})  # it has ended meanwhile
    seconds = None if one.seconds is None else max(0.0, one.seconds)
    return Entry(
        one.kind, source, one.name, role, one.mode, session.owner, session.described(), None, seconds, None, place,
        one.party, one.behind if isinstance(one, Wanted) else None,
    )  # fmt: skip
