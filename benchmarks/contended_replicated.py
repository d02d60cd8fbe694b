"""Many processes contend for a lock behind Sentinels, in a Cluster, or on five masters: ours, redis-py's and pottery's.

    python -m benchmarks.contended_replicated --processes 2,8,32 --think 0,5

redis-py's Lock retries every 100 ms; pottery's Redlock retries a majority after a random pause.
"""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pottery
import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.lock import Lock as RedisPyLock
from redis.sentinel import Sentinel

from benchmarks import measure
from benchmarks.sections import Make, Pair, tables
from dlock_core import Lock, connect
from tests import redis_cluster, redis_sentinel, redlock_nodes
from tests.redis_sentinel import SERVICE, Group
from tests.servers import Server

REDIS_PY: Final = "redis-py Lock"
POTTERY: Final = "pottery Redlock"


def ours(url: str) -> Pair:
    backend = connect(url)
    return lambda: Lock(backend, "ours", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def redis_py(client: Any) -> Pair:
    def acquire() -> RedisPyLock:
        lock = RedisPyLock(client, "redis-py", timeout=30)
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def of_master(group: Group) -> Pair:
    sentinels = [("127.0.0.1", sentinel.port) for sentinel in group.sentinels]
    return redis_py(Sentinel(sentinels).master_for(SERVICE))


def of_cluster(nodes: list[Server]) -> Pair:
    return redis_py(RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in nodes[:3]]))


def pottery_redlock(nodes: list[Server]) -> Pair:
    clients = frozenset(redis.Redis(port=node.port) for node in nodes)

    def acquire() -> pottery.Redlock:
        lock = pottery.Redlock(key="pottery", masters=clients, auto_release_time=30)
        while not lock.acquire():
            pass
        return lock

    return acquire, lambda lock: lock.release()


def pids(nodes: list[Server]) -> list[int]:
    return [node.process.pid for node in nodes if node.process is not None]


def places(stack: ExitStack, home: Path) -> dict[str, tuple[str, dict[str, Make], list[int]]]:
    """Start the servers; return for each place the peer that counts as 1, the contestants, and the servers' pids."""
    group = stack.enter_context(redis_sentinel.group(home / "group"))
    nodes = stack.enter_context(redis_cluster.cluster(home / "cluster"))
    masters = stack.enter_context(redlock_nodes.masters(home / "redlock", 5, "--appendonly", "no"))
    return {
        "Redis behind Sentinels": (
            REDIS_PY,
            {REDIS_PY: partial(of_master, group), "dlock": partial(ours, group.url)},
            pids(group.servers),
        ),
        "Redis Cluster": (
            REDIS_PY,
            {REDIS_PY: partial(of_cluster, nodes.nodes), "dlock": partial(ours, nodes.url)},
            pids(nodes.nodes),
        ),
        "Redlock, five masters": (
            POTTERY,
            {POTTERY: partial(pottery_redlock, masters), "dlock": partial(ours, redlock_nodes.url_of(masters))},
            pids(masters),
        ),
    }


def main() -> None:
    logging.disable()  # pottery's
    options = measure.arguments(__doc__, repeat=3, seconds=2.0, processes="2,8,32", think="0,5")
    report = measure.Report(options.format)
    with measure.scratch() as home, ExitStack() as stack:
        for title, (base, contestants, servers) in places(stack, home).items():
            tables(report, title, base, contestants, options, servers)
    report.end()


if __name__ == "__main__":
    main()
