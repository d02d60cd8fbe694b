"""Leases in a table of the application's own database: no other server, and one statement for each step.

Every statement is a separate transaction on a dedicated connection, so a lease does not depend on the outcome of the
caller's transaction, and a competitor learns of it at once instead of being blocked. (Idea of a row per lock with its
expiry: ShedLock; of a growing token in it: Kleppmann 2016.)
"""

from __future__ import annotations

import json
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import (
    Busy,
    Capabilities,
    Granted,
    Holder,
    LockState,
    Released,
    RenewalFailure,
    refuse_to_pickle,
)
from dlock_core.backends.table.statements import MARIADB, MYSQL, POSTGRESQL, SQLITE
from dlock_core.backends.table.waiting import LocalWaiters, NotifyListener
from dlock_core.runtime import RNG
from dlock_core.scheduler import after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest, Renewal, RenewalResult
    from dlock_core.backends.sql import Connection, Pool
    from dlock_core.backends.table.statements import Dialect
    from dlock_core.runtime import Runtime

__all__ = ["TableBackend"]

DIALECTS: Final = {"postgresql": POSTGRESQL, "mariadb": MARIADB, "mysql": MYSQL, "sqlite": SQLITE}
US_PER_SECOND: Final = 1_000_000
"""The table counts in microseconds."""
GRANTS_PER_TIDYING: Final = 16
"""One grant in this many, chosen at random, deletes unused rows: twice as many as can have been added since then."""
MAX_NOTIFIED_WAIT_S: Final = 5.0
"""Longest sleep of a waiter that is notified; a missed notification costs no more than this."""
MIN_POLL_INTERVAL_S: Final = 0.005
"""Seconds between the first two polls of a waiter that is not notified; up to half of it is random."""
MAX_POLL_INTERVAL_S: Final = 0.1
"""Seconds between two polls later on."""


class TableBackend:
    """The table `dlock_lease` of one database, reached through dedicated connections (`pool`).

    On PostgreSQL a waiter is notified of a release. Elsewhere it polls every 2 to 100 ms, and a newcomer also waits for
    one poll before it may take the lock. Waiters are served in any order.
    """

    capabilities = Capabilities(ttl_min=0.1)

    __reduce__ = refuse_to_pickle

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._begin()
        after_fork_in_child(self._after_fork)

    def _begin(self) -> None:
        self._waiters = LocalWaiters()
        self._listener = NotifyListener(self.pool, self._waiters)
        # The listening thread keeps its connection, and the pool, until it is stopped.
        self._when_forgotten = weakref.finalize(self, _close, self._listener, self.pool)
        self._when_forgotten.atexit = False

    def _after_fork(self) -> None:
        """Reset in a forked child: the waiters and the listening thread belong to its parent."""
        self._when_forgotten.detach()
        self._listener.forget()
        self._begin()

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        params = {
            "name": request.name,
            "holder": request.holder,
            "owner": request.owner,
            "ttl": _microseconds(request.ttl),
            "floor": request.floor,
            "newcomer": request.queue and request.fair and ticket is None,
        }

        def take(connection: Connection) -> tuple[Any, ...] | None:
            answers = (connection.execute(sql, params) for sql in _dialect(connection).take)
            found = next((rows[0] for rows in answers if rows), None)
            if found is not None and found[0] and found[1] % GRANTS_PER_TIDYING == 0:
                self._tidy(connection)
            return found

        ours, token, left, owner = await self.pool.step(runtime, request.name, take) or (False, 0, 0, "")
        return (
            Granted(token, request.ttl)
            if ours
            else Busy(max(MIN_POLL_INTERVAL_S, left / US_PER_SECOND) + 0.001, owner, ticket=True)
        )

    async def wait(self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float) -> None:
        """Return when the lock is free, or may be."""
        until, pause = runtime.now() + timeout, MIN_POLL_INTERVAL_S
        can_listen = self.pool.connector.vendor == "postgresql"
        if not can_listen:  # Earlier waiters have at least the same chance.
            await runtime.sleep(min(timeout, pause * RNG.uniform(0.5, 1.0)))
        while True:
            if can_listen:  # Again in each round: the store may have been closed before this waiter had its signal.
                await self._listener.open(runtime)
            signal = runtime.signal()
            # The signal is registered before the row is read. In the reverse order, a release between the two would be
            # missed, and this waiter would sleep to the end of its pause.
            with self._waiters.on(request.name, signal):
                left = min(await self._look(runtime, request.name), until - runtime.now())
                if left <= 0:
                    return
                is_listening = self._listener.is_listening
                if await runtime.wait(
                    signal, min(left, MAX_NOTIFIED_WAIT_S if is_listening else pause * RNG.uniform(0.5, 1.0))
                ):
                    return
            pause = min(pause * 1.5, MAX_POLL_INTERVAL_S)

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        await self._end(runtime, request)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        """Compare the holder only: a token that was raised may have been raised again, and the answer lost."""
        if await self._end(runtime, request):
            return Released.RELEASED

        def is_held(connection: Connection) -> bool:
            return bool(connection.execute(_dialect(connection).other, {"name": request.name}))

        return Released.STOLEN if await self.pool.step(runtime, request.name, is_held) else Released.EXPIRED

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        requests = [renewal.request for renewal in renewals]
        leases = [{"name": one.name, "holder": one.holder, "ttl": _microseconds(one.ttl)} for one in requests]
        limit = min(self.pool.timeout, max(1.0, min(one.ttl for one in requests) / 3))
        renewed = await self.pool.step(runtime, requests[0].name, lambda connection: _renew(connection, leases), limit)
        return [one.ttl if one.holder in renewed else RenewalFailure.LOST for one in requests]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        def read(connection: Connection) -> list[tuple[Any, ...]]:
            return connection.execute(_dialect(connection).listing, {"name": name or ""})

        states = [_state(row) for row in await self.pool.step(runtime, name or "", read)]
        return states if states or name is None else [LockState(name)]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        def end(connection: Connection) -> int:
            return _ended(connection, _dialect(connection).force, {"name": name, "token": token})

        ended = await self.pool.step(runtime, name, end)
        self._waiters.notify(name)
        return ended > 0

    def close(self) -> None:
        _close(self._listener, self.pool)

    async def _look(self, runtime: Runtime, name: str) -> float:
        """Return the seconds for which the lock is held, unless it is released before; request a notification."""

        def look(connection: Connection) -> list[tuple[Any, ...]]:
            dialect = _dialect(connection)
            rows = connection.execute(dialect.look, {"name": name, "sleep": _microseconds(MAX_NOTIFIED_WAIT_S)})
            # The mark has to last until our next poll; otherwise a newcomer may take the lock before that.
            is_marked_here = dialect.note and rows and rows[0][0] > 0
            if is_marked_here and rows[0][1] < _microseconds(MAX_POLL_INTERVAL_S):
                connection.execute(dialect.note, {"name": name, "sleep": _microseconds(MAX_POLL_INTERVAL_S)})
            return rows

        rows = await self.pool.step(runtime, name, look)
        return rows[0][0] / US_PER_SECOND if rows else 0.0

    def _tidy(self, connection: Connection) -> None:
        """Delete some rows that have not been used for long; without the permission to do so the lock still works."""
        dialect = _dialect(connection)
        with suppress(*self.pool.connector.errors):
            for (name,) in connection.execute(dialect.unused, {}):
                connection.execute(dialect.forget, {"name": name})

    async def _end(self, runtime: Runtime, request: AcquireRequest) -> int:
        def end(connection: Connection) -> int:
            return _ended(connection, _dialect(connection).end, {"name": request.name, "holder": request.holder})

        ended = await self.pool.step(runtime, request.name, end)
        self._waiters.notify(request.name)
        return ended


def _close(listener: NotifyListener, pool: Pool) -> None:
    listener.close()
    pool.close()


def _dialect(connection: Connection) -> Dialect:
    return DIALECTS[connection.vendor]


def _microseconds(seconds: float) -> int:
    return round(seconds * US_PER_SECOND)


def _ended(connection: Connection, sql: str, params: dict[str, Any]) -> int:
    rows = connection.execute(sql, params)
    return int(rows[0][0]) if rows else connection.changed()


def _renew(connection: Connection, leases: list[dict[str, Any]]) -> set[str]:
    """Return the holders whose lease was renewed; an UPDATE of MySQL reports only their number."""
    params, dialect = {"leases": json.dumps(leases)}, _dialect(connection)
    rows, changed = connection.execute(dialect.renew, params), connection.changed()
    if changed == len(leases):
        return {lease["holder"] for lease in leases}
    if not rows and changed > 0:
        rows = connection.execute(dialect.ours, params)
    return {holder for (holder,) in rows}


def _state(row: tuple[Any, ...]) -> LockState:
    name, holder, token, owner, since, left = row
    held_for = max(0.0, since / US_PER_SECOND)
    held = Holder(holder, token, shared=False, owner=owner, expires_in=left / US_PER_SECOND, held_for=held_for)
    return LockState(name, (held,))
