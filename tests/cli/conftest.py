"""Fixtures for the commands: an environment without stores and a terminal 80 columns wide, and an empty Redis."""

from collections.abc import Iterator

import pytest

from dlock_core import connect
from dlock_core.backend import Backend
from tests.servers import Server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DLOCK_URL", "DLOCK_DATABASE_URL", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def backend(redis_server: Server) -> Iterator[Backend]:
    """Yield a store in a real Redis that has no lease of any other test."""
    import redis

    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        made = connect(redis_server.url)
        yield made
        made.close()
        client.flushall()
