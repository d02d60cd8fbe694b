"""Measures the stores and databases that locks depend on, and explains what it finds; changes nothing.

What there is to know about a kind of store stands beside it: a backend may have `async diagnose(runtime)`, which gives
findings and may raise BackendUnavailable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor import databases as mysql
from dlock_core.doctor import databases as postgresql
from dlock_core.doctor import databases as sqlite
from dlock_core.doctor.clocks import round_trip, wall
from dlock_core.doctor.finding import Finding, Level, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable, DLockError
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import Backend
    from dlock_core.sql.database import Database

__all__ = ["Finding", "Level", "examine"]

_DATABASES: Final[dict[str, Callable[[Any], list[Finding]]]] = {
    "postgresql": postgresql.postgresql_findings,
    "mysql": mysql.mysql_findings,
    "mariadb": mysql.mysql_findings,
    "sqlite": sqlite.sqlite_findings,
}


def examine(stores: Iterable[tuple[str, Backend]], databases: Iterable[Database] = ()) -> list[Finding]:
    """Examine stores (alias, backend) and databases, one after the other; what cannot be reached is a finding."""
    found = [replace(one, source=alias) for alias, backend in stores for one in _safely(_store, backend)]
    return found + [
        replace(one, subject="database", source=each.alias) for each in databases for one in _safely(_database, each)
    ]


def _safely(look: Callable[[Any], list[Finding]], at: Any) -> list[Finding]:
    try:
        return look(at)
    except DLockError as error:
        reason = error.reason if isinstance(error, BackendUnavailable) else str(error)
        remedy = "start it, or correct its address and the password"
        return [unsafe("reach", reason, "nobody can take a lock there", remedy)]
    except Exception as error:  # noqa: BLE001 - one patient's surprise is no reason to leave the others alone
        remedy = "report it to whoever wrote this store"
        return [warning("reach", f"the examination failed: {type(error).__name__}", "nothing is known of it", remedy)]


def _store(backend: Any) -> list[Finding]:
    if hasattr(backend, "diagnose"):
        return list(run(backend.diagnose(BLOCKING)))
    sent = wall()
    run(backend.inspect(BLOCKING, "dlock-doctor"))
    return [ok("reach", "it answers"), round_trip(wall() - sent)]


def _database(database: Database) -> list[Finding]:
    look = _DATABASES.get(database.vendor)
    if look is None:
        known = ", ".join(_DATABASES)
        return [warning("vendor", database.vendor, "dlock does not know this database", f"use one of {known}")]
    return look(database)
