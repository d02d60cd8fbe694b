"""Examines databases for row locks, fences and lease tables: PostgreSQL, MariaDB and MySQL, SQLite."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor.clocks import SAMPLE_COUNT, Sample, clock, round_trip, timing, wall
from dlock_core.doctor.finding import Finding, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from dlock_core.sql.database import Database

__all__ = ["mysql_findings", "postgresql_findings", "sqlite_findings"]


MIN_MYSQL_VERSION: Final = {"mariadb": (10, 5), "mysql": (8, 0)}
_VARIABLES: Final = """\
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'tx_isolation', 'transaction_isolation', 'read_only',
'max_connections', 'innodb_flush_log_at_trx_commit', 'wsrep_on')"""
_STATUS: Final = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Threads_connected', 'wsrep_cluster_size')"
_ENGINE: Final = (
    "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'dlock_fence'"
)


def mysql_findings(database: Database) -> list[Finding]:
    """Examine a database; raises what its `query` raises."""
    found: dict[str, Any] = {str(name).lower(): value for name, value in database.query(_VARIABLES)}
    found |= {str(name).lower(): value for name, value in database.query(_STATUS)}
    engines = [str(engine) for (engine,) in database.query(_ENGINE)]
    level = str(found.get("transaction_isolation") or found.get("tx_isolation")).replace("-", " ")
    return [
        version(*_version(database.vendor, str(found["version"])), MIN_MYSQL_VERSION[database.vendor]),
        writable(is_replica=str(found["read_only"]).upper() not in ("OFF", "0")),
        *clocks(database, "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6"),
        isolation(level),
        ok("row locks", "FOR UPDATE, LOCK IN SHARE MODE; NOWAIT, SKIP LOCKED, innodb_lock_wait_timeout"),
        _mysql_durability(str(found["innodb_flush_log_at_trx_commit"])),
        *_cluster(str(found.get("wsrep_on", "OFF")), int(found.get("wsrep_cluster_size") or 0)),
        connections(found["threads_connected"], found["max_connections"]),
        *[_engine(engine) for engine in engines],
        *fence(database, exists=bool(engines)),
    ]


def _version(vendor: str, text: str) -> tuple[str, tuple[int, ...]]:
    numbers = re.findall(r"\d+", text)[:2]
    return f"{'MariaDB' if vendor == 'mariadb' else 'MySQL'} {text}", tuple(map(int, numbers))


def _mysql_durability(flush: str) -> Finding:
    measured = f"innodb_flush_log_at_trx_commit {flush}"
    if flush == "1":
        return ok("durability", measured)
    reason = "a crash undoes the COMMITs of the last second, although later lock holders have read their results"
    return warning("durability", measured, reason, "set it to 1 where leases protect data")


def _cluster(galera: str, size: int) -> list[Finding]:
    if galera.upper() not in ("ON", "1"):
        return []
    reason = "row locks hold on one node only; a conflict with another node shows only at COMMIT (error 1213)"
    return [warning("replication", f"Galera, {size} nodes", reason, "write through one node, and retry on deadlock")]


def _engine(engine: str) -> Finding:
    if engine == "InnoDB":
        return ok("engine", "dlock_fence is InnoDB")
    reason = "this engine has neither transactions nor row locks, so the fence refuses nothing"
    return unsafe("engine", f"dlock_fence is {engine}", reason, "ALTER TABLE dlock_fence ENGINE = InnoDB")


MIN_POSTGRESQL_VERSION: Final = (13, 0)
_SETTINGS: Final = """\
SELECT current_setting('server_version'), current_setting('server_version_num'),
upper(current_setting('default_transaction_isolation')), current_setting('fsync'),
current_setting('synchronous_commit'), current_setting('max_connections'),
(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
pg_is_in_recovery(), (SELECT count(*) FROM pg_stat_replication), pg_has_role('pg_read_all_stats', 'member'),
to_regclass('dlock_fence') IS NOT NULL"""


def postgresql_findings(database: Database) -> list[Finding]:
    """Examine a database; raises what its `query` raises."""
    ((text, number, level, fsync, commit, limit, used, replica, replicas, sees, fenced),) = database.query(_SETTINGS)
    return [
        version(f"PostgreSQL {text}", (int(number) // 10_000, int(number) % 10_000), MIN_POSTGRESQL_VERSION),
        writable(is_replica=bool(replica)),
        *clocks(database, "SELECT extract(epoch FROM clock_timestamp())"),
        isolation(str(level)),
        ok("row locks", "FOR UPDATE, NO KEY UPDATE, SHARE, KEY SHARE; NOWAIT, SKIP LOCKED, lock_timeout"),
        _postgresql_durability(str(fsync), str(commit)),
        _replication(int(replicas), str(commit)),
        connections(used, limit),
        _sight(sees=bool(sees)),
        *fence(database, exists=bool(fenced)),
    ]


def _postgresql_durability(fsync: str, commit: str) -> Finding:
    measured = f"fsync {fsync}, synchronous_commit {commit}"
    if fsync == "off":
        reason = "a crash of the machine can lose committed work whose lock has passed on, and damage files"
        return unsafe("durability", measured, reason, "set fsync = on")
    if commit == "off":
        reason = "a crash undoes the latest COMMITs, although later lock holders have read their results"
        return warning("durability", measured, reason, "set synchronous_commit = on where leases protect data")
    return ok("durability", measured)


def _replication(replicas: int, commit: str) -> Finding:
    if not replicas:
        return ok("replication", "no replica is connected")
    measured = f"{replicas} connected, synchronous_commit {commit}"
    reason = "only the primary has row locks and fences, and a replica may show older data: read from the primary"
    return ok("replication", measured, reason)


def _sight(*, sees: bool) -> Finding:
    if sees:
        return ok("sight", "sees the sessions of all users")
    reason = "`dlock list` cannot show what the sessions of other users do"
    return warning("sight", "sees its own sessions only", reason, "GRANT pg_read_all_stats TO the user")


MIN_SQLITE_VERSION: Final = (3, 31)
"""Django 5.2 requires the same; the fence's upserts need 3.24."""


def sqlite_findings(database: Database) -> list[Finding]:
    """Examine a database; raises what its `query` raises."""
    ((text,),) = database.query("SELECT sqlite_version()")
    ((journal,),) = database.query("PRAGMA journal_mode")
    tables = database.query("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'dlock_fence'")
    return [
        version(f"SQLite {text}", tuple(map(int, str(text).split("."))), MIN_SQLITE_VERSION),
        _journal(str(journal)),
        ok("row locks", "none; one transaction writes at a time if it begins with BEGIN IMMEDIATE"),
        *fence(database, exists=bool(tables)),
    ]


def _journal(mode: str) -> Finding:
    if mode.lower() == "wal":
        return ok("journal", "WAL: readers and the writer do not wait for each other")
    reason = "readers make the writer wait, and it holds its lock while it waits"
    return warning("journal", mode.upper(), reason, "PRAGMA journal_mode=WAL, once per file")


MAX_FENCE_ROWS: Final = 1_000_000
"""Rows of the fence table from which purging is advised."""
FENCE_TABLE: Final = "dlock_fence"


def fence(database: Database, *, exists: bool) -> list[Finding]:
    """Judge the fence table."""
    if not exists:
        reason = "a fenced lock fails in this database"
        return [warning("fence", f"no table {FENCE_TABLE}", reason, database.fence_remedy)]
    try:
        ((rows, floors),) = database.query(f"SELECT count(*), count(CASE WHEN name = '' THEN 1 END) FROM {FENCE_TABLE}")  # noqa: S608
    except BackendUnavailable as error:
        remedy = "GRANT SELECT, INSERT, UPDATE, DELETE on it to the program's user"
        return [warning("fence", error.reason, "a fenced lock needs this table, and dlock could not read it", remedy)]
    return [_size(int(rows) - int(floors)), *_floor(database, is_there=bool(floors))]


def _size(rows: int) -> Finding:
    measured = f"{rows} row{'s' * (rows != 1)} in {FENCE_TABLE}"
    if rows < MAX_FENCE_ROWS:
        return ok("fence", measured)
    reason = "every name that was ever locked leaves a row behind"
    return warning("fence", measured, reason, "run `dlock purge` once a day")


def _floor(database: Database, *, is_there: bool) -> list[Finding]:
    if is_there or database.vendor not in ("mysql", "mariadb"):
        return []
    reason = "every new name looks for this row; if it is missing, that locks a gap, and new names wait for each other"
    remedy = f"INSERT INTO {FENCE_TABLE} (name, token, holder, s_token) VALUES ('', 0, '', 0)"  # noqa: S608 - shown, not sent
    return [warning("floor", f"{FENCE_TABLE} has no row named ''", reason, remedy)]


MAX_CONNECTION_SHARE: Final = 0.8
"""Share of its connections in use from which a server may soon refuse new ones."""
CLOCK_REASON: Final = "`dlock purge` and the times in listings compare its clock with ours; no lock depends on them"


def clocks(database: Database, query: str) -> list[Finding]:
    """Measure the round trip and the clock by a query for the seconds since 1970."""
    database.query(query)  # Connects, so that the samples do not include it.
    found = timing([_sample(database, query) for _ in range(SAMPLE_COUNT)])
    return [round_trip(found.round_trip), clock(found, CLOCK_REASON)]


def _sample(database: Database, query: str) -> Sample:
    sent = wall()
    ((theirs,),) = database.query(query)
    return Sample(sent, wall(), float(theirs))


def version(text: str, found: tuple[int, ...], minimum: tuple[int, ...]) -> Finding:
    """Judge the server's version."""
    if found >= minimum:
        return ok("version", text)
    wanted = ".".join(map(str, minimum))
    return unsafe(
        "version", text, "dlock's statements need features that this version lacks", f"upgrade it to {wanted} or newer"
    )


def isolation(level: str) -> Finding:
    """Judge the isolation level of transactions that do not set one."""
    if level in ("READ COMMITTED", "READ UNCOMMITTED"):
        return ok("isolation", f"{level} unless the program says otherwise")
    reason = "at this level a lock acquired after a transaction's first read protects nothing (SnapshotTooOld)"
    remedy = "let the program ask for READ COMMITTED (Django does on MySQL), or acquire every lock before BEGIN"
    return warning("isolation", f"{level} unless the program says otherwise", reason, remedy)


def connections(used: Any, limit: Any) -> Finding:
    """Judge whether the server has connections to spare."""
    measured = f"{int(used)} of {int(limit)} connections in use"
    if int(used) < MAX_CONNECTION_SHARE * int(limit):
        return ok("connections", measured)
    reason = "a holder that gets no connection waits while it holds its lock, and so do the waiters for that lock"
    return warning("connections", measured, reason, "use smaller pools, or raise max_connections")


def writable(*, is_replica: bool) -> Finding:
    """Judge whether the server accepts writes."""
    if not is_replica:
        return ok("role", "accepts writes")
    reason = "a replica accepts neither row locks nor the fence"
    return unsafe("role", "a replica, or read-only", reason, "connect to the primary")
