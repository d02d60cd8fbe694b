"""Idle connections: how many are kept, for how long, and what closes them.

`IdlePool` never opens a connection and never waits for one: a store that finds it empty connects. A connection is
closed by a later caller, at the end of its event loop (`LoopPools`), when its store is garbage-collected, and in a
forked child, which only has copies of its parent's sockets.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from dlock_core.runtime import clock
from dlock_core.scheduler import after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

__all__ = ["MAX_IDLE_S", "IdlePool", "LoopPools", "inherited"]

T = TypeVar("T")

MAX_IDLE_S: Final = 60.0
"""Seconds of idleness after which a connection is closed: a burst must not occupy the server forever."""
inherited: Final[list[object]] = []
"""Connections that a forked child keeps: a driver that drops a connection would end the parent's session."""


class IdlePool(Generic[T]):
    """Idle connections; the last used is taken first. Any thread may call any method.

    Neither `close` nor `is_usable` may refer to the owner of the pool; otherwise collecting the owner would close
    nothing.

    Args:
        close: Closes a connection, from any thread; it must not raise.
        size: The largest number of idle connections that are kept.
        is_usable: Returns whether an idle connection still works; one that does not is closed.
        trusted_s: Seconds of idleness after which `is_usable` is called.
        is_inherited: A forked child keeps its parent's connections forever instead of closing its copies of them.
    """

    _forgets_at_fork = True

    def __init__(
        self,
        close: Callable[[T], object],
        size: int,
        *,
        is_usable: Callable[[T], object] | None = None,
        trusted_s: float = 0.0,
        is_inherited: bool = False,
    ) -> None:
        self._close, self._size, self._is_inherited = close, size, is_inherited
        self._is_usable, self._trusted_s = is_usable, MAX_IDLE_S if is_usable is None else trusted_s
        self._idle: deque[tuple[T, float]] = deque()
        # Left to the garbage collector, a socket may be met before the connection that would close it, and warns.
        weakref.finalize(self, _drain, self._idle, close).atexit = False
        if self._forgets_at_fork:
            after_fork_in_child(self._after_fork)

    def take(self) -> T | None:
        """Return the last used connection that still works; None if there is none."""
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                return None
            idle_s = clock() - since
            if idle_s < self._trusted_s or (idle_s < MAX_IDLE_S and self._is_usable and self._is_usable(connection)):
                return connection
            self._close(connection)

    def put(self, connection: T) -> None:
        """Keep a connection that works and is no longer in use; close those that are too many or too old.

        The last used is used first, so the others grow old at the left end. Every connection of a burst is put back at
        some time, so no thread has to watch them.
        """
        idle, now = self._idle, clock()
        idle.append((connection, now))
        if len(idle) == 1 <= self._size:  # Alone, and new.
            return
        try:
            while len(idle) > self._size or idle[0][1] <= now - MAX_IDLE_S:
                self._close(idle.popleft()[0])
        except IndexError:  # Other threads took them.
            return

    def clear(self) -> None:
        """Close every idle connection; the pool can be used further."""
        _drain(self._idle, self._close)

    def shut(self) -> None:
        """Close every idle connection, and from now on each one that is put back."""
        self._size = 0
        self.clear()

    def _after_fork(self) -> None:
        """Reset in a forked child, which must not use its parent's sockets."""
        _drain(self._idle, inherited.append if self._is_inherited else self._close)


def _drain(idle: deque[tuple[T, float]], close: Callable[[T], object]) -> None:
    """Close each of them; other threads may take some at the same time."""
    while True:
        try:
            connection, _ = idle.pop()
        except IndexError:
            return
        close(connection)


class LoopPool(IdlePool[T]):
    """The idle connections of one event loop, and the requests that continue there although their callers have gone."""

    _forgets_at_fork = False  # Its `LoopPools` does.

    def __init__(self, close: Callable[[T], object], size: int, **options: Any) -> None:
        super().__init__(close, size, **options)
        self._unattended: set[asyncio.Task[Any]] = set()
        self._has_ended = False

    def let_finish(self, task: asyncio.Task[Any]) -> None:
        """Let a request continue until it ends, or its loop is shut down."""
        self._unattended.add(task)
        task.add_done_callback(self._unattended.discard)
        if self._has_ended:
            task.cancel()

    async def until_shutdown(self) -> AsyncGenerator[None, None]:
        """Close everything when the loop is shut down: it closes every asynchronous generator that has begun."""
        try:
            yield
        finally:
            self._has_ended = True
            self.shut()
            for task in self._unattended:  # Those that began while the loop's other tasks were being cancelled.
                task.cancel()
            await asyncio.gather(*self._unattended, return_exceptions=True)


class LoopPools(Generic[T]):
    """A `LoopPool` for each event loop, because a connection of asyncio belongs to the loop that opened it.

    The arguments are those of `IdlePool`, except that `close` is only ever called in the loop of the connection. It is
    also called when the loop is shut down.
    """

    def __init__(self, close: Callable[[T], object], size: int, **options: Any) -> None:
        self._close, self._size, self._options = close, size, options
        self._pools: dict[asyncio.AbstractEventLoop, tuple[LoopPool[T], AsyncGenerator[None, None]]] = {}
        after_fork_in_child(self._after_fork)

    def here(self) -> LoopPool[T]:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._pools.get(loop)
        return self._begin(loop) if found is None else found[0]

    def clear(self) -> None:
        """Close every idle connection, each in its own loop; from any thread."""
        for pool, _ in list(self._pools.values()):
            pool.clear()

    def _after_fork(self) -> None:
        # A forked child must keep what it inherits: closing it would remove the socket from the parent's epoll, whose
        # loop would never see an event of it again.
        inherited.append(self._pools)
        self._pools = {}

    def _begin(self, loop: asyncio.AbstractEventLoop) -> LoopPool[T]:
        for ended in [known for known in list(self._pools) if known.is_closed()]:
            self._pools.pop(ended, None)
        pool: LoopPool[T] = LoopPool(partial(_close_in, loop, self._close), self._size, **self._options)
        shutdown = pool.until_shutdown()
        with suppress(StopIteration):
            shutdown.__anext__().send(None)
        self._pools[loop] = pool, shutdown
        return pool


def _close_in(loop: asyncio.AbstractEventLoop, close: Callable[[T], object], connection: T) -> None:
    """Close a connection of a loop: at once in this loop, later from any other thread, and not after its end."""
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 - the public one raises where there is none
        close(connection)
    elif not loop.is_closed():
        with suppress(RuntimeError):  # It was closed at this very moment.
            loop.call_soon_threadsafe(close, connection)
