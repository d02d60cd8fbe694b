"""Requests over our own pool of redis-py's bare `Connection`s: a third of the client's cost, no hidden retries.

An error reply of the server is not a no: it raises BackendUnavailable, with the reason and without a secret.
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
"""The beginning of the last reply of a server that stops reading and closes the connection."""
UNAUTHENTICATED: Final = f"{LAST_WORD}: unauthenticated"
"""The reply of a server that requires a password to a command with more than ten parts; RESP2 clients get it first."""
DENIED_TO_SCRIPT: Final = ("The user executing the script can't", "ACL failure in script")
"""Texts of errors without a code for a permission that a script lacks: Redis up to 7.0, and later versions."""

UNKNOWN_COMMAND: Final = ("unknown command", "Unknown command", "Unknown Redis command")
"""Texts of errors for a command that the server does not know, sent or called by a script; Valkey's text differs."""


class Refused(RedisError):
    """The server answers, but not with what a store needs, and a retry will not help."""


class Transport(Protocol):
    """Sends commands and reads their replies: one interface for threads and for tasks."""

    def checkout(self) -> Any:
        """Return a connection that no other thread or task uses."""

    def checkin(self, connection: Any) -> None:
        """Take back a connection whose replies were all read."""

    def discard(self, connection: Any) -> None:
        """Close a connection in unknown state, at once."""

    def forget(self) -> None:
        """Close the idle connections: one of them turned out to be dead, so the others may be dead, too."""

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        """Send `data`, and read this many replies within `limit` seconds; an error reply is an exception object.

        `nudge_after`: seconds after which a server that sleeps in a BLPOP is sent NUDGE; 0 if it does not sleep.
        """

    def close(self) -> None:
        """Close the idle connections."""


async def run_script(  # noqa: PLR0917 - the hot path: keywords cost
    transport: Transport, runtime: Runtime, name: str, script: Script, keys: Command, args: Command, limit: float
) -> Any:
    """Run one script; raises BackendUnavailable, whose text names `name`, if there is no proper reply.

    A server that was flushed or replaced does not know the script's digest; the script is then sent with the request.
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
    """Await `step()`, and repeat it once if an idle connection turned out to be dead. Only for idempotent steps."""
    try:
        return await step()
    except BackendUnavailable as error:
        if not error.broken:
            raise
    return await step()


def raise_for_error(name: str, reply: Any) -> Any:
    """Return a reply, or raise BackendUnavailable for an error reply, which is not a no."""
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
    """Send over a connection that was checked out, read the replies, and return the connection to its transport."""
    try:
        answers = await transport.exchange(runtime, connection, data, replies, limit, nudge_after)
    except BaseException as error:
        failed(transport, name, connection, error)
        raise
    transport.checkin(connection)
    return answers


def failed(transport: Transport, name: str, connection: Any, error: BaseException) -> None:
    """Close the connection of a request that failed; raises BackendUnavailable if there was no proper reply."""
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
        """Return the bytes of one command, whose first part may consist of two words."""
        texts = [part if isinstance(part, bytes) else str(part) for part in parts[1:]]
        return [pack_commands([(*str(parts[0]).split(), *texts)])]


def unavailable(name: str, error: RedisError | OSError, *, reused: bool) -> BackendUnavailable:
    """Return the error for a request without a proper reply; its text gives the reason, and contains no secret."""
    if isinstance(error, ClusterCrossSlotError):
        return BackendUnavailable(
            name, reason="the server is a node of a Redis Cluster: use redis+cluster://", refused=True
        )
    broken = reused and isinstance(error, RedisConnectionError | OSError) and not isinstance(error, TimeoutError)
    lacks_permission = isinstance(error, NoPermissionError) or any(text in str(error) for text in DENIED_TO_SCRIPT)
    is_stranger = isinstance(error, AuthenticationError | AuthorizationError) or UNAUTHENTICATED in str(error)
    is_other = any(text in str(error) for text in UNKNOWN_COMMAND) and not isinstance(error, Refused)
    if is_other:
        error.args = (str(error).partition(", with args")[0],)  # one of the args of AUTH and HELLO is the password
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
"""Idle connections that are kept open; more are opened if more are needed at once."""
NUDGE: Final = pack_commands([("PING",)])
"""Sent to a server that sleeps in a BLPOP whose time is over.

Redis checks these times when it handles an event, otherwise ten times a second. A command on the sleeping connection is
such an event, so that the BLPOP ends at once instead of up to 0.1 s late."""
RECEIVED_BYTES: Final = 4096
"""Bytes that are read from a socket at once: mostly the whole reply. redis-py reads the rest."""
REPLIES: Final = frozenset({int, bytes, list, type(None), str, bool, float, dict, set})
"""The types that a reply can have; an error reply is an exception."""
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
    """Connect if necessary, send, and read this many replies; `limit` applies to each step, in seconds.

    `nudge_after`: seconds after which a server that sleeps in a BLPOP is sent NUDGE; 0 if it does not sleep.
    """
    if connection._sock is None:
        connection.socket_timeout = connection.socket_connect_timeout = min(limit, connection.socket_connect_timeout)
        connection.connect()
        connection.dlock_reader = getattr(connection._parser, "_reader", None)
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
            await connection.connect()
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
