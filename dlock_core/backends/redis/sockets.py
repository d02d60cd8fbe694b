"""The connections of the transport: for threads by blocking sockets, and for tasks by asyncio's streams.

Both read and write at redis-py's `Connection`, on which each keeps its own attributes, named `dlock_…`.
"""

from __future__ import annotations

import asyncio
import select
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NoReturn

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.idle import IdlePool, LoopPools
from dlock_core.backends.redis.transport import LAST_WORD, pack_commands
from dlock_core.errors import format_seconds
from dlock_core.runtime import Asyncio, Runtime, clock, within

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AsyncioTransport", "BlockingTransport", "exchange_blocking", "read_reply"]

MAX_IDLE_CONNECTIONS: Final = 64
"""Idle connections that are kept open; more are opened if more are needed at once."""
NUDGE: Final = pack_commands([("PING",)])
"""Sent to a server that sleeps in a BLPOP whose time is over.

Redis checks these times when it handles an event, otherwise ten times a second. A command on the sleeping connection is
such an event, so that the BLPOP ends at once instead of up to 0.1 s late."""
RECEIVED_BYTES: Final = 4096
"""Bytes that are read from a socket at once: mostly the whole reply. redis-py reads the rest."""
REPLIES: Final = frozenset({int, bytes, list, type(None), str, bool, float, dict, set})
"""The types that a reply can have; an error reply is an exception."""
MIN_LIMIT_S: Final = 0.001
"""A socket with a limit of 0 would not block, so one whose time has passed still waits for this long."""
MAX_CLOSING_TURNS: Final = 5
"""Iterations of the event loop after which a closed asyncio transport has reported the cause; TLS takes three."""
TRUSTED_IDLE_S: Final = 1.0
"""Idle time after which a connection is checked before it is used again."""


class BlockingTransport:
    """Connections for threads; the idle ones are closed when the transport is garbage-collected."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._idle: IdlePool[Any] = IdlePool(
            methodcaller("disconnect"), MAX_IDLE_CONNECTIONS, is_usable=_is_silent, trusted_s=TRUSTED_IDLE_S
        )
        self.checkin, self.close, self.forget = self._idle.put, self._idle.clear, self._idle.clear

    def checkout(self) -> Any:
        connection = self._idle.take()
        if connection is None:
            return _new(self._connect)
        connection.dlock_is_reused = True
        return connection

    def discard(self, connection: Any) -> None:
        connection.disconnect()

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        return exchange_blocking(connection, data, replies, limit, nudge_after)


def _new(connect: Callable[[], Any]) -> Any:
    """Return a connection that has never been used: an error on it is the server's."""
    connection = connect()
    connection.dlock_is_reused, connection.dlock_limit, connection.dlock_reader = False, None, None
    connection.dlock_exchange = None
    return connection


def _is_silent(connection: Any) -> bool:
    """Return whether an idle connection is open and has no unread data, which only an error would leave."""
    connection.dlock_limit = None  # For this check, redis-py before 8 resets the socket's time limit.
    try:
        return not connection.can_read(0)
    except (RedisError, OSError):
        return False


def exchange_blocking(connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0) -> list[Any]:
    """Connect if necessary, send, and read this many replies within `limit` seconds, if each comes in one piece.

    `nudge_after`: seconds after which a server that sleeps in a BLPOP is sent NUDGE; 0 if it does not sleep.
    """
    if connection._sock is None:
        limit = _connect_blocking(connection, limit)
    if connection.dlock_limit != limit and not (nudge_after and connection.dlock_limit):  # Only sleeps take long.
        connection._sock.settimeout(limit)
        connection.dlock_limit = limit
    connection._sock.sendall(data)
    if nudge_after and not _is_readable(connection, nudge_after):
        connection._sock.sendall(NUDGE)
        return [read_reply(connection) for _ in range(replies + 1)][:-1]
    if connection.dlock_reader is not None:  # redis-py would read into a separate buffer, in several calls
        if not (received := connection._sock.recv(RECEIVED_BYTES)):
            raise RedisConnectionError("the server closed the connection")
        connection.dlock_reader.feed(received)
    if replies == 1:
        return [read_reply(connection)]
    if replies == 2:  # A wake-up with its confirmation: a waiter's first steps after a sleep are slow.
        return [read_reply(connection), read_reply(connection)]
    return [read_reply(connection) for _ in range(replies)]


def _connect_blocking(connection: Any, limit: float) -> float:
    """Connect, and return how much of the limit is left: redis-py applies its own to HELLO, AUTH and SELECT each."""
    until, read_response = clock() + limit, connection.read_response

    def read_in_time(*args: Any, **options: Any) -> Any:
        connection._sock.settimeout(max(until - clock(), MIN_LIMIT_S))
        return read_response(*args, **options)

    connection.socket_timeout = connection.socket_connect_timeout = min(limit, connection.socket_connect_timeout)
    connection.read_response = read_in_time
    try:
        connection.connect()
    finally:
        del connection.read_response
    connection.dlock_reader = getattr(connection._parser, "_reader", None)
    return max(until - clock(), MIN_LIMIT_S)


def _is_readable(connection: Any, seconds: float) -> bool:
    """Wait for the beginning of a reply."""
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def read_reply(connection: Any) -> Any:
    """Read one reply, an error reply as an exception object; bypasses redis-py's methods, which cost more."""
    if connection.dlock_reader is not None:
        reply = connection.dlock_reader.gets()
        if type(reply) in REPLIES:
            return reply
        if isinstance(reply, RedisError):
            return _listen_on(reply)
    return _listen_on(connection._parser.read_response())  # It is incomplete, or was a push message, not a reply.


def _listen_on(reply: Any) -> Any:
    """Return a reply; raise it if it is the server's last: the end of the connection would hide its cause."""
    if isinstance(reply, RedisConnectionError) or (isinstance(reply, RedisError) and LAST_WORD in str(reply)):
        raise reply
    return reply


class AsyncioTransport:
    """Connections for tasks, separate for each event loop; the idle ones are closed when the loop is shut down."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._idle: LoopPools[Any] = LoopPools(
            _abort, MAX_IDLE_CONNECTIONS, is_usable=_is_open_and_silent, trusted_s=TRUSTED_IDLE_S
        )
        self.close = self._idle.clear

    def checkout(self) -> Any:
        connection = self._idle.here().take()
        if connection is None:
            return _new(self._connect)
        connection.dlock_is_reused = True
        return connection

    def checkin(self, connection: Any) -> None:
        self._idle.here().put(connection)

    def discard(self, connection: Any) -> None:
        _abort(connection)

    def forget(self) -> None:
        self._idle.here().clear()

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        if not isinstance(runtime, Asyncio):
            raise TypeError("an asyncio connection needs the asyncio runtime")
        try:
            return await within(limit, self._exchange(connection, data, replies, nudge_after))
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer within {format_seconds(limit)}") from error

    async def _exchange(self, connection: Any, data: bytes, replies: int, nudge_after: float) -> list[Any]:
        if not connection.is_connected:
            await _connect(connection)
        connection._writer.write(data)  # No drain needed: the next command is written after this reply.
        if connection._writer.transport.is_closing():
            await _raise_what_closed(connection._reader)
        read = connection._parser.read_response
        if not nudge_after:
            return [await read()] if replies == 1 else [_listen_on(await read()) for _ in range(replies)]
        try:
            first = await within(nudge_after, read())
        except TimeoutError:
            connection._writer.write(NUDGE)
            if connection._writer.transport.is_closing():
                await _raise_what_closed(connection._reader)
            return [await read() for _ in range(replies + 1)][:-1]
        return [first, *[await read() for _ in range(replies - 1)]]

    def let_finish(self, task: asyncio.Task[Any]) -> None:
        """Let a request continue although its caller has gone, until its time limit or the end of the loop."""
        self._idle.here().let_finish(task)


async def _connect(connection: Any) -> None:
    """Connect within a time limit of our own: one of redis-py could be interrupted, and cancel the task later."""
    if connection.dlock_limit is None:
        connection.dlock_limit = connection.socket_connect_timeout
        connection.socket_timeout = connection.socket_connect_timeout = None
    await within(connection.dlock_limit, connection.connect())


def _is_open_and_silent(connection: Any) -> bool:
    reader = connection._reader
    return reader is not None and not reader.at_eof() and not reader._buffer


def _abort(connection: Any) -> None:
    writer = connection._writer
    connection._close()
    if writer is not None:
        writer.transport.abort()  # Over TLS, a close waits for the other side, and the loop may end before that.


async def _raise_what_closed(reader: asyncio.StreamReader) -> NoReturn:
    """Raise the exception of `write`, such as a signal handler's, which asyncio's transport catches and stores.

    A read would get it through a future. But a GeneratorExit that arrives that way closes our coroutines, and then
    nothing can be awaited any more, not even the request that abandons what may have been sent.
    """
    for _ in range(MAX_CLOSING_TURNS):
        if (error := reader.exception()) is not None:
            raise error
        await asyncio.sleep(0)
    raise ConnectionResetError("the connection was closed")
