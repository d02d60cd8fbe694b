"""Requests over redis-py's bare `Connection`s, kept by us: a third of the client's cost, no retries behind our back.

A server that cannot answer has not said no: that is BackendUnavailable, with the reason and without a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterCrossSlotError,
    NoPermissionError,
    NoScriptError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from dlock_core.backends.redis.scripts import Script
    from dlock_core.runtime import Runtime

__all__ = ["Command", "Refused", "Wire", "answered", "ask", "converse", "exchange", "packed", "twice", "unavailable"]

T = TypeVar("T")
Command = tuple[Any, ...]


def _in_python(command: Command) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"".join([b"*%d\r\n" % len(parts), *[b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]])


_pack: Callable[[Command], bytes]
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

    def exchange(
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float
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


def converse(
    wire: Wire, runtime: Runtime, name: str, commands: list[Command], limit: float
) -> Coroutine[Any, Any, list[Any]]:
    """Send commands in one write and read their replies."""
    return exchange(wire, runtime, name, wire.checkout(), packed(commands), len(commands), limit)


async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
    wire: Wire, runtime: Runtime, name: str, connection: Any, data: bytes, replies: int, limit: float
) -> list[Any]:
    """Send over a connection that was checked out, read the replies, and give the connection back."""
    try:
        answers = await wire.exchange(runtime, connection, data, replies, limit)
    except BaseException as error:
        wire.discard(connection)  # closed at once: what it carries must not be carried out after our withdrawal
        if not isinstance(error, RedisError | OSError):
            raise
        failure = unavailable(name, error, reused=connection.dlock_used > 0)
        if failure.broken:
            wire.forget()
        raise failure from error
    wire.checkin(connection)
    return answers


def packed(commands: Iterable[Command]) -> bytes:
    """Give the bytes of commands."""
    return b"".join(map(_pack, commands))


def unavailable(name: str, error: RedisError | OSError, *, reused: bool) -> BackendUnavailable:
    """Tell why there is no proper answer, without a secret."""
    if isinstance(error, ClusterCrossSlotError):
        return BackendUnavailable(name, reason="it is a node of a Redis Cluster: use redis+cluster://", refused=True)
    broken = reused and isinstance(error, RedisConnectionError | OSError) and not isinstance(error, TimeoutError)
    refused = isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError)
    reason = f"the server refused our credentials: {error}" if refused else f"{type(error).__name__}: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused or isinstance(error, Refused))
