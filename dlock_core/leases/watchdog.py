"""Renews every lease of this process, in batches: one thread and one request per store, for any number of leases.

A renewal is answered renewed, lost, or not at all. No answer is not a loss: it is asked again soon, and becomes one
when the lease's own validity is over. Leases are known by weak reference, so one that was thrown away runs out.
(Idea: the lease monitor of madelson/DistributedLock.)

There is no lock here: callers come from signal handlers and finalizers, too, which may interrupt a caller who would
hold it. Callers only add to and remove from sets, each time by a single operation that cannot be half done.
"""

from __future__ import annotations

import logging
import os
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from dlock_core.backend import Renewal
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, Background, clock, run, tell

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.leases.lease import Held

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("dlock")

TICKS: Final = 32
"""Leases that are due in the same 1/32 s share a bucket, so that watching one costs the same whatever their number."""
BATCH: Final = 1000
IDLE: Final = 10
"""Seconds without a lease after which the thread ends; also its longest sleep, after which it removes empty buckets."""


class Watchdog:
    """The renewing thread of one store."""

    def __init__(self) -> None:
        self._due: dict[int, set[weakref.ref[Held]]] = {}
        """Leases by the tick at which they are due. Anybody may add; only the thread removes a bucket."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._next = 0
        """The tick until which the thread sleeps; only the thread sets it."""
        self.thread = Background("dlock-watchdog", "to renew leases: they run out", self._serve, lambda: self._due)

    def watch(self, held: Held, seconds: float) -> None:
        """Renew this lease in so many seconds."""
        known = weakref.ref(held)
        while True:
            held.due = due = int((clock() + seconds) * TICKS)
            bucket = self._due.get(due)
            if bucket is None:
                bucket = self._due.setdefault(due, set())
            bucket.add(known)
            if self._due.get(due) is bucket:  # Otherwise the thread has just taken the bucket, perhaps without us.
                break
        if due < self._next:  # It sleeps longer than this one may.
            self._wake.put(None)
        self.thread.ensure()

    def unwatch(self, held: Held) -> None:
        """Forget this lease, whose end was noted or is about to be; may be called from anywhere, even a finalizer."""
        bucket = self._due.get(held.due)
        if bucket is not None:
            bucket.discard(weakref.ref(held))

    def _serve(self) -> None:
        """Renew what is due, until nothing has been for long."""
        was_idle = False
        while self._due or not was_idle:
            was_idle = not self._due
            was_woken = self._sleep()
            self._turn(clean=not was_woken)

    def _sleep(self) -> bool:
        """Sleep until something is due; return True when woken for a lease that is due earlier."""
        latest = int(clock() * TICKS) + IDLE * TICKS
        while self._next != (nearest := min([*self._due, latest])):
            self._next = (
                nearest  # Whoever adds a lease now sees this; whoever added one before is seen by the next look.
            )
        try:
            self._wake.get(timeout=max(0.0, nearest / TICKS - clock()))
        except Empty:
            return False
        return True

    def _turn(self, *, clean: bool = True) -> None:
        leases = self._take(clean=clean)  # They are gone when this returns: one kept while we sleep would never end.
        for start in range(0, len(leases), BATCH):
            batch = leases[start : start + BATCH]
            try:
                self._renew(batch)
            except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
                tell(logger.error, "dlock: a renewal failed", exc_info=error)
                for held in batch:
                    self._unknown(held, "its renewal failed")

    def _take(self, *, clean: bool = True) -> list[Held]:
        """Take what is due. `clean` removes empty buckets as well.

        Without it the bucket of a lease that was released at once stays, and the next such lease need not wake us.
        """
        now = clock() * TICKS
        ticks = [tick for tick in [*self._due] if tick <= now or (clean and not self._due[tick])]
        leases = [(tick, known()) for tick in ticks for known in [*self._due.pop(tick)]]
        return [held for tick, held in leases if held is not None and _is_on(held) and self._is_due(held, tick)]

    def _is_due(self, held: Held, tick: int) -> bool:
        """Tell whether a lease found in a tick's bucket is to be renewed now, and not later from another bucket.

        A caller who was interrupted while changing the time may have added it nowhere else.
        """
        return held.due == tick or weakref.ref(held) not in self._due.get(held.due, ())

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
        answers: list[float | None] = []
        try:
            answers = run(leases[0].backend.renew_many(BLOCKING, renewals))
        except BackendUnavailable as error:
            reason = f"{reason}: {error.reason}"
        except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
            tell(logger.error, "dlock: a renewal failed", exc_info=error)
        if answers:
            for held, renewal, valid_for in zip(leases, renewals, answers, strict=True):
                if valid_for == 0.0:
                    self._unknown(held, reason)
                else:
                    self._renewed(held, renewal, sent, valid_for)
        else:
            for held in leases:
                self._unknown(held, reason)

    def _renewed(self, held: Held, renewal: Renewal, sent: float, valid_for: float | None) -> None:
        if not held.renewing:
            return
        if valid_for is None:
            held.lose("the store gave it to another, or forgot it")
            return
        if held.request is renewal.request:  # else the caller has renewed meanwhile, for another ttl
            held.extend(sent, valid_for)
        self.watch(held, valid_for / 3)

    def _unknown(self, held: Held, reason: str) -> None:
        held.trouble = reason
        if held.renewing and not held.is_lost():
            self.watch(held, min(held.remaining(), max(held.request.ttl / 20, 1 / TICKS)))
        elif held.renewing:
            held.lose()


def _is_on(held: Held) -> bool:
    return held.renewing and held.ended is None


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


def _after_fork_in_child() -> None:
    _dogs.clear()  # the threads did not come along, and their locks may be taken for ever


os.register_at_fork(after_in_child=_after_fork_in_child)
