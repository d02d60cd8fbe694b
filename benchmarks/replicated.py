"""Compare a free lock behind Sentinels and in a Redis Cluster with redis-py's Lock, with a new lock object each time.

    python -m benchmarks.replicated --rounds 9 --count 200

Behind Sentinels, ours checks in the same write that the server is still the master; `replicas=1` waits for the replica.
"""

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.lock import Lock as RedisPyLock
from redis.sentinel import Sentinel

from benchmarks import measure
from benchmarks.floors import Names
from dlock_core import AsyncLock, Lock, connect
from tests import redis_cluster, redis_sentinel
from tests.redis_sentinel import SERVICE, Group

if TYPE_CHECKING:
    from collections.abc import Callable

BASE: Final = "redis-py Lock"
Operations = dict[str, measure.Operation]


def behind_sentinels(group: Group) -> Operations:
    """Return the contestants that follow a master."""
    master = Sentinel([("127.0.0.1", sentinel.port) for sentinel in group.sentinels]).master_for(SERVICE)
    return {
        BASE: redis_py(master),
        "dlock": ours(group.url),
        "dlock, asyncio": ours_for_tasks(group.url),
        "dlock, replicas=1": ours(group.url, replicas=1),
        "dlock, the master itself": ours(group.servers[0].url),
    }


def in_cluster(cluster: Any) -> Operations:
    """Return the contestants that find the node of a name."""
    nodes = [ClusterNode("127.0.0.1", node.port) for node in cluster.nodes[:3]]
    return {
        BASE: redis_py(RedisCluster(startup_nodes=nodes)),
        "dlock": ours(cluster.url),
        "dlock, asyncio": ours_for_tasks(cluster.url),
    }


def redis_py(client: redis.Redis | RedisCluster) -> measure.Operation:
    name = Names("redis-py").next

    def operation() -> None:
        lock = RedisPyLock(client, name(), timeout=30)
        lock.acquire()
        lock.release()

    return operation


def ours(url: str, **options: Any) -> measure.Operation:
    backend, name = connect(url, **options), Names("dlock").next
    return lambda: Lock(backend, name(), ttl=30).acquire().release()


def ours_for_tasks(url: str) -> measure.Operation:
    backend, name, loop = connect(url), Names("dlock-async").next, asyncio.new_event_loop()

    async def once() -> None:
        await (await AsyncLock(backend, name(), ttl=30).acquire()).release()

    return lambda: loop.run_until_complete(once())


def add(report: measure.Report, title: str, pids: list[int], every: Operations, options: Any) -> None:
    """Measure the contestants with their servers on the same CPU as us, and then on the other."""
    for layout in measure.LAYOUTS:
        measure.pin(layout, *pids)
        runs = measure.interleave(every, BASE, options.rounds, options.count, pids)
        report.add(f"{title}, {layout} CPU", [{"contestant": name, **runs[name].row()} for name in every])


def main() -> None:
    options = measure.arguments(__doc__, rounds=9, count=200)
    report, chosen = measure.Report(options.format), options.only
    kinds: dict[str, tuple[Callable[..., Any], Callable[..., Operations], Callable[..., Any]]] = {
        "Redis behind Sentinels": (redis_sentinel.group, behind_sentinels, lambda group: group.servers),
        "Redis Cluster": (redis_cluster.cluster, in_cluster, lambda cluster: cluster.nodes),
    }
    for title, (start, contestants, servers) in kinds.items():
        with ExitStack() as stack:
            directory = stack.enter_context(measure.scratch())
            place = stack.enter_context(start(directory / "servers"))
            pids = [server.process.pid for server in servers(place) if server.process is not None]
            add(report, title, pids, measure.chosen(contestants(place), chosen, BASE), options)
    report.end()


if __name__ == "__main__":
    main()
