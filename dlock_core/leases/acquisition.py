"""Acquire a lease: the only copy of the algorithm, for every store, sync and async, one lock or a member of a group.

See `engine` for renewal and release, and `multilock` for several locks.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from dlock_core import owner as owners
from dlock_core.backend import AcquireRequest, Busy, Granted
from dlock_core.errors import AcquireTimeout, BackendUnavailable, NotHeld
from dlock_core.leases.engine import release, release_later, repeat_later
from dlock_core.leases.lease import LeaseRecord
from dlock_core.leases.watchdog import renew_in_background
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.runtime import RNG

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlock_core.backend import Backend
    from dlock_core.runtime import Runtime

__all__ = ["MAX_OVERTIME_S", "AcquireOptions", "Acquisition", "clean_up", "new_request", "new_requests"]

logger = logging.getLogger("dlock")

MAX_GRANT_AGE_SHARE: Final = 0.75
"""A grant that was requested longer ago than this share of its ttl is confirmed with one more request."""
MAX_RETRY_AFTER_S: Final = 1.0
"""Largest `retry_after` of an AcquireTimeout: a holder's remaining ttl is a poor estimate, because it is renewed."""
MAX_RETRY_PAUSE_S: Final = 0.25
"""Longest pause before a request to an unreachable store is repeated."""
MAX_OVERTIME_S: Final = 0.25
"""Seconds by which a store that does not answer may delay a caller beyond the end of its wait."""


class AcquireOptions(Protocol):
    """The options of a lock that concern one acquire: a LockOptions, or a lock itself."""

    @property
    def ttl(self) -> float: ...
    @property
    def wait(self) -> float | None: ...
    @property
    def shared(self) -> bool: ...
    @property
    def renew(self) -> bool: ...
    @property
    def fair(self) -> bool: ...
    @property
    def on_lost(self) -> Callable[[], None] | None: ...


def new_request(
    name: str,
    options: AcquireOptions = LockOptions(),  # noqa: B008 - it is immutable
    *,
    queue: bool = True,
    owner: str | None = None,
    transaction: Any = None,
) -> AcquireRequest:
    """Return the request of one acquire call, with a fresh holder.

    Args:
        name: The lock's canonical name.
        options: How the lock is to be held.
        queue: False for a single try, as with `wait=0`: the request then takes no position in the store's queue.
        owner: The owner's metadata; by default what `owner.text` returns for this thread or task.
        transaction: The caller's open transaction, for a store that locks inside it.
    """
    owner = owners.text() if owner is None else owner
    queues, holder = queue and options.wait != 0.0, _new_holder()
    return AcquireRequest(name, holder, options.ttl, options.shared, queues, options.fair, owner, 0, transaction)


def _new_holder() -> str:
    return os.urandom(16).hex()


def new_requests(names: Sequence[str], options: AcquireOptions) -> list[AcquireRequest]:
    """Return the requests of one acquire call for several locks, each with a fresh holder."""
    ttl, shared, queues, fair, owner = options.ttl, options.shared, options.wait != 0.0, options.fair, owners.text()
    drawn = os.urandom(16 * len(names)).hex()
    holders = [drawn[start : start + 32] for start in range(0, len(drawn), 32)]
    return [
        AcquireRequest(name, holder, ttl, shared, queues, fair, owner)
        for name, holder in zip(names, holders, strict=True)
    ]


async def clean_up(
    runtime: Runtime, coroutine: Coroutine[Any, Any, None], error: BaseException | None, until: float
) -> None:
    """Await the clean-up of a failed acquire, or start it in the background if a silent store has taken too long.

    `until`: when the wait was over. So an acquire takes at most its wait, one request's time limit, and MAX_OVERTIME_S.
    """
    if isinstance(error, BackendUnavailable) and runtime.now() > until + MAX_OVERTIME_S:
        runtime.run_in_background(coroutine)
        await runtime.sleep(0.0)  # Now it has begun; a task that has not is dropped when its loop ends.
    else:
        await runtime.shield(coroutine)


class Acquisition:
    """One acquire of one lock, from its first request to its end, alone or as a member of a group.

    It records at every moment what the store may contain for it, so that `undo` leaves nothing behind, wherever an
    interrupt or an error has stopped the caller. The request is repeated unchanged, with the same holder: the store
    recognizes the holder and repeats its answer, so that a grant whose reply was lost is found at once. Only if the
    store has undone an attempt, and the undo may arrive late, does the next attempt get a new holder.

    Args:
        options: How long to wait for the lock, and what is done with its lease; they are read only by the constructor.
        since: The time on the runtime's clock at which the wait began; by default it begins with the first request.
    """

    __slots__ = (
        "answer",
        "backend",
        "deadline",
        "held",
        "is_unsure",
        "on_lost",
        "pid",
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
        request: AcquireRequest,
        options: AcquireOptions,
        *,
        since: float | None = None,
    ) -> None:
        self.runtime, self.backend, self.request, self.pid = runtime, backend, request, os.getpid()
        self.renew, self.on_lost = options.renew, options.on_lost
        self.started = self.sent = runtime.now()
        wait = options.wait if request.queue else 0.0
        self.deadline = math.inf if wait is None else (self.started if since is None else since) + wait
        self.held: LeaseRecord | None = None
        self.answer: Granted | Busy | None = None
        self.is_unsure = False  # The last request got no answer.
        self.ticket: Any = None
        self.touched = False  # The store may contain something of ours: a grant, or a position in the queue.
        self.waited = False

    async def acquire(self) -> LeaseRecord:
        """Wait for the lock and return its lease, at once if it was already granted.

        Raises AcquireTimeout if other holders kept it all the time, BackendUnavailable if the store could not be
        reached.
        """
        held = self.held or await self.run()
        if held is None:
            raise self.timeout()
        return held

    async def run(self) -> LeaseRecord | None:
        """Request the lock until it is granted or the wait is over; return None if another holder has it."""
        self.started = self.runtime.now()
        self.deadline = max(self.deadline, self.started)
        try:
            await self.ask()
            while not self.is_over():
                await self.step()
            if isinstance(self.answer, Granted) and (held := self.accept(self.answer, self.sent)) is not None:
                return held
            await self.abandon()
        except BaseException as error:
            await self.abandon(error)
            if isinstance(error, BackendUnavailable):
                hooks.emit("unavailable", self.request.name, seconds=self.seconds(), reason=error.reason)
            raise
        if isinstance(self.answer, Granted):
            reason = f"it answers more slowly than the ttl of {self.request.ttl} s"
            hooks.emit("unavailable", self.request.name, seconds=self.seconds(), reason=reason)
            raise BackendUnavailable(self.request.name, reason=reason)
        return None

    def accept(self, granted: Granted, sent: float, *, renewed: bool = True) -> LeaseRecord | None:
        """Make the lease of a grant that was requested at `sent`, and start its renewal.

        `renewed`: False if the caller starts the renewal of several leases at once. Returns None for a grant that has
        already run out.
        """
        if self.is_inherited():
            reason = f"it was requested by process {self.pid}, which forked this one meanwhile"
            raise NotHeld(self.request.name, reason=reason)
        now = self.runtime.now
        held = LeaseRecord(self.backend, self.request, granted, sent, now, self.on_lost)
        if held.until <= now():
            return None
        if hooks.subscribed:
            hooks.emit("acquired", self.request.name, granted.token, self.seconds(), "", self.waited, held)
        if self.renew and renewed:
            renew_in_background(held)
        self.held = held
        return held

    @property
    def pending(self) -> Acquisition | None:
        """This acquisition, until the lock is granted: see `GroupMember`."""
        return self if self.held is None else None

    def detach(self) -> None:
        """Drop the lock without I/O: its lease, if any, is no longer renewed."""
        if self.held is not None:
            self.held.abandon()

    def is_inherited(self) -> bool:
        """Return whether a signal handler has forked this process during the acquire: it is the parent's."""
        return self.pid != os.getpid()

    async def undo(self) -> None:
        """Remove everything of this acquire from the store: a lease, or a grant or queue position that may exist."""
        self.detach()
        if self.held is None:
            await self.abandon()
            return
        with suppress(BackendUnavailable, NotHeld):  # It is no longer renewed, and runs out.
            await release(self.runtime, self.held)

    def undo_later(self) -> None:
        """Undo the acquire in the background; it was detached before."""
        if self.held is not None:
            release_later(self.held)
        elif self.touched and not self.is_inherited():
            repeat_later(self.backend, self.request.holder, self.leaving(), self.request.ttl, is_release=False)

    def seconds(self) -> float:
        return self.runtime.now() - self.started

    def is_over(self) -> bool:
        answer = self.answer
        if isinstance(answer, Granted) and self.runtime.now() - self.sent < answer.valid_for * MAX_GRANT_AGE_SHARE:
            return True
        return answer is not None and self.sent >= self.deadline

    async def step(self) -> None:
        """Wait if necessary, then send the request; a store may send its answer together with the wake-up."""
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
            if not await self.pause(error):
                raise
        if isinstance(self.answer, Busy):
            self.sent = self.runtime.now()  # the last check was made at the end of the wait, not at its start
        elif self.answer is not None and self.answer.age is not None:
            self.sent = self.runtime.now() - self.answer.age
        return self.answer is not None

    async def ask(self) -> None:
        self.sent, self.touched = self.runtime.now(), True
        try:
            self.answer = await self.backend.try_acquire(self.runtime, self.request, self.ticket, unsure=self.is_unsure)
        except BackendUnavailable as error:
            is_late = error.is_late
            if not await self.pause(error):
                raise
        else:
            is_late = isinstance(self.answer, Busy) and self.answer.is_late
            self.is_unsure = False
            self.touched = isinstance(self.answer, Granted) or self.request.queue
        if is_late:
            self.change_holder()

    def change_holder(self) -> None:
        """Continue under another holder, and repeat in the background the request that ends the present one's grants.

        That request may arrive late, so no later attempt may use this holder. Or it was lost, and the lock, perhaps
        granted by then, would stay locked for a whole ttl, for this call first of all.
        """
        repeat_later(self.backend, self.request.holder, self.leaving(), self.request.ttl, is_release=False)
        self.request = self.request._replace(holder=_new_holder())

    async def pause(self, error: BackendUnavailable) -> bool:
        """Wait until a request to an unreachable store may be repeated; return False if it may not.

        The caller raises the error: raised here, it would keep this object until a garbage collection.
        """
        now = self.runtime.now()
        first, self.is_unsure = not self.is_unsure, True
        if first and error.broken:
            return True  # an idle connection had died: the store may be fine, so retry once even with wait=0
        if now >= self.deadline or error.refused:
            return False
        if first:
            logger.warning("dlock: %s; the request is repeated until the lock's wait is over", error)
        await self.runtime.sleep(min(RNG.uniform(0.01, MAX_RETRY_PAUSE_S), self.deadline - now))
        return True

    async def abandon(self, error: BaseException | None = None) -> None:
        if self.touched and not self.is_inherited():
            try:
                await clean_up(self.runtime, self._abandon(), error, self.deadline)
            except BaseException:  # The clean-up itself was interrupted: it can be repeated, and has to be.
                await clean_up(self.runtime, self._abandon(), error, self.deadline)
                raise
            self.touched = False

    def leaving(self) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        """Return a function that removes everything of the present holder from the store."""
        ticket = self.answer.ticket if isinstance(self.answer, Busy) else self.ticket
        backend, request = self.backend, self.request

        async def leave(runtime: Runtime) -> None:
            await backend.abandon(runtime, request, ticket)

        return leave

    async def _abandon(self) -> None:
        leave, request = self.leaving(), self.request
        is_done = request.transaction is not None  # The end of the transaction also ends the grant.
        try:
            try:
                await leave(self.runtime)
            except BackendUnavailable as error:
                if not error.broken:
                    raise
                await leave(self.runtime)
            is_done = True
        except BackendUnavailable as error:
            is_done = is_done or error.refused
        finally:
            if not is_done:  # Also if the caller's event loop ends before the store has answered.
                repeat_later(self.backend, request.holder, leave, request.ttl, is_release=False)

    def timeout(self) -> AcquireTimeout:
        waited = self.seconds()
        hooks.emit("timeout", self.request.name, seconds=waited, contended=True)
        busy = self.answer if isinstance(self.answer, Busy) else Busy(MAX_RETRY_AFTER_S)
        owner = owners.describe(busy.owner) if busy.owner else ""
        return AcquireTimeout(
            self.request.name,
            waited=waited,
            held_by=owner,
            retry_after=min(busy.retry_after, MAX_RETRY_AFTER_S),
            once=self.deadline == self.started,
        )
