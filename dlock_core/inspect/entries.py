"""What the inspector finds: who holds, who waits, and whom it could not ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Entry", "Unreadable"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One who holds a lease, a row lock or an advisory lock, or who waits for it; times in seconds, None if unknown.

    Names and owners are data of others: only `described` is sure to be one printable line.
    """

    kind: Literal["lease", "row", "advisory"]
    source: str
    """The alias of the store or database in which it was found."""
    name: str
    """The lock, the table and key of a row, or the key of an advisory lock."""
    role: Literal["holder", "waiter"]
    mode: str
    """exclusive or shared; of a row lock in the database's words, where it says more."""
    owner: dict[str, Any]
    """What it said of itself: app, host, pid, thread or task, request; of a database session pid, state, query."""
    described: str
    token: int | None
    seconds: float | None
    """How long it has held the lock, or waited for it."""
    expires_in: float | None
    position: int | None
    """1 for the first in the queue; None for a holder."""
    actor: str
    """The same text on every entry of one thread, task or database session: who has to end before others go on."""
    blocked_by: tuple[str, ...] | None = None
    """The actors in a waiter's way, where a database tells them; None where `mode` and `position` say it."""

    def as_dict(self) -> dict[str, Any]:
        """Give the entry as JSON takes it; times to the millisecond."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A store or a database that could not be asked; the reason is one line without a password."""

    source: str
    reason: str
