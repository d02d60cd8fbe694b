"""Leases in etcd (3.4 or newer), over its JSON gateway: the extra `etcd` brings h11.

A lock belongs to the oldest of its keys; each waiter watches the one key before its own. The token is the revision at
which the holder's key was created. (Idea: clientv3/concurrency of etcd.)
"""

from __future__ import annotations

import ssl
from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.backend import Capabilities, Holder, LockState, Released, RenewalFailure, Waiter, refuse_to_pickle
from dlock_core.backends.etcd import keys
from dlock_core.backends.etcd.connections import read_url
from dlock_core.backends.etcd.gateway import Gateway
from dlock_core.backends.etcd.keys import Keys, StoredKey
from dlock_core.backends.etcd.steps import QUEUE_ENTRY_TTL_S, QueueEntry, Steps
from dlock_core.errors import BackendUnavailable
from dlock_core.options import check_seconds, checked_prefix

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from dlock_core.backend import AcquireRequest, Busy, Granted, Renewal, RenewalResult
    from dlock_core.backends.etcd.gateway import GatewayCall
    from dlock_core.backends.etcd.steps import HeldKey
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["EtcdBackend"]

T = TypeVar("T")

WAITER_KEEP_ALIVE_S: Final = 2.0
"""Seconds after which a waiter renews its queue entry, and checks whether the key ahead of it is still there."""
MAX_LEASES_PER_REQUEST: Final = 100
"""Leases in one request; etcd takes 128 steps in a transaction."""
MAX_KEYS_PER_REQUEST: Final = 1000
"""Keys in one request."""


class EtcdBackend:
    """One etcd cluster, etcd://[user:password@]host:port,host:port,… whose members are used one at a time.

    `timeout` is the limit of each request in seconds; it should be longer than an election takes. Every key begins with
    `prefix`. `tls` verifies an etcds:// server. A lease renewed with a shorter ttl keeps its longer one on the server.
    """

    capabilities = Capabilities(fair=True, shared=True, lists_waiters=True, ttl_min=2.0, ttl_step=1.0)
    """The shortest ttl fits etcd's default election timeout of 1 s; with a longer timeout the server grants more."""

    __reduce__ = refuse_to_pickle

    def __init__(
        self, url: str, *, prefix: str = "dlock/", timeout: float = 3.0, tls: ssl.SSLContext | None = None
    ) -> None:
        check_seconds("timeout", timeout)
        prefix = checked_prefix(prefix)
        where = read_url(url)
        secure = (tls or ssl.create_default_context()) if where.is_encrypted else None
        self._gateway = Gateway(where.members, where.user, where.password, secure, timeout)
        self._keys = Keys(prefix)
        self._steps = Steps(self._gateway, self._keys)

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        with self._gateway.reading(request.name):
            answer: Granted | QueueEntry | Busy = ticket or await self._steps.enter(runtime, request)
            while isinstance(answer, QueueEntry):
                answer = await self._steps.promote(runtime, request, answer)
            return answer

    async def wait(self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float) -> None:
        """Watch the key ahead of ours, and renew our queue entry periodically."""
        with self._gateway.reading(request.name):
            queue_entry: QueueEntry = busy.ticket
            until = runtime.now() + timeout
            watch = await self._gateway.watch(runtime, request.name, keys.text(queue_entry.before))
            try:
                if watch.revision > queue_entry.seen and not await self._steps.is_behind(runtime, request, queue_entry):
                    return  # The key ahead was deleted between our read and the start of the watch.
                while (left := until - runtime.now()) > 0:
                    calm = queue_entry.lease.until - runtime.now() - QUEUE_ENTRY_TTL_S + WAITER_KEEP_ALIVE_S
                    if calm > 0 and await watch.woken(runtime, min(left, calm)):
                        return
                    if calm < left and not await self._steps.is_behind(runtime, request, queue_entry):
                        return
            finally:
                watch.close()

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        calls = [self._keys.leave(request), *self._revocations(request)]

        async def leave() -> None:
            with self._gateway.reading(request.name):
                answer, *_ = await self._steps.ask(runtime, request.name, *calls)
                self._steps.checked(request.name, answer)

        await _retry_once(leave)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        held_key: HeldKey = granted.handle
        calls = [self._keys.leave(request), *self._revocations(request)]
        if not self._steps.spares.keeps(held_key.lease):
            calls.append(keys.revoke(held_key.lease.id))
        with self._gateway.reading(request.name):
            answer, *_ = await self._steps.ask(runtime, request.name, *calls)
            if "deleted" in self._steps.checked(request.name, answer):
                self._steps.spares.give(held_key.lease)
                return Released.RELEASED
            is_stolen = await self._entries(runtime, request.name, self._keys.lock(request.name))
            return Released.STOLEN if is_stolen else Released.EXPIRED

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Renew in as many requests as necessary; a failed one says nothing about the leases in the others."""
        limit = min(renewal.request.ttl / 3 for renewal in renewals)  # a later answer would be useless
        until, failure = runtime.now() + limit, None
        results: list[RenewalResult | BackendUnavailable] = []
        for start in range(0, len(renewals), MAX_LEASES_PER_REQUEST):
            batch = renewals[start : start + MAX_LEASES_PER_REQUEST]
            if failure is None or runtime.now() < until:
                try:
                    with self._gateway.reading(batch[0].request.name):
                        results += await self._steps.renew(runtime, batch, limit)
                        continue
                except BackendUnavailable as error:
                    failure = error
            results += [failure] * len(batch)
        failures = [result for result in results if isinstance(result, BackendUnavailable)]
        if len(failures) == len(results):
            raise failures[0]
        return [RenewalFailure.UNKNOWN if isinstance(result, BackendUnavailable) else result for result in results]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        return await _retry_once(lambda: self._inspect(runtime, name))

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        return await _retry_once(lambda: self._force_release(runtime, name, token))

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine every member, and all of them together; raises BackendUnavailable."""
        from dlock_core.backends.etcd import health

        members = self._gateway.each()
        try:
            with self._gateway.reading(""):
                return await health.diagnose(members, runtime)
        finally:
            for _, gateway in members:
                gateway.close()

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._gateway.close()

    def _revocations(self, request: AcquireRequest) -> list[GatewayCall]:
        """End the leases of attempts with unknown outcome, so that requests still in flight cannot put a key.

        They are forgotten now, even if this fails: the server ends them by itself.
        """
        return [keys.revoke(lease.id) for lease in self._steps.unsettled_leases.pop(request.holder, [])]

    async def _inspect(self, runtime: Runtime, name: str | None) -> list[LockState]:
        with self._gateway.reading(name or ""):
            queues = by_lock(self._keys, await self._entries(runtime, name, self._keys.lock(name or "")))
            bases = await self._bases(runtime, name)
            inside = [one.lease for queue in queues.values() for one in holding(self._keys, queue)]
            left = await self._left(runtime, name or "", inside)
        return [
            state(self._keys, each, queues.get(each, []), bases.get(self._keys.base(each), 0), left)
            for each in ([name] if name is not None else sorted(queues))
        ]

    async def _force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        with self._gateway.reading(name):
            queue = sorted(await self._entries(runtime, name, self._keys.lock(name)), key=lambda entry: entry.created)
            base = (await self._bases(runtime, name)).get(self._keys.base(name), 0)
            found = [one for one in holding(self._keys, queue) if one.created + base == token]
            ended = [await self._steps.ask(runtime, name, self._keys.end(entry)) for entry in found]
            return any(self._steps.checked(name, answer).get("succeeded") for (answer,) in ended)

    async def _bases(self, runtime: Runtime, name: str | None) -> dict[str, int]:
        return {
            entry.key: keys.counted(entry.value)
            for entry in await self._entries(runtime, name, self._keys.base(name or ""))
        }

    async def _entries(self, runtime: Runtime, name: str | None, start: str) -> list[StoredKey]:
        """Read all keys with this prefix."""
        found: list[StoredKey] = []
        is_more = True
        while is_more:
            call = self._keys.listed(start, found[-1].key if found else "", MAX_KEYS_PER_REQUEST)
            (answer,) = await self._steps.ask(runtime, name or "", call)
            page = keys.entries(self._steps.checked(name or "", answer))
            found += page
            is_more = bool(page and answer.get("more"))
        return found

    async def _left(self, runtime: Runtime, name: str, leases: Sequence[int]) -> dict[int, float]:
        """Return the remaining seconds of each lease."""
        left: dict[int, float] = {}
        for start in range(0, len(leases), MAX_LEASES_PER_REQUEST):
            part = leases[start : start + MAX_LEASES_PER_REQUEST]
            answers = await self._steps.ask(runtime, name, *[keys.time_to_live(lease) for lease in part])
            left |= {lease: max(0.0, float(answer.get("TTL", 0))) for lease, answer in zip(part, answers, strict=True)}
        return left


async def _retry_once(step: Callable[[], Awaitable[T]]) -> T:
    """Send a request, and repeat it once if another connection or member may work; for idempotent requests."""
    try:
        return await step()
    except BackendUnavailable as error:
        if not error.broken:
            raise
    return await step()


def by_lock(names: Keys, entries: Iterable[StoredKey]) -> dict[str, list[StoredKey]]:
    """Sort keys by lock, and those of a lock by age."""
    found: dict[str, list[StoredKey]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.created):
        found[names.read(entry.key)[0]].append(entry)
    return found


def holding(names: Keys, queue: list[StoredKey]) -> list[StoredKey]:
    """Return the holders of a lock: the oldest key, or if it is shared, all up to the first exclusive one."""
    sharing = list(takewhile(lambda entry: names.read(entry.key)[1], queue))
    return sharing or queue[:1]


def state(names: Keys, name: str, queue: list[StoredKey], base: int, left: Mapping[int, float]) -> LockState:
    """Return the state of a lock; `base` is added to its tokens, `left` is the remaining time of each lease."""
    inside = holding(names, queue)
    holders = [
        Holder(names.read(one.key)[2], one.created + base, names.read(one.key)[1], one.value, left.get(one.lease))
        for one in inside
    ]
    waiters = [Waiter(names.read(one.key)[2], names.read(one.key)[1], one.value) for one in queue[len(inside) :]]
    return LockState(name, tuple(holders), tuple(waiters))
