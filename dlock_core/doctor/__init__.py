"""Measures the stores and databases that locks depend on, and explains what it finds; it changes nothing.

Each kind of store examines itself: a backend may have `async diagnose(runtime)`, which returns a list of findings and
may raise BackendUnavailable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor.clocks import round_trip, wall
from dlock_core.doctor.databases import mysql_findings, postgresql_findings, sqlite_findings
from dlock_core.doctor.finding import Finding, Level, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable, DLockError
from dlock_core.runtime import BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import Backend
    from dlock_core.sql.database import Database

__all__ = ["Finding", "Level", "examine"]

_DATABASES: Final[dict[str, Callable[[Any], list[Finding]]]] = {
    "postgresql": postgresql_findings,
    "mysql": mysql_findings,
    "mariadb": mysql_findings,
    "sqlite": sqlite_findings,
}


def examine(stores: Iterable[tuple[str, Backend]], databases: Iterable[Database] = ()) -> list[Finding]:
    """Examine stores and databases, one after the other, and return the findings.

    Raises nothing for a store or database that cannot be reached: that is a finding, too.

    Args:
        stores: pairs of an alias and a backend.
        databases: what `databases()` of `django_dlock.inspect`, or `database()` of `sqla_dlock.inspect`, returns.
    """
    found = [replace(one, source=alias) for alias, backend in stores for one in _safely(_store, backend)]
    return found + [
        replace(one, subject="database", source=each.alias) for each in databases for one in _safely(_database, each)
    ]


def _safely(look: Callable[[Any], list[Finding]], at: Any) -> list[Finding]:
    try:
        return look(at)
    except DLockError as error:
        reason = error.reason if isinstance(error, BackendUnavailable) else str(error)
        remedy = "start it, or correct its address and password"
        return [unsafe("reach", reason, "no process can acquire a lock there", remedy)]
    except Exception as error:  # noqa: BLE001 - a defect in one store must not hide the others
        remedy = "report it to the author of this store"
        return [
            warning(
                "reach", f"the examination failed: {type(error).__name__}", "it was not examined to the end", remedy
            )
        ]


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
        return [warning("vendor", database.vendor, "dlock does not support this database", f"use one of {known}")]
    return look(database)
