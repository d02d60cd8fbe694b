"""What each database is asked about the lease table.

A row per lock, never deleted, so that tokens only grow. Times are microseconds since 1970 by the database's clock, as
it was when the statement began: before any wait for the row, so that nobody is believed to have expired too early, or
to be valid for too long. Who holds a row is known by `expires_at` alone, which is 0 after a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Dialect", "listing", "other"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The statements of one database; parameters are given by name, leases as a JSON list of name, holder, ttl."""

    take: tuple[str, ...]
    """name, holder, owner, ttl, floor → ours, token, what is left in µs, owner. The first that has a row tells."""
    look: str
    """name, sleep in µs → what is left in µs; nothing left, or no row: it is worth to ask."""
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


_OTHER: Final = "SELECT 1 FROM dlock_lease WHERE name = :name AND expires_at > {now}"
_LISTING: Final = """\
SELECT name, holder, token, owner, {now} - since, expires_at - {now} FROM dlock_lease
WHERE expires_at > {now} {which}ORDER BY name"""


def other(now: str) -> str:
    """Write `Dialect.other`."""
    return _OTHER.format(now=now)


def listing(now: str, name: str) -> str:
    """Write `Dialect.listing`; `name` is the parameter."""
    return _LISTING.format(now=now, which=f"AND ({name} = '' OR name = {name}) ")
