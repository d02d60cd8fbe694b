"""Round trips and clocks: how long a server takes to answer, and how far its clock is from ours.

A server's clock is compared with ours in the middle of the shortest round trip, so half of that trip bounds the error
(Cristian, "Probabilistic clock synchronization", 1989).
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
"""Round trips that are measured for each server."""
MAX_CLOCK_OFFSET_S: Final = 1.0
"""Accepted difference of clocks; the protocols here count durations, so a smaller one changes nothing."""
SLOW_ROUND_TRIP_S: Final = 0.05
"""A round trip that deserves a warning: a hundred times what is usual inside a data centre."""

wall = time.time


class Sample(NamedTuple):
    """One query for the time: our clock before and after it, and the server's; seconds since 1970."""

    sent: float
    received: float
    theirs: float


class Timing(NamedTuple):
    """The usual round trip, and how far the server's clock is ahead of ours, plus or minus `precision`; seconds."""

    round_trip: float
    offset: float
    precision: float


def timing(samples: Sequence[Sample]) -> Timing:
    """Combine samples: the median round trip, and the offset in the shortest one."""
    best = min(samples, key=lambda sample: sample.received - sample.sent)
    usual = median(sample.received - sample.sent for sample in samples)
    middle = (best.sent + best.received) / 2
    return Timing(usual, best.theirs - middle, (best.received - best.sent) / 2)


def round_trip(seconds: float) -> Finding:
    """Judge a round trip (seconds)."""
    measured = f"{seconds * 1000:.2f} ms"
    if seconds < SLOW_ROUND_TRIP_S:
        return ok("round trip", measured)
    reason = "every lock costs two round trips, every transaction under it at least two more"
    return warning("round trip", measured, reason, "put the program and the server into the same network")


def clock(found: Timing, reason: str) -> Finding:
    """Judge the difference between a server's clock and ours; `reason` says what depends on it."""
    measured = f"{_amount(abs(found.offset))} {'ahead of' if found.offset >= 0 else 'behind'} this machine"
    measured += f" (± {_amount(found.precision)})"
    if abs(found.offset) - found.precision < MAX_CLOCK_OFFSET_S:
        return ok("clock", measured)
    return warning("clock", measured, reason, "let chrony or ntpd slew both clocks, and never step them")


def clock_spread(timings: Sequence[Timing]) -> Finding:
    """Judge the differences between the clocks of several nodes."""
    offsets = [each.offset for each in timings]
    spread, precision = max(offsets) - min(offsets), 2 * max(each.precision for each in timings)
    measured = f"{_amount(spread)} between the nodes (± {_amount(precision)})"
    if spread - precision < MAX_CLOCK_OFFSET_S:
        return ok("clocks", measured)
    reason = "tokens come from the nodes' clocks, so many locks then need a second round to agree on one"
    return warning("clocks", measured, reason, "let chrony or ntpd slew the clocks of all nodes")


def _amount(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < MAX_CLOCK_OFFSET_S else f"{seconds:.1f} s"
