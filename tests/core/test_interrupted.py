"""At whatever moment a signal handler raises, no lease stays behind, and no caller is locked out."""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from dlock_core import AcquireTimeout, AsyncLock, AsyncMultiLock, Lock, MultiLock
from dlock_core.backend import Released
from dlock_core.leases.handles import Lease
from dlock_core.leases.watchdog import _watchdogs
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import MemoryBackend
from tests.moments import FOR_EVER, UNGUARDED, Interrupt, Interrupted, is_ours

pytestmark = [
    pytest.mark.usefixtures("garbage_is_collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def block(store: MemoryBackend) -> None:
    with Lock(store, "a"):
        pass


def acquire(store: MemoryBackend) -> None:
    Lock(store, "a").acquire().release()


def try_acquire(store: MemoryBackend) -> None:
    lease = Lock(store, "a").try_acquire()
    assert lease is not None
    lease.release()


def join(store: MemoryBackend) -> None:
    with Lock(store, "a"), Lock(store, "a", reentrant=True):
        pass


def many(store: MemoryBackend) -> None:
    with MultiLock(store, ["a", "b"]):
        pass


def join_many(store: MemoryBackend) -> None:
    with MultiLock(store, ["a", "b"]), Lock(store, "a", reentrant=True):
        pass


def acquire_many(store: MemoryBackend) -> None:
    MultiLock(store, ["a", "b"]).acquire().release()


def renew(store: MemoryBackend) -> None:
    with Lock(store, "a") as lease:
        lease.renew(60)


async def ablock(store: MemoryBackend) -> None:
    async with AsyncLock(store, "a"):
        pass


async def aacquire(store: MemoryBackend) -> None:
    await (await AsyncLock(store, "a").acquire()).release()


async def aacquire_many(store: MemoryBackend) -> None:
    await (await AsyncMultiLock(store, ["a", "b"]).acquire()).release()


async def ajoin(store: MemoryBackend) -> None:
    async with AsyncLock(store, "a"), AsyncLock(store, "a", reentrant=True):
        pass


async def amany(store: MemoryBackend) -> None:
    async with AsyncMultiLock(store, ["a", "b"]):
        pass


async def ajoin_many(store: MemoryBackend) -> None:
    async with AsyncMultiLock(store, ["a", "b"]), AsyncLock(store, "a", reentrant=True):
        pass


def interrupted(step: Callable[[MemoryBackend], None], store: MemoryBackend, moment: int) -> Interrupt:
    with Interrupt(moment) as interrupt:
        step(store)
    return interrupt


@pytest.mark.parametrize(
    "step", [block, acquire, try_acquire, join, many, join_many, acquire_many, renew], ids=lambda step: step.__name__
)
def test_operation_that_is_interrupted_at_any_moment_leaves_nothing_behind(
    step: Callable[[MemoryBackend], None],
) -> None:
    store, unguarded, moments = MemoryBackend(), set[str](), 0
    step(store)
    for moment in range(1, FOR_EVER):
        interrupt = interrupted(step, store, moment)
        if interrupt.left > 0:
            break
        moments += 1
        if interrupt.where in UNGUARDED:
            unguarded.add(interrupt.where)
            store = MemoryBackend()
            step(store)
            continue
        assert run(store.inspect(BLOCKING)) == [], (moment, interrupt.where)
    assert moments > 50
    assert unguarded <= UNGUARDED
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(step(store) is None), daemon=True)
    thread.start()
    thread.join(10)
    assert elsewhere == [True]


def test_acquire_of_several_that_fails_leaves_nothing_behind_whenever_it_is_interrupted() -> None:
    """Three locks are granted before the fourth turns out to be taken."""
    store = MemoryBackend()
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(Lock(store, "d").acquire).result()
        for moment in range(1, FOR_EVER):
            with Interrupt(moment) as interrupt, suppress(AcquireTimeout):
                MultiLock(store, [*"abcd"], wait=0).acquire()
            assert [state.name for state in run(store.inspect(BLOCKING))] == ["d"], (moment, interrupt.where)
            if interrupt.left > 0:
                break
    assert moment > 200


def test_lease_stays_renewed_when_its_renewal_is_interrupted_at_any_moment() -> None:
    store = MemoryBackend()
    for moment in range(1, FOR_EVER):
        with Lock(store, "a", ttl=30) as lease:
            interrupt = interrupted(lambda _, lease=lease: lease.renew(60), store, moment)  # type: ignore[misc]
            dog = _watchdogs[store]
            due = [tick for tick, bucket in dog._due.items() if lease.holder in bucket]
            assert any(dog._is_due(lease._held, tick) for tick in due), (moment, interrupt.where)
        if interrupt.left > 0:
            break
    assert moment > 20


def finalizer_interrupted(frame: FrameType, event: str, argument: object) -> None:
    """A signal handler that raises before the first line of a handle's finalizer."""
    if event == "call" and frame.f_code.co_name == "__del__" and is_ours(frame):
        raise Interrupted


def throw_away(handles: list[Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the last handle; pytest's own hook would keep it, with the traceback of what its finalizer raised."""
    raised: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda found: raised.append(found.exc_type))
        sys.setprofile(finalizer_interrupted)
        try:
            handles.pop()
        finally:
            sys.setprofile(None)
    assert raised == [Interrupted]


def test_handle_that_joined_a_lease_does_not_keep_it_when_its_finalizer_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryBackend()
    lock = Lock(store, "a", reentrant=True)
    first, joined = lock.acquire(), [lock.acquire()]
    throw_away(joined, monkeypatch)
    assert first.release() is Released.RELEASED
    assert run(store.inspect(BLOCKING)) == []


def test_lease_is_renewed_no_longer_than_a_handle_of_it_exists_when_a_finalizer_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryBackend()
    lock = Lock(store, "a", reentrant=True)
    handles = [lock.acquire(), lock.acquire()]
    held = ref(handles[0]._held)
    handles.reverse()
    throw_away(handles, monkeypatch)
    handles.pop().release()
    assert held() is None


@pytest.mark.parametrize(
    "step", [ablock, aacquire, aacquire_many, ajoin, ajoin_many, amany], ids=lambda step: step.__name__
)
def test_coroutine_that_is_interrupted_at_any_moment_leaves_nothing_behind(step: Any) -> None:
    async def main() -> None:
        store, moments = MemoryBackend(), 0
        for moment in range(1, FOR_EVER):
            with Interrupt(moment) as interrupt:
                await step(store)
            if interrupt.left > 0:
                break
            moments += 1
            if interrupt.where in UNGUARDED:
                store = MemoryBackend()
                continue
            assert run(store.inspect(BLOCKING)) == [], (moment, interrupt.where)
        assert moments > 50

    asyncio.run(main())


def test_lease_whose_making_was_interrupted_is_thrown_away_in_silence(recwarn: pytest.WarningsRecorder) -> None:
    Lease.__new__(Lease).__del__()
    assert not recwarn.list
