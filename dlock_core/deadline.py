"""Times as callers give them (seconds or timedelta), and the one deadline of a wait.

The clock comes in as an argument: nothing here reads it.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

__all__ = ["LONGEST_TTL", "Seconds", "deadline", "ttl_seconds", "wait_seconds"]

Seconds = float | int | timedelta

LONGEST_TTL: Final = 366 * 86400.0


def ttl_seconds(ttl: Seconds) -> float:
    """Check a ttl: finite, greater than 0 and at most a year; renewal makes a lease last, not its ttl."""
    seconds = _number("ttl", ttl)
    if not 0 < seconds <= LONGEST_TTL:
        raise ValueError(f"ttl must be more than 0 and at most {LONGEST_TTL:.0f} seconds, not {ttl!r}")
    return seconds


def wait_seconds(wait: Seconds | None) -> float | None:
    """Check a wait: None is for ever, 0 is one try, else finite seconds."""
    if wait is None:
        return None
    seconds = _number("wait", wait)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"wait must be None (for ever), 0 (one try) or a finite number of seconds, not {wait!r}")
    return seconds


def deadline(now: float, wait: float | None) -> float:
    """Give the moment at which a wait that starts now is over."""
    return math.inf if wait is None else now + wait


def _number(what: str, value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is seconds (int or float) or a timedelta, not {type(value).__name__}: {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
