"""`lock(session, ...)`, and `alock` for an AsyncSession: a lease until the session's transaction ends, and its fence.

A lease taken by a block lives until the block is left and the transactions that worked under it have ended; one taken
by `acquire()` lives, like a row lock, until the end of the session's transaction: the open one, or the next.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Final, overload

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.orm import Session

from dlock_core import names
from dlock_core.errors import NotSupported
from dlock_core.leases import engine
from dlock_core.leases.blocks import AsyncBlockExit, BlockExit
from dlock_core.leases.handles import NoAsyncBlock, NoBlock
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run
from dlock_core.transactions.fence_sql import not_shared
from dlock_core.transactions.multilock import TiedLocks
from dlock_core.transactions.tied_lease import TiedLease, TiedLeases
from dlock_core.transactions.transaction_lock import Options, TiedLock
from sqla_dlock.fencing import TABLE_FENCE, FencedMixin, RowFence
from sqla_dlock.greenlets import GreenletAsyncio, await_, in_greenlet
from sqla_dlock.names import has_row_fence, is_mapped, plain, row_key, with_class
from sqla_dlock.stores import plain_async_session, plain_session, store_of
from sqla_dlock.tie import InsideAcquire, SessionAcquire

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import EllipsisType
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    from dlock_core.backend import Backend, Released
    from dlock_core.options import Seconds
    from dlock_core.runtime import DatabaseRuntime

__all__ = [
    "AsyncLeases",
    "AsyncLock",
    "AsyncLocks",
    "Leases",
    "Lock",
    "LockOptions",
    "Locks",
    "SessionLock",
    "alock",
    "lock",
]

_ASYNC_ADVICE: Final = "use alock() with an AsyncSession"


class Lease(TiedLease, NoBlock):
    """A lock that a Session holds. Its methods do no I/O, except those that renew and release."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        self._tied.tie.runtime.finish(engine.renew, self._held, ttl)

    def release(self) -> Released | None:
        """Release now; return None if the end of the transaction, or the block that was joined, will release it.

        Raises NotHeld in a forked child, BackendUnavailable if the store cannot be reached: the lease then runs out.
        """
        return run(self._release(BLOCKING))


class AsyncLease(TiedLease, NoAsyncBlock):
    """A lock that an AsyncSession holds."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await self._renew(ASYNCIO, ttl)

    async def release(self) -> Released | None:
        """See `Lease.release`; completed even while the task is being cancelled."""
        return await self._release(ASYNCIO)


class LockOptions(Options, total=False):
    """The options of `lock`."""

    bind: Any
    store: str | Backend


class SessionLock(TiedLock):
    """The common base of `lock` and `alock`."""

    _options = tuple(LockOptions.__annotations__)
    _lease_type: ClassVar[type[TiedLease]]
    """What the caller gets."""
    _classes: tuple[type, ...]
    """The mapped classes in the lock's name."""

    def __init__(
        self,
        session: Session,
        parts: tuple[Any, ...],
        *,
        bind: Any = None,
        store: str | Backend = "default",
        **options: Unpack[Options],
    ) -> None:
        parts = with_class(parts)
        values = plain(parts)
        super().__init__(names.join(*values), **options)
        if bind is not None:
            _check_bind(bind)
        self.session, self.store, self.bind = session, store, bind
        """`bind`: the caller's `bind`; without it the mapped classes in the lock's name say what is protected."""
        self.fence, self._classes = TABLE_FENCE, ()
        if values is not parts:  # a mapped class is among them
            self._classes = tuple(filter(is_mapped, parts))
            if len(parts) == len(values) == 2 and parts[0] in self._classes and self._is_fenced_by_row(parts[0]):
                self.fence = RowFence(inspect(parts[0]), row_key(*parts))
        if self.shared and self._form and not self.fence.supports_shared:
            raise NotSupported(not_shared(self.name), name=self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of a session>"

    def _is_fenced_by_row(self, mapped: type) -> bool:
        return issubclass(mapped, FencedMixin) or (bool(self._form) and has_row_fence(mapped))

    def _new_acquire(self, runtime: DatabaseRuntime, **together: Any) -> SessionAcquire:
        store = store_of(self.store)
        kind = SessionAcquire if store.backend.capabilities.transaction_database is None else InsideAcquire
        return kind(self, store, runtime, form=self._form, lease_type=self._lease_type, **together)


def _check_bind(bind: Any) -> None:
    """Raise TypeError for anything that is not an engine or connection of either kind, or a mapped class."""
    given = getattr(bind, "sync_engine", bind)  # an AsyncConnection has one, too
    if not isinstance(given, Engine | Connection) and not is_mapped(bind):
        kind = f"the class {bind.__name__}" if isinstance(bind, type) else type(bind).__name__
        raise TypeError(f"bind= is an engine, a connection or a mapped class, not {kind}")


class Lock(SessionLock, BlockExit):
    """See `lock`."""

    _lease_type = Lease

    def acquire(self) -> Lease:
        """Hold the lock until the end of the session's transaction, waiting for it at most `wait` seconds.

        A session that is closed without having begun one also releases it. Raises AcquireTimeout, AlreadyHeld,
        BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and RowLocked, if a newer holder or a
        paused older one blocks it at the fence.
        """
        return self._acquire()

    def __enter__(self) -> Lease:
        return self._acquire(self._blocks.entering(threading.current_thread()))

    def _acquire(self, enter: Callable[[Any], object] | None = None) -> Lease:
        """Acquire the lock; inside an AsyncSession's `run_sync` the greenlet waits, so that the event loop does not."""
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - documented for event loops: no exception, no cost
            if in_greenlet():
                return await_(self._new_acquire(GreenletAsyncio()).hold(enter))  # type: ignore[no-any-return]
            refuse_in_loop(_ASYNC_ADVICE)
        return self._new_acquire(BLOCKING).hold_in_thread(enter)  # type: ignore[no-any-return]


@overload
def lock(session: Lock, /, *others: Lock, wait: Seconds | EllipsisType | None = ...) -> Locks: ...
@overload
def lock(session: Session | scoped_session[Any], *parts: Any, **options: Unpack[LockOptions]) -> Lock: ...
def lock(session: Any, *parts: Any, **options: Any) -> Lock | Locks:
    """Name a lock whose lease a session holds until the transaction that it protects has ended.

    Use it as `with lock(session, "order", 42) as lease:`, or `.acquire()` it for the session's transaction. `parts`
    name it; a mapped class stands for its table, and with a `FencedMixin` class and a key the row itself is the fence.
    `ttl` seconds (default: the store's, 30) is how long it outlives a dead holder; `wait` seconds (default: the
    store's, 10; None means no limit, 0 one try) limits the acquire. `shared` allows other shared holders. `fence`: True
    or "transaction" (each transaction under the lease begins with the admit of its token), "lease" (the token is
    announced at once, and confirmed at each COMMIT), False (none). `bind`: the engine, connection or mapped class whose
    database is protected, if the session has several (default: that of the mapped classes in the name; the acquire
    raises ValueError if they have several). `store`: a name passed to `configure`, or a backend. `snapshot="ignore"`
    allows an acquire inside a transaction whose snapshot is older than the lock. `reentrant`: join the lease that the
    session already holds, instead of raising AlreadyHeld; inside a transaction it always joins.

    Guarantees: released after COMMIT or ROLLBACK is known, in any nesting; a holder that lost the lease cannot commit.
    It does not protect what is outside that database, nor what was read before the transaction began.

    Several locks, even of several stores, sessions and databases, are held all or none, in whatever order they are
    listed: `with lock(lock(session, "account", 1), lock(ledger, "account", 2, store="ledger")) as (source, target):`.
    Each has a separate lease and fence. Two databases still commit one after the other.

    Raises TypeError for an AsyncSession, or anything else that is not a session, before any I/O.
    """
    if isinstance(session, Lock | Locks):
        return Locks((session, *parts), Lock, **options)
    return Lock(session if type(session) is Session else plain_session(session, "alock()"), parts, **options)


class Leases(TiedLeases[Lease], NoBlock):
    """The leases of several locks, in the order in which the locks were passed to `lock`."""

    __slots__ = ()

    def release(self) -> None:
        """Release each of them, see `Lease.release`."""
        with ExitStack() as stack:
            for lease in self:
                stack.callback(lease.release)


class Locks(TiedLocks, BlockExit):
    """Several locks, of any stores, sessions and databases, held all or none; see `lock`."""

    _leases_type = Leases

    def acquire(self) -> Leases:
        """Hold all of them, each to the end of its session's transaction; raises the errors of `Lock.acquire`."""
        return self._acquire()

    def __enter__(self) -> Leases:
        return self._acquire(self._blocks.entering(threading.current_thread()))

    def _acquire(self, enter: Callable[[Any], object] | None = None) -> Leases:
        if in_greenlet():
            return await_(self._hold(GreenletAsyncio(), enter))  # type: ignore[no-any-return]
        refuse_in_loop(_ASYNC_ADVICE)
        return run(self._hold(BLOCKING, enter))  # type: ignore[no-any-return]


class AsyncLock(SessionLock, AsyncBlockExit):
    """See `alock`."""

    _lease_type = AsyncLease

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        return await self._new_acquire(GreenletAsyncio()).hold()  # type: ignore[no-any-return]

    async def __aenter__(self) -> AsyncLease:
        enter = self._blocks.entering(asyncio.current_task())
        return await self._new_acquire(GreenletAsyncio()).hold(enter)  # type: ignore[no-any-return]


class AsyncLeases(TiedLeases[AsyncLease], NoAsyncBlock):
    """The leases of several locks, in the order in which the locks were passed to `alock`."""

    __slots__ = ()

    async def release(self) -> None:
        """Release each of them, see `AsyncLease.release`."""
        async with AsyncExitStack() as stack:
            for lease in self:
                stack.push_async_callback(lease.release)


class AsyncLocks(TiedLocks, AsyncBlockExit):
    """See `Locks`."""

    _leases_type = AsyncLeases

    async def acquire(self) -> AsyncLeases:
        """See `Locks.acquire`."""
        return await self._hold(GreenletAsyncio())  # type: ignore[no-any-return]

    async def __aenter__(self) -> AsyncLeases:
        return await self._hold(GreenletAsyncio(), self._blocks.entering(asyncio.current_task()))  # type: ignore[no-any-return]


@overload
def alock(session: AsyncLock, /, *others: AsyncLock, wait: Seconds | EllipsisType | None = ...) -> AsyncLocks: ...
@overload
def alock(
    session: AsyncSession | async_scoped_session[Any], *parts: Any, **options: Unpack[LockOptions]
) -> AsyncLock: ...
def alock(session: Any, *parts: Any, **options: Any) -> AsyncLock | AsyncLocks:
    """As `sqla_dlock.lock`, for an AsyncSession.

    Use it as `async with alock(session, "order", 42) as lease:`, or `await` its `acquire()`.
    """
    if isinstance(session, AsyncLock | AsyncLocks):
        return AsyncLocks((session, *parts), AsyncLock, **options)
    return AsyncLock(plain_async_session(session, "lock()").sync_session, parts, **options)
