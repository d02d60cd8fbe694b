"""What a transaction's end means for the leases tied to it: check, release, or let run out.

Both integrations report the same three outcomes; the answer is given here, once.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.leases import engine, watchdog
from dlock_core.runtime import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.leases.lease import Held
    from dlock_core.runtime import Runtime

__all__ = ["LETTING_RUN_OUT", "Outcome", "Tie", "release", "stop_renewing"]

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


async def release(runtime: Runtime, held: Held) -> Released:
    """Release a lease that nobody needs any more; whatever happens, it is renewed no more."""
    try:
        return await engine.release(runtime, held)
    finally:
        stop_renewing(held)


def stop_renewing(held: Held) -> None:
    """Let a lease run out, unless it has ended."""
    held.renewing = False
    watchdog.unwatch(held)


class Tie:
    """A lease, the handles that need it and the transactions at work under it: it is released when none is left.

    A handle is what a block or an `acquire()` gave to its caller. One that was taken inside a transaction may be bound
    to it, and is left with it at the latest; one that nobody has any more counts as left. Handles and transactions are
    members of sets, so that leaving or settling again changes nothing: what an interrupt has cut short is repeated.

    After an UNKNOWN outcome the lease is not released, because the database may still commit: it is renewed no more and
    runs out. May be used from any thread; `finish` carries out a step of the engine wherever a transaction ends.
    """

    def __init__(self, held: Held, finish: Callable[..., Any] = blocking) -> None:
        self.held, self.finish = held, finish
        self.handles: WeakSet[Any] = WeakSet()
        """The leases that callers have: of blocks, and of acquires without a block."""
        self.open: set[object] = set()
        """The transactions at work that have not ended."""
        self.transactions = 0
        """How many transactions were ever tied."""
        self._bound: dict[object, set[Any]] = {}
        """The handles that are left when a transaction ends, by that transaction."""
        self._unknown = False
        self.is_torn = False
        """Nobody has left its last handle, and nobody can: it runs out."""
        self.is_given_up = False
        """Its acquire has failed: nothing was done under it, so the transactions that it met owe it nothing."""

    def give_up(self) -> None:
        """Note that the acquire has failed."""
        self.is_given_up = True

    def begin(self, transaction: object) -> None:
        """Note that a transaction works under the lease."""
        self.open.add(transaction)
        self.transactions += 1

    def check(self) -> None:
        """Refuse COMMIT: raise LeaseLost unless the lease surely holds."""
        self.held.ensure()

    @property
    def is_inside(self) -> bool:
        """The lock was taken inside a transaction, and lasts exactly as long."""
        return self.held.backend.capabilities.expiry == "transaction"

    def undone(self) -> None:
        """Hear that a lock inside a transaction is gone, with the savepoint in which it was taken.

        What was done under it is undone, too. Whoever is still in its block might go on as if nothing had happened.
        """
        if self.handles:
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

    def settle(self, transaction: object, outcome: Outcome, *, ends_lock: bool = False) -> None:
        """Note how a transaction ended, and release if it was the last thing that the lease was held for.

        `ends_lock`: it was the transaction of a lock inside one, which the database has released with it.
        """
        self._unknown |= outcome is Outcome.UNKNOWN and not ends_lock
        self.handles -= self._bound.get(transaction, set())
        self._bound.pop(transaction, None)
        self.open.discard(transaction)
        if self.is_inside and self.held.lost_because:
            self.held.end(Released.EXPIRED)
        if (ends_lock or self.is_over) and self.is_due():
            with LETTING_RUN_OUT:
                if ends_lock:
                    engine.released(self.held)
                else:
                    self.finish(release, self.held)

    def join(self, handle: object) -> None:
        """Note that one more handle needs the lease, also when those before it have left it to a transaction."""
        self.handles.add(handle)

    def bind_to(self, transaction: object, handle: object) -> None:
        """Have a handle left when a transaction ends, if it was not left before."""
        self._bound.setdefault(transaction, set()).add(handle)

    def leave(self, handle: object) -> bool:
        """Note that a handle needs the lease no more; True when the caller has to release now."""
        for bound in list(self._bound.values()):
            bound.discard(handle)
        self.handles.discard(handle)
        return self.is_over and self.is_due()

    def torn(self, handle: object) -> None:
        """Hear, perhaps from the garbage collector, that nobody has a handle any more: an interrupt came in its way."""
        self.handles.discard(handle)
        if self.is_over and self.held.ended is None:
            self.is_torn = True
            self.held.renewing = False

    def leave_all(self) -> bool:
        """Leave every handle; see `leave`."""
        self._bound.clear()
        self.handles.clear()
        return self.is_over and self.is_due()

    @property
    def is_bound(self) -> bool:
        """Only transactions that are still open keep the lease: it ends with them."""
        return set(self.handles) <= set().union(*list(self._bound.values()))

    @property
    def is_over(self) -> bool:
        """Nothing needs the lease any more: its handles were left and every transaction has ended."""
        return not self.handles and not self.open

    def is_due(self) -> bool:
        """Say whether to release, now that nothing needs the lease; if not, let it run out."""
        watchdog.unwatch(self.held)
        if not self._unknown:
            return True
        stop_renewing(self.held)
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
