"""Samples of what the servers keep: keys, rows, nodes and connections, each read over a new connection."""

from contextlib import suppress
from typing import Any, Final

import redis
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from tests.etcd_servers import ask
from tests.random_faults.database_faults import connected
from tests.random_faults.world import World
from tests.servers import Server
from tests.zookeeper_servers import asked

ETCD_ALL: Final = {"key": "AA==", "range_end": "AA==", "count_only": True}
ZOOKEEPER: Final = {
    "zk_znode_count": "nodes", "zk_ephemerals_count": "ephemeral nodes", "zk_watch_count": "watches",
    "zk_num_alive_connections": "connections",
}  # fmt: skip
POSTGRESQL: Final = {
    "connections": "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'",
    "rows of dlock_fence": "SELECT count(*) FROM dlock_fence",
    "rows of dlock_lease": "SELECT count(*) FROM dlock_lease",
    "advisory locks": "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'",
}
MARIADB: Final = {
    "connections": "SELECT count(*) FROM information_schema.processlist WHERE user = 'root'",
    "rows of dlock_fence": "SELECT count(*) FROM dlock_fence",
}
COUNTERS: Final = (b"token", b"locks")
"""The endings of the keys that stay: two in a server, two for each of a cluster's 256 tags."""
Values = dict[str, float]


def sampled(world: World) -> dict[str, Values]:
    """Return the values of each store and database now, without those that cannot be read."""
    looks = {
        "redis": lambda: _of_redis(world.servers["redis"]),
        "sentinel": lambda: _of_redis(*(world.sentinel.servers if world.sentinel else ())),
        "cluster": lambda: _of_redis(*(world.cluster.nodes if world.cluster else ())),
        "redlock": lambda: _of_redis(*(world.servers[name] for name in world.servers if name.startswith("redlock"))),
        "etcd": lambda: _of_etcd(world.servers["etcd"]),
        "zookeeper": lambda: _of_zookeeper(world.servers["zookeeper"]),
        "postgresql": lambda: _of_database(world, "postgresql", POSTGRESQL),
        "mariadb": lambda: _of_database(world, "mariadb", MARIADB),
    }
    found: dict[str, Values] = {}
    for name in (*world.stores, *world.databases):
        if name in looks:
            with suppress(OSError, redis.RedisError, SQLAlchemyError):
                found[name] = looks[name]()
    return found


def _of_redis(*nodes: Server) -> Values:
    """Return the sums of the nodes' values."""
    total = {"keys": 0.0, "memory, KiB": 0.0, "connections": 0.0}
    for node in nodes:
        with redis.Redis(port=node.port, socket_timeout=2) as client:
            said: dict[str, Any] = client.info()
            total["keys"] += sum(not key.endswith(COUNTERS) for key in client.scan_iter("dlock:*", count=1000))
        total["memory, KiB"] += said["used_memory"] / 1024
        total["connections"] += said["connected_clients"]
    return total


def _of_etcd(member: Server) -> Values:
    keys, leases = ask(member, "kv/range", ETCD_ALL), ask(member, "lease/leases")
    return {"keys": float(keys.get("count", 0)), "leases": float(len(leases.get("leases", [])))}


def _of_zookeeper(server: Server) -> Values:
    said = dict(line.split("\t", 1) for line in asked(server, "mntr") if "\t" in line)
    return {name: float(said[key]) for key, name in ZOOKEEPER.items() if key in said}


def _of_database(world: World, name: str, questions: dict[str, str]) -> Values:
    with connected(world, name) as connection:
        return {what: float(connection.execute(text(question)).scalar_one()) for what, question in questions.items()}
