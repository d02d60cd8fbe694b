"""One connection for each event loop listens for the hand-overs to all its waiters.

A release grants the lock to the first waiter, and pushes that waiter's name to the wake-up list of its listener. The
listener sleeps on this list in a BLMOVE, which leaves the list unchanged. It is followed by confirm.lua, which empties
the list and confirms each grant named in it, so that a hand-over takes one round trip. The same script keeps all
waiters of the listener alive, and checks some of them: does each still have its position, and is the lock still held by
one of our leases? Otherwise that waiter sends its request again, as all of them do when the listener's connection is
lost.
"""

from __future__ import annotations

import asyncio
import os
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from redis.exceptions import NoScriptError

from dlock_core.backends.idle import inherited
from dlock_core.backends.redis.protocol import load_script
from dlock_core.backends.redis.transport import raise_for_error, run_script, send_commands
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import ASYNCIO, begin_task
from dlock_core.scheduler import after_fork_in_child

if TYPE_CHECKING:
    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.redis.protocol import Command, Keyspace
    from dlock_core.backends.redis.transport import Transport

__all__ = ["MAX_SLEEP_S", "NUDGE_DELAY_S", "HandedOver", "Listener", "Listeners"]

MAX_IDLE_S: Final = 0.1
"""How long a listener stays without a waiter: a new one may arrive at once, and a new connection costs more."""
MIN_SLEEP_S: Final = 0.05
"""Shortest sleep of a listener. A grant is confirmed once more if much of its ttl may be over since the sleep began."""
MAX_SLEEP_S: Final = 2.5
"""Longest sleep before the waiters report that they are alive; a lost wake-up costs no more than this."""
NUDGE_DELAY_S: Final = 0.002
"""How long after the end of a sleep the server is sent a nudge: it counts in milliseconds."""
LISTENER_TTL_MS: Final = "5000"
"""Milliseconds after the listener's last request for which its waiters keep their positions."""
QUEUE_TTL_MS: Final = "60000"
"""Milliseconds for which a queue stays after one of its waiters was checked (as long as in acquire.lua)."""
MAX_LOOKED_AFTER: Final = 500
"""Waiters that are checked at once, or a tenth of them if there are very many, so that the server is not blocked for
long: each waiter is checked long before its queue would end."""
MAX_UNCLAIMED_S: Final = 2.0
"""How long a grant that arrived for no waiter is kept, in case one waits for it."""
MAX_MEMORY_S: Final = 60.0
"""How long a holder that is requesting its lock is remembered; one that is done is forgotten at once."""

CONFIRM, ABANDON = load_script("confirm"), load_script("abandon")


class HandedOver(NamedTuple):
    """A confirmed grant, valid for the whole ttl from some moment between `sent` and `came`."""

    token: int
    sent: float
    came: float
    lock: bytes
    """The lock's key."""


class Listeners:
    """The listener of each event loop."""

    def __init__(self, wire: Transport, keyspace: Keyspace, timeout: float) -> None:
        self._wire, self._keyspace, self._timeout = wire, keyspace, timeout
        self._known: dict[asyncio.AbstractEventLoop, Listener] = {}
        after_fork_in_child(self._after_fork)

    def here(self) -> Listener:
        """Return the listener of the running loop."""
        loop = asyncio.get_running_loop()
        return self._known.get(loop) or self._begin(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> Listener:
        for ended in [known for known in list(self._known) if known.is_closed()]:
            self._known.pop(ended, None)
        listener = self._known[loop] = Listener(self._wire, self._keyspace, self._timeout)
        return listener

    def _after_fork(self) -> None:
        inherited.append(self._known)
        self._known = {}


class Listener:
    """Waits for all waiters of one event loop, in a task that ends when there are none."""

    def __init__(self, wire: Transport, keyspace: Keyspace, timeout: float) -> None:
        self._wire, self._keyspace, self._timeout = wire, keyspace, timeout
        self.id = os.urandom(8).hex()
        self._list = f"{keyspace.wake_lists}{self.id}"
        self._waiters: dict[str, _Waiter] = {}
        """By holder; the one that was checked last comes last."""
        self._unclaimed: dict[str, HandedOver] = {}
        """Grants that arrived for a holder that does not wait: not yet, no longer, or never."""
        self._asking: dict[str, float] = {}
        """Holders with a request without a reply, and since when: they find their grants by themselves."""
        self._found: set[str] = set()
        """Holders that have found their grants since the sleep began; its reply may still name them."""
        self._left_behind: dict[str, tuple[str, float]] = {}
        """Holders whose abandon failed because the store did not answer: their locks, and since when."""
        self._looked_after_at = 0.0
        self._sleep_s = MAX_SLEEP_S
        self._is_asleep = False
        self._task: asyncio.Task[None] | None = None

    async def wait(self, request: AcquireRequest, seconds: float) -> HandedOver | None:
        """Return the grant that is handed over, or None after `seconds`, or when it makes sense to try again.

        The request must have been queued with the listener's id. Raises BackendUnavailable.
        """
        if request.holder in self._unclaimed:
            return self._unclaimed.pop(request.holder)
        waiter = _Waiter(request)
        try:
            self._waiters[request.holder] = waiter
            self._sleep_s = min(self._sleep_s, max(request.ttl / 4, MIN_SLEEP_S))
            if self._task is None or self._task.done():
                self._listen()
            waiter.ask_within(seconds)
            handed = await waiter.handed
        except BaseException:
            self.asks(request.holder)
            raise
        else:
            if handed is None:
                self.asks(request.holder)
            return handed
        finally:
            self._waiters.pop(request.holder, None)
            waiter.end()
            if self._is_idle():
                asyncio.get_running_loop().call_later(MAX_IDLE_S, self._end_if_idle)

    def asks(self, holder: str) -> None:
        """Leave a grant to this holder until it has a reply, or has abandoned its request."""
        self._asking[holder] = ASYNCIO.now()

    def replied(self, holder: str, *, granted: bool) -> None:
        """Record that a holder has the reply to its request; a hand-over to it after a grant is the same grant."""
        self._asking.pop(holder, None)
        if granted:
            self._unclaimed.pop(holder, None)
            if self._task is not None:
                self._found.add(holder)

    def forget(self, holder: str) -> None:
        """Release whatever is handed over to this holder from now on: it has abandoned its request."""
        self._asking.pop(holder, None)
        self._left_behind.pop(holder, None)

    def leave_behind(self, request: AcquireRequest) -> None:
        """Abandon a request as soon as the store answers: its position lives as long as the listener."""
        now, known = ASYNCIO.now(), self._left_behind
        known[request.holder] = self._keyspace.lock(request.name), now
        while (oldest := next(iter(known), None)) and known[oldest][1] < now - MAX_MEMORY_S:
            del known[oldest]

    def _listen(self) -> None:
        self._task = begin_task(self._serve(), name="dlock-waiting")
        self._task.add_done_callback(self._ended)

    def _is_idle(self) -> bool:
        return not (self._waiters or self._unclaimed)

    def _end_if_idle(self) -> None:
        """Wake the task from its sleep, so that code which waits for all tasks of the loop need not wait for it."""
        if self._is_asleep and self._is_idle() and not self._asking and self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Make waiters try again that arrived in the meantime, or that the task had when it was cancelled."""
        if self._task is task:
            self._task = None
        if not task.cancelled():
            task.exception()  # It was raised in a waiter, or ends the loop.
        for waiter in self._waiters.values():
            waiter.ask_within(0.0)

    async def _serve(self) -> None:
        try:
            await self._give_back()
            while not self._is_idle():
                await self._sleep()
                await self._give_back()
        except asyncio.CancelledError:
            if not self._is_idle():  # Otherwise it has ended because it was idle, or may do so.
                raise
        except BackendUnavailable as error:
            for waiter in self._waiters.values():
                waiter.fail(error)
        except Exception as error:  # noqa: BLE001 - a signal handler's exception goes to one of them
            for waiter in [each for each in self._waiters.values() if not each.handed.done()][:1]:
                waiter.handed.set_exception(error)
        finally:
            self._sleep_s = MAX_SLEEP_S

    async def _sleep(self) -> None:
        """Sleep until a grant is handed over, or for a while; then wake the waiters concerned."""
        sent, cared_for, seconds = ASYNCIO.now(), self._next_looked_after(), self._sleep_s
        self._found.clear()  # Their requests have removed them from the list.
        keys = (self._list, *self._keyspace.common, *[self._keyspace.lock(each.request.name) for each in cared_for])
        args = (LISTENER_TTL_MS, QUEUE_TTL_MS, *[each.request.holder for each in cared_for])
        sleep = ("BLMOVE", self._list, self._list, "LEFT", "RIGHT", f"{seconds:.3f}")
        limit, commands = seconds + self._timeout, [sleep, CONFIRM.by_digest(keys, args)]
        self._is_asleep = True
        try:
            woken, reply = await send_commands(self._wire, ASYNCIO, "", commands, limit, seconds + NUDGE_DELAY_S)
        finally:
            self._is_asleep = False
        raise_for_error("", woken)
        if isinstance(reply, NoScriptError):
            by_text = [CONFIRM.by_text(keys, args)]
            (reply,) = await send_commands(self._wire, ASYNCIO, "", by_text, self._timeout, self._timeout)
        confirmed, left = raise_for_error("", reply)
        for holder, token, lock in confirmed:
            self._hand_over(holder.decode(), HandedOver(token, sent, ASYNCIO.now(), lock))
        for waiter, ms in zip(cared_for, left, strict=True):
            waiter.ask_within(ms / 1000)

    def _next_looked_after(self) -> list[_Waiter]:
        """Return the next waiters to check; none if the last check was a short time ago."""
        now = ASYNCIO.now()
        if now < self._looked_after_at + self._sleep_s:
            return []
        self._looked_after_at = now
        self._asking = {holder: since for holder, since in self._asking.items() if since > now - MAX_MEMORY_S}
        # An interrupt may have prevented a finished wait from removing itself.
        self._waiters = {holder: waiter for holder, waiter in self._waiters.items() if not waiter.handed.done()}
        holders = list(islice(self._waiters, max(MAX_LOOKED_AFTER, len(self._waiters) // 10)))
        for holder in holders:
            self._waiters[holder] = self._waiters.pop(holder)
        return [self._waiters[holder] for holder in holders]

    def _hand_over(self, holder: str, handed: HandedOver) -> None:
        waiter = self._waiters.get(holder)
        if waiter is not None and not waiter.handed.done():
            waiter.handed.set_result(handed)
        elif holder not in self._found:
            self._unclaimed[holder] = handed

    async def _give_back(self) -> None:
        """End the grants and positions whose holders are gone: nothing else would end them."""
        now = ASYNCIO.now()
        for holder, (lock, since) in list(self._left_behind.items()):
            if since > now - MAX_MEMORY_S:
                await self._abandon(lock, holder)
            self._left_behind.pop(holder, None)
        for holder, handed in list(self._unclaimed.items()):
            if handed.came < now - MAX_UNCLAIMED_S and holder in self._unclaimed:  # Not found during another's undo.
                del self._unclaimed[holder]
                if holder not in self._asking:
                    await self._abandon(handed.lock, holder)

    async def _abandon(self, lock: str | bytes, holder: str) -> None:
        keys: Command = (lock, *self._keyspace.common)
        await run_script(self._wire, ASYNCIO, "", ABANDON, keys, (holder,), self._timeout)


class _Waiter:
    """One waiting task."""

    def __init__(self, request: AcquireRequest) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self.handed: asyncio.Future[HandedOver | None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def ask_within(self, seconds: float) -> None:
        """Make it try again after this many seconds, unless it does so earlier."""
        now, before = self._loop.time(), self._timer
        # A timer that is due was called, or soon will be; but an interrupt may have prevented it from waking the
        # waiter.
        runs = before is not None and before.when() > now
        if before is None or not runs or now + seconds < before.when():
            self._timer = self._loop.call_at(now + seconds, self._ask)
            if before is not None and runs:
                before.cancel()

    def fail(self, error: BackendUnavailable) -> None:
        if not self.handed.done():
            failure = BackendUnavailable(
                self.request.name, reason=error.reason, broken=error.broken, refused=error.refused
            )
            failure.__cause__ = error.__cause__
            self.handed.set_exception(failure)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self) -> None:
        if not self.handed.done():
            self.handed.set_result(None)
