"""The leases that each thread or task holds, so that a second acquire raises at once instead of waiting for itself.

Nothing here keeps a lease alive: one that is no longer referenced is no longer renewed, and runs out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Backend
    from dlock_core.leases.lease import LeaseRecord

__all__ = ["find_held", "forget_held", "held_names", "note_held"]

_held: Final[dict[str, ref[LeaseRecord]]] = {}
"""The leases of this process by name: a dict with only str keys takes a third less memory than others.

A handle removes the entry at its end, or when it is garbage-collected; a WeakValueDictionary would cost more."""
_held_besides: Final[dict[tuple[ref[Any], Backend, str], ref[LeaseRecord]]] = {}
"""Leases whose name is already in `_held`: for another thread or task, in another store, or as a lost lease."""


def find_held(caller: object, backend: Backend, *names: str) -> LeaseRecord | None:
    """Return the first lease of these names that a thread or task already holds, unless lost or being released."""
    own = ref(caller)
    for name in names:
        if name in _held or _held_besides:
            for known in (_held.get(name), _held_besides.get((own, backend, name))):
                held = None if known is None else known()
                if held is not None and held.caller is own and held.backend is backend and held.is_joinable():
                    return held
    return None


def note_held(caller: object, leases: Sequence[LeaseRecord]) -> None:
    """Record what a thread or task holds, weakly: otherwise a task would keep the lease that it returned."""
    own = ref(caller)
    hash(own)  # The reference caches the hash, so it can be looked up even after the thread has ended.
    for held in leases:
        held.caller, mine = own, ref(held)
        if _held.setdefault(held.request.name, mine) is not mine:
            _held_besides[own, held.backend, held.request.name] = mine


def forget_held(leases: Sequence[LeaseRecord]) -> None:
    """Forget leases that have ended; their callers may hold later ones of the same names."""
    for held in leases:
        name = held.request.name
        _forget(_held, name, held)
        if _held_besides:
            _forget(_held_besides, (held.caller, held.backend, name), held)


def _forget(known: dict[Any, ref[LeaseRecord]], key: object, held: LeaseRecord) -> None:
    """Remove an entry if it is this lease's, or dead: the collector clears it before it calls a finalizer."""
    if (entry := known.get(key)) is not None and ((found := entry()) is held or found is None):
        known.pop(key, None)


def held_names() -> set[str]:
    """Return the names of all recorded leases, for tests."""
    return {*_held, *[name for _, _, name in _held_besides]}
