"""How a lease ends, and what its holder learns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, LeaseLost
from dlock_core.observability import hooks

if TYPE_CHECKING:
    from dlock_core.backend import AcquireRequest, Granted
    from dlock_core.runtime import Runtime
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_a_block_releases_its_lock",
    "test_body_that_failed_keeps_its_own_error_when_the_lease_was_lost",
    "test_clean_body_whose_lease_was_lost_ends_in_an_error",
    "test_lease_thrown_away_warns_and_runs_out",
    "test_lost_lease_is_told_once",
    "test_release_answers_expired_when_the_time_was_over",
    "test_release_answers_stolen_when_another_holds",
    "test_release_by_another_actor_is_a_release",
    "test_release_that_could_not_be_carried_out_is_repeated_until_it_is",
    "test_second_release_gives_the_first_answer",
]

LONG_TTL_S: Final = 1000.0
"""No test waits for so long."""
FAILURES: Final = 4
"""The releases that fail: two for the caller, and more in the background."""


def test_second_release_gives_the_first_answer(harness: Harness, name: str) -> None:
    first = harness.acquire(name)
    assert harness.do(first.release) is Released.RELEASED
    second = harness.acquire(name)
    assert harness.do(first.release) is Released.RELEASED
    assert harness.holders(name) == [second.holder]


def test_release_by_another_actor_is_a_release(harness: Harness, name: str) -> None:
    alice, bob = harness.actor(), harness.actor()
    lease = alice.do(harness.lock(name).acquire)
    assert bob.do(lease.release) is Released.RELEASED
    assert harness.keep(alice.do(harness.lock(name).acquire)).token > lease.token


def test_release_answers_expired_when_the_time_was_over(harness: Harness, name: str) -> None:
    lease = harness.acquire(name, ttl=harness.short_ttl, renew=False)
    harness.until(lambda: harness.holders(name) == [])
    assert lease.lost
    assert harness.do(lease.release) is Released.EXPIRED
    assert harness.do(lease.release) is Released.EXPIRED


def test_release_answers_stolen_when_another_holds(harness: Harness, name: str) -> None:
    first = harness.acquire(name, ttl=harness.short_ttl, renew=False)
    second = harness.acquire(name, wait=None)
    assert harness.do(first.release) is Released.STOLEN
    assert harness.holders(name) == [second.holder]


def test_release_that_could_not_be_carried_out_is_repeated_until_it_is(harness: Harness, name: str) -> None:
    """The lock is free long before its ttl is over, and before any caller releases it again."""
    lease, asked, answer = harness.acquire(name, ttl=LONG_TTL_S), [], harness.observed.release

    async def release(runtime: Runtime, request: AcquireRequest, granted: Granted) -> Any:
        asked.append(request.holder)
        if len(asked) <= FAILURES:
            raise BackendUnavailable(name, reason="a test keeps it from the store")
        return await answer(runtime, request, granted)

    harness.observed.release = release  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)
    assert not lease.lost
    harness.until(lambda: harness.holders(name) == [])
    assert harness.do(lease.release) is Released.RELEASED
    assert {*asked} == {lease.holder}


def test_a_block_releases_its_lock(harness: Harness, name: str) -> None:
    lease = harness.do(lambda: harness.block(harness.lock(name), lambda lease: lease))
    assert lease.remaining() == 0.0
    assert not lease.lost
    assert harness.holders(name) == []
    with pytest.raises(ZeroDivisionError):
        harness.do(lambda: harness.block(harness.lock(name), lambda _: 1 // 0))
    assert harness.holders(name) == []


def test_clean_body_whose_lease_was_lost_ends_in_an_error(harness: Harness, name: str) -> None:
    def body(lease: Any) -> None:
        _let_run_out(harness, lease)

    with pytest.raises(LeaseLost) as caught:
        harness.do(lambda: harness.block(harness.lock(name, ttl=harness.short_ttl, renew=False), body))
    assert caught.value.name == name
    assert caught.value.token > 0


def test_body_that_failed_keeps_its_own_error_when_the_lease_was_lost(harness: Harness, name: str) -> None:
    def body(lease: Any) -> None:
        _let_run_out(harness, lease)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        harness.do(lambda: harness.block(harness.lock(name, ttl=harness.short_ttl, renew=False), body))


def _let_run_out(harness: Harness, lease: Any) -> None:
    harness.until(lambda: harness.holders(lease.name) == [])
    assert lease.lost
    with pytest.raises(LeaseLost):
        lease.ensure_held()


def test_lost_lease_is_told_once(harness: Harness, name: str) -> None:
    told: list[str] = []
    events: list[hooks.Event] = []
    hooks.subscribe(events.append)
    try:
        lease = harness.acquire(name, ttl=harness.renewed_ttl, on_lost=lambda: told.append(name))
        assert harness.call_store("force_release", name, lease.token)
        harness.until(lambda: told)
        assert lease.lost
        assert lease.remaining() == 0.0
        with pytest.raises(LeaseLost, match="start over"):
            lease.ensure_held()
        with pytest.raises(LeaseLost):
            harness.do(lease.renew)
        assert harness.do(lease.release) is Released.EXPIRED
        harness.until(lambda: len([event for event in events if event.name == name]) == 3)
    finally:
        hooks.unsubscribe(events.append)
    assert told == [name]
    assert [event.kind for event in events if event.name == name] == ["acquired", "lost", "released"]


def test_lease_thrown_away_warns_and_runs_out(harness: Harness, name: str) -> None:
    # A client may refer to the frames of the call that connects until the next garbage collection, as redis-py does.
    harness.do(harness.acquire(name).release)
    lease = harness.do(harness.lock(name, ttl=harness.renewed_ttl).acquire)
    token, holder = lease.token, lease.holder
    harness.observed.until(lambda calls: sum(call.method == "renew" and holder in call.holders for call in calls) > 1)
    with pytest.warns(ResourceWarning, match="never released") as warned:
        del lease
        # The actor may refer to it for another moment. A garbage collection here could outlast the lease.
        harness.until(lambda: any("never released" in str(one.message) for one in warned))
    assert harness.acquire(name, wait=None).token > token
