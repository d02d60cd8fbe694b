"""The steps of one lock in etcd (its lease, its queue entry, its end): each is one write and its replies."""

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
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest, Renewal, RenewalResult
    from dlock_core.backends.etcd.gateway import Answer, Gateway, GatewayCall
    from dlock_core.backends.etcd.keys import Keys, LockView
    from dlock_core.runtime import Runtime

__all__ = ["QUEUE_ENTRY_TTL_S", "HeldKey", "QueueEntry", "Steps"]


Put = Callable[["AcquireRequest", int, int], "GatewayCall"]
"""Returns the call that puts our key on a lease, or on the lease of a queue entry."""


QUEUE_ENTRY_TTL_S: Final = 6.0
"""Seconds for which a queue entry lives after its last renewal."""
MAX_WAIT_S: Final = 60.0
"""Seconds after which a waiter tries again in any case."""
MAX_LEASES_PER_STREAM: Final = 16
"""Leases in one stream: the gateway may drop all but the first 512 bytes of a request once it answers."""
NOT_FOUND: Final = 5


class QueueEntry:
    """Our key in the queue: the revision of its creation, its lease, and the key ahead of it as of revision `seen`."""

    __slots__ = ("before", "created", "lease", "seen")

    def __init__(self, view: LockView, lease: ServerLease | None = None) -> None:
        self.created, self.lease = view.own.created, lease or ServerLease(view.own.lease, 0)
        self.view(view)

    def view(self, view: LockView) -> None:
        """Record the key ahead of ours."""
        self.before, self.seen = view.before.key, view.revision


class HeldKey(NamedTuple):
    """Our key that holds a lock; after a request for a longer ttl it is on another lease."""

    created: int
    lease: ServerLease


class Steps:
    """The steps, on one cluster."""

    def __init__(self, gateway: Gateway, names: Keys) -> None:
        self.gateway, self.keys, self.spares = gateway, names, Spares()
        self.unsettled_leases: dict[str, list[ServerLease]] = {}
        """The leases on which attempts with an unknown or pending outcome may have put their keys, by holder."""

    async def enter(self, runtime: Runtime, request: AcquireRequest) -> Granted | QueueEntry | Busy:
        """Take the lock if it is free, or find the queue entry of an earlier attempt; otherwise join the queue."""
        queue_entry = self.spares.take(QUEUE_ENTRY_TTL_S, runtime.now()) if request.queue else None
        view, lease = await self._put(runtime, request, self.keys.enter, request.ttl, queue_entry)
        if view.has_taken:
            if queue_entry is not None:
                self.spares.give(queue_entry)
            return await self._granted(runtime, request, view, lease)
        self.spares.give(lease)
        if view.has_put:
            return _busy_or(view, QueueEntry(view, queue_entry))
        if view.own.created:
            return QueueEntry(view)
        return await self._queue(runtime, request) if request.queue else busy(view)

    async def promote(
        self, runtime: Runtime, request: AcquireRequest, queue_entry: QueueEntry
    ) -> Granted | QueueEntry | Busy:
        """Take the lock if our queue entry is the first; otherwise return what it waits for."""

        def call(request: AcquireRequest, lease: int, _: int) -> GatewayCall:
            return self.keys.promote(request, queue_entry.created, queue_entry.lease.id, lease)

        view, lease = await self._put(runtime, request, call, request.ttl)
        if view.has_taken:
            self.spares.give(queue_entry.lease)
            return await self._granted(runtime, request, view, lease)
        self.spares.give(lease)
        if not view.own.created:  # Our queue entry expired, for example because the process was stopped.
            return await self._queue(runtime, request) if request.queue else busy(view)
        if (view.own.created, view.own.lease) != (queue_entry.created, queue_entry.lease.id):
            return QueueEntry(view)  # Also if an attempt whose reply was lost has taken the lock.
        queue_entry.view(view)
        return busy(view, queue_entry)

    async def is_behind(self, runtime: Runtime, request: AcquireRequest, queue_entry: QueueEntry) -> bool:
        """Renew our queue entry; return whether it and the key ahead of it are still there."""
        sent = runtime.now()
        calls = [keys.keep_alive([queue_entry.lease.id]), self.keys.present(queue_entry.before)]
        (alive,), (found,) = await self.gateway.ask(runtime, request.name, calls)
        left = self._ttl(request.name, alive)
        queue_entry.lease.until = sent + left
        return left > 0 and bool(keys.entries(self.checked(request.name, found)))

    async def renew(
        self, runtime: Runtime, renewals: Sequence[Renewal], limit: float
    ) -> list[RenewalResult | BackendUnavailable]:
        """Renew some leases in one write; each that needs a longer ttl than its lease has costs one more."""
        name, sent = renewals[0].request.name, runtime.now()
        leases = [renewal.granted.handle.lease.id for renewal in renewals]
        streams = [
            leases[start : start + MAX_LEASES_PER_STREAM] for start in range(0, len(leases), MAX_LEASES_PER_STREAM)
        ]
        there = self.keys.held([self.keys.own(renewal.request) for renewal in renewals])
        *alive, (found,) = await self.gateway.ask(runtime, name, [*map(keys.keep_alive, streams), there], limit)
        left = dict(pair for pairs in map(zip, streams, alive) for pair in pairs)
        if forgotten := [lease for lease in leases if lease not in left]:
            again = await self.gateway.ask(runtime, name, [keys.keep_alive([lease]) for lease in forgotten], limit)
            left |= {lease: answer for lease, (answer,) in zip(forgotten, again, strict=True)}
        held = [keys.entries(one["response_range"]) for one in self.checked(name, found)["responses"]]
        results: list[RenewalResult | BackendUnavailable] = []
        for renewal, lease, entry in zip(renewals, leases, held, strict=True):
            ttl, held_key = self._ttl(name, left[lease]), renewal.granted.handle
            held_key.lease.until = sent + ttl
            if not entry or entry[0].created != held_key.created:
                results.append(RenewalFailure.LOST)
            elif self._stays(renewal, entry[0].lease, ttl):
                results.append(renewal.request.ttl)
            else:
                results.append(await self._moved(runtime, renewal, entry[0].lease, limit))
        return results

    async def ask(self, runtime: Runtime, name: str, *calls: GatewayCall) -> list[Answer]:
        """Send calls with one answer each, which may be an error."""
        return [answer for (answer,) in await self.gateway.ask(runtime, name, calls)]

    def checked(self, name: str, answer: Answer) -> Answer:
        """Return a proper answer, and raise BackendUnavailable for any other."""
        if "code" in answer or "error" in answer or "header" not in answer:
            raise self.gateway.failure(name, answer)
        return answer

    async def _queue(self, runtime: Runtime, request: AcquireRequest) -> QueueEntry | Busy:
        def call(request: AcquireRequest, lease: int, _: int) -> GatewayCall:
            return self.keys.queue(request, lease)

        view, lease = await self._put(runtime, request, call, QUEUE_ENTRY_TTL_S)
        return _busy_or(view, QueueEntry(view, lease if view.has_put else None))

    async def _put(
        self, runtime: Runtime, request: AcquireRequest, call: Put, ttl: float, queue_entry: ServerLease | None = None
    ) -> tuple[LockView, ServerLease]:
        """Send a call that puts our key on a lease: an unused one of ours, or a new one."""
        lease = self.spares.take(ttl, runtime.now()) or new_lease(ttl)
        view = await self._put_on(runtime, request, call, lease, queue_entry)
        if view is None:  # The server does not know a lease that should be alive.
            self.spares.clear()
            lease = new_lease(ttl)
            view = await self._put_on(runtime, request, call, lease, None)
        if view is None:
            raise self.gateway.failure(request.name, {"message": "it lost a lease that it had just granted"})
        self.unsettled_leases.pop(request.holder, None)
        return view, lease

    async def _put_on(
        self, runtime: Runtime, request: AcquireRequest, call: Put, lease: ServerLease, queue_entry: ServerLease | None
    ) -> LockView | None:
        leases = [one for one in (lease, queue_entry) if one is not None]
        self.unsettled_leases[request.holder], sent = leases, runtime.now()
        granting = [] if lease.is_known else [keys.grant(lease.id, lease.ttl)]
        asked = call(request, lease.id, queue_entry.id if queue_entry else 0)
        *granted, answer = await self.ask(runtime, request.name, *granting, asked)
        for one in granted:
            lease.until, lease.is_known = sent + self._ttl(request.name, one), True
        if answer.get("code") == NOT_FOUND:
            return None
        return keys.view(self.checked(request.name, answer), self.keys.own(request))

    async def _granted(
        self, runtime: Runtime, request: AcquireRequest, view: LockView, lease: ServerLease
    ) -> Granted | QueueEntry:
        token, created = view.own.created + view.base, view.own.created
        if token <= request.floor:
            token = request.floor + 1
            (answer,) = await self.ask(runtime, request.name, self.keys.raise_base(request, view, token - created))
            if not self.checked(request.name, answer).get("succeeded"):
                # Another process has raised it, so the token has to be read again.
                return QueueEntry(view)
        return Granted(token, max(0.0, lease.until - runtime.now()), HeldKey(created, lease))

    def _stays(self, renewal: Renewal, lease: int, ttl: float) -> bool:
        """Return whether our key may stay on its lease, which has this much time left.

        It has to be moved if it is to last longer, or if a request that arrived late, or got no answer, has put it on
        another lease. A request without an answer may still do so, when little of that other lease is left; once the
        key has been moved, it no longer can.
        """
        request, granted = renewal
        is_settled = request.holder not in self.unsettled_leases
        return is_settled and lease == granted.handle.lease.id and ttl >= request.ttl

    async def _moved(
        self, runtime: Runtime, renewal: Renewal, old: int, limit: float
    ) -> RenewalResult | BackendUnavailable:
        try:
            return await self._move(runtime, renewal, old, limit)
        except BackendUnavailable as error:
            return error

    async def _move(self, runtime: Runtime, renewal: Renewal, old: int, limit: float) -> RenewalResult:
        """Put our key on a new lease with the requested ttl: the ttl of a lease cannot be changed."""
        request, held_key = renewal.request, renewal.granted.handle
        lease, sent = new_lease(request.ttl), runtime.now()
        self.unsettled_leases[request.holder] = [lease]
        calls = [keys.grant(lease.id, lease.ttl), self.keys.move(request, held_key.created, old, lease.id)]
        (granted,), (moved,) = await self.gateway.ask(runtime, request.name, calls, limit)
        ttl = self._ttl(request.name, granted)
        lease.until, lease.is_known = sent + ttl, True
        if not self.checked(request.name, moved).get("succeeded"):
            found = keys.entries(moved["responses"][0]["response_range"])
            is_ours = bool(found) and found[0].created == held_key.created
            return RenewalFailure.UNKNOWN if is_ours else RenewalFailure.LOST
        held_key.lease.id, held_key.lease.ttl, held_key.lease.until = lease.id, lease.ttl, lease.until
        self.unsettled_leases.pop(request.holder, None)
        return ttl

    def _ttl(self, name: str, answer: Answer) -> float:
        return float(self.checked(name, answer.get("result", answer)).get("TTL", 0))


def _busy_or(view: LockView, queue_entry: QueueEntry) -> QueueEntry | Busy:
    """Return Busy if another key is ahead of ours, otherwise the queue entry, which may hold the lock now."""
    return busy(view, queue_entry) if queue_entry.before else queue_entry


def busy(view: LockView, queue_entry: Any = None) -> Busy:
    """Return the answer that another holder has the lock."""
    return Busy(MAX_WAIT_S, view.first.value, queue_entry)


MIN_REMAINING_SHARE: Final = 7 / 8
"""A lease with less than this share of its ttl left is not reused, but runs out."""
MAX_SPARES_PER_TTL: Final = 64
"""Largest number of unused leases kept for each ttl."""
MAX_SPARE_TTL_S: Final = 60.0
"""Seconds of ttl above which a lease is not kept: nothing should be left on the server for long."""


@dataclass(slots=True)
class ServerLease:
    """A lease, and until when it certainly lives, by our clock; `is_known` once the server has granted it."""

    id: int
    ttl: int
    until: float = 0.0
    is_known: bool = False


def new_lease(seconds: float) -> ServerLease:
    """Return a lease with a random id, which is unique for all practical purposes; the server does not know it yet."""
    return ServerLease(secrets.randbits(62) + 1, math.ceil(seconds))


class Spares:
    """Leases of this process that are not in use."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: dict[int, deque[ServerLease]] = {}

    def take(self, seconds: float, now: float) -> ServerLease | None:
        """Return a lease that is nearly new, if there is one."""
        if self._pid != os.getpid():  # a forked child must not share leases with its parent
            self._pid, self._free = os.getpid(), {}
        free = self._free.get(math.ceil(seconds))
        try:
            spare = free.pop() if free else None
        except IndexError:
            spare = None
        return spare if spare is not None and spare.until - now >= spare.ttl * MIN_REMAINING_SHARE else None

    def keeps(self, lease: ServerLease) -> bool:
        """Return whether the lease is worth keeping."""
        return lease.is_known and lease.ttl <= MAX_SPARE_TTL_S

    def give(self, lease: ServerLease) -> None:
        """Take back a lease that is no longer in use, and that no request of unknown outcome has named."""
        if self.keeps(lease):
            self._free.setdefault(lease.ttl, deque(maxlen=MAX_SPARES_PER_TTL)).append(lease)

    def clear(self) -> None:
        """Forget all of them: the server did not know one."""
        self._free = {}
