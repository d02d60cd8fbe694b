"""Shared holders are in together, exclusive ones alone, and neither kind starves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlock_core.backend import Released
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

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


def test_shared_holders_are_in_together(sharing: Locks, name: str) -> None:
    leases = [sharing.acquire(name, shared=True) for _ in range(3)]
    assert all(lease.shared for lease in leases)
    assert len({lease.token for lease in leases}) == 3
    assert sorted(sharing.holders(name)) == sorted(lease.holder for lease in leases)
    assert [sharing.do(lease.release) for lease in leases] == [Released.RELEASED] * 3
    assert sharing.holders(name) == []


def test_shared_holder_keeps_exclusive_ones_out(sharing: Locks, name: str) -> None:
    first, second = sharing.acquire(name, shared=True), sharing.acquire(name, shared=True)
    assert sharing.try_acquire(name) is None
    sharing.do(first.release)
    assert sharing.try_acquire(name) is None
    sharing.do(second.release)
    assert sharing.try_acquire(name) is not None


def test_exclusive_holder_keeps_shared_ones_out(sharing: Locks, name: str) -> None:
    lease = sharing.acquire(name)
    assert sharing.try_acquire(name, shared=True) is None
    sharing.do(lease.release)
    assert sharing.try_acquire(name, shared=True).token > lease.token


def test_exclusive_waiter_stops_new_shared_holders(sharing: Locks, name: str) -> None:
    reader = sharing.acquire(name, shared=True)
    writer = sharing.queue_up(name)
    late = sharing.queue_up(name, shared=True)
    assert sharing.try_acquire(name, shared=True) is None
    assert not late.done()
    sharing.do(reader.release)
    written = writer.result(WITHIN)
    assert not late.done()
    sharing.do(written.release)
    assert late.result(WITHIN).token > written.token > reader.token


def test_shared_waiters_come_in_together(sharing: Locks, name: str) -> None:
    writer = sharing.acquire(name)
    readers = [sharing.queue_up(name, shared=True) for _ in range(3)]
    last = sharing.queue_up(name)
    sharing.do(writer.release)
    leases = [reader.result(WITHIN) for reader in readers]
    assert len(sharing.holders(name)) == 3
    assert not last.done()
    for lease in leases:
        sharing.do(lease.release)
    assert last.result(WITHIN).token > max(lease.token for lease in leases)


def test_each_shared_holder_has_its_own_expiry(sharing: Locks, name: str) -> None:
    long = sharing.acquire(name, shared=True)
    short = sharing.acquire(name, shared=True, ttl=sharing.short, renew=False)
    sharing.until(lambda: sharing.holders(name) == [long.holder])
    assert short.lost
    assert not long.lost
    assert sharing.try_acquire(name) is None
    waiter = sharing.queue_up(name)
    sharing.do(long.release)
    waiter.result(WITHIN)


def test_share_that_ran_out_is_not_released_but_expired(sharing: Locks, name: str) -> None:
    sharing.acquire(name, shared=True)
    short = sharing.acquire(name, shared=True, ttl=sharing.short, renew=False)
    sharing.until(lambda: len(sharing.holders(name)) == 1)
    assert sharing.do(short.release) is not Released.RELEASED


def test_shared_lease_is_renewed(sharing: Locks, name: str) -> None:
    leases = [sharing.acquire(name, shared=True, ttl=sharing.kept) for _ in range(2)]
    sharing.observed.until(lambda _: all(sharing.renewals(lease) >= 5 for lease in leases))
    assert sorted(sharing.holders(name)) == sorted(lease.holder for lease in leases)
    assert not any(lease.lost for lease in leases)
