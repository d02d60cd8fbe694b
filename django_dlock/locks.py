"""`lock(...)`: a lease that is released when the transaction it protects has ended, with the fence in that transaction.

Outside a transaction the lease lives as long as its block, and each transaction that begins under it is fenced. Inside
one it lives, like a row lock, until that transaction's COMMIT or ROLLBACK is known.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, overload

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections, models
from django.utils.connection import ConnectionDoesNotExist

from django_dlock.backends.advisory import home_of, transaction_of
from django_dlock.conf import stores
from django_dlock.database_sessions import open_sessions
from django_dlock.errors import NotSupported
from django_dlock.fencing import fence_for
from django_dlock.leases import AS_DJANGO, Lease
from django_dlock.snapshots import refuse_old_snapshot
from django_dlock.ties import DatabaseTie, current, remember
from django_dlock.transactions import in_transaction
from dlock_core import names, together
from dlock_core.runtime import ASYNCIO, BLOCKING, Blocking, Runtime, run
from dlock_core.tied import Options, TiedLock, Turn
from dlock_core.together import TiedLocks, leaving, leaving_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import EllipsisType, TracebackType
    from typing import Unpack

    from dlock_core.deadline import Seconds
    from dlock_core.store import Store

__all__ = ["Leases", "Lock", "LockOptions", "Locks", "lock"]


class LockOptions(Options, total=False):
    """The options of `lock`."""

    using: str
    store: str


class Lock(TiedLock):
    """See `lock`."""

    def __init__(
        self, *parts: Any, using: str = DEFAULT_DB_ALIAS, store: str = "default", **options: Unpack[Options]
    ) -> None:
        super().__init__(names.join(*map(_part, parts)), **options)
        self.fence, self.using, self.store = fence_for(parts), using, store
        if self.shared and self.form and not self.fence.supports_shared:
            raise NotSupported("a row is no fence for shared locks: name the lock by a text instead of its model")

    def __repr__(self) -> str:
        return f"<lock {self.name!r} in store {self.store!r}>"

    def acquire(self) -> Lease:
        """Hold the lock, waiting at most `wait` seconds.

        Raises AcquireTimeout, AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and
        RowLocked, when a newer or a paused older holder stands in the way at the fence.
        """
        with AS_DJANGO:
            return run(self._acquire(BLOCKING, BLOCKING))

    async def aacquire(self) -> Lease:
        """See `acquire`. The transaction itself runs in one function called through `sync_to_async`."""
        with AS_DJANGO:
            return await self._acquire(ASYNCIO, SENSITIVE)

    def __enter__(self) -> Lease:
        return self._blocks.enter(threading.current_thread(), self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._blocks.leave(threading.current_thread())
        lease._exit(kind, error, trace)

    async def __aenter__(self) -> Lease:
        return self._blocks.enter(asyncio.current_task(), await self.aacquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._blocks.leave(asyncio.current_task())
        await lease._aexit(kind, error, trace)

    def place(self) -> Store:
        return stores[self.store]

    @property
    def home(self) -> str | None:
        """The database in whose transaction the store locks, for a store that does."""
        return home_of(self.place().backend)

    async def _acquire(self, runtime: Runtime, database: Runtime) -> Lease:
        turn = Turn()
        return await self._take_up(runtime, database, await self._grant(runtime, turn), turn)

    async def _grant(self, runtime: Runtime, turn: Turn) -> DatabaseTie:
        store = self.place()
        if self.using not in connections.settings:
            raise ConnectionDoesNotExist(f"there is no database {self.using!r}, only: {', '.join(connections)}")
        if (joined := self._joined(store, runtime)) is not None:
            return joined
        is_home = self.using == home_of(store.backend)  # what a store locks inside of is looked at in the same request
        if runtime is BLOCKING and self.snapshot == "raise" and not is_home:
            refuse_old_snapshot(self.name, self.using)
        held, wait, until = await self.ask(runtime, store, turn)
        return DatabaseTie(held, fence=self.fence, wait=wait, deadline=until)

    async def _take_up(self, runtime: Runtime, database: Runtime, tie: DatabaseTie, turn: Turn) -> Lease:
        if turn.is_new:
            await self.keep(runtime, tie, database.call(tie.bind, self.using, self.form))
            remember(tie)
        else:
            await database.call(tie.protect, self.using, self.form)
            tie.depth += 1
        return Lease(tie)

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return open_sessions()

    def transaction(self, backend: Any) -> Any:
        return transaction_of(backend, old_snapshot=self.snapshot == "ignore")

    def _joined(self, store: Store, runtime: Runtime) -> DatabaseTie | None:
        if not (ties := current()):
            return None
        inside = isinstance(runtime, Blocking) and in_transaction(home_of(store.backend) or self.using)
        return self.joined(ties, store.backend, inside=inside)  # type: ignore[no-any-return]


class Leases(together.Leases[Lease]):
    """The leases of several locks, in the order in which these were given to `lock`."""

    __slots__ = ()

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


class Locks(TiedLocks):
    """Several locks, of any stores and databases, held all or none; see `lock`."""

    def acquire(self) -> Leases:
        """Hold all of them; raises what `Lock.acquire` raises, and then holds none that it did not hold before.

        Also LeaseLost, when one is lost while the others are waited for. What a store locks inside the caller's
        transaction (`advisory://`) stays locked to its end, or to the rollback of a savepoint.
        """
        with AS_DJANGO:
            return run(self._acquire(BLOCKING, BLOCKING))

    async def aacquire(self) -> Leases:
        """See `acquire`."""
        with AS_DJANGO:
            return await self._acquire(ASYNCIO, SENSITIVE)

    def __enter__(self) -> Leases:
        return self._blocks.enter(threading.current_thread(), self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving(self._blocks.leave(threading.current_thread())).__exit__(kind, error, trace)

    async def __aenter__(self) -> Leases:
        return self._blocks.enter(asyncio.current_task(), await self.aacquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await leaving_async(self._blocks.leave(asyncio.current_task())).__aexit__(kind, error, trace)

    async def _acquire(self, runtime: Runtime, database: Runtime) -> Leases:
        def grant(each: Lock, turn: Turn) -> Awaitable[DatabaseTie]:
            return each._grant(runtime, turn)

        def take_up(each: Lock, tie: DatabaseTie, turn: Turn) -> Awaitable[Lease]:
            return each._take_up(runtime, database, tie, turn)

        return Leases(await self.take(runtime, grant, take_up))


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


class _Sensitive(Blocking):
    """Calls database code in the thread that owns this context's connections."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await sync_to_async(function, thread_sensitive=True)(*args)


SENSITIVE = _Sensitive()


def _part(part: Any) -> Any:
    if isinstance(part, models.Model):  # its text may change while the row stays the same
        raise TypeError(f"an instance is no name: lock its class and primary key, lock({type(part).__name__}, key)")
    is_model = isinstance(part, type) and issubclass(part, models.Model)
    return part._meta.label_lower if is_model else part
