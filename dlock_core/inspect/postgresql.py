"""Row locks and advisory locks of PostgreSQL, as far as it reports them.

PostgreSQL stores a row lock in the row itself, not in pg_locks. Its holder is reported only while another session waits
for it; of the other row locks only the table is known. (Mechanisms: the manual on explicit locking and on pg_locks;
README.tuplock in its source.)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlock_core.backends.advisory.labels import PREFIX, in_comment, in_label, key_of
from dlock_core.errors import BackendUnavailable
from dlock_core.inspect.sessions import AwaitedLock, DatabaseLocks, DatabaseSession, HeldLock, make_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dlock_core.sql.database import Database

__all__ = ["locks"]

MAX_RESOLVED_ROWS: Final = 50
"""Rows with waiters whose keys are looked up by their ctids; the others are listed by ctid."""

_LOCKS: Final = """\
WITH l AS MATERIALIZED (
SELECT * FROM pg_locks WHERE pid IS DISTINCT FROM pg_backend_pid()
AND (database IS NULL OR database IN (SELECT oid FROM pg_database WHERE datname = current_database())))
SELECT l.pid, l.virtualtransaction, l.locktype, l.mode, l.granted, CAST(CAST(l.relation AS regclass) AS text),
CAST(l.relation AS bigint), CAST('(' || l.page || ',' || l.tuple || ')' AS text), CAST(l.transactionid AS text),
CAST(l.classid AS bigint), CAST(l.objid AS bigint), l.objsubid,
CAST(extract(epoch FROM clock_timestamp() - CAST(to_jsonb(l)->>'waitstart' AS timestamptz)) AS float8),
CASE WHEN NOT l.granted THEN pg_blocking_pids(l.pid) END
FROM l LEFT JOIN pg_class c ON c.oid = l.relation
WHERE NOT l.granted OR l.locktype IN ('tuple', 'advisory') OR (l.locktype = 'relation' AND (
(l.mode IN ('RowShareLock', 'RowExclusiveLock') AND c.relkind IN ('r', 'p') AND l.relation >= 16384)
OR l.relation IN (SELECT relation FROM l WHERE locktype = 'relation' AND NOT granted)))"""
# The oids below 16384 are the system's own tables. PostgreSQL 13 has no waitstart: through to_jsonb it is NULL there.

_SESSIONS: Final = """\
SELECT pid, datname, usename, host(client_addr), application_name, state, left(query, 500),
CAST(extract(epoch FROM clock_timestamp() - xact_start) AS float8),
CAST(extract(epoch FROM clock_timestamp() - state_change) AS float8), current_database()
FROM pg_stat_activity WHERE datname IS NULL OR datname = current_database()"""

_PREPARED: Final = """\
SELECT CAST(transaction AS text), gid, owner, CAST(extract(epoch FROM clock_timestamp() - prepared) AS float8)
FROM pg_prepared_xacts WHERE database = current_database()"""

_KEY: Final = """\
SELECT string_agg(quote_ident(a.attname), ' || '','' || ' ORDER BY array_position(CAST(i.indkey AS int2[]), a.attnum))
FROM pg_index AS i JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)
WHERE i.indisprimary AND i.indrelid = CAST(CAST(%s AS text) AS regclass)"""

_ROW_LOCKS_BY_MODE: Final = {
    "AccessShareLock": "FOR KEY SHARE",
    "RowShareLock": "FOR SHARE",
    "ExclusiveLock": "FOR NO KEY UPDATE",
    "AccessExclusiveLock": "FOR UPDATE",
}
"""The row lock that each mode of a tuple lock stands for."""

_MODES_BY_STRENGTH: Final = (
    "", "AccessShareLock", "RowShareLock", "RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareLock",
    "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock",
)  # fmt: skip


class _Lock(NamedTuple):
    pid: int | None
    virtual: str
    type: str
    mode: str
    granted: bool
    table: str | None
    relation: int | None
    ctid: str | None
    transaction: str | None
    classid: int | None
    objid: int | None
    objsubid: int | None
    waited: float | None
    blockers: list[int] | None


class _Names(NamedTuple):
    """The names of rows, by table and ctid, and of advisory locks, by their keys."""

    rows: Mapping[tuple[Any, ...], str]
    advisory: Mapping[str, str]

    def of(self, lock: _Lock) -> str:
        if lock.type == "advisory":
            return self.advisory.get(_key(lock), _key(lock))
        return self.rows.get((lock.table, lock.ctid)) or f"{lock.table} {lock.ctid}"


def locks(database: Database) -> DatabaseLocks:
    """Read the locks and their waiters; raises BackendUnavailable. What the user may not see is left out."""
    found = [_Lock(*row) for row in database.query(_LOCKS)]
    sessions, actors = _sessions(database, found)
    names = _Names(_rows(database, found), _advisory_names(found, actors, sessions))
    wanted = list(_wanted(found, actors, names))
    return make_entries(database.alias, sessions, wanted, _held(found, actors, sessions, wanted, names))


def _sessions(database: Database, found: list[_Lock]) -> tuple[dict[str, DatabaseSession], dict[object, str]]:
    """Return the sessions, and the actors by pid, or by transaction number for prepared transactions."""
    sessions, actors = {}, {}
    for pid, name, user, client, app, state, query, age, idle, here in database.query(_SESSIONS):
        actor = f"pg:{pid}/{name or here}"
        owner = {"pid": pid, "user": user, "client": client, "application_name": app, "state": state, "query": query}
        title = f"{(app or '').partition(' dlock:')[0] or 'session'} pid {pid} ({user or 'system'}@{client or 'local'})"
        sessions[actor] = DatabaseSession(actor, title, owner, age if age is not None else idle)
        actors[pid] = actor
    if any(lock.pid is None or 0 in (lock.blockers or ()) for lock in found):
        for number, gid, user, age in database.query(_PREPARED):
            actor = f"pg:prepared {gid}"
            sessions[actor] = DatabaseSession(
                actor, f"prepared transaction {gid} of {user}", {"gid": gid, "user": user}, age
            )
            actors[number] = actor
    return sessions, actors


def _wanted(found: list[_Lock], actors: Mapping[object, str], names: _Names) -> Iterator[AwaitedLock]:
    tuples = {lock.pid: lock for lock in found if lock.type == "tuple"}
    for lock in found:
        if lock.granted or lock.pid not in actors:
            continue
        row = tuples.get(lock.pid)
        blocked_by = tuple(_actor(pid, lock, actors) for pid in lock.blockers or ())
        actor = actors[lock.pid]
        if lock.type == "advisory":
            yield AwaitedLock(actor, "advisory", names.of(lock), _advisory(lock), lock.waited, blocked_by)
        elif row is not None:
            yield AwaitedLock(
                actor, "row", names.of(row), _ROW_LOCKS_BY_MODE.get(row.mode, row.mode), lock.waited, blocked_by
            )
        else:
            yield AwaitedLock(actor, "row", _other(lock, blocked_by), lock.mode, lock.waited, blocked_by)


def _actor(pid: int, lock: _Lock, actors: Mapping[object, str]) -> str:
    """Return the actor that blocks a lock; pg_blocking_pids() reports a prepared transaction as pid 0."""
    if pid:
        return actors.get(pid, f"pg:{pid}")
    return actors.get(lock.transaction, "pg:a prepared transaction")


def _other(lock: _Lock, blocked_by: tuple[str, ...]) -> str:
    """Return the name of a lock that is not on a row: on a whole table, or on the end of a transaction."""
    if lock.type == "relation":
        return f"table {lock.table}"
    return f"transaction {lock.transaction}" if lock.transaction else f"{lock.type} of {', '.join(blocked_by)}"


def _held(
    found: list[_Lock],
    actors: Mapping[object, str],
    sessions: Mapping[str, DatabaseSession],
    wanted: Iterable[AwaitedLock],
    names: _Names,
) -> Iterator[HeldLock]:
    """Yield advisory locks, locks of whole tables that have waiters, and the tables in which rows are locked."""
    contended = {one.name for one in wanted}
    listed = {(actor, one.name.partition(" ")[0]) for one in wanted for actor in (one.actor, *one.blocked_by)}
    modes: dict[tuple[str, str], str] = defaultdict(str)
    for lock in found:
        actor = actors.get(lock.pid or lock.virtual.partition("/")[2])
        if actor is None or not lock.granted:
            continue
        if lock.type == "advisory":
            yield HeldLock(actor, "advisory", names.of(lock), _advisory(lock))
        elif lock.type == "relation" and lock.table is not None:
            modes[actor, lock.table] = max(modes[actor, lock.table], lock.mode, key=_strength)
    for (actor, table), mode in modes.items():
        age = sessions[actor].transaction_age
        if f"table {table}" in contended:
            yield HeldLock(actor, "row", f"table {table}", mode, age)
        elif (actor, table) not in listed and table != "dlock_fence" and mode in ("RowShareLock", "RowExclusiveLock"):
            yield HeldLock(actor, "row", table, mode, age)


def _strength(mode: str) -> int:
    return _MODES_BY_STRENGTH.index(mode) if mode in _MODES_BY_STRENGTH else 0


def _key(lock: _Lock) -> str:
    """Return the key of an advisory lock in the form of the call that took it: one number, or two."""
    high, low = lock.classid or 0, lock.objid or 0
    if lock.objsubid == 2:
        return f"{_signed(high, 32)},{_signed(low, 32)}"
    return str(_signed(high << 32 | low, 64))


def _signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


def _advisory_names(
    found: list[_Lock], actors: Mapping[object, str], sessions: Mapping[str, DatabaseSession]
) -> dict[str, str]:
    """Return the names of advisory locks that a session's label or query states, where the lock's key proves them."""
    names = {}
    for lock in found:
        if lock.type == "advisory" and lock.objsubid == 1 and lock.pid in actors:
            owner, key = sessions[actors[lock.pid]].owner, int(_key(lock))
            for label in (in_label(owner["application_name"] or "", PREFIX, key), in_comment(owner["query"] or "")):
                if label is not None and key_of(label.name) == key:
                    names[str(key)] = label.name
    return names


def _advisory(lock: _Lock) -> str:
    return "shared" if lock.mode == "ShareLock" else "exclusive"


def _rows(database: Database, found: list[_Lock]) -> dict[tuple[Any, ...], str]:
    """Return the names of the rows with waiters, by table and ctid."""
    rows = {(lock.table, lock.ctid): None for lock in found if lock.type == "tuple" and lock.table}
    names, closed = {}, set()
    for table, ctid in list(rows)[:MAX_RESOLVED_ROWS]:
        try:
            if table not in closed:
                names[table, ctid] = f"{table} {_primary_key(database, str(table), ctid)}"
        except BackendUnavailable:  # The user may not read the table, or it is locked as a whole.
            closed.add(table)
        except LookupError:  # The table has no primary key, or the row is gone.
            continue
    return names


def _primary_key(database: Database, table: str, ctid: str | None) -> str:
    ((columns,),) = database.query(_KEY, (table,))
    if not columns:
        raise LookupError(table)
    # Concatenating is safe: the catalogue returns the names quoted.
    rows = database.query(f"SELECT CAST({columns} AS text) FROM {table} WHERE ctid = CAST(%s AS tid)", (ctid,))  # noqa: S608
    return str(rows[0][0])
