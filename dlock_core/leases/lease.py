"""What a process knows of one lease, without I/O; and the watchdog, which renews every lease of one store.

Validity is local and monotonic, counted from before the attempt was sent, less an allowance for drift, so that a
process which was stopped sees at once that it lost the lease. (Idea: the Redlock page of the Redis documentation.)

Only the methods of `LeaseRecord` change a lease. Its states, and the methods that lead from one to the next::

    HELD ─── abandon ───► ABANDONED ─── begin_release ─┐
     │  └────────────────── begin_release ─────────────┴─► RELEASING ─── end ───► ENDED
     └─ lose (also from ABANDONED and RELEASING) ────────────► LOST ──── end ───► ENDED

The engine, the watchdog and a transaction may each change it from a thread of its own, and a signal handler or a
finalizer may come between any two steps, so there is no lock here: it could interrupt the code that has it.
Instead the state follows from facts that are only ever set and never taken back, and the watchdog's sets are changed
by single operations that cannot be half done: whatever two threads do at once, none can undo what the other did.
"""

from __future__ import annotations

import enum
import logging
import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, ref

from dlock_core.backend import Released, Renewal, RenewalFailure
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.observability import hooks
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import (
    CallbackThread,
    Scheduler,
    after_fork_in_child,
    call_in_background,
    callback_thread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.backend import AcquireRequest, Backend, Granted, RenewalResult

__all__ = ["LeaseRecord", "LeaseState", "Watchdog", "renew_in_background", "valid_until"]

logger = logging.getLogger("dlock")

TICKS_PER_S: Final = 32
"""Leases that are due in the same 1/32 s share a bucket, so that watching one costs the same whatever their number."""
MAX_BATCH: Final = 1000
"""Leases that are renewed by one request, at most."""
MAX_CLOCK_DRIFT: Final = 0.01
"""How much faster our clock may run than the store's: one percent, far more than quartz does."""
EXPIRY_MARGIN_S: Final = 0.002
"""Allowance for the coarseness of expiry in the store."""
MOMENT_S: Final = 1.0
"""The clock is read once for a batch of leases, and again for each of them that runs out within such a time."""


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


class LeaseRecord:
    """One grant: shared by every handle that joined it, known to the watchdog, released once.

    Others only read: `request` and `granted` (what was asked, and what the store answered), `until` (the end of its
    validity on our clock), `ended` (what the release found, None before), `loss_reason`, and `bucket`, in which the
    watchdog finds it when its renewal is due.
    """

    __slots__ = (
        "__weakref__",
        "_callback_thread",
        "_is_abandoned",
        "_is_left",
        "_is_loss_untold",
        "_on_lost",
        "_release_requests",
        "_was_released_in_time",
        "backend",
        "bucket",
        "ended",
        "granted",
        "handles",
        "loss_reason",
        "now",
        "pid",
        "renewal_trouble",
        "request",
        "since",
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
        self.backend, self.request, self.granted, self.now = backend, request, granted, now
        self.since, self.until = sent, valid_until(sent, granted.valid_for)
        self.pid = _own_pid
        self.handles: list[int] = []
        """The ids of the handles that have not left, each once: joining or leaving again changes nothing."""
        self.bucket: Bucket | None = None
        self.ended: Released | None = None
        self.loss_reason, self.renewal_trouble = "", "it ran out before it was renewed"
        self._is_abandoned, self._release_requests, self._was_released_in_time = False, 0, False
        self._is_left = False
        """Its last handle has left, so that it is about to be released."""
        self._on_lost = on_lost
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
    def renewal_tick(self) -> int:
        """When it is renewed next; 0 when it never was to be."""
        return 0 if self.bucket is None else self.bucket.tick

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

    def is_to_be_renewed(self) -> bool:
        """Return whether its state is HELD."""
        return self.ended is None and not (self.loss_reason or self._release_requests or self._is_abandoned)

    def remaining(self) -> float:
        """Return the seconds for which the lease surely holds; 0.0 once it is lost, released or another process's."""
        if self.loss_reason or self.ended is not None or self.pid != _own_pid:
            return 0.0
        left = self.until - self.now()
        return left if left > 0.0 else 0.0

    def is_lost(self) -> bool:
        """Return whether the lease ended otherwise than by its release."""
        return self.ended is None and self.remaining() == 0.0

    def is_joinable(self) -> bool:
        """Return whether the lease surely holds, and no handle has begun to release it."""
        return not self._is_left and not self._release_requests and self.remaining() > 0.0

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease surely holds."""
        if self.remaining() == 0.0:
            raise LeaseLost(self.name, token=self.token, reason=self.why())

    def ensure_was_held(self, error: BaseException | None) -> None:
        """Raise LeaseLost if a block without an error has ended with a lost lease: its work only looked protected."""
        if error is None and self.ended is not None and self.ended is not Released.RELEASED:
            reason = self.loss_reason or f"it was {self.ended.value} at release"
            raise LeaseLost(self.name, token=self.token, reason=reason)

    def ensure_own_process(self) -> None:
        """Raise NotHeld in a forked child: the lease is its parent's."""
        if self.pid != _own_pid:
            raise NotHeld(self.name, reason=f"it belongs to process {self.pid}, which forked this one")

    def why(self) -> str:
        """Return why the lease does not hold, for an error message."""
        if self.pid != _own_pid:
            return f"it belongs to process {self.pid}, which forked this one"
        return "it was released" if self.ended is not None else self.loss_reason or self.renewal_trouble

    def join(self, handle: object) -> None:
        """Count one more handle that needs the lease."""
        if id(handle) not in self.handles:
            self.handles.append(id(handle))

    def leave(self, handle: object) -> bool:
        """Count a handle no more; returns True when none is left and the lease is still to be released.

        Raises NotHeld in a forked child.
        """
        if self.pid != _own_pid:
            self.ensure_own_process()
        self.note_collected(handle)
        if self.handles or self.ended is not None:
            return False
        # A handle that joins meets this, or is met below, or both: it asks `is_joinable` once more after it has joined.
        self._is_left = True
        if self.handles:
            self._is_left = False
            return False
        return True

    def note_collected(self, handle: object) -> bool:
        """Count a handle no more that is thrown away, perhaps by the garbage collector; returns whether it counted."""
        try:
            self.handles.remove(id(handle))
        except ValueError:
            return False
        return True

    def extend(self, sent: float, valid_for: float) -> None:
        """Record a renewal that was asked for at `sent`; an answer after the lease ran out does not heal it."""
        self.extend_until(valid_until(sent, valid_for), self.now())

    def extend_until(self, until: float, now: float) -> None:
        """Record a renewal that is valid so long; the clock is asked again if `now`, a moment ago, leaves a doubt."""
        if self.until - now < MOMENT_S and self.remaining() == 0.0:
            self.lose()
        elif until > self.until:
            self.until = until

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
        """Stop its renewal: it runs out unless it is released before. May be called from a finalizer."""
        self._is_abandoned = True
        if self.bucket is not None:
            self.bucket.discard(ref(self))

    def begin_release(self) -> None:
        """Record that a release is about to be sent: it is renewed no more; and whether it surely holds still.

        Raises NotHeld in a forked child.
        """
        if self.remaining() > 0.0:
            self._was_released_in_time = True
        else:
            self.ensure_own_process()
        self._release_requests += 1

    def end(self, found: Released) -> Released:
        """Record what a release found, and return it; the first answer stands."""
        if self._was_released_in_time and self._release_requests > 1:
            # An earlier request has released it and its reply was lost: a present holder was let in by that.
            found = Released.RELEASED
        self.ended = self.ended or found
        if self.bucket is not None:  # Only now: the next waiter has the lock already.
            self.bucket.discard(ref(self))
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
        if self._on_lost is not None:
            try:
                self._on_lost()
            except BaseException:
                with suppress(BaseException):
                    logger.exception("dlock: on_lost of lock %r failed", self.name)


class Bucket(set["ref[LeaseRecord]"]):
    """The leases that are due in the same tick."""

    __slots__ = ("tick",)

    def __init__(self, tick: int) -> None:
        self.tick = tick

    def take_in(self, leases: Sequence[LeaseRecord]) -> None:
        """Have these leases renewed when this bucket is due, and not before."""
        for held in leases:
            held.bucket = self
        self.update(map(ref, leases))


class Watchdog:
    """The thread that renews the leases of one store, in batches: one request for any number of leases.

    A renewal is answered renewed, lost, or not at all. No answer is not a loss: it is asked again soon, and becomes one
    when the lease's own validity is over. Leases are known by weak reference, so one that was thrown away runs out.
    (Idea: the lease monitor of madelson/DistributedLock.)
    """

    def __init__(self) -> None:
        self._due: dict[int, Bucket] = {}
        """Leases by the tick at which they are due. Any thread may add; only the thread removes a bucket."""
        self.scheduler = Scheduler("dlock-watchdog", "to renew leases: they run out", self._next_due, self._run_due)

    def plan(self, seconds: float, *leases: LeaseRecord) -> None:
        """Renew these leases in so many seconds."""
        while True:
            tick = int((clock() + seconds) * TICKS_PER_S)
            bucket = self._due.get(tick)
            if bucket is None:
                bucket = self._due.setdefault(tick, Bucket(tick))
            bucket.take_in(leases)
            if self._due.get(tick) is bucket:  # Otherwise the thread has just taken the bucket, perhaps without us.
                break
        if tick / TICKS_PER_S < self.scheduler.sleeps_until:
            self.scheduler.plan(tick / TICKS_PER_S)

    def _next_due(self) -> float | None:
        return min(due) / TICKS_PER_S if (due := [*self._due]) else None

    def _run_due(self) -> None:
        # No lease is kept here beyond the call: one that the sleeping thread held could not be thrown away.
        # After an early wake-up the bucket of a lease that was released at once stays: the next such lease falls into
        # it and need not wake the thread again. After a full sleep empty buckets go, so that the thread can end.
        leases = self._take(clean=not self.scheduler.was_woken)
        for start in range(0, len(leases), MAX_BATCH):
            batch = leases[start : start + MAX_BATCH]
            try:
                self._renew(batch)
            except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
                call_in_background(logger.error, "dlock: a renewal failed", exc_info=error)
                for held in batch:
                    self._unknown(held, "its renewal failed")

    def _take(self, *, clean: bool = True) -> list[LeaseRecord]:
        """Take what is due; `clean` removes empty buckets as well."""
        now = clock() * TICKS_PER_S
        ticks = [tick for tick in [*self._due] if tick <= now or (clean and not self._due[tick])]
        return [
            held
            for bucket in [self._due.pop(tick) for tick in ticks]
            for known in [*bucket]
            if (held := known()) is not None and (held.bucket is bucket or self._is_due(held, bucket.tick))
        ]

    def _is_due(self, held: LeaseRecord, tick: int) -> bool:
        """Return whether a lease found in a tick's bucket is to be renewed now, and not later from another bucket.

        A caller that was interrupted while it changed the time may have added the lease to no other bucket.
        """
        return held.renewal_tick == tick or ref(held) not in self._due.get(held.renewal_tick, ())

    def _renew(self, leases: list[LeaseRecord]) -> None:
        valid, now = [], leases[0].now()
        for held in leases:
            if held.is_to_be_renewed():
                if held.until - now > MOMENT_S or held.remaining() > 0.0:
                    valid.append(held)
                else:
                    held.lose()
        if valid:
            self._ask(valid)

    def _ask(self, leases: list[LeaseRecord]) -> None:
        sent, reason = clock(), "it could not be renewed in time"
        renewals = [Renewal(held.request, held.granted) for held in leases]
        answers: Sequence[RenewalResult] = ()
        try:
            answers = run(leases[0].backend.renew(BLOCKING, renewals))
        except BackendUnavailable as error:
            reason = f"{reason}: {error.reason}"
        except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
            call_in_background(logger.error, "dlock: a renewal failed", exc_info=error)
        renewed: dict[float, list[LeaseRecord]] = {}
        """The leases by how long they are valid now: those of one ttl are due together again."""
        answers, now = answers or [RenewalFailure.UNKNOWN] * len(leases), leases[0].now()
        valid_for, until, together = 0.0, 0.0, list[LeaseRecord]()
        for held, renewal, result in zip(leases, renewals, answers, strict=True):
            if result is RenewalFailure.UNKNOWN:
                self._unknown(held, reason)
            elif held.is_to_be_renewed():
                if result is RenewalFailure.LOST:
                    held.lose("the store gave it to another, or forgot it")
                    continue
                if result != valid_for:
                    valid_for, until = result, valid_until(sent, result)
                    together = renewed.setdefault(result, [])
                if held.request is renewal.request:  # Otherwise the caller has renewed it for another ttl since.
                    held.extend_until(until, now)
                together.append(held)
        for valid_for, together in renewed.items():
            self.plan(valid_for / 3, *together)
        self._plan_changed(leases, renewals)

    def _plan_changed(self, leases: list[LeaseRecord], renewals: list[Renewal]) -> None:
        """Plan those again that their callers have renewed for another ttl since: our plan may have replaced theirs."""
        for held, renewal in zip(leases, renewals, strict=True):
            if held.request is not renewal.request and held.is_to_be_renewed():
                self.plan(held.remaining() / 3, held)

    def _unknown(self, held: LeaseRecord, reason: str) -> None:
        held.note_trouble(reason)
        if not held.is_to_be_renewed():
            return
        if held.is_lost():
            held.lose()
        else:
            self.plan(min(held.remaining(), max(held.request.ttl / 20, 1 / TICKS_PER_S)), held)


_watchdogs: WeakKeyDictionary[Backend, Watchdog] = WeakKeyDictionary()
_own_pid = os.getpid()
"""The number of this process: one int for all leases, and no system call on the way of each."""


def renew_in_background(*leases: LeaseRecord) -> None:
    """Renew leases of one store, each from a third of its ttl on, until it is released, lost, abandoned or thrown away.

    All are looked at when the first of them is due.
    """
    due = min([held.until for held in leases], default=math.inf)
    if due == math.inf:
        return
    backend = leases[0].backend
    watchdog = _watchdogs.get(backend)
    if watchdog is None:
        watchdog = _watchdogs.setdefault(backend, Watchdog())
    watchdog.plan((due - clock()) / 3, *leases)


@after_fork_in_child
def _begin_anew() -> None:
    global _own_pid  # noqa: PLW0603 - a process has one number
    _own_pid = os.getpid()
    _watchdogs.clear()  # The threads did not come along: the child makes its own.
