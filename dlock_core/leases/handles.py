"""What callers hold: leases, alone or several together, and the `with` blocks that they are in. Sugar, no decisions."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary, ref

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, DLockError, LeaseLost, NotHeld
from dlock_core.leases import engine, watchdog
from dlock_core.leases.lease import LeaseState
from dlock_core.options import Seconds, ttl_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.leases.lease import Held
    from dlock_core.runtime import Runtime

__all__ = [
    "LETTING_EXPIRE",
    "AsyncBlockExit",
    "AsyncLease",
    "AsyncReleasing",
    "BlockExit",
    "Blocks",
    "Key",
    "Lease",
    "LeaseHandle",
    "LeaseView",
    "Leases",
    "Releasing",
    "ensure_was_held",
    "held_by_caller",
    "key_of",
    "renew",
]

logger = logging.getLogger("dlock")

T = TypeVar("T")
Key = tuple[Hashable, int, str]

held_by_caller: WeakValueDictionary[Key, Held] = WeakValueDictionary()
"""What each thread or task holds, so that asking twice is an error at once and never a deadlock with oneself."""


def key_of(caller: object, backend: Backend, name: str) -> Key:
    """Return the key under which a thread or task holds; weak, or a task would keep the lease it returned."""
    return ref(caller), id(backend), name


class LeaseView:
    """What every kind of lease tells about itself; none of it does I/O."""

    __slots__ = ("_held",)

    def __init__(self, held: Held) -> None:
        self._held = held

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} token={self.token} remaining={self.remaining():.3f}>"

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._held.request.name

    @property
    def holder(self) -> str:
        """The random id of this grant."""
        return self._held.request.holder

    @property
    def token(self) -> int:
        """The fencing token: an integer that is greater for every later grant of this lock."""
        return self._held.token

    @property
    def shared(self) -> bool:
        """Other shared holders may be in, too."""
        return self._held.request.shared

    @property
    def lost(self) -> bool:
        """The lease ended otherwise than by its release. No I/O: a resumed process sees it at once."""
        return self._held.is_lost()

    def remaining(self) -> float:
        """Return the seconds for which the lease surely holds, renewal not counted; 0.0 once it does not."""
        return self._held.remaining()

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease surely holds now; without I/O."""
        self._held.ensure()


MemberLease = TypeVar("MemberLease", bound=LeaseView)


class Leases(tuple[MemberLease, ...]):
    """Leases that are held together; what is said of them holds for all."""

    __slots__ = ()

    @property
    def lost(self) -> bool:
        """One of them is lost, and so are all."""
        return any(lease.lost for lease in self)

    def remaining(self) -> float:
        """Return the seconds for which all of them surely hold."""
        return min(lease.remaining() for lease in self)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless all of them surely hold."""
        for lease in self:
            lease.ensure_held()


class Releasing(Generic[T]):
    """The `release` of a handle, which an interrupt does not cut short.

    A signal handler may raise at any step. So each step of `_end` may be repeated, and one that was interrupted is:
    no other code would come back to release the lease. An error of ours is an answer, and is not asked for again.
    """

    __slots__ = ()

    async def _end(self, runtime: Runtime) -> T:
        """Need the lease no more, and release it if this was its last handle."""
        raise NotImplementedError

    def release(self) -> T:
        """Release the lease, so that the next waiter gets the lock; idempotent, from any thread.

        RELEASED: it was ours until now. EXPIRED: it had ended by itself. STOLEN: another holds it. A handle that
        joined a lease only leaves it; of several leases that are held together each has its answer, in their order.
        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out by
        itself, and release may be tried again.
        """
        try:
            return run(self._end(BLOCKING))
        except DLockError:
            raise
        except BaseException:
            run(self._end(BLOCKING))
            raise


class AsyncReleasing(Generic[T]):
    """The same for asyncio: see `Releasing`."""

    __slots__ = ()

    async def _end(self, runtime: Runtime) -> T:
        """See `Releasing`."""
        raise NotImplementedError

    async def release(self) -> T:
        """See `Lease.release`; finished even while the task is being cancelled."""
        try:
            return await self._end(ASYNCIO)
        except DLockError:
            raise
        except BaseException:
            await self._end(ASYNCIO)
            raise


class LeaseHandle(LeaseView):
    """A handle of a grant, alone or one of several; the grant ends with the last handle that has joined it."""

    __slots__ = ("_key",)

    def __init__(self, held: Held, key: Key) -> None:
        self._held, self._key = held, key

    async def _end(self, runtime: Runtime) -> Released:
        held = self._held
        held.ensure_own_process()
        if held.leave(self):
            try:
                return await engine.release(runtime, held)
            finally:
                if held_by_caller.get(self._key) is held:
                    del held_by_caller[self._key]
        return held.ended or Released.RELEASED

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        with LETTING_EXPIRE:
            await self._end(runtime)
        ensure_was_held(self._held, error)

    def __del__(self) -> None:
        held = getattr(self, "_held", None)  # None: an interrupt came while it was made
        if held is None or id(self) not in held.handles:
            return
        held.leave(self)
        if held.remaining() > 0.0:
            text = f"{self!r} was never released: it runs out by itself"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


class Lease(LeaseHandle, Releasing[Released]):
    """A lock that this process holds, until it is released, lost or expired."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry of a lease that is still ours, to `ttl` seconds from now (None: its ttl).

        Raises LeaseLost when another holder may already be at work: stop, do not retry.
        A network error raises BackendUnavailable and says nothing about the lease; it stays valid as before.
        """
        run(renew(BLOCKING, self._held, ttl))


class AsyncLease(LeaseHandle, AsyncReleasing[Released]):
    """The same for asyncio."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await renew(ASYNCIO, self._held, ttl)


async def renew(runtime: Runtime, held: Held, ttl: Seconds | None) -> None:
    """Push the expiry of a lease, and have the watchdog keep to its new ttl; see `Lease.renew`."""
    try:
        await engine.renew(runtime, held, None if ttl is None else ttl_seconds(ttl))
    finally:
        if held.renewal_tick and held.state is LeaseState.HELD:
            watchdog.watch(held)  # Also after an error: a shorter ttl counts from the moment it was asked for.


class Ending(Protocol):
    """What a `with` block holds: the handle of one lease, or of several."""

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        """Release it, unless something else needs it; may be repeated. `error` is what the body has raised.

        Raises LeaseLost where a clean body only looked protected.
        """


class Blocks:
    """The leases of the `with` blocks that each thread or task is in, so that a lock can be shared by all of them.

    A block may end in another thread or task than the one it began in: a generator, a fixture, a response that is
    streamed. Then its lease is looked for among those whose caller can no longer be in a block. When that does not tell
    which it is, none is taken: a lease that is never ended runs out, one that is taken from its holder lets two in.
    """

    __slots__ = ("_leases", "_unmatched")

    def __init__(self) -> None:
        self._leases: dict[Hashable, list[Any]] = {}
        self._unmatched = 0
        """Blocks that are over and whose leases are still here, since it was unknown which are theirs."""

    def enter(self, caller: Hashable, lease: T) -> T:
        """Remember the lease of a block that begins."""
        self._leases.setdefault(caller, []).append(lease)
        return lease

    def innermost(self, caller: Hashable) -> Any:
        """Return the lease of a block that ends, which stays here until `forget`; None when it is unknown which."""
        leases = self._leases.get(caller)
        return leases[-1] if leases else self._of_another_caller()

    def forget(self, caller: Hashable, lease: object) -> None:
        """Remove the lease of a block that is over, if it is here."""
        callers = [caller] if caller in self._leases else [*self._leases]
        for each in callers:
            leases = self._leases.get(each, [])
            leases[:] = [other for other in leases if other is not lease]
            if not leases:
                self._leases.pop(each, None)
        if self._unmatched and self._unmatched >= len(self._entries()):
            self._leases.clear()  # No caller is in a block any more: what is kept nowhere else is renewed no longer.
            self._unmatched = 0

    def _of_another_caller(self) -> Any:
        entries = self._entries()
        ended = [lease for caller, lease in entries if _has_ended(caller)]
        if len(entries) == self._unmatched + 1:  # As many blocks are over as have begun.
            return entries[-1][1]
        if len(ended) == 1:
            return ended[0]
        self._unmatched += 1
        logger.warning(
            "dlock: a block ended in another thread or task than the one it began in, and nobody can tell which of %d "
            "leases is its own: none is released, its own runs out. Use a lock object of its own for such a block",
            len(entries),
        )
        return None

    def _entries(self) -> list[tuple[Hashable, Any]]:
        return [(caller, lease) for caller, leases in [*self._leases.items()] for lease in leases]


def _has_ended(caller: object) -> bool:
    """Return whether a thread or task has ended, so that it can be in no block any more."""
    if isinstance(caller, threading.Thread):
        return not caller.is_alive()
    return isinstance(caller, asyncio.Future) and caller.done()


class BlockExit:
    """Ends the `with` block of a lock, or of several, so that no interrupt leaves its lease behind."""

    _blocks: Blocks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Ending | None] = []
        try:
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending))
        except DLockError:
            raise
        except BaseException:  # A signal handler has raised, at whatever step; each may be repeated.
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending))
            raise


class AsyncBlockExit:
    """Ends the `async with` block of a lock, or of several; see `BlockExit`."""

    _blocks: Blocks

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Ending | None] = []
        try:
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending)
        except DLockError:
            raise
        except BaseException:  # See `BlockExit`.
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending)
            raise


async def end_block(
    runtime: Runtime, blocks: Blocks, caller: object, error: BaseException | None, ending: list[Ending | None]
) -> None:
    """Release what a `with` block held, and judge whether it was held to the end of the block.

    The caller's list `ending` takes down what that is. A caller who was interrupted here calls again with the same
    list: then this block is ended all the same, and no other one in its place.
    """
    if not ending:
        ending += [blocks.innermost(caller)]
    if (lease := ending[0]) is None:
        return
    try:
        await lease._leave_block(runtime, error)
    finally:
        blocks.forget(caller, lease)


class _LettingExpire:
    """Lets a release fail where the work has ended well: the lease expires by itself, and that is no failure."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, BackendUnavailable):
            logger.warning("dlock: %s; the lease runs out by itself", error)
            return True
        return isinstance(error, NotHeld)  # A forked child walks out of its parent's block.


LETTING_EXPIRE: Final = _LettingExpire()


def ensure_was_held(held: Held, error: BaseException | None) -> None:
    """Raise LeaseLost if a block without an error has ended with a lease that was lost: its work looked protected."""
    if error is None and held.ended is not None and held.ended is not Released.RELEASED:
        reason = held.loss_reason or f"it was {held.ended.value} at release"
        raise LeaseLost(held.name, token=held.token, reason=reason)
