"""Fits a line through samples by least squares, with the error of its slope, to see whether they grow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

WARM_UP: Final = 0.25
"""The share of the run that is ignored at its beginning, while caches and pools fill."""
MIN_SAMPLES: Final = 8
SURE: Final = 3.0
"""By how many standard errors a slope must exceed the allowed one to count as growth."""


@dataclass(frozen=True, slots=True)
class Slope:
    """The growth of one quantity, per hour."""

    mean: float
    per_hour: float
    error: float
    """The standard error of `per_hour`, corrected for samples that depend on the one before."""

    def grows(self, allowed: float) -> bool:
        """Return whether it certainly grows by more than `allowed` per hour."""
        return self.per_hour - SURE * self.error > allowed


def without_warm_up(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (second, value) pairs that come after the warm-up."""
    begin, end = samples[0][0], samples[-1][0]
    return [(second, value) for second, value in samples if second >= begin + WARM_UP * (end - begin)]


def fitted(samples: Sequence[tuple[float, float]]) -> Slope:
    """Return the slope of (second, value) pairs; raise ValueError if there are too few of them."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are too few for a slope, {MIN_SAMPLES} are needed: run for longer")
    hours = [second / 3600 for second, _ in samples]
    values = [value for _, value in samples]
    middle, mean = fmean(hours), fmean(values)
    spread = sum((hour - middle) ** 2 for hour in hours)
    slope = sum((hour - middle) * (value - mean) for hour, value in zip(hours, values, strict=True)) / spread
    rest = [value - mean - slope * (hour - middle) for hour, value in zip(hours, values, strict=True)]
    variance = sum(each * each for each in rest) / (len(rest) - 2)
    return Slope(mean, slope, math.sqrt(variance / spread) * _inflation(rest))


def _inflation(rest: Sequence[float]) -> float:
    """Return the factor by which first-order autocorrelation of the samples enlarges the error."""
    power = sum(each * each for each in rest)
    if not power:
        return 1.0
    correlation = sum(one * other for one, other in pairwise(rest)) / power
    correlation = min(max(correlation, 0.0), 0.95)
    return math.sqrt((1 + correlation) / (1 - correlation))
