"""`alock(session, ...)`: the same lock for an AsyncSession."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, overload

from dlock_core import together
from dlock_core.runtime import ASYNCIO
from dlock_core.together import TiedLocks, leaving_async
from sqla_dlock.greenlets import SPAWNING, Awaiting
from sqla_dlock.leases import AsyncLease
from sqla_dlock.locks import SessionLock
from sqla_dlock.sessions import plain_async_session
from sqla_dlock.together import take_all

if TYPE_CHECKING:
    from types import EllipsisType, TracebackType
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from dlock_core.deadline import Seconds
    from sqla_dlock.locks import LockOptions

__all__ = ["AsyncLeases", "AsyncLock", "AsyncLocks", "alock"]


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
        await lease._aexit(kind, error, trace)

    async def _hold(self) -> AsyncLease:
        return AsyncLease(await self.take(ASYNCIO, SPAWNING, Awaiting()))


class AsyncLeases(together.Leases[AsyncLease]):
    """The leases of several locks, in the order in which these were given to `alock`."""

    __slots__ = ()

    async def release(self) -> None:
        """Release each of them, see `AsyncLease.release`."""
        async with AsyncExitStack() as stack:
            for lease in self:
                stack.push_async_callback(lease.release)


class AsyncLocks(TiedLocks):
    """See `Locks`."""

    async def acquire(self) -> AsyncLeases:
        """See `Locks.acquire`."""
        leases = await self._hold()
        for lease in leases:
            lease._tie.leave_with_transaction(lease._leave)
        return leases

    async def __aenter__(self) -> AsyncLeases:
        return self._blocks.enter(asyncio.current_task(), await self._hold())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await leaving_async(self._blocks.leave(asyncio.current_task())).__aexit__(kind, error, trace)

    async def _hold(self) -> AsyncLeases:
        return AsyncLeases(await take_all(self, ASYNCIO, SPAWNING, Awaiting(), AsyncLease))


@overload
def alock(session: AsyncLock, /, *others: AsyncLock, wait: Seconds | EllipsisType | None = ...) -> AsyncLocks: ...
@overload
def alock(
    session: AsyncSession | async_scoped_session[Any], *parts: Any, **options: Unpack[LockOptions]
) -> AsyncLock: ...
def alock(session: Any, *parts: Any, **options: Any) -> AsyncLock | AsyncLocks:
    """As `sqla_dlock.lock`, for an AsyncSession.

    Use it as `async with alock(session, "order", 42) as lease:`, or `await` its `acquire()`.
    """
    if isinstance(session, AsyncLock):
        return AsyncLocks((session, *parts), AsyncLock, **options)
    return AsyncLock(plain_async_session(session, "lock()").sync_session, parts, **options)
