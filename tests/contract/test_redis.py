"""Redis keeps the contract, in every version that we promise to support, and no key is left."""

import secrets
from collections.abc import Iterator

import pytest
import redis

from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.testing.contract import *  # noqa: F403
from tests.servers import Server


@pytest.fixture
def backend(any_redis: Server) -> Iterator[RedisBackend]:
    prefix = f"{secrets.token_hex(4)}:"
    backend = RedisBackend.from_url(any_redis.url, prefix=prefix, timeout=20.0)
    yield backend
    backend.close()
    assert left_over(any_redis.url, prefix) == []


def left_over(url: str, prefix: str) -> list[str]:
    """Return the keys that outlive every lease and waiter, except the counter and the set of locks that grants tidy."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        keys = set(client.scan_iter(f"{prefix}*")) - {f"{prefix}token", f"{prefix}locks"}
        moments = {key: 5000 if key.endswith(":alive") else 2000 for key in keys}
        return sorted(key for key in keys if not 0 <= client.pttl(key) <= moments[key] and client.exists(key))
