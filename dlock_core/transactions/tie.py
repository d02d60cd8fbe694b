"""The state of a lease that is tied to transactions: what needs it, and whether its end is a release or an expiry.

Django and SQLAlchemy each *have* a `Tie`: they report their transactions to it, and it decides, so that the promise
"released only after COMMIT or ROLLBACK is known" has one copy.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dlock_core.backend import Released
from dlock_core.errors import LeaseLost
from dlock_core.leases import engine
from dlock_core.leases.lock import LETTING_EXPIRE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import DatabaseRuntime, Runtime

__all__ = ["Outcome", "Tie", "TieState", "call_all", "release"]

logger = logging.getLogger("dlock")


class Outcome(enum.Enum):
    """How a transaction ended, as far as its client can know."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost inside COMMIT


class TieState(enum.Enum):
    """Where a tied lease is between its grant and its end. Only `Tie` writes it.

    HELD is the only state in which new work may begin under the lease. UNCERTAIN differs from it only in how it ends:
    in EXPIRING instead of RELEASING. From ABANDONED nothing leads back.
    """

    HELD = "held"
    """Handles or transactions need the lease."""
    UNCERTAIN = "uncertain"
    """As HELD, but a COMMIT under the lease has an unknown outcome, and the database may still carry it out."""
    RELEASING = "releasing"
    """Nothing needs the lease: it is released now. A release that was interrupted is repeated in this state."""
    EXPIRING = "expiring"
    """Nothing needs the lease, but a COMMIT may still be carried out: it is not renewed, and not released."""
    TORN = "torn"
    """The last handle was garbage-collected before it was released, so that nothing can release it: it expires."""
    ABANDONED = "abandoned"
    """The acquire failed: no work was done under the lease, so the transactions that it met owe it nothing."""


async def release(runtime: Runtime, held: LeaseRecord) -> Released:
    """Release a lease that nothing needs any more; whatever happens, it is not renewed afterwards."""
    try:
        return await engine.release(runtime, held)
    except BaseException:
        held.abandon()
        raise


class Tie:
    """One lease, the handles that need it and the transactions that work under it.

    The lease is over when no handle and no transaction is left: then it is released, or expires after an unknown
    COMMIT. A handle is what a block or an `acquire()` gave to its caller. One that was taken inside a transaction may
    be bound to it, and is detached with it at the latest; a handle that was garbage-collected counts as detached.

    Handles and transactions are members of sets, and every step may be repeated: an exception may come between any two
    lines, and what it has cut short is done again by the caller. May be used from any thread.

    Args:
        held: The lease.
        runtime: Carries out a release where a transaction ends, which may be in code that cannot await.
    """

    __slots__ = ("__weakref__", "_bound", "handles", "held", "open", "runtime", "state", "transactions")

    def __init__(self, held: LeaseRecord, runtime: DatabaseRuntime) -> None:
        self.held, self.runtime = held, runtime
        self.state = TieState.HELD
        self.handles: WeakSet[Any] = WeakSet()
        """What callers have; a handle may join when those before it were left to a transaction."""
        self.open: set[object] = set()
        """The transactions that work under the lease and have not ended."""
        self.transactions = 0
        """How many transactions have ever worked under the lease."""
        self._bound: dict[object, set[Any]] = {}
        """The handles that are detached when a transaction ends, by that transaction."""

    def bind_to(self, transaction: object, handle: object) -> None:
        """Detach a handle when a transaction ends, if it was not detached before."""
        self._bound.setdefault(transaction, set()).add(handle)

    def begin(self, transaction: object) -> None:
        """Note that a transaction works under the lease."""
        self.open.add(transaction)
        self.transactions += 1

    @property
    def is_over(self) -> bool:
        """Nothing needs the lease any more: its handles are detached and every transaction has ended."""
        return not self.handles and not self.open

    @property
    def is_bound(self) -> bool:
        """Only transactions that are still open need the lease: it ends with them."""
        return set(self.handles) <= set().union(*list(self._bound.values()))

    @property
    def is_inside(self) -> bool:
        """The lock was taken inside a transaction of its store's database, and lasts exactly as long."""
        return self.held.backend.capabilities.transaction_database is not None

    def settle(self, transaction: object, outcome: Outcome, *, ends_lock: bool = False) -> bool:
        """Note how a transaction ended, and release the lease if that was the last thing that needed it.

        Returns True when nothing needs the lease any more. `ends_lock` means that this was the transaction in which the
        lock was taken, so that the database has released it already.

        Must be called only when the outcome is known, or is known to be unknowable: this is where the lock is handed to
        the next holder, who may then read what this transaction has written, or has not.
        """
        held = self.held
        if outcome is Outcome.UNKNOWN and not ends_lock and self.state is not TieState.ABANDONED:
            self.state = TieState.UNCERTAIN
        if transaction in self._bound:
            self.handles -= self._bound[transaction]
            self._bound.pop(transaction, None)
        self.open.discard(transaction)
        if held.loss_reason and self.is_inside:
            held.end(Released.EXPIRED)
        is_over = not self.handles and not self.open
        if (ends_lock or is_over) and self._is_to_be_released():
            with LETTING_EXPIRE:
                if ends_lock:
                    engine.released(held)
                else:
                    self.runtime.finish(release, held)
        return is_over

    def detach(self, handle: object) -> bool:
        """Note that a handle needs the lease no more; True when the caller has to release the lease now."""
        for bound in list(self._bound.values()):
            bound.discard(handle)
        self.handles.discard(handle)
        return not self.handles and not self.open and self._is_to_be_released()

    def detach_all(self) -> bool:
        """Detach every handle; see `detach`."""
        self._bound.clear()
        self.handles.clear()
        return not self.open and self._is_to_be_released()

    def _is_to_be_released(self) -> bool:
        """Decide how a lease ends that nothing needs any more."""
        if self.state not in (TieState.UNCERTAIN, TieState.EXPIRING):
            self.held.abandon()
            if self.state is TieState.HELD:
                self.state = TieState.RELEASING
            return True
        # The database may still carry out the COMMIT whose answer was lost, for as long as it keeps that connection. A
        # release would let the next holder read before that. So the rest of the ttl is what the next holder waits.
        self.held.abandon()
        if self.state is TieState.UNCERTAIN:
            self.state = TieState.EXPIRING
            logger.warning(
                "dlock: the outcome of a COMMIT under lock %r is unknown: its lease is not released and runs out in "
                "%.1f s",
                self.held.request.name,
                self.held.remaining(),
            )
        return False

    def note_collected(self, handle: object) -> None:
        """Note, perhaps in the garbage collector, that a handle was thrown away; an interrupt came in its way.

        It does no I/O: a release inside the garbage collector could meet any lock that the interrupted code holds.
        """
        self.handles.discard(handle)
        if not self.is_over or self.held.ended is not None or self.state is TieState.ABANDONED:
            return
        is_uncertain = self.state in (TieState.UNCERTAIN, TieState.EXPIRING)
        self.state = TieState.EXPIRING if is_uncertain else TieState.TORN
        self.held.abandon()

    def abandon(self) -> None:
        """Note that the acquire has failed."""
        self.state = TieState.ABANDONED

    def end_with_savepoint(self) -> None:
        """Note that a lock inside a transaction is gone, with the savepoint in which it was taken.

        What was done under it is undone, too. Code that is still in the block might go on as if nothing had happened,
        so that the lease counts as lost.
        """
        if self.handles:
            self.held.lose("the savepoint in which it was taken was rolled back")
        else:
            self.held.end(Released.RELEASED)
            self.abandon()

    def supersede(self, others: Iterable[Tie]) -> None:
        """Abandon locks of the same transaction that were lost, or ended, and are held again by this tie."""
        held = self.held
        for other in others:
            if (other.held.name, other.held.backend) == (held.name, held.backend) and other.held.remaining() == 0.0:
                other.abandon()

    def ensure_was_held(self) -> None:
        """Judge a block that ended without an error: raises LeaseLost when its work only looked protected.

        Work in transactions is judged at COMMIT; only a block without any is judged here.
        """
        held = self.held
        if self.transactions == 0 and held.ended in (Released.EXPIRED, Released.STOLEN):
            raise LeaseLost(held.name, token=held.token, reason=held.loss_reason or "it had ended before its release")


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call each step whatever the others raise, and then raise what came first; an interrupt before an error.

    A step that raised is called once more: any exception may be that of a signal handler, which has cut the step short.
    So a step must bear being repeated. Steps leave a deque when they were called, so that this, too, may be repeated.
    """
    pending = steps if isinstance(steps, deque) else deque(steps)
    try:
        while pending:
            pending[0]()
            pending.popleft()
    except BaseException as error:  # whatever it is, the others are called
        worst = _call_rest(pending, error)
        if worst is not error:
            raise worst from error
        raise


def _call_rest(pending: deque[Callable[[], object]], first: BaseException) -> BaseException:
    while pending:
        step = pending.popleft()
        try:
            step()
        except BaseException as error:
            logger.exception("dlock: a callback at the end of a transaction failed: %r", step)
            if isinstance(first, Exception) and not isinstance(error, Exception):
                first = error
    return first
