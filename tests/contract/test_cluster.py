"""A Redis Cluster of three masters keeps the contract, and no key is left on any of them."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core import connect
from dlock_core.backend import Backend
from dlock_core.testing.contract import *  # noqa: F403
from tests.conftest import give_up
from tests.redis_cluster import Cluster, cluster
from tests.servers import ServerMissing


@pytest.fixture(scope="module")
def nodes(servers_directory: Path) -> Iterator[Cluster]:
    try:
        with cluster(servers_directory / "cluster") as nodes:
            yield nodes
    except ServerMissing as missing:
        give_up(str(missing))


@pytest.fixture
def backend(nodes: Cluster) -> Iterator[Backend]:
    prefix = f"{secrets.token_hex(4)}:"
    backend = connect(nodes.url, prefix=prefix, timeout=20.0)
    yield backend
    backend.close()
    assert nodes.left_over(prefix) == []
