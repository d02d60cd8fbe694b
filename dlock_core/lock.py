"""Lock and AsyncLock: sugar over the engine, no decisions.

A lock is a name and options, without state; a lease exists only while somebody holds it.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from typing import TYPE_CHECKING

from dlock_core import engine, owner, watchdog
from dlock_core.backend import Request
from dlock_core.deadline import Seconds, ttl_seconds, wait_seconds
from dlock_core.errors import AlreadyHeld, NotSupported
from dlock_core.holding import AsyncLease, Blocks, Lease, Leaving, held_by, key_of, mine
from dlock_core.names import canonical
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from dlock_core.backend import Backend
    from dlock_core.held import Held
    from dlock_core.holding import Key

__all__ = ["AsyncLock", "Lock", "new_request", "supported_ttl"]


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
    ) -> None:
        self.name, self.backend = canonical(name), backend
        self.ttl, self.wait = supported_ttl(backend, ttl_seconds(ttl)), wait_seconds(wait)
        self.shared, self.renew, self.reentrant, self.fair, self.on_lost = shared, renew, reentrant, fair, on_lost
        if shared and not backend.supports_shared:
            raise NotSupported(f"{type(backend).__name__} has no shared locks", name=self.name)
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _request(self) -> Request:
        return new_request(self.name, self.ttl, self.wait, shared=self.shared, fair=self.fair)

    def _joined(self, key: Key) -> Held | None:
        held = held_by(key)
        if held is None:
            return None
        if not self.reentrant or (held.request.shared and not self.shared):
            raise AlreadyHeld(self.name)
        held.depth += 1
        return held

    def _keep(self, held: Held, key: Key) -> Held:
        mine[key] = held
        if self.on_lost is not None:
            held.on_lost = (self.on_lost,)
        if self.renew:
            watchdog.watch(held)
        return held


def new_request(
    name: str,
    ttl: float,
    wait: float | None,
    *,
    shared: bool,
    fair: bool,
    who: str | None = None,
) -> Request:
    """Make the request of one acquire call: a fresh holder, and a place in the queue unless there is only one try.

    `who` asks, if that is not what `owner.text` tells of this thread or task.
    """
    return Request(name, os.urandom(16).hex(), ttl, shared, wait != 0.0, fair, owner.text() if who is None else who)


def supported_ttl(backend: Backend, ttl: float) -> float:
    """Round a ttl up to what the store can do."""
    steps = math.ceil(ttl / backend.ttl_step - 1e-9)
    return max(backend.ttl_min, steps * backend.ttl_step)


class Lock(_Lock):
    """A lock for threads and processes; see the arguments in `_Lock`."""

    def acquire(self) -> Lease:
        """Hold the lock, waiting at most `wait` seconds.

        Raises AcquireTimeout when others held it all the time, AlreadyHeld when this thread holds it,
        BackendUnavailable when the store could not be asked.
        """
        key = key_of(threading.current_thread(), self.backend, self.name)
        held = self._joined(key)
        if held is None:
            held = self._keep(run(engine.acquire(BLOCKING, self.backend, self._request(), self.wait)), key)
        return Lease(held, key)

    def try_acquire(self) -> Lease | None:
        """Hold the lock if it is free now, else answer None; never waits for another holder."""
        key = key_of(threading.current_thread(), self.backend, self.name)
        held = self._joined(key) or run(engine.try_acquire(BLOCKING, self.backend, self._request()))
        return None if held is None else Lease(held if held.depth > 1 else self._keep(held, key), key)

    def __enter__(self) -> Lease:
        return self._blocks.enter(threading.current_thread(), self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: Lease = self._blocks.leave(threading.current_thread())
        with Leaving(error, lease._held):
            lease.release()


class AsyncLock(_Lock):
    """A lock for tasks; see the arguments in `_Lock`."""

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        key = key_of(asyncio.current_task(), self.backend, self.name)
        held = self._joined(key)
        if held is None:
            held = self._keep(await engine.acquire(ASYNCIO, self.backend, self._request(), self.wait), key)
        return AsyncLease(held, key)

    async def try_acquire(self) -> AsyncLease | None:
        """See `Lock.try_acquire`."""
        key = key_of(asyncio.current_task(), self.backend, self.name)
        held = self._joined(key) or await engine.try_acquire(ASYNCIO, self.backend, self._request())
        return None if held is None else AsyncLease(held if held.depth > 1 else self._keep(held, key), key)

    async def __aenter__(self) -> AsyncLease:
        return self._blocks.enter(asyncio.current_task(), await self.acquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: AsyncLease = self._blocks.leave(asyncio.current_task())
        with Leaving(error, lease._held):
            await lease.release()
