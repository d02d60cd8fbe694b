"""Session locks of PostgreSQL: the statements, and the holders and waiters in its catalogue."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.advisory.connections import ServerSession
from dlock_core.backends.advisory.labels import Told, comment, in_comment, in_label, key_of, label_of
from dlock_core.errors import BackendUnavailable
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.advisory.connections import LockConnection, Reservation
    from dlock_core.backends.sql import Connection, Pool
    from dlock_core.runtime import Runtime

__all__ = ["PostgreSQL"]


class PostgreSQL:
    """One database."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._prefix, self._errors = prefix, pool.connector.errors
        self._sessions = Sessions(pool, prefix)
        self.is_held = self._sessions.is_held

    def prepare_session(self, connection: Connection, name: str) -> ServerSession:
        """Prepare a new session for waiting, and return its number, and when it began.

        Raises BackendUnavailable for a session that is shared with other clients.
        """
        ((number, began, known, is_standby, *_),) = connection.execute(PREPARE_SESSION)
        if is_standby:
            raise BackendUnavailable(
                name, reason="a standby's locks exclude no other holder: use the primary", refused=True
            )
        if known:
            raise _behind_pooler(name)
        return ServerSession(int(number), str(began))

    def lock(self, connection: LockConnection, request: AcquireRequest, seconds: float | None) -> int:
        """Try, or wait for this many seconds, and return the token; 0 if another session holds the lock."""
        label = label_of(request.name, self._prefix)
        statement = (TRY_SESSION if seconds is None else WAIT_SESSION)[request.shared]
        params = {
            "key": label.key,
            "head": label.head,
            "tail": label.tail,
            "least": request.floor + 1,
            "ttl": str(milliseconds(request.ttl)),
        }
        run = connection.prepared
        if seconds is not None:
            params["milliseconds"] = str(milliseconds(seconds))
            run, statement = connection.execute, f"{comment(request)}\n{statement}"
        try:
            rows = run(statement, params)
        except self._errors as error:
            if failure_of_statement(error) is not DatabaseFailure.LOCK_TIMEOUT:
                raise
            # If it is granted just before the limit, the session keeps it although the statement fails.
            connection.execute(UNLOCK_IF_OURS[request.shared], {"key": label.key})
            return 0
        ((text, number),) = rows
        if number != connection.session.number:
            raise _behind_pooler(request.name)
        return 0 if text is None else label.token_in(text)

    def prove(self, connection: LockConnection, request: AcquireRequest, token: int) -> bool:
        """Restart the server's idle limit; return False if the session is not the one that took the lock."""
        label = f"{self._prefix}{token}#{request.name}"
        params = {"label": label, "ttl": str(milliseconds(request.ttl))}
        ((number, *_),) = connection.execute(f"{comment(request)}\n{PROVE}", params)
        return bool(number == connection.session.number)

    def unlock(self, connection: LockConnection, request: AcquireRequest) -> bool:
        """End the lock; return False if this session did not hold it."""
        params = {"key": label_of(request.name, self._prefix).key}
        ((_, was_ours),) = connection.prepared(UNLOCK[request.shared], params)
        return bool(was_ours)

    async def end(self, runtime: Runtime, name: str, session: ServerSession) -> bool:
        """End a session of ours that holds or awaits a lock; return whether it did."""
        return await self._sessions.end(runtime, name, session)

    async def owner(self, runtime: Runtime, name: str, ours: Sequence[Reservation]) -> str:
        """Return the owner of a lock; empty if it is free."""
        (state,) = await self._sessions.inspect(runtime, name, ours)
        return next((holder.owner for holder in state.holders), "")

    async def inspect(self, runtime: Runtime, name: str | None, ours: Sequence[Reservation]) -> list[LockState]:
        """Return the state of one lock, or of all; other processes show their owner from their first renewal on."""
        return await self._sessions.inspect(runtime, name, ours)

    async def force_release(self, runtime: Runtime, name: str, token: int, is_ours: object) -> bool:
        """End the session that holds the lock with this token."""
        return await self._sessions.force_release(runtime, name, token)


def _behind_pooler(name: str) -> BackendUnavailable:
    reason = "its session is shared with other clients, as behind PgBouncer in transaction mode: connect directly"
    return BackendUnavailable(name, reason=reason, refused=True)


# The token is drawn after the lock has been taken, so that the next holder reads a later time. It is returned as a part
# of the label. This is one plain SELECT with few operators: with most drivers it is planned every time, and one
# concat() is planned faster than a chain of "||".
_LABEL: Final = """\
CAST(:head AS text), greatest(CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), :least),
CAST(:tail AS text)"""
_IN_TRANSACTION: Final = f"""\
set_config('application_name', concat(left(current_setting('application_name'), :room), {_LABEL}), true)"""
_IN_SESSION: Final = f"""\
left(set_config('idle_session_timeout', :ttl, false), 0) || set_config('application_name', concat({_LABEL}), false)"""
_TRIED: Final = "SELECT CASE WHEN pg_try_advisory{}(:key) THEN {} END, {}"
_WAITED: Final = """\
WITH old AS MATERIALIZED (SELECT current_setting('lock_timeout') AS v),
limited AS MATERIALIZED (SELECT set_config('lock_timeout', :milliseconds, true) FROM old),
won AS MATERIALIZED (SELECT pg_advisory{}(:key) FROM limited)
SELECT {}, {} FROM won, old"""
_ISOLATION: Final = "current_setting('transaction_isolation')"


def _modes(statement: str, function: str, granted: str, more: str) -> dict[bool, str]:
    return {shared: statement.format(function + "_shared" * shared, granted, more) for shared in (False, True)}


TRY: Final = _modes(_TRIED, "_xact_lock", _IN_TRANSACTION, _ISOLATION)
"""Lock until the end of the transaction; NULL if the lock is not free. By `shared`, as those below."""
WAIT: Final = _modes(_WAITED, "_xact_lock", _IN_TRANSACTION, "set_config('lock_timeout', v, true)")
"""The same with a wait; the transaction's own limit is restored after it."""
TRY_SESSION: Final = _modes(_TRIED, "_lock", _IN_SESSION, "pg_backend_pid()")
"""Lock until the end of the session, which the server ends after a ttl of silence."""
WAIT_SESSION: Final = _modes(_WAITED, "_lock", _IN_SESSION, "pg_backend_pid()")

_KEY: Final = "(CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint)"
_OF_DATABASE: Final = """\
l.locktype = 'advisory' AND l.objsubid = 1
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
_OF_KEY: Final = f"{_OF_DATABASE} AND {_KEY} = CAST(:key AS bigint)"

_HELD_HERE: Final = f"FROM pg_locks AS l WHERE l.granted AND l.pid = pg_backend_pid() AND {_OF_KEY}"
OURS: Final = f"SELECT 1 {_HELD_HERE}"
"""A row if the current session holds the lock."""
ANYBODY: Final = f"SELECT 1 FROM pg_locks AS l WHERE l.granted AND {_OF_KEY}"  # noqa: S608
"""A row if the lock is held."""
_LISTED: Final = f"""\
SELECT {_KEY}, l.granted, l.mode = 'ShareLock', l.pid, coalesce(a.application_name, ''), coalesce(a.query, ''),
coalesce(a.usename, '') || '@' || coalesce(host(a.client_addr), 'local'), current_database(),
CAST(extract(epoch FROM clock_timestamp()) AS float8), CAST(extract(epoch FROM a.query_start) AS float8)
FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid WHERE {_OF_DATABASE} {{}}
ORDER BY l.granted DESC, a.query_start, l.pid"""  # noqa: S608
LISTED: Final = _LISTED.format("")
"""The holders, then the waiters, in the order of their arrival."""
LISTED_KEY: Final = _LISTED.format(f"AND {_KEY} = CAST(:key AS bigint)")
# A role that was assumed with SET ROLE may not end the login's sessions, so it is put off for this statement.
_TERMINATE: Final = """\
WITH login AS MATERIALIZED (SELECT set_config('role', 'none', true) AS role)
SELECT pg_terminate_backend(a.pid) FROM login CROSS JOIN {} WHERE login.role = 'none' AND """
_MICROSECONDS: Final = "CAST(extract(epoch FROM {}) * 1000000 AS bigint)"
_BEGAN: Final = _MICROSECONDS.format("coalesce(a.backend_start, pg_postmaster_start_time())")
"""A role that the session has assumed with SET ROLE may not see when the session began."""
TERMINATE: Final = f"""\
{_TERMINATE.format("pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid")} {_OF_KEY}
AND l.pid = CAST(:pid AS integer)
AND CAST(:began AS bigint) IN ({_BEGAN}, {_MICROSECONDS.format("pg_postmaster_start_time()")})"""
"""End a session that holds or awaits a lock."""
_IS_LABELLED: Final = "position(:label IN ' ' || a.application_name) > 0"
HOLDERS_LABELLED: Final = f"""\
SELECT l.pid FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.granted AND {_OF_KEY} AND {_IS_LABELLED}"""  # noqa: S608
"""The session that holds a lock, found by the label of its grant."""
TERMINATE_LABELLED: Final = f"{_TERMINATE.format('pg_stat_get_activity(CAST(:pid AS integer)) AS a')} {_IS_LABELLED}"
"""End a session that still has the label of a grant: it loses that before the lock."""

PREPARE_SESSION: Final = f"""\
SELECT a.pid, {_BEGAN}, coalesce(current_setting('dlock.line', true), ''), pg_is_in_recovery(),
set_config('dlock.line', 'taken', false), set_config('application_name', 'dlock', false),
set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false)
FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid()"""  # noqa: S608
"""A new session does not have our mark; if it does, a pooler shares it between clients."""
PROVE: Final = """\
SELECT pg_backend_pid(), set_config('application_name', left(CAST(:label AS text), 63), false),
set_config('idle_session_timeout', :ttl, false)"""
_UNLOCK: Final = {False: "pg_advisory_unlock(:key)", True: "pg_advisory_unlock_shared(:key)"}
UNLOCK: Final = {
    shared: f"SELECT set_config('application_name', 'dlock', false), {unlock}" for shared, unlock in _UNLOCK.items()
}
"""Take the label of the grant away, and unlock: what ends the holder by its label must not meet the next holder."""
UNLOCK_IF_OURS: Final = {shared: f"SELECT {unlock} {_HELD_HERE}" for shared, unlock in _UNLOCK.items()}
"""The same without the warning in the server's log of a session that does not hold the lock."""


class LockRow(NamedTuple):
    """One session at one lock."""

    key: int
    granted: bool
    shared: bool
    pid: int
    application_name: str
    query: str
    login: str
    database: str
    now: float
    since: float | None

    def told(self, prefix: str) -> Told:
        """Return what the session reports about this lock."""
        label = in_label(self.application_name, prefix, self.key) or Told()
        comment = in_comment(self.query)
        if comment is None or key_of(comment.name, prefix) != self.key:
            return label
        return comment._replace(token=label.token)


def state_of(name: str, rows: Iterable[LockRow], prefix: str) -> LockState:
    """Return the state of one lock, from its rows in their order."""
    rows = list(rows)
    holders = tuple(_holder(row, prefix) for row in rows if row.granted)
    return LockState(name, holders, tuple(_waiter(row, prefix) for row in rows if not row.granted))


def states_of(rows: Iterable[LockRow], prefix: str) -> list[LockState]:
    """Return the states of all locks whose names the sessions show."""
    by_key, names = defaultdict[int, list[LockRow]](list), dict[int, str]()
    for row in rows:
        by_key[row.key].append(row)
        if name := row.told(prefix).name:
            names[row.key] = name
    return [state_of(name, by_key[key], prefix) for key, name in names.items()]


def owner_of(row: LockRow, prefix: str) -> str:
    """Return the owner that a session reports, otherwise what the database knows about the session."""
    login = {
        "app": row.application_name.partition(prefix)[0].strip() or "session",
        "host": row.login,
        "pid": row.pid,
    }
    return row.told(prefix).owner or json.dumps({**login, "session": f"pg:{row.pid}/{row.database}"})


def _with(row: LockRow, ours: Mapping[int, Reservation]) -> LockRow:
    reservation = ours.get(row.pid)
    return row if reservation is None else row._replace(query=comment(reservation.request))


def _holder(row: LockRow, prefix: str) -> Holder:
    told = row.told(prefix)
    held = max(0.0, row.now - told.token / 1e6) if told.token else None
    return Holder(told.holder or f"{row.pid:08}", told.token, row.shared, owner_of(row, prefix), None, held)


def _waiter(row: LockRow, prefix: str) -> Waiter:
    waited = None if row.since is None else max(0.0, row.now - row.since)
    return Waiter(row.told(prefix).holder or f"{row.pid:08}", row.shared, owner_of(row, prefix), waited)


class Sessions:
    """An operator's view of PostgreSQL's advisory locks, and their forced end, on separate connections."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool, self._prefix = pool, prefix

    async def inspect(self, runtime: Runtime, name: str | None, ours: Sequence[Reservation] = ()) -> list[LockState]:
        """Return the state of one lock, or of all with a visible name; `ours` adds what sessions do not show yet."""
        by_number = {reservation.connection.session.number: reservation for reservation in ours}
        statement = LISTED if name is None else LISTED_KEY
        rows = [_with(LockRow(*row), by_number) for row in await self._ask(runtime, name or "", statement)]
        return states_of(rows, self._prefix) if name is None else [state_of(name, rows, self._prefix)]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the session that holds the lock with this token; return True if it is gone.

        All locks of a server are listed in milliseconds, and meanwhile the session may have released this one and taken
        another. So what is ended is what has the label just then; only microseconds are left.
        """
        params = {"key": key_of(name, self._prefix), "label": f" {self._prefix}{token}#"}

        def terminate(connection: Connection) -> bool:
            holders = connection.execute(HOLDERS_LABELLED, params)
            for (pid,) in holders:
                connection.execute(TERMINATE_LABELLED, {"pid": pid, "label": params["label"]})
            return bool(holders)

        return await self._terminate(runtime, name, terminate)

    async def is_held(self, runtime: Runtime, name: str) -> bool:
        """Return whether a lock is held."""
        return bool(await self._ask(runtime, name, ANYBODY))

    async def end(self, runtime: Runtime, name: str, session: ServerSession) -> bool:
        """End a session if it holds or awaits this lock; return whether it did."""
        params = {"key": key_of(name, self._prefix), "pid": session.number, "began": int(session.proof)}
        return await self._terminate(runtime, name, lambda connection: connection.execute(TERMINATE, params))

    def close(self) -> None:
        """Close idle connections."""
        self._pool.close()

    async def _terminate(self, runtime: Runtime, name: str, terminate: Callable[[Connection], object]) -> bool:
        until, found = runtime.now() + self._pool.timeout, False
        while await self._pool.step(runtime, name, terminate):
            found = True
            if runtime.now() >= until:
                raise BackendUnavailable(name, reason="its holder was asked to end, but is still running")
            await runtime.sleep(0.005)
        return found

    async def _ask(self, runtime: Runtime, name: str, sql: str) -> list[tuple[Any, ...]]:
        params = {"key": key_of(name, self._prefix)}
        return await self._pool.step(runtime, name, lambda connection: connection.execute(sql, params))
