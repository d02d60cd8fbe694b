"""Fixtures for the inspector: what it finds in a store and a database, asked again until it is there."""

import time
from collections.abc import Callable

import pytest
import redis

from django_dlock.inspect import databases
from dlock_core import connect
from dlock_core.inspect import Snapshot, take_snapshot
from tests.servers import Server

WITHIN = 60.0


@pytest.fixture
def store_url(redis_server: Server) -> str:
    """A real Redis, empty at the start."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def look(store_url: str, database: str) -> Callable[..., Snapshot]:
    """Look until the snapshot is as expected: `look(lambda snapshot: snapshot.cycles)`."""

    def look(is_expected: Callable[[Snapshot], object], name: str | None = None) -> Snapshot:
        backend = connect(store_url)
        give_up = time.monotonic() + WITHIN
        try:
            while not is_expected(found := take_snapshot([("default", backend)], databases([database]), name)):
                assert time.monotonic() < give_up, "\n".join(map(str, found.entries))
                time.sleep(0.2)  # asked every 0.1 s or more often, MariaDB goes on showing what it showed
        finally:
            backend.close()
        return found

    return look
