"""What an operator sees, and may end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Released
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

__all__ = [
    "test_force_release_ends_one_grant_and_no_newer_one",
    "test_force_release_serves_the_next_waiter",
    "test_holder_is_shown_with_its_owner_and_times",
    "test_listing_shows_what_is_held_or_waited_for",
    "test_unknown_lock_is_shown_as_free",
    "test_waiters_are_shown_in_order",
]


def test_unknown_lock_is_shown_as_free(locks: Locks, name: str) -> None:
    state = locks.state(name)
    assert (state.name, state.holders, state.waiters) == (name, (), ())


def test_holder_is_shown_with_its_owner_and_times(locks: Locks, name: str) -> None:
    lease = locks.acquire(name, ttl=60)
    (holder,) = locks.state(name).holders
    assert (holder.holder, holder.token, holder.shared) == (lease.holder, lease.token, False)
    assert f'"pid":{os.getpid()}' in holder.owner
    assert holder.expires_in is None or 30 < holder.expires_in <= 60
    assert holder.held_for is None or 0 <= holder.held_for < WITHIN


def test_waiters_are_shown_in_order(locks: Locks, name: str) -> None:
    if not locks.store.capabilities.lists_waiters:
        pytest.skip("this store does not tell who waits")
    lease = locks.acquire(name)
    line = [locks.queue_up(name), locks.queue_up(name, shared=locks.store.capabilities.shared), locks.queue_up(name)]
    waiters = locks.state(name).waiters
    assert [waiter.holder for waiter in waiters] == locks.waiting(name)
    assert [waiter.shared for waiter in waiters] == [False, locks.store.capabilities.shared, False]
    assert all(f'"pid":{os.getpid()}' in waiter.owner for waiter in waiters)
    assert all(waiter.waited_for is None or waiter.waited_for >= 0 for waiter in waiters)
    locks.do(lease.release)
    for pending in line:
        locks.do(pending.result(WITHIN).release)


def test_listing_shows_what_is_held_or_waited_for(locks: Locks, name: str) -> None:
    leases = [locks.acquire(f"{name}:{part}") for part in ("a", "b", "c")]
    locks.do(leases[1].release)
    listed = [state.name for state in locks.ask("inspect") if state.name.startswith(name)]
    assert sorted(listed) == [f"{name}:a", f"{name}:c"]


def test_force_release_ends_one_grant_and_no_newer_one(locks: Locks, name: str) -> None:
    first = locks.acquire(name, renew=False)
    assert not locks.ask("force_release", name, first.token + 1)
    assert locks.holders(name) == [first.holder]
    assert locks.ask("force_release", name, first.token)
    assert locks.holders(name) == []
    second = locks.acquire(name)
    assert not locks.ask("force_release", name, first.token)
    assert locks.do(first.release) is Released.STOLEN
    assert locks.holders(name) == [second.holder]


def test_force_release_serves_the_next_waiter(locks: Locks, name: str) -> None:
    first = locks.acquire(name, renew=False)
    pending = locks.queue_up(name)
    assert locks.ask("force_release", name, first.token)
    assert pending.result(WITHIN).token > first.token
