"""Several locks together: all or none, and never a deadlock."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.errors import AcquireTimeout

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_one_taken_name_leaves_none_of_several_held",
    "test_several_names_are_held_together_and_released_together",
    "test_transfers_in_both_directions_never_deadlock_and_lose_nothing",
]

TRANSFERS: Final = int(os.environ.get("DLOCK_CONTRACT_TRANSFERS", "60"))
"""Set it to thousands to try a store for long."""
ACTORS: Final = 4


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
