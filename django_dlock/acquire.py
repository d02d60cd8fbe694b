"""One acquire of a lock by Django code: what this context already holds, its transaction, its database sessions."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import AsyncToSync
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from django_dlock.connections import in_transaction, initialized, listening_tracker
from django_dlock.errors import NotSupported, SnapshotTooOld, as_database_error
from django_dlock.fencing import READ_COMMITTED, isolation_of
from django_dlock.tie import TiedDatabases, current
from django_dlock.tracker import leases_of_context
from dlock_core.flow import flow_variable
from dlock_core.owner import in_task
from dlock_core.runtime import BLOCKING
from dlock_core.sql import database
from dlock_core.transactions.transaction_lock import LockAcquire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import ContextVar

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.transactions.fencing import FenceGate
    from dlock_core.transactions.tie import Tie

__all__ = ["DatabaseAcquire", "no_lease_after", "open_sessions"]

_holder_of_rows: Final[ContextVar[str]] = flow_variable("dlock_holder_of_rows", "")
"""What has locked rows in this context, by `no_lease_after`."""


@contextmanager
def no_lease_after(holder: str) -> Iterator[None]:
    """Refuse new leases in a block that has locked rows: their other holders take the lease first, and then the rows.

    Each of the two would wait for the other, which no database can see.
    """
    former = _holder_of_rows.set(holder)
    try:
        yield
    finally:
        _holder_of_rows.reset(former)


class DatabaseAcquire(LockAcquire):
    """One acquire of a lock by this context: the leases that it already holds, and its open transaction."""

    own_error = staticmethod(as_database_error)
    _here: dict[str, BaseDatabaseWrapper] | None = None
    """The connections of the thread that waits for this acquire."""

    @property
    def database(self) -> str:
        return self.lock.using  # type: ignore[no-any-return]

    def find(self) -> TiedDatabases | None:
        if not (ties := current()):
            return None
        home = self.store.backend.capabilities.transaction_database
        if self.runtime is BLOCKING:
            inside = in_transaction(home or self.database)
        else:  # The transaction may be one of the function that has called this coroutine.
            inside = any(each.held.name == self.lock.name and each.ownership.open_here for each in ties)
        return self.joined(ties, inside=inside)  # type: ignore[no-any-return]

    async def find_or_prepare(self) -> TiedDatabases | None:
        using = self.lock.using
        if using not in connections.settings:
            raise ConnectionDoesNotExist(f"there is no database {using!r}, only: {', '.join(connections)}")
        found = self.find() if leases_of_context.get() else None
        if found is None and (holder := _holder_of_rows.get()):
            raise NotSupported(
                f"{holder} has locked rows before {self.lock.name!r}, and another holder of that lease would wait for "
                "them: take the lease first; an action of the admin that takes leases is named in unguarded_actions"
            )
        if self.runtime is BLOCKING:
            self._here = initialized()
        # A store that locks inside the transaction of that database checks its snapshot in the same request.
        is_home = using == self.store.backend.capabilities.transaction_database
        looks = found is None and self.lock.snapshot == "raise" and not is_home
        if looks and self.runtime is BLOCKING:
            self._refuse_old_snapshot()
        elif looks and _may_be_inside():
            await self.runtime.call_database(self._refuse_old_snapshot)
        return found

    def _refuse_old_snapshot(self) -> None:
        """Raise SnapshotTooOld if this thread's transaction may read from before the lock; may query the database."""
        using = self.lock.using
        connection = (self._here or {}).get(using) or connections[using]
        _, transaction = listening_tracker(connection)
        isolation = isolation_of(connection) if transaction is not None and transaction.has_spoken else None
        if isolation is not None and isolation not in READ_COMMITTED:
            raise SnapshotTooOld(self.lock.name, isolation=isolation.upper())

    def new_tied(self, tie: Tie, gate: FenceGate) -> TiedDatabases:
        return TiedDatabases(tie, gate, self._here)

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return open_sessions(self._here)

    def caller_transaction(self) -> Any:
        from django_dlock.backends.advisory import transaction_of  # loads modules that only such a store needs

        home = self.store.backend.capabilities.transaction_database
        connection = (self._here or {}).get(home) or connections[home]
        return transaction_of(connection, old_snapshot=self.lock.snapshot == "ignore")


def _may_be_inside() -> bool:
    """Return whether the thread that owns the connections waits for this coroutine, and may have a transaction open.

    This is the case under `async_to_sync`; otherwise it is asgiref's own thread, where no transaction outlasts a call.
    """
    waiting = AsyncToSync.loop_thread_executors
    return hasattr(AsyncToSync.executors, "current") or asyncio.get_running_loop() in waiting


def open_sessions(
    here: dict[str, BaseDatabaseWrapper] | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the database sessions that only this thread uses, and those of a pool whose transaction is open here.

    `here`: this thread's connections; by default they are looked up. A task does not have its own connections.
    """
    if here is None:
        here = {} if in_task() else initialized()
    own: list[str] = []
    pooled: list[str] = []
    for connection in here.values():
        if connection.connection is not None and connection.vendor in ("postgresql", "mysql"):
            settings = connection.settings_dict
            session = database.session_id(connection.vendor, connection.connection, settings["NAME"])
            if session is not None:
                (pooled if settings["OPTIONS"].get("pool") else own).append(session)
    return tuple(own), tuple(pooled)
