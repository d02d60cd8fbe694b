"""etcd's leases as we use them: each carries one key at a time, and is used again while it is nearly new.

A lease costs etcd as much as a grant; whoever takes a lock again and again pays for one every now and then.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Lease", "Spares", "new_lease"]

NEW: Final = 7 / 8
"""A lease that has less than this share of its ttl left is not used again, but left to run out."""
KEPT: Final = 64
"""Unused leases kept of each ttl, at most."""
LONGEST: Final = 60.0
"""Seconds of ttl above which a lease is not kept: nothing should be left on the server for long."""


@dataclass(slots=True)
class Lease:
    """A lease, and until when it surely lives, by our clock; `is_known` once the server has granted it."""

    id: int
    ttl: int
    until: float = 0.0
    is_known: bool = False


def new_lease(seconds: float) -> Lease:
    """Think of a lease that nobody else has."""
    return Lease(secrets.randbits(62) + 1, math.ceil(seconds))


class Spares:
    """Leases of this process that carry nothing now."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: dict[int, deque[Lease]] = {}

    def take(self, seconds: float, now: float) -> Lease | None:
        """Give a lease that is nearly new, if there is one."""
        if self._pid != os.getpid():  # a forked child must not share leases with its parent
            self._pid, self._free = os.getpid(), {}
        free = self._free.get(math.ceil(seconds))
        try:
            spare = free.pop() if free else None
        except IndexError:
            spare = None
        return spare if spare is not None and spare.until - now >= spare.ttl * NEW else None

    def keeps(self, lease: Lease) -> bool:
        """Tell whether it is worth to keep."""
        return lease.is_known and lease.ttl <= LONGEST

    def give(self, lease: Lease) -> None:
        """Take back a lease that carries nothing any more, and which no request of unknown outcome has named."""
        if self.keeps(lease):
            self._free.setdefault(lease.ttl, deque(maxlen=KEPT)).append(lease)

    def clear(self) -> None:
        """Forget all of them: the server did not know one."""
        self._free = {}
