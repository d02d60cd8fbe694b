"""Lock and AsyncLock: a name and options, without state; a lease exists only while the lock is held."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Never, TypeVar

from dlock_core.errors import AlreadyHeld, NotSupported
from dlock_core.leases.acquisition import Acquisition, new_request
from dlock_core.leases.blocks import AsyncBlockExit, BlockExit, Blocks
from dlock_core.leases.callers import find_held, forget_held, note_held
from dlock_core.leases.handles import AsyncLease, Lease
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
    from collections.abc import Callable

    from dlock_core.backend import Backend, Capabilities
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime

__all__ = ["AsyncLock", "Lock", "capabilities_of", "current_task"]


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
        self,
        runtime: Runtime,
        caller: object,
        kind: type[L],
        *,
        once: bool = False,
        enter: Callable[[L], L] | None = None,
    ) -> L | None:
        """Acquire a lease; None if another holder has the lock and it is tried only `once`.

        `enter(lease)` records a block that begins.

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
                return await self._hold(runtime, caller, kind, once=once, enter=enter)
            if enter is not None:
                enter(lease)
        except BaseException:
            if lease is not None:
                self._blocks.forget(lease)
            await _give_back(held, membership, acquisition)
            raise
        return lease

    def _membership_in(self, held: LeaseRecord) -> Membership:
        """Return a membership in a lease that the caller already holds; raises AlreadyHeld if it cannot be joined."""
        is_upgrade = held.request.shared and not self.shared
        if is_upgrade or not self.reentrant:
            raise AlreadyHeld(self.name, shared=is_upgrade)
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
        """Hold the lock, waiting at most `wait` seconds; `Lease.release` ends it, never the end of a `with lock`.

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
        caller = threading.current_thread()
        return run(self._hold(BLOCKING, caller, Lease, enter=self._blocks.entering(caller)))  # type: ignore[return-value]


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
        caller = current_task()
        return await self._hold(ASYNCIO, caller, AsyncLease, enter=self._blocks.entering(caller))  # type: ignore[return-value]
