"""Leases in a Redis Cluster: the names are spread over 256 hash tags, each of which is like a server of its own.

All keys of a name, the counter its tokens come from and the list it is found by when it is held have one hash tag, so
that they are in one slot and move together. No more than 256 lists are read to show what is held, whatever else is
there. (Source: the Redis Cluster specification.)
"""

from __future__ import annotations

from binascii import crc_hqx
from typing import TYPE_CHECKING, Any, Final, cast

from redis.exceptions import AskError, ClusterDownError, ResponseError, TryAgainError

from dlock_core.backend import RenewalFailure
from dlock_core.backends.redis import addresses, backend, health
from dlock_core.backends.redis.backend import FOUND, LISTED, RedisBackend, checked, holders_and_ttls
from dlock_core.backends.redis.cluster.routing import Question, Routes, Slot, put, slot_of
from dlock_core.backends.redis.scripts import script
from dlock_core.backends.redis.transport import ask
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from dlock_core.backend import Busy, Granted, LockState, Released, Renewal, RenewalResult, Request
    from dlock_core.backends.redis.transport import Command
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["ClusterBackend"]


TAGS: Final = 256
"""More would make listing dearer, fewer would spread the locks unevenly over the nodes; never to be changed."""


class ClusterBackend:
    """A Redis Cluster: redis+cluster://[user:password@]host:port,host:port, or a RedisCluster client of redis-py.

    `timeout` bounds each request, in seconds, with all its redirections. `prefix` starts every key. A grant is told
    only when so many `replicas` of its master have it, so that a failover does not forget it.
    """

    capabilities = RedisBackend.capabilities

    def __init__(self, client: Any, *, prefix: str = "dlock:", timeout: float = 2.0, replicas: int = 0) -> None:
        checked(prefix, timeout, replicas)
        seeds = client if isinstance(client, addresses.Seeds) else addresses.of_client(client)
        self._routes, self._timeout = Routes(seeds, timeout), timeout
        tags = [f"{number:08b}" for number in range(TAGS)]  # in this form the slots spread them evenly
        self._parts = [Part(Slot(slot_of(tag), self._routes), f"{prefix}{{{tag}}}", timeout, replicas) for tag in tags]

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ClusterBackend:
        """Reach the nodes of a redis+cluster:// or rediss+cluster:// URL; raises ValueError."""
        return cls(addresses.read(url), **options)

    def part(self, name: str) -> Part:
        """Give the part of the store to which a name belongs."""
        return self._parts[crc_hqx(name.encode(), 0) % TAGS]

    def lock_key(self, name: str) -> str:
        """Give the key of a lock, for other libraries that shall exclude us."""
        return self.part(name).lock_key(name)

    def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Coroutine[Any, Any, Granted | Busy]:
        return self.part(request.name).try_acquire(runtime, request, ticket, unsure=unsure)

    def wait(
        self, runtime: Runtime, request: Request, busy: Busy, timeout: float
    ) -> Coroutine[Any, Any, Granted | Busy | None]:
        return self.part(request.name).wait(runtime, request, busy, timeout)

    def abandon(self, runtime: Runtime, request: Request, ticket: Any = None) -> Coroutine[Any, Any, None]:
        return self.part(request.name).abandon(runtime, request, ticket)

    def release(self, runtime: Runtime, request: Request, granted: Granted) -> Coroutine[Any, Any, Released]:
        return self.part(request.name).release(runtime, request, granted)

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        requests = [renewal.request for renewal in renewals]
        limit = min(self._timeout, *[request.ttl / 3 for request in requests])  # a late answer would be of no use
        return await renew(self._routes, runtime, [(self.part(one.name), one) for one in requests], limit)

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        if name is not None:
            return await self.part(name).inspect(runtime, name)
        states = [backend.state(part.name_of(key), reply) for part, key, reply in await self._listing(runtime)]
        return [state for state in states if state.holders or state.waiters]

    def force_release(self, runtime: Runtime, name: str, token: int) -> Coroutine[Any, Any, bool]:
        return self.part(name).force_release(runtime, name, token)

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine every master; raises BackendUnavailable."""
        await self._put(runtime, [Question(part.slot, ("EXISTS", part.held)) for part in self._parts])
        found: list[Finding] = []
        for node in self._routes.masters():
            found += health.at(node.title, health.judged(*await health.measure(cast("Any", node), runtime)))
        return found

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._routes.close()

    async def _listing(self, runtime: Runtime) -> list[tuple[Part, bytes, Any]]:
        """Read the list of every part, then the locks that stand there."""
        listed, look = script("held"), script("inspect")
        questions = [Question(part.slot, ("EVALSHA", listed.sha, "1", part.held), listed) for part in self._parts]
        lists = await self._put(runtime, questions)
        shares = [
            (part, keys[start : start + LISTED])
            for part, keys in zip(self._parts, lists, strict=True)
            for start in range(0, len(keys), LISTED)
        ]
        questions = [Question(part.slot, ("EVALSHA", look.sha, str(len(keys)), *keys), look) for part, keys in shares]
        shown = await self._put(runtime, questions)
        return sorted(
            (
                (part, key, reply)
                for (part, keys), replies in zip(shares, shown, strict=True)
                for key, reply in zip(keys, replies, strict=True)
            ),
            key=lambda item: item[0].name_of(item[1]),
        )

    async def _put(self, runtime: Runtime, questions: Sequence[Question]) -> list[Any]:
        answers = await put(self._routes, runtime, "", questions, self._timeout)
        for answer in answers:
            if isinstance(answer, BackendUnavailable):
                raise answer
        return answers


RENEW: Final = script("renew")


class Part(RedisBackend):
    """A share of the names. While its slot moves from node to node, a script is refused as a whole (TRYAGAIN).

    That is what the key is for that never exists: without it a script would run where only some of its keys are. What
    cannot wait for the end of a move are renewals and releases; of an exclusive lease one key is enough for them.
    """

    def __init__(self, slot: Slot, prefix: str, timeout: float, replicas: int) -> None:
        self._reach(slot, slot, prefix, timeout, replicas)
        self.slot, self._never = slot, f"{prefix}never"

    def keys(self, name: str) -> tuple[str, ...]:
        return (*super().keys(name), self._never)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | Busy | None:
        try:
            return await super().wait(runtime, request, busy, timeout)
        except BackendUnavailable as error:
            if _has_moved(error.__cause__):
                return None  # woken by the move itself: ask again, wherever the lock is now
            raise

    async def abandon(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        try:
            await super().abandon(runtime, request, ticket)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            await self._drop(runtime, request)

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Released:
        try:
            return await super().release(runtime, request, granted)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            return FOUND[await self._drop(runtime, request)]

    async def renew_alone(self, runtime: Runtime, request: Request, limit: float) -> int:
        """Renew one exclusive lease, wherever its key is; raises BackendUnavailable."""
        keys, args = (self.lock_key(request.name),), holders_and_ttls([request])
        (ours,) = await ask(self.slot, runtime, request.name, RENEW, keys, args, limit)
        return int(ours)

    def renewal(self, requests: Sequence[Request], *, shared: bool) -> Command:
        """Give the command that renews these leases; shared ones are kept in several keys."""
        before = (self._never, self.held) if shared else (self.held,)
        keys = (*before, *[self.lock_key(request.name) for request in requests])
        return ("EVALSHA", RENEW.sha, str(len(keys)), *keys, *holders_and_ttls(requests))

    @property
    def held(self) -> str:
        """The list of held locks."""
        return self._globals[1]

    async def _drop(self, runtime: Runtime, request: Request) -> int:
        """End an exclusive lease; who waits for it asks again by himself, once the slot has arrived."""
        found: int = await self._ask(runtime, request.name, "drop", (self.lock_key(request.name),), (request.holder,))
        return found


def _has_moved(error: BaseException | None) -> bool:
    return isinstance(error, AskError | TryAgainError | ClusterDownError) or (
        isinstance(error, ResponseError) and str(error).startswith("UNBLOCKED")
    )


async def renew(
    routes: Routes, runtime: Runtime, leases: Sequence[tuple[Part, Request]], limit: float
) -> list[RenewalResult]:
    """Renew each lease at the node of its slot; raises BackendUnavailable when nothing was learned about any."""
    groups: dict[tuple[Part, bool], list[int]] = {}
    for place, (part, request) in enumerate(leases):
        groups.setdefault((part, request.shared), []).append(place)
    questions = [
        Question(part.slot, part.renewal([leases[place][1] for place in places], shared=shared), RENEW)
        for (part, shared), places in groups.items()
    ]
    told = await put(routes, runtime, leases[0][1].name, questions, limit)
    answers: list[Any] = [None] * len(leases)
    for places, ours in zip(groups.values(), told, strict=True):
        for number, place in enumerate(places):
            known = isinstance(ours, list)
            answers[place] = ours[number] if known else await _alone(runtime, *leases[place], ours, limit)
    if all(isinstance(answer, BackendUnavailable) for answer in answers):
        raise answers[0]
    return [_result(request, answer) for (_, request), answer in zip(leases, answers, strict=True)]


async def _alone(
    runtime: Runtime, part: Part, request: Request, failure: BackendUnavailable, limit: float
) -> int | BackendUnavailable:
    """Renew a lease whose slot is moving and whose key is all that it needs."""
    if request.shared or not isinstance(failure.__cause__, TryAgainError):
        return failure
    try:
        return await part.renew_alone(runtime, request, limit)
    except BackendUnavailable as error:
        return error


def _result(request: Request, answer: int | BackendUnavailable) -> RenewalResult:
    if isinstance(answer, BackendUnavailable):
        return RenewalFailure.UNKNOWN
    return request.ttl if answer else RenewalFailure.LOST
