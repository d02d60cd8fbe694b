"""Several locks together: all or none, in any order, on any store."""

from __future__ import annotations

import asyncio
import threading

import pytest
import redis

from dlock_core import (
    AcquireTimeout,
    AlreadyHeld,
    AsyncLock,
    AsyncMultiLock,
    BackendUnavailable,
    LeaseLost,
    Lock,
    MultiLock,
    Released,
    connect,
)
from dlock_core.backend import Busy
from dlock_core.backends.memory import MemoryBackend
from dlock_core.leases.acquisition import Acquisition, new_request
from dlock_core.leases.lease import LeaseState
from dlock_core.leases.multilock import acquire_all
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import force_release
from tests.core.scripted import DOWN, Ahead, Scripted


@pytest.fixture(params=["memory", "redis"])
def store(request):
    if request.param == "memory":
        return MemoryBackend()
    url = request.getfixturevalue("redis_server").url
    with redis.Redis.from_url(url) as client:
        client.flushall()  # leases that other tests have let run out would be listed, too
    return connect(url)


def held(store):
    return [state.name for state in run(store.inspect(BLOCKING)) if state.holders]


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_all_names_are_held_once_each_and_released_together(store):
    lease = MultiLock(store, ["b", "a", "b"]).acquire()
    assert held(store) == ["a", "b"]
    assert [one.name for one in lease.leases] == ["a", "b"]
    assert lease.remaining() > 0
    assert lease.release() == [Released.RELEASED, Released.RELEASED]
    assert held(store) == []


def test_they_are_held_as_long_as_each_of_them_is(store):
    lease = MultiLock(store, ["a", "b"]).acquire()
    lease.ensure_held()
    assert not lease.lost
    lease.leases[1]._held.lose("a test")
    assert lease.lost
    assert lease.remaining() == 0.0
    with pytest.raises(LeaseLost, match="a test"):
        lease.ensure_held()
    lease.release()


def test_one_taken_name_leaves_none_held_and_no_place_in_any_queue(store):
    with Lock(store, "b"):

        def work():
            with pytest.raises(AcquireTimeout) as failure:
                MultiLock(store, ["a", "b", "c"], wait=0.05).acquire()
            return failure.value.name

        assert in_thread(work) == "b"
        assert held(store) == ["b"]
        assert run(store.inspect(BLOCKING, "b"))[0].waiters == ()


def test_waiter_for_several_names_gets_them_when_the_last_is_free(store):
    got = threading.Event()

    def work():
        with MultiLock(store, ["a", "b"], wait=10):
            got.set()

    with Lock(store, "b"):
        thread = threading.Thread(target=work)
        thread.start()
        while not run(store.inspect(BLOCKING, "b"))[0].waiters:
            got.wait(0.01)
        assert held(store) == ["a", "b"]
        assert not got.is_set()
    assert got.wait(10)
    thread.join()
    assert held(store) == []


def test_opposite_orders_cannot_deadlock(store):
    balance = {"a": 500, "b": 500}

    def transfer(source, target):
        for _ in range(50):
            with MultiLock(store, [source, target], wait=30):
                amounts = dict(balance)
                balance[source], balance[target] = amounts[source] - 1, amounts[target] + 1
        return True

    threads = [threading.Thread(target=transfer, args=pair) for pair in [("a", "b"), ("b", "a")] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert balance == {"a": 500, "b": 500}


def test_names_that_this_thread_holds_already_are_an_error_at_once(store):
    with Lock(store, "a"), pytest.raises(AlreadyHeld):
        MultiLock(store, ["a", "b"]).acquire()
    with MultiLock(store, ["a", "b"]), pytest.raises(AlreadyHeld, match="release it first"):
        Lock(store, "b").acquire()
    for name in ("b", ["b"]):
        with MultiLock(store, ["a", "b"], shared=True), pytest.raises(AlreadyHeld, match="become an exclusive one"):
            (Lock if name == "b" else MultiLock)(store, name).acquire()


def test_lock_that_joins_one_of_several_only_leaves_it(store):
    with MultiLock(store, ["a", "b"]) as several:
        with Lock(store, "a", reentrant=True):
            pass
        assert held(store) == ["a", "b"]
        assert several.remaining() > 0
    assert held(store) == []


def test_several_leave_the_one_that_another_lock_has_joined(store):
    several = MultiLock(store, ["a", "b"]).acquire()
    with Lock(store, "a", reentrant=True) as joined:
        assert several.release() == [Released.RELEASED, Released.RELEASED]
        assert several.release() == [Released.RELEASED, Released.RELEASED]
        assert held(store) == ["a"]
        assert joined.remaining() > 0
    assert held(store) == []


def test_several_that_are_thrown_away_leave_the_one_that_another_lock_has_joined(store):
    lock = MultiLock(store, ["a", "b"])
    several = lock.acquire()
    with Lock(store, "a", reentrant=True):
        with pytest.warns(ResourceWarning, match="was never released"):
            del several
        assert "a" in held(store)
    assert "a" not in held(store)
    force_release(store, "b", run(store.inspect(BLOCKING, "b"))[0].holders[0].token, by="a test")


async def test_lock_of_a_task_that_joins_one_of_several_only_leaves_it(store):
    async with AsyncMultiLock(store, ["a", "b"]) as several:
        async with AsyncLock(store, "a", reentrant=True):
            pass
        assert held(store) == ["a", "b"]
        assert several.remaining() > 0
    assert held(store) == []


async def test_several_of_a_task_leave_the_one_that_another_lock_has_joined(store):
    several = await AsyncMultiLock(store, ["a", "b"]).acquire()
    async with AsyncLock(store, "a", reentrant=True) as joined:
        assert await several.release() == [Released.RELEASED, Released.RELEASED]
        assert held(store) == ["a"]
        assert joined.remaining() > 0
    assert held(store) == []


def test_shared_sets_may_overlap(store):
    def work():
        with MultiLock(store, ["b", "c"], shared=True, wait=0):
            return True

    with MultiLock(store, ["a", "b"], shared=True):
        assert in_thread(work)


async def test_tasks_hold_several_names_too(store):
    async with AsyncMultiLock(store, ["a", "b"]) as lease:
        assert held(store) == ["a", "b"]
        assert not lease.lost
    assert held(store) == []


def test_empty_set_is_refused(store):
    with pytest.raises(ValueError, match="at least one name"):
        MultiLock(store, [])


def test_text_is_not_taken_for_the_names_of_its_letters(store):
    with pytest.raises(TypeError, match=r"\['order'\]"):
        MultiLock(store, "order")


def test_free_names_take_one_request_each_way(redis_server, monkeypatch):
    store = connect(redis_server.url)
    MultiLock(store, ["a", "b"]).acquire().release()  # Now the server knows the scripts.
    sent, exchange = [], store._blocking.exchange
    monkeypatch.setattr(store._blocking, "exchange", lambda *args: sent.append(args) or exchange(*args))
    MultiLock(store, [f"n{n}" for n in range(10)]).acquire().release()
    assert len(sent) == 2
    store.close()
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.keys("dlock:{n*") == []


@pytest.mark.parametrize("at_once", [True, False])
def test_silent_store_is_rid_of_the_traces_of_all_names_behind_the_caller(at_once):
    class SilentAtOnce(Scripted):
        async def try_acquire_many(self, runtime, requests):
            return self.answer("try_acquire_many")

    runtime = Ahead()
    began = runtime.now()
    store = (SilentAtOnce if at_once else Scripted)(runtime, DOWN, takes=2.0)
    requests = [new_request(name, LockOptions(30.0, 0.0)) for name in "abc"]
    acquisitions = [Acquisition(runtime, store, request, LockOptions(wait=1.0, renew=False)) for request in requests]
    with pytest.raises(BackendUnavailable):
        runtime.run(acquire_all(runtime, acquisitions, began + 1.0, never))
    assert (runtime.now() - began, store.abandoned) == (pytest.approx(2.0), [])
    for clean_up in runtime.left:
        runtime.run(clean_up)
    sent = requests if at_once else requests[:1]  # The others were never requested.
    assert set(store.abandoned) == {request.holder for request in sent}


async def never():
    raise AssertionError


def test_none_is_renewed_any_more_while_they_are_given_back_one_by_one():
    class Watched(MemoryBackend):
        async def release(self, *args):
            abandoned.append([one.held._is_abandoned for one in acquisitions])
            return await super().release(*args)

    async def fail():
        raise KeyError

    store, abandoned = Watched(), []
    requests = [new_request(name, LockOptions(30.0, 0.0)) for name in "ab"]
    acquisitions = [Acquisition(BLOCKING, store, request, LockOptions()) for request in requests]
    with pytest.raises(KeyError):
        run(acquire_all(BLOCKING, acquisitions, BLOCKING.now(), fail))
    assert abandoned == [[True, True], [True, True]]


def test_names_that_were_refused_in_one_request_leave_no_traces_to_be_rid_of():
    class Taken(Scripted):
        async def try_acquire_many(self, runtime, requests):
            return None

    runtime = Ahead()
    store = Taken(runtime, Busy(1.0))
    requests = [new_request(name, LockOptions(30.0, 0.0)) for name in "abc"]
    acquisitions = [Acquisition(runtime, store, request, LockOptions(wait=0.0, renew=False)) for request in requests]
    with pytest.raises(AcquireTimeout):
        runtime.run(acquire_all(runtime, acquisitions, runtime.now(), never))
    assert store.abandoned == []


def test_store_that_is_down_at_the_end_does_not_hide_the_error_of_the_body():
    class Down(MemoryBackend):
        async def release(self, *args):
            raise BackendUnavailable("a", reason="gone")

    with pytest.raises(KeyError), MultiLock(Down(), ["a", "b"]):
        raise KeyError


def test_one_that_is_lost_while_the_others_are_waited_for_is_told_and_the_rest_given_back():
    store, lost, answers = MemoryBackend(), threading.Event(), []

    def tell(event):
        if event.kind == "lost":
            lost.set()

    def work():
        with pytest.raises(LeaseLost) as failure:
            MultiLock(store, ["a", "b"], ttl=2, wait=60).acquire()
        answers.append(failure.value.name)

    with Lock(store, "b"):
        thread = threading.Thread(target=work)
        thread.start()
        while not run(store.inspect(BLOCKING, "b"))[0].waiters:
            lost.wait(0.01)
        (state,) = run(store.inspect(BLOCKING, "a"))
        hooks.subscribe(tell)
        try:
            assert force_release(store, "a", state.holders[0].token, by="a test")
            assert lost.wait(30)
        finally:
            hooks.unsubscribe(tell)
    thread.join()
    assert answers == ["a"]
    assert held(store) == []


@pytest.mark.parametrize("many", [False, True])
def test_what_was_held_before_one_failed_is_released_and_never_called_lost(many, request):
    store = connect(request.getfixturevalue("redis_server").url) if many else MemoryBackend()
    events = []
    taken = Lock(store, "b").acquire()
    hooks.subscribe(events.append)
    try:

        def work():
            with pytest.raises(AcquireTimeout):
                MultiLock(store, ["a", "b"], wait=0).acquire()

        in_thread(work)
    finally:
        hooks.unsubscribe(events.append)
    taken.release()
    assert [(event.kind, event.name) for event in events] == [("acquired", "a"), ("timeout", "b"), ("released", "a")]
    assert events[0].lease.state is not LeaseState.HELD
    store.close()


def test_interrupt_while_what_was_taken_is_given_back_leaves_none_of_it():
    class Interrupting(MemoryBackend):
        interrupts = 1

        async def release(self, *args):
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return await super().release(*args)

    store = Interrupting()
    taken = Lock(store, "d").acquire()

    def work():
        with pytest.raises(KeyboardInterrupt):
            MultiLock(store, ["a", "b", "c", "d"], ttl=1000, wait=0).acquire()

    in_thread(work)
    assert held(store) == ["d"]
    taken.release()


def test_interrupt_of_the_clean_up_reaches_the_caller_whose_wait_was_over():
    class Interrupting(MemoryBackend):
        interrupts = 1

        async def abandon(self, *args):
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return await super().abandon(*args)

    store = Interrupting()
    taken = Lock(store, "a").acquire()

    def work():
        with pytest.raises(KeyboardInterrupt):
            Lock(store, "a", wait=0.01).acquire()

    in_thread(work)
    assert not run(store.inspect(BLOCKING, "a"))[0].waiters
    taken.release()


async def test_release_is_finished_while_its_task_is_cancelled():
    store = MemoryBackend()
    lease = await AsyncMultiLock(store, ["a", "b", "c"]).acquire()
    task = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(store) == []


def test_one_that_cannot_be_released_does_not_keep_the_others():
    class Half(MemoryBackend):
        async def release(self, runtime, request, granted):
            if request.name == "a":
                raise BackendUnavailable("a", reason="its node is gone")
            return await super().release(runtime, request, granted)

    store = Half()
    lease = MultiLock(store, ["a", "b", "c"]).acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert held(store) == ["a"]


def test_release_that_is_interrupted_after_it_was_sent_is_no_loss(request):
    store = connect(request.getfixturevalue("redis_server").url)
    release_many = store.release_many
    Lock(store, "a").acquire().release()  # Now the server knows the script.

    async def interrupted(*args):
        await release_many(*args)
        store.release_many = release_many
        raise KeyboardInterrupt

    lease = MultiLock(store, ["a", "b"]).acquire()
    store.release_many = interrupted
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert lease.release() == [Released.RELEASED, Released.RELEASED]
    store.release_many = interrupted
    with pytest.raises(KeyboardInterrupt), MultiLock(store, ["a", "b"]):
        pass
    assert held(store) == []
    store.close()


class Losing(MemoryBackend):
    """Loses every request to release a lease, except through `release_now`."""

    def __init__(self):
        super().__init__()
        self.later = set()

    async def release(self, runtime, request, granted):
        if request.holder not in self.later:
            raise BackendUnavailable(request.name, reason="its node is gone")
        return await super().release(runtime, request, granted)

    def run_out(self):
        self._states.clear()

    def release_now(self, lease):
        self.later |= {one.holder for one in getattr(lease, "leases", (lease,))}
        return lease.release()


def acquire_one(store):
    return Lock(store, "a").acquire()


def acquire_several(store):
    return MultiLock(store, ["a", "b"]).acquire()


@pytest.mark.parametrize("again", [acquire_one, acquire_several])
@pytest.mark.parametrize("first", [acquire_one, acquire_several])
def test_thread_whose_release_did_not_reach_the_store_waits_like_everybody_else(first, again):
    store = Losing()
    lease = first(store)
    with pytest.raises(BackendUnavailable):
        lease.release()
    store.run_out()
    store.release_now(again(store))
    assert lease.remaining() == 0.0


async def test_task_whose_release_did_not_reach_the_store_waits_like_everybody_else():
    store = Losing()
    lease = await AsyncMultiLock(store, ["a", "b"]).acquire()
    with pytest.raises(BackendUnavailable):
        await lease.release()
    store.run_out()
    await store.release_now(await AsyncMultiLock(store, ["a", "b"]).acquire())
    assert lease.remaining() == 0.0
