"""The steps of one lock in etcd (its lease, its queue entry, its end): each is one write and its answers."""

from __future__ import annotations

import math
import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlock_core.backend import Busy, Granted, RenewalFailure
from dlock_core.backends.etcd import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Renewal, RenewalResult, Request
    from dlock_core.backends.etcd.gateway import Answer, Gateway, Question
    from dlock_core.backends.etcd.keys import Keys, Look
    from dlock_core.runtime import Runtime

__all__ = ["PLACE", "Grip", "Place", "Steps"]


Put = Callable[["Request", int, int], "Question"]
"""Makes a question that puts our key on a lease, or on the lease of a place."""


PLACE: Final = 6.0
"""Seconds after its last sign of life in which a waiter keeps its place."""
ASK_AGAIN: Final = 60.0
"""Seconds after which a waiter asks again in any case."""
STREAM: Final = 16
"""Leases in one stream: the gateway may forget all but the first 512 bytes of what it is asked once it answers."""
NOT_FOUND: Final = 5


class Place:
    """Our place in the queue: since which revision, on which lease, and behind whom when we looked at `seen`."""

    __slots__ = ("before", "created", "lease", "seen")

    def __init__(self, look: Look, lease: Lease | None = None) -> None:
        self.created, self.lease = look.own.created, lease or Lease(look.own.lease, 0)
        self.look(look)

    def look(self, look: Look) -> None:
        """Note what we saw."""
        self.before, self.seen = look.before.key, look.revision


class Grip(NamedTuple):
    """How we hold a lock; its lease is another one after a longer ttl was asked for."""

    created: int
    lease: Lease


class Steps:
    """The steps, on one cluster."""

    def __init__(self, gateway: Gateway, names: Keys) -> None:
        self.gateway, self.keys, self.spares = gateway, names, Spares()
        self.asked_with: dict[str, list[Lease]] = {}
        """What an attempt of a holder whose outcome is not known, or not yet, may have put its key on."""

    async def enter(self, runtime: Runtime, request: Request) -> Granted | Place | Busy:
        """Take the lock, if it is free, or find the place that an earlier attempt has taken; else join the queue."""
        place = self.spares.take(PLACE, runtime.now()) if request.queue else None
        look, lease = await self._put(runtime, request, self.keys.enter, request.ttl, place)
        if look.has_taken:
            if place is not None:
                self.spares.give(place)
            return await self._granted(runtime, request, look, lease)
        self.spares.give(lease)
        if look.has_put:
            return _busy_or(look, Place(look, place))
        if look.own.created:
            return Place(look)
        return await self._queue(runtime, request) if request.queue else busy(look)

    async def claim(self, runtime: Runtime, request: Request, place: Place) -> Granted | Place | Busy:
        """Take the lock, if our place is the first; else tell who is before us."""

        def question(request: Request, lease: int, _: int) -> Question:
            return self.keys.claim(request, place.created, lease)

        look, lease = await self._put(runtime, request, question, request.ttl)
        if look.has_taken:
            self.spares.give(place.lease)
            return await self._granted(runtime, request, look, lease)
        self.spares.give(lease)
        if not look.own.created:  # our place ran out, for example because we were stopped
            return await self._queue(runtime, request) if request.queue else busy(look)
        if look.own.created != place.created:
            return Place(look)
        place.look(look)
        return busy(look, place)

    async def is_behind(self, runtime: Runtime, request: Request, place: Place) -> bool:
        """Show that we live; tell whether we still have our place and whoever was before us is still there."""
        sent = runtime.now()
        questions = [keys.keep_alive([place.lease.id]), self.keys.present(place.before)]
        (alive,), (found,) = await self.gateway.ask(runtime, request.name, questions)
        left = self._ttl(request.name, alive)
        place.lease.until = sent + left
        return left > 0 and bool(keys.entries(self.proper(request.name, found)))

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal], limit: float) -> list[RenewalResult]:
        """Renew some leases in one write; those of whom a longer ttl is asked than their lease has cost one more."""
        name, sent = renewals[0].request.name, runtime.now()
        leases = [renewal.granted.handle.lease.id for renewal in renewals]
        streams = [leases[start : start + STREAM] for start in range(0, len(leases), STREAM)]
        there = self.keys.held([self.keys.own(renewal.request) for renewal in renewals])
        *alive, (found,) = await self.gateway.ask(runtime, name, [*map(keys.keep_alive, streams), there], limit)
        left = dict(pair for pairs in map(zip, streams, alive) for pair in pairs)
        if forgotten := [lease for lease in leases if lease not in left]:
            again = await self.gateway.ask(runtime, name, [keys.keep_alive([lease]) for lease in forgotten], limit)
            left |= {lease: answer for lease, (answer,) in zip(forgotten, again, strict=True)}
        held = [keys.entries(one["response_range"]) for one in self.proper(name, found)["responses"]]
        answers: list[RenewalResult] = []
        for renewal, lease, entry in zip(renewals, leases, held, strict=True):
            ttl, grip = self._ttl(name, left[lease]), renewal.granted.handle
            is_ours = ttl > 0 and entry and entry[0].created == grip.created
            grip.lease.until = sent + ttl
            answers.append(await self._renewed(runtime, renewal, ttl, limit) if is_ours else RenewalFailure.LOST)
        return answers

    async def ask(self, runtime: Runtime, name: str, *questions: Question) -> list[Answer]:
        """Ask questions that have one answer each, which may be an error."""
        return [answer for (answer,) in await self.gateway.ask(runtime, name, questions)]

    def proper(self, name: str, answer: Answer) -> Answer:
        """Give a proper answer back, and raise BackendUnavailable for another."""
        if "code" in answer or "error" in answer:
            raise self.gateway.failure(name, answer)
        return answer

    async def _queue(self, runtime: Runtime, request: Request) -> Place | Busy:
        def question(request: Request, lease: int, _: int) -> Question:
            return self.keys.queue(request, lease)

        look, lease = await self._put(runtime, request, question, PLACE)
        return _busy_or(look, Place(look, lease if look.has_put else None))

    async def _put(
        self, runtime: Runtime, request: Request, question: Put, ttl: float, place: Lease | None = None
    ) -> tuple[Look, Lease]:
        """Ask something that puts our key on a lease: one of ours that carries nothing, or a new one."""
        lease = self.spares.take(ttl, runtime.now()) or new_lease(ttl)
        look = await self._put_on(runtime, request, question, lease, place)
        if look is None:  # the server does not know a lease that should live
            self.spares.clear()
            lease = new_lease(ttl)
            look = await self._put_on(runtime, request, question, lease, None)
        if look is None:
            raise self.gateway.failure(request.name, {"message": "it forgot a lease that it had just granted"})
        del self.asked_with[request.holder]
        return look, lease

    async def _put_on(
        self, runtime: Runtime, request: Request, question: Put, lease: Lease, place: Lease | None
    ) -> Look | None:
        leases = [one for one in (lease, place) if one is not None]
        self.asked_with[request.holder], sent = leases, runtime.now()
        granting = [] if lease.is_known else [keys.grant(lease.id, lease.ttl)]
        asked = question(request, lease.id, place.id if place else 0)
        *granted, answer = await self.ask(runtime, request.name, *granting, asked)
        for one in granted:
            lease.until, lease.is_known = sent + self._ttl(request.name, one), True
        if answer.get("code") == NOT_FOUND:
            return None
        return keys.look(self.proper(request.name, answer), self.keys.own(request))

    async def _granted(self, runtime: Runtime, request: Request, look: Look, lease: Lease) -> Granted | Place:
        token, created = look.own.created + look.base, look.own.created
        if token <= request.floor:
            token = request.floor + 1
            (answer,) = await self.ask(runtime, request.name, self.keys.raise_base(request, look, token - created))
            if not self.proper(request.name, answer).get("succeeded"):  # another has raised it: look again
                return Place(look)
        return Granted(token, max(0.0, lease.until - runtime.now()), Grip(created, lease))

    async def _renewed(self, runtime: Runtime, renewal: Renewal, ttl: float, limit: float) -> RenewalResult:
        request, grip = renewal.request, renewal.granted.handle
        if ttl >= request.ttl:
            return min(ttl, request.ttl)
        lease, sent = new_lease(request.ttl), runtime.now()
        questions = [keys.grant(lease.id, lease.ttl), self.keys.move(request, grip.created, lease.id)]
        (granted,), (moved,) = await self.gateway.ask(runtime, request.name, questions, limit)
        lease.until, lease.is_known = sent + self._ttl(request.name, granted), True
        if not self.proper(request.name, moved).get("succeeded"):
            return RenewalFailure.LOST
        grip.lease.id, grip.lease.ttl, grip.lease.until = lease.id, lease.ttl, lease.until
        return lease.until - sent

    def _ttl(self, name: str, answer: Answer) -> float:
        return float(self.proper(name, answer.get("result", answer)).get("TTL", 0))


def _busy_or(look: Look, place: Place) -> Place | Busy:
    """Wait in this place if somebody is before us, else claim it."""
    return busy(look, place) if place.before else place


def busy(look: Look, place: Any = None) -> Busy:
    """Say that somebody else has the lock."""
    return Busy(ASK_AGAIN, look.first.value, place)


NEW: Final = 7 / 8
"""A lease that has less than this share of its ttl left is not used again, but left to run out."""
KEPT: Final = 64
"""Unused leases kept of each ttl, at most."""
LONGEST: Final = 60.0
"""Seconds of ttl above which a lease is not kept: nothing should be left on the server for long."""


@dataclass(slots=True)
class Lease:
    """A lease, and until when it surely lives, by our clock; `is_known` once the server has granted it."""

    id: int
    ttl: int
    until: float = 0.0
    is_known: bool = False


def new_lease(seconds: float) -> Lease:
    """Think of a lease that nobody else has."""
    return Lease(secrets.randbits(62) + 1, math.ceil(seconds))


class Spares:
    """Leases of this process that carry nothing now."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: dict[int, deque[Lease]] = {}

    def take(self, seconds: float, now: float) -> Lease | None:
        """Give a lease that is nearly new, if there is one."""
        if self._pid != os.getpid():  # a forked child must not share leases with its parent
            self._pid, self._free = os.getpid(), {}
        free = self._free.get(math.ceil(seconds))
        try:
            spare = free.pop() if free else None
        except IndexError:
            spare = None
        return spare if spare is not None and spare.until - now >= spare.ttl * NEW else None

    def keeps(self, lease: Lease) -> bool:
        """Tell whether it is worth to keep."""
        return lease.is_known and lease.ttl <= LONGEST

    def give(self, lease: Lease) -> None:
        """Take back a lease that carries nothing any more, and which no request of unknown outcome has named."""
        if self.keeps(lease):
            self._free.setdefault(lease.ttl, deque(maxlen=KEPT)).append(lease)

    def clear(self) -> None:
        """Forget all of them: the server did not know one."""
        self._free = {}
