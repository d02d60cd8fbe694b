"""Times given by callers are checked, and 0 never means "no limit"."""

import math
from datetime import timedelta
from decimal import Decimal

import pytest

from dlock_core.options import MAX_TTL_S, deadline, ttl_seconds, wait_seconds


@pytest.mark.parametrize(
    ("ttl", "seconds"), [(30, 30.0), (0.001, 0.001), (timedelta(minutes=1), 60.0), (MAX_TTL_S, MAX_TTL_S)]
)
def test_ttl_is_seconds_or_timedelta(ttl: object, seconds: float) -> None:
    assert ttl_seconds(ttl) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ttl", [0, -1, math.nan, math.inf, -math.inf, MAX_TTL_S + 1, 10**400, timedelta(0), timedelta(days=-1)]
)
def test_ttl_out_of_range_is_refused(ttl: object) -> None:
    with pytest.raises(ValueError, match="ttl must be more than 0"):
        ttl_seconds(ttl)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, False, "30", b"30", Decimal(30), [30], object], ids=repr)
def test_what_is_no_time_is_refused_by_its_type(value: object) -> None:
    for check in (ttl_seconds, wait_seconds):
        with pytest.raises(TypeError, match=type(value).__name__):
            check(value)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("wait", "seconds"), [(None, None), (0, 0.0), (0.5, 0.5), (timedelta(0), 0.0), (timedelta(seconds=2), 2.0)]
)
def test_wait_may_be_none_zero_or_finite(wait: object, seconds: float | None) -> None:
    assert wait_seconds(wait) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [-1, -0.001, math.nan, math.inf, 10**400, timedelta(seconds=-1)])
def test_wait_out_of_range_is_refused(wait: object) -> None:
    with pytest.raises(ValueError, match="wait must be None"):
        wait_seconds(wait)  # type: ignore[arg-type]


def test_deadline_is_one_moment_and_for_ever_has_none() -> None:
    assert deadline(100.0, 5.0) == 105.0
    assert deadline(100.0, 0.0) == 100.0
    assert deadline(100.0, None) == math.inf
