"""What a majority of independent nodes has decided: pure rules about their answers, with the clock as an argument.

A token is valid if a majority of nodes has written it to its counter while it had the grant: two majorities share a
node, on which one grant came after the other and drew a greater token. This does not depend on any clock, and it makes
no difference whether a node wrote the token with the grant itself or in a second round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlock_core.backend import Released, RenewalFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import RenewalResult

__all__ = ["FORECAST_LEAD_US", "Forecast", "agreed", "free_in", "majority", "released", "renewal_result"]

FORECAST_LEAD_US: Final = 50_000
"""Microseconds by which a forecast is ahead of the nodes' clocks: more than a request takes to arrive."""


def majority(nodes: int) -> int:
    """Return the smallest number such that any two sets of this many nodes share one."""
    return nodes // 2 + 1


def agreed(drawn: Sequence[int], needed: int) -> int | None:
    """Return the token that at least `needed` nodes have drawn, if there is one: then no second round is needed."""
    return next((token for token in set(drawn) if drawn.count(token) >= needed), None)


def free_in(waits: Sequence[float], free: int, needed: int) -> float:
    """Return the seconds until enough nodes may be free, if `free` are free now and the others after their `waits`."""
    missing = max(1, needed - free)
    return sorted(waits)[min(missing, len(waits)) - 1] if waits else 0.0


def renewal_result(yes: int, unanswered: int, needed: int, ttl: float) -> RenewalResult:
    """Return `ttl` for a lease that a majority still holds; UNKNOWN if that depends on nodes that did not answer."""
    if yes >= needed:
        return ttl
    return RenewalFailure.UNKNOWN if yes + unanswered >= needed else RenewalFailure.LOST


def released(found: Sequence[Released], unanswered: int, needed: int) -> Released | None:
    """Return what a release found; None if too few nodes answered, so that the grant may still exist."""
    if len(found) < needed:
        return None
    if found.count(Released.RELEASED) + unanswered >= needed:
        return Released.RELEASED
    return Released.STOLEN if found.count(Released.STOLEN) + unanswered >= needed else Released.EXPIRED


@dataclass(frozen=True, slots=True)
class Forecast:
    """A token that no node has reached yet, calculated from the nodes' clocks at some moment of our clock.

    It is only a proposal on which all nodes can agree: a wrong one costs a second round, and never repeats a token.
    """

    shown: int = 0
    """The latest of the nodes' clocks, in microseconds; 0 until one is known."""
    at: float = 0.0

    def token(self, now: float) -> int:
        """Return the proposal, 0 for none."""
        return self.shown + int((now - self.at) * 1_000_000) + FORECAST_LEAD_US if self.shown else 0
