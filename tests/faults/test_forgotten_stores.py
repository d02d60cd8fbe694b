"""A store that is never closed loses its connections with the last reference to it, without a warning."""

import gc
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from dlock_core import AsyncLock, Lock, connect
from tests import etcd_servers, redis_cluster, redis_sentinel, redlock_nodes, settings, zookeeper_servers
from tests.conftest import give_up
from tests.garbage import collect_garbage
from tests.servers import Server, ServerMissing
from tests.table_stores import table
from tests.waiting import auntil, until


class Place(NamedTuple):
    """A store's URL, and all the servers that it may connect to."""

    url: str
    servers: list[Server]

    def connections(self) -> int:
        ports = {server.port for server in self.servers}
        found = [one for one in gc.get_objects() if issubclass(type(one), socket.socket)]
        return len([one for one in found if one.fileno() >= 0 and peer(one) in ports])


def peer(one: socket.socket) -> int:
    try:
        return int(one.getpeername()[1])
    except (OSError, IndexError):  # not connected, or not TCP
        return 0


def a_cluster(stack: ExitStack, path: Path) -> Place:
    nodes = stack.enter_context(redis_cluster.cluster(path))
    return Place(nodes.url, nodes.nodes)


def an_etcd(stack: ExitStack, path: Path) -> Place:
    etcd = stack.enter_context(etcd_servers.cluster(path))
    return Place(etcd.url, etcd.members)


def a_redlock(stack: ExitStack, path: Path) -> Place:
    nodes = stack.enter_context(redlock_nodes.masters(path))
    return Place(redlock_nodes.url_of(nodes), nodes)


def a_sentinel(stack: ExitStack, path: Path) -> Place:
    group = stack.enter_context(redis_sentinel.group(path))
    return Place(group.url, [*group.servers, *group.sentinels])


def a_zookeeper(stack: ExitStack, path: Path) -> Place:
    server = zookeeper_servers.zookeeper(path)
    server.start()
    stack.callback(server.kill)
    return Place(server.url, [server])


MADE: dict[str, Callable[[ExitStack, Path], Place]] = {
    "cluster": a_cluster,
    "etcd": an_etcd,
    "redlock": a_redlock,
    "sentinel": a_sentinel,
    "zookeeper": a_zookeeper,
}


@pytest.fixture(scope="module", params=["redis", *MADE])
def place(request: pytest.FixtureRequest, servers_directory: Path) -> Iterator[Place]:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        yield Place(server.url, [server])
        return
    with ExitStack() as stack:
        try:
            place = MADE[request.param](stack, servers_directory / f"forgotten-{request.param}")
        except ServerMissing as missing:
            give_up(str(missing))
        yield place


@pytest.fixture
def sockets_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each socket a generation younger than the object that opens it: a full collection then meets it first."""
    resolve = socket.getaddrinfo

    def resolve_later(*args: object, **options: object) -> object:
        gc.collect(0)
        return resolve(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)


def connections_after_collection(place: Place) -> int:
    """Collect garbage first: on a busy machine a node's late reply may have kept the store alive until now."""
    collect_garbage()
    return place.connections()


@pytest.mark.usefixtures("sockets_come_first")
def test_store_that_threads_used_leaves_no_connection_and_no_warning(place: Place) -> None:
    collect_garbage()
    before = place.connections()
    store = connect(place.url, prefix=f"{secrets.token_hex(4)}:")
    Lock(store, "a").acquire().release()
    assert place.connections() > before
    store.myself = store  # type: ignore[attr-defined]  # so that only the garbage collector can free it
    del store
    until(lambda: connections_after_collection(place) <= before)  # ZooKeeper's session is ended by another thread


@pytest.mark.usefixtures("sockets_come_first")
async def test_store_that_tasks_used_leaves_no_connection_and_no_warning(place: Place) -> None:
    collect_garbage()
    before = place.connections()
    store = connect(place.url, prefix=f"{secrets.token_hex(4)}:")
    async with AsyncLock(store, "a"):
        assert place.connections() > before
    store.myself = store  # type: ignore[attr-defined]
    del store
    await auntil(lambda: connections_after_collection(place) <= before)  # their loop closes them


def sessions() -> int:
    """Return how many sessions PostgreSQL has, without the one of this query."""
    with psycopg.connect(f"host=127.0.0.1 port={settings.POSTGRESQL_PORT} user=postgres dbname=postgres") as ours:
        (found,) = ours.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchone() or (0,)
    return int(found)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg", "psycopg_async"])
def test_lease_table_whose_waiters_were_notified_leaves_no_session(driver: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("postgresql")
    before = sessions()
    store, name = table(request, driver), secrets.token_hex(8)
    listener = store._listener
    holder = Lock(store, name).acquire()
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(Lock(store, name, wait=30).acquire)
        until(partial(getattr, listener, "is_listening"))
        holder.release()
        waiter.result().release()
        del waiter
    assert sessions() > before
    store.myself = store  # type: ignore[attr-defined]
    del store, listener, holder
    collect_garbage()
    until(lambda: sessions() <= before)
