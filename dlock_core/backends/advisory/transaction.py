"""Advisory locks of the caller's own transaction: its COMMIT or ROLLBACK is the release, with nothing in between.

The lock is taken on the caller's connection, which the request carries. It neither outlives the transaction nor ends
before it, except by a ROLLBACK TO an earlier savepoint; so it has no ttl, and needs no renewal.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from dlock_core.backend import Busy, Capabilities, Granted, Released, RenewalFailure, refuse_to_pickle
from dlock_core.backends.advisory import postgresql
from dlock_core.backends.advisory.labels import PREFIX, checked_prefix, label_of
from dlock_core.backends.advisory.postgresql import LockRow, Sessions, owner_of
from dlock_core.errors import NotSupported, SnapshotTooOld
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import milliseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlock_core.backend import AcquireRequest, LockState, Renewal, RenewalResult
    from dlock_core.backends.advisory.labels import Label
    from dlock_core.backends.sql import Pool
    from dlock_core.runtime import Runtime

__all__ = ["CallerTransaction", "TransactionBackend", "TransactionConnection"]

MAX_WAIT_S: Final = 86400.0
"""Seconds after which a waiter leaves and re-enters the queue."""


class TransactionConnection(Protocol):
    """The connection of an open transaction; errors of the database are not caught."""

    async def row(self, sql: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the first row of the result of a statement with `:name` parameters."""

    async def tell(self, sql: str) -> None:
        """Send a statement without a result."""


@dataclass(frozen=True, slots=True)
class CallerTransaction:
    """The caller's open transaction, in which a request is to lock."""

    connection: TransactionConnection
    old_snapshot: bool = False
    """Whether its snapshot may be older than the lock."""


class TransactionBackend:
    """PostgreSQL's `pg_advisory_xact_lock`; a lock is requested inside the transaction for which it is to last.

    The token is the database's clock in microseconds, read while the lock is held. Errors of the database are not
    caught; only a deadlock is to be expected. Raises NotSupported before any I/O outside a transaction and on other
    databases.
    """

    __reduce__ = refuse_to_pickle

    def __init__(self, pool: Pool, database: Any, *, prefix: str = PREFIX) -> None:
        self.prefix = checked_prefix(prefix)
        self.capabilities = Capabilities(
            "transaction", fair=True, shared=True, lists_waiters=True, ttl_min=0.001, transaction_database=database
        )
        self._connector, self._sessions = pool.connector, Sessions(pool, self.prefix)

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        transaction, label = self._transaction_of(request), label_of(request.name, self.prefix)
        row = await transaction.connection.row(postgresql.TRY[request.shared], _params(request, label))
        text, isolation = row or ("", "")
        _refuse_old_snapshot(request, transaction, isolation)
        if text:
            return Granted(label.token_in(text), math.inf)
        return Busy(MAX_WAIT_S) if request.queue else await self._busy(request, transaction)

    async def wait(self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float) -> Granted | Busy:
        """Wait in the database's queue, in a savepoint: a time limit that runs out would end the transaction."""
        transaction, label = self._transaction_of(request), label_of(request.name, self.prefix)
        params = {**_params(request, label), "milliseconds": str(milliseconds(timeout))}
        connection = transaction.connection
        # PostgreSQL ends a wait with an error (55P03), and after an error it refuses every further statement of the
        # transaction, which belongs to the caller. A savepoint limits the damage. Rolling back to it also releases a
        # lock that was granted after it, at the very moment of the time limit: so an error always means that the lock
        # is not held.
        await connection.tell("SAVEPOINT dlock_wait")
        try:
            row = await connection.row(postgresql.WAIT[request.shared], params)
        except BaseException as error:
            with suppress(Exception):  # the error that ended the connection is the one to report
                await connection.tell("ROLLBACK TO SAVEPOINT dlock_wait")
                await connection.tell("RELEASE SAVEPOINT dlock_wait")
            if failure_of_statement(error) is not DatabaseFailure.LOCK_TIMEOUT:
                raise
            return await self._busy(request, transaction)
        await connection.tell("RELEASE SAVEPOINT dlock_wait")
        return Granted(label.token_in(row[0] if row else ""), math.inf)

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        """Do nothing: the end of the transaction also ends the grant."""

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Check whether each transaction still holds its lock."""
        return [await self._left(request) for request, _ in renewals]

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        """Return the outcome of the transaction, which has ended and has released the lock."""
        return Released.RELEASED

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        """Return holders and waiters in the database, transactions and sessions."""
        return await self._sessions.inspect(runtime, name)

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the session of the holder, and with it the transaction, which is rolled back."""
        return await self._sessions.force_release(runtime, name, token)

    def close(self) -> None:
        """Close idle connections."""
        self._sessions.close()

    def _transaction_of(self, request: AcquireRequest) -> CallerTransaction:
        if self._connector.vendor != "postgresql":
            raise NotSupported(
                f"{self._connector.title} is not PostgreSQL and has no locks that end with a transaction: "
                "give the store the option session=True (MySQL, MariaDB), or use a row lock",
                name=request.name,
            )
        if request.transaction is None:
            raise NotSupported(
                f"the lock {request.name!r} lasts as long as a transaction, and none is open on "
                f"{self._connector.title}: open one around it (atomic()), or give the store the option session=True",
                name=request.name,
            )
        transaction: CallerTransaction = request.transaction
        return transaction

    async def _busy(self, request: AcquireRequest, transaction: CallerTransaction) -> Busy:
        row = await transaction.connection.row(postgresql.LISTED_KEY, {"key": label_of(request.name, self.prefix).key})
        return Busy(MAX_WAIT_S, owner_of(LockRow(*row), self.prefix) if row is not None else "")

    async def _left(self, request: AcquireRequest) -> RenewalResult:
        params = {"key": label_of(request.name, self.prefix).key}
        row = await self._transaction_of(request).connection.row(postgresql.OURS, params)
        return RenewalFailure.LOST if row is None else math.inf


def _params(request: AcquireRequest, label: Label) -> dict[str, Any]:
    key, head, tail, room = label
    return {"key": key, "head": f" {head}", "tail": tail, "room": room, "least": request.floor + 1}


def _refuse_old_snapshot(request: AcquireRequest, transaction: CallerTransaction, isolation: str) -> None:
    """Under REPEATABLE READ the locking statement itself takes the snapshot: it is always older than the lock."""
    if isolation not in ("read committed", "read uncommitted") and not transaction.old_snapshot:
        raise SnapshotTooOld(request.name, isolation=isolation.upper())
