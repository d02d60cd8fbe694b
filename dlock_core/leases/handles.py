"""The handles of leases that callers hold: a thin shell around `LeaseRecord`, without decisions."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, DLockError, NotHeld
from dlock_core.leases import engine
from dlock_core.leases.callers import forget_held
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from dlock_core.leases.lease import LeaseRecord, Membership
    from dlock_core.options import Seconds
    from dlock_core.runtime import Runtime

__all__ = [
    "AsyncLease", "AsyncReleasing", "Lease", "LeaseHandle", "LeaseView", "NoAsyncBlock", "NoBlock", "Releasing",
    "let_expire", "no_copies", "warn_unreleased",
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


class NoBlock:
    """Refuses `with lock.acquire():`, and releases what was acquired: the lock begins a block, a lease does not."""

    __slots__ = ()

    if not TYPE_CHECKING:  # Type checkers refuse such a block, too.

        def __enter__(self: Any) -> Never:
            self.release()
            raise _no_block("with")

        def __exit__(self, *_: object) -> None:
            """Only there because Python looks for it before it calls `__enter__`."""


class NoAsyncBlock:
    """Refuses `async with await lock.acquire():`, see `NoBlock`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        async def __aenter__(self: Any) -> Never:
            await getattr(self, "arelease", self.release)()
            raise _no_block("async with")

        async def __aexit__(self, *_: object) -> None:
            """See `NoBlock.__exit__`."""


def _no_block(statement: str) -> TypeError:
    return TypeError(
        f"what acquire() returns begins no block, and was released: write `{statement}` with the lock itself, "
        f"`{statement} lock:` or `{statement} lock(...):`, without acquire()"
    )


class Releasing(NoBlock, Generic[T]):
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


class AsyncReleasing(NoAsyncBlock, Generic[T]):
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
            held.abandon()  # Something may still refer to the record, such as the traceback of a failed renewal.
            forget_held((held,))
        warn_unreleased(self)


def warn_unreleased(lease: LeaseView) -> None:
    """Warn, in the finalizer of the last handle of a lease, that nothing will release it any more."""
    if lease.remaining() > 0.0:
        text = f"{lease!r} was never released: it runs out by itself"
        warnings.warn(text, ResourceWarning, stacklevel=3, source=lease)


def let_expire(error: BackendUnavailable | NotHeld) -> None:
    """Accept that a lease could not be released after its work has ended, or belongs to a parent: it expires."""
    if isinstance(error, BackendUnavailable):
        logger.warning("dlock: %s; unless a later attempt releases the lease, it runs out by itself", error)


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
