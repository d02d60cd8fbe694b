"""`advisory://alias`: advisory locks in the database of a DATABASES alias, of the caller's transaction or a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_dlock.backends.connector import pool_of
from django_dlock.fencing import send
from django_dlock.tracker import tracker_for
from dlock_core.backends.advisory import CallerTransaction, advisory
from dlock_core.sql.database import pyformat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.tracker import ConnectionTracker
    from dlock_core.backend import Backend

__all__ = ["from_url", "transaction_of"]


def from_url(url: str, *, timeout: float = 5.0, **options: Any) -> Backend:
    """Return the store of a URL such as "advisory://default"; see `dlock_core.backends.advisory` for the options."""
    alias = url.partition("://")[2]
    return advisory(pool_of(alias, timeout=timeout), alias, **options)


def transaction_of(connection: BaseDatabaseWrapper, *, old_snapshot: bool) -> CallerTransaction | None:
    """Return the open transaction of a connection to the database of such a store."""
    tracker = tracker_for(connection)
    return CallerTransaction(_Connection(tracker), old_snapshot) if tracker.is_open() else None


class _Connection:
    """Sends statements of ours, of which no lease has to hear."""

    def __init__(self, tracker: ConnectionTracker) -> None:
        self._connection, self._quietly = tracker.connection, tracker.suspended

    async def row(self, sql: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        with self._quietly:
            _, row = send(self._connection, pyformat(sql), params)
            return row

    async def tell(self, sql: str) -> None:
        with self._quietly, self._connection.cursor() as cursor:
            cursor.execute(sql)
