"""One holder at a time, tokens that grow, names that never meet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.backend import Released
from dlock_core.leases.acquisition import new_request
from dlock_core.names import canonical, join
from dlock_core.options import LockOptions

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_a_holder_that_asks_twice_has_one_grant",
    "test_each_name_is_a_lock_of_its_own",
    "test_longest_name_is_a_lock_as_any_other",
    "test_second_asker_gets_nothing_until_first_releases",
    "test_sections_never_overlap",
    "test_token_above_the_floor_that_was_asked_for",
    "test_tokens_grow",
]

NAMES: Final = (
    "order", "Order", "order:1", "order:10", "order:1:0", canonical("order%3A1"), join("order", "1%30"), "ördér", "注文", "😀",
    join("a b"), join("a+b"), join("{a}"), join("}{"), join("{}a"), join("a\nb"), join("a\r\nDEL a"), join("*"),
    join("a*"), join("[a]"), join("?"), join("%"), join("%s"), join("\0"), join("'"), join('"'), join("../a"), join("/a"),
    join(b"\xff"), "order:q", "order:w", "order:s", "order:o", "order:wake", "token", "held", "-", "~", ".",
)  # fmt: skip
"""What a URL or a careless caller may make of a name; no two are the same lock."""


def test_second_asker_gets_nothing_until_first_releases(harness: Harness, name: str) -> None:
    first = harness.acquire(name)
    assert harness.try_acquire(name) is None
    harness.do(first.release)
    assert harness.try_acquire(name) is not None


def test_sections_never_overlap(harness: Harness, name: str) -> None:
    seen: list[Any] = []

    def section(lease: Any) -> Any:
        seen.append(lease.token)
        return harness.pause()

    def work() -> Any:
        return harness.block(harness.lock(name, wait=None), section)

    for done in [harness.start(work) for _ in range(12)]:
        done.result()
    assert len(seen) == 12
    assert seen == sorted(set(seen))


def test_tokens_grow(harness: Harness, name: str) -> None:
    tokens = []
    for _ in range(5):
        lease = harness.acquire(name)
        tokens.append(lease.token)
        harness.do(lease.release)
    assert tokens == sorted(set(tokens))
    assert tokens[0] > 0


def test_token_above_the_floor_that_was_asked_for(harness: Harness, name: str) -> None:
    lease = harness.acquire(name)
    harness.do(lease.release)
    floor = lease.token + 1_000_000_000
    request = new_request(name, LockOptions(30.0, 0.0))
    first = harness.call_store("try_acquire", request)
    assert first.token > lease.token
    raised = type(request)(name, request.holder, 30.0, queue=False, floor=floor)
    second = harness.call_store("try_acquire", raised)
    assert second.token > floor
    assert harness.call_store("release", raised, second) is Released.RELEASED
    assert harness.acquire(name).token > second.token


def test_a_holder_that_asks_twice_has_one_grant(harness: Harness, name: str) -> None:
    request = new_request(name, LockOptions(30.0, 10.0))
    first = harness.call_store("try_acquire", request)
    again = harness.call_store("try_acquire", request, unsure=True)
    assert again.token == first.token
    assert harness.call_store("release", request, first) is Released.RELEASED
    assert harness.call_store("release", request, first) is Released.EXPIRED
    assert harness.holders(name) == []


def test_each_name_is_a_lock_of_its_own(harness: Harness, name: str) -> None:
    names = [canonical(f"{name}:{each}") for each in NAMES]
    leases = [harness.acquire(each) for each in names]
    assert [lease.name for lease in leases] == names
    for each, lease in zip(names, leases, strict=True):
        assert harness.try_acquire(each) is None
        assert harness.holders(each) == [lease.holder]
        assert harness.do(lease.release) is Released.RELEASED
        assert harness.holders(each) == []


@pytest.mark.parametrize("char", ["x", "é"])
def test_longest_name_is_a_lock_as_any_other(harness: Harness, name: str, char: str) -> None:
    room = 512 - len(name) - 1
    long = canonical(f"{name}:{char * (room // len(join(char)))}")
    lease = harness.acquire(long)
    assert harness.try_acquire(long) is None
    assert harness.state(long).name == long
    assert harness.do(lease.release) is Released.RELEASED
