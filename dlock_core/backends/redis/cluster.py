"""Leases in a Redis Cluster: the names are spread over 256 hash tags, each of which acts as a separate server.

All keys of a name, the counter for its tokens and the set of held locks have one hash tag, so that they are in one slot
and move together. A listing reads 256 sets, however many other keys the cluster has. (Source: the Redis Cluster
specification.)
"""

from __future__ import annotations

from binascii import crc_hqx
from typing import TYPE_CHECKING, Any, Final, cast

from redis.exceptions import AskError, ClusterDownError, ResponseError, TryAgainError

from dlock_core.backend import RenewalFailure, refuse_to_pickle
from dlock_core.backends.redis import addresses, health
from dlock_core.backends.redis.backend import RedisBackend, checked_options
from dlock_core.backends.redis.cluster_routing import ClusterCommand, SlotMap, SlotTransport, pipeline, slot_of
from dlock_core.backends.redis.protocol import (
    INSPECT_BATCH,
    RELEASE_REPLIES,
    Keyspace,
    holders_and_ttls,
    load_script,
    parse_states,
    renewal_limit,
    shown,
)
from dlock_core.backends.redis.transport import run_script
from dlock_core.errors import BackendUnavailable
from dlock_core.names import canonical

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from dlock_core.backend import AcquireRequest, Busy, Granted, LockState, Released, Renewal, RenewalResult
    from dlock_core.backends.redis.protocol import Command
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["ClusterBackend"]


SHARD_COUNT: Final = 256
"""More would make a listing slower, fewer would spread the locks unevenly over the nodes. It must never change."""


class ClusterBackend:
    """A Redis Cluster: redis+cluster://[user:password@]host:port,host:port, or a RedisCluster client of redis-py.

    Args:
        client: names the cluster.
        prefix: what every key begins with.
        timeout: the time limit of each request with all its redirections, in seconds.
        replicas: how many replicas of its master must have a grant before it counts: a failover then keeps it.
    """

    capabilities = RedisBackend.capabilities

    __reduce__ = refuse_to_pickle

    def __init__(self, client: Any, *, prefix: str = "dlock:", timeout: float = 2.0, replicas: int = 0) -> None:
        prefix = checked_options(prefix, timeout, replicas)
        seeds = client if isinstance(client, addresses.Seeds) else addresses.seeds_from_client(client)
        self._slots, self._timeout = SlotMap(seeds, timeout), timeout
        tags = [f"{number:08b}" for number in range(SHARD_COUNT)]  # in this form they are spread evenly over the slots
        self._shards = [
            Shard(SlotTransport(slot_of(tag), self._slots), f"{prefix}{{{tag}}}", timeout, replicas) for tag in tags
        ]

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ClusterBackend:
        """Return the store of the nodes of a redis+cluster:// or rediss+cluster:// URL; raises ValueError."""
        return cls(addresses.seeds_from_url(url), **options)

    def shard(self, name: str) -> Shard:
        """Return the part of the store to which a name belongs."""
        return self._shards[crc_hqx(name.encode(), 0) % SHARD_COUNT]

    def lock_key(self, name: str) -> str:
        """Return the key of a lock, for programs with another library that must exclude dlock."""
        return self.shard(canonical(name)).lock_key(name)

    def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Coroutine[Any, Any, Granted | Busy]:
        return self.shard(request.name).try_acquire(runtime, request, ticket, unsure=unsure)

    def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Coroutine[Any, Any, Granted | Busy | None]:
        return self.shard(request.name).wait(runtime, request, busy, timeout)

    def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> Coroutine[Any, Any, None]:
        return self.shard(request.name).abandon(runtime, request, ticket)

    def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Coroutine[Any, Any, Released]:
        return self.shard(request.name).release(runtime, request, granted)

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        requests = [renewal.request for renewal in renewals]
        leases = [(self.shard(request.name), request) for request in requests]
        return await renew(self._slots, runtime, leases, renewal_limit(self._timeout, requests))

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        if name is not None:
            return await self.shard(name).inspect(runtime, name)
        found = [
            state
            for shard, keys, reply in await self._held_locks(runtime)
            for state in parse_states(shard.keyspace.names_of(keys), reply)
        ]
        return shown(sorted(found, key=lambda state: state.name))

    def force_release(self, runtime: Runtime, name: str, token: int) -> Coroutine[Any, Any, bool]:
        return self.shard(name).force_release(runtime, name, token)

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine every master; raises BackendUnavailable."""
        await self._pipeline(
            runtime, [ClusterCommand(shard.slot, ("EXISTS", shard.keyspace.held_locks)) for shard in self._shards]
        )
        found: list[Finding] = []
        for node in self._slots.masters():
            found += health.of_node(node.title, health.judge(*await health.measure(cast("Any", node), runtime)))
        return found

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._slots.close()

    async def _held_locks(self, runtime: Runtime) -> list[tuple[Shard, list[bytes], list[Any]]]:
        """Read the set of held locks of every shard, then the locks in batches: keys and reply of each batch."""
        inspect = load_script("inspect")
        commands = [ClusterCommand(shard.slot, shard.keyspace.listing) for shard in self._shards]
        lists = [[*keys] for keys in await self._pipeline(runtime, commands)]
        batches = [
            (shard, keys[start : start + INSPECT_BATCH])
            for shard, keys in zip(self._shards, lists, strict=True)
            for start in range(0, len(keys), INSPECT_BATCH)
        ]
        commands = [
            ClusterCommand(shard.slot, inspect.by_digest(tuple(keys), (shard.keyspace.wake_lists,)), inspect)
            for shard, keys in batches
        ]
        replies = await self._pipeline(runtime, commands)
        return [(shard, keys, reply) for (shard, keys), reply in zip(batches, replies, strict=True)]

    async def _pipeline(self, runtime: Runtime, commands: Sequence[ClusterCommand]) -> list[Any]:
        answers = await pipeline(self._slots, runtime, "", commands, self._timeout)
        for answer in answers:
            if isinstance(answer, BackendUnavailable):
                raise answer
        return answers


RENEW: Final = load_script("renew")


class Shard(RedisBackend):
    """The names of one hash tag.

    While a slot moves, its keys go to the other node one after the other, and a node answers TRYAGAIN to a command if
    it has only some of its keys. A script must never run on such a half: it could find a queue without its lock, for
    example. So each script of a lock also takes a key that never exists, and is refused as a whole for as long as the
    slot moves. The move takes milliseconds, and most scripts can wait for its end. Renewals and releases cannot wait;
    for an exclusive lease they need only the lock's key, and a command with one key always reaches the node that has
    it.
    """

    def __init__(self, slot: SlotTransport, prefix: str, timeout: float, replicas: int) -> None:
        self._never = f"{prefix}never"
        self._reach(slot, slot, slot, Keyspace(prefix, self._never), timeout, replicas)
        self.slot = slot

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        try:
            return await super().wait(runtime, request, busy, timeout)
        except BackendUnavailable as error:
            if _has_moved(error.__cause__):
                return None  # The move itself has ended the BLPOP: try again, at the node that has the lock now.
            raise

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        try:
            await super().abandon(runtime, request, ticket)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            await self._drop(runtime, request)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        try:
            return await super().release(runtime, request, granted)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            return RELEASE_REPLIES[await self._drop(runtime, request)]

    async def renew_alone(self, runtime: Runtime, request: AcquireRequest, limit: float) -> int:
        """Renew one exclusive lease, wherever its key is; raises BackendUnavailable."""
        keys, args = (self.keyspace.lock(request.name),), holders_and_ttls([request])
        (ours,) = await run_script(self.slot, runtime, request.name, RENEW, keys, args, limit)
        return int(ours)

    def renewal(self, requests: Sequence[AcquireRequest], *, shared: bool) -> Command:
        """Return the command that renews these leases; shared leases are stored in several keys."""
        keys = self.keyspace.locks(requests)
        return RENEW.by_digest((*keys, self._never) if shared else keys, holders_and_ttls(requests))

    async def _drop(self, runtime: Runtime, request: AcquireRequest) -> int:
        """End an exclusive lease by its key alone. Its waiters try again by themselves, once the slot has arrived."""
        found: int = await self._run(
            runtime, request.name, "drop", (self.keyspace.lock(request.name),), (request.holder,)
        )
        return found


def _has_moved(error: BaseException | None) -> bool:
    return isinstance(error, AskError | TryAgainError | ClusterDownError) or (
        isinstance(error, ResponseError) and str(error).startswith("UNBLOCKED")
    )


async def renew(
    slots: SlotMap, runtime: Runtime, leases: Sequence[tuple[Shard, AcquireRequest]], limit: float
) -> list[RenewalResult]:
    """Renew each lease at the node of its slot; raises BackendUnavailable if no outcome is known."""
    groups: dict[tuple[Shard, bool], list[int]] = {}
    for index, (shard, request) in enumerate(leases):
        groups.setdefault((shard, request.shared), []).append(index)
    commands = [
        ClusterCommand(shard.slot, shard.renewal([leases[index][1] for index in indexes], shared=shared), RENEW)
        for (shard, shared), indexes in groups.items()
    ]
    replies = await pipeline(slots, runtime, leases[0][1].name, commands, limit)
    answers: list[Any] = [None] * len(leases)
    for indexes, reply in zip(groups.values(), replies, strict=True):
        for number, index in enumerate(indexes):
            known = isinstance(reply, list)
            answers[index] = reply[number] if known else await _alone(runtime, *leases[index], reply, limit)
    if all(isinstance(answer, BackendUnavailable) for answer in answers):
        raise answers[0]
    return [_result(request, answer) for (_, request), answer in zip(leases, answers, strict=True)]


async def _alone(
    runtime: Runtime, shard: Shard, request: AcquireRequest, failure: BackendUnavailable, limit: float
) -> int | BackendUnavailable:
    """Renew a single lease whose slot is moving, if the lock's key is all that it needs."""
    if request.shared or not isinstance(failure.__cause__, TryAgainError):
        return failure
    try:
        return await shard.renew_alone(runtime, request, limit)
    except BackendUnavailable as error:
        return error


def _result(request: AcquireRequest, answer: int | BackendUnavailable) -> RenewalResult:
    if isinstance(answer, BackendUnavailable):
        return RenewalFailure.UNKNOWN
    return request.ttl if answer else RenewalFailure.LOST
