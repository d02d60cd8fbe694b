"""What a process knows about one lease, without I/O.

Validity is local and monotonic, counted from before the attempt was sent, less an allowance for drift, so that a
process which was stopped sees at once that it lost the lease. (Idea: the Redlock page of the Redis documentation.)

Only the methods of `LeaseRecord` change a lease. Its states, and the methods that lead from one to the next::

    HELD ─── abandon ───► ABANDONED ─── begin_release ─┐
     │  └────────────────── begin_release ─────────────┴─► RELEASING ─── end ───► ENDED
     └─ lose (also from ABANDONED and RELEASING) ────────────► LOST ──── end ───► ENDED

The engine, the watchdog and a transaction may change it from different threads, and a signal handler or a finalizer may
run between any two steps. So there is no mutex here: the handler could interrupt the code that holds it. Instead the
state is derived from facts that are only ever set and never cleared: whatever two threads do at once, neither can undo
what the other did.
"""

from __future__ import annotations

import enum
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from dlock_core.backend import Granted, Released
from dlock_core.errors import LeaseLost, NotHeld
from dlock_core.late import kind_of_late
from dlock_core.observability import hooks
from dlock_core.runtime import clock
from dlock_core.scheduler import CallbackThread, after_fork_in_child, callback_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dlock_core.backend import AcquireRequest, Backend

__all__ = ["Bucket", "LeaseRecord", "LeaseState", "Membership", "valid_until"]

logger = logging.getLogger("dlock")

MAX_CLOCK_DRIFT: Final = 0.01
"""How much faster our clock may run than the store's: one percent, far more than quartz does."""
EXPIRY_MARGIN_S: Final = 0.002
"""Allowance for the coarseness of expiry in the store."""
MOMENT_S: Final = 1.0
"""The clock is read once for a batch of leases, and again for each of them that runs out within this time."""


class LeaseState(enum.Enum):
    """The state of a lease, as far as this process knows.

    A lease that has run out without being checked is still HELD here; only `remaining()` proves that it holds.
    """

    HELD = "held"
    """Renewed by the watchdog, unless renewal is switched off."""
    ABANDONED = "abandoned"
    """It is no longer renewed, and runs out unless it is released before."""
    RELEASING = "releasing"
    """A release was sent, or could not be sent, and the store has not answered."""
    LOST = "lost"
    """Another holder may have the lock; `on_lost` and the hooks have been called, or are about to be."""
    ENDED = "ended"
    """The store has answered the release: `ended` is what it found."""


def valid_until(sent: float, valid_for: float) -> float:
    """Return the time until which a grant requested at `sent` certainly holds."""
    return sent + valid_for * (1 - MAX_CLOCK_DRIFT) - EXPIRY_MARGIN_S


class Bucket(dict[str, "ref[LeaseRecord]"]):
    """The leases that are due in the same tick, by holder: a dict with str keys takes half the memory of a set."""

    __slots__ = ("tick",)

    def __init__(self, tick: int) -> None:
        self.tick = tick


class Membership:
    """Held by a handle that joined a lease; dies with the handle, even if the finalizer is interrupted."""

    __slots__ = ("__weakref__",)


class LeaseRecord:
    """One grant: shared by every handle that joined it, renewed by the watchdog, released once.

    Other modules only read: `request`, `token` and `in_store` (the store's answer), `until` (the end of its validity on
    our clock), `ended` (what the release found, None before), `loss_reason`, `bucket`, in which the watchdog finds it
    when its renewal is due, and `caller`, the thread or task that may not acquire it again.

    A process may have a hundred thousand of them, so what only a few of them need is created on demand.
    """

    __slots__ = (
        "__weakref__",
        "_is_abandoned",
        "_left",
        "_memberships",
        "_on_lost",
        "_releases",
        "backend",
        "bucket",
        "caller",
        "ended",
        "in_store",
        "loss_reason",
        "needed_by",
        "now",
        "pid",
        "renewal_trouble",
        "request",
        "since",
        "token",
        "until",
    )

    def __init__(  # noqa: PLR0917 - the hot path: keywords cost
        self,
        backend: Backend,
        request: AcquireRequest,
        granted: Granted,
        sent: float,
        now: Callable[[], float] = clock,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.backend, self.request, self.now = backend, request, now
        self.token, self.in_store = granted.token, granted.handle
        self.since, self.until = sent, valid_until(sent, granted.valid_for)
        self.pid = _own_pid
        self.caller: ref[Any] | None = None
        self.bucket: Bucket | None = None
        self.needed_by: tuple[Collection[object], ...] | None = None
        """Collections of what needs a lease that is tied to transactions; it is not renewed if all are empty."""
        self._left = 0
        """1: its first handle has left. 2: all other handles have left, too, and it is about to be released."""
        self._memberships: list[ref[Membership]] | None = None
        """The memberships of handles that have joined the first one and have not left; created on demand."""
        self.ended: Released | None = None
        self.loss_reason, self.renewal_trouble = "", "it ran out before it was renewed"
        self._is_abandoned = False
        self._releases: tuple[bool, ...] = ()
        """Whether it certainly held when the release was first sent, and when it was last repeated."""
        self._on_lost = on_lost
        """Deleted by the thread that reports the loss: deleting an attribute succeeds only once."""

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def granted(self) -> Granted:
        """The grant, as it is passed to the store again."""
        return Granted(self.token, self.request.ttl, self.in_store)

    @property
    def renewal_tick(self) -> int:
        """When it is renewed next; 0 if it was never to be renewed."""
        return 0 if self.bucket is None else self.bucket.tick

    @property
    def state(self) -> LeaseState:
        """The state of the lease; see the module's docstring for the transitions."""
        if self.ended is not None:
            return LeaseState.ENDED
        if self.loss_reason:
            return LeaseState.LOST
        if self._releases:
            return LeaseState.RELEASING
        return LeaseState.ABANDONED if self._is_abandoned else LeaseState.HELD

    def is_to_be_renewed(self) -> bool:
        """Return whether its state is HELD and something needs it."""
        if self.needed_by is not None and not any(self.needed_by):
            return False
        return self.ended is None and not (self.loss_reason or self._releases or self._is_abandoned)

    def remaining(self) -> float:
        """Return the seconds for which the lease certainly holds.

        0.0 if it is lost, belongs to another process, or its release was sent: the store may have ended it already.
        """
        return 0.0 if self._releases else self.time_left()

    def time_left(self) -> float:
        """Return the seconds until it runs out, unless an unanswered release has already ended it."""
        if self.loss_reason or self.ended is not None or self.pid != _own_pid:
            return 0.0
        left = self.until - self.now()
        return left if left > 0.0 else 0.0

    def is_lost(self) -> bool:
        """Return whether the lease ended in another way than by its release; a loss that was reported is final."""
        if self.loss_reason:
            return True
        return self.time_left() == 0.0 if self.ended is None else self.ended is not Released.RELEASED

    def is_joinable(self) -> bool:
        """Return whether the lease certainly holds, and no handle has begun to release it."""
        return self._left < 2 and self.remaining() > 0.0

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease certainly holds."""
        if self.remaining() == 0.0:
            raise LeaseLost(self.name, token=self.token, reason=self.why())

    def ensure_was_held(self, error: BaseException | None) -> None:
        """Raise LeaseLost if a block ended without an error but with a lost lease: its work only looked protected."""
        if error is None and self.ended is not None and self.ended is not Released.RELEASED:
            raise LeaseLost(self.name, token=self.token, reason=self.why())

    def ensure_own_process(self) -> None:
        """Raise NotHeld in a forked child: the lease is its parent's."""
        if self.pid != _own_pid:
            raise NotHeld(self.name, reason=f"it belongs to process {self.pid}, which forked this one")

    def why(self) -> str:
        """Return why the lease does not hold, for an error message."""
        if self.pid != _own_pid:
            return f"it belongs to process {self.pid}, which forked this one"
        if self.ended is Released.RELEASED:
            return "it was released"
        if self.ended is not None:
            return self.loss_reason or f"it was {self.ended.value} at release"
        is_being_released = self._releases and not self.loss_reason
        return "it is being released" if is_being_released else self.loss_reason or self.renewal_trouble

    def join(self, membership: Membership) -> None:
        """Count one more handle that needs the lease, until it leaves or is garbage-collected with its membership."""
        memberships = self._memberships
        if memberships is None:
            self._memberships = memberships = []
        memberships.append(ref(membership, memberships.remove))

    @property
    def has_handles(self) -> bool:
        """Whether some handle has neither left nor been garbage-collected."""
        return not self._left or bool(self._memberships)

    def leave(self, membership: Membership | None) -> bool:
        """Stop counting a handle; return True if none is left and the lease has to be released now.

        Leaving again changes nothing. `membership`: the one with which the handle has joined, None for the first
        handle. Raises NotHeld in a forked child.
        """
        if self.pid != _own_pid:
            self.ensure_own_process()
        if membership is not None:
            self.count_out(membership)
        elif not self._left:
            self._left = 1
        if self.ended is not None or not self._left or self._memberships:
            return False
        # A handle that joins now either sees this, or is seen below, or both: it checks `is_joinable` again after
        # joining.
        self._left = 2
        if self._memberships:
            self._left = 1
            return False
        return True

    def count_out(self, membership: Membership | None) -> bool:
        """Stop counting a handle, and do nothing else; return whether it counted until now."""
        if membership is not None:
            try:
                (self._memberships or []).remove(ref(membership))
            except ValueError:
                return False
        elif self._left:
            return False
        else:
            self._left = 1
        return True

    def extend(self, sent: float, valid_for: float) -> None:
        """Record a renewal that was sent at `sent`; an answer after the lease has run out does not revive it."""
        self.extend_until(valid_until(sent, valid_for), self.now())

    def extend_until(self, until: float, now: float) -> None:
        """Record a renewal that is valid until then; the clock is read again if `now`, a moment ago, leaves a doubt."""
        if self.until - now < MOMENT_S and self.time_left() == 0.0:
            self.lose()
        elif until > self.until:
            self.until = until

    def change_ttl(self, sent: float, ttl: float) -> None:
        """Record that a renewal with another ttl is about to be sent: a shorter one counts at once, answered or not."""
        self.request = self.request._replace(ttl=ttl)
        self.until = min(self.until, valid_until(sent, ttl))

    def replace_grant(self, granted: Granted) -> None:
        """Record that the store has granted the same lease again, with a greater token."""
        self.in_store, self.token = granted.handle, granted.token

    def note_trouble(self, reason: str) -> None:
        """Record why the last renewal got no answer: the reason for the loss, if there is one."""
        self.renewal_trouble = reason

    def abandon(self) -> None:
        """Stop its renewal: it runs out unless it is released before. May be called from a finalizer."""
        self._is_abandoned = True
        if self.bucket is not None:
            self.bucket.pop(self.request.holder, None)

    def begin_release(self) -> None:
        """Record that a release is about to be sent, which stops renewal, and whether the lease still certainly holds.

        Raises NotHeld in a forked child.
        """
        holds = self.time_left() > 0.0
        if not holds:
            self.ensure_own_process()
        self._releases = (*self._releases[:1], holds)

    def end(self, found: Released) -> bool:
        """Record what a release found, and return whether that is the first answer, which stands."""
        if len(self._releases) > 1 and any(self._releases):
            # An earlier request has released it and its reply was lost: any present holder got the lock through that.
            found = Released.RELEASED
        is_first = False
        if self.ended is None:  # No other thread runs between the check and the assignment: nothing is called here.
            self.ended, is_first = found, True
        if self.bucket is not None:  # Only now: the next waiter already has the lock.
            self.bucket.pop(self.request.holder, None)
        return is_first

    def lose(self, reason: str = "") -> None:
        """Record the loss, and report it once, in another thread, so that callbacks delay no renewal."""
        if self.ended is not None:
            return
        self.loss_reason = self.loss_reason or reason or self.renewal_trouble
        try:
            on_lost = self._on_lost
            del self._on_lost
        except AttributeError:
            return
        thread = callback_thread()
        thread(self._tell_loss, self.loss_reason, on_lost)
        _told_in[self] = thread  # Only now: a later event is reported in the same thread, and so after the loss.

    def emit_released(self) -> None:
        """Report to the hooks that it has been released."""
        if hooks.subscribed:
            self.emit("released", (self.ended or Released.EXPIRED).value)

    def emit(self, kind: hooks.Kind, reason: str = "") -> None:
        """Report an event of this lease to the hooks, after its loss if that is being reported."""
        event = (kind, self.name, self.token, self.now() - self.since, reason, False, self)
        thread = _told_in.get(self) if self.loss_reason else None
        if thread is None:
            hooks.emit(*event)
        else:
            thread(hooks.emit, *event)

    def _tell_loss(self, reason: str, on_lost: Callable[[], None] | None) -> None:
        with suppress(BaseException):  # A failing log handler must not prevent the callbacks.
            logger.warning("dlock: lease of lock %r (token %d) is lost: %s", self.name, self.token, reason)
        hooks.emit("lost", self.name, self.token, self.now() - self.since, reason, lease=self)
        if on_lost is not None:
            try:
                if late := kind_of_late(on_lost()):
                    logger.error("dlock: on_lost of lock %r did nothing: it returned a %s", self.name, late)
            except BaseException:
                with suppress(BaseException):
                    logger.exception("dlock: on_lost of lock %r failed", self.name)


_told_in: Final[WeakKeyDictionary[LeaseRecord, CallbackThread]] = WeakKeyDictionary()
"""The thread that reports the events of a lost lease, so that they keep their order.

Few leases are lost, so a record has no attribute for it."""

_own_pid = os.getpid()
"""The pid of this process: one int for all leases, and no system call for each of them."""


@after_fork_in_child
def _note_pid() -> None:
    global _own_pid  # noqa: PLW0603 - a process has one number
    _own_pid = os.getpid()
