"""Connections of our own, for threads and for tasks, kept between requests.

They are made like those of the client or URL we were given, but are not taken from its pool, whose size and time limits
are the application's business. A connection is checked out for one request, or for one wait.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.idle import drain, drain_when_forgotten
from dlock_core.runtime import Asyncio, Runtime, clock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

__all__ = ["AsyncioWire", "BlockingIdle", "BlockingWire", "read", "talk"]

IDLE_KEPT: Final = 64
"""Idle connections kept open, at most; more are made when more are needed at once."""
TRUSTED: Final = 1.0
"""Seconds of idleness after which a connection is looked at before it is used again."""


class Idle:
    """Idle connections, last used first."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._pid = connect, os.getpid()
        self._free: deque[Any] = deque()

    def pop(self) -> Any:
        if self._pid != os.getpid():  # a forked child must not talk on its parent's sockets
            self._pid = os.getpid()
            self._free.clear()
        while (connection := self._last()) is not None:
            if clock() - connection.dlock_used < TRUSTED or self._is_alive(connection):
                return connection
            self.discard(connection)
        connection = self._connect()
        connection.dlock_used, connection.dlock_limit = 0.0, None
        return connection

    def push(self, connection: Any) -> None:
        connection.dlock_used = clock()
        self._free.append(connection)
        if len(self._free) > IDLE_KEPT:
            self.discard(self._free.popleft())

    def clear(self) -> None:
        drain(self._free, self.discard)

    def _last(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _is_alive(self, connection: Any) -> bool:
        return True

    def discard(self, connection: Any) -> None:
        raise NotImplementedError


class BlockingIdle(Idle):
    """Those of threads; they are closed when it is forgotten."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        drain_when_forgotten(self, self._free, methodcaller("disconnect"))

    def discard(self, connection: Any) -> None:
        connection.disconnect()


class BlockingWire(BlockingIdle):
    """Connections for threads."""

    checkout, checkin, close, forget = Idle.pop, Idle.push, Idle.clear, Idle.clear

    def exchange(
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float
    ) -> Awaitable[list[Any]]:
        return runtime.call(talk, connection, data, replies, limit)

    def _is_alive(self, connection: Any) -> bool:
        try:
            return not connection.can_read(0)
        except (RedisError, OSError):
            return False


def talk(connection: Any, data: bytes, replies: int, limit: float) -> list[Any]:
    """Connect if need be, send, and read so many replies; `limit` bounds each step, in seconds."""
    if connection._sock is None:
        connection.socket_timeout = connection.socket_connect_timeout = min(limit, connection.socket_connect_timeout)
        connection.connect()
    if connection.dlock_limit != limit:
        connection._sock.settimeout(limit)
        connection.dlock_limit = limit
    connection._sock.sendall(data)
    return [read(connection) for _ in range(replies)]


def read(connection: Any) -> Any:
    """Read one reply, an error reply as an exception object; past `Connection.read_response`, which costs more."""
    return connection._parser.read_response()


class AsyncioWire:
    """Connections for tasks, those of each event loop apart; they are closed when the loop is shut down."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._loops: dict[asyncio.AbstractEventLoop, _AsyncioIdle] = {}
        weakref.finalize(self, _clear, self._loops).atexit = False

    def checkout(self) -> Any:
        return self._idle().pop()

    def checkin(self, connection: Any) -> None:
        self._idle().push(connection)

    def discard(self, connection: Any) -> None:
        self._idle().discard(connection)

    def forget(self) -> None:
        self._idle().clear()

    async def exchange(self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float) -> list[Any]:
        if not isinstance(runtime, Asyncio):
            raise TypeError("an asyncio connection needs the asyncio runtime")
        try:
            async with asyncio.timeout(limit):
                if not connection.is_connected:
                    await runtime.call(connection.connect)
                connection._writer.write(data)  # nothing to drain: nobody writes more before the reply is here
                read = connection._parser.read_response
                return [await read() for _ in range(replies)]
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer within {limit:.3g} s") from error

    def close(self) -> None:
        _clear(self._loops)

    def _idle(self) -> _AsyncioIdle:
        loop = asyncio.get_running_loop()
        idle = self._loops.get(loop)
        return self._begin(loop) if idle is None else idle

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _AsyncioIdle:
        for ended in [known for known in list(self._loops) if known.is_closed()]:
            self._loops.pop(ended, None)
        idle = self._loops[loop] = _AsyncioIdle(self._connect)
        idle.begin()
        return idle

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Let a request go on that nobody listens to any more: to its time limit, or the end of the loop."""
        self._idle().leave(task)


def _clear(loops: dict[asyncio.AbstractEventLoop, _AsyncioIdle]) -> None:
    for loop, idle in list(loops.items()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(idle.clear)


class _AsyncioIdle(Idle):
    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        self._left: set[asyncio.Task[Any]] = set()
        self._has_ended = False
        self._ending = self._until_shutdown()

    def begin(self) -> None:
        """Have the loop close us when it is shut down, as it does with every generator that has begun."""
        with suppress(StopIteration):
            self._ending.__anext__().send(None)

    def push(self, connection: Any) -> None:
        if self._has_ended:  # nobody would close it later
            self.discard(connection)
        else:
            super().push(connection)

    def leave(self, task: asyncio.Task[Any]) -> None:
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        if self._has_ended:
            task.cancel()

    async def _until_shutdown(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._has_ended = True
            self.clear()
            for task in self._left:  # those that began while the loop's other tasks were being cancelled
                task.cancel()
            await asyncio.gather(*self._left, return_exceptions=True)

    def _is_alive(self, connection: Any) -> bool:
        reader = connection._reader
        return reader is not None and not reader.at_eof() and not reader._buffer

    def discard(self, connection: Any) -> None:
        writer = connection._writer
        connection._close()
        if writer is not None:
            writer.transport.abort()  # over TLS, a mere close waits for the other side's, and the loop may end before
