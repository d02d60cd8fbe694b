"""Row locks and user locks of MariaDB and MySQL, which show them to users with the PROCESS privilege only.

Both report the key of a row with a waiter. Of the other row locks only the number is read, because MySQL would have to
list every one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backends.advisory.labels import PREFIX, SESSION_PREFIX, in_comment
from dlock_core.inspect.sessions import AwaitedLock, DatabaseLocks, DatabaseSession, HeldLock, make_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlock_core.sql.database import Database

__all__ = ["locks"]

_SESSIONS: Final = """\
SELECT p.id, p.user, p.host, p.db, p.command, LEFT(p.info, 500), p.state, p.time, DATABASE(), t.trx_rows_locked,
TIMESTAMPDIFF(MICROSECOND, t.trx_started, NOW(6)) / 1e6
FROM information_schema.processlist p LEFT JOIN information_schema.innodb_trx t ON t.trx_mysql_thread_id = p.id
WHERE p.id <> CONNECTION_ID()"""

_WAITS: Final = {
    "mariadb": """\
SELECT r.trx_mysql_thread_id, b.trx_mysql_thread_id, l.lock_table, l.lock_index, l.lock_mode, l.lock_data,
CONCAT_WS(':', l.lock_space, l.lock_page, l.lock_rec),
TIMESTAMPDIFF(MICROSECOND, r.trx_wait_started, NOW(6)) / 1e6
FROM information_schema.innodb_lock_waits w
JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_trx_id
JOIN information_schema.innodb_trx b ON b.trx_id = w.blocking_trx_id
JOIN information_schema.innodb_locks l ON l.lock_id = w.requested_lock_id""",
    "mysql": """\
SELECT r.trx_mysql_thread_id, b.trx_mysql_thread_id, CONCAT(l.object_schema, '.', l.object_name), l.index_name,
l.lock_mode, l.lock_data, l.engine_lock_id, TIMESTAMPDIFF(MICROSECOND, r.trx_wait_started, NOW(6)) / 1e6
FROM performance_schema.data_lock_waits w
JOIN information_schema.innodb_trx r ON r.trx_id = w.requesting_engine_transaction_id
JOIN information_schema.innodb_trx b ON b.trx_id = w.blocking_engine_transaction_id
JOIN performance_schema.data_locks l ON l.engine_lock_id = w.requesting_engine_lock_id""",
}

_USER_LOCKS: Final = {
    "mariadb": """\
SELECT thread_id, table_schema FROM information_schema.metadata_lock_info WHERE lock_type = 'User lock'""",
    "mysql": """\
SELECT t.processlist_id, m.object_name FROM performance_schema.metadata_locks m
JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
WHERE m.object_type = 'USER LEVEL LOCK' AND m.lock_status = 'GRANTED'""",
}
_KNOWS_USER_LOCKS: Final = {
    "mariadb": """\
SELECT 1 FROM information_schema.plugins WHERE plugin_name = 'METADATA_LOCK_INFO' AND plugin_status = 'ACTIVE'""",
    "mysql": "SELECT 1",
}

_GET_LOCK: Final = re.compile(r"\bGET_LOCK\s*\(\s*(?:_\w+\s*)?'((?:[^'\\]|\\.|'')*)'", re.IGNORECASE)
"""MariaDB shows the name of a user lock with a waiter only in the statement that waits."""

_ESCAPED: Final = re.compile(r"\\(.)|'(?=')")


def locks(database: Database) -> DatabaseLocks:
    """Read the locks and their waiters; raises BackendUnavailable, also without the privilege."""
    rows = database.query(_SESSIONS)
    sessions = {f"my:{row[0]}/{row[3]}": _session(row) for row in rows}
    actors = {row[0]: f"my:{row[0]}/{row[3]}" for row in rows}
    waits = [*_row_waits(database, actors), *_user_waits(database, rows, actors)]
    held = [*_user_locks(database, actors), *_row_locks(rows, actors, waits)]
    return make_entries(database.alias, sessions, waits, held)


def _session(row: tuple[Any, ...]) -> DatabaseSession:
    pid, user, host, schema, command, query, *_ = row
    state = {"Sleep": "idle" if row[10] is None else "idle in transaction", "Query": "active"}.get(command, command)
    client = str(host).partition(":")[0]
    owner = {"pid": pid, "user": user, "client": client, "state": state, "query": query}
    return DatabaseSession(f"my:{pid}/{schema}", f"session {pid} ({user}@{client})", owner, _seconds(row[10]))


def _seconds(value: Any) -> float | None:
    return None if value is None else max(0.0, float(value))


def _row_waits(database: Database, actors: dict[int, str]) -> Iterator[AwaitedLock]:
    blockers: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    here = str(database.query("SELECT DATABASE()")[0][0])
    for waiter, blocker, table, index, mode, data, address, waited in database.query(_WAITS[database.vendor]):
        if waiter in actors:
            name = _name(str(table).replace("`", "").removeprefix(f"{here}."), index, data, address)
            blockers[actors[waiter], name, mode, _seconds(waited)].append(actors.get(blocker, f"my:{blocker}"))
    for (actor, name, mode, waited), blocked_by in blockers.items():
        words = "shared" if str(mode).startswith("S") else "exclusive"
        yield AwaitedLock(actor, "row", name, words, waited, tuple(blocked_by))


def _name(table: str, index: str | None, data: str | None, address: str) -> str:
    """Return the name of a row: its primary key, else the locked entry of an index, else its physical address."""
    if index is None:
        return f"table {table}"
    if data is None:
        return f"{table} at {address}"
    return f"{table} {data.strip(chr(39))}" if index == "PRIMARY" else f"{table} {index} {data}"


def _user_waits(database: Database, rows: Iterable[tuple[Any, ...]], actors: dict[int, str]) -> Iterator[AwaitedLock]:
    for row in rows:
        found = _GET_LOCK.search(str(row[5])) if row[6] == "User lock" else None
        if found is not None:
            word = _ESCAPED.sub(r"\1", found[1])
            ((holder,),) = database.query("SELECT IS_USED_LOCK(%s)", (word,))
            blocked_by = () if holder is None else (actors.get(holder, f"my:{holder}"),)
            label = in_comment(str(row[5]))
            name = label.name if label is not None else _as_reported(database, word).removeprefix(PREFIX)
            yield AwaitedLock(actors[row[0]], "advisory", name, "exclusive", _seconds(row[7]), blocked_by)


def _as_reported(database: Database, word: str) -> str:
    """Return a user lock's name as the server reports it; MySQL ignores case, and reports lower case."""
    return word.lower() if database.vendor == "mysql" else word


def _user_locks(database: Database, actors: dict[int, str]) -> Iterator[HeldLock]:
    if database.query(_KNOWS_USER_LOCKS[database.vendor]):
        for pid, name in database.query(_USER_LOCKS[database.vendor]):
            if pid in actors and not name.startswith(SESSION_PREFIX):
                yield HeldLock(actors[pid], "advisory", name.removeprefix(PREFIX), "exclusive")


def _row_locks(
    rows: Iterable[tuple[Any, ...]], actors: dict[int, str], waits: Iterable[AwaitedLock]
) -> Iterator[HeldLock]:
    """Yield the transactions that have locked rows without waiters."""
    listed = {actor for one in waits for actor in (one.actor, *one.blocked_by)}
    for row in rows:
        actor, number = actors[row[0]], row[9]
        if number and actor not in listed:
            name = f"{number} row{'s' if number > 1 else ''} of session {row[0]}"
            yield HeldLock(actor, "row", name, "exclusive", _seconds(row[10]))
