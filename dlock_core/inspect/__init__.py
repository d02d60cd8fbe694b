"""Who holds and who waits, in all stores and databases, as plain rows for people and programs."""

from dlock_core.database import Database
from dlock_core.inspect.entries import Entry, Unreadable
from dlock_core.inspect.graph import Cycle, Wait, cycles, waits
from dlock_core.inspect.pictures import Picture, picture

__all__ = ["Cycle", "Database", "Entry", "Picture", "Unreadable", "Wait", "cycles", "picture", "waits"]
