"""Where a cluster begins, and how its nodes are reached: by a URL, or as a RedisCluster client of redis-py does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import redis

from dlock_core.backends.redis.clients import PORT, of_url
from dlock_core.backends.redis.hosts import split

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Address", "Seeds", "of_client", "read"]

Address = tuple[str, int]
_BAD: Final = (
    "bad Redis Cluster URL: expected redis+cluster://[user:password@]host:port,host:port,host:port, one user and "
    "password for all nodes, with every : / ? # @ , of them percent-encoded, and no database, since a cluster has one"
)


class Seeds(NamedTuple):
    """The nodes that are asked first, and what connections to any node are made of."""

    addresses: list[Address]
    kind: Any
    """A connection class of redis-py."""
    options: dict[str, Any]
    remap: Callable[[Address], Address] | None = None
    """Where we reach a node, when that is not where the cluster says it is."""

    def pool(self, address: Address) -> Any:
        """Give what `clients.wires` needs to know of the pool of one node."""
        host, port = address
        return SimpleNamespace(
            connection_class=self.kind, connection_kwargs=self.options | {"host": host, "port": port}
        )


def read(url: str) -> Seeds:
    """Take redis+cluster:// or, for TLS, rediss+cluster:// apart; raises ValueError, without the password."""
    user, nodes, _, options = split(url, port=PORT, path=r"/?", bad=_BAD)
    pools = [of_url(f"{url.partition('+')[0]}://{user}{node}{options}") for node in nodes]
    given = [pool.connection_kwargs for pool in pools]
    return Seeds([(one["host"], one["port"]) for one in given], pools[0].connection_class, given[0])


def of_client(client: Any) -> Seeds:
    """Read a RedisCluster client, for threads or asyncio; raises TypeError for any other."""
    manager = getattr(client, "nodes_manager", None)
    if manager is None:
        raise TypeError(f"not a RedisCluster client of redis-py: {type(client).__name__}")
    given = dict(manager.connection_kwargs)
    kind = given.get("connection_class") or (redis.SSLConnection if given.get("ssl") else redis.Connection)
    nodes = [(node.host, node.port) for node in manager.startup_nodes.values()]
    return Seeds(nodes, kind, given, manager.address_remap)
