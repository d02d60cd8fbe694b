"""What callers hold: leases, who holds them, and the `with` blocks that they are in. Sugar, no decisions."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary, ref

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, DLockError, LeaseLost, NotHeld
from dlock_core.leases import engine, watchdog
from dlock_core.options import Seconds, ttl_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.leases.lease import Held
    from dlock_core.runtime import Runtime

__all__ = [
    "NOTHING",
    "AsyncLease",
    "Blocks",
    "Key",
    "Lease",
    "LeaseView",
    "Leaving",
    "abandon",
    "end_block",
    "held_by",
    "key_of",
    "mine",
    "renew",
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
    """Return what a thread or task holds, and has not asked the store to release, whatever came of that."""
    held = mine.get(key)
    return held if held is not None and held.remaining() > 0.0 and not held.release_requests else None


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
    """A handle of a grant, which ends with the last of its handles."""

    __slots__ = ("_key", "_left")

    def __init__(self, held: Held, key: Key) -> None:
        self._left = True
        """The handle does not count: not yet, or no more."""
        self._held, self._key = held, key

    def _leave(self) -> bool:
        """Leave once; True for the last handle of the grant, which has to release it."""
        self._held.ensure_own_process()
        if self._left:
            return self._held.ended is None and self._held.depth == 0
        self._left = True
        self._held.depth -= 1
        return self._held.depth == 0

    def _grants(self) -> tuple[Held, ...]:
        return (self._held,)

    async def _end(self, runtime: Runtime) -> Released:
        """Leave the grant, and release it if this was its last handle; may be repeated after an interrupt."""
        if self._leave():
            try:
                return await engine.release(runtime, self._held)
            finally:
                self._forget()
        return self._held.ended or Released.RELEASED

    def _forget(self) -> None:
        """Tidy up, when the next waiter has the lock already."""
        watchdog.unwatch(self._held)
        if mine.get(self._key) is self._held:
            del mine[self._key]

    def __del__(self) -> None:
        if getattr(self, "_left", True) or self._held.lost_because or self._held.remaining() == 0.0:
            return
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
        try:
            return run(self._end(BLOCKING))
        except DLockError:
            raise
        except BaseException:  # It was interrupted, at whatever step; each may be repeated.
            run(self._end(BLOCKING))
            raise


class AsyncLease(_Lease):
    """The same for asyncio."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await renew(ASYNCIO, self._held, ttl)

    async def release(self) -> Released:
        """See `Lease.release`; finished even while the task is being cancelled."""
        try:
            return await self._end(ASYNCIO)
        except DLockError:
            raise
        except BaseException:  # See `Lease.release`.
            await self._end(ASYNCIO)
            raise


async def renew(runtime: Runtime, held: Held, ttl: Seconds | None) -> None:
    """Push the expiry of a lease, and have the watchdog keep to its new ttl; see `Lease.renew`."""
    try:
        await engine.renew(runtime, held, None if ttl is None else ttl_seconds(ttl))
    finally:
        if held.due and held.renewing:  # Also after an error: a shorter ttl counts from the moment it was asked for.
            watchdog.watch(held)


async def abandon(runtime: Runtime, held: Held) -> None:
    """Give back a grant that its caller never got, because it was interrupted; nothing of it stays behind."""
    held.renewing = False
    watchdog.unwatch(held)
    with suppress(BackendUnavailable, NotHeld):
        await engine.release(runtime, held)


class Blocks:
    """The leases of the `with` blocks that each thread or task is in, so that a lock can be shared by all of them.

    A block may end in another thread or task than the one it began in: a generator, a fixture, a response that is
    streamed. Then its lease is looked for among those whose caller can no longer be in a block. When that does not tell
    which it is, none is taken: a lease that nobody ends runs out, one that is taken from somebody lets two in.
    """

    __slots__ = ("_leases", "_unmatched")

    def __init__(self) -> None:
        self._leases: dict[Hashable, list[Any]] = {}
        self._unmatched = 0
        """Blocks that are over and whose leases are still here, since nobody could tell which are theirs."""

    def enter(self, caller: Hashable, lease: T) -> T:
        """Remember the lease of a block that begins."""
        self._leases.setdefault(caller, []).append(lease)
        return lease

    def leave(self, caller: Hashable) -> Any:
        """Remove and return the lease of a block that ends; NOTHING when nobody can tell which it is."""
        lease = self.innermost(caller)
        self.forget(caller, lease)
        return lease

    def innermost(self, caller: Hashable) -> Any:
        """Return the lease of a block that ends, which stays here until `forget`; NOTHING when nobody can tell."""
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
            self._leases.clear()  # Nobody is in a block any more: what nobody keeps is renewed no longer.
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
        return NOTHING

    def _entries(self) -> list[tuple[Hashable, Any]]:
        return [(caller, lease) for caller, leases in [*self._leases.items()] for lease in leases]


class _Nothing(tuple[()]):
    """Stands for the lease, or the leases, of a block when nobody can tell which they are: there is nothing to end."""

    __slots__ = ()

    def _exit(self, *_: object) -> None:
        pass

    async def _aexit(self, *_: object) -> None:
        pass


NOTHING: Final = _Nothing()


def _has_ended(caller: object) -> bool:
    """Tell whether a thread or task can be in no block any more."""
    if isinstance(caller, threading.Thread):
        return not caller.is_alive()
    return isinstance(caller, asyncio.Future) and caller.done()


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


async def end_block(
    runtime: Runtime, blocks: Blocks, caller: object, error: BaseException | None, ending: list[Any]
) -> None:
    """Release what a `with` block held.

    It notes in `ending` what that is. Whoever is interrupted here calls again with the same list: then the block is
    ended all the same, and no other one in its place.
    """
    if not ending:
        ending += [blocks.innermost(caller)]
    lease = ending[0]
    if lease is NOTHING:
        return
    try:
        with Leaving(error, *lease._grants()):
            await lease._end(runtime)
    finally:
        blocks.forget(caller, lease)
