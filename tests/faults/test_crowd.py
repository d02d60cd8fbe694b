"""Many tasks of one process wait on Redis over two connections with few requests, and none disturbs another."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio

from dlock_core import AcquireTimeout, AsyncLock, Lock
from dlock_core.backends.redis import backend as redis_backend
from dlock_core.backends.redis import waiting
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redis.pipeline import QueuedRequest
from dlock_core.backends.redis.transport import pack_commands, send_commands
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import ASYNCIO
from tests.faults.looking import holders, is_untouched, waiters
from tests.proxy import Fault, Proxy
from tests.servers import Server
from tests.waiting import auntil, until

CROWD = 300
LONG_SLEEP_S = 60.0
"""Longer than a test takes: a sleep ends by itself after 2.5 s, and its reply then names no hand-over."""
SENT = ("eval", "evalsha", "blpop", "blmove", "ping")


@pytest.fixture
def admin(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def store(redis_server: Server, prefix: str) -> Iterator[RedisBackend]:
    backend = RedisBackend.from_url(f"{redis_server.url}?client_name=crowd{prefix.rstrip(':')}", prefix=prefix)
    yield backend
    backend.close()


@asynccontextmanager
async def crowd(
    store: RedisBackend, direct: RedisBackend, names: list[str], **options: Any
) -> AsyncIterator[tuple[list[asyncio.Task[Any]], list[Any]]]:
    """Yield one waiting task for each name, in this order, and the leases for which they wait."""
    held = [await asyncio.to_thread(Lock(direct, name, ttl=60).acquire) for name in dict.fromkeys(names)]
    tasks: list[asyncio.Task[Any]] = []
    try:
        for name in names:
            tasks.append(asyncio.create_task(AsyncLock(store, name, **{"ttl": 60, "wait": None, **options}).acquire()))
            await asyncio.sleep(0)
        await until_all_wait(direct, names)
        yield tasks, held
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in held:
            await release(lease)


async def until_all_wait(direct: RedisBackend, names: list[str]) -> None:
    def count() -> int:
        return sum(len(waiters(direct, name)) for name in dict.fromkeys(names))

    async def all_wait() -> bool:
        return await asyncio.to_thread(count) == len(names)

    await eventually(all_wait)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


def connections(admin: redis.Redis, prefix: str) -> list[dict[str, str]]:
    return [each for each in admin.client_list() if each["name"] == f"crowd{prefix.rstrip(':')}"]


async def pass_on(task: asyncio.Task[Any]) -> None:
    await (await task).release()


async def release(lease: Any) -> None:
    await asyncio.to_thread(lease.release)


@pytest.mark.parametrize("names", [[f"a{n}" for n in range(CROWD)], ["a"] * CROWD], ids=["own", "one"])
def test_crowd_waits_over_two_connections_with_few_requests(
    store: RedisBackend, direct: RedisBackend, admin: redis.Redis, prefix: str, names: list[str]
) -> None:
    async def main() -> None:
        async with crowd(store, direct, names):
            await eventually(lambda: asyncio.to_thread(lambda: len(connections(admin, prefix)) == 2))
            await quiet(admin)
            before = requests(admin)
            await asyncio.sleep(2 * waiting.MAX_SLEEP_S)
            assert len(connections(admin, prefix)) <= 2
            assert 2 <= requests(admin) - before <= 10

    asyncio.run(main())
    assert all(not waiters(direct, name) for name in names)


async def quiet(admin: redis.Redis) -> None:
    """Wait until the crowd has sent what it sends once, which takes longer on a busy machine."""
    before = -1
    while requests(admin) > before + 1:
        before = requests(admin)
        await asyncio.sleep(0.2)


def requests(admin: redis.Redis) -> int:
    """Return how many of our requests the server has had; no script calls any of these commands."""
    stats = admin.info("commandstats")
    return sum(stats[f"cmdstat_{word}"]["calls"] for word in SENT if f"cmdstat_{word}" in stats)


def test_crowd_is_served_in_order(store: RedisBackend, direct: RedisBackend) -> None:
    async def main() -> None:
        async with crowd(store, direct, ["a"] * 50) as (tasks, held):
            order = await asyncio.to_thread(waiters, direct, "a")
            await release(held[0])
            got = []
            for task in tasks:
                lease = await task
                got.append(lease.holder)
                await lease.release()
            assert got == order

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_one_that_is_cancelled_disturbs_no_other(
    store: RedisBackend, direct: RedisBackend, admin: redis.Redis, prefix: str
) -> None:
    async def main() -> None:
        async with crowd(store, direct, ["a"] * 50) as (tasks, held):
            await eventually(lambda: asyncio.to_thread(lambda: len(connections(admin, prefix)) == 2))
            before = {each["id"] for each in connections(admin, prefix)}
            order = await asyncio.to_thread(waiters, direct, "a")
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks[::2], return_exceptions=True)
            assert await asyncio.to_thread(waiters, direct, "a") == order[1::2]
            assert {each["id"] for each in connections(admin, prefix)} == before
            await release(held[0])
            await asyncio.gather(*[pass_on(task) for task in tasks[1::2]])

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_one_that_is_cancelled_while_its_request_is_under_way_leaves_nothing(
    store: RedisBackend, direct: RedisBackend
) -> None:
    """In a crowd the connection stays open, so the undo must arrive after the request."""

    async def main() -> None:
        for turns in range(12):
            tasks = [asyncio.create_task(AsyncLock(store, f"b{n}", ttl=60).acquire()) for n in range(40)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            leases = [lease for lease in ended if not isinstance(lease, BaseException)]
            assert len(leases) >= 20
            await asyncio.gather(*[lease.release() for lease in leases])

    asyncio.run(main())
    assert all(is_untouched(direct, f"b{number}") for number in range(40))


def test_each_request_of_a_write_gets_its_own_reply_although_one_is_cancelled(store: RedisBackend) -> None:
    async def echo(word: str) -> Any:
        (reply,) = await send_commands(store._pipelined, ASYNCIO, "", [("ECHO", word)], 10.0)
        return reply

    async def main() -> None:
        first = asyncio.create_task(echo("first"))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(echo(str(number))) for number in range(5)]
        await first
        (pipeline,) = store._pipelined._pipelines.values()  # type: ignore[attr-defined]
        await auntil(lambda: not pipeline.queued, every=0)
        assert pipeline.sender is not None  # all five were sent in one write, and none has a reply yet
        tasks[2].cancel()
        assert await asyncio.gather(*tasks[:2], *tasks[3:]) == [b"0", b"1", b"3", b"4"]

    asyncio.run(main())


def test_lost_connection_costs_nobody_the_position(backend: RedisBackend, proxy: Proxy, direct: RedisBackend) -> None:
    """On a busy machine some requests exceed the time limit, so the tasks may queue in another order than started."""

    async def main() -> None:
        async def serve(task: asyncio.Task[Any]) -> None:
            lease = await task
            got.append(lease.holder)
            await lease.release()

        got: list[str] = []
        async with crowd(backend, direct, ["a"] * 30) as (tasks, held):
            order = await asyncio.to_thread(waiters, direct, "a")
            await asyncio.to_thread(proxy.cut)
            await release(held[0])
            await asyncio.gather(*[serve(task) for task in tasks])
            assert got == order

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_tasks_that_give_up_while_the_store_is_away_keep_no_position_when_it_is_back(
    backend: RedisBackend, proxy: Proxy, direct: RedisBackend
) -> None:
    async def main() -> None:
        async with crowd(backend, direct, ["a"] * 10) as (tasks, held):
            await asyncio.to_thread(proxy.refuse)
            for task in tasks[:-1]:
                task.cancel()
            await asyncio.gather(*tasks[:-1], return_exceptions=True)
            await asyncio.to_thread(proxy.forward)
            await asyncio.to_thread(until, lambda: len(waiters(direct, "a")) == 1)
            await release(held[0])
            lease = await tasks[-1]
            assert await asyncio.to_thread(holders, direct, "a") == [lease.holder]
            await lease.release()

    asyncio.run(main())
    assert is_untouched(direct, "a")


@pytest.mark.parametrize("lost", [":q", ":w", ""])
def test_waiters_of_whom_the_store_knows_nothing_ask_again(
    store: RedisBackend, direct: RedisBackend, admin: redis.Redis, prefix: str, lost: str
) -> None:
    async def main() -> None:
        async with crowd(store, direct, ["a"] * 30) as (tasks, held):
            admin.delete(f"{prefix}{{a}}{lost}")
            begun = time.monotonic()
            if lost:
                await until_all_wait(direct, ["a"] * 30)
                await release(held[0])
            await asyncio.gather(*[pass_on(task) for task in tasks])  # in a new order
            assert time.monotonic() - begun < 20

    asyncio.run(main())


def test_listener_that_is_cancelled_is_replaced(store: RedisBackend, direct: RedisBackend) -> None:
    async def main() -> None:
        async with crowd(store, direct, ["a"] * 10) as (tasks, held):
            for task in asyncio.all_tasks():
                if task.get_name() in {"dlock-waiting", "dlock-pipeline"}:
                    task.cancel()
            await release(held[0])
            async with asyncio.timeout(20):  # far less than the ttl, after which each sends a request itself
                await asyncio.gather(*[pass_on(task) for task in tasks])

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_what_a_signal_handler_raises_while_the_listener_reads_ends_one_wait_only(
    store: RedisBackend, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupt(Exception):
        pass

    real, interrupted = waiting.send_commands, False  # type: ignore[attr-defined]

    async def send(*args: Any) -> Any:
        nonlocal interrupted
        answers = await real(*args)
        if not interrupted:
            interrupted = True
            raise Interrupt
        return answers

    async def main() -> None:
        monkeypatch.setattr(waiting, "send_commands", send)
        async with crowd(store, direct, ["a"] * 10) as (tasks, held):
            await release(held[0])
            ended = []
            for task in tasks:
                try:
                    lease = await task
                except Interrupt as error:
                    ended.append(error)
                else:
                    await lease.release()
            assert len(ended) == 1

    asyncio.run(main())
    assert interrupted
    assert is_untouched(direct, "a")


def test_forked_child_leaves_the_connections_of_waiting_tasks_alone(store: RedisBackend, direct: RedisBackend) -> None:
    async def main() -> None:
        async with crowd(store, direct, ["a"] * 10) as (tasks, held):
            if (child := os.fork()) == 0:
                try:
                    asyncio._set_running_loop(None)
                    asyncio.set_event_loop(None)
                    asyncio.run(AsyncLock(store, "b", ttl=60).acquire(), debug=False)
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            await release(held[0])
            await asyncio.gather(*[pass_on(task) for task in tasks])

    asyncio.run(main())
    assert len(holders(direct, "b")) == 1


def test_loop_that_ends_with_waiters_leaves_none_of_them(
    store: RedisBackend, direct: RedisBackend, admin: redis.Redis, prefix: str
) -> None:
    async def main() -> None:
        kept.append(await asyncio.to_thread(Lock(direct, "a", ttl=60).acquire))
        kept.extend(asyncio.create_task(AsyncLock(store, "a", wait=None).acquire()) for _ in range(20))
        await until_all_wait(direct, ["a"] * 20)

    kept: list[Any] = []
    asyncio.run(main())
    kept[0].release()
    assert waiters(direct, "a") == []
    until(lambda: not connections(admin, prefix))


def test_interrupted_program_leaves_no_waiter(store: RedisBackend, direct: RedisBackend) -> None:
    """A real Ctrl-C arrives in an event loop that mostly listens."""

    async def main() -> None:
        async with crowd(store, direct, ["a"] * 10):
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert waiters(direct, "a") == []


def test_connection_that_an_interrupt_has_kept_from_coming_back_blocks_nobody(store: RedisBackend) -> None:
    """A traceback refers to it for as long as its task waits for the request that abandons the lease."""

    async def main() -> None:
        pipelined = store._pipelined
        kept = pipelined.checkout()
        await pipelined.exchange(ASYNCIO, kept, pack_commands([("PING",)]), 1, 10.0)
        assert not isinstance(pipelined.checkout(), QueuedRequest)
        await (await AsyncLock(store, "a", wait=None).acquire()).release()
        pipelined.discard(kept)

    asyncio.run(main())


def test_stale_wait_ends_on_time_in_a_crowd(store: RedisBackend, direct: RedisBackend) -> None:
    """Each wait has its own deadline, whatever the listener does."""

    async def main() -> None:
        async with crowd(store, direct, ["a"] * 5):
            begun = time.monotonic()
            with pytest.raises(AcquireTimeout):
                await AsyncLock(store, "a", wait=0.3).acquire()
            assert 0.29 < time.monotonic() - begun < 1.0
            await auntil(lambda: len(waiters(direct, "a")) == 5)

    asyncio.run(main())


async def several_sleeps(store: RedisBackend) -> None:
    """Wait until the listener has checked its waiters several times."""
    for _ in range(4):
        before = store._listeners.here()._looked_after_at
        await auntil(lambda before=before: store._listeners.here()._looked_after_at > before)  # type: ignore[misc]


def test_shared_lease_that_was_granted_at_once_is_not_given_back(
    store: RedisBackend, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server serves the caller of such a request through the queue, like a waiter."""

    async def main() -> None:
        async with crowd(store, direct, ["a"], ttl=0.4):
            lease = await AsyncLock(store, "shared", ttl=60, shared=True).acquire()
            await several_sleeps(store)
            assert await asyncio.to_thread(holders, direct, "shared") == [lease.holder]
            other = asyncio.create_task(AsyncLock(store, "shared").try_acquire())  # type: ignore[arg-type]
            assert await other is None
            await lease.release()

    monkeypatch.setattr(waiting, "MAX_UNCLAIMED_S", 0.0)
    asyncio.run(main())


def test_hand_over_that_its_holder_knows_of_already_is_not_given_back(
    store: RedisBackend, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own request found the grant before the listener read of it, however much later that is."""

    async def main() -> None:
        async with crowd(store, direct, ["a"], ttl=0.4):
            lease = await AsyncLock(store, "b", ttl=60).acquire()
            now = ASYNCIO.now()
            handed = waiting.HandedOver(lease.token, now, now, store.lock_key("b").encode())
            store._listeners.here()._hand_over(lease.holder, handed)
            await several_sleeps(store)
            assert await asyncio.to_thread(holders, direct, "b") == [lease.holder]
            await lease.release()

    monkeypatch.setattr(waiting, "MAX_UNCLAIMED_S", 0.0)
    asyncio.run(main())


@pytest.fixture
def patient(proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisBackend]:
    """Yield the store through the proxy, with time limits that neither a request nor a held listener reaches."""
    monkeypatch.setattr(waiting, "LISTENER_TTL_MS", "60000")
    backend = RedisBackend.from_url(proxy.redis_url, prefix=prefix, timeout=30.0)
    yield backend
    backend.close()


def look_again(store: RedisBackend, holder: str) -> None:
    """Make this waiter send its own request now."""
    store._listeners.here()._waiters[holder].ask_within(0.0)


async def hold_hand_over(store: RedisBackend, proxy: Proxy) -> Fault:
    """Hold the reply to the listener's next sleep, and let this one sleep last until something is handed over."""
    listener = store._listeners.here()
    told = proxy.hold_reply(matching=b"BLMOVE")
    listener._sleep_s = LONG_SLEEP_S
    await auntil(lambda: told.has_met_its_request)
    listener._sleep_s = waiting.MAX_SLEEP_S
    return told


def test_lease_that_was_found_while_no_listener_was_there_is_not_given_back(
    patient: RedisBackend, proxy: Proxy, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener learns of a hand-over, and loses its connection before the holder's own request gets its reply."""

    async def main() -> None:
        listener = patient._listeners.here()
        async with crowd(patient, direct, ["a", "b"]) as (tasks, held):
            (holder,) = await asyncio.to_thread(waiters, direct, "b")
            told = await hold_hand_over(patient, proxy)
            await release(held[1])
            await asyncio.to_thread(told.wait)
            found = proxy.hold_reply(matching=b"{b}")
            look_again(patient, holder)
            await asyncio.to_thread(found.wait)
            proxy.cut_request(matching=b"BLMOVE")
            told.release()
            await auntil(lambda: holder in listener._unclaimed and listener._task is None)
            found.release()
            lease = await tasks[1]
            monkeypatch.setattr(waiting, "MAX_UNCLAIMED_S", 0.0)
            await several_sleeps(patient)
            assert await asyncio.to_thread(holders, direct, "b") == [lease.holder]
            await lease.release()

    asyncio.run(main())


def test_lease_is_not_given_back_for_a_hand_over_that_came_to_nothing(
    patient: RedisBackend, proxy: Proxy, direct: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener reads of the earlier hand-over after the same holder's own request has been granted the lock."""

    async def main() -> None:
        async with crowd(patient, direct, ["a", "b", "c"]) as (tasks, held):
            (holder,) = await asyncio.to_thread(waiters, direct, "b")
            told = await hold_hand_over(patient, proxy)
            await release(held[2])
            await asyncio.to_thread(told.wait)  # now there is no listener
            await release(held[1])
            (state,) = await direct.inspect(ASYNCIO, "b")
            assert [each.holder for each in state.holders] == [holder]
            assert await direct.force_release(ASYNCIO, "b", state.holders[0].token)
            look_again(patient, holder)
            lease = await tasks[1]
            told.release()
            monkeypatch.setattr(waiting, "MAX_UNCLAIMED_S", 0.0)
            await several_sleeps(patient)
            assert await asyncio.to_thread(holders, direct, "b") == [lease.holder]
            await lease.release()
            await pass_on(tasks[2])

    asyncio.run(main())


def test_hand_over_to_a_waiter_that_polls_is_not_given_back(
    store: RedisBackend, direct: RedisBackend, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for another library's lock, which wakes no waiter, and its next request finds the hand-over."""

    async def main() -> None:
        async with crowd(store, direct, ["a"]):
            admin.set(direct.lock_key("b"), "of another library", px=60_000)
            task = asyncio.create_task(AsyncLock(store, "b", ttl=60, wait=None).acquire())
            await until_all_wait(direct, ["b"])
            admin.delete(direct.lock_key("b"))
            assert await asyncio.to_thread(Lock(direct, "b").try_acquire) is None
            (state,) = await direct.inspect(ASYNCIO, "b")
            lease = await task
            assert [each.token for each in state.holders] == [lease.token]
            await lease.release()

    monkeypatch.setattr(waiting, "MAX_UNCLAIMED_S", 0.0)
    monkeypatch.setattr(redis_backend, "FOREIGN_POLL_S", (2.0, 2.0))
    asyncio.run(main())


def test_hand_over_to_a_request_that_came_after_its_undo_is_given_back(
    store: RedisBackend, direct: RedisBackend
) -> None:
    """The server may read a connection that the client has closed only after another one."""

    async def main() -> None:
        async with crowd(store, direct, ["a"], ttl=0.4):
            held = await asyncio.to_thread(Lock(direct, "b", ttl=60).acquire)
            late = new_request("b", LockOptions(ttl=60))
            await store.abandon(ASYNCIO, late)
            await store.try_acquire(ASYNCIO, late)
            await release(held)
            await (await AsyncLock(store, "b", wait=20).acquire()).release()

    asyncio.run(main())
    assert is_untouched(direct, "b")


async def wait_for_one_hand_over(store: RedisBackend) -> None:
    held = await AsyncLock(store, "n", ttl=60).acquire()
    waiter = asyncio.create_task(AsyncLock(store, "n", ttl=60).acquire())
    await eventually(lambda: asyncio.to_thread(lambda: bool(waiters(store, "n"))))
    await held.release()
    await (await waiter).release()


async def test_after_the_last_wait_no_task_is_left_for_long(store: RedisBackend) -> None:
    await wait_for_one_hand_over(store)
    begin = time.monotonic()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert time.monotonic() - begin < waiting.MAX_SLEEP_S / 2
