"""The holders and waiters of a store of leases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dlock_core.inspect.entries import Entry
from dlock_core.owner import describe
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlock_core.backend import Backend, Holder, LockState, Waiter

    Facts: TypeAlias = tuple[int | None, float | None, float | None, int | None]
    """token, seconds, expires_in, place"""

__all__ = ["leases"]


def leases(source: str, backend: Backend, name: str | None = None) -> list[Entry]:
    """List the holders of each lock, then its waiters in order; raises DLockError when the store cannot be asked."""
    states = run(backend.inspect(BLOCKING, name))
    return [entry for state in states for entry in _entries(source, state)]


def _entries(source: str, state: LockState) -> Iterator[Entry]:
    for holder in state.holders:
        token = holder.token or None  # another library's lock has none
        yield _entry(source, state.name, holder, "holder", (token, holder.held_for, holder.expires_in, None))
    for place, waiter in enumerate(state.waiters, 1):
        yield _entry(source, state.name, waiter, "waiter", (None, waiter.waited_for, None, place))


def _entry(source: str, name: str, who: Holder | Waiter, role: Literal["holder", "waiter"], rest: Facts) -> Entry:
    owner, mode = _owner(who), "shared" if who.shared else "exclusive"
    return Entry("lease", source, name, role, mode, owner, describe(who.owner), *rest, _party(source, name, owner))


def _owner(who: Holder | Waiter) -> dict[str, Any]:
    try:
        data = json.loads(who.owner)
    except ValueError:
        data = None
    data = data if isinstance(data, dict) else {"text": describe(who.owner)}
    return {**data, "holder": who.holder[:8]}


def _party(source: str, name: str, owner: dict[str, Any]) -> str:
    if "pid" not in owner:  # another program's lock: it is nobody whom we would know from elsewhere
        return f"{source}/{name}/{owner['holder']}"
    return f"{owner.get('host')}/{owner['pid']}/{owner.get('id', owner.get('thread'))}"
