"""The watchdog: one thread for each store renews all of its leases, in batches, after a third of their validity.

Leases that have one connection each, as session locks have, are renewed in threads of their own.

Work reaches it through dicts that are changed by atomic operations: there is no mutex on which a signal handler or a
finalizer could deadlock.
"""

from __future__ import annotations

import logging
import math
import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, ref

from dlock_core.backend import Renewal, RenewalFailure
from dlock_core.errors import BackendUnavailable
from dlock_core.leases.lease import MOMENT_S, Bucket, valid_until
from dlock_core.runtime import BLOCKING, Wakeup, clock, run, start_thread
from dlock_core.scheduler import Scheduler, after_fork_in_child, call_in_background

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Backend, RenewalResult
    from dlock_core.leases.lease import LeaseRecord

__all__ = ["Watchdog", "renew_in_background"]

logger = logging.getLogger("dlock")

TICKS_PER_S: Final = 32
"""Leases that are due in the same 1/32 s share a bucket, so that watching one costs the same whatever their number."""
MAX_BATCH: Final = 1000
"""Leases that are renewed by one request, at most."""
MAX_ROUND_S: Final = 0.1
"""Seconds within which the renewals of leases with one connection each begin: others may be due meanwhile."""


class Watchdog:
    """The thread that renews the leases of one store, in batches: one request for any number of leases.

    The answer to a renewal is renewed, lost, or missing. A missing answer is not a loss: the renewal is repeated soon,
    and the lease is lost when its validity is over. The watchdog has only weak references to leases. A lease whose
    handles are garbage-collected is abandoned, and runs out. (Idea: the lease monitor of madelson/DistributedLock.)
    """

    def __init__(self) -> None:
        self._due: dict[int, Bucket] = {}
        """Leases by the tick at which they are due. Any thread may add; only the thread removes a bucket."""
        self.scheduler = Scheduler("dlock-watchdog", "to renew leases: they run out", self._next_due, self._run_due)

    def plan(self, seconds: float, *leases: LeaseRecord) -> None:
        """Renew these leases in this many seconds, and not before."""
        while True:
            tick = int((clock() + seconds) * TICKS_PER_S)
            bucket = self._due.get(tick)
            if bucket is None:
                bucket = self._due.setdefault(tick, Bucket(tick))
            for held in leases:
                held.bucket = bucket
                bucket[held.request.holder] = ref(held)
            if self._due.get(tick) is bucket:  # Otherwise the thread has just taken the bucket, perhaps without these.
                break
        if tick / TICKS_PER_S < self.scheduler.sleeps_until:
            self.scheduler.plan(tick / TICKS_PER_S)

    def _next_due(self) -> float | None:
        return min(due) / TICKS_PER_S if (due := [*self._due]) else None

    def _run_due(self) -> None:
        # No reference to a lease is kept beyond this call: the sleeping thread would keep the lease alive. After an
        # early wake-up the bucket of a lease that was released at once is kept: the next such lease falls into it and
        # need not wake the thread again. After a full sleep empty buckets are removed, so that the thread can end.
        leases = self._take(clean=not self.scheduler.was_woken)
        if leases and leases[0].backend.capabilities.expiry == "connection":
            self._renew_each(leases)
            return
        for start in range(0, len(leases), MAX_BATCH):
            self._renew(leases[start : start + MAX_BATCH])

    def _take(self, *, clean: bool = True) -> list[LeaseRecord]:
        """Remove and return the leases that are due; `clean` removes empty buckets as well."""
        now = clock() * TICKS_PER_S
        ticks = [tick for tick in [*self._due] if tick <= now or (clean and not self._due[tick])]
        return [
            held
            for bucket in [self._due.pop(tick) for tick in ticks]
            for known in [*bucket.values()]
            if (held := known()) is not None and (held.bucket is bucket or self._is_due(held, bucket.tick))
        ]

    def _is_due(self, held: LeaseRecord, tick: int) -> bool:
        """Return whether a lease found in a tick's bucket is to be renewed now, and not later from another bucket.

        A caller that was interrupted while it changed the time may have added the lease to no other bucket.
        """
        return held.renewal_tick == tick or held.request.holder not in self._due.get(held.renewal_tick, ())

    def _renew_each(self, leases: list[LeaseRecord]) -> None:
        """Renew leases that have one connection each, in threads, so that a silent one delays no other.

        The next renewal begins when the one before has ended, or is late.
        """
        for held in leases:
            ended = Wakeup()
            args = (held, ended)
            try:
                start_thread(threading.Thread(target=self._renew_alone, args=args, name="dlock-renewal", daemon=True))
            except RuntimeError:  # There can be no more threads.
                self._renew_alone(held, ended)
            ended.wait(MAX_ROUND_S / len(leases))

    def _renew_alone(self, held: LeaseRecord, ended: Wakeup) -> None:
        try:
            self._renew([held])
        finally:
            ended.set()

    def _renew(self, leases: list[LeaseRecord]) -> None:
        try:
            if valid := self._valid(leases):
                self._ask(valid)
        except BaseException as error:  # noqa: BLE001 - every other lease depends on this thread
            call_in_background(logger.error, "dlock: a renewal failed", exc_info=error)
            for held in leases:
                self._unknown(held, "its renewal failed")

    def _valid(self, leases: list[LeaseRecord]) -> list[LeaseRecord]:
        """Return the leases that are to be renewed; those that have run out are lost."""
        valid, now = [], leases[0].now()
        for held in leases:
            if held.is_to_be_renewed():
                if held.until - now > MOMENT_S or held.remaining() > 0.0:
                    valid.append(held)
                else:
                    held.lose()
        return valid

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
        """The leases by their new validity: those of one ttl are due together again."""
        answers, now = answers or [RenewalFailure.UNKNOWN] * len(leases), leases[0].now()
        valid_for, until = 0.0, 0.0
        together: list[LeaseRecord] = []
        for held, renewal, result in zip(leases, renewals, answers, strict=True):
            if result is RenewalFailure.UNKNOWN:
                self._unknown(held, reason)
            elif held.is_to_be_renewed():
                if result is RenewalFailure.LOST:
                    held.lose("the store granted it to another holder, or lost it")
                    continue
                if result != valid_for:
                    valid_for, until = result, valid_until(sent, result)
                    together = renewed.setdefault(result, [])
                if held.request is renewal.request:  # Otherwise the caller has since renewed it with another ttl.
                    held.extend_until(until, now)
                together.append(held)
        for valid_for, together in renewed.items():
            self.plan(valid_for / 3, *together)
        self._plan_changed(leases, renewals)

    def _plan_changed(self, leases: list[LeaseRecord], renewals: list[Renewal]) -> None:
        """Plan those again that their callers have since renewed with another ttl: our plan may have replaced it."""
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


_UNTIL: Final = attrgetter("until")


def renew_in_background(*leases: LeaseRecord) -> None:
    """Renew leases of one store, each after a third of its ttl, while it is held and referenced.

    All of them are checked when the first one is due.
    """
    due = min(map(_UNTIL, leases), default=math.inf)
    if due == math.inf:
        return
    backend = leases[0].backend
    watchdog = _watchdogs.get(backend)
    if watchdog is None:
        watchdog = _watchdogs.setdefault(backend, Watchdog())
    watchdog.plan((due - clock()) / 3, *leases)


@after_fork_in_child
def _begin_anew() -> None:
    _watchdogs.clear()  # The threads were not forked: the child starts its own.
