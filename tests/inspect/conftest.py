"""Fixtures for the inspector: an empty store, and a snapshot that is taken until it is as expected."""

import contextlib
from collections.abc import Callable

import pytest
import redis

from django_dlock.inspect import databases
from dlock_core import connect
from dlock_core.inspect import Snapshot, take_snapshot
from tests.servers import Server
from tests.waiting import INNODB_REFRESH_S, until

WITHIN = 60.0


@pytest.fixture
def store_url(redis_server: Server) -> str:
    """Return the URL of a real Redis, which is empty at the start."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def look(store_url: str, database: str) -> Callable[..., Snapshot]:
    """Return a function that takes snapshots until one is as expected: `look(lambda snapshot: snapshot.cycles)`."""

    def look(is_expected: Callable[[Snapshot], object], name: str | None = None) -> Snapshot:
        def expected() -> Snapshot | None:
            found = take_snapshot([("default", backend)], databases([database]), name)
            return found if is_expected(found) else None

        with contextlib.closing(connect(store_url)) as backend:
            found = until(expected, every=INNODB_REFRESH_S)
        assert found is not None
        return found

    return look
