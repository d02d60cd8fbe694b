"""ZooKeeper keeps the contract, alone and as an ensemble, and no node outlives its lease."""

import secrets
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from dlock_core.backends.zookeeper.backend import ZooKeeperBackend
from dlock_core.testing.contract import *  # noqa: F403
from tests.conftest import start
from tests.servers import Server
from tests.zookeeper_servers import Ensemble, ensemble, zookeeper


@pytest.fixture(scope="session")
def zookeeper_server(servers_directory) -> Iterator[Server]:
    yield from start(lambda: zookeeper(servers_directory / "zookeeper"))


@pytest.fixture(scope="session")
def zookeeper_ensemble(servers_directory) -> Iterator[Ensemble]:
    yield from start(lambda: ensemble(servers_directory / "zookeepers", dead_after=100))


@pytest.fixture(params=["zookeeper_server", "zookeeper_ensemble"])
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(request.param).url}/contract/{secrets.token_hex(4)}"


@pytest.fixture
def backend(url: str) -> Iterator[ZooKeeperBackend]:
    """Its session is longer than any ttl that the suite relies on; another member is tried within a lock's wait."""
    backend = ZooKeeperBackend.from_url(url, timeout=6.0, session=60.0)
    yield backend
    assert left_over(url) == []
    backend.close()


def left_over(url: str) -> list[str]:
    """Return the nodes below those of the locks, except the marks that keep tokens growing."""
    hosts, _, chroot = url.removeprefix("zookeeper://").partition("/")
    client = KazooClient(hosts)
    client.start()
    try:
        root = f"/{chroot}/dlock"
        nodes = [node for lock in children(client, root) for node in children(client, f"{root}/{lock}")]
        return [node for node in nodes if not node.startswith("f-")]
    finally:
        client.stop()
        client.close()


def children(client: KazooClient, path: str) -> list[str]:
    """Return the child nodes; none if the lock's node was empty and so has been removed in the meantime."""
    try:
        return client.get_children(path)
    except NoNodeError:
        return []
