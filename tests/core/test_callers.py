"""Who counts as the caller that holds a lock: a thread in the context in which it acquired, or in a copy of that context."""

import asyncio
import contextvars
import signal
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dlock_core import AcquireTimeout, AlreadyHeld, Lock, MultiLock
from dlock_core.leases import callers
from dlock_core.testing import MemoryBackend
from tests.garbage import collect_garbage


@pytest.fixture
def store() -> MemoryBackend:
    return MemoryBackend()


def in_one_pool_thread(steps: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine whose `asyncio.to_thread` always uses the same thread."""

    async def main() -> Any:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await steps()

    return asyncio.run(main())


KINDS: Any = pytest.mark.parametrize(
    "make",
    [
        lambda store: Lock(store, "order:1", wait=0),
        lambda store: Lock(store, "order:1", wait=0, reentrant=True),
        lambda store: MultiLock(store, ["order:1"], wait=0),
    ],
    ids=["Lock", "reentrant", "MultiLock"],
)


@KINDS
def test_another_call_in_a_thread_of_a_pool_is_another_holder(store: MemoryBackend, make: Any) -> None:
    async def requests() -> None:
        lease = await asyncio.to_thread(make(store).acquire)
        with pytest.raises(AcquireTimeout):
            await asyncio.to_thread(make(store).acquire)
        await asyncio.to_thread(lease.release)
        await asyncio.to_thread((await asyncio.to_thread(make(store).acquire)).release)

    in_one_pool_thread(requests)


def test_requests_whose_thread_holds_a_lock_of_its_own_are_still_apart(store: MemoryBackend) -> None:
    """Their contexts are copies of the thread's, and carry what it has acquired."""
    lock, leader = Lock(store, "order:1", wait=0, reentrant=True), Lock(store, "leader")
    with leader:
        one, two = contextvars.copy_context(), contextvars.copy_context()
        lease = one.run(lock.acquire)
        with pytest.raises(AcquireTimeout):
            two.run(lock.acquire)
        for request in (one, two):
            with pytest.raises(AlreadyHeld):
                request.run(leader.acquire)
        lease.release()


async def test_tasks_that_try_a_blocking_lock_in_one_thread_are_apart(store: MemoryBackend) -> None:
    async def work() -> Any:
        return Lock(store, "order:1", reentrant=True).try_acquire()

    first, second = await asyncio.gather(work(), work())
    assert second is None
    first.release()


def test_copy_of_the_context_in_the_same_thread_is_the_same_caller(store: MemoryBackend) -> None:
    lock, joining = Lock(store, "a"), Lock(store, "a", reentrant=True)
    with lock as outer:
        with pytest.raises(AlreadyHeld):
            contextvars.copy_context().run(lock.acquire)
        inner = contextvars.copy_context().run(joining.acquire)
        assert inner.holder == outer.holder
        inner.release()


def test_copy_of_the_context_in_another_thread_is_another_caller(store: MemoryBackend) -> None:
    lock = Lock(store, "a", wait=0, reentrant=True)
    with lock, ThreadPoolExecutor(1) as pool, pytest.raises(AcquireTimeout):
        pool.submit(contextvars.copy_context().run, lock.acquire).result(30)


def test_signal_handler_that_requests_the_lock_of_its_thread_is_the_same_caller(store: MemoryBackend) -> None:
    lock, heard = Lock(store, "a"), []

    def handle(*_: object) -> None:
        with pytest.raises(AlreadyHeld):
            lock.acquire()
        heard.append(True)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard


def test_each_of_many_locks_that_a_thread_holds_is_refused_a_second_time(store: MemoryBackend) -> None:
    held = [Lock(store, f"many:{number}", wait=0).acquire() for number in range(300)]
    for lease in held[::2]:
        lease.release()
    held[::2] = [Lock(store, f"many:{number}", wait=0).acquire() for number in range(0, 300, 2)]
    for number, lease in enumerate(held):
        with pytest.raises(AlreadyHeld):
            Lock(store, f"many:{number}", wait=0).acquire()
        lease.release()


def test_context_keeps_no_lease_alive_and_does_not_grow(store: MemoryBackend) -> None:
    def acquire_hand_over_hand() -> None:  # There is always a newer lease when one is released.
        first = Lock(store, "a").acquire()
        record = weakref.ref(first._held)
        first.release()
        for number in range(500):
            first, before = Lock(store, f"hand:{number}").acquire(), first
            before.release()
        first.release()
        del first, before
        collect_garbage()
        assert record() is None
        assert len([*callers.acquired_here()]) < 100

    contextvars.Context().run(acquire_hand_over_hand)  # Earlier tests may have left a long chain in this one.
