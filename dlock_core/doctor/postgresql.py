"""What makes a PostgreSQL fit for row locks and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlock_core.doctor.asking import clocks, connections, isolation, version, writable
from dlock_core.doctor.fence import fence
from dlock_core.doctor.finding import Finding, ok, unsafe, warning

if TYPE_CHECKING:
    from dlock_core.database import Database

__all__ = ["findings"]

LEAST: Final = (13, 0)
_SETTINGS: Final = """\
SELECT current_setting('server_version'), current_setting('server_version_num'),
upper(current_setting('default_transaction_isolation')), current_setting('fsync'),
current_setting('synchronous_commit'), current_setting('max_connections'),
(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
pg_is_in_recovery(), (SELECT count(*) FROM pg_stat_replication), pg_has_role('pg_read_all_stats', 'member'),
to_regclass('dlock_fence') IS NOT NULL"""


def findings(database: Database) -> list[Finding]:
    """Examine it; raises what its query raises."""
    ((text, number, level, fsync, commit, most, used, replica, replicas, sees, fenced),) = database.query(_SETTINGS)
    return [
        version(f"PostgreSQL {text}", (int(number) // 10_000, int(number) % 10_000), LEAST),
        writable(is_replica=bool(replica)),
        *clocks(database, "SELECT extract(epoch FROM clock_timestamp())"),
        isolation(str(level)),
        ok("row locks", "FOR UPDATE, NO KEY UPDATE, SHARE, KEY SHARE; NOWAIT, SKIP LOCKED, lock_timeout"),
        _durability(str(fsync), str(commit)),
        _replication(int(replicas), str(commit)),
        connections(used, most),
        _sight(sees=bool(sees)),
        *fence(database, exists=bool(fenced)),
    ]


def _durability(fsync: str, commit: str) -> Finding:
    measured = f"fsync {fsync}, synchronous_commit {commit}"
    if fsync == "off":
        reason = "after a crash of the machine, work may be gone whose lock was given on, and files be damaged"
        return unsafe("durability", measured, reason, "set fsync = on")
    if commit == "off":
        reason = "a crash takes back COMMITs of the last moments, after whose locks others have read"
        return warning("durability", measured, reason, "set synchronous_commit = on where leases protect data")
    return ok("durability", measured)


def _replication(replicas: int, commit: str) -> Finding:
    if not replicas:
        return ok("replication", "no replica is connected")
    measured = f"{replicas} connected, synchronous_commit {commit}"
    reason = "row locks and fences are the primary's; what a replica shows is older than the lock: read at the primary"
    return ok("replication", measured, reason)


def _sight(*, sees: bool) -> Finding:
    if sees:
        return ok("sight", "sees the sessions of all users")
    reason = "`dlock list` cannot tell what sessions of other users do"
    return warning("sight", "sees its own sessions only", reason, "GRANT pg_read_all_stats TO the user")
