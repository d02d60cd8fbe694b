"""What a transaction's end means for the leases tied to it: check, release, or let run out.

Both integrations report the same three outcomes; the answer is given here, once.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import TYPE_CHECKING

from dlock_core import engine, watchdog
from dlock_core.errors import BackendUnavailable, NotHeld
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.held import Held

__all__ = ["Outcome", "Tie"]

logger = logging.getLogger("dlock")


class Outcome(enum.Enum):
    """How a transaction ended, as far as its client can know."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost inside COMMIT


class Tie:
    """A lease, and the transactions at work under it: released when its block was left and the last of them has ended.

    After an UNKNOWN outcome it is not released, because the database may still commit: it is renewed no more and runs
    out. May be used from any thread.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self.transactions = 0
        """How many transactions were ever tied."""
        self._guard = threading.Lock()
        self._open, self._left, self._unknown = 0, False, False

    def begin(self) -> None:
        """Note that a transaction works under the lease."""
        with self._guard:
            self._open += 1
            self.transactions += 1

    def check(self) -> None:
        """Refuse COMMIT: raise LeaseLost unless the lease surely holds."""
        self.held.ensure()

    def settle(self, outcome: Outcome) -> None:
        """Note how a transaction ended, and release if it was the last thing that the lease was held for."""
        with self._guard:
            self._open -= 1
            self._unknown |= outcome is Outcome.UNKNOWN
            due = self._left and self._open == 0
        if due and self.is_due():
            self._release()

    def leave(self) -> bool:
        """Note that the block is over; True when the caller has to release now."""
        with self._guard:
            self._left = True
            due = self._open == 0
        return due and self.is_due()

    @property
    def left(self) -> bool:
        """The block is over: only transactions that are still open keep the lease."""
        return self._left

    @property
    def is_over(self) -> bool:
        """Nothing needs the lease any more: its block was left and every transaction has ended."""
        return self._left and self._open == 0

    def is_due(self) -> bool:
        """Say whether to release, now that nothing needs the lease; if not, let it run out."""
        watchdog.unwatch(self.held)
        if not self._unknown:
            return True
        self.held.renewing = False
        logger.warning(
            "dlock: the outcome of a COMMIT under lock %r is unknown: its lease is not released and runs out in %.1f s",
            self.held.name,
            self.held.remaining(),
        )
        return False

    def _release(self) -> None:
        try:
            run(engine.release(BLOCKING, self.held))
        except NotHeld:  # a forked child closes the connection that it has from its parent
            return
        except BackendUnavailable as error:  # the transaction has ended well: this must not turn into its failure
            logger.warning("dlock: %s; the lease runs out by itself", error)
