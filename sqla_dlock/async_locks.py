"""`alock(session, ...)`: the same lock for an AsyncSession."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from dlock_core.transactions import transaction_lock
from dlock_core.transactions.transaction_lock import TiedLocks, leaving_async
from sqla_dlock.greenlets import GreenletAsyncio
from sqla_dlock.locks import AsyncLease, SessionLock, take_all
from sqla_dlock.stores import plain_async_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import EllipsisType, TracebackType
    from typing import Unpack

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    from dlock_core.options import Seconds
    from sqla_dlock.locks import LockOptions

__all__ = ["AsyncLeases", "AsyncLock", "AsyncLocks", "alock"]


class AsyncLock(SessionLock):
    """See `alock`."""

    _handle = AsyncLease

    async def acquire(self) -> AsyncLease:
        """See `Lock.acquire`."""
        return await self._lease(AsyncLease._for_transaction)

    async def __aenter__(self) -> AsyncLease:
        return await self._lease(partial(self._blocks.enter, asyncio.current_task()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease: AsyncLease = self._blocks.leave(asyncio.current_task())
        await lease._aexit(kind, error, trace)

    async def _lease(self, begin: Callable[[AsyncLease], AsyncLease]) -> AsyncLease:
        return await self._ahold(partial(self._take, GreenletAsyncio(), begin))


class AsyncLeases(transaction_lock.Leases[AsyncLease]):
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


class AsyncLocks(TiedLocks):
    """See `Locks`."""

    async def acquire(self) -> AsyncLeases:
        """See `Locks.acquire`."""
        return await take_all(self, GreenletAsyncio(), AsyncLeases._for_transaction)

    async def __aenter__(self) -> AsyncLeases:
        def begin(leases: Iterable[AsyncLease]) -> AsyncLeases:
            return self._blocks.enter(caller, AsyncLeases(leases))

        caller = asyncio.current_task()
        return await take_all(self, GreenletAsyncio(), begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await leaving_async(self._blocks.leave(asyncio.current_task())).__aexit__(kind, error, trace)


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
