"""Make connections the way a URL, a client or a pool of redis-py does, for threads and for asyncio alike."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio

from dlock_core.backends.redis.connections import AsyncioWire, BlockingWire
from dlock_core.secrets import tells_secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.redis.wire import Wire

__all__ = ["connectors", "of_url", "title", "wires"]

_KEPT: Final = frozenset({
    "host", "port", "path", "db", "username", "password", "credential_provider", "client_name", "protocol",
    "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type",
})  # fmt: skip
"""What describes the server and how to reach it. Retries, time limits and decoding are ours."""

PORT: Final = 6379
_DATABASE: Final = re.compile(r"(/\d*)?")

_BAD_URL: Final = (
    "bad Redis URL: expected redis://[user:password@]host:port/db or unix:///path, "
    "with every / ? # @ of the password percent-encoded"
)

_UNKNOWN: Final = (
    "bad Redis URL: such connections of redis-py have no option {!r}; those of dlock, such as timeout and prefix, "
    "are no part of the URL"
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
        pool = redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError):  # its text may quote a part of the password
        raise ValueError(_BAD_URL) from None
    for option in parse_qs(where.query).keys() - _options(pool.connection_class):
        raise ValueError(_BAD_URL if tells_secret(option, url) else _UNKNOWN.format(option))
    return pool


def _options(kind: type) -> set[str]:
    """Give the options that a URL may have for such connections."""
    return {"max_connections"}.union(*[inspect.signature(each.__init__).parameters for each in kind.__mro__])  # type: ignore[misc]


def title(client: Any) -> str:
    """Name a server for people: its host and port, or its socket."""
    pool = getattr(client, "connection_pool", client)
    if hasattr(pool, "sentinel_manager"):
        raise TypeError("a master that Sentinels lead to has no address of its own: give a client of the server itself")
    given = getattr(pool, "connection_kwargs", {})
    return str(given["path"]) if "path" in given else f"{given.get('host', 'localhost')}:{given.get('port', PORT)}"


def wires(client: Any, limit: float) -> tuple[Wire, Wire]:
    """Give connections, for threads and for tasks, to the same server as a client or pool has."""
    blocking, awaiting = connectors(client, limit)
    return BlockingWire(blocking), AsyncioWire(awaiting)


def connectors(client: Any, limit: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Give two makers of connections, blocking and asyncio, that reach the same server as a client or pool does."""
    pool = getattr(client, "connection_pool", client)
    kind, given = getattr(pool, "connection_class", None), dict(getattr(pool, "connection_kwargs", {}))
    pair = next((pair for pair in _KINDS if kind is not None and issubclass(kind, pair)), None)
    if pair is None:
        raise TypeError(f"not a redis-py client or pool that dlock can follow: {type(client).__name__}")
    given["socket_connect_timeout"] = min(given.get("socket_connect_timeout") or limit, limit)
    blocking, awaiting = (partial(one, **_kept(one, given)) for one in cast("tuple[Any, Any]", pair))
    try:
        blocking(socket_timeout=limit)  # sends nothing
    except redis.RedisError as error:
        raise ValueError(f"bad Redis options: {error}") from error
    return partial(blocking, socket_timeout=limit), partial(awaiting, socket_timeout=None)


def _kept(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {key: value for key, value in given.items() if key in _KEPT or (key.startswith("ssl_") and key in known)}
