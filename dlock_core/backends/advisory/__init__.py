"""Advisory locks of the database that the application has anyway: no table, no further server.

Of a transaction (`TransactionBackend`, PostgreSQL) or of a session on a connection of its own.
"""

from dlock_core.backends.advisory.transaction import Place, TransactionBackend

__all__ = ["Place", "TransactionBackend"]
