"""What an operator sees, and may end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Released
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_force_release_ends_one_grant_and_no_newer_one",
    "test_force_release_serves_the_next_waiter",
    "test_holder_is_shown_with_its_owner_and_times",
    "test_listing_shows_what_is_held_or_waited_for",
    "test_unknown_lock_is_shown_as_free",
    "test_waiters_are_shown_in_order",
]


def test_unknown_lock_is_shown_as_free(harness: Harness, name: str) -> None:
    state = harness.state(name)
    assert (state.name, state.holders, state.waiters) == (name, (), ())


def test_holder_is_shown_with_its_owner_and_times(harness: Harness, name: str) -> None:
    lease = harness.acquire(name, ttl=60)
    (holder,) = harness.state(name).holders
    assert (holder.holder, holder.token, holder.shared) == (lease.holder, lease.token, False)
    assert f'"pid":{os.getpid()}' in holder.owner
    assert holder.expires_in is None or 30 < holder.expires_in <= 60
    assert holder.held_for is None or 0 <= holder.held_for < WITHIN


def test_waiters_are_shown_in_order(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.lists_waiters:
        pytest.skip("this store does not tell who waits")
    lease = harness.acquire(name)
    line = [
        harness.queue_up(name),
        harness.queue_up(name, shared=harness.store.capabilities.shared),
        harness.queue_up(name),
    ]
    waiters = harness.state(name).waiters
    assert [waiter.holder for waiter in waiters] == harness.waiting(name)
    assert [waiter.shared for waiter in waiters] == [False, harness.store.capabilities.shared, False]
    assert all(f'"pid":{os.getpid()}' in waiter.owner for waiter in waiters)
    assert all(waiter.waited_for is None or waiter.waited_for >= 0 for waiter in waiters)
    harness.do(lease.release)
    for pending in line:
        harness.do(pending.result(WITHIN).release)


def test_listing_shows_what_is_held_or_waited_for(harness: Harness, name: str) -> None:
    leases = [harness.acquire(f"{name}:{part}") for part in ("a", "b", "c")]
    harness.do(leases[1].release)
    listed = [state.name for state in harness.call_store("inspect") if state.name.startswith(name)]
    assert sorted(listed) == [f"{name}:a", f"{name}:c"]


def test_force_release_ends_one_grant_and_no_newer_one(harness: Harness, name: str) -> None:
    first = harness.acquire(name, renew=False)
    assert not harness.call_store("force_release", name, first.token + 1)
    assert harness.holders(name) == [first.holder]
    assert harness.call_store("force_release", name, first.token)
    assert harness.holders(name) == []
    second = harness.acquire(name)
    assert not harness.call_store("force_release", name, first.token)
    assert harness.do(first.release) is Released.STOLEN
    assert harness.holders(name) == [second.holder]


def test_force_release_serves_the_next_waiter(harness: Harness, name: str) -> None:
    first = harness.acquire(name, renew=False)
    pending = harness.queue_up(name)
    assert harness.call_store("force_release", name, first.token)
    assert pending.result(WITHIN).token > first.token
