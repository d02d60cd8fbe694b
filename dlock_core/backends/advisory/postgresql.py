"""Session locks of PostgreSQL: what its sessions are told, and what its tables tell of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlock_core.backends.advisory import statements
from dlock_core.backends.advisory.labels import comment, label_of
from dlock_core.backends.advisory.listing import Sessions
from dlock_core.errors import BackendUnavailable
from dlock_core.retry import Trouble, classify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import LockState, Request
    from dlock_core.backends.advisory.lines import Line, Seat
    from dlock_core.backends.sql import Pool, Session
    from dlock_core.runtime import Runtime

__all__ = ["PostgreSQL"]


class PostgreSQL:
    """One database."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._prefix, self._errors = prefix, pool.connector.errors
        self._sessions = Sessions(pool, prefix)
        self.is_held = self._sessions.is_held

    def introduce(self, session: Session, name: str) -> int:
        """Make a new session fit for waiting; give its number. Raises BackendUnavailable for what is not ours alone."""
        ((number, known, is_standby, *_),) = session.execute(statements.INTRODUCE)
        if is_standby:
            raise BackendUnavailable(name, reason="a standby's locks exclude nobody: use the primary", refused=True)
        if known:
            raise _behind_pooler(name)
        return int(number)

    def lock(self, line: Line, request: Request, seconds: float | None) -> int:
        """Try, or wait for so many seconds; give the token, 0 where others hold the lock."""
        label = label_of(request.name, self._prefix)
        statement = (statements.TRY_SESSION if seconds is None else statements.WAIT_SESSION)[request.shared]
        params = {
            "key": label.key,
            "head": label.head,
            "tail": label.tail,
            "least": request.floor + 1,
            "ttl": _milliseconds(request.ttl),
        }
        run = line.prepared
        if seconds is not None:
            params["milliseconds"] = _milliseconds(seconds)
            run, statement = line.execute, f"{comment(request)}\n{statement}"
        try:
            rows = run(statement, params)
        except self._errors as error:
            if classify(error) is Trouble.LOCK_TIMEOUT:
                return 0
            raise
        ((text, number),) = rows
        if number != line.number:
            raise _behind_pooler(request.name)
        return 0 if text is None else label.token_in(text)

    def prove(self, line: Line, request: Request, token: int) -> bool:
        """Have the server wait another ttl for us; False when the session is not the one that took the lock."""
        label = f"{self._prefix}{token}#{request.name}"
        params = {"label": label, "ttl": _milliseconds(request.ttl)}
        ((number, *_),) = line.execute(f"{comment(request)}\n{statements.PROVE}", params)
        return bool(number == line.number)

    def unlock(self, line: Line, request: Request) -> bool:
        """End the lock; False when this session did not hold it."""
        params = {"key": label_of(request.name, self._prefix).key}
        ((was_ours, *_),) = line.prepared(statements.UNLOCK[request.shared], params)
        return bool(was_ours)

    async def end(self, runtime: Runtime, name: str, number: int) -> None:
        """End a session of ours that holds or awaits a lock."""
        await self._sessions.end(runtime, name, number)

    async def owner(self, runtime: Runtime, name: str, ours: Sequence[Seat]) -> str:
        """Tell who holds a lock."""
        (state,) = await self._sessions.inspect(runtime, name, ours)
        return next((holder.owner for holder in state.holders), "")

    async def inspect(self, runtime: Runtime, name: str | None, ours: Sequence[Seat]) -> list[LockState]:
        """Show one lock, or all; of holders in other processes who they are from their first renewal on."""
        return await self._sessions.inspect(runtime, name, ours)

    async def force_release(self, runtime: Runtime, name: str, token: int, ours: object) -> bool:
        """End the session that holds with this token."""
        return await self._sessions.force_release(runtime, name, token)


def _milliseconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds * 1000)))


def _behind_pooler(name: str) -> BackendUnavailable:
    reason = "its session is not ours alone, as behind PgBouncer in transaction mode: connect directly"
    return BackendUnavailable(name, reason=reason, refused=True)
