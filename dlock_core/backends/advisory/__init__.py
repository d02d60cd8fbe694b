"""Advisory locks of the application's own database: no table, no further server.

A lock lasts as long as a transaction (`TransactionBackend`, PostgreSQL), or as a session on a dedicated connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlock_core.backends.advisory.labels import PREFIX
from dlock_core.backends.advisory.session import MySQLSessionBackend, SessionBackend
from dlock_core.backends.advisory.transaction import CallerTransaction, TransactionBackend

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.backends.sql import Pool

__all__ = ["PREFIX", "CallerTransaction", "MySQLSessionBackend", "SessionBackend", "TransactionBackend", "advisory"]


def advisory(pool: Pool, database: Any, *, session: bool = False, prefix: str = PREFIX) -> Backend:
    """Return the store in a database.

    Without `session` a lock is taken in the caller's own transaction, and ends with it (PostgreSQL). With `session` it
    is taken on a dedicated connection, with a ttl. Every name begins with `prefix`: programs with the same prefix in
    the same database (MySQL: on the same server) share their locks. Raises TypeError and ValueError for invalid
    arguments.
    """
    if not session:
        return TransactionBackend(pool, database, prefix=prefix)
    kind = {"postgresql": SessionBackend, "mysql": MySQLSessionBackend}.get(pool.connector.vendor)
    if kind is None:
        raise ValueError(f"{pool.connector.title} has no advisory locks: use PostgreSQL, MySQL or MariaDB")
    return kind(pool, prefix=prefix)
