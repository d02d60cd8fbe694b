"""Renew and release a lease: the only copy of the algorithm, for every store, sync and async.

These are coroutines that wait only through a runtime (see `runtime`). The engine is responsible for time, retries and
clean-up; a backend only answers one request at a time. `acquisition` is the acquire; the state of each lease is
recorded in `lease`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Granted, Released, Renewal, RenewalFailure
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.leases.lease import LeaseState
from dlock_core.leases.watchdog import renew_in_background
from dlock_core.observability import hooks
from dlock_core.options import Seconds, ttl_seconds
from dlock_core.scheduler import call_in_background

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime

__all__ = ["raise_token", "release", "release_later", "released", "renew", "repeat_later"]

_OVER: Final = (LeaseState.RELEASING, LeaseState.LOST, LeaseState.ENDED)


async def renew(runtime: Runtime, held: LeaseRecord, ttl: Seconds | None = None) -> None:
    """Extend the expiry of a lease that is still ours, and schedule its renewals by the new ttl.

    Raises LeaseLost, or BackendUnavailable, which says nothing about the lease.
    """
    try:
        await _renew(runtime, held, None if ttl is None else ttl_seconds(ttl))
    finally:
        if held.renewal_tick and held.state is LeaseState.HELD:
            renew_in_background(held)  # Also after an error: a shorter ttl counts from the time of its request.


async def _renew(runtime: Runtime, held: LeaseRecord, ttl: float | None) -> None:
    held.ensure_own_process()
    held.ensure()
    sent = held.now()
    if ttl is not None:
        held.change_ttl(sent, ttl)
    (result,) = await held.backend.renew(runtime, [Renewal(held.request, held.granted)])
    if result is RenewalFailure.UNKNOWN:
        raise BackendUnavailable(held.name, reason="the store did not report the outcome for this lease")
    if result is RenewalFailure.LOST:
        if held.state is not LeaseState.RELEASING:  # Otherwise another thread or task releases it, which is no loss.
            held.lose("the store granted it to another holder, or lost it")
        raise LeaseLost(held.name, token=held.token, reason=held.why())
    held.extend(sent, result)
    held.ensure()


async def raise_token(runtime: Runtime, held: LeaseRecord, floor: int) -> bool:
    """Request a token above `floor` for a lease that is still ours, because the store has lost its counter.

    Returns False if the store no longer has us as the holder, or cannot be reached.
    """
    request = held.request._replace(floor=floor, queue=False)
    try:
        (result,) = await held.backend.renew(runtime, [Renewal(held.request, held.granted)])
        if result is RenewalFailure.LOST:
            return False
        answer = await held.backend.try_acquire(runtime, request)
    except BackendUnavailable:
        return False
    if not isinstance(answer, Granted) or answer.token <= floor:
        return False
    if held.state in _OVER:  # It was released or lost during the request, maybe before this grant.
        with suppress(BackendUnavailable):
            await held.backend.release(runtime, request, answer)
        return False
    held.replace_grant(answer)
    return True


async def release(runtime: Runtime, held: LeaseRecord) -> Released:
    """End the grant, once; a repeated call returns the first answer. In any case, the lease is no longer renewed.

    A network error is retried once and then raised as BackendUnavailable; further attempts are made in the background,
    until the store has answered or the lease has run out. An error with which the store refuses the request, such as a
    missing permission, is raised at once and not retried. Raises NotHeld in a forked child.
    """
    if held.ended is None:
        await runtime.shield(_release(runtime, held))
    return held.ended or Released.EXPIRED


async def _release(runtime: Runtime, held: LeaseRecord) -> None:
    try:
        try:
            await _release_once(runtime, held)
        except BackendUnavailable as error:
            if error.refused:
                raise
            await _release_once(runtime, held)
    except BaseException as error:  # Also an interrupt: the caller's event loop may end before the store answers.
        if not (isinstance(error, NotHeld) or getattr(error, "refused", False)):
            release_later(held)
        raise


async def _release_once(runtime: Runtime, held: LeaseRecord, tell: Callable[..., object] | None = None) -> None:
    if held.ended is None:
        held.begin_release()
        if held.end(await held.backend.release(runtime, held.request, held.granted)) and hooks.subscribed:
            held.emit_released() if tell is None else tell(held.emit_released)


def release_later(held: LeaseRecord) -> None:
    """Release a lease in the background, if that can be done before it runs out."""
    held.begin_release()
    step = partial(_release_once, held=held, tell=call_in_background)  # A slow hook delays no other release.
    repeat_later(held.backend, held.request.holder, step, held.time_left())


def repeat_later(*what: Any, is_release: bool = True) -> None:
    """Repeat a request that ends a holder's grants in the background; see `late_releases.repeat_in_background`.

    Nothing is repeated when the interpreter is ending, and its threads with it: then the grants run out.
    """
    if sys.is_finalizing():
        return
    from dlock_core.leases.late_releases import repeat_in_background  # few processes ever need it

    repeat_in_background(*what, is_release=is_release)


def released(held: LeaseRecord) -> None:
    """Record that the grant has ended with the transaction in which it was taken; raises NotHeld in a forked child."""
    held.ensure_own_process()
    if held.end(Released.RELEASED):
        held.emit_released()
