import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlock_core.runtime import full_jitter

attempts = st.integers(1, 10_000)
draws = st.floats(0, 1, exclude_max=True)


@given(attempts, draws)
def test_pause_is_never_negative_and_never_above_the_cap(attempt: int, draw: float) -> None:
    assert 0 <= full_jitter(attempt, draw, base=0.01, cap=1.0) <= 1.0


@pytest.mark.parametrize(("attempt", "longest"), [(1, 0.01), (2, 0.02), (3, 0.04), (7, 0.64), (8, 1.0), (9, 1.0)])
def test_longest_pause_doubles_with_each_attempt_up_to_the_cap(attempt: int, longest: float) -> None:
    assert full_jitter(attempt, 1.0, base=0.01, cap=1.0) == pytest.approx(longest)


@given(attempts)
def test_jitter_is_full_so_that_the_shortest_pause_is_none_at_all(attempt: int) -> None:
    assert full_jitter(attempt, 0.0) == 0.0


@given(attempts, draws)
def test_pause_is_the_drawn_share_of_the_longest(attempt: int, draw: float) -> None:
    assert full_jitter(attempt, draw) == pytest.approx(draw * full_jitter(attempt, 1.0))
