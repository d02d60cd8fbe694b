"""Lock and AsyncLock, the leases that callers hold, and their `with` blocks. A thin shell without decisions.

A lock is a name and options, without state; a lease exists only while the lock is held.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Never, TypeVar

from dlock_core.backend import Released
from dlock_core.errors import AlreadyHeld, BackendUnavailable, DLockError, NotHeld, NotSupported
from dlock_core.leases import engine
from dlock_core.leases.callers import find_held, forget_held, note_held
from dlock_core.leases.engine import Acquisition, new_request
from dlock_core.leases.lease import Membership
from dlock_core.names import canonical
from dlock_core.options import (
    LockOptions,
    Seconds,
    check_flags,
    store_ttl,
    ttl_seconds,
    unknown_option,
    wait_seconds,
)
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import FrameType

    from dlock_core.backend import Backend, Capabilities
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime

__all__ = [
    "AsyncBlockExit", "AsyncLease", "AsyncLock", "AsyncReleasing", "BlockExit", "Blocks", "Lease",
    "LeaseHandle", "LeaseView", "Lock", "Releasing", "capabilities_of", "current_task", "frame_of_block", "let_expire",
    "no_copies",
]  # fmt: skip

logger = logging.getLogger("dlock")

T = TypeVar("T")


def no_copies(lease: object) -> TypeError:
    """Return the error of copying or pickling a lease: the end of the copy would be taken for the end of the lease."""
    return TypeError(f"{type(lease).__name__} can be neither copied nor pickled: pass on its name and its token")


class LeaseView:
    """The state of a lease, as every kind of handle shows it. Nothing here does I/O."""

    __slots__ = ("_held",)

    def __init__(self, held: LeaseRecord) -> None:
        self._held = held

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} token={self.token} remaining={self.remaining():.3f}>"

    def __reduce__(self) -> Never:
        raise no_copies(self)

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
        """Whether other shared holders may also hold the lock."""
        return self._held.request.shared

    @property
    def lost(self) -> bool:
        """Whether the lease ended in another way than by its release. No I/O: a resumed process sees it at once."""
        return self._held.is_lost()

    def remaining(self) -> float:
        """Return the seconds for which the lease certainly holds without further renewal; 0.0 once it does not."""
        return self._held.remaining()

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease certainly holds now; without I/O."""
        self._held.ensure()


class Releasing(Generic[T]):
    """The `release` of a handle, which is completed despite interrupts.

    A signal handler may raise at any step. So each step of `_end` can be repeated, and is repeated if it was
    interrupted: no other code would come back to release the lease. A DLockError is an answer, and is not retried.
    """

    __slots__ = ()

    async def _end(self, runtime: Runtime) -> T:
        """Detach from the lease, and release it if this was its last handle."""
        raise NotImplementedError

    def release(self) -> T:
        """Release the lease, so that the next waiter gets the lock; idempotent, from any thread.

        Returns RELEASED if it was ours until now, EXPIRED if it had already expired, STOLEN if another holder has the
        lock. A handle that joined a lease only leaves it. For several leases that are held together, the result is a
        list, in their order. Raises NotHeld in a forked child, BackendUnavailable if the store cannot be reached.
        Further attempts are then made in the background until the store answers, unless it has refused; and release may
        be called again. A lease that is not released runs out by itself.
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
        """See `Lease.release`; completed even while the task is being cancelled."""
        try:
            return await self._end(ASYNCIO)
        except DLockError:
            raise
        except BaseException:
            await self._end(ASYNCIO)
            raise


class LeaseHandle(LeaseView):
    """A handle of a grant, or one of several; the grant ends with its last handle.

    Args:
        held: The grant.
        membership: The one with which it has joined; None for the handle that acquired the grant.
    """

    __slots__ = ("_membership",)

    def __init__(self, held: LeaseRecord, membership: Membership | None = None) -> None:
        self._membership, self._held = membership, held

    async def _end(self, runtime: Runtime) -> Released:
        held = self._held
        if held.leave(self._membership):
            try:
                return await engine.release(runtime, held)
            finally:
                forget_held((held,))
        return held.ended or Released.RELEASED

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        try:
            await self._end(runtime)
        except (BackendUnavailable, NotHeld) as failure:
            let_expire(failure)
        if self._held.ended is not Released.RELEASED:
            self._held.ensure_was_held(error)

    def __del__(self) -> None:
        held = getattr(self, "_held", None)  # None if an interrupt stopped the constructor
        if held is None or held.ended is not None or not held.count_out(self._membership):
            return
        if not held.has_handles:
            forget_held((held,))
        if held.remaining() > 0.0:
            text = f"{self!r} was never released: it runs out by itself"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


class Lease(LeaseHandle, Releasing[Released]):
    """A lock that this process holds, until it is released, lost or expired."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Extend the expiry of a lease that is still ours to `ttl` seconds from now (None: its own ttl).

        A shorter `ttl` counts for this process at once; the store keeps the lock until the longer one is over. Raises
        LeaseLost if another holder may already be working: stop, do not retry. A network error raises
        BackendUnavailable and says nothing about the lease, which stays valid as before.
        """
        run(engine.renew(BLOCKING, self._held, ttl))


class AsyncLease(LeaseHandle, AsyncReleasing[Released]):
    """The same for asyncio."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await engine.renew(ASYNCIO, self._held, ttl)


class _Block(NamedTuple):
    """A `with` block that has begun: who began it, where its statement is if that is known, and its lease."""

    caller: Hashable
    frame: FrameType | None
    lease: Any


class Blocks:
    """The leases of the `with` blocks that each thread or task is in, so that all of them can share one lock object.

    A block may end in another thread or task than the one it began in: a generator, a fixture, a dependency of FastAPI.
    Its frame is the same, and tells which lease it is. If its two ends are called from different functions, as by an
    ExitStack, its lease is sought among those whose thread or task has ended. If there is more than one candidate, none
    is released: releasing the lease of a live holder would let in a second one.
    """

    __slots__ = ("_leases", "_unmatched")

    def __init__(self) -> None:
        self._leases: dict[Hashable, list[_Block]] = {}
        self._unmatched = 0
        """The number of blocks that have ended while it was unknown which lease was theirs."""

    def enter(self, caller: Hashable, lease: T, frame: FrameType | None = None) -> T:
        """Record the lease of a block that begins; `frame`: the one that its `with` statement is in."""
        self._leases.setdefault(caller, []).append(_Block(caller, frame, lease))
        return lease

    def innermost(self, caller: Hashable, frame: FrameType | None = None) -> Any:
        """Return the lease of a block that ends, which stays here until `forget`; None if it cannot be determined."""
        own = self._leases.get(caller)
        if own and own[-1].frame in {frame, None}:
            return own[-1].lease
        for block in reversed(self._entries()):
            if block.frame is frame is not None:
                return block.lease
        return own[-1].lease if own else self._of_another_caller()

    def forget(self, caller: Hashable, lease: object) -> None:
        """Remove the lease of a block that is over, if it is here."""
        if not self._remove(caller, lease):
            any(self._remove(each, lease) for each in [*self._leases])
        if self._unmatched and self._unmatched >= len(self._entries()):
            self._leases.clear()  # All blocks have ended. A lease without other references is no longer renewed.
            self._unmatched = 0

    def _remove(self, caller: Hashable, lease: object) -> bool:
        """Remove the lease if this caller's block has it, and return whether it has; may be repeated."""
        blocks = self._leases.get(caller, [])
        others = [block for block in blocks if block.lease is not lease]
        is_here = len(others) < len(blocks)
        blocks[:] = others
        if not others:
            self._leases.pop(caller, None)
        return is_here

    def _of_another_caller(self) -> Any:
        blocks = self._entries()
        ended = [block for block in blocks if _has_ended(block.caller)]
        if len(blocks) == self._unmatched + 1:  # As many blocks have ended as have begun.
            return blocks[-1].lease
        if len(ended) == 1:
            return ended[0].lease
        self._unmatched += 1
        logger.warning(
            "dlock: a block ended in another thread or task than the one it began in, and it is unknown which of %d "
            "leases belongs to it: its lease is held until all blocks of this lock object have ended. Create a lock "
            "for each such block",
            len(blocks),
        )
        return None

    def _entries(self) -> list[_Block]:
        return [block for blocks in [*self._leases.values()] for block in blocks]


def frame_of_block() -> FrameType:
    """Return the frame of the `with` statement, for a function that this statement calls: `__enter__`, `__exit__`."""
    return sys._getframe(2)


def _has_ended(caller: object) -> bool:
    """Return whether a thread or task has ended, so that it can no longer be in a block."""
    if isinstance(caller, threading.Thread):
        return not caller.is_alive()
    return isinstance(caller, asyncio.Future) and caller.done()


class BlockExit:
    """The end of a lock's `with` block, which releases the lease even if an interrupt arrives at any step of it."""

    _blocks: Blocks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Any] = []
        try:
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending, frame=frame_of_block()))
        except DLockError:
            raise
        except BaseException:  # A signal handler has raised, at any step; every step can be repeated.
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending, frame=frame_of_block()))
            raise


class AsyncBlockExit:
    """Ends the `async with` block of a lock, or of several; see `BlockExit`."""

    _blocks: Blocks

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Any] = []
        try:
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending, frame=frame_of_block())
        except DLockError:
            raise
        except BaseException:  # See `BlockExit`.
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending, frame=frame_of_block())
            raise


async def end_block(
    runtime: Runtime,
    blocks: Blocks,
    caller: object,
    error: BaseException | None,
    ending: list[Any],
    *,
    frame: FrameType,
) -> None:
    """Release the lease of a `with` block, and check that it was held to the end of the block.

    The list `ending` records which lease that is. A caller that was interrupted in this function calls it again with
    the same list, so that the second call ends this block and not the one around it.
    """
    if not ending:
        ending += [blocks.innermost(caller, frame)]
    if (lease := ending[0]) is None:
        return
    try:
        await lease._leave_block(runtime, error)
    finally:
        blocks.forget(caller, lease)


def let_expire(error: BackendUnavailable | NotHeld) -> None:
    """Accept that a lease could not be released after its work has ended, or belongs to a parent: it expires."""
    if isinstance(error, BackendUnavailable):
        logger.warning("dlock: %s; unless a later attempt releases the lease, it runs out by itself", error)


def capabilities_of(backend: Backend, name: str, *, shared: bool) -> Capabilities:
    """Return what a lock's store can do; raises TypeError for what is no store, NotSupported if it cannot share."""
    can: Capabilities | None = getattr(backend, "capabilities", None)
    if can is None:
        hint = "; pass its .backend" if hasattr(backend, "backend") else ""
        raise TypeError(
            f"a lock's store is made by connect(url) or connect(client), not {type(backend).__name__}{hint}"
        )
    if shared and not can.shared:
        raise NotSupported(f"{type(backend).__name__} has no shared locks", name=name)
    return can


L = TypeVar("L", Lease, AsyncLease)


class _Lock:
    """A name in a store, and how to hold it."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        ttl: Seconds = 30.0,
        wait: Seconds | None = 10.0,
        shared: bool = False,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool = True,
        on_lost: Callable[[], None] | None = None,
        **unknown: Never,
    ) -> None:
        """Check the arguments; nothing is sent.

        Args:
            backend: The store, made by `connect` or by its class.
            name: Parts joined with ":"; see `dlock_core.names.join`.
            ttl: Seconds for which the lease outlives a holder that has died.
            wait: Seconds for which `acquire` waits for other holders: None means forever, 0 means one try.
            shared: Let other shared holders hold the lock at the same time.
            renew: Renew the lease in the background while this process lives.
            reentrant: Let the same thread or task acquire the lock again and join the lease that it has. What a thread
                acquires in another context, as each `asyncio.to_thread` has its own, is not joined; without contexts,
                as in `run_in_executor`, all jobs of a pool's thread are one caller.
            fair: False lets the acquire overtake waiters.
            on_lost: Called once, from another thread, when the lease is lost.
            **unknown: Refused with a TypeError, which translates the option names of other libraries.

        Raises ValueError or TypeError for bad arguments and NotSupported for what the store cannot do, before any I/O.
        """
        if unknown:
            raise unknown_option(unknown, LockOptions._fields)
        can, self._blocks = capabilities_of(backend, name, shared=shared), Blocks()
        check_flags(shared, renew, reentrant, fair, on_lost)
        self.ttl, self.wait = store_ttl(ttl_seconds(ttl), can), wait_seconds(wait)
        self.shared, self.renew, self.reentrant, self.fair, self.on_lost = shared, renew, reentrant, fair, on_lost
        if not isinstance(name, str):
            raise TypeError(f"a lock's name is text, not {type(name).__name__}: {name!r:.80}; MultiLock takes several")
        self.name, self.backend = canonical(name), backend

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    async def _hold(
        self, runtime: Runtime, caller: object, kind: type[L], *, once: bool = False, block: FrameType | None = None
    ) -> L | None:
        """Acquire a lease; None if another holder has the lock and it is tried only `once`.

        `block`: the frame with the `with` statement, if a block begins.

        A signal handler may raise after any call. So this function knows at every moment what was granted, and can
        release it; and nothing is called any more, here or in `run`, once the lease is about to be returned.
        """
        acquisition, lease, held = None, None, find_held(caller, self.backend, self.name)
        membership = None if held is None else self._membership_in(held)
        try:
            if held is None:
                request = new_request(self.name, self, queue=not once)
                acquisition = Acquisition(runtime, self.backend, request, self)
                held = await acquisition.run()
                if held is None:
                    if once:
                        return None
                    raise acquisition.timeout()
                note_held(caller, (held,))
            if membership is not None:
                held.join(membership)
            lease = kind(held, membership)
            if membership is not None and not held.is_joinable():  # Another thread has just released it.
                await lease._end(runtime)
                return await self._hold(runtime, caller, kind, once=once, block=block)
            if block is not None:
                self._blocks.enter(caller, lease, block)
        except BaseException:
            if lease is not None:
                self._blocks.forget(caller, lease)
            await _give_back(held, membership, acquisition)
            raise
        return lease

    def _membership_in(self, held: LeaseRecord) -> Membership:
        """Return a membership in a lease that the caller already holds; raises AlreadyHeld if it cannot be joined."""
        if not self.reentrant or (held.request.shared and not self.shared):
            raise AlreadyHeld(self.name)
        return Membership()


async def _give_back(held: LeaseRecord | None, membership: Membership | None, acquisition: Acquisition | None) -> None:
    """Undo an acquire that was stopped: leave the lease that it has joined, or end its own."""
    if held is not None:
        held.leave(membership)
    if acquisition is not None:
        if held is not None:
            forget_held((held,))
        await acquisition.undo()


class Lock(_Lock, BlockExit):
    """A lock for threads and processes: `with Lock(connect("redis://localhost"), "order:42") as lease:`."""

    def acquire(self) -> Lease:
        """Hold the lock, waiting at most `wait` seconds.

        Raises AcquireTimeout if other holders kept it all the time, AlreadyHeld if this thread holds it,
        BackendUnavailable if the store could not be reached.
        """
        refuse_in_loop("use AsyncLock")
        return run(self._hold(BLOCKING, threading.current_thread(), Lease))  # type: ignore[return-value]

    def try_acquire(self) -> Lease | None:
        """Hold the lock if it is free now, otherwise return None; never waits for another holder."""
        return run(self._hold(BLOCKING, threading.current_thread(), Lease, once=True))

    def __enter__(self) -> Lease:
        refuse_in_loop("use AsyncLock")
        return run(self._hold(BLOCKING, threading.current_thread(), Lease, block=frame_of_block()))  # type: ignore[return-value]


def current_task() -> asyncio.Task[Any]:
    """Return the running task, which is the holder of what it acquires; raises RuntimeError outside a task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop is running
        task = None
    if task is None:
        raise RuntimeError("the caller is not a task of asyncio, which could wait: await this in one, or use Lock")
    return task


class AsyncLock(_Lock, AsyncBlockExit):
    """A lock for the tasks of asyncio; see `Lock`."""

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        return await self._hold(ASYNCIO, current_task(), AsyncLease)  # type: ignore[return-value]

    async def try_acquire(self) -> AsyncLease | None:
        """See `Lock.try_acquire`."""
        return await self._hold(ASYNCIO, current_task(), AsyncLease, once=True)

    async def __aenter__(self) -> AsyncLease:
        return await self._hold(ASYNCIO, current_task(), AsyncLease, block=frame_of_block())  # type: ignore[return-value]
