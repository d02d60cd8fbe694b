"""How an AsyncSession waits for a store: by awaiting, inside SQLAlchemy's greenlet or from it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.util import concurrency, greenlet_spawn

from dlock_core.errors import BackendUnavailable, NotHeld
from dlock_core.leases.handles import let_expire
from dlock_core.runtime import ASYNCIO, Asyncio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["GreenletAsyncio", "await_", "in_greenlet"]

T = TypeVar("T")


await_: Final[Callable[[Coroutine[Any, Any, T]], T]] = getattr(concurrency, "await_", concurrency.await_only)
"""Awaits inside the greenlet; SQLAlchemy 2.0 has only the older name."""


def in_greenlet() -> bool:
    """Return whether SQLAlchemy runs this code for asyncio; without greenlet it does not."""
    return sys.modules.get("greenlet") is not None and concurrency.in_greenlet()


class GreenletAsyncio(Asyncio):
    """Waits in the event loop of the task that created it; SQLAlchemy's synchronous code runs in a greenlet."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call_database(self, function: Callable[..., Any], *args: Any) -> Any:
        return await greenlet_spawn(function, *args)

    def finish(self, step: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T | None:
        """Execute a step to its end, even while the task is being cancelled."""
        if in_greenlet():
            return await_(self.shield(step(self, *args)))
        if not self._loop.is_closed():  # no code can wait here, for example in `sync_session.close()`
            self._loop.call_soon_threadsafe(self._start, step, args)
        return None

    def _start(self, step: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
        task = self._loop.create_task(_finish_in_background(step, args))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)


async def _finish_in_background(step: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
    try:
        await step(ASYNCIO, *args)
    except (BackendUnavailable, NotHeld) as error:
        let_expire(error)
