"""Push the expiry of leases at all nodes, and tell them to nodes which should know them and do not."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

from dlock_core import quorum
from dlock_core.backends.redis import holders_and_ttls
from dlock_core.backends.redlock.asking import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Renewal
    from dlock_core.backends.redlock.asking import Nodes
    from dlock_core.runtime import Runtime

__all__ = ["renew"]


async def renew(nodes: Nodes, runtime: Runtime, renewals: Sequence[Renewal]) -> list[bool | None]:
    """Tell of each lease whether a majority still holds it, None when too few nodes answered for that."""
    requests = [renewal.request for renewal in renewals]
    keys = (nodes.any.keys("")[2], *[nodes.any.lock_key(request.name) for request in requests])
    limit = min(nodes.timeout, *[request.ttl / 3 for request in requests])  # a late answer would be of no use
    question = nodes.question(requests[0].name, "renew", keys, holders_and_ttls(requests))
    answers = await nodes.ask(runtime, question._replace(limit=limit))
    told = {place: answer for place, answer in enumerate(answers) if isinstance(answer, list)}
    votes, silent = list(zip(*told.values(), strict=True)), len(answers) - len(told)
    verdicts = [quorum.is_renewed(sum(each), silent, nodes.needed) for each in votes]
    if all(verdict is None for verdict in verdicts):
        raise nodes.unavailable(requests[0].name, answers)
    gaps = [
        renewal for renewal, verdict, each in zip(renewals, verdicts, votes, strict=True) if verdict and not all(each)
    ]
    if gaps:
        await _restore(nodes, runtime, gaps, frozenset(place for place, each in told.items() if not all(each)), limit)
    return verdicts


async def _restore(
    nodes: Nodes, runtime: Runtime, renewals: Sequence[Renewal], places: frozenset[int], limit: float
) -> None:
    """Tell leases that a majority has just renewed to nodes that were away, or forgot, so that others may now."""
    locks = [nodes.any.lock_key(renewal.request.name) for renewal in renewals]
    args = [
        (request.holder, math.ceil(request.ttl * 1000), granted.token, request.owner) for request, granted in renewals
    ]
    keys, name = (*nodes.any.keys("")[1:], *locks), renewals[0].request.name
    question = nodes.question(name, "restore", keys, tuple(chain.from_iterable(args)), all_of(places))
    await nodes.ask(runtime, question._replace(limit=limit, among=places))
