"""Asking for what one already holds: an error at once, or a second handle of the same grant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Released
from dlock_core.errors import AlreadyHeld

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_asking_again_for_a_lock_one_holds_is_an_error_at_once",
    "test_joined_lease_is_released_at_the_outermost_end",
    "test_joining_asks_the_store_nothing",
    "test_lock_that_was_released_may_be_asked_for_again",
    "test_shared_holder_cannot_join_as_exclusive",
    "test_try_acquire_joins_as_well",
]


def test_asking_again_for_a_lock_one_holds_is_an_error_at_once(harness: Harness, name: str) -> None:
    alice = harness.actor()
    lease = harness.keep(alice.do(harness.lock(name).acquire))
    before = len(harness.observed.calls)
    with pytest.raises(AlreadyHeld, match="reentrant=True"):
        alice.do(harness.lock(name, wait=None).acquire)
    with pytest.raises(AlreadyHeld):
        alice.do(harness.lock(name).try_acquire)
    assert len(harness.observed.calls) == before
    assert harness.holders(name) == [lease.holder]


def test_joining_asks_the_store_nothing(harness: Harness, name: str) -> None:
    alice = harness.actor()
    outer = harness.keep(alice.do(harness.lock(name).acquire))
    before = len(harness.observed.calls)
    inner = harness.keep(alice.do(harness.lock(name, reentrant=True).acquire))
    assert (inner.token, inner.holder) == (outer.token, outer.holder)
    assert len(harness.observed.calls) == before


def test_joined_lease_is_released_at_the_outermost_end(harness: Harness, name: str) -> None:
    alice = harness.actor()
    handles = [harness.keep(alice.do(harness.lock(name, reentrant=True).acquire)) for _ in range(3)]
    for handle in handles[:2]:
        assert alice.do(handle.release) is Released.RELEASED
        assert alice.do(handle.release) is Released.RELEASED
        assert harness.holders(name) == [handles[0].holder]
        assert handles[2].remaining() > 0
    assert alice.do(handles[2].release) is Released.RELEASED
    assert harness.holders(name) == []


def test_try_acquire_joins_as_well(harness: Harness, name: str) -> None:
    alice = harness.actor()
    outer = harness.keep(alice.do(harness.lock(name).acquire))
    inner = harness.keep(alice.do(harness.lock(name, reentrant=True).try_acquire))
    assert inner.token == outer.token
    alice.do(outer.release)
    assert harness.holders(name) == [inner.holder]


def test_shared_holder_cannot_join_as_exclusive(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.shared:
        pytest.skip("this store has no shared locks")
    alice = harness.actor()
    harness.keep(alice.do(harness.lock(name, shared=True).acquire))
    with pytest.raises(AlreadyHeld):
        alice.do(harness.lock(name, reentrant=True).acquire)


def test_lock_that_was_released_may_be_asked_for_again(harness: Harness, name: str) -> None:
    alice = harness.actor()
    first = alice.do(harness.lock(name).acquire)
    alice.do(first.release)
    second = harness.keep(alice.do(harness.lock(name).acquire))
    assert second.token > first.token
