"""Push the expiry of leases in all slots, in one request to each node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import TryAgainError

from dlock_core.backends.redis.cluster.asking import Question, put
from dlock_core.backends.redis.cluster.part import RENEW
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Request
    from dlock_core.backends.redis.cluster.part import Part
    from dlock_core.backends.redis.cluster.routes import Routes
    from dlock_core.runtime import Runtime

__all__ = ["renew"]


async def renew(
    routes: Routes, runtime: Runtime, leases: Sequence[tuple[Part, Request]], limit: float
) -> list[float | None]:
    """Give the validity of each, None where it is gone, 0.0 where nothing is known; raises when of none anything is."""
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
    return [_validity(request, answer) for (_, request), answer in zip(leases, answers, strict=True)]


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


def _validity(request: Request, answer: int | BackendUnavailable) -> float | None:
    if isinstance(answer, BackendUnavailable):
        return 0.0
    return request.ttl if answer else None
