"""Requests over redis-py's bare `Connection`s, kept by us: a third of the client's cost, no retries behind our back.

A server that cannot answer has not said no: that is BackendUnavailable, with the reason and without a secret.
"""

from __future__ import annotations

import asyncio
import select
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterCrossSlotError,
    NoPermissionError,
    NoScriptError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.idle import IdlePool, LoopPools
from dlock_core.errors import BackendUnavailable, format_seconds
from dlock_core.runtime import Asyncio, Runtime, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from dlock_core.backends.redis.protocol import Command, Script

__all__ = [
    "Packer",
    "Refused",
    "Transport",
    "exchange",
    "pack_commands",
    "raise_for_error",
    "retry_once",
    "run_script",
    "send_commands",
    "unavailable",
]

T = TypeVar("T")


def _in_python(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else part.encode() for part in command]
    return b"".join([b"*%d\r\n" % len(parts), *[b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]])


_pack: Callable[[Any], bytes]
try:
    from hiredis import pack_command as _pack
except ImportError:
    _pack = _in_python


LAST_WORD: Final = "Protocol error"
"""Begins the last reply of a server that reads no further, and closes the connection."""
UNAUTHENTICATED: Final = f"{LAST_WORD}: unauthenticated"
"""What a server that wants a password says of a command with more than ten parts; clients of RESP2 hear it first."""
DENIED_TO_SCRIPT: Final = ("The user executing the script can't", "ACL failure in script")
"""What errors, which have no code, say of a permission that a script lacks: Redis up to 7.0, and later ones."""

UNKNOWN_COMMAND: Final = ("unknown command", "Unknown command", "Unknown Redis command")
"""What errors say of a command that the server does not know, sent or called by a script; Valkey has its own words."""


class Refused(RedisError):
    """The server answers, but not with what a store needs, and asking again will not help."""


class Transport(Protocol):
    """Sends commands and reads their replies: one interface for threads and for tasks."""

    def checkout(self) -> Any:
        """Return a connection that no other thread or task uses."""

    def checkin(self, connection: Any) -> None:
        """Take back a connection whose replies were all read."""

    def discard(self, connection: Any) -> None:
        """Close a connection in unknown state, at once."""

    def forget(self) -> None:
        """Close the idle connections: one of them turned out to be dead, so the others may be."""

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        """Send `data`, and read so many replies within `limit` seconds; an error reply is an exception object.

        `nudge_after`: seconds after which a server that sleeps in a BLPOP is reminded of the time; 0 if it does not.
        """

    def close(self) -> None:
        """Close the idle connections."""


async def run_script(  # noqa: PLR0917 - the hot path: keywords cost
    transport: Transport, runtime: Runtime, name: str, script: Script, keys: Command, args: Command, limit: float
) -> Any:
    """Run one script; raises BackendUnavailable, whose text names `name`, when there is no proper answer.

    A server that was flushed or replaced does not know the script's digest, and learns the script with the request.
    """
    data = _pack(("EVALSHA", script.sha, str(len(keys)), *keys, *args))
    connection = transport.checkout()
    try:
        (reply,) = await transport.exchange(runtime, connection, data, 1, limit)
    except BaseException as error:
        failed(transport, name, connection, error)
        raise
    transport.checkin(connection)
    if isinstance(reply, RedisError):
        if isinstance(reply, NoScriptError):
            (reply,) = await send_commands(transport, runtime, name, [script.by_text(keys, args)], limit)
        raise_for_error(name, reply)
    return reply


async def retry_once(step: Callable[[], Awaitable[T]]) -> T:
    """Await `step()`, and once more if an idle connection turned out to be dead. Only for what may be done twice."""
    try:
        return await step()
    except BackendUnavailable as error:
        if not error.broken:
            raise
    return await step()


def raise_for_error(name: str, reply: Any) -> Any:
    """Return a reply, or raise BackendUnavailable for an error reply: a server that cannot answer has not said no."""
    if isinstance(reply, RedisError):
        raise unavailable(name, reply, reused=False) from reply
    return reply


def send_commands(  # noqa: PLR0917 - the hot path: keywords cost
    transport: Transport, runtime: Runtime, name: str, commands: list[Command], limit: float, nudge_after: float = 0.0
) -> Coroutine[Any, Any, list[Any]]:
    """Send commands in one write and read their replies; see `Transport.exchange`."""
    return exchange(
        transport, runtime, name, transport.checkout(), pack_commands(commands), len(commands), limit, nudge_after
    )


async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
    transport: Transport,
    runtime: Runtime,
    name: str,
    connection: Any,
    data: bytes,
    replies: int,
    limit: float,
    nudge_after: float = 0.0,
) -> list[Any]:
    """Send over a connection that was checked out, read the replies, and give the connection back."""
    try:
        answers = await transport.exchange(runtime, connection, data, replies, limit, nudge_after)
    except BaseException as error:
        failed(transport, name, connection, error)
        raise
    transport.checkin(connection)
    return answers


def failed(transport: Transport, name: str, connection: Any, error: BaseException) -> None:
    """Close the connection of a request that failed; raises BackendUnavailable if there was no proper answer."""
    transport.discard(connection)  # closed at once: the server must not run this request after the abandon
    if isinstance(error, RedisError | OSError):
        failure = unavailable(name, error, reused=connection.dlock_is_reused)
        if failure.broken:
            transport.forget()
        raise failure from error


def pack_commands(commands: Iterable[Command]) -> bytes:
    """Return the bytes of commands."""
    return b"".join(map(_pack, commands))


class Packer:
    """Packs the commands that redis-py itself sends over our connections, some of which hold numbers (HELLO 3)."""

    def pack(self, *parts: Any) -> list[bytes]:
        """Return the bytes of one command, whose first part may hold two words."""
        texts = [part if isinstance(part, bytes) else str(part) for part in parts[1:]]
        return [pack_commands([(*str(parts[0]).split(), *texts)])]


def unavailable(name: str, error: RedisError | OSError, *, reused: bool) -> BackendUnavailable:
    """Return the error for a request without a proper answer; its text says why, and contains no secret."""
    if isinstance(error, ClusterCrossSlotError):
        return BackendUnavailable(
            name, reason="the server is a node of a Redis Cluster: use redis+cluster://", refused=True
        )
    broken = reused and isinstance(error, RedisConnectionError | OSError) and not isinstance(error, TimeoutError)
    lacks_permission = isinstance(error, NoPermissionError) or any(text in str(error) for text in DENIED_TO_SCRIPT)
    is_stranger = isinstance(error, AuthenticationError | AuthorizationError) or UNAUTHENTICATED in str(error)
    is_other = any(text in str(error) for text in UNKNOWN_COMMAND) and not isinstance(error, Refused)
    if is_other:
        error.args = (str(error).partition(", with args")[0],)  # of AUTH and HELLO one is the password
    refused = lacks_permission or is_stranger or is_other
    reason = f"{type(error).__name__}: {error}"
    if lacks_permission:
        reason = f"our user lacks a permission, see the ACL in docs/howto/operations.md: {error}"
    elif is_other:
        reason = f"the server does not know a command: it was renamed, or this is a Sentinel or no Redis: {error}"
    elif refused:
        reason = f"the server refused our credentials: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused or isinstance(error, Refused))


MAX_IDLE_CONNECTIONS: Final = 64
"""Idle connections that are kept open; more are made when more are needed at once."""
NUDGE: Final = pack_commands([("PING",)])
"""Sent to a server that sleeps in a BLPOP whose time is over.

Redis checks these times when it handles an event, or else ten times a second. A command on the sleeping connection is
such an event, so that the BLPOP ends at once instead of up to 0.1 s late."""
RECEIVED_BYTES: Final = 4096
"""Bytes that are taken from a socket at once: mostly the whole reply. What is missing then is read by redis-py."""
REPLIES: Final = frozenset({int, bytes, list, type(None), str, bool, float, dict, set})
"""The types that a reply has; an error reply is an exception."""
MAX_CLOSING_TURNS: Final = 5
"""Turns of the event loop after which a closed asyncio transport has told its reader why; TLS takes three."""
TRUSTED_IDLE_S: Final = 1.0
"""Idleness after which a connection is checked before it is used again."""


class BlockingTransport:
    """Connections for threads; the idle ones are closed when the transport is garbage."""

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
    """Return a connection that has never been used: an error on it says something about the server."""
    connection = connect()
    connection.dlock_is_reused, connection.dlock_limit, connection.dlock_reader = False, None, None
    connection.dlock_exchange = None
    return connection


def _is_silent(connection: Any) -> bool:
    """Return whether an idle connection is open and has no unread data, which only an error would leave."""
    connection.dlock_limit = None  # To look, redis-py before 8 gives the socket its own time limit back.
    try:
        return not connection.can_read(0)
    except (RedisError, OSError):
        return False


def exchange_blocking(connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0) -> list[Any]:
    """Connect if need be, send, and read so many replies; `limit` bounds each step, in seconds.

    `nudge_after`: seconds after which a server that sleeps in a BLPOP is sent NUDGE; 0 if it does not sleep.
    """
    if connection._sock is None:
        connection.socket_timeout = connection.socket_connect_timeout = min(limit, connection.socket_connect_timeout)
        connection.connect()
        connection.dlock_reader = getattr(connection._parser, "_reader", None)
    if connection.dlock_limit != limit and not (nudge_after and connection.dlock_limit):  # It is sleeps that take long.
        connection._sock.settimeout(limit)
        connection.dlock_limit = limit
    connection._sock.sendall(data)
    if nudge_after and not _is_readable(connection, nudge_after):
        connection._sock.sendall(NUDGE)
        return [read_reply(connection) for _ in range(replies + 1)][:-1]
    if connection.dlock_reader is not None:  # redis-py would read into a buffer of its own, in several calls
        if not (received := connection._sock.recv(RECEIVED_BYTES)):
            raise RedisConnectionError("the server closed the connection")
        connection.dlock_reader.feed(received)
    if replies == 1:
        return [read_reply(connection)]
    if replies == 2:  # A wake-up with its confirmation: a waiter's first steps after a sleep are slow ones.
        return [read_reply(connection), read_reply(connection)]
    return [read_reply(connection) for _ in range(replies)]


def _is_readable(connection: Any, seconds: float) -> bool:
    """Wait for the beginning of a reply."""
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def read_reply(connection: Any) -> Any:
    """Read one reply, an error reply as an exception object; past redis-py's methods, which cost more."""
    if connection.dlock_reader is not None:
        reply = connection.dlock_reader.gets()
        if type(reply) in REPLIES:
            return reply
        if isinstance(reply, RedisError):
            return _listen_on(reply)
    return _listen_on(connection._parser.read_response())  # It has not all arrived; or it was a push message, no reply.


def _listen_on(reply: Any) -> Any:
    """Return a reply; raises one after which nothing comes: the end of the connection would hide why it ended."""
    if isinstance(reply, RedisConnectionError) or (isinstance(reply, RedisError) and LAST_WORD in str(reply)):
        raise reply
    return reply


class AsyncioTransport:
    """Connections for tasks, those of each event loop apart; the idle ones are closed when the loop is shut down."""

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
            await connection.connect()
        connection._writer.write(data)  # Nothing to drain: the next command is written after this reply.
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
        """Let a request go on although its caller has gone: to its time limit, or the end of the loop."""
        self._idle.here().let_finish(task)


def _is_open_and_silent(connection: Any) -> bool:
    reader = connection._reader
    return reader is not None and not reader.at_eof() and not reader._buffer


def _abort(connection: Any) -> None:
    writer = connection._writer
    connection._close()
    if writer is not None:
        writer.transport.abort()  # Over TLS, a close waits for the other side, and the loop may end before.


async def _raise_what_closed(reader: asyncio.StreamReader) -> NoReturn:
    """Raise what `write` raised, such as a signal handler's exception, which asyncio's transport catches and keeps.

    A read would get it through a future. But a GeneratorExit that comes that way closes our coroutines, and then
    nothing can be awaited any more, not even the request that abandons what may have been sent.
    """
    for _ in range(MAX_CLOSING_TURNS):
        if (error := reader.exception()) is not None:
            raise error
        await asyncio.sleep(0)
    raise ConnectionResetError("the connection was closed")
