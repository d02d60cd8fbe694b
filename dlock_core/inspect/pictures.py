"""One picture of all stores and databases: who holds, who waits, who waits for each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dlock_core.errors import DLockError
from dlock_core.inspect.entries import Unreadable
from dlock_core.inspect.graph import cycles
from dlock_core.inspect.stores import leases

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlock_core.backend import Backend
    from dlock_core.inspect.entries import Database, Entry
    from dlock_core.inspect.graph import Cycle

__all__ = ["Picture", "picture"]


@dataclass(slots=True)
class Picture:
    """What was found, source by source at nearly the same moment: for people, never a basis for decisions."""

    entries: list[Entry] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Give the picture as JSON takes it, in schema 1: docs/reference/picture.md."""
        return {
            "schema": 1,
            "entries": [entry.as_dict() for entry in self.entries],
            "unreadable": [asdict(each) for each in self.unreadable],
            "cycles": [cycle.as_dict() for cycle in self.cycles],
        }


def picture(
    stores: Iterable[tuple[str, Backend]], databases: Iterable[Database] = (), name: str | None = None
) -> Picture:
    """Ask the stores (alias, backend) and the databases; `name` keeps to one lock.

    Raises nothing for a store or database that cannot be asked: it is told in `unreadable`.
    """
    found = Picture()
    for alias, backend in stores:
        try:
            found.entries += leases(alias, backend, name)
        except DLockError as error:
            found.unreadable.append(Unreadable(alias, str(error)))
    found.cycles = cycles(found.entries)
    return found
