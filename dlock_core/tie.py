"""What a transaction's end means for the leases tied to it.

Both integrations report the same three outcomes; the answer (release, or let run out) is given here, once.
"""

from __future__ import annotations

import enum

__all__ = ["Outcome"]


class Outcome(enum.Enum):
    """How a transaction ended, as far as its client can know."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost inside COMMIT
