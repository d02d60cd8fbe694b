"""A lease lasts while it is renewed, and a gap is never closed behind the holder's back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Renewal, RenewalFailure, new_request
from dlock_core.errors import LeaseLost

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

__all__ = [
    "test_many_leases_are_renewed_by_one_question",
    "test_released_lease_is_not_renewed_any_more",
    "test_renewal_after_the_end_never_takes_the_lock_again",
    "test_renewal_by_hand_pushes_the_expiry",
    "test_renewals_are_answered_one_by_one",
    "test_watchdog_keeps_a_lease_for_many_times_its_ttl",
]


def test_renewal_by_hand_pushes_the_expiry(locks: Locks, name: str) -> None:
    lease = locks.acquire(name, ttl=locks.short, renew=False)
    locks.do(lambda: lease.renew(60))
    assert 30 < lease.remaining() <= 60
    assert not lease.lost
    (holder,) = locks.state(name).holders
    assert holder.expires_in is None or 30 < holder.expires_in <= 60


def test_renewal_after_the_end_never_takes_the_lock_again(locks: Locks, name: str) -> None:
    lease = locks.acquire(name, ttl=locks.short, renew=False)
    locks.until(lambda: locks.holders(name) == [])
    with pytest.raises(LeaseLost):
        locks.do(lease.renew)
    request = new_request(name, 30.0, 0.0, shared=False, fair=True)
    granted = locks.ask("try_acquire", request)
    locks.ask("release", request, granted)
    assert locks.ask("renew", [Renewal(request, granted)]) == [RenewalFailure.LOST]
    assert locks.holders(name) == []


def test_renewals_are_answered_one_by_one(locks: Locks, name: str) -> None:
    names = [f"{name}:{number}" for number in range(4)]
    requests = [new_request(each, 30.0, 0.0, shared=False, fair=True) for each in names]
    renewals = [Renewal(request, locks.ask("try_acquire", request)) for request in requests]
    locks.ask("release", requests[1], renewals[1].granted)
    other = locks.acquire(names[1])
    locks.ask("release", requests[2], renewals[2].granted)
    answers = locks.ask("renew", renewals)
    assert [answer is RenewalFailure.LOST for answer in answers] == [False, True, True, False]
    assert all(isinstance(answer, RenewalFailure) or answer > 0 for answer in answers)
    assert locks.holders(names[1]) == [other.holder]
    for request in requests:
        locks.ask("abandon", request)


def test_watchdog_keeps_a_lease_for_many_times_its_ttl(locks: Locks, name: str) -> None:
    lease = locks.acquire(name, ttl=locks.kept)
    locks.observed.until(lambda _: locks.renewals(lease) >= 5)
    assert not lease.lost
    assert locks.holders(name) == [lease.holder]
    locks.do(lease.release)


def test_many_leases_are_renewed_by_one_question(locks: Locks, name: str) -> None:
    for number in range(20):
        locks.acquire(f"{name}:{number}", ttl=locks.kept)
    locks.observed.until(lambda calls: any(len(call.holders) > 1 for call in calls if call.what == "renew"))


def test_released_lease_is_not_renewed_any_more(locks: Locks, name: str) -> None:
    released, kept = locks.acquire(f"{name}:1", ttl=locks.kept), locks.acquire(f"{name}:2", ttl=locks.kept)
    locks.observed.until(lambda _: locks.renewals(released) >= 1)
    locks.do(released.release)
    before, since = locks.renewals(released), locks.renewals(kept)
    locks.observed.until(lambda _: locks.renewals(kept) >= since + 2)
    assert locks.renewals(released) <= before + 1  # one may have been on its way
