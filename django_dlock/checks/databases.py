"""Checks of DATABASES: transactions that a lock can protect, and the fence table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.core.checks import CheckMessage, Info, Warning  # noqa: A004 - Django's own name
from django.db import connections, router

from django_dlock.checks.models import models_of
from django_dlock.conf import is_declared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

FENCE_TABLE: Final = "dlock_fence"
SNAPSHOT_LEVELS: Final = ("REPEATABLE READ", "SERIALIZABLE")
"""Isolation levels at which a transaction reads from a snapshot that may be older than its lock."""


def check_transactions() -> list[CheckMessage]:
    """Check DATABASES (W005-W007): transactions begin in a way that a lock can protect. Only settings are read."""
    checks = {"sqlite": _sqlite, "mysql": _mysql, "postgresql": _postgresql}
    return [
        message
        for alias in connections
        for message in checks.get(connections[alias].vendor, _no_messages)(alias, connections[alias])
    ]


def _uses_rows() -> bool:
    from django_dlock.models import FencedMixin, RowLockMixin, VersionedMixin

    return bool(models_of(VersionedMixin, RowLockMixin, FencedMixin))


def _no_messages(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    yield from ()


def _options(connection: BaseDatabaseWrapper) -> dict[str, Any]:
    return connection.settings_dict.get("OPTIONS") or {}


def _sqlite(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    mode = str(_options(connection).get("transaction_mode") or "DEFERRED").upper()
    if mode == "DEFERRED" and _uses_rows():
        yield Warning(
            f"Database {alias!r}: a SQLite transaction that reads and then writes fails if another wrote in between.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS']['transaction_mode'] to 'IMMEDIATE'.",
            id="dlock.W005",
        )


def _mysql(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    # None leaves it to the server.
    level = _options(connection).get("isolation_level", "read committed") or "repeatable read"
    yield from _isolation(alias, str(level).upper(), "'read committed'", "dlock.W006")


def _postgresql(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    from django.db.backends.postgresql.psycopg_any import IsolationLevel  # type: ignore[import-untyped]

    level = _options(connection).get("isolation_level", IsolationLevel.READ_COMMITTED)
    name = next((known.name for known in IsolationLevel if known == level), "")
    yield from _isolation(alias, name.replace("_", " "), "IsolationLevel.READ_COMMITTED", "dlock.W007")


def _isolation(alias: str, level: str, wanted: str, check_id: str) -> Iterator[CheckMessage]:
    if level in SNAPSHOT_LEVELS and (is_declared() or _uses_rows()):
        yield Warning(
            f"Database {alias!r} runs at {level}, so a lock acquired after the first read protects nothing.",
            hint=f"Set its OPTIONS['isolation_level'] to {wanted}, or acquire every lock before BEGIN.",
            id=check_id,
        )


def check_atomic_requests() -> list[CheckMessage]:
    """Check for deployment (I001): ATOMIC_REQUESTS opens the transaction before a lock in the body of a view."""
    return [
        Info(
            f"Database {alias!r} has ATOMIC_REQUESTS, so lock() in the body of a view runs inside the transaction.",
            hint="Decorate the view with @locked: it acquires the lease before BEGIN and releases it after COMMIT.",
            id="dlock.I001",
        )
        for alias in connections
        if connections[alias].settings_dict["ATOMIC_REQUESTS"] and is_declared()
    ]


def check_fence_table(databases: Sequence[str] | None = None) -> list[CheckMessage]:
    """Check the fence table (W010, W015): it exists in each database, unless that has no tables, and can refuse."""
    return [
        message
        for alias in databases or ()
        if router.allow_migrate(alias, "django_dlock")
        for message in _fence(alias, connections[alias])
    ]


def _fence(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if _lacks_fence(connection):
        yield Warning(
            f"Database {alias!r} has no table {FENCE_TABLE}, so fenced locks fail there.",
            hint=f"Run `manage.py migrate django_dlock --database {alias}`.",
            id="dlock.W010",
        )
    elif connection.vendor == "mysql" and (engine := _engine_without_transactions(connection)):
        yield Warning(
            f"The table {FENCE_TABLE} of database {alias!r} is {engine}, without transactions: it refuses no holder.",
            hint=f"Run `ALTER TABLE {FENCE_TABLE} ENGINE = InnoDB`.",
            id="dlock.W015",
        )


def _engine_without_transactions(connection: BaseDatabaseWrapper) -> str | None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT engine FROM information_schema.tables JOIN information_schema.engines USING (engine) "
            "WHERE table_schema = DATABASE() AND table_name = %s AND transactions <> 'YES'",
            [FENCE_TABLE],
        )
        row = cursor.fetchone()
        return row[0] if row else None


def _lacks_fence(connection: BaseDatabaseWrapper) -> bool:
    tables = connection.introspection.table_names()
    return bool(tables) and FENCE_TABLE not in tables
