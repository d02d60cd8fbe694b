"""The holders and waiters of all stores and databases, as plain entries for people and programs."""

from dlock_core.inspect.graph import Cycle, Entry, Unreadable, Wait, cycles, waits
from dlock_core.inspect.snapshot import Snapshot, take_snapshot
from dlock_core.sql.database import Database

__all__ = ["Cycle", "Database", "Entry", "Snapshot", "Unreadable", "Wait", "cycles", "take_snapshot", "waits"]
