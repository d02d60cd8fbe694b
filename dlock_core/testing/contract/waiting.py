"""First come, first served; whoever gives up, dies or is too late leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import new_request
from dlock_core.errors import AcquireTimeout
from dlock_core.testing.contract.observed import WITHIN
from dlock_core.testing.contract.tasks import Tasks

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

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


def test_try_acquire_never_waits(locks: Locks, name: str) -> None:
    locks.acquire(name)
    assert locks.try_acquire(name, wait=None) is None
    assert locks.asked("wait", name) == []
    assert locks.state(name).waiters == ()


def test_wait_of_zero_is_one_try(locks: Locks, name: str) -> None:
    locks.acquire(name)
    with pytest.raises(AcquireTimeout):
        locks.acquire(name, wait=0)
    assert len(locks.asked("try_acquire", name)) == 2
    assert locks.asked("wait", name) == []
    assert locks.state(name).waiters == ()


def test_timeout_tells_who_holds_and_what_to_do(locks: Locks, name: str) -> None:
    locks.acquire(name)
    with pytest.raises(AcquireTimeout, match="try again") as caught:
        locks.acquire(name, wait=0.05)
    error = caught.value
    assert error.name == name
    assert error.waited >= 0.05
    assert "pid" in error.held_by
    assert error.retry_after > 0


def test_released_lock_belongs_to_the_waiter_at_once(locks: Locks, name: str) -> None:
    if not locks.store.capabilities.fair:
        pytest.skip("this store does not hand over")
    first = locks.acquire(name)
    pending = locks.queue_up(name)
    locks.do(first.release)
    assert locks.try_acquire(name) is None
    second = pending.result(WITHIN)
    assert second.token > first.token
    assert locks.holders(name) == [second.holder]


def test_waiter_needs_one_question_after_the_release(locks: Locks, name: str) -> None:
    first = locks.acquire(name)
    pending = locks.queue_up(name)
    before = len(locks.asked("try_acquire", name))
    locks.do(first.release)
    pending.result(WITHIN)
    assert len(locks.asked("try_acquire", name)) <= before + 1


def test_waiters_are_served_first_come_first_served(locks: Locks, name: str) -> None:
    if not locks.store.capabilities.fair:
        pytest.skip("this store serves in any order")
    current = locks.acquire(name)
    line = [locks.queue_up(name) for _ in range(5)]
    if locks.store.capabilities.lists_waiters:
        assert [waiter.holder for waiter in locks.state(name).waiters] == locks.waiting(name)
    while line:
        locks.do(current.release)
        first, *line = line
        current = first.result(WITHIN)
        assert not any(other.done() for other in line)


def test_waiter_that_gives_up_leaves_its_place(locks: Locks, name: str) -> None:
    first = locks.acquire(name)
    with pytest.raises(AcquireTimeout):
        locks.acquire(name, wait=0.02)
    assert locks.state(name).waiters == ()
    locks.do(first.release)
    assert locks.holders(name) == []


def test_cancelled_waiter_leaves_its_place(locks: Locks, name: str) -> None:
    if not isinstance(locks, Tasks):
        pytest.skip("threads cannot be cancelled")
    first = locks.acquire(name)
    pending = locks.queue_up(name)
    pending.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(WITHIN)
    locks.observed.until(lambda _: bool(locks.asked("abandon", name)))
    locks.until(lambda: locks.state(name).waiters == ())
    locks.do(first.release)
    assert locks.holders(name) == []


def test_abandon_undoes_a_grant_and_hands_over(locks: Locks, name: str) -> None:
    request = new_request(name, 30.0, 10.0, shared=False, fair=True)
    locks.ask("try_acquire", request)
    pending = locks.queue_up(name)
    locks.ask("abandon", request)
    lease = pending.result(WITHIN)
    locks.ask("abandon", request)
    assert locks.holders(name) == [lease.holder]


def test_abandon_of_a_stranger_harms_nobody(locks: Locks, name: str) -> None:
    lease = locks.acquire(name)
    pending = locks.queue_up(name)
    locks.ask("abandon", new_request(name, 30.0, 10.0, shared=False, fair=True))
    assert locks.holders(name) == [lease.holder]
    locks.do(lease.release)
    assert pending.result(WITHIN).token > lease.token


def test_dead_holder_is_followed_by_the_waiter(locks: Locks, name: str) -> None:
    first = locks.acquire(name, ttl=locks.short, renew=False)
    second = locks.acquire(name, wait=None)
    assert first.lost
    assert second.token > first.token


def test_hand_over_that_nobody_takes_up_passes_on(locks: Locks, name: str) -> None:
    if not locks.store.capabilities.fair:
        pytest.skip("this store does not hand over")
    first = locks.acquire(name)
    ghost = new_request(name, 30.0, None, shared=False, fair=True)
    locks.ask("try_acquire", ghost)
    pending = locks.queue_up(name)
    locks.do(first.release)
    assert locks.holders(name) == [ghost.holder]
    assert ghost.holder not in [waiter.holder for waiter in locks.state(name).waiters]
    second = pending.result(WITHIN)
    assert locks.holders(name) == [second.holder]
    locks.ask("abandon", ghost)
    assert locks.holders(name) == [second.holder]
