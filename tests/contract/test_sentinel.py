"""A master behind Sentinels keeps the contract, grants reach a replica before they are reported, and no key is left."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio.sentinel
import redis.sentinel

from dlock_core import connect
from dlock_core.backend import Backend
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract import *  # noqa: F403
from dlock_core.testing.contract.harness import Harness
from tests.contract.test_redis import left_over
from tests.redis_sentinel import HOST, SERVICE, Group, group


@pytest.fixture(scope="module")
def shop(servers_directory: Path) -> Iterator[Group]:
    with group(servers_directory / "sentinel") as shop:
        yield shop


@pytest.fixture
def backend(shop: Group) -> Iterator[Backend]:
    prefix = f"{secrets.token_hex(4)}:"
    backend = connect(shop.url, prefix=prefix, replicas=1, timeout=20.0)
    yield backend
    backend.close()
    assert left_over(shop.master().url, prefix) == []


@pytest.mark.parametrize("kind", [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel], ids=["threads", "asyncio"])
def test_client_of_redis_py_that_follows_sentinels_is_a_store(shop: Group, harness: Harness, kind: type) -> None:
    sentinels = kind([(HOST, sentinel.port) for sentinel in shop.sentinels])
    backend = connect(sentinels.master_for(SERVICE, decode_responses=True), prefix=harness.store.keyspace.prefix)
    try:
        lease = harness.acquire("a")
        assert type(harness)(backend).try_acquire("a") is None
        harness.do(lease.release)
        with_client = type(harness)(backend)
        token = with_client.acquire("a").token
        assert token > lease.token
        assert [holder.token for holder in run(backend.inspect(BLOCKING, "a"))[0].holders] == [token]
        with_client.close()
    finally:
        backend.close()
