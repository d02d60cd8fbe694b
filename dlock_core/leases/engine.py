"""Acquire, renew and release leases, one or several: the only copy of the algorithm, for every store, sync and async.

These are coroutines that wait only through a runtime (see `runtime`). The engine owns time, retries and clean-up; a
backend only answers one question at a time. What a lease is at each moment is recorded in `lease`.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dlock_core.backend import Busy, Granted, Released, Renewal, RenewalFailure, supports_many
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost, NotHeld
from dlock_core.leases import watchdog
from dlock_core.leases.lease import Held, valid_until
from dlock_core.observability import hooks
from dlock_core.owner import describe
from dlock_core.runtime import CHANCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from dlock_core.backend import Backend, Request, SupportsMany
    from dlock_core.runtime import Runtime

__all__ = ["Acquisition", "acquire_all", "clean_up", "raise_token", "release", "release_all", "released", "renew"]

T = TypeVar("T")

logger = logging.getLogger("dlock")

MIN_FRESHNESS: Final = 0.75
"""A grant that has less than this share of its ttl left on arrival is confirmed with one more request."""
MAX_RETRY_AFTER_S: Final = 1.0
"""What a timed-out caller is told at most: a holder's remaining ttl says little, because it is renewed."""
MAX_RETRY_PAUSE_S: Final = 0.25
"""The longest pause before an unreachable store is asked again."""
MAX_OVERTIME_S: Final = 0.25
"""So long after the end of a wait, a store that has not answered has kept its caller long enough."""


async def renew(runtime: Runtime, held: Held, ttl: float | None = None) -> None:
    """Push the expiry of a lease that is still ours; raises LeaseLost, or BackendUnavailable, which says nothing."""
    held.ensure_own_process()
    held.ensure()
    sent = runtime.now()
    if ttl is not None:
        held.change_ttl(sent, ttl)
    (result,) = await held.backend.renew(runtime, [Renewal(held.request, held.granted)])
    if result is RenewalFailure.UNKNOWN:
        raise BackendUnavailable(held.name, reason="the store learned nothing about this lease")
    if result is RenewalFailure.LOST:
        held.lose("the store gave it to another, or forgot it")
        raise LeaseLost(held.name, token=held.token, reason=held.why())
    held.extend(sent, result)
    held.ensure()


async def raise_token(runtime: Runtime, held: Held, floor: int) -> bool:
    """Ask for a token above `floor` for a lease that is still ours: heals a store that lost data and its time.

    Returns False when the store does not know us as the holder any more.
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
    held.replace_grant(sent, answer)
    return True


async def release(runtime: Runtime, held: Held) -> Released:
    """End the grant, once; a repeated call gives the first answer. Whatever happens, it is renewed no more.

    A network error is retried once and then raised as BackendUnavailable: the lease runs out by itself.
    """
    held.ensure_own_process()
    if held.ended is None:
        try:
            await runtime.shield(_release(runtime, held))
        finally:
            watchdog.unwatch(held)  # Only now: the next waiter has the lock already.
        _emit_released(held)
    return held.ended or Released.EXPIRED


def released(held: Held) -> None:
    """Record that the grant has ended with the transaction in which it was taken; raises NotHeld in a forked child."""
    held.ensure_own_process()
    if held.ended is None:
        held.end(Released.RELEASED)
        watchdog.unwatch(held)
        _emit_released(held)


def _emit_released(held: Held) -> None:
    if hooks.subscribed:
        held.emit("released", (held.ended or Released.EXPIRED).value)


async def _release(runtime: Runtime, held: Held) -> None:
    try:
        found = await _ask_release(runtime, held)
    except BackendUnavailable:
        found = await _ask_release(runtime, held)
    held.end(found)


def _ask_release(runtime: Runtime, held: Held) -> Awaitable[Released]:
    held.begin_release()
    return held.backend.release(runtime, held.request, held.granted)


async def release_all(runtime: Runtime, held: Sequence[Held]) -> list[Released]:
    """End all of the grants: in one request where the store can, and one by one what that left open.

    Raises BackendUnavailable for the first whose end is unknown, when all were tried; NotHeld in a
    forked child.
    """
    return await runtime.shield(_release_all(runtime, held))


async def _release_all(runtime: Runtime, held: Sequence[Held]) -> list[Released]:
    for one in held:
        one.ensure_own_process()
    still_held = [one for one in held if one.ended is None]
    if still_held and supports_many(backend := still_held[0].backend):
        await _release_in_one_request(runtime, backend, still_held)
    failure: BackendUnavailable | None = None
    for one in held:
        try:
            await release(runtime, one)
        except BackendUnavailable as error:  # The others may be on another node of the store.
            failure = failure or error
    if failure is not None:
        raise failure
    return [one.ended for one in held if one.ended is not None]


async def _release_in_one_request(runtime: Runtime, backend: SupportsMany, held: Sequence[Held]) -> None:
    for one in held:
        one.begin_release()
    with suppress(BackendUnavailable):
        found = await backend.release_many(runtime, [one.request for one in held])
        for one, what in zip(held, found, strict=True):
            one.end(what)
            watchdog.unwatch(one)
            _emit_released(one)


async def clean_up(
    runtime: Runtime, coroutine: Coroutine[Any, Any, None], error: BaseException | None, until: float
) -> None:
    """Leave no trace of what ended with an error; behind the caller's back if a silent store has kept it waiting.

    `until`: when its wait was over. So an acquire takes at most its wait, one request's time limit, and MAX_OVERTIME_S.
    """
    if isinstance(error, BackendUnavailable) and runtime.now() > until + MAX_OVERTIME_S:
        runtime.behind(coroutine)
    else:
        await runtime.shield(coroutine)


class Acquisition:
    """One acquire of one lock, from its first request to its end, alone or among others that are taken together.

    It knows at every moment what the store may hold of it, so that `undo` leaves nothing behind wherever an interrupt
    or an error stopped its caller. The request is repeated unchanged, with the same holder: when a reply was lost, the
    store recognizes the holder and repeats its answer, so a grant whose reply was lost is found and not waited for.

    Args:
        wait: Seconds, counted from `since`; None is for ever, 0 is one try.
        since: The time on the runtime's clock at which the wait began; left out, it begins with the first request.
        renew: Have the watchdog renew the lease from the moment of its grant.
        on_lost: Called once, from another thread, when the lease is lost.
    """

    __slots__ = (
        "answer",
        "backend",
        "broken",
        "deadline",
        "held",
        "on_lost",
        "renew",
        "request",
        "runtime",
        "sent",
        "started",
        "ticket",
        "touched",
        "waited",
    )

    def __init__(
        self,
        runtime: Runtime,
        backend: Backend,
        request: Request,
        wait: float | None,
        *,
        since: float | None = None,
        renew: bool = False,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.runtime, self.backend, self.request, self.renew, self.on_lost = runtime, backend, request, renew, on_lost
        self.started = self.sent = runtime.now()
        self.deadline = math.inf if wait is None else (self.started if since is None else since) + wait
        self.held: Held | None = None
        self.answer: Granted | Busy | None = None
        self.broken: BackendUnavailable | None = None
        self.ticket: Any = None
        self.touched = False  # the store may hold a trace of us: a grant or a place in the queue
        self.waited = False

    async def acquire(self) -> Held:
        """Wait for the lock and return its lease, at once if it was granted already.

        Raises AcquireTimeout when others held it all the time, BackendUnavailable when the store could not be asked.
        """
        held = self.held or await self.run()
        if held is None:
            raise self.timeout()
        return held

    async def run(self) -> Held | None:
        """Ask until the lock is granted or the wait is over; None when another holder has it."""
        self.started = self.runtime.now()
        self.deadline = max(self.deadline, self.started)
        try:
            await self.ask()
            while not self.is_over():
                await self.step()
            if isinstance(self.answer, Granted) and self.has_left(self.answer.valid_for):
                return self.accept(self.answer, self.sent)
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

    def accept(self, granted: Granted, sent: float) -> Held:
        """Make the lease out of a grant that was asked for at `sent`, and have it renewed from now on."""
        held = Held(self.backend, self.request, granted, sent, self.runtime.now)
        if self.on_lost is not None:
            held.call_when_lost(self.on_lost)
        if hooks.subscribed:
            hooks.emit("acquired", self.request.name, granted.token, self.seconds(), "", self.waited, held)
        if self.renew and held.until < math.inf:
            watchdog.watch(held)
        self.held = held
        return held

    @property
    def pending(self) -> Acquisition | None:
        """Itself, until the lock is granted: see `GroupMember`."""
        return self if self.held is None else None

    def detach(self) -> None:
        """Need nothing of it any more: its lease, if any, is renewed no more; without I/O."""
        if self.held is not None:
            self.held.abandon()
            watchdog.unwatch(self.held)

    async def undo(self) -> None:
        """Leave nothing of it in the store: no lease, and no grant or place in the queue that may be there."""
        self.detach()
        if self.held is None:
            await self.abandon()
            return
        with suppress(BackendUnavailable, NotHeld):  # It is renewed no more, and runs out.
            await release(self.runtime, self.held)

    def seconds(self) -> float:
        return self.runtime.now() - self.started

    def is_over(self) -> bool:
        answer = self.answer
        if isinstance(answer, Granted) and self.has_left(answer.valid_for * MIN_FRESHNESS):
            return True
        return answer is not None and self.sent >= self.deadline

    def has_left(self, seconds: float) -> bool:
        """Return whether so much of a grant's time has not passed since it was asked for."""
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
        await self.runtime.sleep(min(CHANCE.uniform(0.01, MAX_RETRY_PAUSE_S), self.deadline - now))

    async def abandon(self, error: BaseException | None = None) -> None:
        if self.touched:
            try:
                await clean_up(self.runtime, self._abandon(), error, self.deadline)
            except BaseException:  # The clean-up itself was interrupted: it may be repeated, and must be.
                await clean_up(self.runtime, self._abandon(), error, self.deadline)
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
            retry_after=min(busy.retry_after, MAX_RETRY_AFTER_S),
            once=self.deadline == self.started,
        )


class GroupMember(Protocol):
    """One of several locks that are acquired together; an `Acquisition` is one."""

    @property
    def backend(self) -> Backend:
        """The store that is asked."""

    @property
    def pending(self) -> Acquisition | None:
        """What has to be asked of the store; None when the lock is held already."""

    async def acquire(self) -> object:
        """Wait for this lock, while those before it are held."""

    def detach(self) -> None:
        """Need nothing of it any more, because the whole has failed; without I/O."""

    async def undo(self) -> None:
        """Leave nothing of it in the store."""


async def acquire_all(
    runtime: Runtime, members: Sequence[GroupMember], until: float, finish: Callable[[], Awaitable[T]]
) -> T:
    """Acquire several locks, all or none, and return what `finish` makes of them.

    The members come in the order that every caller keeps, so that overlapping sets cannot deadlock. Those of one store
    are asked for in one request where the store can; what is not free then is waited for, one lock after the other.
    Whatever stops this or `finish`, nothing is held afterwards that was not held before. `until`: when the longest of
    the waits is over.
    """
    try:
        for _, neighbours in groupby(members, key=lambda member: id(member.backend)):
            of_one_store = [*neighbours]
            await _acquire_in_one_request(runtime, of_one_store, until)
            for member in of_one_store:
                await member.acquire()
        return await finish()
    except BaseException as error:
        for member in members:
            member.detach()
        await clean_up(runtime, _undo_all(members), error, until)
        raise


async def _acquire_in_one_request(runtime: Runtime, members: Sequence[GroupMember], until: float) -> None:
    """Take all of the locks in one request; none where the store cannot, or where one of them is held already.

    A member is asked for its request only where it is needed: it may have to connect for that, in its own way.
    """
    backend = members[0].backend
    if len(members) == 1 or not supports_many(backend):
        return
    asked = [each for member in members if (each := member.pending) is not None and not each.request.shared]
    if len(asked) < len(members):
        return
    sent = runtime.now()
    for each in asked:
        each.touched = True
    try:
        granted = await backend.try_acquire_many(runtime, [each.request for each in asked])
    except BackendUnavailable:
        if runtime.now() > until + MAX_OVERTIME_S:
            raise
        return  # It may have worked. Each is asked for by the same request now, which then finds its own grant.
    for each in asked:
        each.touched = granted is not None
    for each, grant in zip(asked, granted or (), strict=False):
        each.accept(grant, sent)


async def _undo_all(members: Sequence[GroupMember]) -> None:
    for member in reversed(members):
        await member.undo()
