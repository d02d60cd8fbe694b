"""Asking for what one already holds: an error at once, or a second handle of the same grant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Released
from dlock_core.errors import AlreadyHeld

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

__all__ = [
    "test_asking_again_for_a_lock_one_holds_is_an_error_at_once",
    "test_joined_lease_is_released_at_the_outermost_end",
    "test_joining_asks_the_store_nothing",
    "test_lock_that_was_released_may_be_asked_for_again",
    "test_shared_holder_cannot_join_as_exclusive",
    "test_try_acquire_joins_as_well",
]


def test_asking_again_for_a_lock_one_holds_is_an_error_at_once(locks: Locks, name: str) -> None:
    alice = locks.party()
    lease = locks.keep(alice.do(locks.lock(name).acquire))
    before = len(locks.observed.calls)
    with pytest.raises(AlreadyHeld, match="reentrant=True"):
        alice.do(locks.lock(name, wait=None).acquire)
    with pytest.raises(AlreadyHeld):
        alice.do(locks.lock(name).try_acquire)
    assert len(locks.observed.calls) == before
    assert locks.holders(name) == [lease.holder]


def test_joining_asks_the_store_nothing(locks: Locks, name: str) -> None:
    alice = locks.party()
    outer = locks.keep(alice.do(locks.lock(name).acquire))
    before = len(locks.observed.calls)
    inner = locks.keep(alice.do(locks.lock(name, reentrant=True).acquire))
    assert (inner.token, inner.holder) == (outer.token, outer.holder)
    assert len(locks.observed.calls) == before


def test_joined_lease_is_released_at_the_outermost_end(locks: Locks, name: str) -> None:
    alice = locks.party()
    handles = [locks.keep(alice.do(locks.lock(name, reentrant=True).acquire)) for _ in range(3)]
    for handle in handles[:2]:
        assert alice.do(handle.release) is Released.RELEASED
        assert alice.do(handle.release) is Released.RELEASED
        assert locks.holders(name) == [handles[0].holder]
        assert handles[2].remaining() > 0
    assert alice.do(handles[2].release) is Released.RELEASED
    assert locks.holders(name) == []


def test_try_acquire_joins_as_well(locks: Locks, name: str) -> None:
    alice = locks.party()
    outer = locks.keep(alice.do(locks.lock(name).acquire))
    inner = locks.keep(alice.do(locks.lock(name, reentrant=True).try_acquire))
    assert inner.token == outer.token
    alice.do(outer.release)
    assert locks.holders(name) == [inner.holder]


def test_shared_holder_cannot_join_as_exclusive(locks: Locks, name: str) -> None:
    if not locks.store.capabilities.shared:
        pytest.skip("this store has no shared locks")
    alice = locks.party()
    locks.keep(alice.do(locks.lock(name, shared=True).acquire))
    with pytest.raises(AlreadyHeld):
        alice.do(locks.lock(name, reentrant=True).acquire)


def test_lock_that_was_released_may_be_asked_for_again(locks: Locks, name: str) -> None:
    alice = locks.party()
    first = alice.do(locks.lock(name).acquire)
    alice.do(first.release)
    second = locks.keep(alice.do(locks.lock(name).acquire))
    assert second.token > first.token
