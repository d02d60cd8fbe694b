"""What is measured of locks: the same numbers under the names of Prometheus and of OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlock_core.hooks import Event
    from dlock_core.patterns import Patterns

__all__ = ["BUCKETS", "MEASURES", "Measure", "measure"]

BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends in seconds: from a round trip to a store to the longest wait and ttl that are usual."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number over time: seconds whose distribution counts, or how often something happened."""

    name: str
    help: str
    label: str = ""
    """What it is divided by, beside the pattern of the lock's name."""
    is_seconds: bool = False


WAIT: Final = Measure("wait", "How long an acquire took", "outcome", is_seconds=True)
HOLD: Final = Measure("hold", "How long a lease was held", "outcome", is_seconds=True)
CONTENDED: Final = Measure("contended", "Acquires that found the lock taken")
LOST: Final = Measure("lost", "Leases that were lost before their release")
CONFLICTS: Final = Measure("conflicts", "Writes and COMMITs that were refused because somebody was faster", "error")
RETRIES: Final = Measure("retries", "Times that work was begun again after a conflict", "reason")
FORCED: Final = Measure("forced_releases", "Leases that an operator ended from this process")

MEASURES: Final = (WAIT, HOLD, CONTENDED, LOST, CONFLICTS, RETRIES, FORCED)


def measure(event: Event, patterns: Patterns) -> Iterator[tuple[Measure, float, dict[str, str]]]:
    """Tell what an event adds to which measures, and under which labels."""
    lock = {"lock": patterns(event.name)}
    if event.kind in {"acquired", "timeout", "unavailable"}:
        yield WAIT, event.seconds, {**lock, "outcome": event.kind}
        if event.contended:
            yield CONTENDED, 1, lock
    elif event.kind == "released":
        yield HOLD, event.seconds, {**lock, "outcome": event.reason}
    elif event.kind == "lost":
        yield LOST, 1, lock
    elif event.kind == "conflict":
        yield CONFLICTS, 1, {**lock, "error": event.reason}
    elif event.kind == "retry":
        yield RETRIES, 1, {**lock, "reason": event.reason}
    elif event.kind == "forced":
        yield FORCED, 1, lock
