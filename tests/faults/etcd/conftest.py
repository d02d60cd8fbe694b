"""Fixtures: one etcd, and stores in it, behind a network that can be broken and over a good one."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core.backends.etcd.backend import EtcdBackend
from tests.etcd_servers import Cluster, cluster
from tests.proxy import Proxy

TIMEOUT_S = 0.5
"""Seconds that one request may take behind the proxy."""


@pytest.fixture(scope="session")
def one(servers_directory: Path) -> Iterator[Cluster]:
    """Yield a cluster of one member. The tests share it: leave it running."""
    with cluster(servers_directory / "etcd1") as one:
        yield one


@pytest.fixture
def prefix() -> str:
    return f"{secrets.token_hex(4)}/"


@pytest.fixture
def proxy(one: Cluster) -> Iterator[Proxy]:
    with Proxy(one.members[0].port) as proxy:
        yield proxy


@pytest.fixture
def backend(proxy: Proxy, prefix: str) -> Iterator[EtcdBackend]:
    """Yield the store as its users reach it: through the proxy."""
    backend = EtcdBackend(f"etcd://127.0.0.1:{proxy.port}", prefix=prefix, timeout=TIMEOUT_S)
    yield backend
    backend.close()


@pytest.fixture
def patience(backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit: on a busy machine, some of many requests in a row exceed a short one by chance."""
    monkeypatch.setattr(backend._gateway, "limit", 30.0)


@pytest.fixture
def direct(one: Cluster, prefix: str) -> Iterator[EtcdBackend]:
    """Yield the same store over a good network."""
    backend = EtcdBackend(one.url, prefix=prefix)
    yield backend
    backend.close()
