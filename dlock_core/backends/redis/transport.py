"""Requests over our own pool of redis-py's bare `Connection`s: a third of the client's cost, no hidden retries.

The connections themselves are in `sockets`.

An error reply of the server is not a no: it raises BackendUnavailable, with the reason and without a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

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

    from dlock_core.backends.redis.protocol import Command, Script
    from dlock_core.runtime import Runtime

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
        reason = f"the server does not know a command: it was renamed, or this is a Sentinel, or not Redis: {error}"
    elif refused:
        reason = f"the server refused our credentials: {error}"
    return BackendUnavailable(name, reason=reason, broken=broken, refused=refused or isinstance(error, Refused))
