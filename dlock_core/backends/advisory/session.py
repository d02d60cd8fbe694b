"""Advisory locks of a database session: each is held on a dedicated connection, and ends with it.

Every renewal proves the connection. The server ends a session that has been silent for a ttl, so that the lock of a
process that is stopped, or was cut off, ends as well.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dlock_core.backend import Busy, Capabilities, Granted, Released, RenewalFailure, refuse_to_pickle
from dlock_core.backends.advisory.connections import LockConnections, Reservation
from dlock_core.backends.advisory.labels import PREFIX, checked_prefix
from dlock_core.backends.advisory.mysql import MySQL
from dlock_core.backends.advisory.postgresql import PostgreSQL
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock
from dlock_core.sql.driver_errors import is_plain_refusal, is_unsent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest, LockState, Renewal, RenewalResult
    from dlock_core.backends.advisory.connections import ServerSession
    from dlock_core.backends.sql import Connection, Pool
    from dlock_core.runtime import Runtime

__all__ = ["MySQLSessionBackend", "SessionBackend"]

MAX_WAIT_S: Final = 60.0
"""Seconds after which a waiter leaves and re-enters the queue: a dead server may go unnoticed for this long."""
MAX_TTL_S: Final = 2_147_483.0
"""The longest silence, 24.8 days, after which every server can end a session; with a longer ttl a lease is only valid
for this long, unless it is renewed. PostgreSQL counts milliseconds in 32 bits, and MySQL has this limit on Windows."""


class SessionBackend:
    """PostgreSQL's `pg_advisory_lock`, from version 14.

    The token is the database's clock in microseconds, read while the lock is held. It does not work behind a pooler
    that shares sessions (PgBouncer's transaction mode), and is refused there once that is detected.
    """

    capabilities = Capabilities(expiry="connection", fair=True, shared=True, lists_waiters=True, ttl_min=0.1)
    dialect: ClassVar[type[PostgreSQL | MySQL]] = PostgreSQL

    __reduce__ = refuse_to_pickle

    def __init__(self, pool: Pool, *, prefix: str = PREFIX) -> None:
        self._server = self.dialect(pool, checked_prefix(prefix))
        self._connections = LockConnections(pool, self._server.prepare_session)
        self._pool = pool
        self._reservations: dict[str, Reservation] = {}
        self._floors: dict[str, int] = {}
        """Tokens above the server's clock that a fence has requested: later tokens are never smaller."""

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        request, reservation = _limited(request), self._reservations.get(request.holder)
        if reservation is not None and reservation.token:
            return await self._acquire_again(runtime, request, reservation)
        if reservation is None or not reservation.connection.is_open:
            self._clear()
            reservation = self._reservations[request.holder] = Reservation(
                await self._connections.take(runtime, request.name), request
            )
        return await self._ask(runtime, request, reservation, None)

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        """Wait in the database's own queue."""
        reservation = self._reservations.get(request.holder)
        if reservation is None or not reservation.connection.is_open:
            return None
        return await self._ask(runtime, _limited(request), reservation, timeout)

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        reservation = self._reservations.get(request.holder)
        if reservation is not None:
            await self._end(runtime, request, reservation)

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Prove each connection, one after the other; the watchdog asks for each lease in a thread of its own."""
        return [
            await self._renew(runtime, _limited(request), min(self._pool.timeout, max(1.0, request.ttl / 3)))
            for request, _ in renewals
        ]

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        reservation = self._reservations.get(request.holder)
        if reservation is not None and (is_free := await self._end(runtime, request, reservation)) is not False:
            return Released.RELEASED if is_free else Released.EXPIRED
        try:
            return Released.STOLEN if await self._server.is_held(runtime, request.name) else Released.EXPIRED
        except BackendUnavailable:
            if reservation is None:
                raise
            # The lock ended with its connection, before this release; only the next holder is unknown.
            return Released.EXPIRED

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        """Return holders and waiters; on MySQL and MariaDB only holders of this process show their owner."""
        return await self._server.inspect(runtime, name, self._held())

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the session of the holder; on MySQL and MariaDB only one of this process."""
        for reservation in self._held():
            if reservation.token == token and reservation.request.name == name:
                # First, so that after a release meanwhile no other lock is on this connection.
                reservation.connection.is_reusable = False
                return await self._server.end(runtime, name, reservation.connection.session)
        return await self._server.force_release(runtime, name, token, self._connections.has)

    def close(self) -> None:
        """Close idle connections; leases are not released."""
        self._clear()
        self._connections.close()
        self._pool.close()

    async def _ask(
        self, runtime: Runtime, request: AcquireRequest, reservation: Reservation, seconds: float | None
    ) -> Granted | Busy:
        floor = self._floors.get(request.name, 0)
        terms = request._replace(floor=floor) if floor > request.floor else request

        def ask(_: Connection) -> None:  # A caller that is cancelled during the call finds the token there.
            reservation.token = self._server.lock(reservation.connection, terms, seconds)

        sent = clock()
        if seconds is None:
            await reservation.connection.step(runtime, request.name, ask)
        else:
            await reservation.connection.interruptibly(runtime, request.name, ask, seconds + self._pool.timeout)
        if reservation.token:
            reservation.extend(sent if seconds is None else clock(), request.ttl)
            return Granted(reservation.token, request.ttl)
        if seconds is None and request.queue:
            return Busy(MAX_WAIT_S)
        if seconds is None:
            self._reservations.pop(request.holder, None)
            self._connections.keep(reservation.connection)
        return Busy(MAX_WAIT_S, await self._server.owner(runtime, request.name, self._held()))

    async def _acquire_again(
        self, runtime: Runtime, request: AcquireRequest, reservation: Reservation
    ) -> Granted | Busy:
        if request.floor >= reservation.token:
            reservation.token = self._floors[request.name] = request.floor + 1
        renewed = await self._renew(runtime, request, self._pool.timeout)
        if renewed is RenewalFailure.LOST:
            await self._end(runtime, request, reservation)  # Otherwise our own session could be in the way.
            raise BackendUnavailable(request.name, reason="its connection was lost", broken=True)
        if renewed is RenewalFailure.UNKNOWN:
            raise BackendUnavailable(request.name, reason="the server refused to renew it")
        return Granted(reservation.token, request.ttl)

    async def _renew(self, runtime: Runtime, request: AcquireRequest, limit: float) -> RenewalResult:
        """Prove the connection; a failed one is closed. The release ends its session, or the server after a ttl.

        If the server refuses the statement, as after a cancel by an administrator, the session goes on with its lock.
        """
        reservation = self._reservations.get(request.holder)
        if reservation is None or not reservation.token or not reservation.connection.is_open:
            return RenewalFailure.LOST

        def prove(_: Connection) -> bool | None:
            # If it was released meanwhile, the connection may hold another lock.
            if not self._is_held(reservation):
                return False
            # Another renewal, for longer, may have been sent first although this one began before it.
            sent = clock()
            left = reservation.until - sent
            ttl = request.ttl if left > MAX_TTL_S else max(request.ttl, left)  # It is infinite until it is known.
            try:
                proven = self._server.prove(reservation.connection, request._replace(ttl=ttl), reservation.token)
            except self._pool.connector.errors as error:
                if is_plain_refusal(error) and not reservation.connection.has_ended():
                    return None
                raise
            if proven:
                reservation.extend(sent, ttl)
            return proven

        with suppress(BackendUnavailable):
            proven = await reservation.connection.step(runtime, request.name, prove, limit)
            if proven is None:
                return RenewalFailure.UNKNOWN
            if proven:
                return request.ttl
        if self._is_held(reservation):
            reservation.connection.close()
        return RenewalFailure.LOST

    async def _end(self, runtime: Runtime, request: AcquireRequest, reservation: Reservation) -> bool | None:
        """Unlock, or end the session of a lost connection; return False if the lock was no longer ours.

        Returns None if the connection is lost, and the session may still have the lock, for a ttl at most. Raises
        BackendUnavailable, and keeps the reservation for another attempt.
        """
        reservation.extend(clock(), request.ttl)
        is_free = await self._unlock_or_end_session(runtime, reservation)
        if self._reservations.pop(request.holder, None) is not None:
            # Only now: a repeated call must not find another request's connection.
            self._give_back(reservation, is_free=bool(is_free))
        return is_free

    async def _unlock_or_end_session(self, runtime: Runtime, reservation: Reservation) -> bool | None:
        connection, name = reservation.connection, reservation.request.name
        if not connection.is_open:
            return await self._end_session(runtime, name, connection.session)
        try:
            return not reservation.token or await self._unlock(runtime, reservation)
        except BackendUnavailable as error:
            # A renewal that came first has closed the connection, so nothing was sent.
            if error.__cause__ is None and not reservation.connection.is_open:
                return await self._end_session(runtime, name, connection.session)
            if is_unsent(error.__cause__):  # The server itself has said that it ended the session.
                return False
            if not connection.had_ended or isinstance(error.__cause__, TimeoutError):  # It may have been unlocked.
                raise
        with suppress(BackendUnavailable):  # It was certainly not unlocked, and an error would let a retry say so.
            return await self._end_session(runtime, name, connection.session)
        return None

    async def _end_session(self, runtime: Runtime, name: str, session: ServerSession) -> bool:
        """End a session if it holds or awaits the lock, and return whether it did.

        The server may not know that the connection is lost, as when a NAT has reset our end of it.
        """
        try:
            return await self._server.end(runtime, name, session)
        except BackendUnavailable as error:
            if not error.broken or isinstance(error.__cause__, TimeoutError):
                raise
        return await self._server.end(runtime, name, session)  # An idle connection of the pool was lost as well.

    async def _unlock(self, runtime: Runtime, reservation: Reservation) -> bool:
        def unlock(_: Connection) -> bool:
            if not reservation.token:  # Another call has unlocked it, and the connection may hold another lock by now.
                return True
            reservation.connection.note_end()
            was_held = self._server.unlock(reservation.connection, reservation.request)
            if was_held:
                reservation.token = 0
            return was_held

        return await reservation.connection.step(runtime, reservation.request.name, unlock)

    def _give_back(self, reservation: Reservation, *, is_free: bool) -> None:
        """Keep a connection that holds no lock for the next holder, and close one that may hold anything."""
        if is_free:
            self._connections.keep(reservation.connection)
        else:
            reservation.connection.close()

    def _is_held(self, reservation: Reservation) -> bool:
        return self._reservations.get(reservation.request.holder) is reservation and bool(reservation.token)

    def _held(self) -> list[Reservation]:
        held = list(self._reservations.values())
        return [reservation for reservation in held if reservation.token and reservation.connection.is_open]

    def _clear(self) -> None:
        """Forget leases that are no longer referenced, and have run out."""
        now = clock()
        for holder, reservation in list(self._reservations.items()):
            if reservation.until < now and reservation.connection.close_unused():
                self._reservations.pop(holder, None)


def _limited(request: AcquireRequest) -> AcquireRequest:
    return request if request.ttl <= MAX_TTL_S else request._replace(ttl=MAX_TTL_S)


class MySQLSessionBackend(SessionBackend):
    """MySQL's and MariaDB's `GET_LOCK`: exclusive, on the whole server; a ttl has whole seconds."""

    capabilities = Capabilities(expiry="connection", fair=True, lists_waiters=True, ttl_min=1.0, ttl_step=1.0)
    dialect: ClassVar[type[PostgreSQL | MySQL]] = MySQL
