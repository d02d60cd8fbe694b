"""Renews every lease of this process, in batches: one thread and one request per store, for any number of leases.

A renewal is answered renewed, lost, or not at all. No answer is not a loss: it is asked again soon, and becomes one
when the lease's own validity is over. Leases are known by weak reference, so one that was thrown away runs out.
(Idea: the lease monitor of madelson/DistributedLock.)

There is no lock here: signal handlers and finalizers call, too, and may interrupt a caller who would hold it. Callers
only add to and remove from sets, each time by a single operation that cannot be half done.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Final, Literal

from dlock_core.backend import Renewal, RenewalFailure
from dlock_core.errors import BackendUnavailable
from dlock_core.leases.lease import LeaseState
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import Scheduler, after_fork_in_child, call_in_background

if TYPE_CHECKING:
    from dlock_core.backend import Backend, RenewalResult
    from dlock_core.leases.lease import Held

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("dlock")

TICKS: Final = 32
"""Leases that are due in the same 1/32 s share a bucket, so that watching one costs the same whatever their number."""
BATCH: Final = 1000


class Watchdog:
    """The renewing thread of one store."""

    def __init__(self) -> None:
        self._due: dict[int, set[weakref.ref[Held]]] = {}
        """Leases by the tick at which they are due. Anybody may add; only the thread removes a bucket."""
        self.scheduler = Scheduler("dlock-watchdog", "to renew leases: they run out", self._next_due, self._run_due)

    def watch(self, held: Held, seconds: float) -> None:
        """Renew this lease in so many seconds."""
        known = weakref.ref(held)
        while True:
            due = int((clock() + seconds) * TICKS)
            held.plan_renewal(due)
            bucket = self._due.get(due)
            if bucket is None:
                bucket = self._due.setdefault(due, set())
            bucket.add(known)
            if self._due.get(due) is bucket:  # Otherwise the thread has just taken the bucket, perhaps without us.
                break
        if due / TICKS < self.scheduler.sleeps_until:
            self.scheduler.plan(due / TICKS)

    def unwatch(self, held: Held) -> None:
        """Stop renewing this lease, whose end is recorded or is about to be; may be called even from a finalizer."""
        bucket = self._due.get(held.renewal_tick)
        if bucket is not None:
            bucket.discard(weakref.ref(held))

    def _next_due(self) -> float | None:
        return min(due) / TICKS if (due := [*self._due]) else None

    def _run_due(self) -> None:
        # No lease is kept here beyond the call: one that the sleeping thread held could not be thrown away.
        # After an early wake-up the bucket of a lease that was released at once stays: the next such lease falls into
        # it and need not wake the thread again. After a full sleep empty buckets go, so that the thread can end.
        leases = self._take(
            clean=not self.scheduler.was_woken
        )  # They are gone when this returns: one kept while we sleep would never end.
        for start in range(0, len(leases), BATCH):
            batch = leases[start : start + BATCH]
            try:
                self._renew(batch)
            except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
                call_in_background(logger.error, "dlock: a renewal failed", exc_info=error)
                for held in batch:
                    self._unknown(held, "its renewal failed")

    def _take(self, *, clean: bool = True) -> list[Held]:
        """Take what is due; `clean` removes empty buckets as well."""
        now = clock() * TICKS
        ticks = [tick for tick in [*self._due] if tick <= now or (clean and not self._due[tick])]
        leases = [(tick, known()) for tick in ticks for known in [*self._due.pop(tick)]]
        return [
            held
            for tick, held in leases
            if held is not None and held.state is LeaseState.HELD and self._is_due(held, tick)
        ]

    def _is_due(self, held: Held, tick: int) -> bool:
        """Return whether a lease found in a tick's bucket is to be renewed now, and not later from another bucket.

        A caller who was interrupted while changing the time may have added it nowhere else.
        """
        return held.renewal_tick == tick or weakref.ref(held) not in self._due.get(held.renewal_tick, ())

    def _renew(self, leases: list[Held]) -> None:
        valid = []
        for held in leases:
            if held.remaining() > 0.0:
                valid.append(held)
            else:
                held.lose()
        if valid:
            self._ask(valid)

    def _ask(self, leases: list[Held]) -> None:
        sent, reason = clock(), "it could not be renewed in time"
        renewals = [Renewal(held.request, held.granted) for held in leases]
        answers: list[RenewalResult] = []
        try:
            answers = run(leases[0].backend.renew(BLOCKING, renewals))
        except BackendUnavailable as error:
            reason = f"{reason}: {error.reason}"
        except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
            call_in_background(logger.error, "dlock: a renewal failed", exc_info=error)
        if answers:
            for held, renewal, result in zip(leases, renewals, answers, strict=True):
                if result is RenewalFailure.UNKNOWN:
                    self._unknown(held, reason)
                else:
                    self._renewed(held, renewal, sent, result)
        else:
            for held in leases:
                self._unknown(held, reason)

    def _renewed(self, held: Held, renewal: Renewal, sent: float, result: float | Literal[RenewalFailure.LOST]) -> None:
        if held.state is not LeaseState.HELD:
            return
        if result is RenewalFailure.LOST:
            held.lose("the store gave it to another, or forgot it")
            return
        if held.request is renewal.request:  # Otherwise the caller has renewed it for another ttl since.
            held.extend(sent, result)
        self.watch(held, result / 3)

    def _unknown(self, held: Held, reason: str) -> None:
        held.note_trouble(reason)
        if held.state is not LeaseState.HELD:
            return
        if held.is_lost():
            held.lose()
        else:
            self.watch(held, min(held.remaining(), max(held.request.ttl / 20, 1 / TICKS)))


_dogs: weakref.WeakKeyDictionary[Backend, Watchdog] = weakref.WeakKeyDictionary()


def watch(held: Held) -> None:
    """Renew the lease, from a third of its ttl on, until it is released, lost or thrown away."""
    dog = _dogs.get(held.backend)
    if dog is None:
        dog = _dogs.setdefault(held.backend, Watchdog())
    dog.watch(held, (held.until - clock()) / 3)


def unwatch(held: Held) -> None:
    """Stop renewing the lease."""
    dog = _dogs.get(held.backend)
    if dog is not None:
        dog.unwatch(held)


@after_fork_in_child
def _forget_dogs() -> None:
    _dogs.clear()  # The threads did not come along: the child makes its own.
