"""`lock(...)` of every integration, one lock or several: options, acquire, joining. It knows no database."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack, ExitStack
from itertools import groupby
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, Protocol, TypedDict, TypeVar

from dlock_core import owner
from dlock_core.backend import new_request, supported_ttl
from dlock_core.errors import AlreadyHeld, BackendUnavailable, DLockError, NotHeld, NotSupported
from dlock_core.leases import engine, multilock, watchdog
from dlock_core.leases.handles import Blocks, LeaseView
from dlock_core.options import (
    Seconds,
    check_callback,
    check_switches,
    deadline,
    ttl_seconds,
    unknown_option,
    wait_seconds,
)
from dlock_core.runtime import ASYNCIO, BLOCKING, clock, run
from dlock_core.transactions.tie import LETTING_RUN_OUT, note_failed_release, release

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from dlock_core.backend import Backend, Released, Request
    from dlock_core.leases.lease import Held
    from dlock_core.runtime import Runtime
    from dlock_core.stores import Store
    from dlock_core.transactions.fencing import FenceForm
    from dlock_core.transactions.tie import Tie

__all__ = ["Options", "Tied", "TiedLease", "TiedLock", "TiedLocks", "Turn", "leaving", "leaving_async"]

L = TypeVar("L")


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


class Turn:
    """One acquire of a lock, alone or among others that are taken together: `wait` seconds count from `since`.

    It knows at every moment what is to be undone if the acquire goes no further.
    """

    __slots__ = ("backend", "held", "is_new", "lease", "request", "since", "tied", "wait")

    def __init__(self, *, wait: float | EllipsisType | None = ..., since: float | None = None) -> None:
        self.wait, self.since = wait, clock() if since is None else since
        self.backend: Backend | None = None
        self.request: Request | None = None
        """It was sent, perhaps together with others, and may have been granted."""
        self.held: Held | None = None
        """What came of it."""
        self.tied: Tied | None = None
        """What ties it to transactions, or what ties the lease that it has joined."""
        self.lease: TiedLease | None = None
        """The handle that the caller gets."""
        self.is_new = False
        """The lease is of this turn, not joined."""

    def leave(self) -> None:
        """Need nothing of it any more; without I/O."""
        if self.lease is not None and self.tied is not None:
            self.tied.tie.detach(self.lease)
        if self.is_new and self.tied is not None:
            watchdog.unwatch(self.tied.tie.held)
            self.tied.abandon()
        elif self.held is not None:
            watchdog.unwatch(self.held)

    async def give_back(self, runtime: Runtime) -> None:
        """Leave nothing in the store: neither a lease of this turn, nor what may have been granted."""
        if self.tied is not None:
            if self.is_new:
                await _give_back(runtime, self.tied.tie.held)
        elif self.held is not None:
            await _give_back(runtime, self.held)
        elif self.request is not None and self.backend is not None:
            with LETTING_RUN_OUT:
                await self.backend.abandon(runtime, self.request)

    async def undo(self, runtime: Runtime) -> None:
        """Undo what an acquire has done that goes no further, whatever stopped it and wherever."""
        self.leave()
        await runtime.shield(self.give_back(runtime))


class TiedLock:
    """A name and options, checked before any I/O: ValueError, TypeError."""

    _options: ClassVar[Iterable[str]] = ()
    """Those that the integration's `lock` has."""

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
        check_switches(shared=shared, reentrant=reentrant, renew=renew, fair=fair)
        check_callback("on_lost", on_lost)
        self.name, self._form = name, _form(fence)
        self.ttl = None if ttl is None else ttl_seconds(ttl)
        self.wait = wait if isinstance(wait, EllipsisType) else wait_seconds(wait)
        if snapshot not in ("raise", "ignore"):
            raise ValueError(f"snapshot must be 'raise' or 'ignore', not {snapshot!r}")
        self.shared, self.snapshot = shared, snapshot
        self.reentrant, self.renew, self.fair, self.on_lost = reentrant, renew, fair, on_lost
        self._blocks = Blocks()

    def _request(self, store: Store, turn: Turn) -> Request:
        """Make the request of one acquire; raises NotSupported for what the store cannot do."""
        if self.shared and not store.backend.capabilities.shared:
            raise NotSupported(f"the store {store.alias!r} has no shared locks", name=self.name)
        ttl = supported_ttl(store.backend, self.ttl or store.ttl)
        is_inside = store.backend.capabilities.expiry == "transaction"  # whose it is the database knows
        who = "" if is_inside else owner.text(*self._sessions())
        request = new_request(self.name, ttl, self._seconds(store, turn), shared=self.shared, fair=self.fair, who=who)
        return request._replace(transaction=self._transaction(store.backend)) if is_inside else request

    def _sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the database sessions that are this thread's own, and those in whose open transaction it asks."""
        return (), ()

    def _seconds(self, store: Store, turn: Turn) -> float | None:
        """Tell how long it waits, None for ever."""
        wait = self.wait if isinstance(turn.wait, EllipsisType) else turn.wait
        return store.wait if isinstance(wait, EllipsisType) else wait

    def _whose(self) -> object:
        """Tell who is to hold it, where one thread or task may be several; asked twice for one, it is held once."""
        return None

    async def _ask(self, runtime: Runtime, store: Store, turn: Turn) -> tuple[Held, float | None, float]:
        """Acquire the lease, renewed from now on; also tell the wait in seconds and the moment at which it is over."""
        wait = self._seconds(store, turn)
        until = deadline(turn.since, wait)
        turn.backend, turn.is_new = store.backend, True
        if turn.held is None:
            left = None if wait is None else max(0.0, until - clock())
            turn.request = turn.request or self._request(store, turn)
            try:
                turn.held = await engine.acquire(runtime, store.backend, turn.request, left)
            except DLockError:
                turn.request = None  # the engine has abandoned it
                raise
        held = turn.held
        self._watch(held)
        held.on_lost = () if self.on_lost is None else (self.on_lost,)
        return held, wait, until

    def _transaction(self, backend: Any) -> Any:
        """Give the caller's open transaction, for a store that locks inside it; None outside one."""
        raise NotImplementedError

    def _hold(self, take: Callable[[Turn], Coroutine[Any, Any, L]]) -> L:
        """Acquire it in this thread; what is raised on the way, by whomever, leaves nothing behind."""
        turn = Turn()
        try:
            return run(take(turn))
        except BaseException:
            run(turn.undo(BLOCKING))
            raise

    async def _ahold(self, take: Callable[[Turn], Coroutine[Any, Any, L]]) -> L:
        """Acquire it in this task; see `_hold`."""
        turn = Turn()
        try:
            return await take(turn)
        except BaseException:
            await turn.undo(ASYNCIO)
            raise

    def _watch(self, held: Held) -> None:
        """Have it renewed, unless that is not wanted, done already, or of no use."""
        if self.renew and not held.due and held.until < math.inf:
            watchdog.watch(held)

    def _joined(self, ties: Iterable[Any], backend: Backend, *, inside: bool) -> Any:
        """Find what the owner holds already, among its ties; raises AlreadyHeld where that cannot be joined.

        `inside` a transaction a lease is always joined: its end releases them together.
        """
        for tied in ties:
            if self._is(tied.tie, backend) and not tied.tie.is_over:
                if not (inside or self.reentrant) or (tied.tie.held.request.shared and not self.shared):
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

    def _end(self) -> Released | None:
        """Detach the handle, and release the lease if nothing else needs it; None if something does.

        An interrupt may cut this short at any line, and nothing would come back to finish it: it is repeated at once.
        """
        try:
            return self._detach_and_release()
        except DLockError:
            raise
        except BaseException:
            self._detach_and_release()
            raise

    def _detach_and_release(self) -> Released | None:
        tied, held = self._tied, self._held
        held.ensure_own_process()
        try:
            if tied.tie.open:
                tied.settle_ended()
            if tied.tie.detach(self) and held.ended is None:
                tied.tie.runtime.finish(release, held)
        finally:
            tied.forget_if_over()
        return held.ended

    def _end_block(self, error: BaseException | None) -> None:
        """End the block of this handle, which was left with an error or without."""
        try:
            self._end()
        except (BackendUnavailable, NotHeld) as failure:
            note_failed_release(failure)
        if error is None:
            self._tied.tie.ensure_was_held()

    async def _aend_block(self, error: BaseException | None) -> None:
        """See `_end_block`."""
        try:
            await self._aend()
        except (BackendUnavailable, NotHeld) as failure:
            note_failed_release(failure)
        if error is None:
            self._tied.tie.ensure_was_held()

    async def _aend(self) -> Released | None:
        """See `_end`; finished even while the task is being cancelled."""
        try:
            return await self._adetach_and_release()
        except DLockError:
            raise
        except BaseException:
            await self._adetach_and_release()
            raise

    async def _adetach_and_release(self) -> Released | None:
        tied, held = self._tied, self._held
        held.ensure_own_process()
        try:
            if tied.tie.open:
                tied.settle_ended()
            if tied.tie.detach(self) and held.ended is None:
                await release(ASYNCIO, held)
        finally:
            tied.forget_if_over()
        return held.ended


async def _give_back(runtime: Runtime, held: Held) -> None:
    """Release a lease under which nothing was done, whatever transactions it met."""
    watchdog.unwatch(held)
    with LETTING_RUN_OUT:
        await engine.release(runtime, held)


def _form(fence: Any) -> FenceForm:
    if fence is True or fence == "transaction":
        return "transaction"
    if fence is False or fence == "lease":
        return fence  # type: ignore[no-any-return]
    raise ValueError(f"fence must be True, 'transaction', 'lease' or False, not {fence!r}")


MemberLease = TypeVar("MemberLease", bound="TiedLease")
T = TypeVar("T")


class Leases(tuple[MemberLease, ...]):
    """Leases that are held together, in the order in which their locks were named."""

    __slots__ = ()

    @property
    def lost(self) -> bool:
        """One of them is lost, and so are all."""
        return any(lease.lost for lease in self)

    def remaining(self) -> float:
        """Give the seconds for which all of them surely hold."""
        return min(lease.remaining() for lease in self)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless all of them surely hold."""
        for lease in self:
            lease.ensure_held()


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

    async def _take(
        self,
        runtime: Runtime,
        grant: Callable[[Any, Turn], Awaitable[Any]],
        take_up: Callable[[Any, Any, Turn], Awaitable[MemberLease]],
        finish: Callable[[Iterable[MemberLease]], T],
    ) -> T:
        """Acquire all of them, and only then tie them to their transactions, whose snapshots may begin with that.

        `finish` is what is done with the leases last, where nothing can go wrong any more.
        """
        turns = _Turns(runtime, self)
        try:
            for store, places in groupby(turns.order, key=turns.store_at):
                await turns.grant(store, list(places), grant)
            leases = {
                place: await take_up(self.locks[place], turns.tied[place], turns.turns[place]) for place in turns.order
            }
            for tied in turns.tied.values():
                tied.tie.held.ensure()
            return finish([leases[place] for place in range(len(self.locks))])
        except BaseException as error:
            for turn in turns.turns:
                turn.leave()
            await engine.undo(runtime, turns.give_back(), error, turns.until)
            raise


class _Turns:
    """One acquire of a group, from its first request to its end."""

    def __init__(self, runtime: Runtime, group: TiedLocks) -> None:
        self.runtime, self.locks = runtime, group.locks
        self.stores: list[Store] = [each._place() for each in self.locks]
        self.order = sorted(range(len(self.locks)), key=self._rank)
        for _, places in groupby(self.order, key=lambda place: self._rank(place)[:2]):
            self._refuse_impossible(*places)
        since = clock()
        self.turns = [Turn(wait=group.wait, since=since) for _ in self.locks]
        waits = map(TiedLock._seconds, self.locks, self.stores, self.turns)
        self.until = max(deadline(since, wait) for wait in waits)
        """When the longest of the waits is over."""
        self.tied: dict[int, Any] = {}

    def _rank(self, place: int) -> tuple[str, str, bool]:
        each = self.locks[place]
        return self.stores[place].alias, each.name, each.shared  # exclusive first: a shared one can join it

    def _refuse_impossible(self, first: int, *others: int) -> None:
        """Raise ValueError for locks of one name that have no order among them, or cannot be held together."""
        name, alias, shared = self.locks[first].name, self.stores[first].alias, self.locks[first].shared
        if any(self.stores[place].backend is not self.stores[first].backend for place in others):
            raise ValueError(
                f"the lock {name!r} is asked for in two stores that both go by {alias!r}, and so in no order that "
                "everybody keeps: configure the stores under names of their own, and ask for them by these"
            )
        if not shared and any(self._wish(place) != self._wish(first) for place in others):
            raise ValueError(f"two sessions cannot hold the lock {name!r} together, unless it is shared: ask for one")

    def _wish(self, place: int) -> tuple[str, int]:
        return self.locks[place].name, id(self.locks[place]._whose())

    def store_at(self, place: int) -> Store:
        return self.stores[place]

    async def grant(self, store: Store, places: list[int], grant: Callable[[Any, Turn], Awaitable[Any]]) -> None:
        firsts = {self._wish(place): place for place in reversed(places)}
        await self._ask_for_all(store, list(firsts.values())[::-1])
        for place in places:
            first = firsts[self._wish(place)]
            again = self.tied.get(first)
            self.tied[place] = await grant(self.locks[place], self.turns[place]) if again is None else again

    async def _ask_for_all(self, store: Store, places: list[int]) -> None:
        """Take what is free in one request, if nothing stands against it."""
        if len(places) > 1 and all(self.locks[place]._found(store, self.runtime) is None for place in places):
            requests = [self.locks[place]._request(store, self.turns[place]) for place in places]
            for place, request in zip(places, requests, strict=True):
                self.turns[place].backend, self.turns[place].request = store.backend, request
            taken = await multilock.at_once(self.runtime, store.backend, requests, self.until)
            for place, held in zip(places, taken, strict=False):
                self.turns[place].held = held
                self.locks[place]._watch(held)

    async def give_back(self) -> None:
        """Leave nothing in the stores, last in, first out: neither what was granted, nor what may have been."""
        for place in reversed(self.order):
            await self.turns[place].give_back(self.runtime)


def leaving(leases: Iterable[Any]) -> ExitStack:
    """Leave the blocks of leases, last in, first out, whatever one of them raises."""
    stack = ExitStack()
    for lease in leases:
        stack.push(lease._exit)
    return stack


def leaving_async(leases: Iterable[Any]) -> AsyncExitStack:
    """See `leaving`."""
    stack = AsyncExitStack()
    for lease in leases:
        stack.push_async_exit(lease._aexit)
    return stack
