"""What makes a SQLite file fit for locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlock_core.doctor.asking import version
from dlock_core.doctor.fence import fence
from dlock_core.doctor.finding import Finding, ok, warning

if TYPE_CHECKING:
    from dlock_core.database import Database

__all__ = ["findings"]

LEAST: Final = (3, 31)
"""What Django 5.2 asks for as well; the fence's upserts need 3.24."""


def findings(database: Database) -> list[Finding]:
    """Examine it; raises what its query raises."""
    ((text,),) = database.query("SELECT sqlite_version()")
    ((journal,),) = database.query("PRAGMA journal_mode")
    tables = database.query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'dlock_fence'")
    return [
        version(f"SQLite {text}", tuple(map(int, str(text).split("."))), LEAST),
        _journal(str(journal)),
        ok("row locks", "none: one transaction writes at a time, if it says BEGIN IMMEDIATE"),
        *fence(database, exists=bool(tables)),
    ]


def _journal(mode: str) -> Finding:
    if mode.lower() == "wal":
        return ok("journal", "WAL: readers and the writer do not wait for each other")
    reason = "readers keep the writer waiting, who keeps his lock meanwhile"
    return warning("journal", mode.upper(), reason, "PRAGMA journal_mode=WAL, once per file")
