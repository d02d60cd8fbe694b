"""Advisory locks of a database session: each is held on a connection of its own, whose end is the lock's end.

The holder proves the connection by every renewal. The server ends a session that has been silent for a ttl, so that
the lock of a process that stands still, or was cut off, ends as well.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dlock_core.backend import Busy, Capabilities, Granted, Released, RenewalFailure
from dlock_core.backends.advisory.connections import Lines, Seat
from dlock_core.backends.advisory.labels import PREFIX, checked_prefix
from dlock_core.backends.advisory.mysql import MySQL
from dlock_core.backends.advisory.postgresql import PostgreSQL
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import LockState, Renewal, RenewalResult, Request
    from dlock_core.backends.sql import Pool, Session
    from dlock_core.runtime import Runtime

__all__ = ["MySQLSessionBackend", "SessionBackend"]

LONGEST: Final = 60.0
"""Seconds after which a place in the queue is given up and taken again: so long we may not notice a dead server."""


class SessionBackend:
    """PostgreSQL's `pg_advisory_lock`, from version 14.

    The token is the database's clock in microseconds, read while the lock is held. Not behind a pooler that hands
    sessions around (PgBouncer's transaction mode): refused as soon as it shows.
    """

    capabilities = Capabilities(expiry="connection", fair=True, shared=True, lists_waiters=True, ttl_min=0.1)
    speaks: ClassVar[type[PostgreSQL | MySQL]] = PostgreSQL

    def __init__(self, pool: Pool, *, prefix: str = PREFIX) -> None:
        self._server = self.speaks(pool, checked_prefix(prefix))
        self._lines = Lines(pool, self._server.introduce)
        self._pool = pool
        self._seats: dict[str, Seat] = {}
        self._floors: dict[str, int] = {}
        """Tokens above the server's clock that a fence has asked for: none that is smaller is given after them."""

    async def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        seat = self._seats.get(request.holder)
        if seat is not None and seat.token:
            return await self._again(runtime, request, seat)
        if seat is None or not seat.line.is_open:
            self._clear()
            seat = self._seats[request.holder] = Seat(await self._lines.take(runtime, request.name), request)
        return await self._ask(runtime, request, seat, None)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | Busy | None:
        """Wait in the database's own queue."""
        seat = self._seats.get(request.holder)
        if seat is None or not seat.line.is_open:
            return None
        return await self._ask(runtime, request, seat, timeout)

    async def abandon(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        seat = self._seats.pop(request.holder, None)
        if seat is None:
            return
        if not seat.line.is_open:  # it was cut off: the server may not have noticed
            await self._server.end(runtime, request.name, seat.line.number)
        elif not seat.token or await self._unlock(runtime, seat):
            self._lines.keep(seat.line)

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Prove each connection; once the server has let us wait for long, the others get what is left to them."""
        limit = min(self._pool.timeout, max(1.0, min(request.ttl for request, _ in renewals) / 3))
        until = runtime.now() + limit
        return [
            await self._renew(runtime, request, limit) if runtime.now() < until else self._left(request)
            for request, _ in renewals
        ]

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Released:
        seat = self._seats.pop(request.holder, None)
        if seat is not None and seat.line.is_open:
            try:
                if await self._unlock(runtime, seat):
                    self._lines.keep(seat.line)
                    return Released.RELEASED
            except BackendUnavailable:
                if not seat.line.had_ended:
                    raise
        try:
            return Released.STOLEN if await self._server.is_held(runtime, request.name) else Released.EXPIRED
        except BackendUnavailable:
            if seat is None:
                raise
            return (
                Released.EXPIRED
            )  # The lock ended with its connection, before this release; only the next holder is unknown.

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        """Show who holds and who waits; on MySQL and MariaDB only holders of this process say who they are."""
        return await self._server.inspect(runtime, name, self._held())

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the session of the holder; on MySQL and MariaDB only one of this process."""
        return await self._server.force_release(runtime, name, token, self._held())

    def close(self) -> None:
        """Close idle connections; leases are not released."""
        self._clear()
        self._lines.close()
        self._pool.close()

    async def _ask(self, runtime: Runtime, request: Request, seat: Seat, seconds: float | None) -> Granted | Busy:
        floor = self._floors.get(request.name, 0)
        terms = request._replace(floor=floor) if floor > request.floor else request

        def ask(_: Session) -> None:  # whoever is cancelled meanwhile finds the token there
            seat.token = self._server.lock(seat.line, terms, seconds)

        sent = clock()
        if seconds is None:
            await seat.line.step(runtime, request.name, ask)
        else:
            await seat.line.patiently(runtime, request.name, ask, seconds + self._pool.timeout)
        if seat.token:
            seat.extend(sent if seconds is None else clock(), request.ttl)
            return Granted(seat.token, request.ttl)
        if seconds is None and request.queue:
            return Busy(LONGEST)
        if seconds is None:
            self._seats.pop(request.holder, None)
            self._lines.keep(seat.line)
        return Busy(LONGEST, await self._server.owner(runtime, request.name, self._held()))

    async def _again(self, runtime: Runtime, request: Request, seat: Seat) -> Granted | Busy:
        if request.floor >= seat.token:
            seat.token = self._floors[request.name] = request.floor + 1
        if await self._renew(runtime, request, self._pool.timeout) is RenewalFailure.LOST:
            raise BackendUnavailable(request.name, reason="its connection was lost", broken=True)
        return Granted(seat.token, request.ttl)

    def _left(self, request: Request) -> RenewalResult:
        seat = self._seats.get(request.holder)
        return RenewalFailure.LOST if seat is None else max(0.0, seat.until - clock()) or RenewalFailure.UNKNOWN

    async def _renew(self, runtime: Runtime, request: Request, limit: float) -> RenewalResult:
        """Prove the connection; one that fails is closed, and the server ends its session after a ttl at the latest."""
        seat, sent = self._seats.get(request.holder), clock()
        if seat is None or not seat.token:
            return RenewalFailure.LOST

        def prove(_: Session) -> bool:
            is_ours = self._seats.get(request.holder) is seat  # else it was released, and the line may be another's
            return is_ours and self._server.prove(seat.line, request, seat.token)

        with suppress(BackendUnavailable):
            if await seat.line.step(runtime, request.name, prove, limit):
                seat.extend(sent, request.ttl)
                return request.ttl
        if self._seats.pop(request.holder, None) is not None:
            seat.line.close()
        return RenewalFailure.LOST

    async def _unlock(self, runtime: Runtime, seat: Seat) -> bool:
        def unlock(_: Session) -> bool:
            seat.line.had_ended = bool(seat.line.has_ended())
            return self._server.unlock(seat.line, seat.request)

        return await seat.line.step(runtime, seat.request.name, unlock)

    def _held(self) -> list[Seat]:
        return [seat for seat in list(self._seats.values()) if seat.token]

    def _clear(self) -> None:
        """Forget leases that were thrown away, and have run out."""
        now = clock()
        for holder, seat in list(self._seats.items()):
            if seat.until < now and seat.line.close():
                self._seats.pop(holder, None)


class MySQLSessionBackend(SessionBackend):
    """MySQL's and MariaDB's `GET_LOCK`: exclusive, on the whole server; a ttl has whole seconds."""

    capabilities = Capabilities(expiry="connection", fair=True, lists_waiters=True, ttl_min=1.0, ttl_step=1.0)
    speaks: ClassVar[type[PostgreSQL | MySQL]] = MySQL
