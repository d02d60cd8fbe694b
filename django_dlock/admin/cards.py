"""A picture of all locks as cards for a page: one for each lock, its holders first, then its waiters in order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.core.signing import BadSignature, Signer
from django.utils.translation import gettext as _

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlock_core.inspect import Entry, Picture

__all__ = ["Card", "Line", "cards", "for_people", "plain", "reference", "referred"]

KINDS: Final = ("lease", "advisory", "row")
_signer: Final = Signer(salt="django_dlock.locks")


@dataclass(frozen=True, slots=True)
class Line:
    """One who holds or waits, in words for people."""

    place: int | None
    who: str
    mode: str
    seconds: str
    expires_in: str
    token: int | None
    is_stuck: bool
    reference: str
    """What names this grant to the page that releases it; empty for what cannot be released."""


@dataclass(frozen=True, slots=True)
class Card:
    kind: str
    source: str
    name: str
    holders: list[Line]
    waiters: list[Line]

    @property
    def is_stuck(self) -> bool:
        return any(line.is_stuck for line in (*self.holders, *self.waiters))

    def rank(self) -> tuple[Any, ...]:
        """Sort what needs somebody's eye to the top, and the rest so that it stays where it was."""
        return not self.is_stuck, not self.waiters, KINDS.index(self.kind), self.name, self.source


def cards(picture: Picture) -> list[Card]:
    stuck = {wait.waiter.party for cycle in picture.cycles for wait in cycle.waits}
    locks: dict[tuple[str, str, str], list[Entry]] = defaultdict(list)
    for entry in picture.entries:
        locks[entry.kind, entry.source, entry.name].append(entry)
    return sorted((_card(*key, entries, stuck) for key, entries in locks.items()), key=Card.rank)


def _card(kind: str, source: str, name: str, entries: Iterable[Entry], stuck: set[str]) -> Card:
    in_order = sorted(entries, key=lambda entry: entry.place or 0)
    holders = [_line(entry, stuck) for entry in in_order if entry.role == "holder"]
    waiters = [_line(entry, stuck) for entry in in_order if entry.role == "waiter"]
    return Card(kind, source, plain(name), holders, waiters)


def _line(entry: Entry, stuck: set[str]) -> Line:
    can_be_released = entry.kind == "lease" and entry.role == "holder" and entry.token is not None
    return Line(
        entry.place,
        entry.described or _("unknown"),
        entry.mode,
        for_people(entry.seconds),
        for_people(entry.expires_in),
        entry.token,
        entry.party in stuck,
        reference(entry) if can_be_released else "",
    )


def reference(entry: Entry) -> str:
    """Name a grant, so that any name survives an HTML form, and none can be made up."""
    return _signer.sign_object([entry.source, entry.name, entry.token])


def referred(text: str | None) -> tuple[str, str, int] | None:
    """Read what `reference` has written: store, name, token; None for anything else."""
    try:
        store, name, token = _signer.unsign_object(text or "")
    except (BadSignature, ValueError, TypeError):
        return None
    return store, name, token


def plain(text: str) -> str:
    """Replace what is not printable in words of others: it could turn the direction of a line, or hide."""
    return "".join(char if char.isprintable() else "?" for char in text)


def for_people(seconds: float | None) -> str:
    """Write a time for people: 2.6 s, 4 min 10 s, 3 h 5 min; nothing where it is not known."""
    if seconds is None:
        return ""
    if seconds < 120:
        return _("%.1f s") % seconds
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 120:
        return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}
    return _("%(hours)d h %(minutes)d min") % {"hours": minutes // 60, "minutes": minutes % 60}
