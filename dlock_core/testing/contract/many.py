"""Several locks together: all or none, and never a deadlock."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.errors import AcquireTimeout

if TYPE_CHECKING:
    from dlock_core.testing.contract.parties import Locks

__all__ = [
    "test_one_taken_name_leaves_none_of_several_held",
    "test_several_names_are_held_together_and_released_together",
    "test_transfers_in_both_directions_never_deadlock_and_lose_nothing",
]

TRANSFERS: Final = int(os.environ.get("DLOCK_CONTRACT_TRANSFERS", "60"))
"""Set it to thousands to try a store for long."""
PARTIES: Final = 4


def test_several_names_are_held_together_and_released_together(locks: Locks, name: str) -> None:
    names = [f"{name}:{each}" for each in "ba"]
    lease = locks.do(locks.many([*names, names[0]]).acquire)
    assert [locks.try_acquire(each) for each in names] == [None, None]
    assert lease.remaining() > 0.0
    assert [answer.value for answer in locks.do(lease.release)] == ["released", "released"]
    assert all(locks.try_acquire(each) for each in names)


def test_one_taken_name_leaves_none_of_several_held(locks: Locks, name: str) -> None:
    taken = locks.acquire(f"{name}:b")
    with pytest.raises(AcquireTimeout) as refused:
        locks.do(locks.many([f"{name}:{each}" for each in "abc"], wait=0.05).acquire)
    assert refused.value.name == taken.name
    assert all(locks.try_acquire(f"{name}:{each}") for each in "ac")


def test_transfers_in_both_directions_never_deadlock_and_lose_nothing(locks: Locks, name: str) -> None:
    accounts = [f"{name}:{number}" for number in range(3)]
    chance = random.Random(name)  # noqa: S311 - for variety, not for secrets
    transfers = [[chance.sample(accounts, 2) for _ in range(TRANSFERS // PARTIES)] for _ in range(PARTIES)]
    balances = dict.fromkeys(accounts, 0)

    def move(pair: list[str]) -> Any:
        source, target = (balances[each] for each in pair)

        def write(_: Any) -> None:
            balances.update(zip(pair, (source - 1, target + 1), strict=True))

        return locks.after(locks.nap(), write)

    def transfer(pair: list[str]) -> Any:
        return locks.block(locks.many(pair, wait=None), lambda _: move(pair))

    for done in [locks.start(lambda own=own: locks.each(transfer, own)) for own in transfers]:  # type: ignore[misc]
        done.result()
    moves = [pair for own in transfers for pair in own]
    expected = {each: sum((each == target) - (each == source) for source, target in moves) for each in accounts}
    assert balances == expected
