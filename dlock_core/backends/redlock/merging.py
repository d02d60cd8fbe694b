"""What several nodes show of one lock, as one state: for people, never a basis for decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.quorum import majority

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["merged"]


def merged(name: str, states: Sequence[LockState]) -> LockState:
    """Show whom a majority of those that answered know as a holder, and whoever waits at any of them."""
    needed, seen, line = majority(len(states)), dict[str, list[Holder]](), dict[str, Waiter]()
    for state in states:
        for holder in state.holders:
            seen.setdefault(holder.holder, []).append(holder)
        for waiter in state.waiters:
            line.setdefault(waiter.holder, waiter)
    holders = [_holder(entries, needed) for entries in seen.values() if len(entries) >= needed]
    inside = {holder.holder for holder in holders}
    waiters = sorted(line.values(), key=lambda waiter: waiter.waited_for or 0.0, reverse=True)
    return LockState(name, tuple(holders), tuple(waiter for waiter in waiters if waiter.holder not in inside))


def _holder(entries: Sequence[Holder], needed: int) -> Holder:
    """Take the token that most know; it lasts as long as a majority keeps it."""
    tokens = [entry.token for entry in entries]
    lasting = sorted((entry.expires_in for entry in entries if entry.expires_in is not None), reverse=True)
    expires_in = lasting[needed - 1] if len(lasting) >= needed else None
    return replace(entries[0], token=max(tokens, key=tokens.count), expires_in=expires_in)
