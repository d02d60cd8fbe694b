"""Requests over redis-py's bare `Connection`s, kept by us: a third of the client's cost, and no retries behind our back.

Connections are made like those of the client or URL we were given, but are not taken from its pool, whose size and
time limits are the application's business. A connection is checked out for one request, or for one wait.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import Asyncio, Runtime, clock

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from dlock_core.backends.redis.scripts import Script

__all__ = ["AsyncioWire", "BlockingWire", "Command", "Wire"]

Command = tuple[Any, ...]

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

    async def exchange(self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float) -> list[Any]:
        """Send, and read so many replies, an error reply as an exception object, within `limit` seconds."""

    def close(self) -> None:
        """Close the idle connections."""


async def ask(
    wire: Wire, runtime: Runtime, name: str, script: Script, keys: Command, args: Command, limit: float
) -> Any:
    """Run one script; raises BackendUnavailable, whose text names `name`, when there is no proper answer."""
    command = (script.sha, len(keys), *keys, *args)
    (reply,) = await converse(wire, runtime, name, [("EVALSHA", *command)], limit)
    if isinstance(reply, NoScriptError):  # flushed, or another server: it learns the script along with the question
        (reply,) = await converse(wire, runtime, name, [("EVAL", script.text, *command[1:])], limit)
    return answered(name, reply)


def answered(name: str, reply: Any) -> Any:
    """Turn an error reply into BackendUnavailable: a server that cannot answer has not said no."""
    if isinstance(reply, RedisError):
        raise BackendUnavailable(name, reason=f"{type(reply).__name__}: {reply}") from reply
    return reply


async def converse(wire: Wire, runtime: Runtime, name: str, commands: list[Command], limit: float) -> list[Any]:
    """Send commands in one write and read their replies."""
    connection, reused = None, False
    try:
        connection = wire.checkout()
        reused = connection.dlock_used > 0
        packed = connection.pack_commands(commands) if len(commands) > 1 else connection.pack_command(*commands[0])
        replies = await wire.exchange(runtime, connection, packed, len(commands), limit)
    except AuthenticationError as error:
        raise BackendUnavailable(name, reason=f"the server refused our credentials: {error}") from error
    except (RedisError, OSError) as error:
        broken = reused and isinstance(error, RedisConnectionError)
        raise BackendUnavailable(name, reason=f"{type(error).__name__}: {error}", broken=broken) from error
    wire.checkin(connection)
    return replies


class _Idle:
    """Idle connections, last used first."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._pid = connect, os.getpid()
        self._free: deque[Any] = deque()

    def pop(self) -> Any:
        if self._pid != os.getpid():  # a forked child must not talk on its parent's sockets
            self._pid, self._free = os.getpid(), deque()
        while self._free:
            connection = self._free.pop()
            if clock() - connection.dlock_used < TRUSTED or self._is_alive(connection):
                return connection
            self._drop(connection)
        connection = self._connect()
        connection.dlock_used = 0.0
        return connection

    def push(self, connection: Any) -> None:
        connection.dlock_used = clock()
        self._free.append(connection)
        if len(self._free) > IDLE_KEPT:
            self._drop(self._free.popleft())

    def clear(self) -> None:
        while self._free:
            self._drop(self._free.pop())

    def _is_alive(self, connection: Any) -> bool:
        return True

    def _drop(self, connection: Any) -> None:
        raise NotImplementedError


class BlockingWire(_Idle):
    """Connections for threads."""

    checkout, checkin, close = _Idle.pop, _Idle.push, _Idle.clear

    async def exchange(self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float) -> list[Any]:
        if limit != connection.socket_timeout and connection._sock is not None:
            connection._sock.settimeout(limit)
        await runtime.call(connection.send_packed_command, packed, False)
        if limit != connection.socket_timeout:
            connection._sock.settimeout(limit)
        answers = [await runtime.call(_read, connection) for _ in range(replies)]
        if limit != connection.socket_timeout:
            connection._sock.settimeout(connection.socket_timeout)
        return answers

    def _is_alive(self, connection: Any) -> bool:
        try:
            return not connection.can_read(0)
        except (RedisError, OSError):
            return False

    def _drop(self, connection: Any) -> None:
        connection.disconnect()


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


class AsyncioWire:
    """Connections for tasks, those of each event loop apart."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._loops: MutableMapping[asyncio.AbstractEventLoop, _AsyncioIdle] = WeakKeyDictionary()

    def checkout(self) -> Any:
        return self._idle().pop()

    def checkin(self, connection: Any) -> None:
        self._idle().push(connection)

    async def exchange(self, runtime: Runtime, connection: Any, packed: Any, replies: int, limit: float) -> list[Any]:
        if not isinstance(runtime, Asyncio):
            raise TypeError("an asyncio connection needs the asyncio runtime")
        try:
            async with asyncio.timeout(limit):
                await runtime.call(connection.send_packed_command, packed, False)
                return [await _aread(connection) for _ in range(replies)]
        except TimeoutError as error:
            raise RedisConnectionError(f"no answer within {limit:.3g} s") from error

    def close(self) -> None:
        for idle in list(self._loops.values()):
            idle.clear()

    def _idle(self) -> _AsyncioIdle:
        loop = asyncio.get_running_loop()
        idle = self._loops.get(loop)
        if idle is None:
            idle = self._loops[loop] = _AsyncioIdle(self._connect)
        return idle


class _AsyncioIdle(_Idle):
    def _is_alive(self, connection: Any) -> bool:
        reader = connection._reader
        return reader is not None and not reader.at_eof() and not reader._buffer

    def _drop(self, connection: Any) -> None:
        if connection._writer is not None:
            connection._writer.close()


async def _aread(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
