"""Redlock over five masters keeps the contract, and no key is left on any of them."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core import connect
from dlock_core.backend import Backend
from dlock_core.testing.contract import *  # noqa: F403
from tests.conftest import give_up
from tests.redlock_nodes import keys, masters, url_of
from tests.servers import Server, ServerMissing
from tests.waiting import until


@pytest.fixture(scope="module")
def nodes(servers_directory: Path) -> Iterator[list[Server]]:
    try:
        with masters(servers_directory / "redlock") as nodes:
            yield nodes
    except ServerMissing as missing:
        give_up(str(missing))


@pytest.fixture
def backend(nodes: list[Server]) -> Iterator[Backend]:
    prefix = f"{secrets.token_hex(4)}:"
    backend = connect(url_of(nodes), prefix=prefix, timeout=20.0)
    yield backend
    backend.close()
    # A node that was too slow to answer the last release may execute it later, or keep the lease until its ttl.
    until(lambda: not any(keys(node, prefix) for node in nodes))
