"""The connections on which session locks are held: one for each grant, kept open for a while for the next one."""

from __future__ import annotations

import asyncio
import math
import select
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary, ref

from dlock_core.backends.idle import IdlePool
from dlock_core.backends.sql import socket_of
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, Asyncio, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.sql import Connection, DedicatedConnection, Pool
    from dlock_core.runtime import Runtime

    Execute = Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]

__all__ = ["LockConnection", "LockConnections", "Reservation", "ServerSession"]

T = TypeVar("T")

MAX_IDLE_CONNECTIONS: Final = 8
"""Idle connections kept open, at most."""


class ServerSession(NamedTuple):
    """A session at the server, which may outlive our end of the connection."""

    number: int
    proof: str
    """Distinguishes it from others: a server that was restarted, or another that took over, begins the numbers anew."""


class LockConnection:
    """One connection, used by one step at a time: its holder's, or the watchdog's."""

    def __init__(
        self, dedicated: DedicatedConnection, connection: Connection, session: ServerSession, owner: LockConnections
    ) -> None:
        self.dedicated, self.session = dedicated, session
        self._owner = ref(owner)
        self.vendor = connection.vendor
        self.execute, self.prepared = _ways(connection)
        """Run a statement as `Connection.execute` does; `prepared` those that come again and again."""
        self.has_ended = _ended(connection)
        """Returns whether the server has ended the session; call it while the connection is open and not in use."""
        self.idle_limit = 0.0
        """Seconds of silence after which the server ends the session, as last configured."""
        self.is_fresh = True
        self.is_reusable = True
        """Whether it may serve another lock after this one; not if its session is about to be ended."""
        self.had_ended = False
        """Whether the server had ended it before the last call of `note_end`."""
        self._is_over = False
        """Whether it is closed, or is to be closed by the step that still uses it."""
        self._in_use: dict[str, object] = {}
        """The step that uses the connection. `setdefault` enters and `del` leaves, each in one bytecode. A caller could
        be interrupted right after acquiring a `threading.Lock`, which would then stay locked."""

    @property
    def is_open(self) -> bool:
        """Whether it has not failed or been closed so far, and does not belong to a parent process."""
        return self.dedicated.is_open and not self._is_over

    def is_usable(self) -> bool:
        """Return whether an idle connection is ours and open; the server may have ended its session."""
        return self.is_open and not self.has_ended()

    def note_end(self) -> None:
        """Record, within a step, whether the server has ended the session; if the driver cannot detect it, try a query.

        If the step's next statement fails, it was not executed in a session that had ended before.
        """
        self.had_ended = bool(self.has_ended())
        if self.has_ended is _is_unknown:
            try:
                self.execute("SELECT 1", {})
            except Exception:
                self.had_ended = True
                raise

    def close(self) -> None:
        """Close the connection, now or at the end of the step that uses it, such as a renewal that comes too late.

        In a forked child it stays open for the parent.
        """
        self._is_over = True
        self.close_unused()

    def close_unused(self) -> bool:
        """Close the connection, unless a step is using it; return whether it is closed."""
        mine = object()
        try:
            if self._in_use.setdefault("by", mine) is not mine:
                return False
            run(self.dedicated.close(BLOCKING))
        finally:
            if "by" in self._in_use and self._in_use["by"] is mine:  # No call, and so no interrupt, is in between.
                del self._in_use["by"]
        return True

    async def step(
        self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float | None = None
    ) -> T:
        """Execute a step, to its end even in a cancelled task; after BackendUnavailable the connection is closed."""
        mine = object()
        try:
            while self._in_use.setdefault("by", mine) is not mine:
                await runtime.sleep(0.002)
            return await self.dedicated.step(runtime, name, function, limit)
        except BackendUnavailable as error:
            # The connection may have died while it was idle, so that a new one may work. A silent server would only
            # cost a second time limit.
            error.broken = not self.is_fresh and not isinstance(error.__cause__, TimeoutError)
            if (owner := self._owner()) is not None:
                owner.close()  # The cause that ended this session may have ended the idle ones.
            raise
        finally:
            if "by" in self._in_use and self._in_use["by"] is mine:
                del self._in_use["by"]
            if self._is_over:
                self.close_unused()

    async def interruptibly(self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float) -> T:
        """Execute a step that waits for other holders: a task that is cancelled aborts the connection."""
        step = self.step(runtime, name, function, limit)
        if not isinstance(runtime, Asyncio):
            return await step
        connection, task = self.dedicated.connection, asyncio.ensure_future(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            task.add_done_callback(_note_error)
            await asyncio.wait([task])
            raise


def _note_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of an aborted step; otherwise asyncio would log that it was never retrieved."""
    if not task.cancelled():
        task.exception()


class Reservation:
    """One request and the connection on which it is made; the lock is held while there is a token."""

    def __init__(self, connection: LockConnection, request: AcquireRequest) -> None:
        self.connection, self.request = connection, request
        self.token = 0
        self.until = math.inf
        """When the server will have ended the session, unless it receives a statement."""

    def extend(self, sent: float, ttl: float) -> None:
        """Extend the validity, because the server has received a statement at `sent` or later."""
        self.until = sent + ttl


class LockConnections:
    """Opens lock connections, and keeps some of those that no longer hold a lock."""

    def __init__(self, pool: Pool, prepare_session: Callable[[Connection, str], ServerSession]) -> None:
        self.pool, self._prepare_session = pool, prepare_session
        self._idle: IdlePool[LockConnection] = IdlePool(
            LockConnection.close, MAX_IDLE_CONNECTIONS, is_usable=LockConnection.is_usable
        )
        self._by_number: WeakValueDictionary[int, LockConnection] = WeakValueDictionary()

    async def take(self, runtime: Runtime, name: str) -> LockConnection:
        """Return a connection for one reservation; raises BackendUnavailable."""
        return self._idle.take() or await self._new(runtime, name)

    def keep(self, connection: LockConnection) -> None:
        """Take back a connection that holds no lock."""
        if not connection.is_reusable:
            connection.close()
        elif connection.is_open:
            connection.is_fresh = False
            self._idle.put(connection)

    def has(self, number: int) -> bool:
        """Return whether the session of this number is one of ours, whether or not it holds a lock."""
        connection = self._by_number.get(number)
        return connection is not None and connection.is_open

    def close(self) -> None:
        """Close the idle connections."""
        self._idle.clear()

    async def _new(self, runtime: Runtime, name: str) -> LockConnection:
        dedicated = await self.pool.dedicated(runtime, name)

        def prepare(connection: Connection) -> LockConnection:
            session = self._prepare_session(connection, name)
            prepared = LockConnection(dedicated, connection, session, self)
            self._by_number[session.number] = prepared
            return prepared

        try:
            return await dedicated.step(runtime, name, prepare)
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
    """Return a function that checks whether an idle session has ended: there is nothing else to read from it."""
    driver = connection.driver
    number = socket_of(driver)
    if number < 0:
        return getattr(driver, "is_closed", _is_unknown)  # asyncpg's
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return partial(poll.poll, 0)


def _is_unknown() -> bool:
    """Return False: aiomysql and asyncmy read the end of a session and do not report it."""
    return False
