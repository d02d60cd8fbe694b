"""Several locks together, all or none: sorted and without repetition, so that overlapping sets cannot deadlock.

If the store can do so and all locks are free, one request takes or releases all of them. Otherwise they are acquired
one after the other in the order of their names, each waiting in its own queue while those before it are held.
`acquire_all` is the algorithm for every kind of lock.
"""

from __future__ import annotations

import asyncio
import threading
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Never, Protocol, TypeVar

from dlock_core.backend import Released, supports_many
from dlock_core.errors import AlreadyHeld, BackendUnavailable, NotHeld
from dlock_core.leases.acquisition import MAX_OVERTIME_S, Acquisition, clean_up, new_requests
from dlock_core.leases.blocks import AsyncBlockExit, BlockExit, Blocks
from dlock_core.leases.callers import find_held, forget_held, note_held
from dlock_core.leases.engine import release, release_later
from dlock_core.leases.handles import AsyncReleasing, LeaseHandle, LeaseView, Releasing, let_expire, no_copies
from dlock_core.leases.lock import capabilities_of, current_task
from dlock_core.leases.watchdog import renew_in_background
from dlock_core.names import canonical
from dlock_core.observability import hooks
from dlock_core.options import Seconds, check_flags, deadline, store_ttl, ttl_seconds, unknown_option, wait_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence

    from dlock_core.backend import Backend, SupportsMany
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime

__all__ = [
    "AsyncMultiLease", "AsyncMultiLock", "GroupMember", "Leases", "MultiLease", "MultiLock", "acquire_all",
    "release_all",
]  # fmt: skip

T = TypeVar("T")
L = TypeVar("L", "MultiLease", "AsyncMultiLease")


class GroupMember(Protocol):
    """One of several locks that are acquired together; an `Acquisition` is one."""

    @property
    def backend(self) -> Backend:
        """The store of the lock."""

    @property
    def pending(self) -> Acquisition | None:
        """What has to be requested from the store; None if the lock is already held."""

    async def acquire(self) -> object:
        """Wait for this lock, while those before it are held."""

    def detach(self) -> None:
        """Drop the lock without I/O, because the whole acquire has failed."""

    async def undo(self) -> None:
        """Remove everything of this acquire from the store."""

    def undo_later(self) -> None:
        """Undo the acquire in the background."""


async def acquire_all(
    runtime: Runtime, members: Sequence[GroupMember], until: float, finish: Callable[[], Awaitable[T]]
) -> T:
    """Acquire several locks, all or none, and return what `finish` makes of them.

    The members are in the order that every caller uses, so that overlapping sets cannot deadlock. Those of one store
    are requested in one request if the store supports that; then the acquire waits for those that are not free, one
    after the other. Whatever stops this or `finish`, nothing is held afterwards that was not held before. `until`: when
    the longest of the waits is over.
    """
    try:
        for _, neighbours in groupby(members, key=attrgetter("backend")):
            of_one_store = [*neighbours]
            await _acquire_in_one_request(runtime, of_one_store, until)
            for member in of_one_store:
                await member.acquire()
        return await finish()
    except BaseException as error:
        try:
            await _undo_all(runtime, members, error, until)
        except asyncio.CancelledError:
            _undo_later(members)
            raise
        except BaseException:  # The clean-up itself was interrupted: it may be repeated, and must be.
            await _undo_all(runtime, members, error, until)
            raise
        raise


async def _acquire_in_one_request(runtime: Runtime, members: Sequence[GroupMember], until: float) -> None:
    """Take all of the locks in one request; none if the store cannot do that, or if one of them is already held.

    A member's request is read only if it is needed: the member may have to connect for it.
    """
    backend = members[0].backend
    if len(members) == 1 or not supports_many(backend):
        return
    asked = [each for member in members if (each := member.pending) is not None and not each.request.shared]
    if len(asked) < len(members):
        return
    sent = runtime.now()
    for each in asked:
        each.touched = True
    try:
        granted = await backend.try_acquire_many(runtime, [each.request for each in asked])
    except BackendUnavailable:
        if runtime.now() > until + MAX_OVERTIME_S:
            raise
        return  # It may have worked. Each lock is now requested with the same holder, which then finds its own grant.
    for each in asked:
        each.touched = granted is not None
    for each, grant in zip(asked, granted or (), strict=False):
        each.accept(grant, sent, renewed=False)
    renew_in_background(*[each.held for each in asked if each.held is not None and each.renew])


async def _undo_all(runtime: Runtime, members: Sequence[GroupMember], error: BaseException, until: float) -> None:
    for member in members:
        member.detach()
    await clean_up(runtime, _undo_each(members), error, until)


async def _undo_each(members: Sequence[GroupMember]) -> None:
    try:
        for member in reversed(members):
            await member.undo()
    except asyncio.CancelledError:
        _undo_later(members)
        raise


def _undo_later(members: Sequence[GroupMember]) -> None:
    """Undo the rest in the background, because the caller's event loop is ending."""
    for member in members:
        member.undo_later()


async def release_all(runtime: Runtime, held: Sequence[LeaseRecord]) -> list[Released]:
    """End all of the grants: in one request if the store supports that, and one by one those that it left open.

    Raises BackendUnavailable for the first whose end is unknown, after all were tried; NotHeld in a forked child.
    """
    return await runtime.shield(_release_all(runtime, held))


async def _release_all(runtime: Runtime, held: Sequence[LeaseRecord]) -> list[Released]:
    still_held = [one for one in held if one.ended is None]
    began, failure = runtime.now(), None
    if still_held and supports_many(backend := still_held[0].backend):
        failure = await _release_in_one_request(runtime, backend, still_held)
    for one in [one for one in still_held if one.ended is None]:
        if failure is not None and not failure.refused and runtime.now() > began + MAX_OVERTIME_S:
            release_later(one)  # A silent store would delay the caller once more for each.
            continue
        try:
            await release(runtime, one)
        except BackendUnavailable as error:  # The others may be on another node of the store.
            failure = failure or error
    if failure is not None and any(one.ended is None for one in held):
        raise failure
    return [one.ended for one in held if one.ended is not None]


async def _release_in_one_request(
    runtime: Runtime, backend: SupportsMany, held: Sequence[LeaseRecord]
) -> BackendUnavailable | None:
    for one in held:
        one.begin_release()
    try:
        found = await backend.release_many(runtime, [one.request for one in held])
    except BackendUnavailable as error:
        return error
    ended_now = [one for one, what in zip(held, found, strict=True) if one.end(what)]
    for one in ended_now if hooks.subscribed else ():
        one.emit_released()
    return None


MemberLease = TypeVar("MemberLease", bound=LeaseView)


class Leases(tuple[MemberLease, ...]):
    """Leases that are held together; each property covers all of them."""

    __slots__ = ()

    def __reduce__(self) -> Never:
        raise no_copies(self)

    @property
    def lost(self) -> bool:
        """Whether one of them is lost, and so all of them."""
        return any(lease.lost for lease in self)

    def remaining(self) -> float:
        """Return the seconds for which all of them certainly hold."""
        return min(lease.remaining() for lease in self)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless all of them certainly hold."""
        for lease in self:
            lease.ensure_held()


class _MultiLease(Leases[LeaseHandle]):
    """Several leases that are held together, in the order of their names."""

    @property
    def leases(self) -> tuple[LeaseView, ...]:
        """Each of them, in the order of their names."""
        return tuple(self)

    async def _end(self, runtime: Runtime) -> list[Released]:
        """Leave all of them, and release those that no other handle has joined; can be repeated after an interrupt."""
        held = [lease._held for lease in self]  # noqa: SLF001 - the handles of one package
        unneeded = [one for one, lease in zip(held, self, strict=True) if one.leave(lease._membership)]  # noqa: SLF001
        try:
            await release_all(runtime, unneeded)
        finally:
            forget_held(unneeded)
        return [one.ended or Released.RELEASED for one in held]

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        try:
            await self._end(runtime)
        except (BackendUnavailable, NotHeld) as failure:
            let_expire(failure)
        for lease in self:
            lease._held.ensure_was_held(error)  # noqa: SLF001 - the handles of one package


class MultiLease(_MultiLease, Releasing["list[Released]"]):
    """See `MultiLock`."""


class AsyncMultiLease(_MultiLease, AsyncReleasing["list[Released]"]):
    """See `AsyncMultiLock`."""


class _MultiLock:
    """Several names in a store, held all or none; arguments as for `Lock`."""

    renew, fair, on_lost = True, True, None
    """Fixed here; `Lock` has options for them."""

    def __init__(
        self, backend: Backend, names: Iterable[str], *, ttl: Seconds = 30.0, wait: Seconds | None = 10.0,
        shared: bool = False, **unknown: Never,
    ) -> None:  # fmt: skip
        if unknown:
            raise unknown_option(unknown, ("ttl", "wait", "shared"))
        check_flags(shared, True, False, True, None)
        if isinstance(names, str):
            raise TypeError(f"a MultiLock takes several names, not the letters of one: give [{names!r:.80}]")
        self.names = tuple(sorted({canonical(name) for name in names}))
        if not self.names:
            raise ValueError("a MultiLock needs at least one name")
        can = capabilities_of(backend, self.names[0], shared=shared)
        self.ttl, self.wait, self.shared = store_ttl(ttl_seconds(ttl), can), wait_seconds(wait), shared
        self.backend, self._blocks = backend, Blocks()

    async def _hold(
        self, runtime: Runtime, caller: Hashable, kind: type[L], *, enter: Callable[[L], L] | None = None
    ) -> L:
        """Acquire all; see `Lock._hold` for the arguments, and for what happens when it is interrupted.

        Raises LeaseLost if one is lost while this waits for the others.
        """
        since, lease = runtime.now(), None
        if (known := find_held(caller, self.backend, *self.names)) is not None:
            raise AlreadyHeld(known.name, shared=known.request.shared and not self.shared)
        acquisitions = [
            Acquisition(runtime, self.backend, request, self, since=since) for request in new_requests(self.names, self)
        ]

        async def hand_out() -> L:
            nonlocal lease
            held = [each.held or await each.acquire() for each in acquisitions]
            for one in held:
                if not one.remaining():
                    one.ensure()
            note_held(caller, held)
            lease = kind(map(LeaseHandle, held))
            return lease if enter is None else enter(lease)

        try:
            return await acquire_all(runtime, acquisitions, deadline(since, self.wait), hand_out)
        except BaseException:
            if lease is not None:
                for handle in lease:
                    handle._held.leave(handle._membership)  # noqa: SLF001 - the handles of one package
                self._blocks.forget(lease)
            forget_held([each.held for each in acquisitions if each.held is not None])
            raise


class MultiLock(_MultiLock, BlockExit):
    """Several locks for threads and processes: `with MultiLock(backend, ["account:1", "account:2"]) as lease:`."""

    def acquire(self) -> MultiLease:
        """Hold all of them, waiting at most `wait` seconds altogether; raises AcquireTimeout, AlreadyHeld."""
        refuse_in_loop("use AsyncMultiLock")
        return run(self._hold(BLOCKING, threading.current_thread(), MultiLease))

    def __enter__(self) -> MultiLease:
        refuse_in_loop("use AsyncMultiLock")
        caller = threading.current_thread()
        return run(self._hold(BLOCKING, caller, MultiLease, enter=self._blocks.entering(caller)))


class AsyncMultiLock(_MultiLock, AsyncBlockExit):
    """Several locks for tasks."""

    async def acquire(self) -> AsyncMultiLease:
        """See `MultiLock.acquire`."""
        return await self._hold(ASYNCIO, current_task(), AsyncMultiLease)

    async def __aenter__(self) -> AsyncMultiLease:
        caller = current_task()
        return await self._hold(ASYNCIO, caller, AsyncMultiLease, enter=self._blocks.entering(caller))
