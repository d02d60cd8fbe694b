"""`advisory://alias`: advisory locks in the database of a DATABASES alias, of the caller's transaction or a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections

from django_dlock.backends.connector import pool_of
from django_dlock.fencing import Cursor
from django_dlock.statements import announcer
from django_dlock.transactions import in_transaction
from dlock_core.backends.advisory import Place, advisory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlock_core.backend import Backend

__all__ = ["from_url", "home_of", "transaction_of"]


def from_url(url: str, *, timeout: float = 5.0, **options: Any) -> Backend:
    """Make the store of a URL such as "advisory://default"; options as for `dlock_core.backends.advisory.advisory`."""
    alias = url.partition("://")[2]
    return advisory(pool_of(alias, timeout=timeout), alias, **options)


def home_of(backend: Any) -> str | None:
    """Give the database in whose transaction a store locks; None for a store that is somewhere else."""
    return str(backend.database) if backend.expiry == "transaction" else None


def transaction_of(backend: Any, *, old_snapshot: bool) -> Place | None:
    """Give this thread's open transaction in the database of such a store."""
    alias = backend.database
    return Place(_Quietly(connections[alias]), old_snapshot) if in_transaction(alias) else None


class _Quietly(Cursor):
    """Sends statements of ours, of which no lease has to hear."""

    async def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        with announcer(self._connection).quietly():
            return await super().execute(sql, params)
