"""The limit to the wait for a row, in the unit and within the bounds of each database."""

import pytest

from dlock_core.sql.row_locks import milliseconds, whole_seconds


@pytest.mark.parametrize(
    ("wait", "expected"),
    [(2.0, 2000), (0.0011, 2), (1e-9, 1), (2_147_483.647, 2_147_483_647), (1e300, 2_147_483_647)],
)
def test_wait_in_milliseconds_is_rounded_up_to_one_and_down_to_the_most_there_is(wait: float, expected: int) -> None:
    assert milliseconds(wait) == expected


@pytest.mark.parametrize(
    ("wait", "expected"), [(2.0, 2), (1.1, 2), (1e-9, 1), (100_000_000.0, 100_000_000), (1e300, 100_000_000)]
)
def test_wait_in_whole_seconds_is_rounded_up_to_one_and_down_to_the_most_there_is(wait: float, expected: int) -> None:
    assert whole_seconds(wait) == expected
