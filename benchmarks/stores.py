"""Measure a free lock in every store, in one interleaved run: acquire and release, as multiples of one Redis.

    python -m benchmarks.stores --rounds 9 --count 60

The servers run on this machine and do not wait for a disk, unlike a real etcd, ZooKeeper or database. All processes
share all CPUs.
"""

from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine

from benchmarks import measure
from benchmarks.floors import Names
from dlock_core import Lock, connect
from sqla_dlock.backends import advisory, table
from sqla_dlock.tables import lease_metadata as metadata
from tests import etcd_servers, redis_cluster, redis_sentinel, redlock_nodes, servers, zookeeper_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlock_core.backend import Backend

BASE: Final = "redis://"


def started(server: Any) -> AbstractContextManager[Any]:
    @contextmanager
    def running() -> "Iterator[Any]":
        server.start()
        try:
            yield server
        finally:
            server.stop()

    return running()


def in_database(stack: ExitStack, url: str) -> "dict[str, Backend]":
    engine = create_engine(url)
    stack.callback(engine.dispose)
    metadata.create_all(engine)
    found = {f"database://, {engine.name}": table.from_engine(engine)}
    if engine.name != "sqlite":
        found[f"advisory://, {engine.name}, session"] = advisory.from_engine(engine, session=True)
    return found


def stores(stack: ExitStack, home: Path) -> "dict[str, Backend]":
    """Start every server, and return the stores by the names under which they are reported."""

    def start(manager: AbstractContextManager[Any]) -> Any:
        return stack.enter_context(manager)

    urls: dict[str, Callable[[], str]] = {
        BASE: lambda: start(started(servers.redis(home / "redis"))).url,
        "redis+sentinel://": lambda: start(redis_sentinel.group(home / "group")).url,
        "redis+cluster://": lambda: start(redis_cluster.cluster(home / "cluster")).url,
        "redlock://, 5 nodes": lambda: redlock_nodes.url_of(start(redlock_nodes.masters(home / "redlock"))),
        "etcd://, 3 members": lambda: start(etcd_servers.cluster(home / "etcd", 3)).url,
        "zookeeper://, 3 servers": lambda: start(started(zookeeper_servers.ensemble(home / "zookeeper"))).url,
        "memory://": lambda: "memory://",
    }
    found = {name: connect(url()) for name, url in urls.items()}
    for backend in found.values():
        stack.callback(backend.close)
    postgresql = start(started(servers.postgresql(home / "postgresql", servers.free_port())))
    mariadb = start(started(servers.mariadb(home / "mariadb", servers.free_port())))
    found |= in_database(stack, f"postgresql+psycopg://postgres@127.0.0.1:{postgresql.port}/postgres")
    found |= in_database(stack, f"mariadb+mysqldb://root@127.0.0.1:{mariadb.port}/dlock")
    found |= in_database(stack, f"sqlite:///{home}/leases.sqlite3")
    return found


def acquire_and_release(backend: "Backend") -> measure.Operation:
    name = Names("dlock").next
    return lambda: Lock(backend, name(), ttl=30).acquire().release()


def main() -> None:
    options = measure.arguments(__doc__, rounds=9, count=60)
    report = measure.Report(options.format)
    with measure.scratch() as home, ExitStack() as stack:
        every = {name: acquire_and_release(backend) for name, backend in stores(stack, home).items()}
        runs = measure.interleave(measure.chosen(every, options.only, BASE), BASE, options.rounds, options.count, [])
        report.add("A free lock in every store", [{"contestant": name, **run.row()} for name, run in runs.items()])
    report.end()


if __name__ == "__main__":
    main()
