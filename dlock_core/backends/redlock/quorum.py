"""What a majority of independent nodes has decided: pure rules about their answers, with the clock as an argument.

A token is good when a majority of nodes has written it into its counter while the grant was theirs: two majorities
share a node, on which one grant came after the other and drew a greater token. No clock takes part in this, and it
makes no difference whether a node wrote the token with the grant itself or was told it in a second round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlock_core.backend import Released, RenewalFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import RenewalResult

__all__ = ["AHEAD", "Forecast", "agreed", "free_in", "majority", "released", "renewal_result"]

AHEAD: Final = 50_000
"""Microseconds by which a forecast is ahead of the nodes' clocks: more than a request is on its way."""


def majority(nodes: int) -> int:
    """Give the least number of nodes of which any two sets share one."""
    return nodes // 2 + 1


def agreed(drawn: Sequence[int], needed: int) -> int | None:
    """Give the token that so many nodes have drawn, if there is one: then no second round is needed."""
    return next((token for token in set(drawn) if drawn.count(token) >= needed), None)


def free_in(waits: Sequence[float], free: int, needed: int) -> float:
    """Give the seconds after which enough nodes may be free, if `free` are now and the others after their `waits`."""
    missing = max(1, needed - free)
    return sorted(waits)[min(missing, len(waits)) - 1] if waits else 0.0


def renewal_result(yes: int, silent: int, needed: int, ttl: float) -> RenewalResult:
    """Return `ttl` for a lease that a majority still holds; UNKNOWN when that depends on nodes which did not answer."""
    if yes >= needed:
        return ttl
    return RenewalFailure.UNKNOWN if yes + silent >= needed else RenewalFailure.LOST


def released(found: Sequence[Released], silent: int, needed: int) -> Released | None:
    """Tell what a release found; None when too few nodes answered, so that the grant may be there still."""
    if len(found) < needed:
        return None
    if found.count(Released.RELEASED) + silent >= needed:
        return Released.RELEASED
    return Released.STOLEN if found.count(Released.STOLEN) + silent >= needed else Released.EXPIRED


@dataclass(frozen=True, slots=True)
class Forecast:
    """A token that no node has reached yet, out of what the nodes' clocks showed at some moment of ours.

    Only a proposal on which all nodes can agree: a wrong one costs a second round, and never gives a token twice.
    """

    shown: int = 0
    """The latest of the nodes' clocks, in microseconds; 0 while none is known."""
    at: float = 0.0

    def token(self, now: float) -> int:
        """Give the proposal, 0 for none."""
        return self.shown + int((now - self.at) * 1_000_000) + AHEAD if self.shown else 0
