"""`alock(session, ...)`: the same lock for an AsyncSession."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from dlock_core.leases.lock import AsyncBlockExit
from dlock_core.transactions.transaction_lock import TiedLeases, TiedLocks
from sqla_dlock.greenlets import GreenletAsyncio
from sqla_dlock.locks import AsyncLease, SessionLock
from sqla_dlock.stores import plain_async_session

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import EllipsisType
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from dlock_core.options import Seconds
    from sqla_dlock.locks import LockOptions

__all__ = ["AsyncLeases", "AsyncLock", "AsyncLocks", "alock"]


class AsyncLock(SessionLock, AsyncBlockExit):
    """See `alock`."""

    _handle = AsyncLease

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        return await self._hold(GreenletAsyncio(), AsyncLease._for_transaction)

    async def __aenter__(self) -> AsyncLease:
        return await self._hold(GreenletAsyncio(), partial(self._blocks.enter, asyncio.current_task()))


class AsyncLeases(TiedLeases[AsyncLease]):
    """The leases of several locks, in the order in which these were given to `alock`."""

    __slots__ = ()

    @classmethod
    def _for_transaction(cls, leases: Iterable[AsyncLease]) -> AsyncLeases:
        """Make them, each to the end of its session's transaction."""
        return cls(map(AsyncLease._for_transaction, leases))

    async def release(self) -> None:
        """Release each of them, see `AsyncLease.release`."""
        async with AsyncExitStack() as stack:
            for lease in self:
                stack.push_async_callback(lease.release)


class AsyncLocks(TiedLocks, AsyncBlockExit):
    """See `Locks`."""

    async def acquire(self) -> AsyncLeases:
        """See `Locks.acquire`."""
        return await self._hold(GreenletAsyncio(), AsyncLeases._for_transaction)

    async def __aenter__(self) -> AsyncLeases:
        caller = asyncio.current_task()
        return await self._hold(GreenletAsyncio(), lambda leases: self._blocks.enter(caller, AsyncLeases(leases)))


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
