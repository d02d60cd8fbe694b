"""`advisory://alias`: advisory locks in the database of a DATABASES alias, of the caller's transaction or a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections

from django_dlock.backends.connector import pool_of
from django_dlock.connections import tracker_for
from dlock_core.backends.advisory import CallerTransaction, advisory
from dlock_core.sql.database import pyformat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.backend import Backend

__all__ = ["from_url", "transaction_of"]


def from_url(url: str, *, timeout: float = 5.0, **options: Any) -> Backend:
    """Return the store of a URL such as "advisory://default"; see `dlock_core.backends.advisory` for the options."""
    alias = url.partition("://")[2]
    return advisory(pool_of(alias, timeout=timeout), alias, **options)


def transaction_of(backend: Backend, *, old_snapshot: bool) -> CallerTransaction | None:
    """Return this thread's open transaction in the database of such a store."""
    connection = connections[backend.capabilities.transaction_database]
    return CallerTransaction(_Connection(connection), old_snapshot) if tracker_for(connection).is_open() else None


class _Connection:
    """Sends statements of ours, of which no lease has to hear."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection, self._quietly = connection, tracker_for(connection).suspended

    async def row(self, sql: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        with self._quietly, self._connection.cursor() as cursor:
            cursor.execute(pyformat(sql), params)
            return cursor.fetchone()  # type: ignore[no-any-return]

    async def tell(self, sql: str) -> None:
        with self._quietly, self._connection.cursor() as cursor:
            cursor.execute(sql)
