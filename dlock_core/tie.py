"""What a transaction's end means for the leases tied to it: check, release, or let run out.

Both integrations report the same three outcomes; the answer is given here, once.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from dlock_core import engine, watchdog
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.lease import Released
from dlock_core.runtime import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.held import Held

__all__ = ["LETTING_RUN_OUT", "Outcome", "Tie"]

logger = logging.getLogger("dlock")


class Outcome(enum.Enum):
    """How a transaction ended, as far as its client can know."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost inside COMMIT


class _LettingRunOut:
    """Lets a release fail: the work is done, and the lease runs out by itself."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, BackendUnavailable):  # the work has ended well: this must not turn into its failure
            logger.warning("dlock: %s; the lease runs out by itself", error)
            return True
        return isinstance(error, NotHeld)  # a forked child walks out of its parent's block, or closes its connection


LETTING_RUN_OUT: Final = _LettingRunOut()


class Tie:
    """A lease, and the transactions at work under it: released when its block was left and the last of them has ended.

    After an UNKNOWN outcome it is not released, because the database may still commit: it is renewed no more and runs
    out. May be used from any thread; `finish` carries out a step of the engine wherever a transaction ends.
    """

    def __init__(self, held: Held, finish: Callable[..., Any] = blocking) -> None:
        self.held, self.finish = held, finish
        self.depth = 1
        """How many handles are in use: blocks, and acquires without a block."""
        self.transactions = 0
        """How many transactions were ever tied."""
        self._guard = threading.RLock()  # the garbage collector may end a transaction in the middle of a method
        self._open, self._left, self._unknown = 0, False, False
        self.is_given_up = False
        """Its acquire has failed: nothing was done under it, so the transactions that it met owe it nothing."""

    def give_up(self) -> None:
        """Note that the acquire has failed."""
        self.is_given_up = True

    def begin(self) -> None:
        """Note that a transaction works under the lease."""
        with self._guard:
            self._open += 1
            self.transactions += 1

    def check(self) -> None:
        """Refuse COMMIT: raise LeaseLost unless the lease surely holds."""
        self.held.ensure()

    @property
    def is_inside(self) -> bool:
        """The lock was taken inside a transaction, and lasts exactly as long."""
        return self.held.backend.expiry == "transaction"

    def undone(self) -> None:
        """Hear that a lock inside a transaction is gone, with the savepoint in which it was taken.

        What was done under it is undone, too. Whoever is still in its block might go on as if nothing had happened.
        """
        if self.depth:
            self.held.lose("the savepoint in which it was taken was rolled back")
        else:
            self.held.end(Released.RELEASED)
            self.give_up()

    def supersede(self, others: Iterable[Tie]) -> None:
        """Let go of locks that were lost, or ended, and are now held again: nobody goes by those any more."""
        for other in others if self.is_inside else ():
            if (other.held.name, other.held.backend) == (self.held.name, self.held.backend) and not other.is_held:
                other.give_up()

    @property
    def is_held(self) -> bool:
        """The lease surely holds."""
        return self.held.remaining() > 0.0

    def settle(self, outcome: Outcome, *, ends_lock: bool = False) -> None:
        """Note how a transaction ended, and release if it was the last thing that the lease was held for.

        `ends_lock`: it was the transaction of a lock inside one, which the database has released with it.
        """
        with self._guard:
            self._open -= 1
            self._unknown |= outcome is Outcome.UNKNOWN and not ends_lock
            due = ends_lock or (self._left and self._open == 0)
        if self.is_inside and self.held.lost_because:
            self.held.end(Released.EXPIRED)
        if due and self.is_due():
            with LETTING_RUN_OUT:
                if ends_lock:
                    engine.released(self.held)
                else:
                    self.finish(engine.release, self.held)

    def join(self) -> None:
        """Note that one more handle needs the lease, also when those before it have left it to a transaction."""
        with self._guard:
            self.depth += 1
            self._left = False

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

    def ensure_was_held(self, error: BaseException | None) -> None:
        """Judge how a block ended: raises LeaseLost when work without a transaction only looked protected."""
        held = self.held
        if error is None and self.transactions == 0 and held.ended in (Released.EXPIRED, Released.STOLEN):
            raise LeaseLost(held.name, token=held.token, reason=held.lost_because or "it had ended before its release")
