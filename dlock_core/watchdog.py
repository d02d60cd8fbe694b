"""Renews every lease of this process, in batches: one thread and one request per store, for any number of leases.

A renewal is answered renewed, lost, or not at all. No answer is not a loss: it is asked again soon, and becomes one
when the lease's own validity is over. Leases are known by weak reference, so one that was thrown away runs out.
(Idea: the lease monitor of madelson/DistributedLock.)
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from dlock_core.backend import Renewal
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.held import Held

__all__ = ["unwatch", "watch"]

logger = logging.getLogger("dlock")

TICKS: Final = 32
"""Leases that are due in the same 1/32 s share a bucket, so that watching one costs the same whatever their number."""
BATCH: Final = 1000
REENTERED: Final = 0.1
"""Seconds after which the thread that keeps us waiting is taken for our own; nobody else takes so long."""
IDLE: Final = 10
"""Seconds without a lease after which the thread ends."""


class Watchdog:
    """The renewing thread of one store."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._due: dict[int, set[weakref.ref[Held]]] = {}
        self._next = self._ends = 0  # the ticks until which the thread sleeps, and at which it ends if nothing comes
        self._thread: threading.Thread | None = None

    def watch(self, held: Held, seconds: float) -> None:
        """Renew this lease in so many seconds."""
        held.due = due = int((clock() + seconds) * TICKS)
        with self._guard:
            self._due.setdefault(due, set()).add(weakref.ref(held))
            self._ends = due + IDLE * TICKS
            if self._thread is None:
                self._start()
            elif due < self._next:  # it sleeps longer than this one may
                self._next = due
                self._wake.set()

    def unwatch(self, held: Held) -> None:
        """Forget this lease, whose end was noted or is about to be; if not now, then when it is due.

        Not now: the garbage collector may end a session, and its leases, in the middle of a method of ours.
        """
        if not self._guard.acquire(timeout=REENTERED):
            return
        try:
            bucket = self._due.get(held.due)
            if bucket is not None:
                bucket.discard(weakref.ref(held))
                if not bucket:
                    del self._due[held.due]
        finally:
            self._guard.release()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dlock-watchdog", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many, or the interpreter is shutting down: the next lease tries again, for all
            logger.exception("dlock: there is no thread to renew leases: they run out")
        else:
            self._thread = thread

    def _run(self) -> None:
        while (pause := self._pause()) is not None:
            self._wake.wait(pause)
            self._wake.clear()
            self._turn()

    def _turn(self) -> None:
        leases = self._take()  # gone when this returns: whoever is kept here while we sleep would never be thrown away
        for start in range(0, len(leases), BATCH):
            self._renew(leases[start : start + BATCH])

    def _pause(self) -> float | None:
        """Tell how long nothing is due; None, and no thread any more, when nothing has been for long."""
        with self._guard:
            now = clock() * TICKS
            if not self._due and now >= self._ends:
                self._thread = None
                return None
            nearest = min(self._due, default=self._ends)
            if self._next > now:  # woken for a lease that may be gone: its like will come, and need not wake us again
                nearest = min(nearest, self._next)
            self._next = nearest
            return max(0.0, (nearest - now) / TICKS)

    def _take(self) -> list[Held]:
        now = clock() * TICKS
        with self._guard:
            due = [tick for tick in self._due if tick <= now]
            leases = [(tick, ref()) for tick in due for ref in self._due.pop(tick)]
        return [held for tick, held in leases if held is not None and held.due == tick and _is_on(held)]

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
        except Exception:  # this thread must outlive any surprise: every lease depends on it
            logger.exception("dlock: a renewal failed")
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
