"""Leases in Redis or Valkey (6.2 or newer): one script a step, waiters served in order by the release itself.

The lock key of an exclusive lease is a plain string set with NX and PX, so that other libraries which lock the same
key exclude us, and we them. (Idea of the value and of NX PX: the distributed locks page of the Redis documentation.)
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Busy, Capabilities, Granted, Holder, LockState, Released, RenewalFailure, Waiter
from dlock_core.backends.options import check_prefix, check_seconds
from dlock_core.backends.redis import sentinel
from dlock_core.backends.redis.addresses import of_url, wires
from dlock_core.backends.redis.scripts import script
from dlock_core.backends.redis.transport import answered, ask, converse, twice
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import CHANCE, Asyncio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Renewal, RenewalResult, Request
    from dlock_core.backends.redis.transport import Command, Wire
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["FOUND", "LISTED", "RedisBackend", "checked", "holders_and_ttls"]

MIN_SLEEP_S: Final = 0.002
"""Redis 6.2 takes a BLPOP of 0.001 seconds for one without end: it calculates 0.9999 milliseconds and cuts them off."""
LATE: Final = 0.002
"""Seconds after the end of a sleep at which the server is reminded of it: it counts in milliseconds."""
SLICE: Final = 2.5
"""The longest wait in seconds before a waiter shows that it lives; a wake-up that got lost costs no more than this."""
ALIVE: Final = "5000"
"""Milliseconds after its last sign of life in which a waiter keeps its place."""
LISTED: Final = 500
"""Locks read by one inspection request, so that a large listing never holds up the server."""
COPIED: Final = 0.25
"""Of the time limit of a request, the part that replicas get to have a grant."""
FOUND: Final = {1: Released.RELEASED, 0: Released.EXPIRED, 2: Released.STOLEN}


class RedisBackend:
    """One Redis server, named by a URL or by an existing redis-py client or pool (blocking or asyncio).

    Its own connections: they reach the same server with the same credentials, and neither wait for the client's pool
    nor use it up. `timeout` bounds each request, in seconds. `prefix` starts every key. A grant is told only when so
    many `replicas` have it, so that a failover to one of them does not forget it.
    """

    capabilities = Capabilities(fair=True, shared=True, lists_waiters=True)

    def __init__(self, client: Any, *, prefix: str = "dlock:", timeout: float = 2.0, replicas: int = 0) -> None:
        checked(prefix, timeout, replicas)
        self._reach(*(sentinel.following(client, timeout) or wires(client, timeout)), prefix, timeout, replicas)

    def _reach(self, blocking: Wire, awaiting: Wire, prefix: str, timeout: float, replicas: int) -> None:
        self._blocking, self._asyncio = blocking, awaiting
        self._prefix, self._timeout, self._replicas = prefix, timeout, replicas
        self._globals = (f"{prefix}token", f"{prefix}held")
        self._acquire, self._release = script("acquire"), script("release")

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisBackend:
        """Reach the server at redis://, rediss:// or unix://."""
        return cls(of_url(url), **options)

    @classmethod
    def from_sentinel(cls, url: str, **options: Any) -> RedisBackend:
        """Follow the master that Sentinels name at redis+sentinel:// or rediss+sentinel://."""
        return cls(sentinel.of_url(url), **options)

    def lock_key(self, name: str) -> str:
        """Give the key of a lock, for other libraries that shall exclude us."""
        return f"{self._prefix}{{{name}}}"

    async def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        keys, args = self.question(request)
        reply = await ask(self.wire(runtime), runtime, request.name, self._acquire, keys, args, self._timeout)
        if self._replicas and isinstance(reply, int):
            await self._copied(runtime, [request])
        return self.answer(request, reply)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | Busy | None:
        """Sleep on our private wake-up list; the next attempt is sent along and made the moment the list wakes us."""
        seconds = min(timeout, SLICE, request.ttl / 4)
        if busy.ticket is None:  # another library's lock: it will not wake us
            await runtime.sleep(min(seconds, CHANCE.uniform(0.05, 0.1)))
            return None
        keys, args = self.question(request)
        sleep = ("BLPOP", f"{keys[0]}:wake:{request.holder}", f"{max(seconds, MIN_SLEEP_S):.3f}")
        again = ("EVALSHA", self._acquire.sha, str(len(keys)), *keys, *args)
        wire, limit = self.wire(runtime), seconds + self._timeout
        woken, reply = await converse(wire, runtime, request.name, [sleep, again], limit, seconds + LATE)
        answered(request.name, woken)
        if self._replicas and isinstance(reply, int):
            await self._copied(runtime, [request])
        return None if isinstance(reply, Exception) else self.answer(request, reply)

    async def abandon(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        await self._ask(runtime, request.name, "abandon", self.keys(request.name), (request.holder,))

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Released:
        keys, args = self.keys(request.name), (request.holder,)
        return FOUND[await ask(self.wire(runtime), runtime, request.name, self._release, keys, args, self._timeout)]

    async def try_acquire_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Granted] | None:
        keys = (*self._globals, *[self.lock_key(request.name) for request in requests])
        tokens = await self._ask(
            runtime, requests[0].name, "acquire_many", keys, (requests[0].owner, *holders_and_ttls(requests))
        )
        if self._replicas and tokens:
            await self._copied(runtime, requests)
        return (
            [Granted(token, request.ttl) for token, request in zip(tokens, requests, strict=True)] if tokens else None
        )

    async def release_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Released]:
        commands: list[Command] = []
        for request in requests:
            keys = self.keys(request.name)
            commands.append(("EVALSHA", self._release.sha, str(len(keys)), *keys, request.holder))
        replies = await converse(self.wire(runtime), runtime, requests[0].name, commands, self._timeout)
        return [FOUND[answered(request.name, reply)] for request, reply in zip(requests, replies, strict=True)]

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        requests = [renewal.request for renewal in renewals]
        keys = (self._globals[1], *[self.lock_key(request.name) for request in requests])
        limit = min(self._timeout, *[request.ttl / 3 for request in requests])  # a late answer would be of no use
        wire, name = self.wire(runtime), requests[0].name
        renewed = await twice(
            lambda: ask(wire, runtime, name, script("renew"), keys, holders_and_ttls(requests), limit)
        )
        return [request.ttl if ours else RenewalFailure.LOST for request, ours in zip(requests, renewed, strict=True)]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        return await twice(lambda: self._inspect(runtime, name))

    async def _inspect(self, runtime: Runtime, name: str | None) -> list[LockState]:
        keys = [self.lock_key(name).encode()] if name is not None else await self._held(runtime)
        states: list[LockState] = []
        for start in range(0, len(keys), LISTED):
            part = keys[start : start + LISTED]
            replies = await self._ask(runtime, name or "", "inspect", tuple(part), ())
            states += [state(self.name_of(key), reply) for key, reply in zip(part, replies, strict=True)]
        return states if name is not None else [state for state in states if state.holders or state.waiters]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        return bool(await self._ask(runtime, name, "force_release", self.keys(name), (str(token),)))

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine the server; raises BackendUnavailable."""
        from dlock_core.backends.redis import health

        return await health.diagnose(self, runtime)

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._blocking.close()
        self._asyncio.close()

    def wire(self, runtime: Runtime) -> Wire:
        return self._asyncio if isinstance(runtime, Asyncio) else self._blocking

    def keys(self, name: str) -> tuple[str, ...]:
        return (f"{self._prefix}{{{name}}}", *self._globals)

    def question(self, request: Request) -> tuple[tuple[str, ...], tuple[str, ...]]:
        mode, place, barge = (
            "s" if request.shared else "x",
            ALIVE if request.queue else "0",
            "0" if request.fair else "1",
        )
        ttl, floor = str(math.ceil(request.ttl * 1000)), str(request.floor)
        return self.keys(request.name), (request.holder, ttl, mode, request.owner, place, floor, barge)

    def answer(self, request: Request, reply: Any) -> Granted | Busy:
        if isinstance(reply, int):
            return Granted(reply, request.ttl)
        retry_after, owner = reply[0] / 1000, reply[1].decode(errors="replace")
        parts = owner.split("|", 3)
        if len(parts) < 4 and owner:
            return Busy(retry_after, "a client that is not dlock")
        return Busy(retry_after, parts[-1], ticket=request.holder)

    async def _ask(self, runtime: Runtime, name: str, which: str, keys: Command, args: Command) -> Any:
        return await ask(self.wire(runtime), runtime, name, script(which), keys, args, self._timeout)

    async def _copied(self, runtime: Runtime, requests: Sequence[Request]) -> None:
        """Return when enough replicas have these grants; else BackendUnavailable, and the engine gives them back."""
        keys, name = (self._globals[1], *[self.lock_key(request.name) for request in requests]), requests[0].name
        touch = (
            "EVAL",
            script("renew").text,
            str(len(keys)),
            *keys,
            *holders_and_ttls(requests),
        )  # WAIT is for our writes
        wait = ("WAIT", str(self._replicas), str(math.ceil(self._timeout * COPIED * 1000)))
        ours, have = await converse(self.wire(runtime), runtime, name, [touch, wait], self._timeout)
        if not all(answered(name, ours)):
            raise BackendUnavailable(name, reason="the grant was forgotten before enough replicas had it")
        if answered(name, have) < self._replicas:
            reason = f"{have} of at least {self._replicas} replicas have the grant, so a failover could forget it"
            raise BackendUnavailable(name, reason=reason)

    async def _held(self, runtime: Runtime) -> list[bytes]:
        keys: list[bytes] = await self._ask(runtime, "", "held", (self._globals[1],), ())
        return sorted(keys)

    def name_of(self, key: bytes) -> str:
        return key.decode(errors="replace")[len(self._prefix) + 1 : -1]


def checked(prefix: str, timeout: float, replicas: int) -> None:
    """Raise ValueError for options that make no sense."""
    check_seconds("timeout", timeout)
    check_prefix(prefix)
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"prefix must not have braces, which are the keys' hash tag: {prefix!r}")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        raise ValueError(f"replicas is how many must have a grant, 0 or more, not {replicas!r}")


def holders_and_ttls(requests: Sequence[Request]) -> tuple[str, ...]:
    """Give the arguments of a script for many locks: holder and ttl in ms of each."""
    return tuple(item for request in requests for item in (request.holder, str(math.ceil(request.ttl * 1000))))


_OURS: Final = re.compile(r"([0-9a-f]+)\|([0-9]+)\|([0-9]+)\|(.*)", re.DOTALL)
"""holder, token, since (ms), owner; anything else is another program's."""


def state(name: str, reply: list[Any]) -> LockState:
    """Make one lock's state out of the reply of `inspect.lua`."""
    value, left, sharers, waiters, server_time = reply
    now = int(server_time) / 1000
    if value == b"shared":
        holders = [_holder(text, int(expiry) / 1000 - now, now, shared=True) for _, expiry, text in sharers]
    else:
        holders = [_holder(value, left / 1000, now, shared=False)] if value and left != -2 else []
    return LockState(name, tuple(holders), tuple(_waiter(*waiter, now=now) for waiter in waiters))


def _holder(text: bytes, left: float, now: float, *, shared: bool) -> Holder:
    expires_in = max(0.0, left) if left >= 0 else None
    words = text.decode(errors="replace")
    ours = _OURS.fullmatch(words)
    if ours is None:
        return Holder(words, 0, shared, "a client that is not dlock", expires_in)
    holder, token, since, owner = ours.groups()
    return Holder(holder, int(token), shared, owner, expires_in, max(0.0, now - int(since)))


def _waiter(holder: bytes, arrival: bytes, place: bytes, *, now: float) -> Waiter:
    parts = place.decode(errors="replace").split("|", 4)
    shared, owner = (parts[1] == "s", parts[4]) if len(parts) == 5 else (False, "")
    return Waiter(holder.decode(errors="replace"), shared, owner, max(0.0, now - float(arrival) / 1_000_000))
