"""Lock and its leases: who is the same caller, and what a `with` block does at its end."""

import asyncio
import contextlib
import contextvars
import copy
import gc
import logging
import pickle
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from dlock_core import (
    AcquireTimeout,
    AlreadyHeld,
    AsyncLock,
    AsyncMultiLock,
    BackendUnavailable,
    LeaseLost,
    Lock,
    MultiLock,
    NotSupported,
    Released,
)
from dlock_core.backend import AcquireRequest, Capabilities
from dlock_core.leases import blocks as blocks_module
from dlock_core.leases.callers import held_names
from dlock_core.leases.lease import LeaseRecord, Membership
from dlock_core.stores import Store
from dlock_core.testing import MemoryBackend
from tests.garbage import collect_garbage
from tests.waiting import auntil


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


def test_option_that_is_assigned_to_a_lock_holds_for_its_next_acquire(store: MemoryBackend) -> None:
    lock, several = Lock(store, "a", wait=None), MultiLock(store, ["b", "c"], wait=None)
    lock.wait, lock.ttl, several.wait, several.ttl = 0, 500.0, 0, 500.0
    with lock as lease, several as leases:
        assert lease.remaining() > 400
        assert leases.remaining() > 400
        for taken in (lock, several):
            with ThreadPoolExecutor() as threads, pytest.raises(AcquireTimeout):
                threads.submit(taken.acquire).result(30)


def test_lease_that_another_thread_releases_while_it_is_joined_is_acquired_anew(
    store: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, join = Lock(store, "a", reentrant=True), LeaseRecord.join
    released = [lock.acquire()]

    def join_late(record: LeaseRecord, membership: Membership) -> None:
        if released[0].remaining():
            in_thread(released[0].release)
        join(record, membership)

    monkeypatch.setattr(LeaseRecord, "join", join_late)
    with lock as lease:
        assert lease.remaining() > 0
        assert lease.token > released[0].token


def test_lease_whose_last_handle_has_left_is_joined_no_more(store: MemoryBackend) -> None:
    """Its release is about to be sent, perhaps by another thread."""
    lease = Lock(store, "a").acquire()
    record = lease._held
    assert record.leave(None)
    assert not record.is_joinable()
    lease.release()


@pytest.mark.parametrize("how", ["released", "thrown away"])
def test_lease_that_its_first_handle_has_left_is_joined_while_another_holds_it(store: MemoryBackend, how: str) -> None:
    lock = Lock(store, "a", reentrant=True, wait=0)
    handles = [lock.acquire(), lock.acquire()]
    if how == "released":
        handles.pop(0).release()
    else:
        with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031
            del handles[0]
            collect_garbage()
    with lock as third:
        assert third.token == handles[0].token
    handles[0].release()


def test_lease_that_is_joined_while_its_last_handle_leaves_is_not_released(store: MemoryBackend) -> None:
    first = Lock(store, "a").acquire()
    record, membership = first._held, Membership()

    class JoinedAfterTheFirstLook(list[Any]):
        looks = 0

        def __len__(self) -> int:
            found, self.looks = super().__len__(), self.looks + 1
            if self.looks == 1:
                record.join(membership)
            return found

    record._memberships = JoinedAfterTheFirstLook()
    assert not record.leave(None)
    assert record.is_joinable()
    assert record.leave(membership)
    first.release()


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
            collect_garbage()

    asyncio.run(main())


class Unreachable(MemoryBackend):
    async def try_acquire(self, _: Any, request: AcquireRequest, *__: Any, **___: Any) -> Any:
        raise BackendUnavailable(request.name, reason="nobody is there")


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_store_that_could_not_be_reached_is_not_kept_until_a_garbage_collection(
    wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dlock"), "disabled", True)  # pytest keeps what is logged
    store = Unreachable()
    known = ref(store)
    gc.disable()
    try:
        with pytest.raises(BackendUnavailable):
            Lock(store, "a", wait=wait).acquire()
        del store
        assert known() is None
    finally:
        gc.enable()


def test_lease_that_only_a_cycle_keeps_is_missed_when_the_cycle_is_collected(store: MemoryBackend) -> None:
    """The collector clears the weak references to the lease before its finalizer runs."""
    cycle: list[Any] = [Lock(store, "a").acquire()]
    cycle.append(cycle)
    with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031
        del cycle
        collect_garbage()
    assert "a" not in held_names()


@pytest.mark.parametrize("kind", [partial(Lock, name="a"), partial(MultiLock, names=["a", "b"])])
def test_block_of_what_acquire_returned_is_refused_and_leaves_no_lease(store: MemoryBackend, kind: Any) -> None:
    with pytest.raises(TypeError, match="`with` with the lock itself"), kind(store).acquire():
        pass
    Lock(store, "a", wait=0).acquire().release()


@pytest.mark.parametrize("kind", [partial(AsyncLock, name="a"), partial(AsyncMultiLock, names=["a", "b"])])
async def test_block_of_what_a_task_acquired_is_refused_and_leaves_no_lease(store: MemoryBackend, kind: Any) -> None:
    with pytest.raises(TypeError, match="`async with` with the lock itself"):
        async with await kind(store).acquire():
            pass
    await (await AsyncLock(store, "a", wait=0).acquire()).release()


def test_lease_of_a_thread_that_has_ended_can_be_released_again_when_its_store_is_back(store: MemoryBackend) -> None:
    lease = in_thread(Lock(store, "a").acquire)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "release", unreachable)
        with pytest.raises(BackendUnavailable):
            lease.release()
    with Lock(store, "b"), Lock(MemoryBackend(), "b"):
        collect_garbage()
        assert lease.release() is Released.RELEASED


async def unreachable(*question: object) -> Any:
    raise BackendUnavailable("a", reason="it is away")


def test_lease_that_was_released_or_lost_is_thrown_away_in_silence(store: MemoryBackend) -> None:
    Lock(store, "a").acquire().release()
    lost = Lock(store, "b").acquire()
    lost._held.lose("a test")
    del lost
    collect_garbage()


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


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
def test_block_whose_release_failed_is_logged_and_not_an_error(
    kind: Any, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dlock"), kind(Broken(), name):
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
        capabilities = Capabilities(ttl_min=2.0, ttl_step=1.0)

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


doubtful = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*was never released:ResourceWarning"
)
"""A lease that could not be identified for certain is thrown away, and warns."""


class Half:
    """A block whose halves are called from two functions, so that only the thread tells whose it is."""

    def __init__(self, lock: Any) -> None:
        self._stack, self._lock = contextlib.ExitStack(), lock

    def begin(self) -> Any:
        return self._stack.enter_context(self._lock)

    def end(self) -> None:
        self._stack.close()


@pytest.mark.parametrize("begin", [lambda lock: lock.__enter__(), lambda lock: Half(lock).begin()])
def test_block_that_is_forgotten_is_not_renewed(store: MemoryBackend, begin: Any) -> None:
    """Nothing that the block keeps leads back to its lock, not even before the garbage is collected."""

    def forget() -> str:
        lock = Lock(store, "a")
        return str(begin(lock).name)

    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="never released"):
            assert forget() == "a"
        assert held_names() == set()
    finally:
        gc.enable()


def test_block_that_was_begun_by_a_generator_expression_ends_with_its_own_lease(store: MemoryBackend) -> None:
    """The other block is in a generator, which may go on although the thread that began it has ended."""
    lock = Lock(store, "a", shared=True)
    reading = generator(lock)
    with ThreadPoolExecutor(1) as other:
        live = other.submit(next, reading).result(30)
    with contextlib.ExitStack() as stack:
        (lease,) = tuple(stack.enter_context(each) for each in [lock])
    live.ensure_held()
    assert lease.remaining() == 0.0
    reading.close()
    assert held_names() == set()


def test_blocks_of_one_thread_that_end_outside_their_generators_release_the_lock(store: MemoryBackend) -> None:
    lock, stacks = Lock(store, "a", reentrant=True), list[contextlib.ExitStack]()

    def fixture() -> Generator[None, None, None]:
        stacks.append(contextlib.ExitStack())
        stacks[-1].enter_context(lock)
        yield

    for each in [fixture(), fixture()]:
        next(each)
    while stacks:
        stacks.pop().close()
    assert held_names() == set()


class Stay:
    """A thread that stays alive and runs the steps that it is given."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)

    def __call__(self, step: Callable[[], Any]) -> Any:
        return self._executor.submit(step).result(30)


def generator(lock: Any) -> Generator[Any, None, None]:
    with lock as lease:
        yield lease


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
def test_block_of_a_generator_ends_with_its_own_lease_in_whatever_thread(
    store: MemoryBackend, kind: Any, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As FastAPI runs the two halves of a dependency."""
    lock, threads = kind(store, name, shared=True), [Stay(), Stay()]
    blocks = [generator(lock) for _ in range(4)]

    def half(number: int, thread: Stay) -> Any:
        return thread(partial(contextvars.copy_context().run, next, blocks[number], None))

    leases = [half(number, threads[number % 2]) for number in range(4)]
    for number in (2, 0, 3, 1):
        leases[number].ensure_held()
        half(number, threads[number // 2])
        assert leases[number].remaining() == 0
    assert not lock._blocks
    assert not caplog.text


def test_block_of_a_lost_lease_does_not_end_the_lease_of_the_next_holder(store: MemoryBackend) -> None:
    lock, first, second = Lock(store, "a"), Stay(), Stay()
    overtaken, current = generator(lock), generator(lock)
    first(lambda: next(overtaken))
    store._states.clear()
    lease = second(lambda: next(current))
    with pytest.raises(LeaseLost):
        second(lambda: next(overtaken, None))
    lease.ensure_held()
    first(lambda: next(current, None))
    assert lease._held.ended is Released.RELEASED


def test_generator_that_is_thrown_away_in_its_block_releases_the_lease(store: MemoryBackend) -> None:
    lock, block = Lock(store, "a"), [generator(Lock(store, "a"))]
    in_thread(lambda: next(block[0]))
    block.clear()
    collect_garbage()
    assert lock.acquire().release() is Released.RELEASED


@doubtful
@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
def test_block_that_ends_in_another_thread_never_takes_the_lease_of_a_live_caller(
    store: MemoryBackend, kind: Any, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lock = kind(store, name, ttl=30, shared=True)
    first, second, third = Stay(), Stay(), Stay()
    moved, other = Half(lock), Half(lock)
    first(moved.begin)
    lease = second(other.begin)
    with caplog.at_level(logging.WARNING, logger="dlock"):
        third(moved.end)  # Both callers live, so it is unclear whose block has ended.
    assert "it is unknown which" in caplog.text
    lease.ensure_held()
    second(other.end)  # Its own block ends with its own lease ...
    assert not lock._blocks  # ... so the other one must be over, too, and nothing keeps it alive.


def test_block_that_ends_in_another_thread_takes_the_only_lease_there_is(store: MemoryBackend) -> None:
    lock, first, second = Lock(store, "a"), Stay(), Stay()
    moved = Half(lock)
    first(moved.begin)
    second(moved.end)
    assert first(lock.try_acquire).release() is Released.RELEASED


def test_thread_that_looks_ended_to_python_still_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that raises in `Thread.is_alive` makes it return False from then on (CPython before 3.13)."""
    ended = threading.Thread(target=bool)
    ended.start()
    ended.join()
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _: False)
    assert not blocks_module._has_ended(threading.main_thread())
    assert blocks_module._has_ended(ended)


def test_block_that_ends_in_another_thread_takes_the_lease_of_the_thread_that_has_ended(store: MemoryBackend) -> None:
    lock, alive = Lock(store, "a", shared=True), Stay()
    moved, other = Half(lock), Half(lock)
    abandoned = in_thread(moved.begin)
    lease = alive(other.begin)
    in_thread(moved.end)
    assert abandoned._held.ended is Released.RELEASED
    lease.ensure_held()
    alive(other.end)
    assert lease._held.ended is Released.RELEASED


@doubtful
def test_callers_whose_threads_have_both_ended_are_not_confused(store: MemoryBackend) -> None:
    lock = Lock(store, "a", shared=True)
    one, two = Half(lock), Half(lock)
    leases = [in_thread(one.begin), in_thread(two.begin)]
    in_thread(one.end)
    assert [lease._held.ended for lease in leases] == [None, None]
    in_thread(two.end)
    assert not lock._blocks
    later, alive = Half(lock), Stay()
    lease = alive(later.begin)
    in_thread(later.end)  # It is certain again: this lease is the only one.
    assert lease._held.ended is Released.RELEASED


@doubtful
def test_block_that_ends_in_another_task_never_takes_the_lease_of_a_live_task(store: MemoryBackend) -> None:
    async def main() -> None:
        lock = AsyncLock(store, "report", shared=True)
        ended, told = asyncio.Event(), []

        first = contextlib.AsyncExitStack()
        await first.enter_async_context(lock)  # In this task, which goes on.

        async def second() -> None:
            async with lock as lease:
                told.append(lease)
                await ended.wait()
                lease.ensure_held()

        task = asyncio.ensure_future(second())
        await auntil(lambda: told)
        await asyncio.create_task(
            first.aclose()
        )  # In a third task, as a server ends a response that is no longer read.
        ended.set()
        await task
        assert not lock._blocks

    asyncio.run(main())


async def _end(stream: AsyncGenerator[Any, None]) -> None:
    with contextlib.suppress(StopAsyncIteration):
        await anext(stream)


def test_streams_that_servers_end_in_tasks_of_their_own_release_their_leases(store: MemoryBackend) -> None:
    async def main() -> None:
        lock = AsyncLock(store, "report", shared=True)

        async def stream() -> AsyncGenerator[Any, None]:
            async with lock as lease:
                yield lease

        streams = [stream() for _ in range(3)]
        leases = [await asyncio.create_task(anext(each)) for each in streams]  # type: ignore[arg-type]
        for each, lease in [*zip(streams, leases, strict=True)][::-1]:
            lease.ensure_held()
            await asyncio.create_task(_end(each))
            assert lease._held.ended is Released.RELEASED
        assert not lock._blocks

    asyncio.run(main())


@doubtful
def test_own_block_is_left_although_blocks_of_others_are_doubtful(store: MemoryBackend) -> None:
    lock, first, second = Lock(store, "a", shared=True), Stay(), Stay()
    moved = Half(lock)
    first(moved.begin)
    own = second(lock.__enter__)
    in_thread(moved.end)
    second(lambda: lock.__exit__(None, None, None))
    assert own._held.ended is Released.RELEASED
    again = second(lock.__enter__)
    second(lambda: lock.__exit__(None, None, None))
    assert again._held.ended is Released.RELEASED


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
def test_end_without_a_block_is_refused_and_counts_for_no_other_block(
    store: MemoryBackend, kind: Any, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lock, first, second = kind(store, name, shared=True), Stay(), Stay()
    with lock:
        pass
    wrong = ValueError("of the body")
    for error in (None, wrong):
        with pytest.raises(RuntimeError, match="in no block") as caught:
            lock.__exit__(None, error, None)
        assert caught.value.__cause__ is error
    lease = lock.acquire()
    with pytest.raises(RuntimeError, match="in no block"), contextlib.ExitStack() as stack:
        stack.push(lock)
    lease.ensure_held()
    lease.release()
    first(lock.__enter__)
    live = second(lock.__enter__)
    first(lambda: lock.__exit__(None, None, None))
    live.ensure_held()
    assert len(lock._blocks) == 1
    second(lambda: lock.__exit__(None, None, None))
    assert not caplog.text


def test_end_of_an_async_block_that_has_not_begun_is_refused(store: MemoryBackend) -> None:
    async def main() -> None:
        lease = await AsyncLock(store, "a").acquire()
        with pytest.raises(RuntimeError, match="in no block"):
            await AsyncLock(store, "a").__aexit__(None, None, None)
        await lease.release()

    asyncio.run(main())


def test_end_that_finds_no_block_at_the_last_moment_counts_for_no_other_block(store: MemoryBackend) -> None:
    lock, first, second = Lock(store, "a", shared=True), Stay(), Stay()
    assert lock._blocks.innermost(threading.current_thread()) is None
    first(lock.__enter__)
    second(lock.__enter__)
    first(lambda: lock.__exit__(None, None, None))
    assert len(lock._blocks) == 1
    second(lambda: lock.__exit__(None, None, None))


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
def test_blocks_of_one_thread_in_two_contexts_end_with_their_own_leases(
    store: MemoryBackend, kind: Any, name: Any
) -> None:
    """As the blocks of two greenlets."""
    lock, here, there = kind(store, name, shared=True), contextvars.Context(), contextvars.Context()
    first, second = here.run(lock.__enter__), there.run(lock.__enter__)
    here.run(lock.__exit__, None, None, None)
    second.ensure_held()
    assert first.remaining() == 0.0
    there.run(lock.__exit__, None, None, None)
    assert second.remaining() == 0.0


def ended_at(moment: int, block: Generator[Any, None, None], meanwhile: Callable[[], object]) -> bool:
    """End a generator's block in a thread that is preempted at a bytecode; return whether there was such a bytecode."""
    left, tracer = moment, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_globals is not vars(blocks_module):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                meanwhile()
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such a frame when the tracer is set.
    sys.settrace(trace)
    try:
        next(block, None)
    finally:
        sys.settrace(tracer)
    return left < 0


def test_block_that_begins_at_any_moment_while_another_thread_ends_one_is_kept(store: MemoryBackend) -> None:
    owner = Stay()
    for moment in range(10_000):
        lock = Lock(store, "a", shared=True)
        ending, live, leases = generator(lock), generator(lock), list[Any]()

        def begin(block: Generator[Any, None, None], leases: list[Any] = leases) -> None:
            leases.append(owner(partial(contextvars.copy_context().run, next, block)))

        begin(ending)
        if not ended_at(moment, ending, partial(begin, live)):
            break
        assert lock._blocks.innermost(None, live.gi_frame) is leases[1], moment
        assert next(live, None) is None
    assert moment > 50
    assert held_names() == set()


def test_each_holder_of_a_name_is_refused_a_second_time_while_others_hold_it_too(store: MemoryBackend) -> None:
    elsewhere, lock = MemoryBackend(), Lock(store, "beside", shared=True, wait=0)
    other = Stay()
    first, second, third = lock.acquire(), other(lock.acquire), Lock(elsewhere, "beside", wait=0).acquire()
    for lease, again in (
        (first, lock.acquire),
        (second, lambda: other(lock.acquire)),
        (third, MultiLock(elsewhere, ["a", "beside"], wait=0).acquire),
    ):
        with pytest.raises(AlreadyHeld):
            again()
        lease.release()
    assert "beside" not in held_names()


def test_lease_that_has_ended_or_was_thrown_away_is_not_remembered(store: MemoryBackend) -> None:
    with Lock(store, "left:0"):
        assert [name for name in held_names() if name.startswith("left:")] == ["left:0"]
    with pytest.warns(ResourceWarning, match="never released"):  # noqa: PT031
        Lock(store, "left:1").acquire()
        collect_garbage()
    MultiLock(store, ["left:2", "left:3"]).acquire().release()
    assert [name for name in held_names() if name.startswith("left:")] == []


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a", "b"])], ids=["Lock", "MultiLock"])
def test_leader_whose_on_lost_releases_its_lease_still_sees_that_it_is_lost(
    store: MemoryBackend, kind: Any, name: Any
) -> None:
    lease = kind(store, name).acquire()
    store._states.clear()
    lease.release()
    assert lease.lost
    assert lease.remaining() == 0


ALL_KINDS = pytest.mark.parametrize(
    ("kind", "name"),
    [(Lock, "a"), (AsyncLock, "a"), (MultiLock, ["a"]), (AsyncMultiLock, ["a"])],
    ids=["Lock", "AsyncLock", "MultiLock", "AsyncMultiLock"],
)


@ALL_KINDS
def test_shared_lock_of_a_store_that_has_none_is_refused(kind: Any, name: Any) -> None:
    class Exclusive(MemoryBackend):
        capabilities = Capabilities(shared=False)

    with pytest.raises(NotSupported, match="Exclusive has no shared locks"):
        kind(Exclusive(), name, shared=True)


@ALL_KINDS
@pytest.mark.parametrize("wrong", ["redis://:secret@host", None, Store("default", MemoryBackend())])
def test_what_is_no_store_is_refused_and_told_how_to_make_one(kind: Any, name: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"connect\(.*not (str|NoneType|Store)") as caught:
        kind(wrong, name)
    assert "secret" not in str(caught.value)
    assert ("its .backend" in str(caught.value)) is isinstance(wrong, Store)


@pytest.mark.parametrize("make", [AsyncLock, lambda store, name: AsyncMultiLock(store, [name])], ids=["one", "several"])
@pytest.mark.parametrize("how", ["acquire", "__aenter__"])
def test_async_lock_outside_a_task_is_refused(store: MemoryBackend, make: Any, how: str) -> None:
    def step() -> None:
        with pytest.raises(RuntimeError, match=r"is not a task of asyncio.*use Lock"):
            getattr(make(store, "a"), how)().send(None)

    step()  # Without an event loop ...

    async def main() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().call_soon(lambda: (step(), done.set()))
        await asyncio.wait_for(done.wait(), 10)

    asyncio.run(main())  # ... and in a callback of one.


@pytest.mark.parametrize(("kind", "name"), [(Lock, "a"), (MultiLock, ["a"])], ids=["Lock", "MultiLock"])
@pytest.mark.parametrize("double", [copy.copy, copy.deepcopy, pickle.dumps])
def test_lease_is_neither_copied_nor_pickled(store: MemoryBackend, kind: Any, name: Any, double: Any) -> None:
    """The end of a copy would be taken for the end of the lease."""
    with kind(store, name) as lease:
        with pytest.raises(TypeError, match="neither copied nor pickled: pass on its name and its token"):
            double(lease)
        with pytest.raises(AlreadyHeld):
            kind(store, name).acquire()
