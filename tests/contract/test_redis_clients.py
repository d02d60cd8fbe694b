"""Redis keeps the contract whether we get a URL, a client or a pool, and however these decode replies."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import redis
import redis.asyncio

from dlock_core import connect
from dlock_core.backend import Backend
from dlock_core.testing.contract import harness, name, shared_harness  # noqa: F401
from dlock_core.testing.contract.exclusion import *  # noqa: F403
from dlock_core.testing.contract.operating import *  # noqa: F403
from dlock_core.testing.contract.sharing import *  # noqa: F403
from dlock_core.testing.contract.waiting import *  # noqa: F403
from tests.servers import Server

del test_hand_over_that_nobody_takes_up_passes_on, test_shared_lease_is_renewed  # noqa: F821 - slow

STORES: Final[dict[str, Callable[[Server], Any]]] = {
    "decoding client": lambda server: redis.Redis.from_url(server.url, decode_responses=True, protocol=2),
    "RESP3 client": lambda server: redis.Redis.from_url(server.url, protocol=3),
    "decoding RESP3 client": lambda server: redis.Redis.from_url(server.url, protocol=3, decode_responses=True),
    "asyncio client": lambda server: redis.asyncio.Redis.from_url(server.url, decode_responses=True),
    "tiny pool": lambda server: redis.BlockingConnectionPool.from_url(
        server.url, max_connections=1, socket_timeout=0.1
    ),
    "unix socket": lambda server: f"unix://{server.directory}/redis.sock?db=1",
}


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, redis_server: Server) -> Iterator[Backend]:
    backend = connect(STORES[request.param](redis_server), prefix=f"{secrets.token_hex(4)}:")
    yield backend
    backend.close()
