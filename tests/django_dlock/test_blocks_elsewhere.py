"""A block that ends in another thread or task than the one it began in ends its own lease, and never another's."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.http import StreamingHttpResponse

from django_dlock import lock
from django_dlock.acquire import DatabaseAcquire
from django_dlock.errors import LeaseLost
from django_dlock.tie import current
from dlock_core.backends.memory import MemoryBackend
from dlock_core.runtime import BLOCKING, run
from dlock_core.transactions.tied_lease import TiedLease
from tests.garbage import collect_garbage
from tests.testapp.models import Counter


@pytest.fixture(autouse=True)
def _database(use_database) -> None:
    use_database("default")


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def working() -> None:
        found.append(work())
        connections.close_all()

    thread = threading.Thread(target=working)
    thread.start()
    thread.join(60)
    return found[0]


def held(store: MemoryBackend) -> int:
    return sum(len(state.holders) for state in run(store.inspect(BLOCKING)))


@pytest.mark.parametrize("shared", [False, True])
def test_streaming_response_that_is_closed_in_another_thread_releases_its_lease(
    store: MemoryBackend, shared: bool
) -> None:
    def stream() -> Iterator[str]:
        with lock("order", 42, shared=shared):
            with transaction.atomic():
                Counter.objects.create(name="streamed")
            yield "part"
            yield "never"

    parts = stream()
    response = StreamingHttpResponse(parts)
    assert in_thread(lambda: next(iter(response))) == b"part"
    assert held(store) == 1
    response.close()
    parts.close()
    assert held(store) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_block_that_is_left_in_another_thread_takes_no_lease_of_another_block_with_the_same_lock_object(
    store: MemoryBackend, shared: bool
) -> None:
    one = lock("order", 42, shared=shared)
    in_thread(one.__enter__)
    assert held(store) == 1
    one.__exit__(None, None, None)
    assert held(store) == 0
    with one:
        assert held(store) == 1
    assert held(store) == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_async_block_that_is_left_in_another_task_releases_its_lease(store: MemoryBackend, shared: bool) -> None:
    def write() -> None:
        with transaction.atomic():
            Counter.objects.create(name="written")

    block = lock("order", 42, shared=shared)
    await asyncio.create_task(block.__aenter__())
    assert held(store) == 1
    await sync_to_async(write)()
    await asyncio.create_task(block.__aexit__(None, None, None))
    assert held(store) == 0


@pytest.mark.filterwarnings("ignore:.*was never released:ResourceWarning")
def test_shared_lock_object_of_two_threads_loses_neither_lease_when_both_leave_elsewhere(store: MemoryBackend) -> None:
    one = lock("order", 42, shared=True)
    for _ in range(2):
        in_thread(one.__enter__)
    assert held(store) == 2
    one.__exit__(None, None, None)
    assert held(store) == 2  # it is unclear which block has ended, so neither lease ends
    one.__exit__(None, None, None)
    assert held(store) <= 1


@pytest.fixture
def releases_what_is_found(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Release a lease in another thread of this context as soon as an acquire has found that it may join it."""
    find = DatabaseAcquire.find_or_prepare

    def release_when_found(lease: Any) -> None:
        async def found_late(self: DatabaseAcquire) -> Any:
            if (found := await find(self)) is not None:
                in_thread(lambda: contextvars.copy_context().run(lease.release))
            return found

        monkeypatch.setattr(DatabaseAcquire, "find_or_prepare", found_late)

    return release_when_found


def test_lease_that_another_thread_releases_while_it_is_joined_is_acquired_anew(
    store: MemoryBackend, releases_what_is_found: Callable[[Any], None]
) -> None:
    first = lock("order", 42).acquire()
    releases_what_is_found(first)
    with lock("order", 42, reentrant=True) as lease:
        assert lease.token > first.token
        with transaction.atomic():
            Counter.objects.create(name="protected")
        assert held(store) == 1
    assert held(store) == 0


def test_lease_that_another_thread_releases_while_it_is_joined_with_another_lock_is_lost(
    store: MemoryBackend, releases_what_is_found: Callable[[Any], None]
) -> None:
    """Waiting for it again while holding the other lock could deadlock."""
    releases_what_is_found(lock("order", 42).acquire())
    with pytest.raises(LeaseLost):
        lock(lock("order", 42, reentrant=True), lock("order", 43)).acquire()
    assert held(store) == 0


def test_lease_that_is_joined_while_its_last_handle_leaves_is_not_released(store: MemoryBackend) -> None:
    first = lock("order", 42).acquire()
    tied = current()[0]
    second = type(first)(tied)

    class JoinedAfterTheFirstLook(set[Any]):
        looks = 0

        def __len__(self) -> int:
            found, self.looks = super().__len__(), self.looks + 1
            if self.looks == 1:
                self.add(ref(second))
            return found

    tied.tie.handles = JoinedAfterTheFirstLook([ref(first)])
    assert first.release() is None
    assert tied.tie.is_joinable
    assert held(store) == 1
    second.release()
    assert held(store) == 0


def test_lease_whose_handle_was_thrown_away_is_not_renewed_though_the_finalizer_was_interrupted(
    store: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a signal handler raised at its first instruction.
    monkeypatch.setattr(TiedLease, "__del__", lambda _: None)
    block = lock("order", 42)
    block.__enter__()
    (tied,) = current()
    assert tied.held.is_to_be_renewed()
    del block
    assert not tied.held.is_to_be_renewed()
    assert current() == []
    assert held(store) == 1


def test_work_in_another_thread_is_refused_after_the_handle_was_thrown_away(store: MemoryBackend) -> None:
    """It may belong to the block that lost its handle; in the same thread, work after the block does not."""
    block = lock("order", 42)
    block.__enter__()
    context = contextvars.copy_context()
    with pytest.warns(ResourceWarning, match="was never released"):  # noqa: PT031
        del block
        collect_garbage()
    with transaction.atomic():
        Counter.objects.create(name="after the block")

    def work() -> Any:
        try:
            with transaction.atomic():
                Counter.objects.create(name="in the block")
        except LeaseLost as error:
            return error

    assert isinstance(in_thread(lambda: context.run(work)), LeaseLost)
    assert [each.name for each in Counter.objects.all()] == ["after the block"]
