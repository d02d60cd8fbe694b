"""A task cancelled at any await, or a thread interrupted at any read, leaves no grant and no queue entry."""

import asyncio
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest
import redis

from dlock_core import AsyncLock, Lock
from dlock_core.backends.redis import sockets
from dlock_core.backends.redis.backend import RedisBackend
from tests.faults.looking import holders, interrupted, is_untouched, waiters
from tests.servers import Server
from tests.waiting import auntil, until

FOR_EVER = 200
"""No call has this many awaits."""


class Cancelled:
    """Runs a coroutine in the current task and cancels the task at its k-th await."""

    def __init__(self, k: int) -> None:
        self.k, self.awaits = k, 0

    @types.coroutine
    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        step = coroutine.send
        argument: Any = None
        while True:
            try:
                waited_for = step(argument)
            except StopIteration as done:
                return done.value
            self.awaits += 1
            if self.awaits == self.k:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                argument, step = (yield waited_for), coroutine.send
            except BaseException as error:
                argument, step = error, coroutine.throw

    @property
    def happened(self) -> bool:
        return self.awaits >= self.k


@pytest.fixture
def store(redis_server: Server, prefix: str) -> RedisBackend:
    return RedisBackend.from_url(redis_server.url, prefix=prefix)


async def attempt(cancelled: Cancelled, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in its own task; return None if it was cancelled."""

    async def main() -> Any:
        return await cancelled.run(coroutine)

    (task,), _ = await asyncio.wait([asyncio.ensure_future(main())])
    return None if task.cancelled() else task.result()


def sweep(main: Callable[[int], Coroutine[Any, Any, bool]], *, awaits: int) -> None:
    """Cancel `main` at each await up to the last; there must be at least `awaits` of them.

    If a reply arrives before the task waits for it, there is no such await in that run: it is repeated.
    """
    k = 1
    for _ in range(FOR_EVER):
        if asyncio.run(main(k)):
            k += 1
        elif k > awaits:
            return
    raise AssertionError(f"there is no await number {k}" if k <= awaits else "it never ended")


@pytest.mark.parametrize("warm", [False, True], ids=["new connection", "idle connection"])
def test_acquire_cancelled_at_any_await_leaves_nothing(store: RedisBackend, direct: RedisBackend, warm: bool) -> None:
    async def main(k: int) -> bool:
        if warm:
            await (await AsyncLock(store, "warm-up").acquire()).release()
        cancelled = Cancelled(k)
        lease = await attempt(cancelled, AsyncLock(store, "a", wait=None).acquire())
        if lease is not None:
            await lease.release()
        assert is_untouched(direct, "a"), f"cancelled at await {k}"
        return cancelled.happened

    sweep(main, awaits=1 if warm else 3)


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_waiting_acquire_cancelled_at_any_await_leaves_nothing(
    store: RedisBackend, direct: RedisBackend, shared: bool
) -> None:
    async def main(k: int) -> bool:
        holder = await AsyncLock(store, "a").acquire()
        cancelled = Cancelled(k)
        pending = asyncio.ensure_future(attempt(cancelled, AsyncLock(store, "a", wait=None, shared=shared).acquire()))
        await auntil(lambda: pending.done() or waiters(direct, "a"))
        await holder.release()
        lease = await pending
        if lease is not None:
            assert holders(direct, "a") == [lease.holder]
            await lease.release()
        assert is_untouched(direct, "a"), f"cancelled at await {k}"
        return cancelled.happened

    sweep(main, awaits=2)


def test_cancelled_waiter_passes_on_what_was_just_handed_to_it(store: RedisBackend, direct: RedisBackend) -> None:
    """The cancellation and the release happen in the same turn of the loop, so that it crosses with the grant."""

    async def main() -> None:
        holder = await AsyncLock(store, "a").acquire()
        first = asyncio.ensure_future(AsyncLock(store, "a", wait=None).acquire())
        await auntil(lambda: len(waiters(direct, "a")) >= 1)
        second = asyncio.ensure_future(AsyncLock(store, "a", wait=None).acquire())
        await auntil(lambda: len(waiters(direct, "a")) >= 2)
        release = asyncio.ensure_future(holder.release())
        await asyncio.sleep(0)
        first.cancel()
        await release
        lease = await second
        assert holders(direct, "a") == [lease.holder]
        await lease.release()
        await asyncio.wait([first])

    for _ in range(20):
        asyncio.run(main())
    assert is_untouched(direct, "a")


def test_release_cancelled_at_any_await_is_still_done(store: RedisBackend, direct: RedisBackend) -> None:
    async def main(k: int) -> bool:
        lease = await AsyncLock(store, "a").acquire()
        cancelled = Cancelled(k)
        await attempt(cancelled, lease.release())
        assert is_untouched(direct, "a"), f"cancelled at await {k}"
        assert (await lease.release()).value == "released"
        return cancelled.happened

    sweep(main, awaits=1)


def test_block_cancelled_in_its_body_releases(store: RedisBackend, direct: RedisBackend) -> None:
    async def main() -> None:
        async def body() -> None:
            async with AsyncLock(store, "a"):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(body())
        await auntil(lambda: holders(direct, "a"))
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_acquire_that_ran_into_a_time_limit_leaves_nothing(store: RedisBackend, direct: RedisBackend) -> None:
    async def main() -> None:
        holder = await asyncio.create_task(AsyncLock(store, "a").acquire())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await AsyncLock(store, "a", wait=None).acquire()
        assert waiters(direct, "a") == []
        await holder.release()

    asyncio.run(main())
    assert is_untouched(direct, "a")


@pytest.mark.parametrize("answered", [False, True], ids=["before the reply", "after the reply"])
@pytest.mark.parametrize(("k", "taken"), [(1, False), (1, True), (2, True), (3, True)])
def test_thread_interrupted_at_any_read_leaves_nothing(
    store: RedisBackend, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch, k: int, taken: bool, answered: bool
) -> None:
    """An acquire reads the reply to its first request; if it has to wait, also the wake-up and the next reply."""
    real, me, reads = sockets.read_reply, threading.get_ident(), 0

    def interrupted(connection: Any) -> Any:
        nonlocal reads
        if threading.get_ident() != me:
            return real(connection)
        reads += 1
        answer = real(connection) if answered or reads != k else None
        if reads == k:
            raise KeyboardInterrupt
        return answer

    holder = threading.Thread(target=hold_until_waited_for, args=(direct, begun := threading.Event()))
    if taken:
        holder.start()
        assert begun.wait(30)
    monkeypatch.setattr(sockets, "read_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lock(store, "a", wait=None).acquire()
    monkeypatch.undo()
    if taken:
        STOP.set()
        holder.join()
    assert is_untouched(direct, "a")


STOP = threading.Event()


def hold_until_waited_for(store: RedisBackend, begun: threading.Event) -> None:
    hold(store, begun, lambda: waiters(store, "a"))


def hold(store: RedisBackend, begun: threading.Event, enough: Callable[[], object] = bool) -> None:
    """Hold the lock until `enough` holds or the test sets STOP."""
    STOP.clear()
    with Lock(store, "a"):
        begun.set()
        until(lambda: STOP.is_set() or enough())


def test_connection_of_an_interrupted_waiter_is_closed_although_its_error_is_kept(
    store: RedisBackend, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch, redis_server: Server
) -> None:
    """Its next request is sent behind the wake-up that it waits for: if that ran, its grant would be an orphan."""
    real, me, reads = sockets.read_reply, threading.get_ident(), 0

    def interrupted(connection: Any) -> Any:
        nonlocal reads
        reads += threading.get_ident() == me
        if threading.get_ident() == me and reads == 2:
            raise KeyboardInterrupt
        return real(connection)

    holder = threading.Thread(target=hold, args=(direct, begun := threading.Event()))
    holder.start()
    assert begun.wait(30)
    monkeypatch.setattr(sockets, "read_reply", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        Lock(store, "a", wait=None).acquire()
    monkeypatch.undo()
    with redis.Redis.from_url(redis_server.url) as client:
        until(lambda: client.info("clients")["blocked_clients"] == 0)
    assert waiters(direct, "a") == []
    assert kept.value.__traceback__ is not None
    STOP.set()
    holder.join()
    assert is_untouched(direct, "a")


def test_interrupted_waiter_leaves_its_place_and_the_lock_alone(store: RedisBackend, direct: RedisBackend) -> None:
    """A real Ctrl-C arrives in the middle of a blocking read."""
    leases: list[Any] = []
    thread = threading.Thread(target=lambda: leases.append(Lock(direct, "a").acquire()))
    thread.start()
    thread.join()

    with interrupted(lambda: waiters(direct, "a")):
        Lock(store, "a", wait=None).acquire()
    assert waiters(direct, "a") == []
    assert holders(direct, "a") == [leases[0].holder]
    leases[0].release()
    assert is_untouched(direct, "a")
