"""A lease that is tied to transactions: what needs it, and how it ends, by a release or an expiry.

Django and SQLAlchemy each *have* a `Tie` for every lease: they report their transactions to it, and it decides, so that
the promise "released only after COMMIT or ROLLBACK is known" has one copy.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING
from weakref import ref

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.leases import engine
from dlock_core.leases.handles import let_expire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.leases.handles import LeaseView
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import DatabaseRuntime

__all__ = ["Outcome", "Tie", "TieState", "call_all"]

logger = logging.getLogger("dlock")


class Outcome(enum.Enum):
    """How a transaction ended, as far as its client can know."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"  # the connection was lost inside COMMIT


class TieState(enum.Enum):
    """The state of a tied lease between its grant and its end. Only `Tie` writes it.

    HELD is the only state in which new work may begin under the lease. UNCERTAIN differs from it only in how it ends:
    in EXPIRING instead of RELEASING. ABANDONED is final.
    """

    HELD = "held"
    """Handles or transactions need the lease."""
    UNCERTAIN = "uncertain"
    """As HELD, but a COMMIT under the lease has an unknown outcome, and the database may still execute it."""
    RELEASING = "releasing"
    """Nothing needs the lease: it is released now. A release that was interrupted is repeated in this state."""
    EXPIRING = "expiring"
    """Nothing needs the lease, but a COMMIT may still be executed: it is not renewed, and not released."""
    TORN = "torn"
    """The last handle was garbage-collected before it was released, so that nothing can release it: it expires."""
    ABANDONED = "abandoned"
    """The acquire failed: no work was done under the lease, so no transaction that is open now has to check it."""


class Tie:
    """One lease, the handles that need it and the transactions that work under it.

    The lease is over when no handle and no transaction is left: then it is released, or expires after an unknown
    COMMIT. A handle is the object that a block or an `acquire()` returned to its caller. A handle that was taken inside
    a transaction may be bound to it, and is detached at the latest with that transaction; a handle that was
    garbage-collected counts as detached.

    Handles and transactions are members of sets, and every step can be repeated: an exception may come between any two
    lines, and the caller repeats the step that it has cut short. May be used from any thread.

    Args:
        held: The lease.
        runtime: Executes the release at the end of a transaction, which may be in code that cannot await.
    """

    __slots__ = ("__weakref__", "_bound", "handles", "held", "open", "runtime", "state", "transactions")

    def __init__(self, held: LeaseRecord, runtime: DatabaseRuntime) -> None:
        self.held, self.runtime = held, runtime
        self.state = TieState.HELD
        self.handles: set[ref[LeaseView]] = set()
        """The callers' handles; a handle may join when the earlier ones were left to a transaction.

        A handle that is garbage-collected leaves by itself: `set.discard` is not Python code, so no interrupt can stop
        it.
        """
        self.open: set[object] = set()
        """The transactions that work under the lease and have not ended."""
        self.transactions = 0
        """How many transactions have ever worked under the lease."""
        self._bound: dict[object, dict[ref[LeaseView], LeaseView]] = {}
        """The handles that are detached when a transaction ends, by that transaction."""

    def attach(self, handle: LeaseView) -> None:
        """Record that a handle needs the lease, until it is detached or garbage-collected."""
        self.handles.add(ref(handle, self.handles.discard))
        self.held.needed_by = (self.handles, self.open)

    def bind_to(self, transaction: object, handle: LeaseView) -> None:
        """Detach a handle when a transaction ends, unless it was detached before."""
        self._bound.setdefault(transaction, {})[ref(handle)] = handle

    def begin(self, transaction: object) -> None:
        """Record that a transaction works under the lease."""
        self.open.add(transaction)
        self.transactions += 1

    @property
    def is_over(self) -> bool:
        """Whether nothing needs the lease any more: its handles are detached and every transaction has ended."""
        return not self.handles and not self.open

    @property
    def is_joinable(self) -> bool:
        """Whether the lease certainly holds, and nothing has begun to end it; a handle checks again after joining."""
        return self.state in (TieState.HELD, TieState.UNCERTAIN) and self.held.remaining() > 0.0

    @property
    def is_bound(self) -> bool:
        """Whether only transactions that are still open need the lease: it ends with them."""
        return self.are_bound(self.handles.copy())

    def are_bound(self, handles: set[ref[LeaseView]]) -> bool:
        """Return whether each of these handles is detached when a transaction that is still open ends."""
        return handles <= set().union(*list(self._bound.values()))

    @property
    def is_inside(self) -> bool:
        """Whether the lock was taken inside a transaction of its store's database, and lasts exactly as long."""
        return self.held.backend.capabilities.transaction_database is not None

    def settle(
        self, transaction: object, outcome: Outcome, *, settled: Callable[[], None], ends_lock: bool = False
    ) -> None:
        """Record how a transaction ended, and release the lease if nothing else needs it.

        Must be called only when the outcome is known, or is known to be unknowable: this is where the lock is handed to
        the next holder, which may then read what this transaction has written, or has not.

        `settled` is called at the end, whether or not the release succeeds. `ends_lock` means that this was the
        transaction in which the lock was taken, so that the database has already released it.
        """
        held = self.held
        if outcome is Outcome.UNKNOWN and not ends_lock and self.state is not TieState.ABANDONED:
            self.state = TieState.UNCERTAIN
        if transaction in self._bound:
            self.handles.difference_update(self._bound[transaction])
            self._bound.pop(transaction, None)
        self.open.discard(transaction)
        if held.loss_reason and self.is_inside:
            held.end(Released.EXPIRED)
        try:
            if (ends_lock or self.is_over) and self._is_to_be_released(ends_lock=ends_lock):
                self.release(is_released=ends_lock)
        finally:
            settled()

    def release(self, *, is_released: bool = False) -> None:
        """Release the lease when nothing waits for the answer; if it cannot be released, it expires.

        `is_released`: the store has already released it, with the transaction in which it was acquired.
        """
        try:
            if is_released:
                engine.released(self.held)
            else:
                self.runtime.finish(engine.release, self.held)
        except (BackendUnavailable, NotHeld) as error:
            let_expire(error)

    def detach(self, handle: LeaseView) -> bool:
        """Record that a handle no longer needs the lease; return True if the caller has to release the lease now."""
        known = ref(handle)
        for bound in list(self._bound.values()):
            bound.pop(known, None)
        self.handles.discard(known)
        return not self.handles and not self.open and self._is_to_be_released()

    def _is_to_be_released(self, *, ends_lock: bool = False) -> bool:
        """Decide how a lease ends if nothing needs it any more; False also if another thread has just joined it."""
        if self.state not in (TieState.UNCERTAIN, TieState.EXPIRING):
            if self.state is TieState.HELD:
                # A handle that joins now either sees this state, or is seen below, or both.
                self.state = TieState.RELEASING
                if self.handles and not ends_lock:
                    self.state = TieState.HELD
                    return False
            self.held.abandon()  # If the release is interrupted, or fails, the lease must not be renewed forever.
            return True
        # The database may still execute the COMMIT whose answer was lost, for as long as it keeps that connection. A
        # release would let the next holder read before that. So the next holder waits for the rest of the ttl.
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

    def note_collected(self, handle: LeaseView) -> bool:
        """Record, perhaps in the garbage collector, that a handle was collected; return whether that tears the lease.

        This does no I/O: a release inside the garbage collector could deadlock on any mutex of the interrupted code.
        """
        self.handles.discard(ref(handle))
        if not self.is_over or self.held.ended is not None or self.state is TieState.ABANDONED:
            return False
        is_torn = self.state in (TieState.HELD, TieState.UNCERTAIN)
        is_uncertain = self.state in (TieState.UNCERTAIN, TieState.EXPIRING)
        self.state = TieState.EXPIRING if is_uncertain else TieState.TORN
        self.held.abandon()
        return is_torn

    def abandon(self) -> None:
        """Record that the acquire has failed."""
        self.state = TieState.ABANDONED

    def end_with_savepoint(self) -> None:
        """Record that a lock inside a transaction is gone, with the savepoint in which it was taken.

        The work under it is undone, too. Code that is still in the block might continue as if nothing had happened, so
        the lease counts as lost.
        """
        if self.handles:
            self.held.lose("the savepoint in which it was taken was rolled back")
        else:
            self.held.end(Released.RELEASED)
            self.abandon()

    def supersede(self, others: Iterable[Tie]) -> None:
        """Abandon earlier locks of the same transaction that were lost, or ended, and that this tie holds again."""
        held = self.held
        for other in others:
            if (other.held.name, other.held.backend) == (held.name, held.backend) and other.held.remaining() == 0.0:
                other.abandon()

    def loss_of_block(self) -> LeaseLost | None:
        """Return the error for a block that ended without one, but whose work only looked protected; None if it was.

        Work in transactions is checked at COMMIT; only a block without transactions is checked here.
        """
        held = self.held
        if self.transactions == 0 and held.ended in (Released.EXPIRED, Released.STOLEN):
            return LeaseLost(held.name, token=held.token, reason=held.loss_reason or "it had ended before its release")
        return None


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call each step even if others raise, and then raise the first exception; an interrupt before an error.

    A step that raised is called once more: any exception may come from a signal handler that has cut the step short. So
    every step must be repeatable. Steps are removed from a deque after their call, so that this function is repeatable,
    too.
    """
    pending = steps if isinstance(steps, deque) else deque(steps)
    try:
        while pending:
            pending[0]()
            pending.popleft()
    except BaseException as error:  # in any case, the others are called
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
