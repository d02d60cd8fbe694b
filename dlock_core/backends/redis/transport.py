"""Requests over redis-py's bare `Connection`s, kept by us: a third of the client's cost, no retries behind our back.

A server that cannot answer has not said no: that is BackendUnavailable, with the reason and without a secret.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections import deque
from contextlib import suppress
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

from dlock_core.backends.idle import close_excess, drain, drain_when_forgotten
from dlock_core.errors import BackendUnavailable, format_seconds
from dlock_core.runtime import Asyncio, Runtime, clock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable

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
    by_digest = ("EVALSHA", script.sha, str(len(keys)), *keys, *args)  # Script.by_digest, without its frame
    (reply,) = await send_commands(transport, runtime, name, [by_digest], limit)
    if isinstance(reply, NoScriptError):
        (reply,) = await send_commands(transport, runtime, name, [script.by_text(keys, args)], limit)
    return raise_for_error(name, reply)


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
        transport.discard(connection)  # closed at once: the server must not run this request after the abandon
        if not isinstance(error, RedisError | OSError):
            raise
        failure = unavailable(name, error, reused=connection.dlock_used > 0)
        if failure.broken:
            transport.forget()
        raise failure from error
    transport.checkin(connection)
    return answers


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
    refused = isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, NoPermissionError):
        reason = f"our user lacks a permission, see the ACL in docs/howto/operations.md: {error}"
    elif refused:
        reason = f"the server refused our credentials: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused or isinstance(error, Refused))


MAX_IDLE_CONNECTIONS: Final = 64
"""Idle connections that are kept open; more are made when more are needed at once."""
NUDGE: Final = pack_commands([("PING",)])
"""Sent to a server that sleeps in a BLPOP whose time is over.

Redis checks these times when it handles an event, or else ten times a second. A command on the sleeping connection is
such an event, so that the BLPOP ends at once instead of up to 0.1 s late."""
MAX_CLOSING_TURNS: Final = 5
"""Turns of the event loop after which a closed asyncio transport has told its reader why; TLS takes three."""
TRUSTED_IDLE_S: Final = 1.0
"""Idleness after which a connection is checked before it is used again."""


class Idle:
    """Idle connections, last used first."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._pid = connect, os.getpid()
        self._free: deque[Any] = deque()

    def pop(self) -> Any:
        if self._pid != os.getpid():  # a forked child must not use its parent's sockets
            self._pid = os.getpid()
            self._free.clear()
        while (connection := self._last()) is not None:
            if clock() - connection.dlock_used < TRUSTED_IDLE_S or self._is_alive(connection):
                return connection
            self.discard(connection)
        connection = self._connect()
        connection.dlock_used, connection.dlock_limit = 0.0, None
        return connection

    def push(self, connection: Any) -> None:
        connection.dlock_used = clock()
        self._free.append(connection)
        close_excess(self._free, _since, self.discard, MAX_IDLE_CONNECTIONS)

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


def _since(connection: Any) -> float:
    return connection.dlock_used  # type: ignore[no-any-return]


class BlockingIdle(Idle):
    """Idle connections of threads; they are closed when their owner is garbage."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        drain_when_forgotten(self, self._free, methodcaller("disconnect"))

    def discard(self, connection: Any) -> None:
        connection.disconnect()


class BlockingTransport(BlockingIdle):
    """Connections for threads."""

    checkout, checkin, close, forget = Idle.pop, Idle.push, Idle.clear, Idle.clear

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        return runtime.call(exchange_blocking, connection, data, replies, limit, nudge_after)

    def _is_alive(self, connection: Any) -> bool:
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
    if connection.dlock_limit != limit:
        connection._sock.settimeout(limit)
        connection.dlock_limit = limit
    connection._sock.sendall(data)
    if nudge_after and not _is_readable(connection, nudge_after):
        connection._sock.sendall(NUDGE)
        return [read_reply(connection) for _ in range(replies + 1)][:-1]
    return [read_reply(connection) for _ in range(replies)]


def _is_readable(connection: Any, seconds: float) -> bool:
    """Wait for the beginning of a reply."""
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def read_reply(connection: Any) -> Any:
    """Read one reply, an error reply as an exception object; past `Connection.read_response`, which costs more."""
    return connection._parser.read_response()


class AsyncioTransport:
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

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        if not isinstance(runtime, Asyncio):
            raise TypeError("an asyncio connection needs the asyncio runtime")
        try:
            async with asyncio.timeout(limit):
                if not connection.is_connected:
                    await runtime.call(connection.connect)
                connection._writer.write(
                    data
                )  # There is nothing to drain: the next command is written after this reply.
                if connection._writer.transport.is_closing():
                    await _raise_what_closed(connection._reader)
                read = connection._parser.read_response
                if not nudge_after:
                    return [await read() for _ in range(replies)]
                try:
                    async with asyncio.timeout(nudge_after):
                        first = await read()
                except TimeoutError:
                    connection._writer.write(NUDGE)
                    if connection._writer.transport.is_closing():
                        await _raise_what_closed(connection._reader)
                    return [await read() for _ in range(replies + 1)][:-1]
                return [first, *[await read() for _ in range(replies - 1)]]
        except TimeoutError as error:
            raise RedisTimeoutError(f"no answer within {format_seconds(limit)}") from error

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

    def let_finish(self, task: asyncio.Task[Any]) -> None:
        """Let a request go on although its caller has gone: to its time limit, or the end of the loop."""
        self._idle().let_finish(task)


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


def _clear(loops: dict[asyncio.AbstractEventLoop, _AsyncioIdle]) -> None:
    for loop, idle in list(loops.items()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(idle.clear)


class _AsyncioIdle(Idle):
    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        self._unattended: set[asyncio.Task[Any]] = set()
        self._has_ended = False
        self._ending = self._until_shutdown()

    def begin(self) -> None:
        """Register with the loop, which closes every generator that has begun when it is shut down."""
        with suppress(StopIteration):
            self._ending.__anext__().send(None)

    def push(self, connection: Any) -> None:
        if self._has_ended:  # it would stay open
            self.discard(connection)
        else:
            super().push(connection)

    def let_finish(self, task: asyncio.Task[Any]) -> None:
        self._unattended.add(task)
        task.add_done_callback(self._unattended.discard)
        if self._has_ended:
            task.cancel()

    async def _until_shutdown(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._has_ended = True
            self.clear()
            for task in self._unattended:  # those that began while the loop's other tasks were being cancelled
                task.cancel()
            await asyncio.gather(*self._unattended, return_exceptions=True)

    def _is_alive(self, connection: Any) -> bool:
        reader = connection._reader
        return reader is not None and not reader.at_eof() and not reader._buffer

    def discard(self, connection: Any) -> None:
        writer = connection._writer
        connection._close()
        if writer is not None:
            writer.transport.abort()  # over TLS, a close waits for the other side, and the loop may end before
