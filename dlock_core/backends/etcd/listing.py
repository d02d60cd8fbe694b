"""Read who holds and who waits out of the keys, in the order in which they came."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING

from dlock_core.backend import Holder, LockState, Waiter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlock_core.backends.etcd.keys import Entry, Keys

__all__ = ["by_lock", "holding", "state"]


def by_lock(names: Keys, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Sort keys by lock, and those of a lock by age."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.created):
        found[names.read(entry.key)[0]].append(entry)
    return found


def holding(names: Keys, line: list[Entry]) -> list[Entry]:
    """Give those of a lock who hold it: the oldest, and when it shares, all that share up to the first who does not."""
    sharing = list(takewhile(lambda entry: names.read(entry.key)[1], line))
    return sharing or line[:1]


def state(names: Keys, name: str, line: list[Entry], base: int, left: Mapping[int, float]) -> LockState:
    """Make the state of a lock; `base` is what its tokens have on top, `left` the seconds of each lease."""
    inside = holding(names, line)
    holders = [
        Holder(names.read(one.key)[2], one.created + base, names.read(one.key)[1], one.value, left.get(one.lease))
        for one in inside
    ]
    waiters = [Waiter(names.read(one.key)[2], names.read(one.key)[1], one.value) for one in line[len(inside) :]]
    return LockState(name, tuple(holders), tuple(waiters))
