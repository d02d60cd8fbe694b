"""Leases held by a majority of independent Redis masters (6.2 or newer), all asked at once.

A lease is held while more than half of the nodes keep it, so that no minority of them, dead, slow or forgetful, can
give it to a second holder. (Idea: the distributed locks page of the Redis documentation; tokens: see `quorum`.)
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Busy, Capabilities, Granted, RenewalFailure
from dlock_core.backends.redis import backend
from dlock_core.backends.redis.backend import FOUND, LISTED, holders_and_ttls
from dlock_core.backends.redis.scripts import script
from dlock_core.backends.redis.transport import twice
from dlock_core.backends.redlock import nodes, quorum
from dlock_core.backends.redlock.nodes import Nodes, all_of
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import CHANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlock_core.backend import LockState, Released, Renewal, RenewalResult, Request
    from dlock_core.backends.redis.transport import Command
    from dlock_core.backends.redlock.node import Question
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["RedlockBackend"]


LOOK: Final = 1.0
"""Seconds after which a waiter asks again, at the latest: the node at which it waits may be the one that is ill."""
JITTER: Final = (0.02, 0.1)
"""Seconds between two attempts when no node can wake us."""


class RedlockBackend:
    """Independent masters, redlock://[user:password@]host:port,host:port,host:port/db, or their redis-py clients.

    `timeout` bounds each request, in seconds; it should be far shorter than the ttl. `prefix` starts every key. `tls`
    reaches the nodes of a URL as rediss:// does, whose options may follow after a "?".
    """

    capabilities = Capabilities(lists_waiters=True, ttl_min=0.05)
    """Not fair: waiters queue at one node, mostly first come, first served, and a newcomer may take the other nodes."""

    def __init__(self, clients: Iterable[Any], *, prefix: str = "dlock:", timeout: float = 0.5) -> None:
        self._nodes = Nodes(list(clients), prefix, timeout)
        self._timeout = timeout
        self._forecast = quorum.Forecast()
        self._any = self._nodes.any

    @classmethod
    def from_url(cls, url: str, *, tls: bool = False, **options: Any) -> RedlockBackend:
        """Reach the nodes of a redlock:// URL; raises ValueError."""
        return cls(nodes.read(url, tls=tls), **options)

    async def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        answers = await self._nodes.ask(runtime, self._acquire(request, runtime.now()))
        drawn = {place: answer for place, answer in enumerate(answers) if isinstance(answer, int)}
        token = quorum.agreed(list(drawn.values()), self._nodes.needed)
        if token is None and len(drawn) >= self._nodes.needed:
            token = await self._adopt(runtime, request, drawn)
        if token is not None:
            return Granted(token, request.ttl)
        if not request.floor:
            await runtime.shield(self._give_back(runtime, request, answers))
        return self._busy(request, answers)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> None:
        """Wait in the queue of one node, the last of those where the holder is: whom it wakes may ask all others.

        With a place at every node a release would hand over to several waiters, and none of them would get a majority.
        """
        if busy.ticket is None:
            await runtime.sleep(min(timeout, CHANCE.uniform(*JITTER)))
            return
        node = self._nodes.all[busy.ticket]
        try:
            place = await node.backend.try_acquire(runtime, request)
            if isinstance(place, Busy):
                await node.backend.wait(runtime, request, place, min(timeout, LOOK))
        except BackendUnavailable as error:
            if not error.broken:
                node.fail()
            await runtime.sleep(min(timeout, CHANCE.uniform(*JITTER)))

    async def abandon(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        keys = self._any.keys(request.name)
        question = self._nodes.question(request.name, "abandon", keys, (request.holder,), insists=True)
        self._nodes.majority(request.name, await self._nodes.ask(runtime, question))

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Released:
        keys, args = self._any.keys(request.name), (request.holder, "1")
        question = self._nodes.question(request.name, "release", keys, args, insists=True)
        answers = await self._nodes.ask(runtime, question)
        found = [FOUND[answer] for answer in answers if isinstance(answer, int)]
        verdict = quorum.released(found, len(answers) - len(found), self._nodes.needed)
        if verdict is None:
            raise self._nodes.unavailable(request.name, answers)
        return verdict

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        return await twice(lambda: renew(self._nodes, runtime, renewals))

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        return await twice(lambda: self._inspect(runtime, name))

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        keys = self._any.keys(name)
        question = self._nodes.question(name, "force_release", keys, (str(token),), insists=True)
        ended = self._nodes.majority(name, await self._nodes.ask(runtime, question))
        silent = len(self._nodes.all) - len(ended)
        return sum(ended) + silent >= self._nodes.needed and any(ended)

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine every node, and all of them together."""
        from dlock_core.backends.redlock import health

        return await health.diagnose(self._nodes, runtime)

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._nodes.close()

    def _acquire(self, request: Request, now: float) -> Question:
        keys, args = self._any.question(request._replace(queue=False))  # the place is taken in `wait`, at one node
        undo: Command | None = ("EVAL", script("abandon").text, str(len(keys)), *keys, request.holder)
        if request.floor:  # it is held, and wants a greater token: whatever comes of that, nothing of it may end
            undo = None
        args = (*args, str(self._forecast.token(now)))
        return self._nodes.question(request.name, "acquire", keys, args, self._nodes.have_decided, undo=undo)

    async def _adopt(self, runtime: Runtime, request: Request, drawn: dict[int, int]) -> int | None:
        """Tell those who said yes the greatest token that they drew; it counts when a majority still says yes."""
        token, keys = max(drawn.values()), self._any.keys(request.name)[:2]
        question = self._nodes.question(request.name, "adopt", keys, (request.holder, str(token)))
        answers = await self._nodes.ask(runtime, question._replace(among=frozenset(drawn)))
        clocks = [answer for answer in answers if isinstance(answer, int) and answer > 0]
        if len(clocks) < self._nodes.needed:
            return None
        self._forecast = quorum.Forecast(max(clocks), runtime.now())
        return token

    async def _give_back(self, runtime: Runtime, request: Request, answers: Sequence[Any]) -> None:
        """End what some nodes granted, or may have granted; places in queues are kept."""
        granted = frozenset(place for place, answer in enumerate(answers) if isinstance(answer, int))
        places = granted | {place for place, answer in enumerate(answers) if not isinstance(answer, list)}
        if places:
            keys, args = self._any.keys(request.name), (request.holder,)
            question = self._nodes.question(request.name, "release", keys, args, all_of(granted), insists=True)
            await self._nodes.ask(runtime, question._replace(among=places))

    def _busy(self, request: Request, answers: Sequence[Any]) -> Busy:
        """Tell whom we wait for, and at which node; raises BackendUnavailable when no majority has answered."""
        self._nodes.majority(request.name, answers, list)
        said = {
            place: answer
            for place, each in enumerate(answers)
            if isinstance(each, list) and isinstance(answer := self._any.answer(request, each), Busy)
        }
        if not said:  # all said yes, but not in the second round
            raise self._nodes.unavailable(request.name, answers)
        owner = Counter(busy.owner for busy in said.values()).most_common(1)[0][0]
        places = [place for place, busy in said.items() if busy.owner == owner and busy.ticket is not None]
        waits, yes = [busy.retry_after for busy in said.values()], sum(isinstance(answer, int) for answer in answers)
        return Busy(quorum.free_in(waits, yes, self._nodes.needed), owner, places[-1] if places else None)

    async def _inspect(self, runtime: Runtime, name: str | None) -> list[LockState]:
        names = [name] if name is not None else await self._held(runtime)
        states: list[LockState] = []
        for start in range(0, len(names), LISTED):
            part = names[start : start + LISTED]
            keys = tuple(self._any.lock_key(each) for each in part)
            answers = self._nodes.majority(name or "", await self._nodes.ask(runtime, self._look(name, keys)), list)
            shown = zip(*answers, strict=True)
            states += [
                nodes.merged(each, [backend.state(each, reply) for reply in replies])
                for each, replies in zip(part, shown, strict=True)
            ]
        return states if name is not None else [state for state in states if state.holders or state.waiters]

    def _look(self, name: str | None, keys: tuple[str, ...]) -> Question:
        return self._nodes.question(name or "", "inspect", keys, ())

    async def _held(self, runtime: Runtime) -> list[str]:
        question = self._nodes.question("", "held", (self._any.keys("")[2],), ())
        listed = self._nodes.majority("", await self._nodes.ask(runtime, question), list)
        return sorted({self._any.name_of(key) for keys in listed for key in keys})


async def renew(nodes: Nodes, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
    """Renew the leases at every node; raises BackendUnavailable when too few nodes answered for any verdict."""
    requests = [renewal.request for renewal in renewals]
    keys = (nodes.any.keys("")[2], *[nodes.any.lock_key(request.name) for request in requests])
    limit = min(nodes.timeout, *[request.ttl / 3 for request in requests])  # a late answer would be of no use
    question = nodes.question(requests[0].name, "renew", keys, holders_and_ttls(requests))
    answers = await nodes.ask(runtime, question._replace(limit=limit))
    told = {place: answer for place, answer in enumerate(answers) if isinstance(answer, list)}
    votes, silent = list(zip(*told.values(), strict=True)), len(answers) - len(told)
    results = [
        quorum.renewal_result(sum(each), silent, nodes.needed, request.ttl)
        for each, request in zip(votes, requests, strict=False)
    ]
    if all(result is RenewalFailure.UNKNOWN for result in results):
        raise nodes.unavailable(requests[0].name, answers)
    gaps = [
        renewal
        for renewal, result, each in zip(renewals, results, votes, strict=True)
        if not isinstance(result, RenewalFailure) and not all(each)
    ]
    if gaps:
        await _restore(nodes, runtime, gaps, frozenset(place for place, each in told.items() if not all(each)), limit)
    return results


async def _restore(
    nodes: Nodes, runtime: Runtime, renewals: Sequence[Renewal], places: frozenset[int], limit: float
) -> None:
    """Tell leases that a majority has just renewed to nodes that were away, or forgot, so that others may now."""
    locks = [nodes.any.lock_key(renewal.request.name) for renewal in renewals]
    args = [
        (request.holder, str(math.ceil(request.ttl * 1000)), str(granted.token), request.owner)
        for request, granted in renewals
    ]
    keys, name = (*nodes.any.keys("")[1:], *locks), renewals[0].request.name
    question = nodes.question(name, "restore", keys, tuple(chain.from_iterable(args)), all_of(places))
    await nodes.ask(runtime, question._replace(limit=limit, among=places))
