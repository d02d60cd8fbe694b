"""Lock, AsyncLock and the leases they give: sugar over the engine, no decisions.

A lock is a name and options, without state; a lease exists only while somebody holds it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import warnings
from collections.abc import Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary, ref

from dlock_core import engine, owner, watchdog
from dlock_core.backend import Request
from dlock_core.deadline import Seconds, ttl_seconds, wait_seconds
from dlock_core.errors import AlreadyHeld, BackendUnavailable, LeaseLost, NotHeld, NotSupported
from dlock_core.lease import Released
from dlock_core.names import canonical
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from dlock_core.backend import Backend
    from dlock_core.held import Held

__all__ = [
    "AsyncLease",
    "AsyncLock",
    "Blocks",
    "Lease",
    "LeaseView",
    "Lock",
    "held_by",
    "key_of",
    "mine",
    "new_request",
    "supported_ttl",
]

logger = logging.getLogger("dlock")

T = TypeVar("T")
Key = tuple[Hashable, int, str]

mine: WeakValueDictionary[Key, Held] = WeakValueDictionary()
"""What each thread or task holds, so that asking twice is an error at once and never a deadlock with oneself."""


def key_of(caller: object, backend: Backend, name: str) -> Key:
    """Make the key under which a thread or task holds; weak, or a task would keep the lease it returned."""
    return ref(caller), id(backend), name


def held_by(key: Key) -> Held | None:
    """Give what a thread or task holds."""
    held = mine.get(key)
    return held if held is not None and held.remaining() > 0.0 else None


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
        """Give the seconds for which the lease surely holds, renewal not counted; 0.0 once it does not."""
        return self._held.remaining()

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease surely holds now; without I/O."""
        self._held.ensure()


class _Lease(LeaseView):
    __slots__ = ("_key", "_left")

    def __init__(self, held: Held, key: Key) -> None:
        self._held, self._key, self._left = held, key, False

    def _leave(self) -> bool:
        """Leave once; True for the last handle of the grant, which has to release it."""
        self._held.ensure_own_process()
        if self._left:
            return self._held.ended is None and self._held.depth == 0
        self._left = True
        self._held.depth -= 1
        if self._held.depth > 0:
            return False
        watchdog.unwatch(self._held)
        if mine.get(self._key) is self._held:
            del mine[self._key]
        return True

    def __del__(self) -> None:
        if not self._left and not self._held.lost_because and self._held.remaining() > 0.0:
            text = f"{self!r} was never released: it runs out by itself"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


class Lease(_Lease):
    """A lock that this process holds, until it is released, lost or expired."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry of a lease that is still ours, to `ttl` seconds from now (None: its ttl).

        Raises LeaseLost when another holder may already be at work: stop, do not retry.
        A network error raises BackendUnavailable and says nothing about the lease; it stays valid as before.
        """
        run(engine.renew(BLOCKING, self._held, None if ttl is None else ttl_seconds(ttl)))
        _rewatch(self._held)

    def release(self) -> Released:
        """Give the lock to the next waiter; idempotent, from any thread.

        RELEASED: it was ours until now. EXPIRED: it had ended by itself. STOLEN: another holds it. A handle that
        joined a lease only leaves it. Raises NotHeld in a forked child, BackendUnavailable when the store cannot be
        asked: the lease then runs out by itself, and release may be tried again.
        """
        if self._leave():
            return run(engine.release(BLOCKING, self._held))
        return self._held.ended or Released.RELEASED


class AsyncLease(_Lease):
    """The same for asyncio."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await engine.renew(ASYNCIO, self._held, None if ttl is None else ttl_seconds(ttl))
        _rewatch(self._held)

    async def release(self) -> Released:
        """See `Lease.release`; finished even while the task is being cancelled."""
        if self._leave():
            return await engine.release(ASYNCIO, self._held)
        return self._held.ended or Released.RELEASED


def _rewatch(held: Held) -> None:
    if held.due:
        watchdog.unwatch(held)
        watchdog.watch(held)


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


class Blocks:
    """The leases of the `with` blocks that each thread or task is in, so that a lock can be shared by all of them."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: dict[Hashable, list[Any]] = {}

    def enter(self, caller: Hashable, lease: T) -> T:
        """Remember the lease of a block that begins."""
        self._leases.setdefault(caller, []).append(lease)
        return lease

    def leave(self, caller: Hashable) -> Any:
        """Give the lease of the innermost block, which ends."""
        if caller not in self._leases:  # a generator may begin its block in one thread and end it in another
            caller = next(reversed(self._leases))
        leases = self._leases[caller]
        lease = leases.pop()
        if not leases:
            del self._leases[caller]
        return lease


def new_request(name: str, ttl: float, wait: float | None, *, shared: bool, fair: bool) -> Request:
    """Make the request of one acquire call: a fresh holder, and a place in the queue unless there is only one try."""
    return Request(name, os.urandom(16).hex(), ttl, shared, wait != 0.0, fair, owner.text())


def supported_ttl(backend: Backend, ttl: float) -> float:
    """Round a ttl up to what the store can do."""
    steps = math.ceil(ttl / backend.ttl_step - 1e-9)
    return max(backend.ttl_min, steps * backend.ttl_step)


@contextmanager
def _leaving(lease: _Lease, error: BaseException | None) -> Iterator[None]:
    """Judge how a `with` block left its lease: a clean body that lost it must not look protected."""
    try:
        yield
    except BackendUnavailable as failure:  # the work is done and the lease runs out: not a reason to fail the body
        logger.warning("dlock: %s; the lease runs out by itself", failure)
    except NotHeld:  # a forked child walks out of its parent's block
        return
    held = lease._held
    if error is None and held.ended in (Released.EXPIRED, Released.STOLEN):
        raise LeaseLost(
            held.name, token=held.token, reason=held.lost_because or f"it was {held.ended.value} at release"
        )


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
        with _leaving(lease, error):
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
        with _leaving(lease, error):
            await lease.release()
