"""How long to wait before the next attempt: full jitter.

Randomness comes in as an argument: `draw` is a number from 0 to 1, such as `CHANCE.random()` gives.
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["CHANCE", "full_jitter"]

CHANCE: Final = random.SystemRandom()
"""Jitter of our own: a program that seeds `random` finds its numbers where it expects them, in whatever thread."""


def full_jitter(attempt: int, draw: float, *, base: float = 0.01, cap: float = 0.25) -> float:
    """Give the seconds to wait after the failed attempt number `attempt` (1 is the first).

    A uniform choice between 0 and a limit that is `base` and doubles with each attempt, up to `cap`: those who collided
    spread out over the whole span. Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    doublings = min(attempt - 1, 60)  # beyond it every cap is reached, and a float would overflow
    return draw * min(cap, base * 2.0**doublings)
