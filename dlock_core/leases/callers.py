"""The leases that each caller holds, so that a second acquire raises at once instead of waiting for itself.

A caller is a task, or a thread in the context in which it acquired, or in a copy of that context. The thread alone is
not enough: a thread of a pool serves one request after the other, while the leases of earlier ones may still be held.
Web frameworks and `asyncio.to_thread` give each call a separate context.

Nothing here keeps a lease alive: one that is no longer referenced is no longer renewed, and runs out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from dlock_core.flow import flow_variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextvars import ContextVar

    from dlock_core.backend import Backend
    from dlock_core.leases.lease import LeaseRecord

__all__ = ["find_held", "forget_held", "held_names", "is_acquired_here", "note_held"]

SWEEP_EVERY: Final = 32
"""A context is cleared of ended leases after so many acquires, or as many as it holds, if those are more."""

_held: Final[dict[str, ref[LeaseRecord]]] = {}
"""The leases of this process by name: a dict with only str keys takes a third less memory than others.

A handle removes the entry at its end, or when it is garbage-collected; a WeakValueDictionary would cost more."""
_held_besides: Final[dict[tuple[ref[Any], Backend, str], ref[LeaseRecord]]] = {}
"""Leases whose name is already in `_held`: for another thread or task, in another store, or as a lost lease."""
_Chain = tuple["ref[LeaseRecord]", Any] | None
_acquired: Final[ContextVar[tuple[_Chain, int]]] = flow_variable("dlock_acquired", (None, 0))
"""What threads have acquired in this context or in those it was copied from, newest first, and when to sweep it.

The chain is immutable: what is acquired in a copy of the context must not be seen in the original or another copy."""


def find_held(caller: object, backend: Backend, *names: str) -> LeaseRecord | None:
    """Return the first lease of these names that the caller already holds, unless lost or being released.

    `caller`: the current thread or task.
    """
    own = ref(caller)
    for name in names:
        if name in _held or _held_besides:
            for known in (_held.get(name), _held_besides.get((own, backend, name))):
                if known is None or (held := known()) is None or held.caller is not own:
                    continue
                is_here = not isinstance(caller, threading.Thread) or is_acquired_here(held)
                if is_here and held.backend is backend and held.is_joinable():
                    return held
    return None


def note_held(caller: object, leases: Sequence[LeaseRecord]) -> None:
    """Record what the caller holds, weakly: otherwise a task would keep the lease that it returned."""
    own = ref(caller)
    hash(own)  # The reference caches the hash, so it can be looked up even after the thread has ended.
    is_thread = isinstance(caller, threading.Thread)
    for held in leases:
        held.caller, mine = own, ref(held)
        if is_thread:  # A task has one context only.
            _note_here(mine)
        if _held.setdefault(held.request.name, mine) is not mine:
            _held_besides[own, held.backend, held.request.name] = mine


def _note_here(mine: ref[LeaseRecord]) -> None:
    chain, room = _acquired.get()
    if room <= 0:
        current = [known for known in acquired_here() if (held := known()) is not None and held.ended is None]
        chain, room = None, max(len(current), SWEEP_EVERY)
        for known in reversed(current):
            chain = (known, chain)
    _acquired.set(((mine, chain), room - 1))


def acquired_here() -> Iterator[ref[LeaseRecord]]:
    """Yield what threads have acquired in this context, newest first; some of it may have ended."""
    chain, _ = _acquired.get()
    while chain is not None:
        known, chain = chain
        yield known


def is_acquired_here(held: LeaseRecord) -> bool:
    """Return whether a thread has acquired a lease in this context or in one that it was copied from."""
    return ref(held) in acquired_here()


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
