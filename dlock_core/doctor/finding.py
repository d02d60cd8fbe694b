"""What a doctor finds: one thing that was measured, what it means, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "ok", "unsafe", "warning"]

Level = Literal["ok", "warning", "unsafe"]
"""unsafe: locks may fail to exclude, or not work at all; warning: they will in a case that may come, or cost much."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `check` is a stable word for programs, everything else is for people.

    `subject` and `source` say of what, and are set by the doctor: a store or database and its alias, or the settings of
    a framework; `part` names the node or member, where there are several.
    """

    check: str
    level: Level
    measured: str
    reason: str = ""
    remedy: str = ""
    part: str = ""
    subject: Literal["store", "database", "settings"] = "store"
    source: str = ""


def ok(check: str, measured: str, reason: str = "") -> Finding:
    """Say that a thing is as it should be."""
    return Finding(check, "ok", measured, reason)


def warning(check: str, measured: str, reason: str, remedy: str) -> Finding:
    """Say what will go wrong one day."""
    return Finding(check, "warning", measured, reason, remedy)


def unsafe(check: str, measured: str, reason: str, remedy: str) -> Finding:
    """Say why a lock cannot be trusted here."""
    return Finding(check, "unsafe", measured, reason, remedy)
