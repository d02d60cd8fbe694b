"""Bad input is refused before the store is asked anything, by an error that says what was wrong."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from dlock_core.backend import Capabilities
from dlock_core.errors import NotSupported
from dlock_core.testing.contract.observed import Observed

if TYPE_CHECKING:
    from dlock_core.testing.contract.harness import Harness

__all__ = [
    "test_bad_name_is_refused_before_any_question",
    "test_bad_ttl_is_refused_before_any_question",
    "test_bad_ttl_of_a_renewal_is_refused_before_any_question",
    "test_bad_wait_is_refused_before_any_question",
    "test_what_the_store_cannot_do_is_refused_before_any_question",
]

BAD_TTLS: Final = (0, 0.0, -1, math.nan, math.inf, -math.inf, True, "30", b"30", 1e12, 10**400, timedelta(0), [30])
BAD_WAITS: Final = (-1, -0.001, math.nan, math.inf, True, False, "10", timedelta(seconds=-1), [10])
BAD_NAMES: Final = ("", ":", "a:", ":a", "a::b", "x" * 513, "ä" * 86, None, 42, b"a", ["a"])


@pytest.mark.parametrize("ttl", BAD_TTLS, ids=repr)
def test_bad_ttl_is_refused_before_any_question(harness: Harness, name: str, ttl: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="ttl"):
        harness.acquire(name, ttl=ttl)
    assert harness.observed.calls == []


@pytest.mark.parametrize("wait", BAD_WAITS, ids=repr)
def test_bad_wait_is_refused_before_any_question(harness: Harness, name: str, wait: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="wait"):
        harness.acquire(name, wait=wait)
    assert harness.observed.calls == []


@pytest.mark.parametrize("bad", BAD_NAMES, ids=lambda bad: repr(bad)[:20])
def test_bad_name_is_refused_before_any_question(harness: Harness, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        harness.acquire(bad)
    assert harness.observed.calls == []


def test_bad_ttl_of_a_renewal_is_refused_before_any_question(harness: Harness, name: str) -> None:
    lease = harness.acquire(name)
    before = len(harness.observed.calls)
    for ttl in (0, math.nan, "30"):
        with pytest.raises((ValueError, TypeError), match="ttl"):
            harness.do(partial(lease.renew, ttl))
    assert len(harness.observed.calls) == before


def test_what_the_store_cannot_do_is_refused_before_any_question(harness: Harness, name: str) -> None:
    class WithoutShared(Observed):
        capabilities = Capabilities()

    plain = WithoutShared(harness.observed.backend)
    harness.store = plain
    with pytest.raises(NotSupported, match="shared"):
        harness.acquire(name, shared=True)
    assert plain.calls == []
