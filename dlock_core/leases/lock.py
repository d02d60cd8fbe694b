"""Lock and AsyncLock: sugar over the engine, no decisions.

A lock is a name and options, without state; a lease exists only while the lock is held.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final, Never, TypeVar

from dlock_core.backend import new_request, supported_ttl
from dlock_core.errors import AlreadyHeld, NotSupported
from dlock_core.leases.engine import Acquisition
from dlock_core.leases.handles import AsyncBlockExit, AsyncLease, BlockExit, Blocks, Lease, held_by_caller, key_of
from dlock_core.names import canonical
from dlock_core.options import Seconds, check_callback, check_switches, ttl_seconds, unknown_option, wait_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backend import Backend
    from dlock_core.leases.handles import Key
    from dlock_core.leases.lease import Held
    from dlock_core.runtime import Runtime

__all__ = ["AsyncLock", "Lock"]

L = TypeVar("L", Lease, AsyncLease)


_OPTIONS: Final = ("ttl", "wait", "shared", "renew", "reentrant", "fair", "on_lost")


class _Lock:
    """A name in a store, and how to hold it.

    `ttl` (seconds, default 30) is how long the lease outlives a dead holder; while `renew` is true the process renews
    it. `wait` (seconds, default 10; None for ever, 0 one try) bounds `acquire`. `shared` lets other shared holders
    in. `reentrant`: the same thread or task may ask again and joins the lease it has. `fair=False` may overtake
    waiters. `on_lost` is called once, from another thread, when the lease is lost.

    Raises ValueError or TypeError for bad arguments and NotSupported for what the store cannot do, before any I/O.
    """

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
        if unknown:
            raise unknown_option(unknown, _OPTIONS)
        check_switches(shared=shared, renew=renew, reentrant=reentrant, fair=fair)
        check_callback("on_lost", on_lost)
        self.name, self.backend = canonical(name), backend
        self.ttl, self.wait = supported_ttl(backend, ttl_seconds(ttl)), wait_seconds(wait)
        self.shared, self.renew, self.reentrant, self.fair, self.on_lost = shared, renew, reentrant, fair, on_lost
        if shared and not backend.capabilities.shared:
            raise NotSupported(f"{type(backend).__name__} has no shared locks", name=self.name)
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    async def _hold(
        self, runtime: Runtime, caller: object, kind: type[L], *, once: bool = False, enters: bool = False
    ) -> L | None:
        """Acquire a lease, or None when it is asked for `once` and another holder has it; `enters` a `with` block.

        A signal handler may raise after any call. So what was granted is known here at every moment, and is given back;
        and nothing is called any more, here or in `run`, once the lease has been handed out.
        """
        key, acquisition, lease = key_of(caller, self.backend, self.name), None, None
        held = self._joined(key)
        try:
            if held is None:
                wait = 0.0 if once else self.wait
                request = new_request(self.name, self.ttl, wait, shared=self.shared, fair=self.fair)
                acquisition = Acquisition(runtime, self.backend, request, wait, renew=self.renew, on_lost=self.on_lost)
                held = await (acquisition.run() if once else acquisition.acquire())
                if held is None:
                    return None
                held_by_caller[key] = held
            lease = kind(held, key)
            held.join(lease)
            if enters:
                self._blocks.enter(caller, lease)
        except BaseException:
            if held is not None and lease is not None:
                held.leave(lease)
                self._blocks.forget(caller, lease)
            if acquisition is not None:
                await acquisition.undo()
            raise
        return lease

    def _joined(self, key: Key) -> Held | None:
        """Return the lease that the caller holds already; raises AlreadyHeld where it cannot be joined."""
        held = held_by_caller.get(key)
        if held is None or not held.is_joinable():
            return None
        if not self.reentrant or (held.request.shared and not self.shared):
            raise AlreadyHeld(self.name)
        return held


class Lock(_Lock, BlockExit):
    """A lock for threads and processes; see the arguments in `_Lock`."""

    def acquire(self) -> Lease:
        """Hold the lock, waiting at most `wait` seconds.

        Raises AcquireTimeout when others held it all the time, AlreadyHeld when this thread holds it,
        BackendUnavailable when the store could not be asked.
        """
        refuse_in_loop("use AsyncLock")
        return run(self._hold(BLOCKING, threading.current_thread(), Lease))  # type: ignore[return-value]

    def try_acquire(self) -> Lease | None:
        """Hold the lock if it is free now, else answer None; never waits for another holder."""
        return run(self._hold(BLOCKING, threading.current_thread(), Lease, once=True))

    def __enter__(self) -> Lease:
        refuse_in_loop("use AsyncLock")
        return run(self._hold(BLOCKING, threading.current_thread(), Lease, enters=True))  # type: ignore[return-value]


class AsyncLock(_Lock, AsyncBlockExit):
    """A lock for tasks; see the arguments in `_Lock`."""

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncLease)  # type: ignore[return-value]

    async def try_acquire(self) -> AsyncLease | None:
        """See `Lock.try_acquire`."""
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncLease, once=True)

    async def __aenter__(self) -> AsyncLease:
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncLease, enters=True)  # type: ignore[return-value]
