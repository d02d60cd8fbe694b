"""Connections are kept, checked, closed with their loop, and never shared."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from dlock_core import AcquireTimeout, AsyncLock, Lock
from dlock_core.backend import Busy
from dlock_core.backends.idle import MAX_IDLE_S
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing.contract.observed import WITHIN
from tests.garbage import collect_garbage
from tests.proxy import Proxy
from tests.servers import Server
from tests.waiting import until


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_lock_and_unlock_are_two_requests_over_one_connection(backend: RedisBackend, proxy: Proxy) -> None:
    with Lock(backend, "a"):
        pass
    before = proxy.requests
    for _ in range(10):
        with Lock(backend, "a"):
            pass
    assert proxy.requests == before + 20


def test_ended_event_loops_leave_no_connection_and_no_warning(direct: RedisBackend) -> None:
    async def main() -> None:
        await asyncio.gather(*[use(number) for number in range(5)])

    async def use(number: int) -> None:
        async with AsyncLock(direct, f"a:{number}"):
            await asyncio.sleep(0)

    asyncio.run(main())
    before = descriptors()
    for _ in range(10):
        asyncio.run(main())
    collect_garbage()
    until(lambda: descriptors() <= before)  # Threads of earlier tests may have opened some in the meantime.


def test_loop_that_was_only_closed_is_forgotten_by_the_next(direct: RedisBackend) -> None:
    async def main() -> None:
        async with AsyncLock(direct, "a"):
            pass

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    direct._asyncio._idle._pools[loop][0].clear()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(main())
    assert loop not in direct._asyncio._idle._pools


def test_closing_the_store_closes_what_is_idle_and_it_can_be_used_again(direct: RedisBackend) -> None:
    with Lock(direct, "a"):
        pass
    before = descriptors()
    direct.close()
    assert descriptors() < before
    with Lock(direct, "a"):
        pass


async def test_closing_the_store_closes_what_is_idle_in_a_running_loop(direct: RedisBackend) -> None:
    async with AsyncLock(direct, "a"):
        pass
    before = descriptors()
    direct.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert descriptors() < before


def test_connection_that_was_idle_for_long_is_looked_at(
    backend: RedisBackend, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closes idle connections therefore causes no failed request."""
    monkeypatch.setattr(backend._blocking._idle, "_trusted_s", 0.0)
    Lock(backend, "a").acquire().release()
    proxy.cut()
    threading.Event().wait(0.05)
    assert run(backend.inspect(BLOCKING, "a"))[0].holders == ()


def test_threads_share_a_store_and_no_connection(direct: RedisBackend) -> None:
    failures: list[BaseException] = []
    together = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            together.wait(WITHIN)
            for turn in range(60):
                with Lock(direct, f"a:{number if turn % 2 else 'all'}", wait=None):
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_idle_connections_are_kept_up_to_a_limit(direct: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = direct._blocking
    monkeypatch.setattr(wire._idle, "_size", 3)
    for one in [wire.checkout() for _ in range(6)]:
        wire.checkin(one)
    assert len(wire._idle._idle) == 3


def test_child_of_a_fork_makes_connections_of_its_own(direct: RedisBackend) -> None:
    Lock(direct, "a").acquire().release()
    (kept,) = [connection for connection, _ in direct._blocking._idle._idle]
    if (child := os.fork()) == 0:
        os._exit(0 if direct._blocking.checkout() is not kept and kept._sock is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert direct._blocking.checkout() is kept
    Lock(direct, "a").acquire().release()
    kept.disconnect()


def test_wait_of_a_millisecond_ends(any_redis: Server) -> None:
    """A longer wait ends with one so short; Redis 6.2 never wakes if it is asked to sleep for 0.001 s."""
    store = RedisBackend.from_url(any_redis.url, prefix="short:")
    with Lock(store, "a"):
        request = new_request("a", LockOptions(30.0, 1.0))
        busy = run(store.try_acquire(BLOCKING, request))
        assert isinstance(busy, Busy)
        for seconds in (0.0, 0.0001, 0.001, 0.0014, 0.003):
            assert run(store.wait(BLOCKING, request, busy, seconds)) is None
        run(store.abandon(BLOCKING, request))


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_wait_ends_on_time_although_redis_looks_at_its_timers_only_once_a_second(redis_62: Server, kind: str) -> None:
    """Without our reminder, waits of 20 ms would last until Redis looks. On a busy machine it may arrive too early."""
    store = RedisBackend.from_url(redis_62.url, prefix="late:", timeout=WITHIN)
    with redis.Redis.from_url(redis_62.url) as client:
        before = client.config_get("hz")["hz"]
        client.config_set("hz", "1")
        try:
            with Lock(store, "a"), ThreadPoolExecutor(1) as elsewhere:
                until(
                    lambda: sum(elsewhere.submit(wait_in_vain, store, kind).result(WITHIN) < 0.5 for _ in range(5)) >= 4
                )
        finally:
            client.config_set("hz", before)


def wait_in_vain(store: RedisBackend, kind: str) -> float:
    """Wait for a held lock, and return the seconds until the timeout."""
    began = clock()
    with pytest.raises(AcquireTimeout):
        if kind == "threads":
            Lock(store, "a", wait=0.02).acquire()
        else:
            asyncio.run(_await_in_vain(store))
    return clock() - began


async def _await_in_vain(store: RedisBackend) -> None:
    await AsyncLock(store, "a", wait=0.02).acquire()


def test_connection_is_of_use_after_a_wait_that_ended_on_time(direct: RedisBackend) -> None:
    with ThreadPoolExecutor(1) as elsewhere:
        lease = elsewhere.submit(Lock(direct, "a").acquire).result(WITHIN)
        for _ in range(3):
            with pytest.raises(AcquireTimeout):
                Lock(direct, "a", wait=0.03).acquire()
        assert direct._blocking._idle._idle  # type: ignore[attr-defined]
        lease.release()
    Lock(direct, "a", wait=0).acquire().release()


def test_connections_of_a_burst_are_closed_when_they_were_idle_for_a_minute(direct: RedisBackend) -> None:
    """Light traffic reuses the same connection, and the others are closed."""
    wire = direct._blocking
    burst = [wire.checkout() for _ in range(10)]
    for connection in burst:
        connection.connect()
        wire.checkin(connection)
    idle = wire._idle._idle
    for index, (connection, since) in enumerate([*idle][:-2]):
        idle[index] = connection, since - MAX_IDLE_S
    Lock(direct, "a").acquire().release()
    assert [connection._sock is None for connection in burst] == [True] * 8 + [False] * 2
    assert [connection for connection, _ in idle] == burst[-2:]  # type: ignore[attr-defined]
