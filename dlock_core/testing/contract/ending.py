"""How a lease ends, and what its holder is told."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from dlock_core.backend import Released
from dlock_core.errors import LeaseLost
from dlock_core.observability import hooks

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

__all__ = [
    "test_a_block_releases_its_lock",
    "test_body_that_failed_keeps_its_own_error_when_the_lease_was_lost",
    "test_clean_body_whose_lease_was_lost_ends_in_an_error",
    "test_lease_thrown_away_warns_and_runs_out",
    "test_lost_lease_is_told_once",
    "test_release_answers_expired_when_the_time_was_over",
    "test_release_answers_stolen_when_another_holds",
    "test_release_from_another_party_is_a_release",
    "test_second_release_gives_the_first_answer",
]


def test_second_release_gives_the_first_answer(locks: Locks, name: str) -> None:
    first = locks.acquire(name)
    assert locks.do(first.release) is Released.RELEASED
    second = locks.acquire(name)
    assert locks.do(first.release) is Released.RELEASED
    assert locks.holders(name) == [second.holder]


def test_release_from_another_party_is_a_release(locks: Locks, name: str) -> None:
    alice, bob = locks.party(), locks.party()
    lease = alice.do(locks.lock(name).acquire)
    assert bob.do(lease.release) is Released.RELEASED
    assert locks.keep(alice.do(locks.lock(name).acquire)).token > lease.token


def test_release_answers_expired_when_the_time_was_over(locks: Locks, name: str) -> None:
    lease = locks.acquire(name, ttl=locks.short, renew=False)
    locks.until(lambda: locks.holders(name) == [])
    assert lease.lost
    assert locks.do(lease.release) is Released.EXPIRED
    assert locks.do(lease.release) is Released.EXPIRED


def test_release_answers_stolen_when_another_holds(locks: Locks, name: str) -> None:
    first = locks.acquire(name, ttl=locks.short, renew=False)
    second = locks.acquire(name, wait=None)
    assert locks.do(first.release) is Released.STOLEN
    assert locks.holders(name) == [second.holder]


def test_a_block_releases_its_lock(locks: Locks, name: str) -> None:
    lease = locks.do(lambda: locks.block(locks.lock(name), lambda lease: lease))
    assert lease.remaining() == 0.0
    assert not lease.lost
    assert locks.holders(name) == []
    with pytest.raises(ZeroDivisionError):
        locks.do(lambda: locks.block(locks.lock(name), lambda _: 1 // 0))
    assert locks.holders(name) == []


def test_clean_body_whose_lease_was_lost_ends_in_an_error(locks: Locks, name: str) -> None:
    def body(lease: Any) -> None:
        _let_run_out(locks, lease)

    with pytest.raises(LeaseLost) as caught:
        locks.do(lambda: locks.block(locks.lock(name, ttl=locks.short, renew=False), body))
    assert caught.value.name == name
    assert caught.value.token > 0


def test_body_that_failed_keeps_its_own_error_when_the_lease_was_lost(locks: Locks, name: str) -> None:
    def body(lease: Any) -> None:
        _let_run_out(locks, lease)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        locks.do(lambda: locks.block(locks.lock(name, ttl=locks.short, renew=False), body))


def _let_run_out(locks: Locks, lease: Any) -> None:
    locks.until(lambda: locks.holders(lease.name) == [])
    assert lease.lost
    with pytest.raises(LeaseLost):
        lease.ensure_held()


def test_lost_lease_is_told_once(locks: Locks, name: str) -> None:
    told: list[str] = []
    events: list[hooks.Event] = []
    hooks.subscribe(events.append)
    try:
        lease = locks.acquire(name, ttl=locks.kept, on_lost=lambda: told.append(name))
        assert locks.ask("force_release", name, lease.token)
        locks.until(lambda: told)
        assert lease.lost
        assert lease.remaining() == 0.0
        with pytest.raises(LeaseLost, match="start over"):
            lease.ensure_held()
        with pytest.raises(LeaseLost):
            locks.do(lease.renew)
        assert locks.do(lease.release) is Released.EXPIRED
        locks.until(lambda: len([event for event in events if event.name == name]) == 3)
    finally:
        hooks.unsubscribe(events.append)
    assert told == [name]
    assert [event.kind for event in events if event.name == name] == ["acquired", "lost", "released"]


def test_lease_thrown_away_warns_and_runs_out(locks: Locks, name: str) -> None:
    lease = locks.do(locks.lock(name, ttl=locks.kept).acquire)
    token, holder = lease.token, lease.holder
    locks.observed.until(lambda calls: sum(call.what == "renew" and holder in call.holders for call in calls) > 1)
    with pytest.warns(ResourceWarning, match="never released"):
        del lease
        gc.collect()
    assert locks.acquire(name, wait=None).token > token
