"""First come, first served; a waiter that gives up, dies or comes too late leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import pytest

from dlock_core.errors import AcquireTimeout
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.testing.contract.harness import Tasks
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_abandon_of_a_stranger_harms_nobody",
    "test_abandon_undoes_a_grant_and_hands_over",
    "test_cancelled_waiter_leaves_its_place",
    "test_dead_holder_is_followed_by_the_waiter",
    "test_hand_over_that_nobody_takes_up_passes_on",
    "test_released_lock_belongs_to_the_waiter_at_once",
    "test_timeout_tells_who_holds_and_what_to_do",
    "test_try_acquire_never_waits",
    "test_wait_of_zero_is_one_try",
    "test_waiter_needs_one_question_after_the_release",
    "test_waiter_that_gives_up_leaves_its_place",
    "test_waiters_are_served_first_come_first_served",
]


def test_try_acquire_never_waits(harness: Harness, name: str) -> None:
    harness.acquire(name)
    assert harness.try_acquire(name, wait=None) is None
    assert harness.calls_of("wait", name) == []
    assert harness.state(name).waiters == ()


def test_wait_of_zero_is_one_try(harness: Harness, name: str) -> None:
    harness.acquire(name)
    with pytest.raises(AcquireTimeout):
        harness.acquire(name, wait=0)
    assert len(harness.calls_of("try_acquire", name)) == 2
    assert harness.calls_of("wait", name) == []
    assert harness.state(name).waiters == ()


def test_timeout_tells_who_holds_and_what_to_do(harness: Harness, name: str) -> None:
    harness.acquire(name)
    with pytest.raises(AcquireTimeout, match="try again") as caught:
        harness.acquire(name, wait=0.05)
    error = caught.value
    assert error.name == name
    assert error.waited >= 0.05
    assert "pid" in error.held_by
    assert error.retry_after > 0


def test_released_lock_belongs_to_the_waiter_at_once(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.fair:
        pytest.skip("this store does not hand over")
    first = harness.acquire(name)
    pending = harness.queue_up(name)
    harness.do(first.release)
    assert harness.try_acquire(name) is None
    second = pending.result(WITHIN)
    assert second.token > first.token
    assert harness.holders(name) == [second.holder]


def test_waiter_needs_one_question_after_the_release(harness: Harness, name: str) -> None:
    first = harness.acquire(name)
    pending = harness.queue_up(name)
    harness.do(first.release)
    before = len(harness.calls_of("try_acquire", name))  # A store that polls may have been asked many times till then.
    pending.result(WITHIN)
    assert len(harness.calls_of("try_acquire", name)) <= before + 1


def test_waiters_are_served_first_come_first_served(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.fair:
        pytest.skip("this store serves in any order")
    current = harness.acquire(name)
    line = [harness.queue_up(name) for _ in range(5)]
    if harness.store.capabilities.lists_waiters:
        assert [waiter.holder for waiter in harness.state(name).waiters] == harness.waiting(name)
    while line:
        harness.do(current.release)
        first, *line = line
        current = first.result(WITHIN)
        assert not any(other.done() for other in line)


def test_waiter_that_gives_up_leaves_its_place(harness: Harness, name: str) -> None:
    first = harness.acquire(name)
    with pytest.raises(AcquireTimeout):
        harness.acquire(name, wait=0.02)
    assert harness.state(name).waiters == ()
    harness.do(first.release)
    assert harness.holders(name) == []


def test_cancelled_waiter_leaves_its_place(harness: Harness, name: str) -> None:
    if not isinstance(harness, Tasks):
        pytest.skip("threads cannot be cancelled")
    first = harness.acquire(name)
    pending = harness.queue_up(name)
    pending.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(WITHIN)
    harness.observed.until(lambda _: bool(harness.calls_of("abandon", name)))
    harness.until(lambda: harness.state(name).waiters == ())
    harness.do(first.release)
    assert harness.holders(name) == []


def test_abandon_undoes_a_grant_and_hands_over(harness: Harness, name: str) -> None:
    request = new_request(name, LockOptions(30.0, 10.0))
    harness.call_store("try_acquire", request)
    pending = harness.queue_up(name)
    harness.call_store("abandon", request)
    lease = pending.result(WITHIN)
    harness.call_store("abandon", request)
    assert harness.holders(name) == [lease.holder]


def test_abandon_of_a_stranger_harms_nobody(harness: Harness, name: str) -> None:
    lease = harness.acquire(name)
    pending = harness.queue_up(name)
    harness.call_store("abandon", new_request(name, LockOptions(30.0, 10.0)))
    assert harness.holders(name) == [lease.holder]
    harness.do(lease.release)
    assert pending.result(WITHIN).token > lease.token


def test_dead_holder_is_followed_by_the_waiter(harness: Harness, name: str) -> None:
    first = harness.acquire(name, ttl=harness.short_ttl, renew=False)
    second = harness.acquire(name, wait=None)
    assert first.lost
    assert second.token > first.token


def test_hand_over_that_nobody_takes_up_passes_on(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.fair:
        pytest.skip("this store does not hand over")
    first = harness.acquire(name)
    ghost = new_request(name, LockOptions(30.0, None))
    harness.call_store("try_acquire", ghost)
    pending = harness.queue_up(name)
    harness.do(first.release)
    assert harness.holders(name) == [ghost.holder]
    assert ghost.holder not in [waiter.holder for waiter in harness.state(name).waiters]
    second = pending.result(WITHIN)
    assert harness.holders(name) == [second.holder]
    harness.call_store("abandon", ghost)
    assert harness.holders(name) == [second.holder]
