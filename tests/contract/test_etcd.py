"""etcd keeps the contract, and no key is left over."""

import secrets
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core.backends.etcd import EtcdBackend
from dlock_core.testing.contract import *  # noqa: F403
from tests.etcd_servers import Cluster, ask, cluster


@pytest.fixture(scope="module")
def etcd(servers_directory: Path) -> Iterator[Cluster]:
    with cluster(servers_directory / "etcd") as etcd:
        yield etcd


@pytest.fixture
def backend(etcd: Cluster) -> Iterator[EtcdBackend]:
    prefix = f"{secrets.token_hex(4)}/"
    backend = EtcdBackend(etcd.url, prefix=prefix)
    yield backend
    backend.close()
    assert left_over(etcd, f"{prefix}lock/") == 0


def left_over(etcd: Cluster, prefix: str) -> int:
    """The number of keys that are still there."""
    start, end = b64encode(prefix.encode()).decode(), b64encode(f"{prefix}~".encode()).decode()
    found = ask(etcd.members[0], "kv/range", {"key": start, "range_end": end, "count_only": True})
    return int(found.get("count", 0))
