"""Read what the inspection script replies."""

from __future__ import annotations

import re
from typing import Any, Final

from dlock_core.backend import Holder, LockState, Waiter

__all__ = ["state"]

_OURS: Final = re.compile(r"([0-9a-f]+)\|([0-9]+)\|([0-9]+)\|(.*)", re.DOTALL)
"""holder, token, since (ms), owner; anything else is another program's."""


def state(name: str, reply: list[Any]) -> LockState:
    """Make one lock's state out of the reply of `inspect.lua`."""
    value, left, sharers, waiters, server_time = reply
    now = int(server_time) / 1000
    if value == b"shared":
        holders = [_holder(text, int(expiry) / 1000 - now, now, shared=True) for _, expiry, text in sharers]
    else:
        holders = [_holder(value, left / 1000, now, shared=False)] if value and left != -2 else []
    return LockState(name, tuple(holders), tuple(_waiter(*waiter, now=now) for waiter in waiters))


def _holder(text: bytes, left: float, now: float, *, shared: bool) -> Holder:
    expires_in = max(0.0, left) if left >= 0 else None
    words = text.decode(errors="replace")
    ours = _OURS.fullmatch(words)
    if ours is None:
        return Holder(words, 0, shared, "a client that is not dlock", expires_in)
    holder, token, since, owner = ours.groups()
    return Holder(holder, int(token), shared, owner, expires_in, max(0.0, now - int(since)))


def _waiter(holder: bytes, arrival: bytes, place: bytes, *, now: float) -> Waiter:
    parts = place.decode(errors="replace").split("|", 4)
    shared, owner = (parts[1] == "s", parts[4]) if len(parts) == 5 else (False, "")
    return Waiter(holder.decode(errors="replace"), shared, owner, max(0.0, now - float(arrival) / 1_000_000))
