"""Round trips and clocks: how far a server is away, in both senses.

A server's clock is compared with ours in the middle of the shortest round trip, so half of that is the error (Cristian,
1989).
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from dlock_core.doctor.finding import Finding, ok, warning

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SAMPLE_COUNT", "Sample", "Timing", "clock", "clock_spread", "round_trip", "timing", "wall"]

SAMPLE_COUNT: Final = 5
MAX_CLOCK_OFFSET_S: Final = 1.0
"""Seconds that clocks may differ; every protocol here counts durations, so less than this changes nothing."""
SLOW_ROUND_TRIP_S: Final = 0.05
"""Seconds of a round trip that a lock pays twice, in the same data centre a hundred times more than usual."""

wall = time.time


class Sample(NamedTuple):
    """One question for the time: our clock before and after, and theirs; seconds since 1970."""

    sent: float
    received: float
    theirs: float


class Timing(NamedTuple):
    """The usual round trip, and how far their clock is ahead of ours, give or take `precision` (seconds)."""

    round_trip: float
    offset: float
    precision: float


def timing(samples: Sequence[Sample]) -> Timing:
    """Make the best of some samples."""
    best = min(samples, key=lambda sample: sample.received - sample.sent)
    usual = median(sample.received - sample.sent for sample in samples)
    middle = (best.sent + best.received) / 2
    return Timing(usual, best.theirs - middle, (best.received - best.sent) / 2)


def round_trip(seconds: float) -> Finding:
    """Judge a round trip."""
    measured = f"{seconds * 1000:.2f} ms"
    if seconds < SLOW_ROUND_TRIP_S:
        return ok("round trip", measured)
    reason = "every lock costs two round trips, every transaction under it at least two more"
    return warning("round trip", measured, reason, "put the program and the server into the same network")


def clock(found: Timing, reason: str) -> Finding:
    """Judge their clock beside ours; `reason` says what depends on it."""
    measured = f"{_amount(abs(found.offset))} {'ahead of' if found.offset >= 0 else 'behind'} us"
    measured += f" (± {_amount(found.precision)})"
    if abs(found.offset) - found.precision < MAX_CLOCK_OFFSET_S:
        return ok("clock", measured)
    return warning("clock", measured, reason, "let chrony or ntpd slew both clocks, and never step them")


def clock_spread(timings: Sequence[Timing]) -> Finding:
    """Judge the clocks of several nodes beside each other."""
    offsets = [each.offset for each in timings]
    spread, precision = max(offsets) - min(offsets), 2 * max(each.precision for each in timings)
    measured = f"{_amount(spread)} between the nodes (± {_amount(precision)})"
    if spread - precision < MAX_CLOCK_OFFSET_S:
        return ok("clocks", measured)
    reason = "tokens are drawn from the nodes' clocks: many locks then cost a second round to agree on one"
    return warning("clocks", measured, reason, "let chrony or ntpd slew the clocks of all nodes")


def _amount(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < MAX_CLOCK_OFFSET_S else f"{seconds:.1f} s"
