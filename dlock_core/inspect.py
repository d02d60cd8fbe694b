"""Who holds and who waits, in all stores, as plain rows for people and programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from dlock_core.errors import DLockError
from dlock_core.owner import describe
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlock_core.backend import Backend, Holder, LockState, Waiter

__all__ = ["Entry", "Unreadable", "entries"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One holder of a lock, or one who waits for it; times in seconds, None where the store does not know.

    `owner` is what it said of itself (app, host, pid, thread, request), `token` is None for a waiter, `place` is 1 for
    the first in the queue and None for a holder.
    """

    store: str
    name: str
    role: Literal["holder", "waiter"]
    mode: Literal["exclusive", "shared"]
    owner: dict[str, Any]
    described: str
    token: int | None
    seconds: float | None
    """How long it has held the lock, or waited for it."""
    expires_in: float | None
    place: int | None

    def as_dict(self) -> dict[str, Any]:
        """Give the entry as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A store that could not be asked."""

    store: str
    reason: str


def entries(stores: Iterable[tuple[str, Backend]], name: str | None = None) -> tuple[list[Entry], list[Unreadable]]:
    """List holders and waiters of the stores (alias, backend), and the stores that cannot be reached."""
    found: list[Entry] = []
    failed: list[Unreadable] = []
    for alias, backend in stores:
        try:
            states = run(backend.inspect(BLOCKING, name))
        except DLockError as error:
            failed.append(Unreadable(alias, str(error)))
        else:
            found += [entry for state in states for entry in _entries(alias, state)]
    return found, failed


def _entries(store: str, state: LockState) -> list[Entry]:
    holders = [_holder(store, state.name, holder) for holder in state.holders]
    return holders + [_waiter(store, state.name, waiter, place) for place, waiter in enumerate(state.waiters, 1)]


def _holder(store: str, name: str, holder: Holder) -> Entry:
    mode, owner, token = _mode(holder), holder.owner, holder.token or None  # another library's lock has no token
    return Entry(
        store, name, "holder", mode, _owner(owner), describe(owner), token, holder.held_for, holder.expires_in, None
    )


def _waiter(store: str, name: str, waiter: Waiter, place: int) -> Entry:
    mode, owner = _mode(waiter), waiter.owner
    return Entry(store, name, "waiter", mode, _owner(owner), describe(owner), None, waiter.waited_for, None, place)


def _mode(who: Holder | Waiter) -> Literal["exclusive", "shared"]:
    return "shared" if who.shared else "exclusive"


def _owner(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return data if isinstance(data, dict) else {"text": describe(text)}
