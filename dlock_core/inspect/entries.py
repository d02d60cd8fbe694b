"""What the inspector finds: holders and waiters, and the sources that it could not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Entry", "Unreadable"]


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
