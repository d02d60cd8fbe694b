"""`lock(...)` of every integration: options, joining, acquire. Independent of databases; `multilock` takes several."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, TypedDict

from dlock_core import owner
from dlock_core.errors import AlreadyHeld, BackendUnavailable, DLockError, NotHeld, NotSupported
from dlock_core.leases.acquisition import Acquisition, new_request
from dlock_core.leases.blocks import Blocks
from dlock_core.leases.handles import let_expire
from dlock_core.options import (
    LockOptions,
    Seconds,
    check_flags,
    store_ttl,
    ttl_seconds,
    unknown_option,
    wait_seconds,
)
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.transactions.fencing import FenceGate
from dlock_core.transactions.tie import Tie
from dlock_core.transactions.tied_lease import reraise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import AcquireRequest, Backend
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import DatabaseRuntime, Runtime
    from dlock_core.stores import Store
    from dlock_core.transactions.fencing import Fence, FenceForm
    from dlock_core.transactions.tied_lease import Tied, TiedLease

__all__ = ["LockAcquire", "Options", "TiedLock"]


class Options(TypedDict, total=False):
    """The options of a lock; see the integrations' `lock`."""

    ttl: Seconds | None
    wait: Seconds | EllipsisType | None
    shared: bool
    fence: bool | Literal["transaction", "lease"]
    snapshot: Literal["raise", "ignore"]
    reentrant: bool
    renew: bool
    fair: bool
    on_lost: Callable[[], None] | None


class TiedLock:
    """A name and options, checked before any I/O: ValueError, TypeError.

    Args:
        fence: How the databases are protected: True means "transaction", False means not at all.
    """

    fence: Fence
    _options: ClassVar[Iterable[str]] = ()
    """The options of the integration's `lock`."""

    def __init__(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | EllipsisType | None = ...,
        shared: bool = False,
        fence: bool | Literal["transaction", "lease"] = True,
        snapshot: Literal["raise", "ignore"] = "raise",
        reentrant: bool = False,
        renew: bool = True,
        fair: bool = True,
        on_lost: Callable[[], None] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_option(unknown, self._options)
        check_flags(shared, renew, reentrant, fair, on_lost)
        self.ttl = None if ttl is None else ttl_seconds(ttl)
        self.wait = wait if isinstance(wait, EllipsisType) else wait_seconds(wait)
        self.name, self._form = name, _form(fence)
        if snapshot not in ("raise", "ignore"):
            raise ValueError(f"snapshot must be 'raise' or 'ignore', not {snapshot!r}")
        self.shared, self.snapshot = shared, snapshot
        self.reentrant, self.renew, self.fair, self.on_lost = reentrant, renew, fair, on_lost
        self._blocks = Blocks()

    def _new_acquire(
        self, runtime: DatabaseRuntime, *, wait: float | EllipsisType | None = ..., since: float | None = None
    ) -> LockAcquire:
        """Return the integration's `LockAcquire`, which acquires the lock once; see there for the arguments."""
        raise NotImplementedError


def _form(fence: Any) -> FenceForm:
    if fence is True or fence == "transaction":
        return "transaction"
    if fence is False or fence == "lease":
        return fence  # type: ignore[no-any-return]
    raise ValueError(f"fence must be True, 'transaction', 'lease' or False, not {fence!r}")


class LockAcquire:
    """One acquire of a lock, alone or among others that are acquired together; a `GroupMember` of the engine.

    It knows at every moment what has to be undone if the acquire stops. A subclass in each integration supplies what
    only the integration can know about the caller: what it already holds, its transaction, its database sessions.

    Args:
        lock: The lock, whose name and options are read.
        store: Its store.
        runtime: How the caller waits, and where its database connection may be used.
        form: How the lease protects the database.
        lease_type: The class of the handle that the caller gets.
        wait: Seconds that replace those of the lock; by default those of the lock or the store apply.
        since: The time at which the wait began; by default now.
    """

    own_error = staticmethod(lambda error: error)
    """Returns the integration's own error for one of the core."""

    def __init__(
        self,
        lock: Any,
        store: Store,
        runtime: DatabaseRuntime,
        *,
        form: FenceForm,
        lease_type: type[TiedLease],
        wait: float | EllipsisType | None = ...,
        since: float | None = None,
    ) -> None:
        self.lock, self.form, self.lease_type = lock, form, lease_type
        self.store, self.runtime = store, runtime
        wait = lock.wait if isinstance(wait, EllipsisType) else wait
        self.wait: float | None = store.wait if isinstance(wait, EllipsisType) else wait
        self.since = clock() if since is None else since
        self.acquisition: Acquisition | None = None
        """The request to the store, and its outcome; None if a lease was joined."""
        self.tied: Tied | None = None
        """Ties the new lease, or the lease that was joined, to transactions."""
        self.lease: TiedLease | None = None
        """The handle that the caller gets."""
        self.for_block = False
        """Whether a block will hold it."""

    @property
    def database(self) -> Any:
        """The integration's identifier of the database that the lock protects."""
        raise NotImplementedError

    def find(self) -> Tied | None:
        """Return the lease that the caller holds and may join, or None; raises AlreadyHeld if it may not join."""
        raise NotImplementedError

    async def find_or_prepare(self) -> Tied | None:
        """Return the lease that the caller joins, or None if a new one is needed and its transaction allows it.

        Raises SnapshotTooOld.
        """
        raise NotImplementedError

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the database sessions of this thread, and those in whose open transaction it requests the lock."""
        return (), ()

    def caller_transaction(self) -> Any:
        """Return the caller's open transaction, for a store that locks inside it; None outside one."""
        raise NotImplementedError

    @property
    def store_runtime(self) -> Runtime:
        """The runtime for requests to the store."""
        return self.runtime

    def new_tied(self, tie: Tie, gate: FenceGate) -> Tied:
        """Return a new `Tied` for the caller's transactions."""
        raise NotImplementedError

    @property
    def owner_key(self) -> int:
        """Distinguishes the owners of several locks, where one thread or task may be several owners."""
        return 0

    def joined(self, ties: Iterable[Any], *, inside: bool) -> Any:
        """Return the owner's lease of this lock among its ties; raises AlreadyHeld if it cannot be joined.

        `inside` a transaction a lease is always joined: the end of the transaction releases both handles together.
        """
        lock = self.lock
        for tied in ties:
            held = tied.tie.held
            is_same = held.name == lock.name and held.backend is self.store.backend
            if is_same and tied.tie.is_joinable and not tied.tie.is_over:
                is_upgrade = held.request.shared and not lock.shared
                if is_upgrade or not (inside or lock.reentrant):
                    raise AlreadyHeld(lock.name, shared=is_upgrade)
                return tied
        return None

    def hold_in_thread(self, enter: Callable[[Any], object] | None = None) -> Any:
        """Acquire the lock in blocking code; see `hold`. The acquire is undone even if `run` itself is interrupted."""
        try:
            return run(self.hold(enter))
        except BaseException:
            run(self.undo())
            raise

    def __enter__(self) -> Any:
        """Begin a block that ends in the function that began it: no other caller shares it, so it needs no `Blocks`."""
        return self.hold_in_thread(bool)  # called with the handle, and does nothing

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        lease: Any = self.lease
        try:
            run(lease._leave_block(BLOCKING, error))  # noqa: SLF001 - the user of a lease is not to call it
        except DLockError:
            raise
        except BaseException:  # A signal handler has raised, at any step; every step can be repeated.
            run(lease._leave_block(BLOCKING, error))  # noqa: SLF001 - the user of a lease is not to call it
            raise

    async def hold(self, enter: Callable[[Any], object] | None = None) -> Any:
        """Acquire the lock and return its handle; an exception at any point leaves nothing behind.

        `enter(handle)` begins the block that holds the handle; without a block the integration keeps it.
        """
        self.for_block = enter is not None
        try:
            await self.acquire()
            tie = self.take_handle()
            while self.acquisition is None and not tie.is_joinable:  # Another thread has just released it.
                await self._let_go()
                await self.acquire()
                tie = self.take_handle()
            await self.bind()
            if enter is None:
                self.keep()
            else:
                enter(self.lease)
            return self.lease  # noqa: TRY300 - an interrupt before the return is undone, too
        except BaseException as error:
            await self.runtime.shield(self.undo())
            if isinstance(error, DLockError):
                reraise(error, self.own_error)
            raise

    async def acquire(self) -> None:
        """Join the lease that the caller holds, or acquire one from the store."""
        self.tied = await self.find_or_prepare()
        if self.tied is None:
            held, until = await self.acquire_lease()
            gate = FenceGate(held, self.lock.fence, wait=self.wait, deadline=until, runtime=self.runtime)
            self.tied = self.new_tied(Tie(held, self.runtime), gate)

    async def acquire_lease(self) -> tuple[LeaseRecord, float]:
        """Acquire a lease from the store; also return the time at which the wait is over."""
        acquisition = self._new_acquisition()
        return await acquisition.acquire(), acquisition.deadline

    async def _let_go(self) -> None:
        """Detach from a lease that was joined, and release it if nothing else needs it."""
        lease: Any = self.lease
        await lease._end(self.runtime)  # noqa: SLF001 - the user of a lease is not to call it

    def take_handle(self) -> Tie:
        """Create the caller's handle, and return the tie that it belongs to."""
        tied: Any = self.tied
        self.lease = self.lease_type(tied)
        self.lease._in_block = self.for_block  # noqa: SLF001 - the user of a lease is not to see it
        tied.tie.attach(self.lease)  # Only now, when `detach` can find it.
        return tied.tie  # type: ignore[no-any-return]

    async def bind(self) -> None:
        """Tie the lease to the caller's open transactions, or join it."""
        tied: Any = self.tied
        step = tied.join if self.acquisition is None else tied.bind
        if self.runtime is BLOCKING:
            step(self.database, self.form, self.lease)
        else:
            await self.runtime.call_database(step, self.database, self.form, self.lease)

    def keep(self) -> None:
        """Keep the handle alive without a block."""
        tied: Any = self.tied
        tied.keep(self.lease)

    def detach(self) -> None:
        """Drop the lease, without I/O."""
        tied = self.tied
        if tied is not None and self.lease is not None:
            tied.tie.detach(self.lease)
        if self.acquisition is not None:
            if tied is not None:  # No work was done under the lease, so no open transaction has to check it.
                tied.tie.abandon()
                tied.forget()
            self.acquisition.detach()

    async def undo(self) -> None:
        """Undo the acquire, at whatever point it stopped: leave no lease, and nothing in the store."""
        self.detach()
        if self.acquisition is not None:
            await self.acquisition.undo()
        elif self.lease is not None:  # Others may have released the lease that was joined.
            try:
                await self._let_go()
            except (BackendUnavailable, NotHeld) as error:
                let_expire(error)

    def undo_later(self) -> None:
        """Undo the acquire in the background; it was detached before."""
        if self.acquisition is not None:
            self.acquisition.undo_later()

    @property
    def backend(self) -> Backend:
        """The store that is asked."""
        return self.store.backend

    @property
    def pending(self) -> Acquisition | None:
        """The request to the store; None if the lock is already held."""
        return None if self.find() is not None else self._new_acquisition()

    def _new_acquisition(self) -> Acquisition:
        """Return the request to the store, created when it is first needed."""
        if self.acquisition is None:
            backend, lock = self.store.backend, self.lock
            ttl = store_ttl(lock.ttl or self.store.ttl, backend.capabilities)
            options = LockOptions(ttl, self.wait, lock.shared, lock.renew, lock.reentrant, lock.fair, lock.on_lost)
            self.acquisition = Acquisition(
                self.store_runtime, backend, self._request(options), options, since=self.since
            )
        return self.acquisition

    def _request(self, options: LockOptions) -> AcquireRequest:
        """Return the request of this acquire; raises NotSupported if the store cannot do it."""
        capabilities, name = self.store.backend.capabilities, self.lock.name
        if options.shared and not capabilities.shared:
            raise NotSupported(f"the store {self.store.alias!r} has no shared locks", name=name)
        if capabilities.expiry == "transaction":  # The database itself identifies the owner.
            return new_request(name, options, owner="", transaction=self.caller_transaction())
        return new_request(name, options, owner=owner.text(*self.sessions()))
