"""Fixtures: a store behind a network that can be broken, and the same store over a good one, to see what is left."""

import secrets
from collections.abc import Iterator

import pytest

from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.testing.contract import harness  # noqa: F401 - a fixture
from tests.faults.turned_clocks import shim, start  # noqa: F401 - fixtures
from tests.proxy import Proxy
from tests.servers import Server

LIMIT = 0.5
"""Seconds that one request may take in these tests."""


@pytest.fixture
def prefix() -> str:
    return f"{secrets.token_hex(4)}:"


@pytest.fixture
def proxy(redis_server: Server) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def backend(proxy: Proxy, prefix: str) -> Iterator[RedisBackend]:
    """Yield the store as its users reach it: through the proxy."""
    backend = RedisBackend.from_url(proxy.redis_url, prefix=prefix, timeout=LIMIT)
    yield backend
    backend.close()


@pytest.fixture
def direct(redis_server: Server, prefix: str) -> Iterator[RedisBackend]:
    """Yield the same store over a good network."""
    backend = RedisBackend.from_url(redis_server.url, prefix=prefix)
    yield backend
    backend.close()
