"""The leases that `lock(...)` and `alock(...)` give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlock_core import engine
from dlock_core.holding import renew
from dlock_core.runtime import ASYNCIO
from dlock_core.tie import LETTING_RUN_OUT
from dlock_core.tied import TiedLease

if TYPE_CHECKING:
    from types import TracebackType

    from dlock_core.deadline import Seconds
    from dlock_core.lease import Released

__all__ = ["AsyncLease", "Lease"]


class _Lease(TiedLease):
    __slots__ = ()

    def _leave(self) -> bool:
        is_due = super()._leave()
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

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with LETTING_RUN_OUT:
            self.release()
        self._tie.ensure_was_held(error)


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

    async def _aexit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with LETTING_RUN_OUT:
            await self.release()
        self._tie.ensure_was_held(error)
