"""Several grants in one hand: a second handle of what one already holds, or several names, all or none."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.backend import Released
from dlock_core.errors import AcquireTimeout, AlreadyHeld

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_asking_again_for_a_lock_one_holds_is_an_error_at_once",
    "test_joined_lease_is_released_at_the_outermost_end",
    "test_joining_asks_the_store_nothing",
    "test_lock_that_was_released_may_be_asked_for_again",
    "test_one_taken_name_leaves_none_of_several_held",
    "test_several_names_are_held_together_and_released_together",
    "test_shared_holder_cannot_join_as_exclusive",
    "test_transfers_in_both_directions_never_deadlock_and_lose_nothing",
    "test_try_acquire_joins_as_well",
]

TRANSFERS: Final = int(os.environ.get("DLOCK_CONTRACT_TRANSFERS", "60"))
"""Set it to thousands to try a store for long."""
ACTORS: Final = 4


def test_asking_again_for_a_lock_one_holds_is_an_error_at_once(harness: Harness, name: str) -> None:
    alice = harness.actor()
    lease = harness.keep(alice.do(harness.lock(name).acquire))
    before = len(harness.observed.calls)
    with pytest.raises(AlreadyHeld, match="reentrant=True"):
        alice.do(harness.lock(name, wait=None).acquire)
    with pytest.raises(AlreadyHeld):
        alice.do(harness.lock(name).try_acquire)
    assert len(harness.observed.calls) == before
    assert harness.holders(name) == [lease.holder]


def test_joining_asks_the_store_nothing(harness: Harness, name: str) -> None:
    alice = harness.actor()
    outer = harness.keep(alice.do(harness.lock(name).acquire))
    before = len(harness.observed.calls)
    inner = harness.keep(alice.do(harness.lock(name, reentrant=True).acquire))
    assert (inner.token, inner.holder) == (outer.token, outer.holder)
    assert len(harness.observed.calls) == before


def test_joined_lease_is_released_at_the_outermost_end(harness: Harness, name: str) -> None:
    alice = harness.actor()
    handles = [harness.keep(alice.do(harness.lock(name, reentrant=True).acquire)) for _ in range(3)]
    for handle in handles[:2]:
        assert alice.do(handle.release) is Released.RELEASED
        assert alice.do(handle.release) is Released.RELEASED
        assert harness.holders(name) == [handles[0].holder]
        assert handles[2].remaining() > 0
    assert alice.do(handles[2].release) is Released.RELEASED
    assert harness.holders(name) == []


def test_try_acquire_joins_as_well(harness: Harness, name: str) -> None:
    alice = harness.actor()
    outer = harness.keep(alice.do(harness.lock(name).acquire))
    inner = harness.keep(alice.do(harness.lock(name, reentrant=True).try_acquire))
    assert inner.token == outer.token
    alice.do(outer.release)
    assert harness.holders(name) == [inner.holder]


def test_shared_holder_cannot_join_as_exclusive(harness: Harness, name: str) -> None:
    if not harness.store.capabilities.shared:
        pytest.skip("this store has no shared locks")
    alice = harness.actor()
    harness.keep(alice.do(harness.lock(name, shared=True).acquire))
    with pytest.raises(AlreadyHeld):
        alice.do(harness.lock(name, reentrant=True).acquire)


def test_lock_that_was_released_may_be_asked_for_again(harness: Harness, name: str) -> None:
    alice = harness.actor()
    first = alice.do(harness.lock(name).acquire)
    alice.do(first.release)
    second = harness.keep(alice.do(harness.lock(name).acquire))
    assert second.token > first.token


def test_several_names_are_held_together_and_released_together(harness: Harness, name: str) -> None:
    names = [f"{name}:{each}" for each in "ba"]
    lease = harness.do(harness.multilock([*names, names[0]]).acquire)
    assert [harness.try_acquire(each) for each in names] == [None, None]
    assert lease.remaining() > 0.0
    assert [answer.value for answer in harness.do(lease.release)] == ["released", "released"]
    assert all(harness.try_acquire(each) for each in names)


def test_one_taken_name_leaves_none_of_several_held(harness: Harness, name: str) -> None:
    taken = harness.acquire(f"{name}:b")
    with pytest.raises(AcquireTimeout) as refused:
        harness.do(harness.multilock([f"{name}:{each}" for each in "abc"], wait=0.05).acquire)
    assert refused.value.name == taken.name
    assert all(harness.try_acquire(f"{name}:{each}") for each in "ac")


def test_transfers_in_both_directions_never_deadlock_and_lose_nothing(harness: Harness, name: str) -> None:
    accounts = [f"{name}:{number}" for number in range(3)]
    rng = random.Random(name)  # noqa: S311 - for variety, not for secrets
    transfers = [[rng.sample(accounts, 2) for _ in range(TRANSFERS // ACTORS)] for _ in range(ACTORS)]
    balances = dict.fromkeys(accounts, 0)

    def move(pair: list[str]) -> Any:
        source, target = (balances[each] for each in pair)

        def write(_: Any) -> None:
            balances.update(zip(pair, (source - 1, target + 1), strict=True))

        return harness.then(harness.pause(), write)

    def transfer(pair: list[str]) -> Any:
        return harness.block(harness.multilock(pair, wait=None), lambda _: move(pair))

    for done in [harness.start(lambda own=own: harness.for_each(transfer, own)) for own in transfers]:  # type: ignore[misc]
        done.result()
    moves = [pair for own in transfers for pair in own]
    expected = {each: sum((each == target) - (each == source) for source, target in moves) for each in accounts}
    assert balances == expected
