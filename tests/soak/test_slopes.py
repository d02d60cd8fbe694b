"""The soak's verdict on made-up samples: it finds growth, and does not mistake noise for it."""

import random

import pytest

from tests.soak.report import Report
from tests.soak.slopes import fitted, without_warm_up

SAMPLES = 120
HOUR_S = 3600


def samples(per_hour: float, noise: float = 0, mean: float = 50_000) -> list[tuple[float, float]]:
    """Return an hour's samples, one every half minute."""
    chance = random.Random(1)
    moments = [HOUR_S * place / SAMPLES for place in range(SAMPLES)]
    return [(at, mean + per_hour * at / HOUR_S + chance.gauss(0, noise)) for at in moments]


def test_slope_is_per_hour() -> None:
    slope = fitted(samples(per_hour=120))
    assert slope.per_hour == pytest.approx(120)
    assert slope.error == pytest.approx(0, abs=1e-6)


def test_error_says_how_far_the_slope_may_be_off() -> None:
    slope = fitted(samples(per_hour=120, noise=100))
    assert abs(slope.per_hour - 120) < 3 * slope.error
    assert slope.error < 60


def test_noise_is_no_growth() -> None:
    assert not fitted(samples(per_hour=0, noise=5000)).grows(allowed=0)


def test_growth_under_noise_is_found() -> None:
    assert fitted(samples(per_hour=5000, noise=1000)).grows(allowed=1000)


def test_samples_that_depend_on_the_one_before_have_a_larger_error() -> None:
    chance, walk, steps = random.Random(2), 0.0, []
    for place in range(SAMPLES):
        walk = 0.9 * walk + chance.gauss(0, 1)
        steps.append((HOUR_S * place / SAMPLES, walk))
    mixed = [(at, value) for (at, _), (_, value) in zip(steps, random.Random(3).sample(steps, SAMPLES), strict=True)]
    assert fitted(steps).error > 2 * fitted(mixed).error


def test_warm_up_is_left_out() -> None:
    filling = [(at, value + max(0, 900 - at)) for at, value in samples(per_hour=0)]
    assert fitted(without_warm_up(filling)).per_hour == pytest.approx(0, abs=1e-6)


def test_too_few_samples_have_no_slope() -> None:
    with pytest.raises(ValueError, match="run for longer"):
        fitted(samples(per_hour=0)[:5])


@pytest.mark.parametrize(("quantity", "per_hour"), [("memory, KiB", 8000), ("descriptors", 30), ("keys", 5)])
def test_report_names_what_grows(quantity: str, per_hour: float) -> None:
    report = Report(minutes=60)
    for at, value in samples(per_hour, noise=0.5):
        report.add(at, "redis", {quantity: value, "connections": 7.0})
    assert report.violations() == [f"redis: {quantity} grow"]


def test_error_that_nothing_explains_and_a_dead_worker_are_violations() -> None:
    report = Report(minutes=60, deaths=["core"])
    report.strange["KeyError"] += 2
    assert report.violations() == ["2 times: KeyError", "core died"]
