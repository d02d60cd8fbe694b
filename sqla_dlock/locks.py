"""`lock(session, ...)`: a lease that is released when the session's transaction has ended, with the fence in it.

A lease taken by a block lives until the block is left and the transactions that worked under it have ended; one taken
by `acquire()` lives, like a row lock, until the end of the session's transaction: the open one, or the next.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload

from sqlalchemy import Connection, inspect

from dlock_core import names
from dlock_core.errors import NotSupported
from dlock_core.leases import engine
from dlock_core.leases.lock import BlockExit
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run
from dlock_core.sql import database as database_session
from dlock_core.transactions.fence_sql import not_shared
from dlock_core.transactions.fencing import FenceGate
from dlock_core.transactions.tie import Tie
from dlock_core.transactions.transaction_lock import AcquireState, Options, TiedLease, TiedLeases, TiedLock, TiedLocks
from sqla_dlock.fencing import fence_for
from sqla_dlock.greenlets import GreenletAsyncio, await_, in_greenlet
from sqla_dlock.names import is_mapped, plain, with_class
from sqla_dlock.stores import plain_session, refuse_closed, store_of
from sqla_dlock.tie import TiedSession, current, home_of, refuse_old_snapshot
from sqla_dlock.transactions import connections_of, in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import EllipsisType
    from typing import Unpack

    from sqlalchemy import Dialect
    from sqlalchemy.orm import Session, scoped_session

    from dlock_core.backend import Backend, Released
    from dlock_core.options import Seconds
    from dlock_core.runtime import DatabaseRuntime, Runtime
    from dlock_core.stores import Store

__all__ = ["Leases", "Lock", "LockOptions", "Locks", "SessionLock", "lock"]


class _Lease(TiedLease):
    __slots__ = ()

    def _for_transaction(self) -> Self:
        """Let it last without a block: until the end of the session's transaction, the open one or the next."""
        self._tied.end_with_transaction(self)
        self._tied.forget_if_over()
        return self


class Lease(_Lease):
    """A lock that a Session holds. Its methods do no I/O, but for those that renew and release."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        self._tied.tie.runtime.finish(engine.renew, self._held, ttl)

    def release(self) -> Released | None:
        """Release now; None when it is not the time: the end of the transaction releases, or the block that was joined.

        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out.
        """
        return run(self._release(BLOCKING))


class AsyncLease(_Lease):
    """A lock that an AsyncSession holds."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await engine.renew(ASYNCIO, self._held, ttl)

    async def release(self) -> Released | None:
        """See `Lease.release`; finished even while the task is being cancelled."""
        return await self._release(ASYNCIO)


class LockOptions(Options, total=False):
    """The options of `lock`."""

    bind: Any
    store: str | Backend


class SessionLock(TiedLock):
    """What `lock` and `alock` have in common."""

    _options = tuple(LockOptions.__annotations__)

    _handle: ClassVar[type[Any]]
    """What the caller gets."""

    def __init__(
        self,
        session: Session,
        parts: tuple[Any, ...],
        *,
        bind: Any = None,
        store: str | Backend = "default",
        **options: Unpack[Options],
    ) -> None:
        values = plain(parts := with_class(parts))
        super().__init__(names.join(*values), **options)
        self.session, self.store, self.fence = session, store, fence_for((*parts[:1], *values[1:]))
        if self.shared and self._form and not self.fence.supports_shared:
            raise NotSupported(not_shared(self.name), name=self.name)
        self._bind = bind if bind is not None else next(filter(is_mapped, parts), None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of a session>"

    def _store(self) -> Store:
        return store_of(self.store)

    def _whose(self) -> Session:
        return self.session

    async def _find_or_acquire(self, state: AcquireState) -> TiedSession:
        refuse_closed(self.session)
        store, runtime = self._store(), state.runtime
        bind = self._database() if self._form else None
        if (joined := self._find(store, runtime)) is not None:
            return joined
        home = home_of(store.backend)
        if self.snapshot == "raise":
            await runtime.call_database(self._refuse_old_snapshot, bind, home)
        acquiring = self._acquire_lease(store, state)
        if home is None:
            held, wait, deadline = await acquiring
        else:
            held, wait, deadline = await runtime.call_database(run, acquiring)
        gate = FenceGate(held, self.fence, wait=wait, deadline=deadline, runtime=runtime)
        return TiedSession(Tie(held, runtime), gate, self.session)

    def _store_runtime(self, store: Store, state: AcquireState) -> Runtime:
        # A store that locks inside the transaction asks on the session's own connection, where that may be used.
        return state.runtime if home_of(store.backend) is None else BLOCKING

    def _transaction(self, backend: Any) -> Any:
        from sqla_dlock.backends.advisory import transaction_of  # loads what only such a store needs

        return transaction_of(self.session, backend, old_snapshot=self.snapshot == "ignore")

    async def _bind_lease(self, tied: TiedSession, state: AcquireState) -> Any:
        bind = self._database() if self._form else None
        state.tied, state.lease = tied, (lease := self._handle(tied))
        tied.tie.handles.add(lease)
        await state.runtime.call_database(tied.bind if state.is_new else tied.protect, bind, self._form)
        return lease

    def _sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), tuple(filter(None, map(_session, connections_of(self.session))))

    def _find(self, store: Store, runtime: DatabaseRuntime) -> TiedSession | None:
        if not (ties := current(self.session)):
            return None
        return self._joined(ties, store.backend, inside=in_transaction(self.session))  # type: ignore[no-any-return]

    def _database(self) -> Any:
        """Find the engine or connection in whose database the fence stands."""
        if self._bind is None or is_mapped(self._bind):
            return self.session.get_bind(self._bind and inspect(self._bind))  # an override may read the mapper
        connection = getattr(self._bind, "sync_connection", None)  # an AsyncConnection has one, and an engine, too
        return connection or getattr(self._bind, "sync_engine", self._bind)

    def _refuse_old_snapshot(self, bind: Any, home: Dialect | None) -> None:
        given = [each for each in (self.session.bind, bind) if isinstance(each, Connection) and each.in_transaction()]
        found = {*connections_of(self.session), *given}
        refuse_old_snapshot(self.name, [each for each in found if each.dialect is not home])  # which looks for itself


class Lock(SessionLock, BlockExit):
    """See `lock`."""

    _handle = Lease

    def acquire(self) -> Lease:
        """Hold the lock until the end of the session's transaction, waiting for it at most `wait` seconds.

        A session that is closed without ever having begun one releases it, too.
        Raises AcquireTimeout, AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and
        RowLocked, when a newer or a paused older holder stands in the way at the fence.
        """
        lease: Lease = hold(self, Lease._for_transaction)
        return lease

    def __enter__(self) -> Lease:
        begin: Callable[[Lease], Lease] = partial(self._blocks.enter, threading.current_thread())
        return hold(self, begin)


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
    return database_session.session_id(connection.dialect.name, driver, connection.engine.url.database)


T = TypeVar("T")


class Leases(TiedLeases[Lease]):
    """The leases of several locks, in the order in which these were given to `lock`."""

    __slots__ = ()

    @classmethod
    def _for_transaction(cls, leases: Iterable[Lease]) -> Leases:
        """Make them, each to the end of its session's transaction."""
        return cls(map(Lease._for_transaction, leases))

    def release(self) -> None:
        """Release each of them, see `Lease.release`."""
        with ExitStack() as stack:
            for lease in self:
                stack.callback(lease.release)


class Locks(TiedLocks, BlockExit):
    """Several locks, of any stores, sessions and databases, held all or none; see `lock`."""

    def acquire(self) -> Leases:
        """Hold all of them, each to the end of its session's transaction; raises what `Lock.acquire` raises."""
        return hold(self, Leases._for_transaction)

    def __enter__(self) -> Leases:
        caller = threading.current_thread()
        return hold(self, lambda leases: self._blocks.enter(caller, Leases(leases)))


def hold(locks: SessionLock | TiedLocks, finish: Callable[[Any], T]) -> T:
    """Acquire a lock of a session, or several, from code that cannot await; see `TiedLock._hold`.

    Inside an AsyncSession's `run_sync` the greenlet waits, because the event loop must not be blocked.
    """
    if in_greenlet():
        return await_(locks._hold(GreenletAsyncio(), finish))
    refuse_in_loop("use alock() with an AsyncSession")
    return locks._hold_in_thread(finish)
