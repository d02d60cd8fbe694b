"""Checks of DATABASES: transactions that a lock can protect, and the fence table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.core.checks import CheckMessage, Info, Tags, Warning, register  # noqa: A004 - Django's own name
from django.db import connections, router

from django_dlock.checks.models import models_of
from django_dlock.conf import is_declared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

TAG: Final = "dlock"
FENCE_TABLE: Final = "dlock_fence"
RAISED: Final = ("REPEATABLE READ", "SERIALIZABLE")


@register(TAG)
def check_transactions(**_: Any) -> list[CheckMessage]:
    """W005-W007: the databases start transactions in a way that a lock can protect; settings are read, nothing more."""
    checks = {"sqlite": _sqlite, "mysql": _mysql, "postgresql": _postgresql}
    return [
        message
        for alias in connections
        for message in checks.get(connections[alias].vendor, _nothing)(alias, connections[alias])
    ]


def _uses_rows() -> bool:
    from django_dlock.models import FencedMixin, RowLockMixin, VersionedMixin

    return bool(models_of(VersionedMixin, RowLockMixin, FencedMixin))


def _nothing(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    yield from ()


def _options(connection: BaseDatabaseWrapper) -> dict[str, Any]:
    return connection.settings_dict.get("OPTIONS") or {}


def _sqlite(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    mode = str(_options(connection).get("transaction_mode") or "DEFERRED").upper()
    if mode == "DEFERRED" and _uses_rows():
        yield Warning(
            f"Database {alias!r}: a SQLite transaction that reads before it writes fails when another one writes.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS']['transaction_mode'] to 'IMMEDIATE'.",
            id="dlock.W005",
        )


def _mysql(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    level = _options(connection).get("isolation_level", "read committed") or "repeatable read"  # the server's default
    yield from _isolation(alias, str(level).upper(), "'read committed'", "dlock.W006")


def _postgresql(alias: str, connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    from django.db.backends.postgresql.psycopg_any import IsolationLevel  # type: ignore[import-untyped]

    level = _options(connection).get("isolation_level", IsolationLevel.READ_COMMITTED)
    name = next((known.name for known in IsolationLevel if known == level), "")
    yield from _isolation(alias, name.replace("_", " "), "IsolationLevel.READ_COMMITTED", "dlock.W007")


def _isolation(alias: str, level: str, wanted: str, check_id: str) -> Iterator[CheckMessage]:
    if level in RAISED and (is_declared() or _uses_rows()):
        yield Warning(
            f"Database {alias!r} runs at {level}: a lock taken after the first read of a transaction protects nothing.",
            hint=f"Set its OPTIONS['isolation_level'] to {wanted}, or take every lock before BEGIN.",
            id=check_id,
        )


@register(TAG, deploy=True)
def check_atomic_requests(**_: Any) -> list[CheckMessage]:
    """I001: what ATOMIC_REQUESTS means for a lease taken in the body of a view."""
    return [
        Info(
            f"Database {alias!r} has ATOMIC_REQUESTS: lock() in a view's body is asked for inside the transaction.",
            hint="Put @locked on the view: it takes the lease before BEGIN and gives it back after COMMIT.",
            id="dlock.I001",
        )
        for alias in connections
        if connections[alias].settings_dict["ATOMIC_REQUESTS"] and is_declared()
    ]


@register(Tags.database)  # alone: since Django 6.1 a tag of our own would connect without being asked
def check_fence_table(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """W010: the fence table is where leases will look for it; an empty database is not a mistake."""
    return [
        Warning(
            f"Database {alias!r} has no table {FENCE_TABLE}: a fenced lock fails there.",
            hint=f"Run manage.py migrate django_dlock --database {alias}.",
            id="dlock.W010",
        )
        for alias in databases or ()
        if router.allow_migrate(alias, "django_dlock") and _lacks_fence(connections[alias])
    ]


def _lacks_fence(connection: BaseDatabaseWrapper) -> bool:
    tables = connection.introspection.table_names()
    return bool(tables) and FENCE_TABLE not in tables
