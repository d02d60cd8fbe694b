"""What each thread or task holds, so that a second acquire raises at once instead of waiting for itself.

Nothing here keeps a lease alive: one that is thrown away is renewed no more, and runs out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final
from weakref import ref

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.leases.lease import LeaseRecord

__all__ = ["Key", "find_held", "forget_held", "held_by_caller", "key_of"]

Key = tuple[Hashable, object, str]
held_by_caller: Final[dict[Key, ref[LeaseRecord]]] = {}
"""A handle removes the entry at its end, or when it is thrown away; a dictionary of weak values would cost more."""


def key_of(caller: object, backend: Backend, name: str) -> Key:
    """Return the key under which a thread or task holds; weak, or a task would keep the lease it returned."""
    return ref(caller), backend, name


def find_held(key: Key) -> LeaseRecord | None:
    """Return the lease that a thread or task holds already, unless it is lost or being released."""
    known = held_by_caller.get(key)
    held = None if known is None else known()
    return None if held is None or not held.is_joinable() else held


def forget_held(key: Key, held: LeaseRecord) -> None:
    """Remove the entry of a lease that has ended; the caller may hold a later one of the same name."""
    if held_by_caller.get(key) is ref(held):
        held_by_caller.pop(key, None)
