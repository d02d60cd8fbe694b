"""How long a grant holds, and how it may end: pure rules, with the clock as an argument.

Validity is local and monotonic, counted from before the attempt was sent, less an allowance for drift, so that a
process which was stopped sees at once that it lost the lease. (Idea: the Redlock page of the Redis documentation.)
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["Released", "valid_until"]

DRIFT: Final = 0.01
"""How much faster our clock may run than the store's: one percent, far more than quartz does."""
GUARD: Final = 0.002
"""Seconds for the coarseness of expiry in the store."""


class Released(enum.Enum):
    """What a release found."""

    RELEASED = "released"
    EXPIRED = "expired"
    STOLEN = "stolen"


def valid_until(sent: float, valid_for: float) -> float:
    """Give the moment until which a grant asked for at `sent` surely holds."""
    return sent + valid_for * (1 - DRIFT) - GUARD
