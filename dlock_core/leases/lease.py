"""What a process knows of one lease, without I/O: its state, until when it surely holds, who needs it, how it ended.

Validity is local and monotonic, counted from before the attempt was sent, less an allowance for drift, so that a
process which was stopped sees at once that it lost the lease. (Idea: the Redlock page of the Redis documentation.)

Only the methods of this module change a lease. Its states, and the methods that lead from one to the next::

    HELD ─── abandon ───► ABANDONED ─── begin_release ─┐
     │  └────────────────── begin_release ─────────────┴─► RELEASING ─── end ───► ENDED
     └─ lose (also from ABANDONED and RELEASING) ────────────► LOST ──── end ───► ENDED

The engine, the watchdog and a transaction may each change it from a thread of its own, and a signal handler may raise
between any two steps, so there is no lock here. Instead the state follows from facts that are only ever set and never
taken back: whatever two threads do at once, none can undo the transition of the other.
"""

from __future__ import annotations

import enum
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlock_core.backend import Released
from dlock_core.errors import LeaseLost, NotHeld
from dlock_core.observability import hooks
from dlock_core.runtime import clock
from dlock_core.scheduler import CallbackThread, callback_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backend import Backend, Granted, Request

__all__ = ["LeaseState", "valid_until"]

MAX_CLOCK_DRIFT: Final = 0.01
"""How much faster our clock may run than the store's: one percent, far more than quartz does."""
EXPIRY_MARGIN_S: Final = 0.002
"""Allowance for the coarseness of expiry in the store."""


class LeaseState(enum.Enum):
    """What has become of a lease, as far as this process knows.

    A lease that has run out without being looked at is still HELD here; `remaining()` is what proves that it holds.
    """

    HELD = "held"
    """Renewed by the watchdog, if that is wanted."""
    ABANDONED = "abandoned"
    """It is renewed no more, and runs out unless it is released before."""
    RELEASING = "releasing"
    """The store was asked to end it, and has not answered, or could not be asked."""
    LOST = "lost"
    """Another may hold the lock; `on_lost` and the hooks have been told, or are about to be."""
    ENDED = "ended"
    """The store has answered the release: `ended` tells what it found."""


def valid_until(sent: float, valid_for: float) -> float:
    """Return the moment until which a grant asked for at `sent` surely holds."""
    return sent + valid_for * (1 - MAX_CLOCK_DRIFT) - EXPIRY_MARGIN_S


logger = logging.getLogger("dlock")


class Held:
    """One grant: shared by every handle that joined it, known to the watchdog, released once.

    Others only read: `request` and `granted` (what was asked, and what the store answered), `until` (the end of its
    validity on our clock), `ended` (what the release found, None before), `loss_reason` and `renewal_tick`.
    """

    __slots__ = (
        "__weakref__",
        "_callback_thread",
        "_is_abandoned",
        "_is_loss_untold",
        "_on_lost",
        "_release_requests",
        "_was_released_in_time",
        "backend",
        "ended",
        "granted",
        "handles",
        "loss_reason",
        "now",
        "pid",
        "renewal_tick",
        "renewal_trouble",
        "request",
        "since",
        "until",
    )

    def __init__(
        self, backend: Backend, request: Request, granted: Granted, sent: float, now: Callable[[], float] = clock
    ) -> None:
        self.backend, self.request, self.granted, self.now = backend, request, granted, now
        self.since, self.until = sent, valid_until(sent, granted.valid_for)
        self.pid = os.getpid()
        self.handles: set[int] = set()
        """The ids of the handles that have not left. A set, so that joining or leaving again changes nothing."""
        self.renewal_tick = 0
        self.ended: Released | None = None
        self.loss_reason, self.renewal_trouble = "", "it ran out before it was renewed"
        self._is_abandoned, self._release_requests, self._was_released_in_time = False, 0, False
        self._on_lost: tuple[Callable[[], None], ...] = ()
        self._is_loss_untold = True
        """Deleted by the thread that tells of the loss: deleting an attribute succeeds only once."""
        self._callback_thread: CallbackThread | None = None
        """Where the events of a lost lease are told, so that they keep their order."""

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def token(self) -> int:
        return self.granted.token

    @property
    def state(self) -> LeaseState:
        """Where the lease stands; see the module's text for the transitions."""
        if self.ended is not None:
            return LeaseState.ENDED
        if self.loss_reason:
            return LeaseState.LOST
        if self._release_requests:
            return LeaseState.RELEASING
        return LeaseState.ABANDONED if self._is_abandoned else LeaseState.HELD

    def remaining(self) -> float:
        """Return the seconds for which the lease surely holds; 0.0 once it is lost, released or another process's."""
        if self.loss_reason or self.ended is not None or self.pid != os.getpid():
            return 0.0
        left = self.until - self.now()
        return left if left > 0.0 else 0.0

    def is_lost(self) -> bool:
        """Return whether the lease ended otherwise than by its release."""
        return self.ended is None and self.remaining() == 0.0

    def is_joinable(self) -> bool:
        """Return whether the lease surely holds, and the store was not asked to release it."""
        return not self._release_requests and self.remaining() > 0.0

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease surely holds."""
        if self.remaining() == 0.0:
            raise LeaseLost(self.name, token=self.token, reason=self.why())

    def ensure_own_process(self) -> None:
        """Raise NotHeld in a forked child: the lease is its parent's."""
        if self.pid != os.getpid():
            raise NotHeld(self.name, reason=f"it belongs to process {self.pid}, which forked this one")

    def why(self) -> str:
        """Return why the lease does not hold, for an error message."""
        if self.pid != os.getpid():
            return f"it belongs to process {self.pid}, which forked this one"
        return "it was released" if self.ended is not None else self.loss_reason or self.renewal_trouble

    def join(self, handle: object) -> None:
        """Count one more handle that needs the lease."""
        self.handles.add(id(handle))

    def leave(self, handle: object) -> bool:
        """Count a handle no more; returns True when none is left and the lease is still to be released."""
        self.handles.discard(id(handle))
        return not self.handles and self.ended is None

    def call_when_lost(self, *callbacks: Callable[[], None]) -> None:
        """Set what is called once, in another thread, when the lease is lost."""
        self._on_lost = callbacks

    def plan_renewal(self, tick: int) -> None:
        """Record when the watchdog renews the lease next."""
        self.renewal_tick = tick

    def extend(self, sent: float, valid_for: float) -> None:
        """Record a renewal that was asked for at `sent`; an answer after the lease ran out does not heal it."""
        if self.is_lost():
            self.lose()
        else:
            self.until = max(self.until, valid_until(sent, valid_for))

    def change_ttl(self, sent: float, ttl: float) -> None:
        """Record that a renewal for another ttl is about to be sent: a shorter one counts at once, answered or not."""
        self.request = self.request._replace(ttl=ttl)
        self.until = min(self.until, valid_until(sent, ttl))

    def replace_grant(self, sent: float, granted: Granted) -> None:
        """Record that the store has granted the same lease again, with a greater token."""
        self.granted = granted
        self.extend(sent, granted.valid_for)

    def note_trouble(self, reason: str) -> None:
        """Record why the last renewal went unanswered: the reason of the loss, should there be one."""
        self.renewal_trouble = reason

    def abandon(self) -> None:
        """Stop its renewal: it runs out unless it is released before."""
        self._is_abandoned = True

    def begin_release(self) -> None:
        """Record that a release is about to be sent: it is renewed no more; and whether it surely holds still."""
        self._was_released_in_time = self._was_released_in_time or self.remaining() > 0.0
        self._release_requests += 1

    def end(self, found: Released) -> Released:
        """Record what a release found, and return it; the first answer stands."""
        if self._was_released_in_time and self._release_requests > 1:
            # An earlier request has released it and its reply was lost: a present holder was let in by that.
            found = Released.RELEASED
        self.ended = self.ended or found
        return self.ended

    def lose(self, reason: str = "") -> None:
        """Record the loss, and report it, once, in another thread: what callbacks do delays no renewal."""
        if self.ended is not None:
            return
        self.loss_reason = self.loss_reason or reason or self.renewal_trouble
        try:
            del self._is_loss_untold
        except AttributeError:
            return
        thread = callback_thread()
        thread(self._tell_loss, self.loss_reason)
        self._callback_thread = thread  # Only now: a later event is told in the same thread, and so after the loss.

    def emit(self, kind: hooks.Kind, reason: str = "") -> None:
        """Report an event of this lease to the hooks, after its loss if that is being reported."""
        event = (kind, self.name, self.token, self.now() - self.since, reason, False, self)
        if self._callback_thread is None:
            hooks.emit(*event)
        else:
            self._callback_thread(hooks.emit, *event)

    def _tell_loss(self, reason: str) -> None:
        with suppress(BaseException):  # A handler of the application's logging must not keep the callbacks from us.
            logger.warning("dlock: lease of lock %r (token %d) is lost: %s", self.name, self.token, reason)
        hooks.emit("lost", self.name, self.token, self.now() - self.since, reason, lease=self)
        for callback in self._on_lost:
            try:
                callback()
            except BaseException:
                with suppress(BaseException):
                    logger.exception("dlock: on_lost of lock %r failed", self.name)
