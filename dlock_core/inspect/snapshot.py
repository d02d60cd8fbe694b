"""A snapshot of all stores and databases: the holders, the waiters, and the deadlocks among them."""

from __future__ import annotations

import logging
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from dlock_core.errors import BackendUnavailable, DLockError
from dlock_core.inspect import mysql, postgresql
from dlock_core.inspect.correlate import correlate
from dlock_core.inspect.graph import Entry, Unreadable, cycles, related_to_leases
from dlock_core.inspect.sessions import DatabaseLocks
from dlock_core.names import canonical
from dlock_core.owner import describe, parsed, printable
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlock_core.backend import Backend, Holder, LockState, Waiter
    from dlock_core.inspect.graph import Cycle
    from dlock_core.inspect.sessions import DatabaseSession
    from dlock_core.sql.database import Database

__all__ = ["Snapshot", "take_snapshot"]


logger = logging.getLogger("dlock")

_LOCKS: Final[dict[str, Callable[[Database], DatabaseLocks]]] = {
    "postgresql": postgresql.locks,
    "mariadb": mysql.locks,
    "mysql": mysql.locks,
}


def _no_locks(_database: Database) -> DatabaseLocks:
    """Return no locks, for databases that report none: SQLite's are file locks, which have no known owner."""
    return DatabaseLocks()


@dataclass(slots=True)
class Snapshot:
    """The holders and waiters at nearly the same moment: information for people, never a basis for decisions.

    The sources are read one after the other, so an entry may be outdated by the time the next source is read.
    """

    entries: list[Entry] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """By database, the number of locks without waiters that are not in `entries`, because there were too many."""

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as JSON data, in schema 1: see docs/reference/snapshot.md."""
        return {
            "schema": 1,
            "entries": [entry.as_dict() for entry in self.entries],
            "unreadable": [asdict(each) for each in self.unreadable],
            "cycles": [cycle.as_dict() for cycle in self.cycles],
            "left_out": self.left_out,
        }

    @contextmanager
    def reading(self, source: str) -> Iterator[None]:
        """Record a source in `unreadable` if the block, which reads it, raises."""
        try:
            yield
        except DLockError as error:
            reason = error.reason if isinstance(error, BackendUnavailable) else str(error)
            self.unreadable.append(Unreadable(source, printable(reason)))
        except Exception as error:  # A defect in one source must not hide the others.
            logger.debug("dlock: reading %s failed", source, exc_info=True)
            self.unreadable.append(Unreadable(source, f"reading it failed: {type(error).__name__}"))


def take_snapshot(
    stores: Iterable[tuple[str, Backend]], databases: Iterable[Database] = (), name: str | None = None
) -> Snapshot:
    """Return the holders and waiters in stores and databases, and the deadlocks among them.

    A store or database that cannot be read raises nothing: it is listed in `unreadable`.

    Args:
        stores: pairs of an alias and a backend.
        databases: what `databases()` of `django_dlock.inspect`, or `database()` of `sqla_dlock.inspect`, returns.
        name: limits the snapshot to one lock, and to the row and advisory locks that its holders and waiters hold or
            wait for. Raises ValueError for a text that cannot be a name.
    """
    name = None if name is None else canonical(name)
    found = Snapshot()
    for alias, backend in stores:
        with found.reading(alias):
            found.entries += leases(alias, backend, name)
    locks: list[Entry] = []
    sessions: dict[str, DatabaseSession] = {}
    for database in databases:
        with found.reading(database.alias), closing(database):
            reading = _LOCKS.get(database.vendor, _no_locks)(database)
            locks += reading.entries
            sessions |= reading.sessions
            if reading.left_out:
                found.left_out[database.alias] = reading.left_out
    found.entries = correlate(found.entries, locks, sessions)
    if name is not None:
        found.entries = related_to_leases(found.entries)
    found.cycles = cycles(found.entries)
    return found


if TYPE_CHECKING:
    LeaseFacts: TypeAlias = tuple[int | None, float | None, float | None, int | None]
    """token, seconds, expires_in, position"""


def leases(source: str, backend: Backend, name: str | None = None) -> list[Entry]:
    """Return the holders of each lock, then its waiters in order; raises DLockError if the store cannot be read."""
    states = run(backend.inspect(BLOCKING, name))
    return [entry for state in states for entry in _entries(source, state)]


def _entries(source: str, state: LockState) -> Iterator[Entry]:
    for holder in state.holders:
        token = holder.token or None  # The lock of another library has none.
        yield _entry(source, state.name, holder, "holder", (token, holder.held_for, holder.expires_in, None))
    for position, waiter in enumerate(state.waiters, 1):
        yield _entry(source, state.name, waiter, "waiter", (None, waiter.waited_for, None, position))


def _entry(
    source: str, name: str, found: Holder | Waiter, role: Literal["holder", "waiter"], facts: LeaseFacts
) -> Entry:
    data, described, actor = _owner(found.owner)
    owner, mode = {**data, "holder": found.holder[:8]}, "shared" if found.shared else "exclusive"
    actor = actor or f"{source}/{name}/{found.holder[:8]}"  # Another program's lease belongs to no actor that we know.
    return Entry("lease", source, name, role, mode, owner, described, *facts, actor)


@lru_cache(maxsize=1024)
def _owner(text: str) -> tuple[dict[str, Any], str, str | None]:
    """Return an owner's data, description and actor; cached, because a thread's leases share the same text."""
    data = parsed(text)
    if data is None:
        return {"text": describe(text)}, describe(text), None
    actor = f"{data.get('host')}/{data['pid']}/{data.get('id', data.get('thread'))}" if "pid" in data else None
    return data, describe(text), actor
