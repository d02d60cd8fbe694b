"""`lock(...)`: a lease that is released when the transaction it protects has ended, with the fence in that transaction.

Outside a transaction the lease lives as long as its block, and each transaction that begins under it is fenced. Inside
one it lives, like a row lock, until that transaction's COMMIT or ROLLBACK is known.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.asyncio import async_unsafe
from django.utils.connection import ConnectionDoesNotExist

from django_dlock.conf import stores
from django_dlock.connections import in_transaction, listen_to_all
from django_dlock.errors import NotSupported, as_database_error
from django_dlock.fencing import fence_for
from django_dlock.names import plain, with_model
from django_dlock.tie import TiedDatabases, current, forget, keep, open_sessions, refuse_old_snapshot, remember
from dlock_core import names
from dlock_core.errors import DLockError
from dlock_core.leases import engine
from dlock_core.leases.lock import LETTING_EXPIRE, AsyncBlockExit, BlockExit
from dlock_core.runtime import ASYNCIO, BLOCKING, Asyncio, DatabaseRuntime, Runtime, run
from dlock_core.transactions.fence_sql import not_shared
from dlock_core.transactions.fencing import FenceGate
from dlock_core.transactions.tie import Tie, release
from dlock_core.transactions.transaction_lock import (
    AcquireState,
    Options,
    TiedLease,
    TiedLeases,
    TiedLock,
    TiedLocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import EllipsisType
    from typing import Unpack

    from dlock_core.backend import Released
    from dlock_core.options import Seconds
    from dlock_core.stores import Store

__all__ = ["Leases", "Lock", "LockOptions", "Locks", "lock"]

T = TypeVar("T")

listen_to_all()


class _AsDjango:
    """Raises the Django twin of a core error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DLockError):
            twin = as_database_error(error)
            if twin is not error:
                raise twin from error.__cause__


AS_DJANGO: Final = _AsDjango()


class Lease(TiedLease):
    """A lock that this context holds. Its methods do no I/O, but for those that renew and release."""

    __slots__ = ()

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease surely holds now; without I/O."""
        with AS_DJANGO:
            super().ensure_held()

    def _kept(self) -> Lease:
        """Let it last without a block: until its transaction has ended, or as long as its context."""
        if not self._tied.tie.is_bound:
            keep(self)
        return self

    def release(self) -> Released | None:
        """Release now; None when it is not the time: the end of the transaction releases, or the block that was joined.

        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out.
        """
        with AS_DJANGO:
            return run(self._release(BLOCKING))

    async def arelease(self) -> Released | None:
        """See `release`."""
        with AS_DJANGO:
            return await self._release(ASYNCIO)

    async def _end(self, runtime: Runtime) -> Released | None:
        try:
            return await super()._end(runtime)
        finally:
            # In a task, transactions that are still open belong to threads, which have contexts of their own.
            if runtime is not BLOCKING and not self._tied.tie.handles:
                forget(self._tied)

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        if error is not None and runtime is not BLOCKING and len(self._tied.tie.handles) == 1:
            self._tied.is_aborted = True
        with AS_DJANGO:
            await super()._leave_block(runtime, error)
        if error is not None and runtime is BLOCKING:
            self._tied.expire_if_torn()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        with AS_DJANGO:
            run(engine.renew(BLOCKING, self._held, ttl))

    async def arenew(self, ttl: Seconds | None = None) -> None:
        """See `renew`."""
        with AS_DJANGO:
            await engine.renew(ASYNCIO, self._held, ttl)


def release_forgotten() -> list[str]:
    """Release what this context still holds outside any transaction, and return its names; for the end of a request."""
    forgotten = _forgotten()
    for tie in forgotten:
        if tie.detach_all():
            with LETTING_EXPIRE:
                run(release(BLOCKING, tie.held))
    return [tie.held.name for tie in forgotten]


async def release_forgotten_async() -> list[str]:
    """See `release_forgotten`."""
    forgotten = _forgotten()
    for tie in forgotten:
        if tie.detach_all():
            with LETTING_EXPIRE:
                await release(ASYNCIO, tie.held)
    return [tie.held.name for tie in forgotten]


def _forgotten() -> list[Tie]:
    forgotten = [tied for tied in current() if not tied.tie.is_bound]
    for tied in forgotten:
        forget(tied)
    return [tied.tie for tied in forgotten]


class LockOptions(Options, total=False):
    """The options of `lock`."""

    using: str
    store: str


class Lock(TiedLock, BlockExit, AsyncBlockExit):
    """See `lock`."""

    _options = tuple(LockOptions.__annotations__)
    _errors = AS_DJANGO

    def __init__(
        self, *parts: Any, using: str = DEFAULT_DB_ALIAS, store: str = "default", **options: Unpack[Options]
    ) -> None:
        with AS_DJANGO:
            values = plain(parts := with_model(parts))
        super().__init__(names.join(*values), **options)
        self.fence, self.using, self.store = fence_for((*parts[:1], *values[1:])), using, store
        if self.shared and self._form and not self.fence.supports_shared:
            raise NotSupported(not_shared(self.name), name=self.name)

    def __repr__(self) -> str:
        return f"<lock {self.name!r} in store {self.store!r}>"

    def acquire(self) -> Lease:
        """Hold the lock, waiting at most `wait` seconds.

        Raises AcquireTimeout, AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and
        RowLocked, when a newer or a paused older holder stands in the way at the fence.
        """
        _refuse_in_loop()
        return self._hold_in_thread(Lease._kept)

    async def aacquire(self) -> Lease:
        """See `acquire`. The transaction itself runs in one function called through `sync_to_async`."""
        return await self._hold(DJANGO_ASYNCIO, Lease._kept)

    def __enter__(self) -> Lease:
        _refuse_in_loop()
        begin: Callable[[Lease], Lease] = partial(self._blocks.enter, threading.current_thread())
        return self._hold_in_thread(begin)

    async def __aenter__(self) -> Lease:
        return await self._hold(DJANGO_ASYNCIO, partial(self._blocks.enter, asyncio.current_task()))

    def _store(self) -> Store:
        return stores[self.store]

    @property
    def _home(self) -> str | None:
        """The database in whose transaction the store locks, for a store that does."""
        database: str | None = self._store().backend.capabilities.transaction_database
        return database

    async def _find_or_acquire(self, state: AcquireState) -> TiedDatabases:
        store, runtime = self._store(), state.runtime
        if self.using not in connections.settings:
            raise ConnectionDoesNotExist(f"there is no database {self.using!r}, only: {', '.join(connections)}")
        if (joined := self._find(store, runtime)) is not None:
            return joined
        # A store that locks inside the transaction of that database looks at its snapshot in the same request.
        is_home = self.using == store.backend.capabilities.transaction_database
        if self.snapshot == "raise" and not is_home and (runtime is BLOCKING or _may_be_inside()):
            await runtime.call_database(refuse_old_snapshot, self.name, self.using)
        held, wait, until = await self._acquire_lease(store, state)
        gate = FenceGate(held, self.fence, wait=wait, deadline=until, runtime=runtime)
        return TiedDatabases(Tie(held, runtime), gate)

    async def _bind_lease(self, tied: TiedDatabases, state: AcquireState) -> Lease:
        state.tied, state.lease = tied, (lease := Lease(tied))
        tied.tie.handles.add(lease)
        step = tied.bind if state.is_new else tied.take_in
        await state.runtime.call_database(step, self.using, self._form, lease)
        if state.is_new:
            remember(tied)
        return lease

    def _sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return open_sessions()

    def _transaction(self, backend: Any) -> Any:
        from django_dlock.backends.advisory import transaction_of  # loads what only such a store needs

        return transaction_of(backend, old_snapshot=self.snapshot == "ignore")

    def _find(self, store: Store, runtime: DatabaseRuntime) -> TiedDatabases | None:
        if not (ties := current()):
            return None
        inside = runtime is BLOCKING and in_transaction(store.backend.capabilities.transaction_database or self.using)
        return self._joined(ties, store.backend, inside=inside)  # type: ignore[no-any-return]


class Leases(TiedLeases[Lease]):
    """The leases of several locks, in the order in which these were given to `lock`."""

    __slots__ = ()

    @classmethod
    def _kept(cls, leases: Iterable[Lease]) -> Leases:
        """Make them, each kept by its context; see `Lease._kept`."""
        return cls(map(Lease._kept, leases))

    def release(self) -> None:
        """Release each of them, see `Lease.release`."""
        with ExitStack() as stack:
            for lease in self:
                stack.callback(lease.release)

    async def arelease(self) -> None:
        """See `release`."""
        async with AsyncExitStack() as stack:
            for lease in self:
                stack.push_async_callback(lease.arelease)


class Locks(TiedLocks, BlockExit, AsyncBlockExit):
    """Several locks, of any stores and databases, held all or none; see `lock`."""

    def acquire(self) -> Leases:
        """Hold all of them; raises what `Lock.acquire` raises, and then holds none that it did not hold before.

        Also LeaseLost, when one is lost while the others are waited for. What a store locks inside the caller's
        transaction (`advisory://`) stays locked to its end, or to the rollback of a savepoint.
        """
        _refuse_in_loop()
        return self._hold_in_thread(Leases._kept)

    async def aacquire(self) -> Leases:
        """See `acquire`."""
        return await self._hold(DJANGO_ASYNCIO, Leases._kept)

    def __enter__(self) -> Leases:
        _refuse_in_loop()
        caller = threading.current_thread()
        return self._hold_in_thread(lambda leases: self._blocks.enter(caller, Leases(leases)))

    async def __aenter__(self) -> Leases:
        caller = asyncio.current_task()
        return await self._hold(DJANGO_ASYNCIO, lambda leases: self._blocks.enter(caller, Leases(leases)))


@overload
def lock(first: Lock, /, *others: Lock, wait: Seconds | EllipsisType | None = ...) -> Locks: ...
@overload
def lock(*parts: Any, **options: Unpack[LockOptions]) -> Lock: ...
def lock(*parts: Any, **options: Any) -> Lock | Locks:
    """Name a lock whose lease lasts until the transaction that it protects has ended.

    Use it as `with lock("order", order.pk) as lease:`, with `async with`, or by `.acquire()` and `.aacquire()`.
    `parts` name it; a model class stands for its label, and with a `FencedMixin` model and a key the row itself is the
    fence. `ttl` seconds (default: the store's TTL) is how long it outlives a dead holder; `wait` seconds (the store's
    WAIT; None for ever, 0 one try) bounds the acquire. `shared` lets other shared holders in. `fence`: True or
    "transaction" (each transaction under the lease begins with the admit of its token), "lease" (the token is announced
    at once, and confirmed at each COMMIT), False (none). `using`: the database of the protected data. `store`: an alias
    of DLOCK. `snapshot="ignore"` allows to ask inside a transaction whose snapshot is older than the lock. `reentrant`:
    join the lease that this context holds already, instead of AlreadyHeld; inside a transaction it always joins.

    Guarantees: released after COMMIT or ROLLBACK is known, in any nesting; a holder that lost the lease cannot commit
    on `using`. It does not protect what is outside that database, nor what was read before the transaction began.

    Several locks, also of several stores and databases, are held all or none, whoever asks for them in what order:
    `with lock(lock("account", 1), lock("account", 2, store="ledger", using="ledger"), wait=10) as (source, target):`.
    Each has a lease and a fence of its own. Two databases still commit one after the other.
    """
    if Lock in map(type, parts):
        return Locks(parts, Lock, **options)
    return Lock(*parts, **options)


@async_unsafe(
    "a blocking lock would stop the event loop while it waits, and every task, its holder, too: use "
    "`async with lock(...)` or `await lock(...).aacquire()`, or a thread, with sync_to_async."
)
def _refuse_in_loop() -> None:
    """Raise SynchronousOnlyOperation where Django's own database calls do."""


class _DjangoAsyncio(Asyncio):
    """Waits in the event loop, and calls database code in the thread that owns this context's connections."""

    async def call_database(self, function: Callable[..., Any], *args: Any) -> Any:
        return await sync_to_async(function, thread_sensitive=True)(*args)

    def finish(self, step: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return run(step(BLOCKING, *args))  # transactions end in that thread, which may block


DJANGO_ASYNCIO: Final = _DjangoAsyncio()


def _may_be_inside() -> bool:
    """Say whether the thread that owns the connections waits for this coroutine, and may have a transaction open.

    It does under `async_to_sync`; otherwise it is asgiref's own thread, in which no transaction outlasts a call.
    """
    waiting = AsyncToSync.loop_thread_executors
    return hasattr(AsyncToSync.executors, "current") or asyncio.get_running_loop() in waiting
