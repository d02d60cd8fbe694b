"""PostgreSQL's statements: each locks, draws the token and tells the lock's name in one request."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ANYBODY",
    "INTRODUCE",
    "LISTED",
    "LISTED_KEY",
    "OURS",
    "PROVE",
    "TERMINATE",
    "TERMINATE_LABELLED",
    "TRY",
    "TRY_SESSION",
    "UNLOCK",
    "WAIT",
    "WAIT_SESSION",
]

# The token is drawn when the lock has been taken, so that whoever takes it next reads a later time. It comes back as a
# part of the label. One plain SELECT, and no more operators than it takes: most drivers have it planned every time.
_LABEL: Final = """\
:head || greatest(CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), :least) || :tail"""
_IN_TRANSACTION: Final = f"""\
set_config('application_name', left(current_setting('application_name'), :room) || {_LABEL}, true)"""
_IN_SESSION: Final = f"""\
left(set_config('idle_session_timeout', :ttl, false), 0) || set_config('application_name', {_LABEL}, false)"""
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
"""Lock until the end of the transaction; NULL where something is in the way. By `shared`, as those below."""
WAIT: Final = _modes(_WAITED, "_xact_lock", _IN_TRANSACTION, "set_config('lock_timeout', v, true)")
"""The same, waiting for it; the transaction's own limit is back after it."""
TRY_SESSION: Final = _modes(_TRIED, "_lock", _IN_SESSION, "pg_backend_pid()")
"""Lock until the end of the session, which the server ends when it has been silent for a ttl."""
WAIT_SESSION: Final = _modes(_WAITED, "_lock", _IN_SESSION, "pg_backend_pid()")

_KEY: Final = "(CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint)"
_OF_DATABASE: Final = """\
l.locktype = 'advisory' AND l.objsubid = 1
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
_OF_KEY: Final = f"{_OF_DATABASE} AND {_KEY} = CAST(:key AS bigint)"

OURS: Final = f"SELECT 1 FROM pg_locks AS l WHERE l.granted AND l.pid = pg_backend_pid() AND {_OF_KEY}"  # noqa: S608
"""A row while the session that asks holds the lock."""
ANYBODY: Final = f"SELECT 1 FROM pg_locks AS l WHERE l.granted AND {_OF_KEY}"  # noqa: S608
"""A row while anybody holds it."""
_LISTED: Final = f"""\
SELECT {_KEY}, l.granted, l.mode = 'ShareLock', l.pid, coalesce(a.application_name, ''), coalesce(a.query, ''),
coalesce(a.usename, '') || '@' || coalesce(host(a.client_addr), 'local'), current_database(),
CAST(extract(epoch FROM clock_timestamp()) AS float8), CAST(extract(epoch FROM a.query_start) AS float8)
FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid WHERE {_OF_DATABASE} {{}}
ORDER BY l.granted DESC, a.query_start, l.pid"""  # noqa: S608
LISTED: Final = _LISTED.format("")
"""Who holds, then who waits, in the order in which they came."""
LISTED_KEY: Final = _LISTED.format(f"AND {_KEY} = CAST(:key AS bigint)")
_TERMINATE: Final = f"""\
SELECT pg_terminate_backend(l.pid) FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE {_OF_KEY} AND """  # noqa: S608
TERMINATE: Final = f"{_TERMINATE} l.pid = CAST(:pid AS integer)"
"""End a session that holds or awaits a lock."""
TERMINATE_LABELLED: Final = f"{_TERMINATE} l.granted AND position(:label IN ' ' || a.application_name) > 0"
"""End the session that holds a lock, found by the label of its grant."""

INTRODUCE: Final = """\
SELECT pg_backend_pid(), coalesce(current_setting('dlock.line', true), ''), pg_is_in_recovery(),
set_config('dlock.line', 'taken', false), set_config('application_name', 'dlock', false),
set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false)"""
"""A new session has no mark of ours; of one that has, a pooler has made several."""
PROVE: Final = """\
SELECT pg_backend_pid(), set_config('application_name', left(CAST(:label AS text), 63), false),
set_config('idle_session_timeout', :ttl, false)"""
UNLOCK: Final = {
    False: "SELECT pg_advisory_unlock(:key)",
    True: "SELECT pg_advisory_unlock_shared(:key)",
}
