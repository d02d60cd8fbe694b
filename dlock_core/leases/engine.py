"""Acquire, renew and release a lease: the only copy of the algorithm, for every store, sync and async.

These are coroutines that wait only through a runtime (see `runtime`). The engine owns time, retries and clean-up; a
backend only answers one question at a time. How one acquire call runs stands in `attempt`.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Busy, Granted, Released, Renewal, RenewalFailure
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost
from dlock_core.leases.lease import Held, valid_until
from dlock_core.observability import hooks
from dlock_core.options import deadline
from dlock_core.owner import describe
from dlock_core.runtime import CHANCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

    from dlock_core.backend import Backend, Request
    from dlock_core.runtime import Runtime

__all__ = ["acquire", "end", "raise_token", "release", "released", "renew", "try_acquire"]


async def acquire(
    runtime: Runtime, backend: Backend, request: Request, wait: float | None, into: list[Held] | None = None
) -> Held:
    """Wait for the lock, at most `wait` seconds (None: for ever).

    A caller who may be interrupted between the grant and the return finds what it was granted in `into`.
    Raises AcquireTimeout when others held it all the time, BackendUnavailable when the store could not be asked.
    """
    attempt = Attempt(runtime, backend, request, wait)
    held = await attempt.run(into)
    if held is None:
        raise attempt.timeout()
    return held


async def try_acquire(
    runtime: Runtime, backend: Backend, request: Request, into: list[Held] | None = None
) -> Held | None:
    """Ask once; None when somebody else has it. See `acquire` for `into`."""
    return await Attempt(runtime, backend, request._replace(queue=False), 0.0).run(into)


async def renew(runtime: Runtime, held: Held, ttl: float | None = None) -> None:
    """Push the expiry of a lease that is still ours; raises LeaseLost, or BackendUnavailable, which says nothing."""
    held.ensure_own_process()
    held.ensure()
    sent = runtime.now()
    if ttl is not None:
        held.request = held.request._replace(ttl=ttl)
        held.until = min(held.until, valid_until(sent, ttl))  # it is shorter from now on, answered or not
    (result,) = await held.backend.renew(runtime, [Renewal(held.request, held.granted)])
    if result is RenewalFailure.UNKNOWN:
        raise BackendUnavailable(held.name, reason="the store learned nothing about this lease")
    if result is RenewalFailure.LOST:
        held.lose("the store gave it to another, or forgot it")
        raise LeaseLost(held.name, token=held.token, reason=held.why())
    held.extend(sent, result)
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
    held.emit("released", (held.ended or Released.EXPIRED).value)


async def _release(runtime: Runtime, held: Held) -> None:
    try:
        found = await _ask_release(runtime, held)
    except BackendUnavailable:
        found = await _ask_release(runtime, held)
    end(held, found)


def end(held: Held, found: Released) -> Released:
    """Note what the store found when it was asked to release the grant."""
    if held.in_time and held.release_requests > 1:
        found = (
            Released.RELEASED
        )  # Whoever holds it now was let in by an earlier request of ours, whose answer was lost.
    return held.end(found)


def _ask_release(runtime: Runtime, held: Held) -> Awaitable[Released]:
    held.prepare_release()
    return held.backend.release(runtime, held.request, held.granted)


async def raise_token(runtime: Runtime, held: Held, floor: int) -> bool:
    """Ask for a token above `floor` for a lease that is still ours: heals a store that lost data and its time.

    False when the store does not know us as the holder any more.
    """
    request = held.request._replace(floor=floor, queue=False)
    sent = runtime.now()
    try:
        (result,) = await held.backend.renew(runtime, [Renewal(held.request, held.granted)])
        if result is RenewalFailure.LOST:
            return False
        answer = await held.backend.try_acquire(runtime, request)
    except BackendUnavailable:
        return False
    if not isinstance(answer, Granted) or answer.token <= floor:
        return False
    held.granted = answer
    held.extend(sent, answer.valid_for)
    return True


logger = logging.getLogger("dlock")

FRESH: Final = 0.75
"""A grant that has less than this share of its ttl left on arrival is confirmed with one more request."""
SOON: Final = 1.0
"""Seconds after which it is worth to try again: a holder's remaining ttl says little, because it is renewed."""
PAUSE: Final = 0.25
"""The longest pause in seconds before an unreachable store is asked again."""
SILENT: Final = 0.25
"""Seconds after the end of a wait at which a store that has not answered has kept its caller long enough."""


async def undo(
    runtime: Runtime, clean_up: Coroutine[Any, Any, None], error: BaseException | None, until: float
) -> None:
    """Leave no trace of what ended with an error; behind the caller's back if a silent store has kept it waiting.

    `until`: when its wait was over. So an acquire takes at most its wait, one request's time limit, and SILENT.
    """
    if isinstance(error, BackendUnavailable) and runtime.now() > until + SILENT:
        runtime.behind(clean_up)
    else:
        await runtime.shield(clean_up)


class Attempt:
    """One acquire call from its first request to its end."""

    __slots__ = (
        "answer",
        "backend",
        "broken",
        "deadline",
        "request",
        "runtime",
        "sent",
        "started",
        "ticket",
        "touched",
        "waited",
    )

    def __init__(self, runtime: Runtime, backend: Backend, request: Request, wait: float | None) -> None:
        self.runtime, self.backend, self.request = runtime, backend, request
        self.started = self.sent = runtime.now()
        self.deadline = deadline(self.started, wait)
        self.answer: Granted | Busy | None = None
        self.broken: BackendUnavailable | None = None
        self.ticket: Any = None
        self.touched = False  # the store may hold a trace of us: a grant or a place in the queue
        self.waited = False

    async def run(self, into: list[Held] | None = None) -> Held | None:
        try:
            await self.ask()
            while not self.is_over():
                await self.step()
            if isinstance(self.answer, Granted) and self.has_left(self.answer.valid_for):
                held = Held(self.backend, self.request, self.answer, self.sent, self.runtime.now)
                hooks.emit("acquired", self.request.name, self.answer.token, self.seconds(), "", self.waited, held)
                if into is not None:
                    into.append(held)
                return held
            await self.abandon()
        except BaseException as error:
            await self.abandon(error)
            if isinstance(error, BackendUnavailable):
                hooks.emit("unavailable", self.request.name, 0, self.seconds(), error.reason)
            raise
        if isinstance(self.answer, Granted):
            reason = f"it answers slower than the ttl, {self.request.ttl} s"
            hooks.emit("unavailable", self.request.name, 0, self.seconds(), reason)
            raise BackendUnavailable(self.request.name, reason=reason)
        return None

    def seconds(self) -> float:
        return self.runtime.now() - self.started

    def is_over(self) -> bool:
        answer = self.answer
        if isinstance(answer, Granted) and self.has_left(answer.valid_for * FRESH):
            return True
        return answer is not None and self.sent >= self.deadline

    def has_left(self, seconds: float) -> bool:
        """Tell whether so much of a grant's time has not passed since it was asked for."""
        return self.runtime.now() < valid_until(self.sent, seconds)

    async def step(self) -> None:
        """Wait if we must, then ask; a store may send its answer along with the wake-up."""
        busy, self.answer = self.answer, None
        if isinstance(busy, Busy):
            self.ticket = busy.ticket
            if await self.wait(busy):
                return
        await self.ask()

    async def wait(self, busy: Busy) -> bool:
        self.waited = True
        self.sent = now = self.runtime.now()
        seconds = max(0.0, min(busy.retry_after, self.deadline - now))
        try:
            self.answer = await self.backend.wait(self.runtime, self.request, busy, seconds)
        except BackendUnavailable as error:
            await self.pause(error)
        if isinstance(self.answer, Busy):
            self.sent = self.runtime.now()  # a last look was taken at the end of the wait, not at its start
        return self.answer is not None

    async def ask(self) -> None:
        self.sent, self.touched = self.runtime.now(), True
        unsure = self.broken is not None
        try:
            self.answer = await self.backend.try_acquire(self.runtime, self.request, self.ticket, unsure=unsure)
        except BackendUnavailable as error:
            await self.pause(error)
        else:
            self.broken = None
            self.touched = isinstance(self.answer, Granted) or self.request.queue

    async def pause(self, error: BackendUnavailable) -> None:
        """Decide whether to ask an unreachable store again, and when."""
        now = self.runtime.now()
        first, self.broken = self.broken is None, error
        if first and error.broken:
            return  # an idle connection had died: the store may be well, and is asked once more even with wait=0
        if now >= self.deadline or error.refused:
            raise error
        if first:
            logger.warning("dlock: %s; it is asked again until the lock's wait is over", error)
        await self.runtime.sleep(min(CHANCE.uniform(0.01, PAUSE), self.deadline - now))

    async def abandon(self, error: BaseException | None = None) -> None:
        if self.touched:
            try:
                await undo(self.runtime, self._abandon(), error, self.deadline)
            except BaseException:  # The clean-up itself was interrupted: it may be repeated, and must be.
                await undo(self.runtime, self._abandon(), error, self.deadline)
                raise
            self.touched = False

    async def _abandon(self) -> None:
        ticket = self.answer.ticket if isinstance(self.answer, Busy) else self.ticket
        try:
            await self.backend.abandon(self.runtime, self.request, ticket)
        except BackendUnavailable as error:
            if error.broken:
                with suppress(BackendUnavailable):  # the lease is finite: an orphan that we cannot reach ends by itself
                    await self.backend.abandon(self.runtime, self.request, ticket)

    def timeout(self) -> AcquireTimeout:
        waited = self.seconds()
        hooks.emit("timeout", self.request.name, 0, waited, "", True)
        busy = self.answer if isinstance(self.answer, Busy) else Busy(1.0)
        owner = describe(busy.owner) if busy.owner else ""
        return AcquireTimeout(
            self.request.name,
            waited=waited,
            held_by=owner,
            retry_after=min(busy.retry_after, SOON),
            once=self.deadline == self.started,
        )
