"""From a URL, a client or a pool of redis-py to our own connections: one server, Sentinel, Cluster."""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncSentinelManagedConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection as AsyncSentinelManagedSSLConnection
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from dlock_core.backends.redis.sockets import AsyncioTransport, BlockingTransport
from dlock_core.backends.redis.transport import Packer
from dlock_core.options import has_swallowed_options, is_host, tells_secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.redis.transport import Transport

__all__ = [
    "PORT",
    "NodeAddress",
    "Seeds",
    "connectors",
    "pool_from_url",
    "seeds_from_client",
    "seeds_from_url",
    "split_hosts",
    "title",
    "transports",
]

_ADOPTED_OPTIONS: Final = frozenset({
    "host", "port", "path", "db", "username", "password", "credential_provider", "client_name", "protocol",
    "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type",
})  # fmt: skip
"""The options of a client that describe the server and how to reach it. Retries, time limits and decoding are ours."""

PORT: Final = 6379
_DATABASE_PATH: Final = re.compile(r"(/\d*)?")

_BAD_URL: Final = (
    "bad Redis URL: expected redis://[user:password@]host:port/db or unix:///path, "
    "with every / ? # @ of the password percent-encoded"
)

_UNKNOWN_OPTION: Final = (
    "bad Redis URL: redis-py has no option {!r} for such a connection; options of dlock, such as timeout and prefix, "
    "do not belong in the URL"
)

_TCP: Final = (redis.Connection, redis.asyncio.Connection)
_TLS: Final = (redis.SSLConnection, redis.asyncio.SSLConnection)
_UNIX: Final = (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection)
_CONNECTION_CLASSES: Final[dict[type, tuple[Any, Any]]] = {
    **{kind: pair for pair in (_TCP, _TLS, _UNIX) for kind in pair},
    **dict.fromkeys((SentinelManagedConnection, AsyncSentinelManagedConnection), _TCP),
    **dict.fromkeys((SentinelManagedSSLConnection, AsyncSentinelManagedSSLConnection), _TLS),
}
"""What is used for connections like those of a class of redis-py. A subclass may connect to another server."""

_POOL_METHODS: Final = ("get_connection", "make_connection", "get_master_address")
"""What decides in a pool of redis-py where a connection leads."""


def pool_from_url(url: str) -> Any:
    """Parse redis://, rediss:// and unix:// as redis-py does; raises ValueError, without the password."""
    try:
        where = urlsplit(url)
        if not (where.path if where.scheme == "unix" else _DATABASE_PATH.fullmatch(where.path)) or where.fragment:
            raise ValueError(where.path)
        if has_swallowed_options(f"{where.hostname}{where.path}") or not is_host(where.hostname or ""):
            raise ValueError(where.path)
        pool = redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError):  # its text may quote a part of the password
        raise ValueError(_BAD_URL) from None
    for option in parse_qs(where.query).keys() - _url_options(pool.connection_class):
        raise ValueError(_BAD_URL if tells_secret(option, url) else _UNKNOWN_OPTION.format(option))
    return pool


def _url_options(kind: type) -> set[str]:
    """Return the options that a URL may have for connections of this class."""
    return {"max_connections"}.union(*[inspect.signature(each.__init__).parameters for each in kind.__mro__])  # type: ignore[misc]


def title(client: Any) -> str:
    """Return a server's name for people: its host and port, or its socket."""
    pool = getattr(client, "connection_pool", client)
    if hasattr(pool, "sentinel_manager"):
        raise TypeError("a client that follows Sentinels has no fixed address: pass a client of the server itself")
    given = getattr(pool, "connection_kwargs", {})
    return str(given["path"]) if "path" in given else f"{given.get('host', 'localhost')}:{given.get('port', PORT)}"


def transports(client: Any, limit: float) -> tuple[Transport, Transport]:
    """Return transports for threads and for tasks, to the server of a client or pool."""
    blocking, awaiting = connectors(client, limit)
    return BlockingTransport(blocking), AsyncioTransport(awaiting)


def connectors(client: Any, limit: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two factories of connections, blocking and asyncio, to the server of a client or pool."""
    pool = getattr(client, "connection_pool", client)
    kind, given = getattr(pool, "connection_class", None), dict(getattr(pool, "connection_kwargs", {}))
    if kind is None:
        raise TypeError(f"dlock cannot use this as a redis-py client or pool: {type(client).__name__}")
    _refuse_own_way(kind, given.get("redis_connect_func"), type(pool))
    given["socket_connect_timeout"] = min(given.get("socket_connect_timeout") or limit, limit)
    blocking, awaiting = (partial(one, **_adopted(one, given)) for one in _CONNECTION_CLASSES[kind])
    try:
        blocking(socket_timeout=limit)  # sends nothing
    except redis.RedisError as error:
        raise ValueError(f"bad Redis options: {error}") from error
    blocking = partial(blocking, socket_timeout=limit, command_packer=Packer())
    return blocking, partial(awaiting, socket_timeout=None)


def _refuse_own_way(kind: Any, on_connect: object, pool: type) -> None:
    """Raise TypeError for a client whose own code connects: it may reach another server than dlock would, or none."""
    if kind not in _CONNECTION_CLASSES:
        own = f"its own connection class, {kind.__name__}, which dlock would not use"
    elif on_connect is not None:
        own = "a redis_connect_func, which dlock would not call"
    elif method := next(filter(partial(_is_own, pool), _POOL_METHODS), None):
        own = f"its own {pool.__name__}.{method}(), which dlock would not call"
    else:
        return
    raise TypeError(f"this client has {own}: pass a URL of the server, or in tests memory://")


def _is_own(pool: type, method: str) -> bool:
    """Return whether a method of a pool's class is defined outside redis-py."""
    owners = [kind for kind in pool.__mro__ if method in vars(kind)]
    return bool(owners) and owners[0].__module__.partition(".")[0] != redis.__name__


def _adopted(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {
        key: value
        for key, value in given.items()
        if key in _ADOPTED_OPTIONS or (key.startswith("ssl_") and key in known)
    }


_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+)(?::(\d{1,5}))?")


class Hosts(NamedTuple):
    """The parts of scheme://[user:password@]host:port,host:port/path?options."""

    user: str
    """The part before the host in a URL: "user:password@", or nothing."""
    hosts: list[str]
    """Each with its port."""
    path: str
    options: str
    """With its question mark, or nothing."""


def split_hosts(url: str, *, port: int, path: str, bad: str) -> Hosts:
    """Return the parts of a URL whose path matches; hosts without a port get `port`. Raises ValueError(`bad`)."""
    found = re.fullmatch(rf"[a-z+]+://(?:([^/?#,]*)@)?([^/?#@]+)({path})(\?[^#]*)?", url)
    if found is None or has_swallowed_options(found[2] + found[3]):
        raise ValueError(bad)
    credentials, hosts, rest, options = found.groups(default="")
    user = f"{credentials}@" if credentials else ""
    return Hosts(user, [_host(text, port, bad) for text in hosts.split(",")], rest, options)


def _host(text: str, port: int, bad: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError(bad)
    return f"{found[1]}:{found[2] or port}"


NodeAddress = tuple[str, int]
_BAD_CLUSTER_URL: Final = (
    "bad Redis Cluster URL: expected redis+cluster://[user:password@]host:port,host:port,host:port, one user and "
    "password for all nodes, with every : / ? # @ , of them percent-encoded, and no database, since a cluster has one"
)


class Seeds(NamedTuple):
    """The nodes that are queried first, and how connections to any node are made."""

    addresses: list[NodeAddress]
    kind: Any
    """A connection class of redis-py."""
    options: dict[str, Any]
    remap: Callable[[NodeAddress], NodeAddress] | None = None
    """Returns the address at which a node is reached, if that is not the one that the cluster reports."""

    def pool(self, address: NodeAddress) -> Any:
        """Return a pool for one node, as `transports` needs it."""
        host, port = address
        return SimpleNamespace(
            connection_class=self.kind, connection_kwargs=self.options | {"host": host, "port": port}
        )


def seeds_from_url(url: str) -> Seeds:
    """Parse redis+cluster:// or, for TLS, rediss+cluster://; raises ValueError, without the password."""
    user, nodes, _, options = split_hosts(url, port=PORT, path=r"/?", bad=_BAD_CLUSTER_URL)
    pools = [pool_from_url(f"{url.partition('+')[0]}://{user}{node}{options}") for node in nodes]
    given = [pool.connection_kwargs for pool in pools]
    return Seeds([(one["host"], one["port"]) for one in given], pools[0].connection_class, given[0])


def seeds_from_client(client: Any) -> Seeds:
    """Read a RedisCluster client, for threads or asyncio; raises TypeError for any other."""
    manager = getattr(client, "nodes_manager", None)
    if manager is None:
        raise TypeError(f"not a RedisCluster client of redis-py: {type(client).__name__}")
    given = dict(manager.connection_kwargs)
    given.pop("redis_connect_func", None)  # that of redis-py itself, for replicas, which are never used
    kind = given.get("connection_class") or (redis.SSLConnection if given.get("ssl") else redis.Connection)
    pool = getattr(manager, "connection_pool_class", redis.ConnectionPool)
    _refuse_own_way(kind, getattr(client, "user_on_connect_func", None), pool)
    nodes = [(node.host, node.port) for node in manager.startup_nodes.values()]
    return Seeds(nodes, kind, given, manager.address_remap)
