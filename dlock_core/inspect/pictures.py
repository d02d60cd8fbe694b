"""One picture of all stores and databases: who holds, who waits, who waits for each other."""

from __future__ import annotations

import logging
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dlock_core.errors import BackendUnavailable, DLockError
from dlock_core.inspect import mysql, postgresql
from dlock_core.inspect.entries import Unreadable
from dlock_core.inspect.graph import concerning, cycles
from dlock_core.inspect.linking import linked
from dlock_core.inspect.sessions import Reading
from dlock_core.inspect.stores import leases
from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlock_core.backend import Backend
    from dlock_core.database import Database
    from dlock_core.inspect.entries import Entry
    from dlock_core.inspect.graph import Cycle
    from dlock_core.inspect.sessions import Session

__all__ = ["Picture", "picture"]

logger = logging.getLogger("dlock")

_LOCKS: Final[dict[str, Callable[[Database], Reading]]] = {
    "postgresql": postgresql.locks,
    "mariadb": mysql.locks,
    "mysql": mysql.locks,
}


def _nothing(_database: Database) -> Reading:
    """SQLite, for one: its locks are those of the file system, and tell no owner."""
    return Reading()


@dataclass(slots=True)
class Picture:
    """What was found, source by source at nearly the same moment: for people, never a basis for decisions."""

    entries: list[Entry] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """How many locks of a database, all of them such as nobody waits for, were too many to be told."""

    def as_dict(self) -> dict[str, Any]:
        """Give the picture as JSON takes it, in schema 1: docs/reference/picture.md."""
        return {
            "schema": 1,
            "entries": [entry.as_dict() for entry in self.entries],
            "unreadable": [asdict(each) for each in self.unreadable],
            "cycles": [cycle.as_dict() for cycle in self.cycles],
            "left_out": self.left_out,
        }

    @contextmanager
    def reading(self, source: str) -> Iterator[None]:
        """Note a store or database that cannot be asked, or whose answer cannot be read."""
        try:
            yield
        except DLockError as error:
            reason = error.reason if isinstance(error, BackendUnavailable) else str(error)
            self.unreadable.append(Unreadable(source, printable(reason)))
        except Exception as error:  # one surprise is no reason to hide the others
            logger.debug("dlock: reading %s failed", source, exc_info=True)
            self.unreadable.append(Unreadable(source, f"reading it failed: {type(error).__name__}"))


def picture(
    stores: Iterable[tuple[str, Backend]], databases: Iterable[Database] = (), name: str | None = None
) -> Picture:
    """Ask the stores (alias, backend) and the databases; `name` keeps to one lock and to those whom it concerns.

    Raises nothing for a store or database that cannot be asked: it is told in `unreadable`.
    """
    found = Picture()
    for alias, backend in stores:
        with found.reading(alias):
            found.entries += leases(alias, backend, name)
    locks: list[Entry] = []
    sessions: dict[str, Session] = {}
    for database in databases:
        with found.reading(database.alias), closing(database):
            reading = _LOCKS.get(database.vendor, _nothing)(database)
            locks += reading.entries
            sessions |= reading.sessions
            if reading.left_out:
                found.left_out[database.alias] = reading.left_out
    found.entries = linked(found.entries, locks, sessions)
    if name is not None:
        found.entries = concerning(found.entries)
    found.cycles = cycles(found.entries)
    return found
