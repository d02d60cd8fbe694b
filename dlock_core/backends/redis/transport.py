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

    from dlock_core.backends.redis.scripts import Script

__all__ = [
    "Command",
    "Packer",
    "Refused",
    "Wire",
    "answered",
    "ask",
    "converse",
    "exchange",
    "packed",
    "twice",
    "unavailable",
]

T = TypeVar("T")
Command = tuple[str | bytes, ...]
"""Only text and bytes. hiredis turns a number into text by a call that runs signal handlers, and does not look whether
one of them raised: the process would end with a segmentation fault."""


def _in_python(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else part.encode() for part in command]
    return b"".join([b"*%d\r\n" % len(parts), *[b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]])


_pack: Callable[[Any], bytes]
try:
    from hiredis import pack_command as _pack
except ImportError:
    _pack = _in_python


class Refused(RedisError):
    """It answers, but not what we need, and asking again will not help."""


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

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        """Send, and read so many replies, an error reply as an exception object, within `limit` seconds.

        `nudge_after`: seconds after which a server that was asked to sleep is reminded of the time; 0 where it was not.
        """

    def close(self) -> None:
        """Close the idle connections."""


async def ask(  # noqa: PLR0917 - the hot path: keywords cost
    wire: Wire, runtime: Runtime, name: str, script: Script, keys: Command, args: Command, limit: float
) -> Any:
    """Run one script; raises BackendUnavailable, whose text names `name`, when there is no proper answer."""
    (reply,) = await converse(wire, runtime, name, [("EVALSHA", script.sha, str(len(keys)), *keys, *args)], limit)
    if isinstance(reply, NoScriptError):  # flushed, or another server: it learns the script along with the question
        (reply,) = await converse(wire, runtime, name, [("EVAL", script.text, str(len(keys)), *keys, *args)], limit)
    return answered(name, reply)


async def twice(step: Callable[[], Awaitable[T]]) -> T:
    """Ask, and ask once more when an idle connection turned out to be dead; for questions that do no harm twice."""
    try:
        return await step()
    except BackendUnavailable as error:
        if not error.broken:
            raise
    return await step()


def answered(name: str, reply: Any) -> Any:
    """Turn an error reply into BackendUnavailable: a server that cannot answer has not said no."""
    if isinstance(reply, RedisError):
        raise unavailable(name, reply, reused=False) from reply
    return reply


def converse(  # noqa: PLR0917 - the hot path: keywords cost
    wire: Wire, runtime: Runtime, name: str, commands: list[Command], limit: float, nudge_after: float = 0.0
) -> Coroutine[Any, Any, list[Any]]:
    """Send commands in one write and read their replies; see `Wire.exchange`."""
    return exchange(wire, runtime, name, wire.checkout(), packed(commands), len(commands), limit, nudge_after)


async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
    wire: Wire,
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
        answers = await wire.exchange(runtime, connection, data, replies, limit, nudge_after)
    except BaseException as error:
        wire.discard(connection)  # closed at once: what it carries must not be carried out after our clean-up
        if not isinstance(error, RedisError | OSError):
            raise
        failure = unavailable(name, error, reused=connection.dlock_used > 0)
        if failure.broken:
            wire.forget()
        raise failure from error
    wire.checkin(connection)
    return answers


def packed(commands: Iterable[Command]) -> bytes:
    """Return the bytes of commands."""
    return b"".join(map(_pack, commands))


class Packer:
    """Packs the commands that redis-py itself sends over our connections, some of which hold numbers (HELLO 3)."""

    def pack(self, *parts: Any) -> list[bytes]:
        """Return the bytes of one command, whose first part may hold two words."""
        texts = [part if isinstance(part, bytes) else str(part) for part in parts[1:]]
        return [packed([(*str(parts[0]).split(), *texts)])]


def unavailable(name: str, error: RedisError | OSError, *, reused: bool) -> BackendUnavailable:
    """Tell why there is no proper answer, without a secret."""
    if isinstance(error, ClusterCrossSlotError):
        return BackendUnavailable(name, reason="it is a node of a Redis Cluster: use redis+cluster://", refused=True)
    broken = reused and isinstance(error, RedisConnectionError | OSError) and not isinstance(error, TimeoutError)
    refused = isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError)
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, NoPermissionError):
        reason = f"our user lacks a permission, see the ACL in docs/howto/operations.md: {error}"
    elif refused:
        reason = f"the server refused our credentials: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused or isinstance(error, Refused))


IDLE_KEPT: Final = 64
"""Idle connections kept open, at most; more are made when more are needed at once."""
NUDGE: Final = packed([("PING",)])
"""Sent to a server that sleeps in a BLPOP whose time is over.

Redis looks at these times when something happens, or else ten times a second. What we send on the sleeping connection
is read at once, and so is something that happens."""
TOLD_WITHIN: Final = 5
"""Turns of the event loop after which a transport that has closed has told its reader why; TLS takes three."""
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
        close_excess(self._free, _since, self.discard, IDLE_KEPT)

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
    """Those of threads; they are closed when it is forgotten."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(connect)
        drain_when_forgotten(self, self._free, methodcaller("disconnect"))

    def discard(self, connection: Any) -> None:
        connection.disconnect()


class BlockingWire(BlockingIdle):
    """Connections for threads."""

    checkout, checkin, close, forget = Idle.pop, Idle.push, Idle.clear, Idle.clear

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        return runtime.call(talk, connection, data, replies, limit, nudge_after)

    def _is_alive(self, connection: Any) -> bool:
        try:
            return not connection.can_read(0)
        except (RedisError, OSError):
            return False


def talk(connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0) -> list[Any]:
    """Connect if need be, send, and read so many replies; `limit` bounds each step, in seconds.

    `nudge_after`: seconds after which a server that sleeps for us is nudged (see NUDGE); 0 for no such thing.
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
        return [read(connection) for _ in range(replies + 1)][:-1]
    return [read(connection) for _ in range(replies)]


def _is_readable(connection: Any, seconds: float) -> bool:
    """Wait for the beginning of a reply."""
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


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
                )  # There is nothing to drain: nobody writes more before the reply is here.
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

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Let a request go on that nobody listens to any more: to its time limit, or the end of the loop."""
        self._idle().leave(task)


async def _raise_what_closed(reader: asyncio.StreamReader) -> NoReturn:
    """Raise what came out of `write`, such as a signal handler's exception; asyncio's transport catches and keeps it.

    A read would learn of it through a future. A GeneratorExit that comes that way closes our coroutines, in which
    nothing can be awaited any more, not even the clean-up of what may have been sent.
    """
    for _ in range(TOLD_WITHIN):
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
