"""The holders and waiters of a store of leases."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dlock_core.inspect.entries import Entry
from dlock_core.owner import describe, parsed
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
    data, described, party = _owner(who.owner)
    owner, mode = {**data, "holder": who.holder[:8]}, "shared" if who.shared else "exclusive"
    party = party or f"{source}/{name}/{who.holder[:8]}"  # another program's: known from nowhere else
    return Entry("lease", source, name, role, mode, owner, described, *rest, party)


@lru_cache(maxsize=1024)
def _owner(text: str) -> tuple[dict[str, Any], str, str | None]:
    """Read an owner's text, which many leases of a thread share: data, words, party."""
    data = parsed(text)
    if data is None:
        return {"text": describe(text)}, describe(text), None
    party = f"{data.get('host')}/{data['pid']}/{data.get('id', data.get('thread'))}" if "pid" in data else None
    return data, describe(text), party
