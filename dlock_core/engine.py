"""Acquire, renew and release a lease: the only copy of the algorithm, for every store, sync and async.

These are coroutines that wait only through a runtime (see `runtime`). The engine owns time, retries and clean-up; a
backend only answers one question at a time. How one acquire call runs stands in `attempt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlock_core import hooks
from dlock_core.attempt import Attempt
from dlock_core.backend import Granted, Renewal
from dlock_core.errors import BackendUnavailable, LeaseLost
from dlock_core.lease import Released, valid_until

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dlock_core.backend import Backend, Request
    from dlock_core.held import Held
    from dlock_core.runtime import Runtime

__all__ = ["acquire", "raise_token", "release", "released", "renew", "try_acquire"]

FOUND: Final = {"released": Released.RELEASED, "absent": Released.EXPIRED, "other": Released.STOLEN}


async def acquire(runtime: Runtime, backend: Backend, request: Request, wait: float | None) -> Held:
    """Wait for the lock, at most `wait` seconds (None: for ever).

    Raises AcquireTimeout when others held it all the time, BackendUnavailable when the store could not be asked.
    """
    attempt = Attempt(runtime, backend, request, wait)
    held = await attempt.run()
    if held is None:
        raise attempt.timeout()
    return held


async def try_acquire(runtime: Runtime, backend: Backend, request: Request) -> Held | None:
    """Ask once; None when somebody else has it."""
    return await Attempt(runtime, backend, request._replace(queue=False), 0.0).run()


async def renew(runtime: Runtime, held: Held, ttl: float | None = None) -> None:
    """Push the expiry of a lease that is still ours; raises LeaseLost, or BackendUnavailable, which says nothing."""
    held.ensure_own_process()
    held.ensure()
    sent = runtime.now()
    if ttl is not None:
        held.request = held.request._replace(ttl=ttl)
        held.until = min(held.until, valid_until(sent, ttl))  # it is shorter from now on, answered or not
    (valid_for,) = await held.backend.renew_many(runtime, [Renewal(held.request, held.granted)])
    if valid_for is None:
        held.lose("the store gave it to another, or forgot it")
        raise LeaseLost(held.name, token=held.token, reason=held.why())
    held.extend(sent, valid_for)
    held.ensure()


async def release(runtime: Runtime, held: Held) -> Released:
    """End the grant, once; a repeated call gives the first answer.

    A network error is retried once and then raised as BackendUnavailable: the lease is no longer renewed and runs out.
    """
    held.ensure_own_process()
    if held.ended is None:
        await runtime.shield(_release(runtime, held))
        _tell(held)
    return held.ended or Released.EXPIRED


def released(held: Held) -> None:
    """Note that the grant has ended with the transaction in which it was taken; raises NotHeld in a forked child."""
    held.ensure_own_process()
    if held.ended is None:
        held.end(Released.RELEASED)
        _tell(held)


def _tell(held: Held) -> None:
    found = held.ended or Released.EXPIRED
    hooks.emit("released", held.name, held.token, held.now() - held.since, found.value, False, held)


async def _release(runtime: Runtime, held: Held) -> None:
    try:
        found = await _ask_release(runtime, held)
    except BackendUnavailable:
        found = await _ask_release(runtime, held)
    if held.in_time and held.release_requests > 1:
        found = "released"  # whoever holds it now was let in by an earlier request of ours, whose answer was lost
    held.end(FOUND[found])


def _ask_release(runtime: Runtime, held: Held) -> Awaitable[str]:
    held.prepare_release()
    return held.backend.release(runtime, held.request, held.granted)


async def raise_token(runtime: Runtime, held: Held, floor: int) -> bool:
    """Ask for a token above `floor` for a lease that is still ours: heals a store that lost data and its time.

    False when the store does not know us as the holder any more.
    """
    request = held.request._replace(floor=floor, queue=False)
    sent = runtime.now()
    try:
        (valid_for,) = await held.backend.renew_many(runtime, [Renewal(held.request, held.granted)])
        answer = await held.backend.try_acquire(runtime, request) if valid_for is not None else None
    except BackendUnavailable:
        return False
    if not isinstance(answer, Granted) or answer.token <= floor:
        return False
    held.granted = answer
    held.extend(sent, answer.valid_for)
    return True
