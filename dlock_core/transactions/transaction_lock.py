"""`lock(...)` of every integration, one lock or several: options, acquire, joining. It knows no database."""

from __future__ import annotations

from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial
from itertools import groupby
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Protocol, TypedDict, TypeVar

from dlock_core import owner
from dlock_core.errors import AlreadyHeld, DLockError, NotSupported
from dlock_core.leases.engine import Acquisition, new_request
from dlock_core.leases.lock import LETTING_EXPIRE, Blocks, LeaseView
from dlock_core.leases.multilock import Leases, acquire_all
from dlock_core.options import LockOptions, Seconds, deadline, unknown_option, wait_seconds
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.transactions.tie import release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlock_core.backend import AcquireRequest, Backend, Released
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import DatabaseRuntime, Runtime
    from dlock_core.stores import Store
    from dlock_core.transactions.fencing import FenceForm
    from dlock_core.transactions.tie import Tie

__all__ = ["AcquireState", "Options", "Tied", "TiedLease", "TiedLeases", "TiedLock", "TiedLocks"]

T = TypeVar("T")
MemberLease = TypeVar("MemberLease", bound="TiedLease")


class Options(TypedDict, total=False):
    """What may be said of a lock; see the integrations' `lock`."""

    ttl: Seconds | None
    wait: Seconds | EllipsisType | None
    shared: bool
    fence: bool | Literal["transaction", "lease"]
    snapshot: Literal["raise", "ignore"]
    reentrant: bool
    renew: bool
    fair: bool
    on_lost: Callable[[], None] | None


class AcquireState:
    """One acquire of a lock, alone or among others that are taken together: `wait` seconds count from `since`.

    It knows at every moment what is to be undone if the acquire goes no further.
    """

    __slots__ = ("acquisition", "lease", "runtime", "since", "tied", "wait")

    def __init__(
        self, runtime: DatabaseRuntime, *, wait: float | EllipsisType | None = ..., since: float | None = None
    ) -> None:
        self.runtime, self.wait, self.since = runtime, wait, clock() if since is None else since
        self.acquisition: Acquisition | None = None
        """What was asked of the store, and what came of it; None where a lease was joined."""
        self.tied: Tied | None = None
        """What ties the lease to transactions, or what ties the lease that was joined."""
        self.lease: TiedLease | None = None
        """The handle that the caller gets."""

    @property
    def is_new(self) -> bool:
        """The lease is of this acquire, not joined."""
        return self.acquisition is not None

    def detach(self) -> None:
        """Need nothing of it any more; without I/O."""
        if self.lease is not None and self.tied is not None:
            self.tied.tie.detach(self.lease)
        if self.acquisition is not None:
            if self.tied is not None:
                self.tied.abandon()  # Nothing was done under the lease, so the transactions it met owe it nothing.
            self.acquisition.detach()

    async def undo(self) -> None:
        """Leave nothing behind, whatever stopped the acquire, and wherever: no lease, and nothing in the store."""
        self.detach()
        if self.acquisition is not None:
            await self.acquisition.undo()


class TiedLock:
    """A name and options, checked before any I/O: ValueError, TypeError."""

    _options: ClassVar[Iterable[str]] = ()
    """Those that the integration's `lock` has."""
    _errors: ClassVar[AbstractContextManager[None, bool | None]] = nullcontext()
    """Raises the integration's own errors for those of the core."""

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
        self.options = LockOptions.checked(
            30.0 if ttl is None else ttl,
            None if isinstance(wait, EllipsisType) else wait,
            shared,
            renew,
            reentrant,
            fair,
            on_lost,
        )
        self._uses_ttl_of_store, self._uses_wait_of_store = ttl is None, isinstance(wait, EllipsisType)
        self.name, self._form = name, _form(fence)
        if snapshot not in ("raise", "ignore"):
            raise ValueError(f"snapshot must be 'raise' or 'ignore', not {snapshot!r}")
        self.shared, self.snapshot = shared, snapshot
        self._blocks = Blocks()

    def _request(self, store: Store, options: LockOptions) -> AcquireRequest:
        """Return the request of one acquire; raises NotSupported for what the store cannot do."""
        if self.shared and not store.backend.capabilities.shared:
            raise NotSupported(f"the store {store.alias!r} has no shared locks", name=self.name)
        if store.backend.capabilities.expiry == "transaction":  # The database knows whose lock it is.
            return new_request(self.name, options, owner="", transaction=self._transaction(store.backend))
        return new_request(self.name, options, owner=owner.text(*self._sessions()))

    def _sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the database sessions that are this thread's own, and those in whose open transaction it asks."""
        return (), ()

    def _wait(self, store: Store, state: AcquireState) -> float | None:
        """Return for how many seconds it waits, None for ever."""
        if not isinstance(state.wait, EllipsisType):
            return state.wait
        return store.wait if self._uses_wait_of_store else self.options.wait

    def _whose(self) -> object:
        """Return who is to hold it, where one thread or task may be several; asked twice for one, it is held once."""
        return None

    def _store(self) -> Store:
        """Return the store that is asked."""
        raise NotImplementedError

    def _find(self, store: Store, runtime: DatabaseRuntime) -> Any:
        """Return the tie of the lease that the caller holds already and may join; None when there is none."""
        raise NotImplementedError

    async def _find_or_acquire(self, state: AcquireState) -> Any:
        """Return the tie of a lease, joined or acquired from the store."""
        raise NotImplementedError

    async def _bind_lease(self, tied: Any, state: AcquireState) -> Any:
        """Tie the lease to the open transactions, or join it; returns the handle that the caller gets."""
        raise NotImplementedError

    def _hold_in_thread(self, finish: Callable[[Any], T]) -> T:
        """Acquire the lock by blocking; see `_hold`. It is undone even if `run` itself is interrupted."""
        state = AcquireState(BLOCKING)
        try:
            return run(self._hold(BLOCKING, finish, state))
        except BaseException:
            run(state.undo())
            raise

    async def _hold(self, runtime: DatabaseRuntime, finish: Callable[[Any], T], state: AcquireState | None = None) -> T:
        """Acquire the lock; whatever is raised on the way, and wherever, leaves nothing behind.

        `finish` is what is done with the handle last, where nothing can go wrong any more.
        """
        state = AcquireState(runtime) if state is None else state
        try:
            with self._errors:
                return finish(await self._bind_lease(await self._find_or_acquire(state), state))
        except BaseException:
            await runtime.shield(state.undo())
            raise

    def _store_runtime(self, store: Store, state: AcquireState) -> Runtime:
        """Return how the store is waited for."""
        return state.runtime

    def _acquisition(self, store: Store, state: AcquireState) -> Acquisition:
        """Return what is asked of the store, made when it is first needed."""
        if state.acquisition is None:
            options = self.options.for_store(
                store.backend.capabilities,
                ttl=store.ttl if self._uses_ttl_of_store else None,
                wait=self._wait(store, state),
            )
            runtime, request = self._store_runtime(store, state), self._request(store, options)
            state.acquisition = Acquisition(runtime, store.backend, request, options, since=state.since)
        return state.acquisition

    async def _acquire_lease(self, store: Store, state: AcquireState) -> tuple[LeaseRecord, float | None, float]:
        """Acquire the lease; returns also the wait in seconds, and the moment at which it is over."""
        wait = self._wait(store, state)
        held = await self._acquisition(store, state).acquire()
        return held, wait, deadline(state.since, wait)

    def _transaction(self, backend: Any) -> Any:
        """Return the caller's open transaction, for a store that locks inside it; None outside one."""
        raise NotImplementedError

    def _joined(self, ties: Iterable[Any], backend: Backend, *, inside: bool) -> Any:
        """Return what the owner holds already, among its ties; raises AlreadyHeld where that cannot be joined.

        `inside` a transaction a lease is always joined: its end releases them together.
        """
        for tied in ties:
            if self._is(tied.tie, backend) and not tied.tie.is_over:
                if not (inside or self.options.reentrant) or (tied.tie.held.request.shared and not self.shared):
                    raise AlreadyHeld(self.name)
                return tied
        return None

    def _is(self, tie: Tie, backend: Backend) -> bool:
        return tie.held.name == self.name and tie.held.backend is backend and tie.held.remaining() > 0.0


class Tied(Protocol):
    """What an integration keeps of one lease: its tie, and the connections or the session that it is tied to."""

    tie: Tie

    def abandon(self) -> None:
        """Note that the acquire has failed: no transaction has to mind the lease any more."""

    def settle_ended(self) -> None:
        """Settle the transactions that have ended although an interrupt has kept the integration from noticing."""

    def forget_if_over(self) -> None:
        """Hold the lease no more where the integration looks for leases, if nothing needs it."""


class TiedLease(LeaseView):
    """A handle of a tied lease: sync and async code, Django and SQLAlchemy, detach and release it here."""

    __slots__ = ("__weakref__", "_tied")

    def __init__(self, tied: Any) -> None:
        self._held = tied.tie.held
        self._tied = tied

    def __del__(self) -> None:
        tied = getattr(self, "_tied", None)  # None: its making was interrupted
        if tied is not None:
            tied.tie.note_collected(self)

    async def _end(self, runtime: Runtime) -> Released | None:
        """Detach the handle, and release the lease if nothing else needs it; None if something does."""
        tied, held = self._tied, self._held
        held.ensure_own_process()
        try:
            if tied.tie.open:
                tied.settle_ended()
            if tied.tie.detach(self) and held.ended is None:
                if runtime is BLOCKING:
                    tied.tie.runtime.finish(release, held)
                else:
                    await release(runtime, held)
        finally:
            tied.forget_if_over()
        return held.ended

    async def _release(self, runtime: Runtime) -> Released | None:
        """End it; what an interrupt has cut short, at any line, is repeated: nothing would come back to finish it."""
        try:
            return await self._end(runtime)
        except DLockError:
            raise
        except BaseException:
            await self._end(runtime)
            raise

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        """End the `with` block; raises LeaseLost where a clean body only looked protected."""
        with LETTING_EXPIRE:
            await self._end(runtime)
        if error is None:
            self._tied.tie.ensure_was_held()


class TiedLeases(Leases[MemberLease]):
    """Leases that are held together, in the order in which their locks were named."""

    __slots__ = ()

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        """End the `with` block of each, last in, first out, whatever one of them raises."""
        stack = AsyncExitStack()
        for lease in self:
            stack.push_async_exit(partial(_leave_block, lease, runtime))
        await stack.__aexit__(None if error is None else type(error), error, None)


async def _leave_block(lease: Any, runtime: Runtime, kind: object, error: BaseException | None, trace: object) -> None:
    await lease._leave_block(runtime, error)


def _form(fence: Any) -> FenceForm:
    if fence is True or fence == "transaction":
        return "transaction"
    if fence is False or fence == "lease":
        return fence  # type: ignore[no-any-return]
    raise ValueError(f"fence must be True, 'transaction', 'lease' or False, not {fence!r}")


class TiedLocks:
    """Locks that are held all or none; `wait` bounds the whole acquire (left out: the wait of each, from its start)."""

    def __init__(
        self,
        locks: Sequence[Any],
        kind: type[TiedLock],
        *,
        wait: Seconds | EllipsisType | None = ...,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_option(unknown, ("wait (of all together; the others are given to each lock)",))
        for each in locks:
            if not isinstance(each, kind):
                raise TypeError(f"every part must be a lock, or none: {each!r} is not")
        self.locks = tuple(locks)
        self.wait = wait if wait is ... else wait_seconds(wait)
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<locks {', '.join(repr(each.name) for each in self.locks)}>"

    def _hold_in_thread(self, finish: Callable[[Iterable[Any]], T]) -> T:
        """Acquire all of them by blocking; see `_hold`."""
        return run(self._hold(BLOCKING, finish))

    async def _hold(self, runtime: DatabaseRuntime, finish: Callable[[Iterable[Any]], T]) -> T:
        """Acquire all of them, and only then tie them to their transactions, whose snapshots may begin with that.

        `finish` is what is done with the handles last, where nothing can go wrong any more.
        """
        group = _Group(runtime, self)

        async def bind() -> T:
            for member in group.members:
                await member.bind_all()
            for member in group.members:
                member.check()
            return finish([group.leases[index] for index in range(len(self.locks))])

        return await acquire_all(runtime, group.members, group.until, bind)


class _Group:
    """One acquire of several locks: in the order that every caller keeps, what one owner asks twice for only once."""

    def __init__(self, runtime: DatabaseRuntime, locks: TiedLocks) -> None:
        self.runtime, self.locks = runtime, locks.locks
        self.stores: list[Store] = [each._store() for each in self.locks]
        self.leases: dict[int, TiedLease] = {}
        order = sorted(range(len(self.locks)), key=self._rank)
        for _, same_name in groupby(order, key=lambda index: self._rank(index)[:2]):
            self._refuse_impossible(*same_name)
        since = clock()
        self.states = [AcquireState(runtime, wait=locks.wait, since=since) for _ in self.locks]
        waits = map(TiedLock._wait, self.locks, self.stores, self.states)
        self.until = max(deadline(since, wait) for wait in waits)
        """When the longest of the waits is over."""
        same_wish: dict[tuple[str, tuple[str, int]], list[int]] = {}
        for index in order:
            same_wish.setdefault((self.stores[index].alias, self._wish(index)), []).append(index)
        self.members = [_Member(self, indices) for indices in same_wish.values()]

    def _rank(self, index: int) -> tuple[str, str, bool]:
        each = self.locks[index]
        return self.stores[index].alias, each.name, each.shared  # Exclusive first: a shared one can join it.

    def _refuse_impossible(self, first: int, *others: int) -> None:
        """Raise ValueError for locks of one name that have no order among them, or cannot be held together."""
        name, alias, shared = self.locks[first].name, self.stores[first].alias, self.locks[first].shared
        if any(self.stores[index].backend is not self.stores[first].backend for index in others):
            raise ValueError(
                f"the lock {name!r} is asked for in two stores that both go by {alias!r}, and so in no order that "
                "everybody keeps: configure the stores under names of their own, and ask for them by these"
            )
        if not shared and any(self._wish(index) != self._wish(first) for index in others):
            raise ValueError(f"two sessions cannot hold the lock {name!r} together, unless it is shared: ask for one")

    def _wish(self, index: int) -> tuple[str, int]:
        return self.locks[index].name, id(self.locks[index]._whose())


class _Member:
    """One lock of a group, or several of one name and owner, of which the first is asked for; a `GroupMember`."""

    def __init__(self, group: _Group, indices: list[int]) -> None:
        self._group, self._indices = group, indices
        first = indices[0]
        self._lock, self._store, self._state = group.locks[first], group.stores[first], group.states[first]
        self._tied: Any = None

    @property
    def backend(self) -> Backend:
        return self._store.backend

    @property
    def pending(self) -> Acquisition | None:
        with self._lock._errors:
            if self._lock._find(self._store, self._group.runtime) is not None:
                return None
            acquisition: Acquisition = self._lock._acquisition(self._store, self._state)
            return acquisition

    async def acquire(self) -> None:
        with self._lock._errors:
            self._tied = await self._lock._find_or_acquire(self._state)

    async def bind_all(self) -> None:
        """Tie the lease to its transactions, once for each of the locks that share it."""
        for index in self._indices:
            lock, state = self._group.locks[index], self._group.states[index]
            with lock._errors:
                self._group.leases[index] = await lock._bind_lease(self._tied, state)

    def check(self) -> None:
        with self._lock._errors:
            self._tied.tie.held.ensure()

    def detach(self) -> None:
        for index in self._indices:
            self._group.states[index].detach()

    async def undo(self) -> None:
        for index in reversed(self._indices):
            await self._group.states[index].undo()
