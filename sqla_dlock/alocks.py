"""`alock(session, ...)`: the same lock for an AsyncSession."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlock_core.runtime import ASYNCIO
from dlock_core.tie import LETTING_RUN_OUT
from sqla_dlock.greenlets import SPAWNING, Awaiting
from sqla_dlock.leases import AsyncLease
from sqla_dlock.locks import SessionLock
from sqla_dlock.sessions import plain_async_session

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from sqla_dlock.locks import LockOptions

__all__ = ["AsyncLock", "alock"]


class AsyncLock(SessionLock):
    """See `alock`."""

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        lease = await self._hold()
        lease._tie.leave_with_transaction(lease._leave)
        return lease

    async def __aenter__(self) -> AsyncLease:
        return self._blocks.enter(asyncio.current_task(), await self._hold())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: AsyncLease = self._blocks.leave(asyncio.current_task())
        with LETTING_RUN_OUT:
            await lease.release()
        lease._tie.ensure_was_held(error)

    async def _hold(self) -> AsyncLease:
        return AsyncLease(await self.take(ASYNCIO, SPAWNING, Awaiting()))


def alock(session: AsyncSession | async_scoped_session[Any], *parts: Any, **options: Unpack[LockOptions]) -> AsyncLock:
    """As `sqla_dlock.lock`, for an AsyncSession.

    Use it as `async with alock(session, "order", 42) as lease:`, or `await` its `acquire()`.
    """
    return AsyncLock(plain_async_session(session, "lock()").sync_session, parts, **options)
