"""What makes a MySQL or MariaDB fit for row locks and fences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor.asking import clocks, connections, isolation, version, writable
from dlock_core.doctor.fence import fence
from dlock_core.doctor.finding import Finding, ok, unsafe, warning

if TYPE_CHECKING:
    from dlock_core.database import Database

__all__ = ["findings"]

LEAST: Final = {"mariadb": (10, 5), "mysql": (8, 0)}
_VARIABLES: Final = """\
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'tx_isolation', 'transaction_isolation', 'read_only',
'max_connections', 'innodb_flush_log_at_trx_commit', 'wsrep_on')"""
_STATUS: Final = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Threads_connected', 'wsrep_cluster_size')"
_ENGINE: Final = (
    "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'dlock_fence'"
)


def findings(database: Database) -> list[Finding]:
    """Examine it; raises what its query raises."""
    found: dict[str, Any] = {str(name).lower(): value for name, value in database.query(_VARIABLES)}
    found |= {str(name).lower(): value for name, value in database.query(_STATUS)}
    engines = [str(engine) for (engine,) in database.query(_ENGINE)]
    level = str(found.get("transaction_isolation") or found.get("tx_isolation")).replace("-", " ")
    return [
        version(*_version(database.vendor, str(found["version"])), LEAST[database.vendor]),
        writable(is_replica=str(found["read_only"]).upper() not in ("OFF", "0")),
        *clocks(database, "SELECT UNIX_TIMESTAMP(NOW(6))"),
        isolation(level),
        ok("row locks", "FOR UPDATE, LOCK IN SHARE MODE; NOWAIT, SKIP LOCKED, innodb_lock_wait_timeout"),
        _durability(str(found["innodb_flush_log_at_trx_commit"])),
        *_cluster(str(found.get("wsrep_on", "OFF")), int(found.get("wsrep_cluster_size") or 0)),
        connections(found["threads_connected"], found["max_connections"]),
        *[_engine(engine) for engine in engines],
        *fence(database, exists=bool(engines)),
    ]


def _version(vendor: str, text: str) -> tuple[str, tuple[int, ...]]:
    numbers = re.findall(r"\d+", text)[:2]
    return f"{'MariaDB' if vendor == 'mariadb' else 'MySQL'} {text}", tuple(map(int, numbers))


def _durability(flush: str) -> Finding:
    measured = f"innodb_flush_log_at_trx_commit {flush}"
    if flush == "1":
        return ok("durability", measured)
    reason = "a crash takes back COMMITs of the last second, after whose locks others have read"
    return warning("durability", measured, reason, "set it to 1 where leases protect data")


def _cluster(galera: str, size: int) -> list[Finding]:
    if galera.upper() not in ("ON", "1"):
        return []
    reason = "row locks hold on one node only; others find out at COMMIT (error 1213)"
    return [warning("replication", f"Galera, {size} nodes", reason, "write through one node, and retry on deadlock")]


def _engine(engine: str) -> Finding:
    if engine == "InnoDB":
        return ok("engine", "dlock_fence is InnoDB")
    reason = "it has neither transactions nor row locks: the fence refuses nobody"
    return unsafe("engine", f"dlock_fence is {engine}", reason, "ALTER TABLE dlock_fence ENGINE = InnoDB")
