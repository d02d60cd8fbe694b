"""Other libraries on the same key, here redis-py's Lock: they exclude us and we exclude them, in either order."""

import math
import threading
from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from dlock_core import AcquireTimeout, Lock, Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.harness import Harness
from tests.faults.looking import holders, waiters
from tests.servers import Server

WITHIN = 30.0


@pytest.fixture
def backend(direct: RedisBackend) -> RedisBackend:
    return direct


@pytest.fixture
def client(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


def foreign(client: redis.Redis, backend: RedisBackend, ttl: float | None = 30.0) -> redis.lock.Lock:
    return client.lock(backend.lock_key("a"), timeout=ttl, blocking=False)


def test_foreign_holder_keeps_us_out_exclusive_or_shared(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    theirs = foreign(client, backend)
    assert theirs.acquire()
    assert harness.try_acquire("a") is None
    assert harness.try_acquire("a", shared=True) is None
    with pytest.raises(AcquireTimeout, match="held by a client that is not dlock"):
        harness.acquire("a", wait=0.05)
    theirs.release()
    assert harness.try_acquire("a") is not None


@pytest.mark.parametrize("shared", [False, True])
def test_our_holder_keeps_others_out(
    harness: Harness, client: redis.Redis, backend: RedisBackend, shared: bool
) -> None:
    ours = harness.acquire("a", shared=shared)
    assert not foreign(client, backend).acquire()
    assert harness.do(ours.release) is Released.RELEASED
    theirs = foreign(client, backend)
    assert theirs.acquire()
    theirs.release()


def test_waiter_of_ours_notices_a_foreign_release_in_order(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    theirs = foreign(client, backend)
    assert theirs.acquire()
    first, second = harness.queue_up("a"), harness.queue_up("a")
    theirs.release()
    lease = first.result(WITHIN)
    assert not second.done()
    harness.do(lease.release)
    assert second.result(WITHIN).token > lease.token


def test_foreign_waiter_gets_in_after_our_release(harness: Harness, client: redis.Redis, backend: RedisBackend) -> None:
    ours = harness.acquire("a")
    got: list[bool] = []
    theirs = client.lock(backend.lock_key("a"), timeout=30, sleep=0.01, thread_local=False)
    thread = threading.Thread(target=lambda: got.append(theirs.acquire(blocking_timeout=WITHIN)))
    thread.start()
    harness.do(ours.release)
    thread.join()
    assert got == [True]
    assert harness.try_acquire("a") is None
    theirs.release()


def test_waiter_of_ours_follows_a_foreign_holder_that_died(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    assert foreign(client, backend, ttl=0.3).acquire()
    assert harness.acquire("a", wait=None).token > 0


def test_foreign_lock_without_a_ttl_is_waited_for_and_shown_without_expiry(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    theirs = foreign(client, backend, ttl=None)
    assert theirs.acquire()
    pending = harness.queue_up("a")
    (state,) = run(backend.inspect(BLOCKING, "a"))
    assert [(holder.expires_in, holder.token) for holder in state.holders] == [(None, 0)]
    assert len(state.waiters) == 1
    theirs.release()
    assert pending.result(WITHIN).token > 0


def test_other_library_cannot_release_ours_and_we_not_theirs(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    theirs = foreign(client, backend, ttl=0.2)
    assert theirs.acquire()
    ours = harness.acquire("a", wait=None)
    with pytest.raises(LockNotOwnedError):
        theirs.release()
    assert holders(backend, "a") == [ours.holder]
    client.set(backend.lock_key("a"), "somebody else")
    assert harness.do(ours.release) is Released.STOLEN
    assert client.get(backend.lock_key("a")) == b"somebody else"
    assert not harness.call_store("force_release", "a", 0)
    client.delete(backend.lock_key("a"))


def test_waiting_behind_a_foreign_holder_leaves_no_place(
    harness: Harness, client: redis.Redis, backend: RedisBackend
) -> None:
    theirs = foreign(client, backend)
    assert theirs.acquire()
    with pytest.raises(AcquireTimeout):
        harness.acquire("a", wait=0.2)
    assert waiters(backend, "a") == []
    theirs.release()


def test_foreign_and_our_sections_never_overlap(client: redis.Redis, backend: RedisBackend) -> None:
    inside: list[int] = []
    overlaps: list[bool] = []

    def section() -> None:
        inside.append(1)
        threading.Event().wait(0.001)
        overlaps.append(len(inside) != 1)
        inside.pop()

    def ours() -> None:
        for _ in range(20):
            with Lock(backend, "a", wait=None):
                section()

    def theirs() -> None:
        for _ in range(20):
            with client.lock(backend.lock_key("a"), timeout=30, sleep=0.002):
                section()

    threads = [threading.Thread(target=work) for work in (ours, theirs, ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 80
    assert not any(overlaps)


@pytest.mark.parametrize("value", [b"a|b|c|d", b"aa|12|yesterday|me", b"\xff\xfe", b"\x1b[31m|1|2|"])
def test_value_of_another_program_is_shown_and_hides_no_other_lock(
    harness: Harness, client: redis.Redis, backend: RedisBackend, prefix: str, value: bytes
) -> None:
    client.set(backend.lock_key("a"), value)
    held = f"{prefix}locks"
    client.sadd(held, backend.lock_key("a"), b"\xff\xfe")
    lease = harness.acquire("b")
    try:
        found = {state.name: state.holders for state in run(backend.inspect(BLOCKING))}
        assert [holder.owner for holder in found["a"]] == ["a client that is not dlock"]
        assert [holder.token for holder in found["b"]] == [lease.token]
    finally:
        client.delete(backend.lock_key("a"))
        client.srem(held, backend.lock_key("a"), b"\xff\xfe")


@pytest.mark.parametrize("score", [1e300, math.inf])
def test_expiry_that_is_no_time_hides_no_lock(client: redis.Redis, backend: RedisBackend, score: float) -> None:
    with Lock(backend, "a", shared=True), Lock(backend, "b"):
        client.zadd(f"{backend.lock_key('a')}:s", {"stranger": score})
        assert {state.name for state in run(backend.inspect(BLOCKING))} == {"a", "b"}
        assert len(holders(backend, "a")) == 2
        client.zrem(f"{backend.lock_key('a')}:s", "stranger")
