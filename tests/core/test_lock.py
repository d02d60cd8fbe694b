"""Lock and its leases: who is the same caller, and what a `with` block does at its end."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dlock_core import AlreadyHeld, AsyncLock, BackendUnavailable, LeaseLost, Lock, Released
from dlock_core.testing import MemoryBackend


@pytest.fixture
def store() -> MemoryBackend:
    return MemoryBackend()


def in_thread(step: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(step()))
    thread.start()
    thread.join()
    return results[0]


def test_thread_that_got_the_number_of_an_ended_one_is_another_caller(store: MemoryBackend) -> None:
    numbers = set()
    for _ in range(20):
        numbers.add(in_thread(threading.get_ident))
    leases = [in_thread(Lock(store, "a", shared=True).acquire) for _ in range(20)]
    assert len(numbers) < 20, "the system gave no number twice: nothing was tested"
    assert len({lease.holder for lease in leases}) == 20
    for lease in leases:
        lease.release()


def test_blocks_of_one_lock_object_in_many_threads_do_not_mix(store: MemoryBackend) -> None:
    lock, together = Lock(store, "a", shared=True), threading.Barrier(5)

    def work() -> bool:
        with lock as lease:
            together.wait(30)
            return lease.remaining() > 0

    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 5


def test_lease_of_a_task_that_returned_it_can_be_thrown_away(store: MemoryBackend) -> None:
    async def main() -> None:
        lease = await asyncio.wait_for(AsyncLock(store, "a").acquire(), 10)
        with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031
            del lease
            gc.collect()

    asyncio.run(main())


def test_lease_that_was_released_or_lost_is_thrown_away_in_silence(store: MemoryBackend) -> None:
    Lock(store, "a").acquire().release()
    lost = Lock(store, "b").acquire()
    lost._held.lose("a test")
    del lost
    gc.collect()


def test_same_task_may_hold_locks_of_other_names_and_stores(store: MemoryBackend) -> None:
    with Lock(store, "a"), Lock(store, "b"), Lock(MemoryBackend(), "a"), pytest.raises(AlreadyHeld):
        Lock(store, "a").acquire()


def test_joined_lease_that_is_lost_is_asked_for_anew(store: MemoryBackend) -> None:
    outer = Lock(store, "a").acquire()
    outer._held.lose("a test")
    store._states.clear()
    inner = Lock(store, "a", reentrant=True).acquire()
    assert inner.token > outer.token
    inner.release()
    outer.release()


class Broken(MemoryBackend):
    async def release(self, *args: Any) -> Any:
        raise BackendUnavailable("a", reason="the network is gone")


def test_block_whose_release_failed_is_logged_and_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dlock"), Lock(Broken(), "a"):
        pass
    assert "the network is gone" in caplog.text


def test_block_tells_the_error_of_its_body_and_not_of_its_release() -> None:
    with pytest.raises(ZeroDivisionError), Lock(Broken(), "a"):
        raise ZeroDivisionError


def test_lease_whose_release_failed_can_be_released_again(store: MemoryBackend) -> None:
    lease = Lock(Broken(), "a").acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    lease._held.backend = store
    assert lease.release() is Released.RELEASED


def test_clean_block_whose_lease_was_taken_away_is_an_error(store: MemoryBackend) -> None:
    with pytest.raises(LeaseLost, match="expired at release"), Lock(store, "a"):
        store._states.clear()


def test_ttl_is_rounded_up_to_what_the_store_can_do(store: MemoryBackend) -> None:
    class Coarse(MemoryBackend):
        ttl_min, ttl_step = 2.0, 1.0

    assert [Lock(Coarse(), "a", ttl=ttl).ttl for ttl in (0.1, 2.0, 2.1, 30)] == [2.0, 2.0, 3.0, 30.0]
    assert Lock(store, "a", ttl=0.0001).ttl == 0.001


def test_one_lock_object_may_be_entered_by_many_tasks(store: MemoryBackend) -> None:
    async def work(lock: AsyncLock, seen: list[str]) -> None:
        async with lock as lease:
            seen.append(lease.holder)
            await asyncio.sleep(0)
            assert seen[-1] == lease.holder

    async def main() -> None:
        lock, seen = AsyncLock(store, "a", wait=None), list[str]()
        await asyncio.gather(*[work(lock, seen) for _ in range(10)])
        assert len(set(seen)) == 10

    asyncio.run(main())


def test_lease_and_lock_are_shown_by_name_without_their_owner(store: MemoryBackend) -> None:
    with Lock(store, "order:42") as lease:
        assert repr(lease).startswith(f"<Lease 'order:42' token={lease.token} remaining=")
    assert repr(Lock(store, "order:42")) == "<Lock 'order:42'>"


def test_block_may_end_in_another_thread_than_it_began(store: MemoryBackend) -> None:
    blocks = contextlib.ExitStack()
    in_thread(lambda: blocks.enter_context(Lock(store, "a")))
    in_thread(blocks.close)
    assert Lock(store, "a").try_acquire().release() is Released.RELEASED  # type: ignore[union-attr]
