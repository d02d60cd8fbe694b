"""Requests over redis-py's bare `Connection`s, kept by us: a third of the client's cost, no retries behind our back.

Connections are made like those of the client or URL we were given, but are not taken from its pool, whose size and
time limits are the application's business. A connection is checked out for one request, or for one wait.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import Asyncio, Runtime, clock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dlock_core.backends.redis.scripts import Script

__all__ = ["AsyncioWire", "BlockingWire", "Command", "Wire"]

Command = tuple[Any, ...]

_pack: Callable[[Command], bytes] | None
try:
    from hiredis import pack_command as _pack
except ImportError:
    _pack = None

IDLE_KEPT: Final = 64
"""Idle connections kept open, at most; more are made when more are needed at once."""
TRUSTED: Final = 1.0
"""Seconds of idleness after which a connection is looked at before it is used again."""


class Wire(Protocol):
    """Sends commands and reads their replies, one copy of which serves both worlds."""

    def checkout(self) -> Any:
        """Give a connection that nobody else uses."""

    def checkin(self, connection: Any) -> None:
        """Take back a connection whose replies were all read."""

    def discard(self, connection: Any) -> None:
        """Close a connection in unknown state, at once."""

    def forget(self) -> None:
        """Close the idle connections: one of them turned out to be dead, so the others may be."""

    def exchange(
        self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float
    ) -> Awaitable[list[Any]]:
        """Send, and read so many replies, an error reply as an exception object, within `limit` seconds."""

    def close(self) -> None:
        """Close the idle connections."""


async def ask(  # noqa: PLR0917 - the hot path: keywords cost
    wire: Wire, runtime: Runtime, name: str, script: Script, keys: Command, args: Command, limit: float
) -> Any:
    """Run one script; raises BackendUnavailable, whose text names `name`, when there is no proper answer."""
    (reply,) = await converse(wire, runtime, name, [("EVALSHA", script.sha, len(keys), *keys, *args)], limit)
    if isinstance(reply, NoScriptError):  # flushed, or another server: it learns the script along with the question
        (reply,) = await converse(wire, runtime, name, [("EVAL", script.text, len(keys), *keys, *args)], limit)
    return answered(name, reply)


def answered(name: str, reply: Any) -> Any:
    """Turn an error reply into BackendUnavailable: a server that cannot answer has not said no."""
    if isinstance(reply, RedisError):
        raise _unavailable(name, reply, reused=False) from reply
    return reply


async def converse(wire: Wire, runtime: Runtime, name: str, commands: list[Command], limit: float) -> list[Any]:
    """Send commands in one write and read their replies."""
    connection = wire.checkout()
    reused = connection.dlock_used > 0
    try:
        replies = await wire.exchange(runtime, connection, _packed(connection, commands), len(commands), limit)
    except BaseException as error:
        wire.discard(connection)  # closed at once: what it carries must not be carried out after our withdrawal
        if not isinstance(error, RedisError | OSError):
            raise
        failure = _unavailable(name, error, reused=reused)
        if failure.broken:
            wire.forget()
        raise failure from error
    wire.checkin(connection)
    return replies


def _packed(connection: Any, commands: list[Command]) -> Any:
    if _pack is None:
        return connection.pack_commands(commands)
    return [b"".join([_pack(command) for command in commands])]  # at a third of the cost


def _unavailable(name: str, error: RedisError | OSError, *, reused: bool) -> BackendUnavailable:
    broken = reused and isinstance(error, RedisConnectionError)
    refused = isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError)
    reason = f"the server refused our credentials: {error}" if refused else f"{type(error).__name__}: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused)


class _Idle:
    """Idle connections, last used first."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._pid = connect, os.getpid()
        self._free: deque[Any] = deque()

    def pop(self) -> Any:
        if self._pid != os.getpid():  # a forked child must not talk on its parent's sockets
            self._pid, self._free = os.getpid(), deque()
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
        while (connection := self._last()) is not None:
            self.discard(connection)

    def _last(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _is_alive(self, connection: Any) -> bool:
        return True

    def discard(self, connection: Any) -> None:
        raise NotImplementedError


class BlockingWire(_Idle):
    """Connections for threads."""

    checkout, checkin, close, forget = _Idle.pop, _Idle.push, _Idle.clear, _Idle.clear

    def exchange(
        self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float
    ) -> Awaitable[list[Any]]:
        return runtime.call(_talk, connection, packed, replies, limit)

    def _is_alive(self, connection: Any) -> bool:
        try:
            return not connection.can_read(0)
        except (RedisError, OSError):
            return False

    def discard(self, connection: Any) -> None:
        connection.disconnect()


def _talk(connection: Any, packed: Any, replies: int, limit: float) -> list[Any]:
    if connection._sock is None:
        connection.connect()
    if connection.dlock_limit != limit:
        connection._sock.settimeout(limit)
        connection.dlock_limit = limit
    connection.send_packed_command(packed, False)
    return [_read(connection) for _ in range(replies)]


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


class AsyncioWire:
    """Connections for tasks, those of each event loop apart; they are closed when the loop is shut down."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._loops: dict[asyncio.AbstractEventLoop, _AsyncioIdle] = {}

    def checkout(self) -> Any:
        return self._idle().pop()

    def checkin(self, connection: Any) -> None:
        self._idle().push(connection)

    def discard(self, connection: Any) -> None:
        connection._close()

    def forget(self) -> None:
        self._idle().clear()

    async def exchange(self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float) -> list[Any]:
        if not isinstance(runtime, Asyncio):
            raise TypeError("an asyncio connection needs the asyncio runtime")
        try:
            async with asyncio.timeout(limit):
                await runtime.call(connection.send_packed_command, packed, False)
                return [await _aread(connection) for _ in range(replies)]
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer within {limit:.3g} s") from error

    def close(self) -> None:
        for loop, idle in list(self._loops.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(idle.clear)

    def _idle(self) -> _AsyncioIdle:
        loop = asyncio.get_running_loop()
        idle = self._loops.get(loop)
        return self._begin(loop) if idle is None else idle

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _AsyncioIdle:
        for ended in [known for known in list(self._loops) if known.is_closed()]:
            self._loops.pop(ended, None)
        idle = self._loops[loop] = _AsyncioIdle(self._connect)
        idle.ending = self._until_shutdown(loop, idle)
        with suppress(StopIteration):
            idle.ending.__anext__().send(None)  # from now on the loop knows it, and closes it when it is shut down
        return idle

    async def _until_shutdown(self, loop: asyncio.AbstractEventLoop, idle: _AsyncioIdle) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._loops.pop(loop, None)
            idle.clear()


class _AsyncioIdle(_Idle):
    ending: AsyncGenerator[None, None]

    def _is_alive(self, connection: Any) -> bool:
        reader = connection._reader
        return reader is not None and not reader.at_eof() and not reader._buffer

    def discard(self, connection: Any) -> None:
        connection._close()


async def _aread(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
