"""Make connections the way a URL, a client or a pool of redis-py does, for threads and for asyncio alike."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

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

_DATABASE: Final = re.compile(r"(/\d*)?")

_BAD_URL: Final = (
    "bad Redis URL: expected redis://[user:password@]host:port/db or unix:///path, "
    "with every / ? # @ of the password percent-encoded"
)

_KINDS: Final = (
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.Connection, redis.asyncio.Connection),
)


def of_url(url: str) -> Any:
    """Parse redis://, rediss:// and unix:// as redis-py does; raises ValueError, without the password."""
    try:
        where = urlsplit(url)
        if not (where.path if where.scheme == "unix" else _DATABASE.fullmatch(where.path)):
            raise ValueError(where.path)
        return redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError):  # its text may quote a part of the password
        raise ValueError(_BAD_URL) from None


def connectors(client: Any, limit: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Give two makers of connections, blocking and asyncio, that reach the same server as a client or pool does."""
    pool = getattr(client, "connection_pool", client)
    kind, given = getattr(pool, "connection_class", None), dict(getattr(pool, "connection_kwargs", {}))
    if kind is not None and hasattr(kind, "connect_to"):  # a Sentinel's: it has no address of its own
        raise TypeError("dlock cannot follow a Sentinel yet: give it the URL or a client of the master itself")
    pair = next((pair for pair in _KINDS if kind is not None and issubclass(kind, pair)), None)
    if pair is None:
        raise TypeError(f"not a redis-py client or pool that dlock can follow: {type(client).__name__}")
    blocking, awaiting = (partial(one, **_kept(one, given)) for one in cast("tuple[Any, Any]", pair))
    try:
        blocking(socket_timeout=limit)  # sends nothing
    except redis.RedisError as error:
        raise ValueError(f"bad Redis options: {error}") from error
    return partial(blocking, socket_timeout=limit), partial(awaiting, socket_timeout=None)


def _kept(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {key: value for key, value in given.items() if key in _KEPT or (key.startswith("ssl_") and key in known)}
