"""The leases that `lock(...)` and `alock(...)` give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlock_core import engine
from dlock_core.holding import LeaseView, renew
from dlock_core.runtime import ASYNCIO

if TYPE_CHECKING:
    from dlock_core.deadline import Seconds
    from dlock_core.lease import Released
    from sqla_dlock.ties import SessionTie

__all__ = ["AsyncLease", "Lease"]


class _Lease(LeaseView):
    __slots__ = ("_left", "_tie")

    def __init__(self, tie: SessionTie) -> None:
        super().__init__(tie.held)
        self._tie, self._left = tie, False

    def _leave(self) -> bool:
        """Leave once; True for the last handle when no transaction needs the lease: it has to be released now."""
        self._held.ensure_own_process()
        if not self._left:
            self._left = True
            self._tie.depth -= 1
        is_due = self._tie.depth == 0 and self._held.ended is None and self._tie.leave()
        self._tie.forget_if_over()
        return is_due


class Lease(_Lease):
    """A lock that a Session holds. Its methods do no I/O, but for those that renew and release."""

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        self._tie.finish(renew, self._held, ttl)

    def release(self) -> Released | None:
        """Release now; None when it is not the time: the end of the transaction releases, or the block that was joined.

        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out.
        """
        if self._leave():
            self._tie.finish(engine.release, self._held)
        return self._held.ended


class AsyncLease(_Lease):
    """A lock that an AsyncSession holds."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """See `Lease.renew`."""
        await renew(ASYNCIO, self._held, ttl)

    async def release(self) -> Released | None:
        """See `Lease.release`; finished even while the task is being cancelled."""
        if self._leave():
            await engine.release(ASYNCIO, self._held)
        return self._held.ended
