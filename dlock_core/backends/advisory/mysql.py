"""Session locks of MySQL and MariaDB: GET_LOCK, and the little that these servers report about them.

The last statement of an idle session cannot be read, so only the holders of this process and the waiters show an owner.
For a holder in another process, the number of its session, its user and its host are known.
"""

from __future__ import annotations

import json
import math
import secrets
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.advisory.connections import ServerSession
from dlock_core.backends.advisory.labels import SESSION_PREFIX, comment, in_comment, word_of
from dlock_core.errors import BackendUnavailable, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.advisory.connections import LockConnection, Reservation
    from dlock_core.backends.sql import Connection, Pool
    from dlock_core.runtime import Runtime

__all__ = ["MySQL"]

# SYSDATE is evaluated after GET_LOCK, NOW at the start of the statement.
_LOCK: Final = """\
SELECT IF(GET_LOCK(:word, :seconds) = 1, GREATEST(CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED), :floor + 1), 0)
"""
# In a zone with summer time, an hour comes twice when that ends, and SYSDATE does not say which one it is in.
_ZONE: Final = "SET SESSION time_zone = :zone"
_IDLE_LIMIT: Final = "SET SESSION wait_timeout = :seconds"
_PROVE: Final = "SELECT IS_USED_LOCK(:word) = CONNECTION_ID()"
_UNLOCK: Final = "SELECT RELEASE_LOCK(:word)"
_HOLDER: Final = "SELECT IS_USED_LOCK(:word)"
_OF_SESSION: Final = "SELECT IS_USED_LOCK(:proof), IS_USED_LOCK(:word)"
_WHO: Final = "SELECT user, host FROM information_schema.processlist WHERE id = :number"
_WAITERS: Final = """\
SELECT id, info, time FROM information_schema.processlist WHERE state = 'User lock' ORDER BY time DESC, id"""
_WAITERS_OF_MARIADB: Final = """\
SELECT id, info, time_ms / 1000 FROM information_schema.processlist WHERE state = 'User lock' ORDER BY time_ms DESC"""


class MySQL:
    """One server: the names of its locks are the same in all of its databases."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool, self._prefix = pool, prefix

    def prepare_session(self, connection: Connection, name: str) -> ServerSession:
        """Let a new session lock a unique name for as long as it lasts, and return its number with that name."""
        connection.execute(_ZONE, {"zone": "+00:00"})
        proof = f"{SESSION_PREFIX}{secrets.token_hex(16)}"
        ((number, _),) = connection.execute("SELECT CONNECTION_ID(), GET_LOCK(:proof, 0)", {"proof": proof})
        return ServerSession(int(number), proof)

    def lock(self, connection: LockConnection, request: AcquireRequest, seconds: float | None) -> int:
        """Try, or wait for this many seconds, and return the token; 0 if another session holds the lock."""
        self._limit(connection, request.ttl)
        wait = seconds or 0.0
        params = {
            "word": word_of(request.name, self._prefix),
            "seconds": wait if connection.vendor == "mariadb" else math.ceil(wait),
            "floor": request.floor,
        }
        ((token,),) = connection.execute(f"{comment(request)}\n{_LOCK}", params)
        return int(token or 0)

    def prove(self, connection: LockConnection, request: AcquireRequest, token: int) -> bool:
        """Restart the server's idle limit; return False if this session does not hold the lock."""
        self._limit(connection, request.ttl)
        ((is_ours,),) = connection.execute(_PROVE, {"word": word_of(request.name, self._prefix)})
        return bool(is_ours)

    def unlock(self, connection: LockConnection, request: AcquireRequest) -> bool:
        """End the lock; return False if this session did not hold it."""
        ((was_ours,),) = connection.execute(_UNLOCK, {"word": word_of(request.name, self._prefix)})
        return bool(was_ours)

    async def is_held(self, runtime: Runtime, name: str) -> bool:
        """Return whether a lock is held."""
        return await self._holder(runtime, name) is not None

    async def end(self, runtime: Runtime, name: str, session: ServerSession) -> bool:
        """End a session of ours that holds or awaits a lock, and wait until it is gone; return whether it did."""
        words = {"proof": session.proof, "word": word_of(name, self._prefix)}

        def kill(connection: Connection) -> bool:
            # All on one connection: a server that takes over meanwhile may have given the number to another session.
            ((number, holder),) = connection.execute(_OF_SESSION, words)
            found = number is not None and number in {holder, *(row[0] for row in _waiting(connection))}
            if not found:
                return False
            try:
                connection.execute(f"KILL {number:d}")
            except self._pool.connector.errors:
                if connection.execute(_OF_SESSION, words)[0][0] is not None:  # It has not ended by itself meanwhile.
                    raise
            return True

        if not await self._pool.step(runtime, name, kill):
            return False
        until = runtime.now() + self._pool.timeout
        while session.number in (await self._ask(runtime, name, _OF_SESSION, **words))[0]:
            if runtime.now() >= until:
                raise BackendUnavailable(name, reason="its holder was asked to end, but is still running")
            await runtime.sleep(0.005)
        return True

    async def owner(self, runtime: Runtime, name: str, ours: Sequence[Reservation]) -> str:
        """Return the owner of a lock, as far as the server reports it."""
        holder = await self._shown(runtime, name, ours)
        return holder.owner if holder is not None else ""

    async def inspect(self, runtime: Runtime, name: str | None, ours: Sequence[Reservation]) -> list[LockState]:
        """Return the state of one lock, or of all locks that are known here."""
        waiting = await self._pool.step(runtime, name or "", _waiting)
        told = [(told, float(seconds)) for _, info, seconds in waiting if (told := in_comment(info or ""))]
        names = (
            [name]
            if name
            else dict.fromkeys([reservation.request.name for reservation in ours] + [each.name for each, _ in told])
        )
        states = []
        for each in names:
            holder = await self._shown(runtime, each, ours)
            waiters = tuple(Waiter(w.holder, w.shared, w.owner, seconds) for w, seconds in told if w.name == each)
            if name or holder or waiters:
                states.append(LockState(each, (holder,) if holder else (), waiters))
        return states

    async def force_release(self, runtime: Runtime, name: str, token: int, is_ours: Callable[[int], bool]) -> bool:
        """Raise NotSupported for a lock of another process, whose token is not known; `is_ours` knows our sessions."""
        number = await self._holder(runtime, name)
        if number is not None and not is_ours(number):
            raise NotSupported(
                f"the lock {name!r} is held by session {number} of another process, and this server does not report "
                f"its token: end that session with KILL {number}, if it is the right one",
                name=name,
            )
        return False

    def _limit(self, connection: LockConnection, ttl: float) -> None:
        if connection.idle_limit != ttl:
            connection.execute(_IDLE_LIMIT, {"seconds": math.ceil(ttl)})
            connection.idle_limit = ttl

    async def _shown(self, runtime: Runtime, name: str, ours: Sequence[Reservation]) -> Holder | None:
        number = await self._holder(runtime, name)
        if number is None:
            return None
        for reservation in ours:
            if await self._has(runtime, reservation, number):
                request = reservation.request
                return Holder(request.holder, reservation.token, request.shared, request.owner, None)
        ((user, host),) = await self._ask(runtime, name, _WHO, number=number) or [("a session", "that has ended")]
        owner = {"app": "session", "host": f"{user}@{host}", "pid": number, "session": f"my:{number}"}
        return Holder(f"{number:08}", 0, False, json.dumps(owner), None)

    async def _has(self, runtime: Runtime, reservation: Reservation, number: int) -> bool:
        """Return whether a session of this number is that of a reservation; a server that takes over numbers anew."""
        session, name = reservation.connection.session, reservation.request.name
        return session.number == number and await self._ask(runtime, name, _HOLDER, word=session.proof) == [(number,)]

    async def _holder(self, runtime: Runtime, name: str) -> int | None:
        ((number,),) = await self._ask(runtime, name, _HOLDER, word=word_of(name, self._prefix))
        return None if number is None else int(number)

    async def _ask(self, runtime: Runtime, name: str, sql: str, **params: Any) -> list[tuple[Any, ...]]:
        return await self._pool.step(runtime, name, lambda connection: connection.execute(sql, params))


def _waiting(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute(_WAITERS_OF_MARIADB if connection.vendor == "mariadb" else _WAITERS)
