"""Wakes waiters of this process: when a lock is released in it, or when PostgreSQL's NOTIFY reports it."""

from __future__ import annotations

import math
import secrets
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from dlock_core.backends.table.statements import CHANNEL, TELL
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlock_core.backends.sql import Connection, DedicatedConnection, Pool
    from dlock_core.runtime import Runtime, Signal

__all__ = ["LocalWaiters"]


class LocalWaiters:
    """The signals of the waiters of this process, each with the name of its lock."""

    def __init__(self) -> None:
        # No mutex: a signal handler or a finalizer may also release a lock, in the middle of one of these methods. So
        # each of them changes the dict in one step, and reads a copy of it.
        self._waiting: dict[Signal, str] = {}

    @contextmanager
    def on(self, name: str, signal: Signal) -> Iterator[None]:
        """Set the signal whenever the lock may be free, until the end of the block."""
        try:
            self._waiting[signal] = name
            yield
        finally:
            self._waiting.pop(signal, None)

    def notify(self, name: str) -> None:
        """Wake every waiter for this lock."""
        _set([signal for signal, waited_for in self._waiting.copy().items() if waited_for == name])

    def notify_all(self) -> None:
        """Wake every waiter, because releases are no longer reported."""
        _set([*self._waiting.copy()])


def _set(signals: list[Signal]) -> None:
    for signal in signals:
        with suppress(RuntimeError):  # Its event loop has been closed.
            signal.set()


RELISTEN_DELAY_S: Final = 30.0
"""Seconds after which a listener that has received nothing is opened again."""
RECONNECT_DELAY_S: Final = 1.0
"""Seconds between two attempts to listen to a database that cannot be reached, or that ends each session."""


class NotifyListener:
    """The connection that listens for NOTIFY; `open` it when there is a waiter."""

    def __init__(self, pool: Pool, waiters: LocalWaiters) -> None:
        self._pool, self._waiters = pool, waiters
        self._dedicated: DedicatedConnection | None = None
        self._proof, self._begun, self._next = "", -math.inf, -math.inf
        self.is_listening = False
        """Whether every release is reported, so that polling is not needed."""

    async def open(self, runtime: Runtime) -> None:
        """Begin to listen, unless this was done or tried a short time ago; raises no errors of the database."""
        now = clock()
        if self.is_listening or now < self._next:
            return
        # Nothing is called before this, so that no other thread or signal handler opens it, too. A mutex would still be
        # held when a signal handler runs that waits for one of our locks.
        self._begun, self._next = now, (until := now + RELISTEN_DELAY_S)
        try:
            self._abandon()
            await self._listen(runtime)
        except BackendUnavailable:
            self._failed(until, clock() + RECONNECT_DELAY_S)
        except BaseException:  # This caller is cancelled or interrupted; the next one tries at once.
            self._failed(until, -math.inf)
            raise

    def close(self) -> None:
        """Stop listening; the next waiter begins again, and those who wait now look for themselves."""
        self._abandon()
        self._next = -math.inf
        self._waiters.notify_all()

    def _failed(self, until: float, retry_at: float) -> None:
        if self._next == until:  # Otherwise it was closed meanwhile, and another caller may have opened it since.
            self.is_listening, self._next = False, retry_at

    def _abandon(self) -> None:
        """End the connection; the thread that reads from it closes it."""
        dedicated, self._dedicated, self.is_listening, self._proof = self._dedicated, None, False, ""
        if dedicated is not None:
            dedicated.abort()

    def forget(self) -> None:
        """In a forked child: the connection belongs to the parent."""
        if self._dedicated is not None:
            self._dedicated.forget()

    async def _listen(self, runtime: Runtime) -> None:
        # A pooler such as PgBouncer accepts a LISTEN and then delivers nothing. Only the arrival of our own
        # notification proves that releases will be reported; until then, waiters continue to poll. No lock has such a
        # name.
        self._proof = proof = f"?{secrets.token_hex(8)}"
        dedicated = await self._pool.dedicated(runtime, CHANNEL)
        if self._proof != proof:  # It was closed while it connected, and another one may have been opened since.
            await dedicated.close(runtime)
            return
        self._dedicated = dedicated  # Nothing is called since the check, so no other thread runs in between.
        await dedicated.step(runtime, CHANNEL, self._begin)
        await self._pool.step(runtime, CHANNEL, self._tell)

    def _begin(self, connection: Connection) -> None:
        connection.listen(CHANNEL, self._heard, partial(self._ended, self._proof))

    def _tell(self, connection: Connection) -> None:
        connection.execute(TELL, {"payload": self._proof})

    def _heard(self, payload: str) -> None:
        if payload == self._proof:
            self.is_listening = True
        self._waiters.notify(payload)

    def _ended(self, proof: str) -> None:
        # The reading thread of a closed listener may end after the next one was opened. The proof distinguishes them:
        # only the end of the current one means that releases are no longer reported.
        if proof == self._proof:
            self.is_listening, self._next = False, self._begun + RECONNECT_DELAY_S
            self._waiters.notify_all()
