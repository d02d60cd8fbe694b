"""The script, and the keys of scripts, that only Redis Cluster uses: keys before, keys after, reply."""

import pytest
import redis

from tests.contract.test_redis_scripts import (
    ANN,
    BOB,
    INDEX,
    LOCK,
    TOKENS,
    acquire,
    call,
    contents,
    server,  # noqa: F401 - a fixture
    waiting,
)


def test_drop_ends_an_exclusive_lease_and_nothing_else(server: redis.Redis) -> None:  # noqa: F811
    acquire(server, ANN)
    acquire(server, BOB)
    assert call(server, "drop", ANN, keys=(LOCK,)) == 1
    assert not server.exists(LOCK)
    assert waiting(server) == [BOB]
    assert server.exists(TOKENS, INDEX) == 2
    assert call(server, "drop", ANN, keys=(LOCK,)) == 0
    assert isinstance(acquire(server, BOB), int), "who waited has kept his place, and asks again"


@pytest.mark.parametrize("value", [f"{BOB}|1|2|owner", "a foreign lock", "shared"])
def test_drop_leaves_what_is_another_s(server: redis.Redis, value: str) -> None:  # noqa: F811
    server.set(LOCK, value)
    before = contents(server)
    assert call(server, "drop", ANN, keys=(LOCK,)) == 2
    assert contents(server) == before


def test_renew_needs_the_lock_alone(server: redis.Redis) -> None:  # noqa: F811
    acquire(server, ANN, ttl=1000)
    assert call(server, "renew", ANN, 60_000, keys=(LOCK,)) == [1]
    assert server.pttl(LOCK) > 50_000
    assert call(server, "renew", BOB, 60_000, keys=(LOCK,)) == [0]


@pytest.mark.parametrize("mode", ["x", "s"])
def test_key_that_never_exists_changes_nothing(server: redis.Redis, mode: str) -> None:  # noqa: F811
    acquire(server, ANN, mode=mode, ttl=1000)
    assert call(server, "renew", ANN, 60_000, keys=(LOCK, "never")) == [1]
    assert server.pttl(LOCK) > 50_000
    assert server.smembers(INDEX) == {LOCK}
    assert call(server, "release", ANN, keys=(LOCK, TOKENS, INDEX, "never")) == 1
    assert not server.exists("never", LOCK)
