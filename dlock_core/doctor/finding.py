"""A finding of the doctor: what was measured, what it means, and what to do about it.

This module imports nothing else, so that the stores, which examine themselves, can depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "ok", "unsafe", "warning"]

Level = Literal["ok", "warning", "unsafe"]
"""How serious a finding is.

"unsafe": locks may fail to exclude, or not work at all. "warning": the same in a case that may yet come, or locks are
slow. "ok": nothing to do.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was measured, and what it means.

    `check` and `level` are stable words for programs; `measured`, `reason` and `remedy` are sentences for people.
    """

    check: str
    level: Level
    measured: str
    reason: str = ""
    remedy: str = ""
    part: str = ""
    """The node or member that was examined, where there are several."""
    subject: Literal["store", "database", "settings"] = "store"
    """What was examined; set by the doctor, like `source`."""
    source: str = ""
    """The alias of the store or database, or the name of the framework."""


def ok(check: str, measured: str, reason: str = "") -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", measured, reason)


def warning(check: str, measured: str, reason: str, remedy: str) -> Finding:
    """Return a finding about something that may go wrong, with the reason and the remedy."""
    return Finding(check, "warning", measured, reason, remedy)


def unsafe(check: str, measured: str, reason: str, remedy: str) -> Finding:
    """Return a finding because of which locks cannot be trusted, with the reason and the remedy."""
    return Finding(check, "unsafe", measured, reason, remedy)
