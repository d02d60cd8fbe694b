"""Connections: kept, looked at, closed with their loop, and never shared."""

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from dlock_core import AsyncLock, Lock
from dlock_core.backends.redis import RedisBackend, connections
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.observed import WITHIN
from tests.proxy import Proxy


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
    gc.collect()
    assert descriptors() <= before


def test_loop_that_was_only_closed_is_forgotten_by_the_next(direct: RedisBackend) -> None:
    async def main() -> None:
        async with AsyncLock(direct, "a"):
            pass

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    direct._asyncio._loops[loop].clear()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(main())
    assert loop not in direct._asyncio._loops


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
    """So that a server which closes idle connections costs no failed request at all."""
    monkeypatch.setattr(connections, "TRUSTED", 0.0)
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
    monkeypatch.setattr(connections, "IDLE_KEPT", 3)
    wire = direct._blocking
    for one in [wire.checkout() for _ in range(6)]:
        wire.checkin(one)
    assert len(wire._free) == 3


def test_child_of_a_fork_makes_connections_of_its_own(direct: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    Lock(direct, "a").acquire().release()
    kept = list(direct._blocking._free)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    mine = direct._blocking.checkout()
    assert mine not in kept
    monkeypatch.undo()
    for one in kept:
        one.disconnect()
