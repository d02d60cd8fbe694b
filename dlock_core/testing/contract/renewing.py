"""A lease lasts while it is renewed, and a gap is never closed behind the holder's back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlock_core.backend import Renewal, RenewalFailure
from dlock_core.errors import LeaseLost
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_many_leases_are_renewed_by_one_question",
    "test_released_lease_is_not_renewed_any_more",
    "test_renewal_after_the_end_never_takes_the_lock_again",
    "test_renewal_by_hand_pushes_the_expiry",
    "test_renewal_that_comes_late_shortens_no_lease",
    "test_renewals_are_answered_one_by_one",
    "test_watchdog_keeps_a_lease_for_many_times_its_ttl",
]


def test_renewal_by_hand_pushes_the_expiry(harness: Harness, name: str) -> None:
    lease = harness.acquire(name, ttl=20.0, renew=False)
    harness.do(lambda: lease.renew(60))
    assert 30 < lease.remaining() <= 60
    assert not lease.lost
    (holder,) = harness.state(name).holders
    assert holder.expires_in is None or 30 < holder.expires_in <= 60


def test_renewal_after_the_end_never_takes_the_lock_again(harness: Harness, name: str) -> None:
    lease = harness.acquire(name, ttl=harness.short_ttl, renew=False)
    harness.until(lambda: harness.holders(name) == [])
    with pytest.raises(LeaseLost):
        harness.do(lease.renew)
    request = new_request(name, LockOptions(30.0, 0.0))
    granted = harness.call_store("try_acquire", request)
    harness.call_store("release", request, granted)
    assert harness.call_store("renew", [Renewal(request, granted)]) == [RenewalFailure.LOST]
    assert harness.holders(name) == []


@pytest.mark.parametrize("shared", [False, True])
def test_renewal_that_comes_late_shortens_no_lease(harness: Harness, name: str, *, shared: bool) -> None:
    """One that went unanswered may come to the store after another one, for a longer ttl, which was answered."""
    if shared and not harness.store.capabilities.shared:
        pytest.skip("this store has no shared locks")
    request = new_request(name, LockOptions(20.0, 0.0, shared))
    granted = harness.call_store("try_acquire", request)
    (valid_for,) = harness.call_store("renew", [Renewal(request._replace(ttl=60.0), granted)])
    assert harness.call_store("renew", [Renewal(request, granted)])[0] <= 20.0
    (holder,) = harness.state(name).holders
    assert holder.expires_in is None or holder.expires_in > valid_for - 20.0
    harness.call_store("abandon", request)


def test_renewals_are_answered_one_by_one(harness: Harness, name: str) -> None:
    names = [f"{name}:{number}" for number in range(4)]
    requests = [new_request(each, LockOptions(30.0, 0.0)) for each in names]
    renewals = [Renewal(request, harness.call_store("try_acquire", request)) for request in requests]
    harness.call_store("release", requests[1], renewals[1].granted)
    other = harness.acquire(names[1])
    harness.call_store("release", requests[2], renewals[2].granted)
    answers = harness.call_store("renew", renewals)
    assert [answer is RenewalFailure.LOST for answer in answers] == [False, True, True, False]
    assert all(isinstance(answer, RenewalFailure) or answer > 0 for answer in answers)
    assert harness.holders(names[1]) == [other.holder]
    for request in requests:
        harness.call_store("abandon", request)


def test_watchdog_keeps_a_lease_for_many_times_its_ttl(harness: Harness, name: str) -> None:
    lease = harness.acquire(name, ttl=harness.renewed_ttl)
    harness.observed.until(lambda _: harness.renewals(lease) >= 5)
    assert not lease.lost
    assert harness.holders(name) == [lease.holder]
    harness.do(lease.release)


def test_many_leases_are_renewed_by_one_question(harness: Harness, name: str) -> None:
    if harness.store.capabilities.expiry == "connection":
        pytest.skip("each lease of this store has its own connection")
    for number in range(20):
        harness.acquire(f"{name}:{number}", ttl=harness.renewed_ttl)
    harness.observed.until(lambda calls: any(len(call.holders) > 1 for call in calls if call.method == "renew"))


def test_released_lease_is_not_renewed_any_more(harness: Harness, name: str) -> None:
    released, kept = (
        harness.acquire(f"{name}:1", ttl=harness.renewed_ttl),
        harness.acquire(f"{name}:2", ttl=harness.renewed_ttl),
    )
    harness.observed.until(lambda _: harness.renewals(released) >= 1)
    harness.do(released.release)
    before, since = harness.renewals(released), harness.renewals(kept)
    harness.observed.until(lambda _: harness.renewals(kept) >= since + 2)
    assert harness.renewals(released) <= before + 1  # one may have been on its way
