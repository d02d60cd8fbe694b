"""One acquire call, from its first request to its end.

The order of events: ask; if busy, wait for the wake-up and ask again; if the store does not answer, ask again with the
same holder, since the first attempt may have worked; on any other end withdraw, so that no orphan is left.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from dlock_core import hooks
from dlock_core.backend import Busy, Granted
from dlock_core.backoff import CHANCE
from dlock_core.deadline import deadline
from dlock_core.errors import AcquireTimeout, BackendUnavailable
from dlock_core.held import Held
from dlock_core.lease import valid_until
from dlock_core.owner import describe

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from dlock_core.backend import Backend, Request
    from dlock_core.runtime import Runtime

__all__ = ["SILENT", "Attempt", "undo"]

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

    async def run(self) -> Held | None:
        try:
            await self.ask()
            while not self.is_over():
                await self.step()
            if isinstance(self.answer, Granted) and self.has_left(self.answer.valid_for):
                held = Held(self.backend, self.request, self.answer, self.sent, self.runtime.now)
                hooks.emit("acquired", self.request.name, self.answer.token, self.seconds(), "", self.waited, held)
                return held
        except BaseException as error:
            await self.withdraw(error)
            if isinstance(error, BackendUnavailable):
                hooks.emit("unavailable", self.request.name, 0, self.seconds(), error.reason)
            raise
        await self.withdraw()
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

    async def withdraw(self, error: BaseException | None = None) -> None:
        if self.touched:
            self.touched = False
            await undo(self.runtime, self._withdraw(), error, self.deadline)

    async def _withdraw(self) -> None:
        ticket = self.answer.ticket if isinstance(self.answer, Busy) else self.ticket
        try:
            await self.backend.withdraw(self.runtime, self.request, ticket)
        except BackendUnavailable as error:
            if error.broken:
                with suppress(BackendUnavailable):  # the lease is finite: an orphan that we cannot reach ends by itself
                    await self.backend.withdraw(self.runtime, self.request, ticket)

    def timeout(self) -> AcquireTimeout:
        waited = self.seconds()
        hooks.emit("timeout", self.request.name, 0, waited, "", True)
        busy = self.answer if isinstance(self.answer, Busy) else Busy(1.0)
        owner = describe(busy.owner) if busy.owner else ""
        return AcquireTimeout(self.request.name, waited=waited, held_by=owner, retry_after=min(busy.retry_after, SOON))
