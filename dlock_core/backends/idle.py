"""Idle connections: how many are kept, for how long, and what closes them.

`IdlePool` never opens a connection and never waits for one: a store that finds it empty connects. A connection is
closed by a later caller, at the end of its event loop (`LoopPools`), when its store is garbage, and in a forked child,
which only has copies of its parent's sockets. Redis's connections carry the time of their last use themselves, so its
transport uses the functions below instead.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from dlock_core.runtime import clock
from dlock_core.scheduler import after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

__all__ = ["MAX_IDLE_S", "IdlePool", "LoopPools", "close_excess", "drain", "drain_when_forgotten", "inherited"]

T = TypeVar("T")

MAX_IDLE_S: Final = 60.0
"""Seconds of idleness after which a connection is closed rather than kept: a burst must not cost a server for ever."""
inherited: Final[list[object]] = []
"""What a forked child keeps of its parent's: a driver that forgot a connection would end the parent's session."""


class IdlePool(Generic[T]):
    """Idle connections; the last used is taken first. Any thread may call any method.

    Neither `close` nor `is_usable` may refer to the owner of the pool, or forgetting the owner would close nothing.

    Args:
        close: Closes a connection, from any thread; it must not raise.
        size: How many idle connections are kept, at most.
        is_usable: Tells whether an idle connection still works; one that does not is closed.
        trusted_s: Seconds of idleness during which that is not even asked.
        is_inherited: A forked child keeps its parent's connections for ever instead of closing its copies of them.
    """

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
        self._close_entry = partial(_call_on_connection, close)
        drain_when_forgotten(self, self._idle, self._close_entry)
        after_fork_in_child(self._after_fork)

    def take(self) -> T | None:
        """Return the connection that was used last and still works; None when there is none."""
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
        """Keep a connection that works and is not in use any more."""
        self._idle.append((connection, clock()))
        close_excess(self._idle, itemgetter(1), self._close_entry, self._size)

    def clear(self) -> None:
        """Close every idle connection; the pool can be used further."""
        drain(self._idle, self._close_entry)

    def shut(self) -> None:
        """Close every idle connection, and from now on each one that is put back."""
        self._size = 0
        self.clear()

    def _after_fork(self) -> None:
        """Begin anew in a forked child, which must not talk on its parent's sockets."""
        drain(self._idle, inherited.append if self._is_inherited else self._close_entry)


def _call_on_connection(close: Callable[[T], object], entry: tuple[T, float]) -> None:
    close(entry[0])


def close_excess(idle: deque[T], since: Callable[[T], float], close: Callable[[T], object], size: int) -> None:
    """Close the connections that are too many or were idle for too long; call this whenever one is put back.

    The last used is used first, so the others grow old at the left end. Every connection of a burst is put back at some
    time, so no thread has to look after them.
    """
    oldest = clock() - MAX_IDLE_S
    while True:
        try:
            if len(idle) <= size and since(idle[0]) > oldest:
                return
            excess = idle.popleft()
        except IndexError:  # Other threads took them.
            return
        close(excess)


def drain(idle: deque[T], close: Callable[[T], object]) -> None:
    """Close each of them; other threads may take some at the same time."""
    while True:
        try:
            last = idle.pop()
        except IndexError:
            return
        close(last)


def drain_when_forgotten(owner: object, idle: deque[T], close: Callable[[T], object]) -> None:
    """Close them when their owner is garbage; `close` must not refer to it, and the deque must stay the same one.

    Left to the garbage collector, a socket may be met before the connection that would close it, and warns.
    """
    weakref.finalize(owner, drain, idle, close).atexit = False


class LoopPools(Generic[T]):
    """An `IdlePool` for each event loop, because a connection of asyncio belongs to the loop that opened it.

    The arguments are those of `IdlePool`, but that `close` is only ever called in the loop of the connection. It is
    called when the loop is shut down, too.
    """

    def __init__(self, close: Callable[[T], object], size: int, **options: Any) -> None:
        self._close, self._size, self._options = close, size, options
        self._pools: dict[asyncio.AbstractEventLoop, tuple[IdlePool[T], AsyncGenerator[None, None]]] = {}

    def here(self) -> IdlePool[T]:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._pools.get(loop)
        return self._begin(loop) if found is None else found[0]

    def clear(self) -> None:
        """Close every idle connection, each in its own loop; from any thread."""
        for pool, _ in list(self._pools.values()):
            pool.clear()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> IdlePool[T]:
        for ended in [known for known in list(self._pools) if known.is_closed()]:
            self._pools.pop(ended, None)
        # A forked child must keep what it inherits: to close it would take the socket out of the epoll of the parent,
        # whose loop would never hear of it again.
        close = partial(_close_in, loop, self._close)
        pool: IdlePool[T] = IdlePool(close, self._size, is_inherited=True, **self._options)
        shutdown = _until_shutdown(pool)
        with suppress(StopIteration):
            shutdown.__anext__().send(None)
        self._pools[loop] = pool, shutdown
        return pool


def _close_in(loop: asyncio.AbstractEventLoop, close: Callable[[T], object], connection: T) -> None:
    """Close a connection of a loop: at once in this loop, soon from any other thread, and not after its end."""
    if asyncio._get_running_loop() is loop:  # noqa: SLF001 - the public one raises where there is none
        close(connection)
    elif not loop.is_closed():
        with suppress(RuntimeError):  # It was closed this very moment.
            loop.call_soon_threadsafe(close, connection)


async def _until_shutdown(pool: IdlePool[Any]) -> AsyncGenerator[None, None]:
    """Shut a pool when its loop is shut down: the loop closes every asynchronous generator that has begun."""
    try:
        yield
    finally:
        pool.shut()
