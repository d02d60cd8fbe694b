"""What each database is asked about the lease table.

A row per lock, never deleted, so that tokens only grow. Times are microseconds since 1970 by the database's clock, as
it was when the statement began: before any wait for the row, so that nobody is believed to have expired too early, or
to be valid for too long. Who holds a row is known by `expires_at` alone, which is 0 after a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Dialect", "listing", "look", "note", "other"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The statements of one database; parameters are given by name, leases as a JSON list of name, holder, ttl."""

    take: tuple[str, ...]
    """name, holder, owner, ttl, floor, newcomer → ours, token, what is left in µs, owner. The first with a row tells.

    Where nobody is told of a release, a newcomer does not take what is free as long as it is noted that others wait.
    """
    look: str
    """name, sleep in µs → what is left in µs; nothing left, or no row: it is worth to ask.

    Where it does not note that somebody waits, it gives also how long that is noted for, in µs.
    """
    note: str
    """name, sleep in µs: note that somebody waits; empty where `look` does it."""
    end: str
    """name, holder → how many grants were ended; in the rows, or as rows changed. Tells those who wait."""
    force: str
    """The same by name, token."""
    other: str
    """name → a row, if somebody holds it."""
    renew: str
    """leases → the holders that were renewed, or as many rows changed."""
    ours: str
    """leases → the holders that hold still."""
    listing: str
    """name, or an empty text for all → name, holder, token, owner, held for, what is left in µs."""


_LOOK: Final = "SELECT expires_at - {now}, wanted_until - {now} FROM dlock_lease WHERE name = :name"
_NOTE: Final = "UPDATE dlock_lease SET wanted_until = {now} + 2 * :sleep WHERE name = :name AND expires_at > {now}"
_OTHER: Final = "SELECT 1 FROM dlock_lease WHERE name = :name AND expires_at > {now}"
_LISTING: Final = """\
SELECT name, holder, token, owner, {now} - since, expires_at - {now} FROM dlock_lease
WHERE expires_at > {now} {which}ORDER BY name"""


def look(now: str) -> str:
    """Write `Dialect.look` where it only reads."""
    return _LOOK.format(now=now)


def note(now: str) -> str:
    """Write `Dialect.note`."""
    return _NOTE.format(now=now)


def other(now: str) -> str:
    """Write `Dialect.other`."""
    return _OTHER.format(now=now)


def listing(now: str, name: str) -> str:
    """Write `Dialect.listing`; `name` is the parameter."""
    return _LISTING.format(now=now, which=f"AND ({name} = '' OR name = {name}) ")
