"""What Django gives to `dlock doctor` and `dlock purge`: system checks, database settings, and the fence's alias."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core import checks
from django.db import connections

from django_dlock.checks.settings import MIDDLEWARE, TAG
from dlock_core.doctor.finding import Finding, Level, ok, warning
from dlock_core.transactions import fence_sql

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.core.checks import CheckMessage

__all__ = ["findings"]

SOURCE: Final = "Django"


def findings(aliases: Iterable[str]) -> list[Finding]:
    """Examine the settings, and those of these databases; nothing is asked of a server."""
    found = [replace(one, subject="settings", source=SOURCE) for one in (*_checks(), *_middleware())]
    return found + [replace(one, subject="database", source=alias) for alias in aliases for one in _database(alias)]


def _checks() -> list[Finding]:
    messages = [
        message
        for message in checks.run_checks(tags=[TAG], include_deployment_checks=True)
        if not message.is_silenced()
    ]
    return [_finding(message) for message in messages] or [ok("checks", "none of dlock's system checks complains")]


def _finding(message: CheckMessage) -> Finding:
    level: Level = "unsafe" if message.is_serious() else "warning" if message.level >= checks.WARNING else "ok"
    what = f"{message.obj}: {message.msg}" if message.obj else message.msg
    return Finding(str(message.id), level, what, remedy=message.hint or "")


def _middleware() -> list[Finding]:
    """Say where LockMiddleware stands; W001 says when it should be there and is not."""
    paths = list(settings.MIDDLEWARE)
    if MIDDLEWARE not in paths:
        return []
    place = paths.index(MIDDLEWARE)
    before = ", ".join(path.rpartition(".")[2] for path in paths[:place]) or "none"
    return [ok("middleware", f"LockMiddleware is number {place + 1} of {len(paths)}, after {before}")]


def _database(alias: str) -> list[Finding]:
    given = connections[alias].settings_dict
    measured = "on" if given["ATOMIC_REQUESTS"] else "off"
    reason = "put @locked on the view: it takes the lease before BEGIN, and gives it back after COMMIT"
    return [ok("ATOMIC_REQUESTS", measured, reason if given["ATOMIC_REQUESTS"] else ""), _pool(given)]


def _pool(given: dict[str, Any]) -> Finding:
    pool = given.get("OPTIONS", {}).get("pool")
    if not pool:
        kept = given["CONN_MAX_AGE"]
        return ok("pool", f"none; a connection is kept for {'ever' if kept is None else f'{kept} s'} in each thread")
    size = pool.get("max_size") or pool.get("min_size", 4) if isinstance(pool, dict) else 4
    measured = f"up to {size} connections in each process"
    if size > 1:
        return ok("pool", measured, "a request that waits for a connection after it took a lock keeps others waiting")
    reason = "all requests of a process wait for one connection, some of them while they hold a lock"
    return warning("pool", measured, reason, "give the pool as many connections as the process has threads")


def purge(using: str, days: int) -> int:
    """Purge the fence table of a database, see `dlock_core.transactions.fence_sql.purge`; not inside a transaction."""
    connection = connections[using]
    vendor = "mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor

    def execute(sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    return fence_sql.purge(execute, vendor, days)
