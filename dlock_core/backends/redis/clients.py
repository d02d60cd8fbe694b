"""Make connections the way a URL, a client or a pool of redis-py does, for threads and for asyncio alike."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, cast

import redis
import redis.asyncio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["connectors", "of_url"]

_KEPT: Final = frozenset({
    "host", "port", "path", "db", "username", "password", "credential_provider", "client_name", "protocol",
    "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type",
})  # fmt: skip
"""What describes the server and how to reach it. Retries, time limits and decoding are ours."""

_KINDS: Final = (
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.Connection, redis.asyncio.Connection),
)


def of_url(url: str) -> Any:
    """Parse redis://, rediss:// and unix:// as redis-py does; raises ValueError, without the password."""
    try:
        return redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError) as error:
        raise ValueError(f"bad Redis URL: {error} (expected redis://[user:password@]host:port/db)") from None


def connectors(client: Any, limit: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Give two makers of connections, blocking and asyncio, that reach the same server as a client or pool does."""
    pool = getattr(client, "connection_pool", client)
    kind, given = getattr(pool, "connection_class", None), dict(getattr(pool, "connection_kwargs", {}))
    pair = next((pair for pair in _KINDS if kind is not None and issubclass(kind, pair)), None)
    if pair is None:
        raise TypeError(f"not a redis-py client or pool that dlock can follow: {type(client).__name__}")
    blocking, awaiting = cast("tuple[Any, Any]", pair)
    return (
        lambda: blocking(**_kept(blocking, given), socket_timeout=limit),
        lambda: awaiting(**_kept(awaiting, given), socket_timeout=None),
    )


def _kept(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {key: value for key, value in given.items() if key in _KEPT or (key.startswith("ssl_") and key in known)}
