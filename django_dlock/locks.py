"""`lock(...)`: a lease that is released when the transaction it protects has ended, with the fence in that transaction.

Outside a transaction the lease lasts as long as its block, and each transaction that begins under it is fenced. Inside
a transaction it lasts, like a row lock, until that transaction's COMMIT or ROLLBACK is known.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from asgiref.sync import markcoroutinefunction, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DEFAULT_DB_ALIAS
from django.db.models.signals import pre_migrate
from django.dispatch import receiver

from django_dlock.acquire import DatabaseAcquire
from django_dlock.conf import stores
from django_dlock.connections import listen_to_all
from django_dlock.errors import NotSupported, as_database_error
from django_dlock.fencing import TABLE_FENCE, TableFence
from django_dlock.names import identify
from django_dlock.thread_calls import keep_from_callers
from django_dlock.tie import current
from dlock_core import names
from dlock_core.errors import BackendUnavailable, DLockError, NotHeld
from dlock_core.leases import engine
from dlock_core.leases.blocks import AsyncBlockExit, BlockExit, Blocks
from dlock_core.leases.handles import NoAsyncBlock, NoBlock, let_expire
from dlock_core.owner import in_task
from dlock_core.runtime import ASYNCIO, BLOCKING, Asyncio, run
from dlock_core.transactions.fence_sql import not_shared
from dlock_core.transactions.multilock import TiedLocks
from dlock_core.transactions.tied_lease import TiedLease, TiedLeases, reraise
from dlock_core.transactions.transaction_lock import Options, TiedLock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import EllipsisType
    from typing import Unpack

    from dlock_core.backend import Released
    from dlock_core.options import Seconds
    from dlock_core.runtime import DatabaseRuntime
    from dlock_core.transactions.tie import Tie

__all__ = ["Leases", "Lock", "LockOptions", "Locks", "lock"]

T = TypeVar("T")

listen_to_all()
keep_from_callers()


class Lease(TiedLease, NoBlock, NoAsyncBlock):
    """A lock that this context holds. Its methods do no I/O, except those that renew and release."""

    __slots__ = ()

    _own_error = staticmethod(as_database_error)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease certainly holds now; without I/O."""
        try:
            super().ensure_held()
        except DLockError as error:
            reraise(error, as_database_error)

    def release(self) -> Released | None:
        """Release now; return None if the end of the transaction, or the block that was joined, will release it.

        Raises NotHeld in a forked child, BackendUnavailable if the store cannot be reached: the lease then runs out.
        """
        return run(self._release(BLOCKING))

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, Released | None]:
        """See `release`. From this call on, the lease counts as released by the caller, whichever task awaits it."""
        self._begin_release()
        return self._release(ASYNCIO)

    def _begin_release(self) -> None:
        tied: Any = self._tied
        tied.begin_release(self)

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        run(self._renew(BLOCKING, ttl))

    async def arenew(self, ttl: Seconds | None = None) -> None:
        """See `renew`."""
        await self._renew(ASYNCIO, ttl)


def release_forgotten() -> list[str]:
    """Release all leases that this context still holds outside a transaction; return their names. Ends a request.

    Outside of a request, a lease whose handle was dropped is not among them: it runs out by itself.
    """
    forgotten = _forgotten()
    for tie, is_due in forgotten:
        if is_due:
            tie.release()
    return [tie.held.name for tie, _ in forgotten]


async def release_forgotten_async() -> list[str]:
    """See `release_forgotten`."""
    forgotten = _forgotten()
    for tie, is_due in forgotten:
        if is_due:
            try:
                await engine.release(ASYNCIO, tie.held)
            except (BackendUnavailable, NotHeld) as error:
                let_expire(error)
    return [tie.held.name for tie, _ in forgotten]


def _forgotten() -> list[tuple[Tie, bool]]:
    """Detach the handles of this context's leases; return each lease, and whether it has to be released now."""
    forgotten = [tied for tied in current() if not tied.tie.is_bound]
    return [(tied.tie, tied.end_flow()) for tied in forgotten]


class LockOptions(Options, total=False):
    """The options of `lock`."""

    using: str | None
    store: str


class Lock(TiedLock, BlockExit, AsyncBlockExit):
    """See `lock`."""

    _options = tuple(LockOptions.__annotations__)

    def __init__(
        self, *parts: Any, using: str | None = None, store: str = "default", **options: Unpack[Options]
    ) -> None:
        name, self.fence, self.using = _identified(parts, using)
        super().__init__(name, **options)
        self.store, self._given = store, using
        """`_given`: the caller's `using`; None if the models in the name decide."""
        if self.shared:
            self._refuse_shared_row()

    def _renamed(self, *parts: Any) -> Lock:
        """Return a lock with another name and the options of this one, which are not checked again."""
        name, fence, using = _identified(parts, self._given)
        other = object.__new__(type(self))
        vars(other).update(vars(self), name=name, fence=fence, using=using, _blocks=Blocks())
        if self.shared:
            other._refuse_shared_row()
        return other

    def _refuse_shared_row(self) -> None:
        if self._form and not self.fence.supports_shared:
            raise NotSupported(not_shared(self.name), name=self.name)

    def __repr__(self) -> str:
        return f"<lock {self.name!r} in store {self.store!r}>"

    def acquire(self) -> Lease:
        """Hold the lock until its release, or the end of the open transaction, waiting at most `wait` seconds.

        Keep what it returns: outside of requests, a lease whose handle is dropped runs out. Raises AcquireTimeout,
        AlreadyHeld, BackendUnavailable, SnapshotTooOld; inside a transaction also StaleToken and RowLocked, if a newer
        holder or a paused older one blocks it at the fence.
        """
        refuse_in_loop()
        return self._new_acquire(BLOCKING).hold_in_thread()  # type: ignore[no-any-return]

    async def aacquire(self) -> Lease:
        """See `acquire`. Run the transaction itself in one function called through `sync_to_async`."""
        return await self._new_acquire(DJANGO_ASYNCIO).hold()  # type: ignore[no-any-return]

    def __enter__(self) -> Lease:
        refuse_in_loop()
        enter = self._blocks.entering(threading.current_thread())
        return self._new_acquire(BLOCKING).hold_in_thread(enter)  # type: ignore[no-any-return]

    async def __aenter__(self) -> Lease:
        enter = self._blocks.entering(asyncio.current_task())
        return await self._new_acquire(DJANGO_ASYNCIO).hold(enter)  # type: ignore[no-any-return]

    def _new_acquire(self, runtime: DatabaseRuntime, **together: Any) -> DatabaseAcquire:
        return DatabaseAcquire(
            self,
            stores.created.get(self.store) or stores[self.store],
            runtime,
            form=self._form,
            lease_type=Lease,
            **together,
        )


def _identified(parts: tuple[Any, ...], using: str | None) -> tuple[str, TableFence, str]:
    """Return the name of a lock, its fence, and its database; see `identify`."""
    if names.are_plain(parts):
        return names.join(*parts), TABLE_FENCE, DEFAULT_DB_ALIAS if using is None else using
    try:
        return identify(parts, using)
    except DLockError as error:
        reraise(error, as_database_error)


class Leases(TiedLeases[Lease], NoBlock, NoAsyncBlock):
    """The leases of several locks, in the order in which the locks were passed to `lock`."""

    __slots__ = ()

    def release(self) -> None:
        """Release each of them, see `Lease.release`."""
        with ExitStack() as stack:
            for lease in self:
                stack.callback(lease.release)

    @markcoroutinefunction
    def arelease(self) -> Coroutine[Any, Any, None]:
        """See `release` and `Lease.arelease`."""
        for lease in self:
            lease._begin_release()  # noqa: SLF001 - not for applications
        return self._arelease()

    async def _arelease(self) -> None:
        async with AsyncExitStack() as stack:
            for lease in self:
                stack.push_async_callback(lease._release, ASYNCIO)  # noqa: SLF001 - it was begun above


class Locks(TiedLocks, BlockExit, AsyncBlockExit):
    """Several locks, of any stores and databases, held all or none; see `lock`."""

    _leases_type = Leases

    def acquire(self) -> Leases:
        """Hold all of them; raises the errors of `Lock.acquire`, and then holds none that it did not hold before.

        Also raises LeaseLost if one is lost during the wait for the others. A lock inside the caller's transaction
        (`advisory://`) stays held until its end, or until the rollback of a savepoint.
        """
        refuse_in_loop()
        return run(self._hold(BLOCKING))  # type: ignore[no-any-return]

    async def aacquire(self) -> Leases:
        """See `acquire`."""
        return await self._hold(DJANGO_ASYNCIO)  # type: ignore[no-any-return]

    def __enter__(self) -> Leases:
        refuse_in_loop()
        return run(self._hold(BLOCKING, self._blocks.entering(threading.current_thread())))  # type: ignore[no-any-return]

    async def __aenter__(self) -> Leases:
        return await self._hold(DJANGO_ASYNCIO, self._blocks.entering(asyncio.current_task()))  # type: ignore[no-any-return]


@overload
def lock(first: Lock, /, *others: Lock, wait: Seconds | EllipsisType | None = ...) -> Locks: ...
@overload
def lock(*parts: Any, **options: Unpack[LockOptions]) -> Lock: ...
def lock(*parts: Any, **options: Any) -> Lock | Locks:
    """Name a lock whose lease lasts until the transaction that it protects has ended.

    Use it as `with lock("order", order.pk) as lease:`, with `async with`, or by `.acquire()` and `.aacquire()`. `parts`
    name it; a model class stands for its label, and with a `FencedMixin` model and a key the row itself is the fence.
    `ttl` seconds (default: the store's TTL) is how long it outlives a dead holder; `wait` seconds (default: the store's
    WAIT; None means no limit, 0 one try) limits the acquire. `shared` allows other shared holders. `fence`: True or
    "transaction" (each transaction under the lease begins with the admit of its token), "lease" (the token is announced
    at once, and confirmed at each COMMIT), False (none). `using`: the database of the protected data (default: that to
    which the router writes the models in the name, and "default" if there are none; ValueError if they differ).
    `store`: an alias of DLOCK. `snapshot="ignore"` allows an acquire inside a transaction whose snapshot is older than
    the lock. `reentrant`: join the lease that this context already holds, instead of raising AlreadyHeld; inside a
    transaction it always joins.

    Guarantees: released after COMMIT or ROLLBACK is known, in any nesting; a holder that lost the lease cannot commit
    on `using`. It does not protect what is outside that database, nor what was read before the transaction began.

    Several locks, even of several stores and databases, are held all or none, in whatever order they are listed: `with
    lock(lock("account", 1), lock("account", 2, store="ledger", using="ledger"), wait=10) as (source, target):`. Each
    has a separate lease and fence. Two databases still commit one after the other.
    """
    if not _LOCK_TYPES.isdisjoint(map(type, parts)):
        return Locks(parts, Lock, **options)
    return Lock(*parts, **options)


_LOCK_TYPES: Final = frozenset({Lock, Locks})


def refuse_in_loop() -> None:
    """Raise SynchronousOnlyOperation in the same cases as Django's own database calls."""
    if in_task() and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            "a blocking lock would stop the event loop while it waits, and every task, its holder, too: use "
            "`async with lock(...)` or `await lock(...).aacquire()`, or a thread, with sync_to_async."
        )


class _DjangoAsyncio(Asyncio):
    """Waits in the event loop, and calls database code in the thread that owns this context's connections."""

    async def call_database(self, function: Callable[..., Any], *args: Any) -> Any:
        return await sync_to_async(function, thread_sensitive=True)(*args)

    def finish(self, step: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return run(step(BLOCKING, *args))  # transactions end in that thread, which may block


DJANGO_ASYNCIO: Final = _DjangoAsyncio()


@receiver(pre_migrate)
def _refuse_migrations(using: str, **_: object) -> None:
    """Refuse `migrate` before it begins: its writes outside a transaction would be refused half-way."""
    for each in current():
        if each.tie.handles and each.gate.forms.get(using):
            name = each.held.name
            raise NotSupported(
                f"migrations cannot be fenced by the lock {name!r}: Django records outside of "
                "their transactions that they were applied; take it with fence=False around migrate",
                name=name,
            )
