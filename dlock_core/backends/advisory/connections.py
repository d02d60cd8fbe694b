"""The connections on which session locks are held: one for each grant, kept for a while after it for the next."""

from __future__ import annotations

import asyncio
import math
import select
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.backends.idle import IdlePool
from dlock_core.backends.sql import socket_of
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, Asyncio, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.backend import Request
    from dlock_core.backends.sql import Connection, DedicatedConnection, Pool
    from dlock_core.runtime import Runtime

    Execute = Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]

__all__ = ["LockConnection", "LockConnections", "Reservation"]

T = TypeVar("T")

MAX_IDLE_CONNECTIONS: Final = 8
"""Idle connections kept open, at most."""


class LockConnection:
    """One connection, used by one step at a time: its holder's, or the watchdog's."""

    def __init__(self, dedicated: DedicatedConnection, connection: Connection, number: int) -> None:
        self.dedicated, self.number = dedicated, number
        """The number is the session's at the server."""
        self.vendor = connection.vendor
        self.execute, self.prepared = _ways(connection)
        """Run a statement as `Connection.execute` does; `prepared` those that come again and again."""
        self.has_ended = _ended(connection)
        """Says whether the server has ended the session; to be asked while the line is open and nobody else uses it."""
        self.idle_limit = 0.0
        """Seconds of silence after which the server ends the session, as far as it was told."""
        self.is_fresh = True
        self.had_ended = False
        """The server had ended it before the last step that asked."""
        self._in_use: dict[str, object] = {}
        """By whom. `setdefault` takes it, `del` gives it back; a lock that is taken without `with` could be taken by
        somebody who is interrupted before he knows, and would be locked for ever."""

    @property
    def is_open(self) -> bool:
        """It has not failed so far, and is no parent's."""
        return self.dedicated.is_open

    def is_usable(self) -> bool:
        """Tell whether an idle connection is ours and open; the server may have ended its session."""
        return self.is_open and not self.has_ended()

    def close(self) -> bool:
        """Close the connection, unless somebody is using it; in a forked child it stays, being the parent's."""
        mine = object()
        try:
            if self._in_use.setdefault("by", mine) is not mine:
                return False
            run(self.dedicated.close(BLOCKING))
        finally:
            if "by" in self._in_use and self._in_use["by"] is mine:  # No call, and so no interrupt, comes in between.
                del self._in_use["by"]
        return True

    async def step(
        self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float | None = None
    ) -> T:
        """Make a step, to its end even when the task is cancelled; after BackendUnavailable the line is closed."""
        mine = object()
        try:
            while self._in_use.setdefault("by", mine) is not mine:
                await runtime.sleep(0.002)
            return await self.dedicated.step(runtime, name, function, limit)
        except BackendUnavailable as error:
            # It may have died while nobody used it; a server that is silent would only cost a second time limit.
            error.broken = not self.is_fresh and not isinstance(error.__cause__, TimeoutError)
            raise
        finally:
            if "by" in self._in_use and self._in_use["by"] is mine:
                del self._in_use["by"]

    async def interruptibly(self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float) -> T:
        """Make a step that waits for others: a task that is cancelled cuts the connection."""
        step = self.step(runtime, name, function, limit)
        if not isinstance(runtime, Asyncio):
            return await step
        connection, task = self.dedicated.connection, asyncio.ensure_future(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # nobody else asks for it
            raise


class Reservation:
    """One request and the connection on which it is made; the lock is held while there is a token."""

    def __init__(self, connection: LockConnection, request: Request) -> None:
        self.connection, self.request = connection, request
        self.token = 0
        self.until = math.inf
        """When the server will have ended the session, unless it hears of us."""

    def extend(self, sent: float, ttl: float) -> None:
        """Note that the server has heard of us, at `sent` or after."""
        self.until = sent + ttl


class LockConnections:
    """Opens lines, and keeps some that nobody needs any more."""

    def __init__(self, pool: Pool, prepare_session: Callable[[Connection, str], int]) -> None:
        self.pool, self._prepare_session = pool, prepare_session
        self._idle: IdlePool[LockConnection] = IdlePool(
            LockConnection.close, MAX_IDLE_CONNECTIONS, is_usable=LockConnection.is_usable
        )

    async def take(self, runtime: Runtime, name: str) -> LockConnection:
        """Give a line that nobody else has; raises BackendUnavailable."""
        return self._idle.take() or await self._new(runtime, name)

    def keep(self, connection: LockConnection) -> None:
        """Take back a line that holds nothing."""
        if connection.is_open:
            connection.is_fresh = False
            self._idle.put(connection)

    def close(self) -> None:
        """Close those that are kept."""
        self._idle.clear()

    async def _new(self, runtime: Runtime, name: str) -> LockConnection:
        dedicated = await self.pool.dedicated(runtime, name)
        try:
            return await dedicated.step(
                runtime,
                name,
                lambda connection: LockConnection(dedicated, connection, self._prepare_session(connection, name)),
            )
        except BaseException:
            await runtime.shield(dedicated.close(runtime))
            raise


def _ways(connection: Connection) -> tuple[Execute, Execute]:
    driver = connection.driver
    if hasattr(driver, "pgconn") and not hasattr(driver, "__aenter__"):
        from dlock_core.backends.advisory.libpq import Libpq

        libpq = Libpq(driver)
        return libpq.execute, libpq.prepared
    return connection.execute, connection.execute


def _ended(connection: Connection) -> Callable[[], object]:
    """Give what says whether an idle session has ended: there is nothing else to read from it.

    Some drivers of asyncio cannot tell.
    """
    driver = connection.driver
    number = socket_of(driver)
    if number < 0:
        return getattr(driver, "is_closed", bool)
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return partial(poll.poll, 0)
