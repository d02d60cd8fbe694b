"""Shared holders are in together, exclusive ones alone, and neither kind starves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlock_core.backend import Released
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_each_shared_holder_has_its_own_expiry",
    "test_exclusive_holder_keeps_shared_ones_out",
    "test_exclusive_waiter_stops_new_shared_holders",
    "test_share_that_ran_out_is_not_released_but_expired",
    "test_shared_holder_keeps_exclusive_ones_out",
    "test_shared_holders_are_in_together",
    "test_shared_lease_is_renewed",
    "test_shared_waiters_come_in_together",
]


def test_shared_holders_are_in_together(shared_harness: Harness, name: str) -> None:
    leases = [shared_harness.acquire(name, shared=True) for _ in range(3)]
    assert all(lease.shared for lease in leases)
    assert len({lease.token for lease in leases}) == 3
    assert sorted(shared_harness.holders(name)) == sorted(lease.holder for lease in leases)
    assert [shared_harness.do(lease.release) for lease in leases] == [Released.RELEASED] * 3
    assert shared_harness.holders(name) == []


def test_shared_holder_keeps_exclusive_ones_out(shared_harness: Harness, name: str) -> None:
    first, second = shared_harness.acquire(name, shared=True), shared_harness.acquire(name, shared=True)
    assert shared_harness.try_acquire(name) is None
    shared_harness.do(first.release)
    assert shared_harness.try_acquire(name) is None
    shared_harness.do(second.release)
    assert shared_harness.try_acquire(name) is not None


def test_exclusive_holder_keeps_shared_ones_out(shared_harness: Harness, name: str) -> None:
    lease = shared_harness.acquire(name)
    assert shared_harness.try_acquire(name, shared=True) is None
    shared_harness.do(lease.release)
    assert shared_harness.try_acquire(name, shared=True).token > lease.token


def test_exclusive_waiter_stops_new_shared_holders(shared_harness: Harness, name: str) -> None:
    reader = shared_harness.acquire(name, shared=True)
    writer = shared_harness.queue_up(name)
    late = shared_harness.queue_up(name, shared=True)
    assert shared_harness.try_acquire(name, shared=True) is None
    assert not late.done()
    shared_harness.do(reader.release)
    written = writer.result(WITHIN)
    assert not late.done()
    shared_harness.do(written.release)
    assert late.result(WITHIN).token > written.token > reader.token


def test_shared_waiters_come_in_together(shared_harness: Harness, name: str) -> None:
    writer = shared_harness.acquire(name)
    readers = [shared_harness.queue_up(name, shared=True) for _ in range(3)]
    last = shared_harness.queue_up(name)
    shared_harness.do(writer.release)
    leases = [reader.result(WITHIN) for reader in readers]
    assert len(shared_harness.holders(name)) == 3
    assert not last.done()
    for lease in leases:
        shared_harness.do(lease.release)
    assert last.result(WITHIN).token > max(lease.token for lease in leases)


def test_each_shared_holder_has_its_own_expiry(shared_harness: Harness, name: str) -> None:
    long = shared_harness.acquire(name, shared=True)
    short = shared_harness.acquire(name, shared=True, ttl=shared_harness.short_ttl, renew=False)
    shared_harness.until(lambda: shared_harness.holders(name) == [long.holder])
    assert short.lost
    assert not long.lost
    assert shared_harness.try_acquire(name) is None
    waiter = shared_harness.queue_up(name)
    shared_harness.do(long.release)
    waiter.result(WITHIN)


def test_share_that_ran_out_is_not_released_but_expired(shared_harness: Harness, name: str) -> None:
    shared_harness.acquire(name, shared=True)
    short = shared_harness.acquire(name, shared=True, ttl=shared_harness.short_ttl, renew=False)
    shared_harness.until(lambda: len(shared_harness.holders(name)) == 1)
    assert shared_harness.do(short.release) is not Released.RELEASED


def test_shared_lease_is_renewed(shared_harness: Harness, name: str) -> None:
    leases = [shared_harness.acquire(name, shared=True, ttl=shared_harness.renewed_ttl) for _ in range(2)]
    shared_harness.observed.until(lambda _: all(shared_harness.renewals(lease) >= 5 for lease in leases))
    assert sorted(shared_harness.holders(name)) == sorted(lease.holder for lease in leases)
    assert not any(lease.lost for lease in leases)
