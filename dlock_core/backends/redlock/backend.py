"""Leases held by a majority of independent Redis masters (6.2 or newer), with each request sent to all of them at once.

A lease is held while more than half of the nodes have it, so that no minority that is dead, slow or has lost its data
can grant it to a second holder. (Idea: the distributed locks page of the Redis documentation; tokens: see `quorum`.)
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Busy, Capabilities, Granted, RenewalFailure, refuse_to_pickle
from dlock_core.backends.redis.protocol import (
    INSPECT_BATCH,
    RELEASE_REPLIES,
    acquire_args,
    holders_and_ttls,
    load_script,
    parse_acquire,
    parse_states,
    renewal_limit,
    shown,
)
from dlock_core.backends.redis.transport import retry_once
from dlock_core.backends.redlock import quorum
from dlock_core.backends.redlock.broadcast import is_late
from dlock_core.backends.redlock.nodes import NodeSet, all_of, merge_states, pools_from_url
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import RNG

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from dlock_core.backend import AcquireRequest, LockState, Released, Renewal, RenewalResult
    from dlock_core.backends.redlock.broadcast import Broadcast
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["RedlockBackend"]


MAX_SLEEP_S: Final = 1.0
"""A waiter's longest sleep before it tries again: the node at which it waits may be the one that fails."""
POLL_S: Final = (0.02, 0.1)
"""Range of the pause between two attempts when no node can wake the waiter."""


class RedlockBackend:
    """Independent masters, redlock://[user:password@]host:port,host:port,host:port/db, or their redis-py clients.

    Args:
        clients: the nodes; an odd number, at least 3.
        prefix: what every key begins with.
        timeout: the time limit of each request, in seconds; it should be far shorter than the ttl.
        tls: of `from_url`: reach the nodes as rediss:// does, whose options may follow after a "?".
    """

    capabilities = Capabilities(lists_waiters=True, ttl_min=0.05)
    """Not fair: waiters queue at one node, mostly served in order, but a newcomer may get the other nodes first."""

    __reduce__ = refuse_to_pickle

    def __init__(self, clients: Iterable[Any], *, prefix: str = "dlock:", timeout: float = 0.5) -> None:
        self._nodes = NodeSet(list(clients), prefix, timeout)
        self._keyspace = self._nodes.keyspace
        self._forecast = quorum.Forecast()
        self._renewing: dict[object, set[str]] = {}
        """For each renewal in progress, the holders whose release has begun since."""

    @classmethod
    def from_url(cls, url: str, *, tls: bool = False, **options: Any) -> RedlockBackend:
        """Return the store of the nodes of a redlock:// URL; raises ValueError."""
        return cls(pools_from_url(url, tls=tls), **options)

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        """Send to all nodes; if a majority grants different tokens, a second round writes the greatest one."""
        answers = await self._nodes.ask(runtime, self._acquire(request, runtime.now()))
        drawn = {index: answer for index, answer in enumerate(answers) if isinstance(answer, int)}
        token = quorum.agreed(list(drawn.values()), self._nodes.needed)
        if token is None and len(drawn) >= self._nodes.needed:
            token = await self._adopt(runtime, request, drawn)
        if token is not None:
            slow = {index for index, answer in enumerate(answers) if is_late(answer)}
            return Granted(token, request.ttl, slow or None)
        late = not request.floor and await runtime.shield(self._give_back(runtime, request, answers))
        try:
            return self._busy(request, answers)._replace(is_late=late)
        except BackendUnavailable as error:
            error.is_late = late
            raise

    async def wait(self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float) -> None:
        """Wait in the queue of one node, the last one that has the holder; a woken waiter tries all nodes.

        If waiters queued at every node, a release would hand over to a different one at each, and none of them would
        have a majority.
        """
        if busy.ticket is None:
            await runtime.sleep(min(timeout, RNG.uniform(*POLL_S)))
            return
        node = self._nodes.all[busy.ticket]
        try:
            queued = await node.backend.try_acquire(runtime, request)
            if isinstance(queued, Busy):
                await node.backend.wait(runtime, request, queued, min(timeout, MAX_SLEEP_S))
        except BackendUnavailable as error:
            if not error.broken:
                node.fail()
            await runtime.sleep(min(timeout, RNG.uniform(*POLL_S)))

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        answers = await self._end_at_all(runtime, request.name, "abandon", request.holder)
        self._nodes.of_majority(request.name, answers)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        for ending in list(self._renewing.values()):
            ending.add(request.holder)
        answers = await self._end_at_all(runtime, request.name, "release", request.holder, "1")
        found = [RELEASE_REPLIES[answer] for answer in answers if isinstance(answer, int)]
        verdict = quorum.released(found, len(answers) - len(found), self._nodes.needed)
        if verdict is None:
            raise self._nodes.unavailable(request.name, answers)
        return verdict

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        mine, ending = object(), set[str]()
        self._renewing[mine] = ending
        try:
            return await retry_once(lambda: renew(self._nodes, runtime, renewals, ending))
        finally:
            del self._renewing[mine]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        return await retry_once(lambda: self._inspect(runtime, name))

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        to_all = self._nodes.request(name, "force_release", self._keyspace.of(name), (str(token),), must_arrive=True)
        ended = self._nodes.of_majority(name, await self._nodes.ask(runtime, to_all))
        unanswered = len(self._nodes.all) - len(ended)
        return sum(ended) + unanswered >= self._nodes.needed and any(ended)

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine every node, and all of them together."""
        from dlock_core.backends.redlock import health

        return await health.diagnose(self._nodes, runtime)

    def close(self) -> None:
        """Close the idle connections; leases stay as they are."""
        self._nodes.close()

    def _acquire(self, request: AcquireRequest, now: float) -> Broadcast:
        """Return the request for a grant at all nodes.

        It takes no position in any queue: `wait` does, at one node. A node that is too slow is sent the undo after it,
        which may arrive when a renewal has already written the lease to that node, and then leaves it there. But a
        request with a floor is made under a held lease, and whatever its outcome, nothing may end that lease.
        """
        keys, args = self._keyspace.of(request.name), acquire_args(request._replace(queue=False))
        undo = None if request.floor else load_script("abandon").by_text(keys, (request.holder, "1"))
        args = (*args, str(self._forecast.token(now)))
        return self._nodes.request(request.name, "acquire", keys, args, self._nodes.have_decided, undo=undo)

    async def _adopt(self, runtime: Runtime, request: AcquireRequest, drawn: dict[int, int]) -> int | None:
        """Write the greatest drawn token to the nodes that granted; return it if a majority has accepted it."""
        token, keys = max(drawn.values()), self._keyspace.of(request.name)[:2]
        adoption = self._nodes.request(request.name, "adopt", keys, (request.holder, str(token)))
        answers = await self._nodes.ask(runtime, adoption._replace(among=frozenset(drawn)))
        clocks = [answer for answer in answers if isinstance(answer, int) and answer > 0]
        if len(clocks) < self._nodes.needed:
            return None
        self._forecast = quorum.Forecast(max(clocks), runtime.now())
        return token

    async def _end_at_all(self, runtime: Runtime, name: str, script: str, *args: str) -> list[Any]:
        """Ask all nodes to end what a holder has there; return their answers.

        A node is asked once more if a connection to it turned out to be dead, as after its restart. What it says then
        counts for nothing: it may have carried out the first request.
        """
        to_all = self._nodes.request(name, script, self._keyspace.of(name), args, must_arrive=True)
        answers = await self._nodes.ask(runtime, to_all)
        dead = frozenset(index for index, answer in enumerate(answers) if getattr(answer, "broken", False))
        if dead:
            await self._nodes.ask(runtime, to_all._replace(among=dead, enough=all_of(dead)))
        return answers

    async def _give_back(self, runtime: Runtime, request: AcquireRequest, answers: Sequence[Any]) -> bool:
        """End the grants that some nodes have, or may have; return whether this, or an undo, may still be in flight.

        Positions in queues are kept, unless the next attempt will have another holder.
        """
        late = any(map(is_late, answers))
        granted = frozenset(index for index, answer in enumerate(answers) if isinstance(answer, int))
        asked = [index for index, answer in enumerate(answers) if answer is not None]
        indexes = frozenset(index for index in asked if late or not isinstance(answers[index], list))
        if not indexes:
            return False
        keys, args = self._keyspace.of(request.name), (request.holder, "1") if late else (request.holder,)
        release = self._nodes.request(request.name, "release", keys, args, all_of(granted), must_arrive=True)
        given_back = await self._nodes.ask(runtime, release._replace(among=indexes))
        ended = frozenset(index for index in granted if isinstance(given_back[index], BackendUnavailable))
        if ended:  # With its connection, so the grant may remain, and block the next attempt.
            given_back += await self._nodes.ask(runtime, release._replace(among=ended, enough=all_of(ended)))
        return late or any(map(is_late, given_back))

    def _busy(self, request: AcquireRequest, answers: Sequence[Any]) -> Busy:
        """Return the owner that most nodes report, and as the ticket the index of a node at which to wait.

        Raises BackendUnavailable if no majority has answered.
        """
        self._nodes.of_majority(request.name, answers, list)
        refusals = {
            index: answer
            for index, each in enumerate(answers)
            if isinstance(each, list) and isinstance(answer := parse_acquire(request, each), Busy)
        }
        if not refusals:  # All nodes granted, but too few of them answered in the second round.
            raise self._nodes.unavailable(request.name, answers)
        owner = Counter(busy.owner for busy in refusals.values()).most_common(1)[0][0]
        indexes = [index for index, busy in refusals.items() if busy.owner == owner and busy.ticket is not None]
        waits = [busy.retry_after for busy in refusals.values()]
        granted = sum(isinstance(answer, int) for answer in answers)
        retry_after = quorum.free_in(waits, granted, self._nodes.needed)
        return Busy(retry_after, owner, indexes[-1] if indexes else None)

    async def _inspect(self, runtime: Runtime, name: str | None) -> list[LockState]:
        names = [name] if name is not None else await self._held_locks(runtime)
        states: list[LockState] = []
        for start in range(0, len(names), INSPECT_BATCH):
            batch = names[start : start + INSPECT_BATCH]
            keys = tuple(self._keyspace.lock(each) for each in batch)
            inspection = self._nodes.request(name or "", "inspect", keys, (self._keyspace.wake_lists,))
            answers = self._nodes.of_majority(name or "", await self._nodes.ask(runtime, inspection), list)
            states += [
                merge_states(each, known)
                for each, *known in zip(batch, *[parse_states(batch, answer) for answer in answers], strict=True)
            ]
        return states if name is not None else shown(states)

    async def _held_locks(self, runtime: Runtime) -> list[str]:
        listing = self._nodes.request("", "held", (self._keyspace.held_locks,), ())
        lists = self._nodes.of_majority("", await self._nodes.ask(runtime, listing), list)
        return sorted({name for keys in lists for name in self._keyspace.names_of(keys)})


async def renew(
    nodes: NodeSet, runtime: Runtime, renewals: Sequence[Renewal], ending: Container[str]
) -> list[RenewalResult]:
    """Renew the leases at every node; raises BackendUnavailable if too few nodes answered for any result.

    A grant's handle is the set of nodes to which its undo may still be in flight. The answer of such a node counts only
    after the lease was restored there: then the undo does not touch it. `ending`: the holders whose release has begun,
    including those during this call.
    """
    requests = [renewal.request for renewal in renewals]
    keys = nodes.keyspace.locks(requests)
    limit = renewal_limit(nodes.timeout, requests)
    renewal_request = nodes.request(requests[0].name, "renew", keys, holders_and_ttls(requests))
    answers = await nodes.ask(runtime, renewal_request._replace(limit=limit))
    answered = {index: answer for index, answer in enumerate(answers) if isinstance(answer, list)}
    answered = {index: _sure(index, answer, renewals) for index, answer in answered.items()}
    votes, unanswered = list(zip(*answered.values(), strict=True)), len(answers) - len(answered)
    results = [
        quorum.renewal_result(each.count(1), unanswered + each.count(None), nodes.needed, request.ttl)
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
        forgetful = frozenset(index for index, each in answered.items() if not all(each))
        await _restore(nodes, runtime, gaps, forgetful, ending)
    return results


def _sure(index: int, answer: Sequence[int], renewals: Sequence[Renewal]) -> list[int | None]:
    """Return a node's answer for each lease, None for a lease that an undo may end there."""
    return [
        None if ours and renewal.granted.handle and index in renewal.granted.handle else ours
        for ours, renewal in zip(answer, renewals, strict=True)
    ]


async def _restore(
    nodes: NodeSet,
    runtime: Runtime,
    renewals: Sequence[Renewal],
    indexes: frozenset[int],
    ending: Container[str],
) -> None:
    """Write leases that a majority has just renewed to nodes that missed or lost them, so that others may fail.

    A release that begins at the same time may reach such a node first, and a lease written after it would have no
    holder.
    """
    renewals = [renewal for renewal in renewals if renewal.request.holder not in ending]
    if not renewals:
        return
    locks = [nodes.keyspace.lock(renewal.request.name) for renewal in renewals]
    args = [
        (request.holder, str(math.ceil(request.ttl * 1000)), str(granted.token), request.owner)
        for request, granted in renewals
    ]
    keys, name = (*nodes.keyspace.common, *locks), renewals[0].request.name
    limit = renewal_limit(nodes.timeout, [renewal.request for renewal in renewals])
    restoration = nodes.request(name, "restore", keys, tuple(chain.from_iterable(args)), all_of(indexes))
    answers = await nodes.ask(runtime, restoration._replace(limit=limit, among=indexes))
    restored = {index for index, answer in enumerate(answers) if answer == len(renewals)}
    for request, granted in renewals:
        if granted.handle:
            granted.handle.difference_update(restored)
        if request.holder in ending:
            keys = nodes.keyspace.of(request.name)
            abandoned = nodes.request(request.name, "abandon", keys, (request.holder,), all_of(indexes))
            await nodes.ask(runtime, abandoned._replace(among=indexes))
