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
from dlock_core.leases.handles import renew
from dlock_core.runtime import ASYNCIO, BLOCKING, blocking, refuse_in_loop, run
from dlock_core.sql import database as database_session
from dlock_core.transactions import transaction_lock
from dlock_core.transactions.fence_sql import not_shared
from dlock_core.transactions.fencing import FenceGate
from dlock_core.transactions.tie import Tie
from dlock_core.transactions.transaction_lock import Options, TiedLease, TiedLock, TiedLocks, Turn, leaving
from sqla_dlock.fencing import fence_for
from sqla_dlock.greenlets import GreenletAsyncio, await_, in_greenlet
from sqla_dlock.names import is_mapped, plain, with_class
from sqla_dlock.stores import plain_session, refuse_closed, store_of
from sqla_dlock.tie import TiedSession, current, home_of, refuse_old_snapshot
from sqla_dlock.transactions import connections_of, in_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import EllipsisType, TracebackType
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
        self._tied.tie.runtime.finish(renew, self._held, ttl)

    def release(self) -> Released | None:
        """Release now; None when it is not the time: the end of the transaction releases, or the block that was joined.

        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out.
        """
        return self._end()

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_block(error)


class AsyncLease(_Lease):
    """A lock that an AsyncSession holds."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await renew(ASYNCIO, self._held, ttl)

    async def release(self) -> Released | None:
        """See `Lease.release`; finished even while the task is being cancelled."""
        return await self._aend()

    async def _aexit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._aend_block(error)


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

    def _place(self) -> Store:
        return store_of(self.store)

    def _whose(self) -> Session:
        return self.session

    async def _take(self, runtime: DatabaseRuntime, begin: Callable[[Any], Any], turn: Turn) -> Any:
        """Acquire the lease and tie it to the session; `begin` is what is done with the handle last."""
        return begin(await self._take_up(runtime, await self._grant(runtime, turn), turn))

    async def _grant(self, runtime: DatabaseRuntime, turn: Turn) -> TiedSession:
        """Acquire the lease, or find the one that the session holds already."""
        refuse_closed(self.session)
        store, bind = self._place(), self._database() if self._form else None
        if (joined := self._found(store, runtime)) is not None:
            return joined
        home = home_of(store.backend)
        if self.snapshot == "raise":
            await runtime.call_database(self._refuse_old_snapshot, bind, home)
        if home is None:
            held, wait, deadline = await self._ask(runtime, store, turn)
        else:  # such a store asks on the session's connection
            held, wait, deadline = await runtime.call_database(blocking, self._ask, store, turn)
        gate = FenceGate(held, self.fence, wait=wait, deadline=deadline, runtime=runtime)
        return TiedSession(Tie(held, runtime), gate, self.session)

    def _transaction(self, backend: Any) -> Any:
        from sqla_dlock.backends.advisory import transaction_of  # loads what only such a store needs

        return transaction_of(self.session, backend, old_snapshot=self.snapshot == "ignore")

    async def _take_up(self, runtime: DatabaseRuntime, tied: TiedSession, turn: Turn) -> Any:
        """Tie the lease to the session, or join it."""
        bind = self._database() if self._form else None
        turn.tied, turn.lease = tied, (lease := self._handle(tied))
        tied.tie.handles.add(lease)
        await runtime.call_database(tied.bind if turn.is_new else tied.protect, bind, self._form)
        return lease

    def _sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), tuple(filter(None, map(_session, connections_of(self.session))))

    def _found(self, store: Store, runtime: Runtime) -> TiedSession | None:
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


class Lock(SessionLock):
    """See `lock`."""

    _handle = Lease

    def acquire(self) -> Lease:
        """Hold the lock until the end of the session's transaction, waiting for it at most `wait` seconds.

        A session that is closed without ever having begun one releases it, too.
        Raises AcquireTimeout, AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and
        RowLocked, when a newer or a paused older holder stands in the way at the fence.
        """
        return self._lease(Lease._for_transaction)

    def __enter__(self) -> Lease:
        return self._lease(partial(self._blocks.enter, threading.current_thread()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._blocks.leave(threading.current_thread())
        lease._exit(kind, error, trace)

    def _lease(self, begin: Callable[[Lease], Lease]) -> Lease:
        if in_greenlet():  # inside an AsyncSession's `run_sync`: the loop must not be blocked
            return await_(self._ahold(partial(self._take, GreenletAsyncio(), begin)))  # type: ignore[no-any-return]
        refuse_in_loop("use alock() with an AsyncSession")
        return self._hold(partial(self._take, BLOCKING, begin))  # type: ignore[no-any-return]


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


class Leases(transaction_lock.Leases[Lease]):
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


class Locks(TiedLocks):
    """Several locks, of any stores, sessions and databases, held all or none; see `lock`."""

    def acquire(self) -> Leases:
        """Hold all of them, each to the end of its session's transaction; raises what `Lock.acquire` raises."""
        return self._hold(Leases._for_transaction)

    def __enter__(self) -> Leases:
        def begin(leases: Iterable[Lease]) -> Leases:
            return self._blocks.enter(caller, Leases(leases))

        caller = threading.current_thread()
        return self._hold(begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving(self._blocks.leave(threading.current_thread())).__exit__(kind, error, trace)

    def _hold(self, begin: Callable[[Iterable[Lease]], Leases]) -> Leases:
        if in_greenlet():
            return await_(take_all(self, GreenletAsyncio(), begin))
        refuse_in_loop("use alock() with an AsyncSession")
        return run(take_all(self, BLOCKING, begin))


def take_all(locks: TiedLocks, runtime: DatabaseRuntime, begin: Callable[[Iterable[Any]], T]) -> Coroutine[Any, Any, T]:
    """Acquire the locks of a group, each for its session; see `SessionLock._take`."""

    def grant(each: Any, turn: Turn) -> Any:
        return each._grant(runtime, turn)

    def take_up(each: Any, tied: TiedSession, turn: Turn) -> Any:
        return each._take_up(runtime, tied, turn)

    return locks._take(runtime, grant, take_up, begin)
