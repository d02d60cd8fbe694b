"""Django's part of `dlock doctor` and `dlock purge`; it works without the extra `cli`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core import checks
from django.db import connections

from django_dlock.apps import TAG
from django_dlock.checks.settings import MIDDLEWARE
from dlock_core.doctor.finding import Finding, Level, ok, warning
from dlock_core.transactions import fence_sql

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.core.checks import CheckMessage

__all__ = ["findings", "purge"]

FINDING_SOURCE: Final = "Django"


def findings(aliases: Iterable[str]) -> list[Finding]:
    """Examine the settings, and those of these databases; no server is queried."""
    found = [replace(one, subject="settings", source=FINDING_SOURCE) for one in (*_checks(), *_middleware())]
    return found + [replace(one, subject="database", source=alias) for alias in aliases for one in _database(alias)]


def _checks() -> list[Finding]:
    messages = [
        message
        for message in checks.run_checks(tags=[TAG], include_deployment_checks=True)
        if not message.is_silenced()
    ]
    return [_finding(message) for message in messages] or [ok("checks", "dlock's system checks report nothing")]


def _finding(message: CheckMessage) -> Finding:
    level: Level = "unsafe" if message.is_serious() else "warning" if message.level >= checks.WARNING else "ok"
    measured = f"{message.obj}: {message.msg}" if message.obj else message.msg
    return Finding(str(message.id), level, measured, remedy=message.hint or "")


def _middleware() -> list[Finding]:
    """Report the position of LockMiddleware; the check W001 reports when it is missing."""
    paths = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in paths:
        return []
    index = paths.index(MIDDLEWARE)
    before = ", ".join(path.rpartition(".")[2] for path in paths[:index]) or "none"
    return [ok("middleware", f"LockMiddleware is number {index + 1} of {len(paths)}, after {before}")]


def _database(alias: str) -> list[Finding]:
    options = connections[alias].settings_dict
    measured = "on" if options["ATOMIC_REQUESTS"] else "off"
    reason = "decorate views with @locked: it acquires the lease before BEGIN and releases it after COMMIT"
    return [ok("ATOMIC_REQUESTS", measured, reason if options["ATOMIC_REQUESTS"] else ""), _pool(options)]


def _pool(database: dict[str, Any]) -> Finding:
    pool = database.get("OPTIONS", {}).get("pool")
    if not pool:
        age = database["CONN_MAX_AGE"]
        kept = "until it fails" if age is None else f"for {age} s" if age else "for one request"
        return ok("pool", f"none; each thread keeps its connection {kept}")
    size = pool.get("max_size") or pool.get("min_size", 4) if isinstance(pool, dict) else 4
    measured = f"up to {size} connections in each process"
    if size > 1:
        return ok("pool", measured, "a request that waits for a connection while it holds a lock makes others wait")
    reason = "all requests of a process wait for one connection, some of them while they hold a lock"
    return warning("pool", measured, reason, "give the pool as many connections as the process has threads")


def purge(using: str, days: int) -> int:
    """Purge the fence table of a database, outside a transaction; return the number of removed rows.

    See `dlock_core.transactions.fence_sql.purge`.
    """
    connection = connections[using]
    vendor = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor

    def execute(sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    return fence_sql.purge(execute, vendor, days)
