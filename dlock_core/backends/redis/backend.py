"""Leases in Redis or Valkey (6.2 or newer): one script for each step; the release itself serves waiters in order.

The lock key of an exclusive lease is a plain string set with NX and PX, so that other libraries which lock the same
key exclude us, and we them. (Idea of the value and of NX PX: the distributed locks page of the Redis documentation.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

from dlock_core.backend import Capabilities, Granted, Released, RenewalFailure, refuse_to_pickle
from dlock_core.backends.redis import sentinel
from dlock_core.backends.redis.addresses import pool_from_url, transports
from dlock_core.backends.redis.pipeline import PipelinedTransport
from dlock_core.backends.redis.protocol import (
    INSPECT_BATCH,
    RELEASE_REPLIES,
    Keyspace,
    acquire_args,
    holders_and_ttls,
    load_script,
    parse_acquire,
    parse_states,
    renewal_limit,
    run_together,
    shown,
    ttl_ms,
)
from dlock_core.backends.redis.transport import raise_for_error, retry_once, run_script, send_commands
from dlock_core.backends.redis.waiting import MAX_SLEEP_S, NUDGE_DELAY_S, Listeners
from dlock_core.errors import BackendUnavailable
from dlock_core.names import canonical
from dlock_core.options import check_seconds, checked_prefix
from dlock_core.runtime import RNG, Asyncio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest, Busy, LockState, Renewal, RenewalResult
    from dlock_core.backends.redis.protocol import Command, Script
    from dlock_core.backends.redis.transport import Transport
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["RedisBackend", "checked_options"]

MIN_SLEEP_S: Final = 0.002
"""Redis 6.2 treats a BLPOP of 0.001 seconds as one without end: it calculates 0.9999 milliseconds and truncates."""
FOREIGN_POLL_S: Final = (0.05, 0.1)
"""Range of the pause before another attempt if another library holds the lock, which will not wake us."""
REPLICATION_SHARE: Final = 0.25
"""The part of a request's time limit within which replicas have to confirm a grant."""


class RedisBackend:
    """One Redis server, named by a URL or by an existing redis-py client or pool (blocking or asyncio).

    The store opens separate connections to the same server with the same credentials, which neither wait for the
    client's pool nor exhaust it.

    Args:
        client: names the server.
        prefix: what every key begins with.
        timeout: the time limit of each request, in seconds.
        replicas: how many replicas must have a grant before it counts, so that a failover does not lose it.
    """

    capabilities = Capabilities(fair=True, shared=True, lists_waiters=True)

    __reduce__ = refuse_to_pickle

    def __init__(self, client: Any, *, prefix: str = "dlock:", timeout: float = 2.0, replicas: int = 0) -> None:
        prefix = checked_options(prefix, timeout, replicas)
        blocking, awaiting = sentinel.transports_to_master(client, timeout) or transports(client, timeout)
        self._reach(blocking, awaiting, PipelinedTransport(awaiting), Keyspace(prefix), timeout, replicas)

    def _reach(  # noqa: PLR0917
        self,
        blocking: Transport,
        awaiting: Transport,
        pipelined: Transport,
        keyspace: Keyspace,
        timeout: float,
        replicas: int,
    ) -> None:
        self._blocking, self._asyncio, self._pipelined, self.keyspace = blocking, awaiting, pipelined, keyspace
        self._timeout, self._replicas = timeout, replicas
        self._listeners = Listeners(awaiting, keyspace, timeout)
        self._acquire, self._claim, self._release = map(load_script, ("acquire", "claim", "release"))

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisBackend:
        """Return the store of the server at redis://, rediss:// or unix://."""
        return cls(pool_from_url(url), **options)

    @classmethod
    def from_sentinel(cls, url: str, **options: Any) -> RedisBackend:
        """Return the store of the master that Sentinels name, at redis+sentinel:// or rediss+sentinel://."""
        return cls(sentinel.service_from_url(url), **options)

    def lock_key(self, name: str) -> str:
        """Return the key of a lock, for programs with another library that must exclude dlock."""
        return self.keyspace.lock(canonical(name))

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        listener = self._listeners.here() if request.queue and isinstance(runtime, Asyncio) else None
        if listener is not None:
            listener.asks(request.holder)
        keys, args = self.keyspace.of(request.name), acquire_args(request, listener.id if listener else "")
        reply = await run_script(
            self.transport(runtime), runtime, request.name, self._acquire, keys, args, self._timeout
        )
        if listener is not None:
            listener.replied(request.holder, granted=isinstance(reply, int))
        if self._replicas and isinstance(reply, int):
            await self._replicate(runtime, [request])
        return parse_acquire(request, reply)

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        """Sleep on the waiter's own wake-up list; the confirmation is sent at once, and executed at the wake-up.

        So a hand-over takes one round trip: BLPOP returns, and the script after it confirms the grant. A task leaves
        that to the listener of its event loop.
        """
        seconds = min(timeout, MAX_SLEEP_S, request.ttl / 4)
        if busy.ticket is None:
            if isinstance(runtime, Asyncio):
                self._listeners.here().asks(request.holder)  # It is about to, and finds what it is handed meanwhile.
            await runtime.sleep(min(seconds, RNG.uniform(*FOREIGN_POLL_S)))
            return None
        if isinstance(runtime, Asyncio):
            handed = await self._listeners.here().wait(request, timeout)
            if handed is None:
                return None
            if self._replicas:
                await self._replicate(runtime, [request])
            return Granted(handed.token, request.ttl, age=runtime.now() - handed.sent)
        sleep = ("BLPOP", f"{self.keyspace.wake_lists}{request.holder}", f"{max(seconds, MIN_SLEEP_S):.3f}")
        script, keys, args = self._confirmation(request)
        commands, limit = [sleep, script.by_digest(keys, args)], seconds + self._timeout
        woken, reply = await send_commands(
            self._blocking, runtime, request.name, commands, limit, seconds + NUDGE_DELAY_S
        )
        raise_for_error(request.name, woken)
        if not isinstance(reply, int):
            if isinstance(reply, NoScriptError):
                reply = await run_script(self._blocking, runtime, request.name, script, keys, args, self._timeout)
            if not isinstance(reply, int):
                return parse_acquire(request, reply) if isinstance(reply, list) else None
        if self._replicas:
            await self._replicate(runtime, [request])
        return Granted(reply, request.ttl)

    def _confirmation(self, request: AcquireRequest) -> tuple[Script, Command, Command]:
        """Return the requests that start a handed-over grant's full ttl; claim.lua handles only the common case."""
        if request.shared or request.floor:
            return self._acquire, self.keyspace.of(request.name), acquire_args(request)
        return self._claim, (self.keyspace.lock(request.name),), (request.holder, ttl_ms(request))

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        listener = self._listeners.here() if isinstance(runtime, Asyncio) else None
        if listener is not None:
            listener.forget(request.holder)
        try:
            await self._run(runtime, request.name, "abandon", self.keyspace.of(request.name), (request.holder,))
        except BackendUnavailable:
            if listener is not None:
                listener.leave_behind(request)
            raise

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        keys, args = self.keyspace.of(request.name), (request.holder,)
        transport = self.transport(runtime)
        return RELEASE_REPLIES[
            await run_script(transport, runtime, request.name, self._release, keys, args, self._timeout)
        ]

    async def try_acquire_many(self, runtime: Runtime, requests: Sequence[AcquireRequest]) -> list[Granted] | None:
        keys = (*self.keyspace.common, *self.keyspace.locks(requests))
        args = (requests[0].owner, *holders_and_ttls(requests))
        tokens = await self._run(runtime, requests[0].name, "acquire_many", keys, args)
        if not tokens:
            return None
        if self._replicas:
            await self._replicate(runtime, requests)
        return [Granted(token, request.ttl) for token, request in zip(tokens, requests, strict=True)]

    async def release_many(self, runtime: Runtime, requests: Sequence[AcquireRequest]) -> list[Released]:
        keys = (self.keyspace.held_locks, *self.keyspace.locks(requests))
        ended = await self._run(runtime, requests[0].name, "release_many", keys, (run_together(requests),))
        waited_for = [request for request, was_ours in zip(requests, ended, strict=True) if not was_ours]
        found = dict.fromkeys([request.holder for request in requests], Released.RELEASED)
        if waited_for:
            commands = [
                self._release.by_digest(self.keyspace.of(request.name), (request.holder,)) for request in waited_for
            ]
            transport = self.transport(runtime)
            replies = await send_commands(transport, runtime, requests[0].name, commands, self._timeout)
            for request, reply in zip(waited_for, replies, strict=True):
                found[request.holder] = RELEASE_REPLIES[raise_for_error(request.name, reply)]
        return [*found.values()]

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        requests = [renewal.request for renewal in renewals]
        keys = self.keyspace.locks(requests)
        args, limit = holders_and_ttls(requests), renewal_limit(self._timeout, requests)
        transport, name, script = self.transport(runtime), requests[0].name, load_script("renew")
        renewed = await retry_once(lambda: run_script(transport, runtime, name, script, keys, args, limit))
        return [request.ttl if ours else RenewalFailure.LOST for request, ours in zip(requests, renewed, strict=True)]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        return await retry_once(lambda: self._inspect(runtime, name))

    async def _inspect(self, runtime: Runtime, name: str | None) -> list[LockState]:
        keys = [self.keyspace.lock(name).encode()] if name is not None else await self._held_locks(runtime)
        states: list[LockState] = []
        for start in range(0, len(keys), INSPECT_BATCH):
            batch = keys[start : start + INSPECT_BATCH]
            reply = await self._run(runtime, name or "", "inspect", tuple(batch), (self.keyspace.wake_lists,))
            states += parse_states(self.keyspace.names_of(batch), reply)
        return states if name is not None else shown(states)

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        return bool(await self._run(runtime, name, "force_release", self.keyspace.of(name), (str(token),)))

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine the server; raises BackendUnavailable."""
        from dlock_core.backends.redis import health

        return await health.diagnose(self, runtime)

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._blocking.close()
        self._asyncio.close()

    def transport(self, runtime: Runtime) -> Transport:
        """Return the connections for threads, or the one for the tasks of each loop."""
        return self._pipelined if isinstance(runtime, Asyncio) else self._blocking

    def wire(self, runtime: Runtime) -> Transport:
        """Return a transport with a separate connection for each request, so that one that sleeps delays no other."""
        return self._asyncio if isinstance(runtime, Asyncio) else self._blocking

    async def _run(self, runtime: Runtime, name: str, script: str, keys: Command, args: Command) -> Any:
        transport = self.transport(runtime)
        return await run_script(transport, runtime, name, load_script(script), keys, args, self._timeout)

    async def _replicate(self, runtime: Runtime, requests: Sequence[AcquireRequest]) -> None:
        """Return when enough replicas have these grants; otherwise raise BackendUnavailable.

        In that case the engine abandons the request. WAIT covers only the writes of the connection it is sent on, and
        the grant may have come over another one. So the leases are first written once more, by a renewal, over this
        connection.
        """
        name = requests[0].name
        keys = self.keyspace.locks(requests)
        rewrite = load_script("renew").by_text(keys, holders_and_ttls(requests))
        wait = ("WAIT", str(self._replicas), str(math.ceil(self._timeout * REPLICATION_SHARE * 1000)))
        wire, limit = self.wire(runtime), self._timeout
        ours, count = await send_commands(wire, runtime, name, [rewrite, wait], limit, limit)
        if not all(raise_for_error(name, ours)):
            raise BackendUnavailable(name, reason="the grant was lost before enough replicas had it")
        if raise_for_error(name, count) < self._replicas:
            reason = f"{count} of at least {self._replicas} replicas have the grant, so a failover could lose it"
            raise BackendUnavailable(name, reason=reason)

    async def _held_locks(self, runtime: Runtime) -> list[bytes]:
        commands: list[Command] = [self.keyspace.listing]
        (keys,) = await send_commands(self.transport(runtime), runtime, "", commands, self._timeout)
        return sorted(raise_for_error("", keys))


def checked_options(prefix: str, timeout: float, replicas: int) -> str:
    """Return the prefix as a plain str; raises ValueError for options that make no sense."""
    check_seconds("timeout", timeout)
    prefix = checked_prefix(prefix)
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"prefix must not contain braces, which mark the hash tag of a key: {prefix!r}")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        raise ValueError(f"replicas must be 0 or the number of replicas that must have a grant, not {replicas!r}")
    return prefix
