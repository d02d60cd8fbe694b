"""`lock(session, ...)`: a lease that is released when the session's transaction has ended, with the fence in it.

A lease taken by a block lives until the block is left and the transactions that worked under it have ended; one taken
by `acquire()` lives, like a row lock, until the end of the session's transaction: the open one, or the next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, overload

from sqlalchemy import Connection, inspect
from sqlalchemy.orm import InstanceState

from dlock_core import database_session, names
from dlock_core.errors import NotSupported
from dlock_core.runtime import ASYNCIO, BLOCKING, blocking, run
from dlock_core.tied import Options, TiedLock, Turn
from sqla_dlock.backends.advisory import home_of, transaction_of
from sqla_dlock.fencing import fence_for
from sqla_dlock.greenlets import SPAWNING, Awaiting, await_, in_greenlet
from sqla_dlock.leases import Lease
from sqla_dlock.sessions import plain_session, refuse_closed
from sqla_dlock.snapshots import refuse_old_snapshot
from sqla_dlock.stores import store_of
from sqla_dlock.ties import SessionTie, current
from sqla_dlock.together import Leases, Locks
from sqla_dlock.transactions import connections_of, in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType, TracebackType
    from typing import Unpack

    from sqlalchemy import Dialect
    from sqlalchemy.orm import Session, scoped_session

    from dlock_core.backend import Backend
    from dlock_core.deadline import Seconds
    from dlock_core.held import Held
    from dlock_core.runtime import Runtime
    from dlock_core.store import Store

__all__ = ["Leases", "Lock", "LockOptions", "Locks", "SessionLock", "lock"]

_PLAIN: Final = (str, int)
"""Parts that SQLAlchemy need not be asked about."""


class LockOptions(Options, total=False):
    """The options of `lock`."""

    bind: Any
    store: str | Backend


class SessionLock(TiedLock):
    """What `lock` and `alock` have in common."""

    def __init__(
        self,
        session: Session,
        parts: tuple[Any, ...],
        *,
        bind: Any = None,
        store: str | Backend = "default",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(names.join(*map(_part, parts)), **options)
        self.session, self.store, self.fence = session, store, fence_for(parts)
        if self.shared and self.form and not self.fence.supports_shared:
            raise NotSupported("a row is no fence for shared locks: name the lock by a text instead of its class")
        self._bind = bind if bind is not None else next(filter(_is_mapped, parts), None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of a session>"

    def place(self) -> Store:
        return store_of(self.store)

    def whose(self) -> Session:
        return self.session

    async def take(self, runtime: Runtime, database: Runtime, finish: Callable[..., Any]) -> SessionTie:
        """Acquire the lease and tie it to the session; `database` calls what may send statements."""
        turn = Turn()
        return await self.take_up(runtime, database, await self.grant(runtime, database, finish, turn), turn)

    async def grant(self, runtime: Runtime, database: Runtime, finish: Callable[..., Any], turn: Turn) -> SessionTie:
        """Acquire the lease, or find the one that the session holds already."""
        refuse_closed(self.session)
        store, bind = self.place(), self._database() if self.form else None
        if (joined := self._joined(store, runtime)) is not None:
            return joined
        if self.snapshot == "raise":
            await database.call(self._refuse_old_snapshot, bind, home_of(store.backend))
        held, wait, deadline = await self._ask(runtime, database, store, turn)
        return SessionTie(held, self.session, fence=self.fence, wait=wait, deadline=deadline, finish=finish)

    async def _ask(
        self, runtime: Runtime, database: Runtime, store: Store, turn: Turn
    ) -> tuple[Held, float | None, float]:
        if home_of(store.backend) is None:
            return await self.ask(runtime, store, turn)
        return await database.call(blocking, self.ask, store, turn)  # type: ignore[no-any-return]

    def transaction(self, backend: Any) -> Any:
        return transaction_of(self.session, backend, old_snapshot=self.snapshot == "ignore")

    async def take_up(self, runtime: Runtime, database: Runtime, tie: SessionTie, turn: Turn) -> SessionTie:
        """Tie the lease to the session, or join it."""
        bind = self._database() if self.form else None
        if turn.is_new:
            await self.keep(runtime, tie, database.call(tie.bind, bind, self.form))
        else:
            await database.call(tie.protect, bind, self.form)
            tie.join()
        return tie

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), tuple(filter(None, map(_session, connections_of(self.session))))

    def _joined(self, store: Store, runtime: Runtime) -> SessionTie | None:
        if not (ties := current(self.session)):
            return None
        return self.joined(ties, store.backend, inside=in_transaction(self.session))  # type: ignore[no-any-return]

    def _database(self) -> Any:
        """Find the engine or connection in whose database the fence stands."""
        if self._bind is None or _is_mapped(self._bind):
            return self.session.get_bind(self._bind and inspect(self._bind))  # an override may read the mapper
        connection = getattr(self._bind, "sync_connection", None)  # an AsyncConnection has one, and an engine, too
        return connection or getattr(self._bind, "sync_engine", self._bind)

    def _refuse_old_snapshot(self, bind: Any, home: Dialect | None) -> None:
        given = [each for each in (self.session.bind, bind) if isinstance(each, Connection) and each.in_transaction()]
        found = {*connections_of(self.session), *given}
        refuse_old_snapshot(self.name, [each for each in found if each.dialect is not home])  # which looks for itself


class Lock(SessionLock):
    """See `lock`."""

    def acquire(self) -> Lease:
        """Hold the lock until the end of the session's transaction, waiting for it at most `wait` seconds.

        A session that is closed without ever having begun one does not end it: `release()` the lease then.
        Raises AcquireTimeout, AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and
        RowLocked, when a newer or a paused older holder stands in the way at the fence.
        """
        lease = self._hold()
        lease._tie.leave_with_transaction(lease._leave)
        return lease

    def __enter__(self) -> Lease:
        return self._blocks.enter(threading.current_thread(), self._hold())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._blocks.leave(threading.current_thread())
        lease._exit(kind, error, trace)

    def _hold(self) -> Lease:
        if in_greenlet():  # inside an AsyncSession's `run_sync`: the loop must not be blocked
            return Lease(await_(self.take(ASYNCIO, SPAWNING, Awaiting())))
        return Lease(run(self.take(BLOCKING, BLOCKING, blocking)))


@overload
def lock(session: Lock, /, *others: Lock, wait: Seconds | EllipsisType | None = ...) -> Locks: ...
@overload
def lock(session: Session | scoped_session[Any], *parts: Any, **options: Unpack[LockOptions]) -> Lock: ...
def lock(session: Any, *parts: Any, **options: Any) -> Lock | Locks:
    """Name a lock whose lease a session holds until the transaction that it protects has ended.

    Use it as `with lock(session, "order", 42) as lease:`, or `.acquire()` it for the session's transaction. `parts`
    name it; a mapped class stands for its table, and with a `FencedMixin` class and a key the row itself is the fence.
    `ttl` seconds (default: the store's, 30) is how long it outlives a dead holder; `wait` seconds (the store's, 10;
    None for ever, 0 one try) bounds the acquire. `shared` lets other shared holders in. `fence`: True or "transaction"
    (each transaction under the lease begins with the admit of its token), "lease" (the token is announced at once, and
    confirmed at each COMMIT), False (none). `bind`: the engine, connection or mapped class whose database is protected,
    where the session has several. `store`: a name given to `configure`, or a backend. `snapshot="ignore"` allows to ask
    inside a transaction whose snapshot is older than the lock. `reentrant`: join the lease that the session holds
    already, instead of AlreadyHeld; inside a transaction it always joins.

    Guarantees: released after COMMIT or ROLLBACK is known, in any nesting; a holder that lost the lease cannot commit.
    It does not protect what is outside that database, nor what was read before the transaction began.

    Several locks, also of several stores, sessions and databases, are held all or none, whoever asks for them in what
    order: `with lock(lock(session, "account", 1), lock(ledger, "account", 2, store="ledger")) as (source, target):`.
    Each has a lease and a fence of its own. Two databases still commit one after the other.

    Raises TypeError for an AsyncSession, and for what is no session, before any I/O.
    """
    if isinstance(session, Lock):
        return Locks((session, *parts), Lock, **options)
    return Lock(plain_session(session, "alock()"), parts, **options)


def _session(connection: Connection) -> str | None:
    if connection.closed or connection.invalidated:
        return None
    driver = connection.connection.driver_connection
    return database_session.party(connection.dialect.name, driver, connection.engine.url.database)


def _is_mapped(part: Any) -> bool:
    return isinstance(part, type) and inspect(part, raiseerr=False) is not None


def _part(part: Any) -> Any:
    if isinstance(part, _PLAIN):
        return part
    if _is_mapped(part):
        return inspect(part).base_mapper.local_table.fullname
    if isinstance(inspect(part, raiseerr=False), InstanceState):  # its text may differ in every process
        name = type(part).__name__
        raise TypeError(f"an instance is no name: lock its class and primary key, lock(session, {name}, key)")
    return part
