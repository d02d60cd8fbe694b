"""What callers hold: leases, who holds them, and the `with` blocks that they are in. Sugar, no decisions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary, ref

from dlock_core import engine, watchdog
from dlock_core.deadline import Seconds, ttl_seconds
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld
from dlock_core.lease import Released
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.held import Held
    from dlock_core.runtime import Runtime

__all__ = ["AsyncLease", "Blocks", "Key", "Lease", "LeaseView", "Leaving", "held_by", "key_of", "mine", "renew"]

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
        return self._held.depth == 0

    def _forget(self) -> None:
        """Tidy up, when the next waiter has the lock already."""
        watchdog.unwatch(self._held)
        if mine.get(self._key) is self._held:
            del mine[self._key]

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
        run(renew(BLOCKING, self._held, ttl))

    def release(self) -> Released:
        """Give the lock to the next waiter; idempotent, from any thread.

        RELEASED: it was ours until now. EXPIRED: it had ended by itself. STOLEN: another holds it. A handle that
        joined a lease only leaves it. Raises NotHeld in a forked child, BackendUnavailable when the store cannot be
        asked: the lease then runs out by itself, and release may be tried again.
        """
        if self._leave():
            try:
                return run(engine.release(BLOCKING, self._held))
            finally:
                self._forget()
        return self._held.ended or Released.RELEASED


class AsyncLease(_Lease):
    """The same for asyncio."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await renew(ASYNCIO, self._held, ttl)

    async def release(self) -> Released:
        """See `Lease.release`; finished even while the task is being cancelled."""
        if self._leave():
            try:
                return await engine.release(ASYNCIO, self._held)
            finally:
                self._forget()
        return self._held.ended or Released.RELEASED


async def renew(runtime: Runtime, held: Held, ttl: Seconds | None) -> None:
    """Push the expiry of a lease, and have the watchdog keep to its new ttl; see `Lease.renew`."""
    await engine.renew(runtime, held, None if ttl is None else ttl_seconds(ttl))
    if held.due:
        watchdog.unwatch(held)
        watchdog.watch(held)


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


class Leaving:
    """Judges how a `with` block left what it held: a clean body that lost a lease must not look protected."""

    __slots__ = ("_error", "_held")

    def __init__(self, error: BaseException | None, *held: Held) -> None:
        self._error, self._held = error, held

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: object) -> bool:
        if isinstance(failure, BackendUnavailable):  # the work is done and it runs out: no reason to fail the body
            logger.warning("dlock: %s; the lease runs out by itself", failure)
        elif failure is not None:
            return isinstance(failure, NotHeld)  # a forked child walks out of its parent's block
        for held in self._held if self._error is None else ():
            if held.ended in (Released.EXPIRED, Released.STOLEN):
                reason = held.lost_because or f"it was {held.ended.value} at release"
                raise LeaseLost(held.name, token=held.token, reason=reason)
        return True
