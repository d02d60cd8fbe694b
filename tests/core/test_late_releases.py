"""A failed release is repeated in the background until the store answers or the lease runs out."""

import asyncio
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from dlock_core import AsyncLock, AsyncMultiLock, Lock, MultiLock
from dlock_core.backend import Granted, Released
from dlock_core.errors import BackendUnavailable, LeaseLost
from dlock_core.leases import acquisition, engine, late_releases, multilock, watchdog
from dlock_core.leases.acquisition import Acquisition, new_request
from dlock_core.leases.lease import LeaseRecord
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import MemoryBackend
from dlock_core.testing.contract import harness  # noqa: F401 - a fixture
from dlock_core.testing.contract.harness import Harness
from dlock_core.testing.contract.observed import WITHIN, Observed
from tests.garbage import collect_garbage
from tests.waiting import until

TTL_S = 1000.0
"""No test waits this long, so a lease that ends has been released by a request."""


class Away(MemoryBackend):
    """A store that answers no release for as long as `failure` is set."""

    failure: str | None = "it is away"
    is_refused = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
        self.asked.append(request.name)
        if self.failure is not None:
            raise BackendUnavailable(request.name, reason=self.failure, refused=self.is_refused)
        return await super().release(runtime, request, granted)


@pytest.fixture(autouse=True)
def no_late_releases_of_earlier_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_releases, "_late_steps", WeakKeyDictionary())


@pytest.fixture
def backend() -> Iterator[Away]:
    store = Away()
    yield store
    end(store)


def end(store: Away) -> None:
    """Let the store answer, so that no later test hears of its leases; wait for all stores, as the harness wraps it."""
    store.failure = None
    until(lambda: not is_any_repeated())


def is_any_repeated() -> bool:
    return any(late._late for late in list(late_releases._late_steps.values()))


@pytest.fixture
def events() -> Iterator[list[hooks.Event]]:
    seen: list[hooks.Event] = []
    hooks.subscribe(seen.append)
    yield seen
    hooks.unsubscribe(seen.append)


def kinds_of(store: MemoryBackend, events: list[hooks.Event]) -> list[str]:
    """Return the kinds of this store's events; leases of earlier tests may still cause some."""
    return [event.kind for event in events if event.lease is not None and event.lease.backend is store]


def fail_to_release(harness: Harness, lease: Any) -> None:  # noqa: F811
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)


async def silence(runtime: Any) -> None:
    """Keep a task waiting, but not the work in the background."""
    if runtime is not BLOCKING:
        await asyncio.sleep(TTL_S)


def come_back(store: Away, *, after: int) -> None:
    """Let the store answer again once it has had `after` requests."""
    until(lambda: len(store.asked) >= after)
    store.failure = None


def record_of(store: Any, name: str = "a") -> LeaseRecord:
    return LeaseRecord(store, new_request(name, LockOptions(TTL_S, 0.0)), Granted(7, TTL_S), watchdog.clock())


def add(late: Any, held: LeaseRecord) -> None:
    late.add(held.request.holder, partial(engine._release_once, held=held), TTL_S)


@pytest.mark.parametrize("shared", [False, True])
def test_waiter_gets_the_lock_as_soon_as_the_store_answers_a_release_that_had_failed(
    harness: Harness,  # noqa: F811
    backend: Away,
    shared: bool,
) -> None:
    lease = harness.acquire("a", ttl=TTL_S, shared=shared)
    pending = harness.queue_up("a")
    fail_to_release(harness, lease)
    come_back(backend, after=4)
    assert pending.result(WITHIN).token > lease.token
    assert (lease.lost, lease.remaining()) == (False, 0.0)
    assert harness.do(lease.release) is Released.RELEASED


def test_several_locks_whose_release_failed_are_all_released_when_the_store_is_back(
    harness: Harness,  # noqa: F811
    backend: Away,
) -> None:
    lease = harness.do(harness.multilock(["a", "b", "c"], ttl=TTL_S).acquire)
    fail_to_release(harness, lease)
    come_back(backend, after=8)
    harness.until(lambda: [harness.holders(name) for name in "abc"] == [[], [], []])
    assert harness.do(lease.release) == [Released.RELEASED] * 3


def test_lease_of_a_block_whose_release_failed_is_released_although_nothing_refers_to_it(
    harness: Harness,  # noqa: F811
    backend: Away,
) -> None:
    harness.do(lambda: harness.block(harness.lock("a", ttl=TTL_S), lambda _: None))
    collect_garbage()
    come_back(backend, after=3)
    harness.until(lambda: harness.holders("a") == [])


def test_release_is_told_once_and_only_when_the_store_has_answered_it(
    harness: Harness,  # noqa: F811
    backend: Away,
    events: list[hooks.Event],
) -> None:
    lease = harness.acquire("a", ttl=TTL_S)
    fail_to_release(harness, lease)
    until(lambda: len(backend.asked) >= 4)

    def told() -> list[tuple[str, str]]:  # An earlier test's lease may still cause events.
        return [(event.kind, event.reason) for event in events if event.lease is lease._held]

    assert told() == [("acquired", "")]
    backend.failure = None
    until(lambda: len(told()) > 1)
    assert harness.do(lease.release) is Released.RELEASED
    assert told()[1:] == [("released", "released")]


def test_repeated_release_leaves_the_lease_of_a_later_holder_alone(
    harness: Harness,  # noqa: F811
    backend: Away,
) -> None:
    lease = harness.acquire("a", ttl=TTL_S)
    fail_to_release(harness, lease)
    assert harness.call_store("force_release", "a", lease.token)
    later = harness.acquire("a")
    backend.failure = None
    until(lambda: lease._held.ended)
    assert harness.holders("a") == [later.holder]


def test_release_that_the_store_refuses_is_told_at_once_and_not_repeated(
    harness: Harness,  # noqa: F811
    backend: Away,
) -> None:
    backend.is_refused = True
    lease = harness.acquire("a", ttl=TTL_S)
    fail_to_release(harness, lease)
    assert backend not in late_releases._late_steps
    assert backend.asked == ["a"]


def test_release_that_comes_to_be_refused_is_given_up(backend: Away) -> None:
    late = late_releases._LateSteps()
    backend.is_refused = True
    add(late, record_of(backend))
    until(lambda: not late._late)
    assert backend.asked == ["a"]


def test_lease_that_has_run_out_is_neither_released_nor_kept(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=0.2, renew=False).acquire()
    known = weakref.ref(lease._held)
    with pytest.raises(BackendUnavailable):
        lease.release()
    del lease
    late = late_releases._late_steps[backend]
    until(lambda: not late._late)
    backend.asked.clear()
    until(lambda: known() is None)
    assert backend.asked == []


def test_lease_that_had_run_out_before_its_release_is_not_released_in_the_background(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    lease._held.lose("a test")
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert backend not in late_releases._late_steps


def test_lease_that_was_released_in_the_background_is_not_kept(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    known = weakref.ref(lease._held)
    with pytest.raises(BackendUnavailable):
        lease.release()
    del lease
    backend.failure = None
    until(lambda: known() is None)


def test_lease_that_its_caller_has_released_meanwhile_is_asked_for_no_more(backend: Away) -> None:
    late = late_releases._LateSteps()
    held = record_of(backend)
    held.begin_release()
    held.end(Released.RELEASED)
    add(late, held)
    until(lambda: not late._late)
    assert backend.asked == []


def rounds(late: Any, number: int) -> list[float]:
    """Make `number` rounds of attempts, and return the pauses after them."""
    pauses = []
    for _ in range(number):
        late._due = 0.0
        before = watchdog.clock()
        late._run_due()
        pauses.append(late._due - before)
    return pauses


def test_store_that_fails_slowly_is_asked_once_a_round_and_the_others_come_first_in_the_next(
    backend: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = late_releases._LateSteps()
    monkeypatch.setattr(late._scheduler, "plan", lambda due: None)
    monkeypatch.setattr(late_releases, "MAX_FAILING_S", 0.0)
    for name in "abc":
        add(late, record_of(backend, name))
    pauses = rounds(late, 8)
    assert backend.asked == [*"abc", *"abc", *"ab"]
    assert all(pause >= least for pause, least in zip(pauses, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0], strict=True))
    assert pauses[0] < 1.0
    backend.failure = None
    rounds(late, 1)
    assert (late._late, late._pause) == ({}, late_releases.MIN_PAUSE_S)


def test_stream_of_new_failures_keeps_no_older_release_waiting(backend: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    late = late_releases._LateSteps()
    monkeypatch.setattr(late._scheduler, "plan", lambda due: None)
    monkeypatch.setattr(late_releases, "MAX_FAILING_S", 0.0)
    add(late, record_of(backend, "old"))
    for name in "abcd":
        add(late, record_of(backend, name))
        rounds(late, 1)
    assert backend.asked == ["old", "a", "old", "b"]
    backend.failure = None
    rounds(late, 1)


def test_leases_of_a_node_that_is_away_keep_none_of_another_node(
    backend: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, late = Away(), late_releases._LateSteps()
    there.failure = None
    monkeypatch.setattr(late._scheduler, "plan", lambda due: None)
    monkeypatch.setattr(late_releases, "MAX_FAILING_S", math.inf)
    for _ in range(100):
        add(late, record_of(backend))
        add(late, record_of(there))
    rounds(late, 1)
    assert (len(late._late), len(there.asked)) == (100, 100)


def test_surprise_in_one_release_costs_no_other(backend: Away, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Away):
        async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
            if request.name == "a":
                raise ZeroDivisionError
            return await super().release(runtime, request, granted)

    store, late = Odd(), late_releases._LateSteps()
    store.failure = None
    held = record_of(store, "b")
    add(late, record_of(store, "a"))
    add(late, held)
    until(lambda: held.ended)
    until(lambda: "a release failed" in caplog.text and not late._late)


def test_store_that_is_silent_for_a_release_delays_no_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, is_asked = threading.Event(), threading.Event()

    class Silent(Away):
        async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
            if threading.current_thread().name == "dlock-releases":
                is_asked.set()
                answers.wait(WITHIN)
            return await super().release(runtime, request, granted)

    plan = watchdog.Watchdog.plan
    monkeypatch.setattr(watchdog.Watchdog, "plan", lambda dog, seconds, *held: plan(dog, 0.05, *held))
    silent = Silent()
    store = Observed(silent)
    try:
        with pytest.raises(BackendUnavailable):
            Lock(store, "a", ttl=TTL_S).acquire().release()
        assert is_asked.wait(WITHIN)
        lease = Lock(store, "b", ttl=TTL_S).acquire()
        before = len(store.calls)
        store.until(lambda calls: sum(call.method == "renew" for call in calls[before:]) >= 2)
    finally:
        answers.set()
    silent.failure = None
    lease.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_releases_nothing_of_its_parents(backend: Away) -> None:
    lease = MultiLock(backend, ["a", "b"], ttl=TTL_S).acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert len(late_releases._late_steps[backend]._late) == 2
    child = os.fork()
    if not child:
        os._exit(len(late_releases._late_steps))
    assert os.waitpid(child, 0)[1] == 0


def test_exit_of_the_interpreter_waits_for_no_release() -> None:
    program = """
from dlock_core import Lock
from dlock_core.errors import BackendUnavailable, LeaseLost
from dlock_core.testing import MemoryBackend

class Away(MemoryBackend):
    async def release(self, *_):
        raise BackendUnavailable("a", reason="away")

with Lock(Away(), "a", ttl=100000):
    pass
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=WITHIN * 2, capture_output=True, check=True)
    assert b"Traceback" not in ended.stderr


def test_interrupt_at_any_moment_of_a_failing_release_leaves_it_to_be_repeated(
    backend: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = late_releases.repeat_in_background
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(*what: Any, **more: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        known(*what, **more)

    monkeypatch.setattr(late_releases, "repeat_in_background", interrupted)
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
        lease.release()
    come_back(backend, after=4)
    until(partial(getattr, lease._held, "ended"))


def test_lease_whose_release_is_unanswered_neither_counts_as_held_nor_is_renewed(
    harness: Harness,  # noqa: F811
    backend: Away,
) -> None:
    lease = harness.acquire("a", ttl=TTL_S)
    fail_to_release(harness, lease)
    with pytest.raises(LeaseLost, match="it is being released"):
        lease.ensure_held()
    with pytest.raises(LeaseLost, match="it is being released"):
        harness.do(lambda: lease.renew(2 * TTL_S))
    assert (lease.remaining(), lease.lost) == (0.0, False)
    assert harness.renewals(lease) == 0


class Group(Away):
    """Takes and releases several locks in one request; a test sets `answers` to let it answer the release."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.answers = threading.Event(), threading.Event()

    async def try_acquire_many(self, runtime: Any, requests: Any) -> Any:
        return [await self.try_acquire(runtime, request) for request in requests]

    async def release_many(self, runtime: Any, requests: Any) -> Any:
        if self.failure is not None:
            self.asked.append("all")
            raise BackendUnavailable(requests[0].name, reason=self.failure)
        self.is_asked.set()
        self.answers.wait(WITHIN)
        return [await MemoryBackend.release(self, runtime, request, None) for request in requests]


def test_lease_that_is_released_in_the_background_meanwhile_is_told_once(events: list[hooks.Event]) -> None:
    store = Group()
    lease = MultiLock(store, ["a", "b"], ttl=TTL_S).acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    with ThreadPoolExecutor() as threads:
        store.failure = None
        again = threads.submit(lease.release)
        until(lambda: kinds_of(store, events).count("released") == 2 or store.is_asked.is_set())
        until(lambda: kinds_of(store, events).count("released") == 2)
        store.answers.set()
        assert again.result(WITHIN) == [Released.RELEASED] * 2
    assert sorted(kinds_of(store, events)) == ["acquired"] * 2 + ["released"] * 2


@pytest.mark.parametrize("kind", [Away, Group])
def test_silent_store_keeps_the_caller_no_longer_for_several_locks_than_for_one(
    kind: type[Away], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multilock, "MAX_OVERTIME_S", -1.0)  # every answer takes too long
    monkeypatch.setattr(late_releases.Scheduler, "plan", lambda *_: None)
    store = kind()
    lease = MultiLock(store, [*"abcdefgh"], ttl=TTL_S).acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert len(store.asked) <= 2
    assert len(late_releases._late_steps.pop(store)._late) == 8


async def test_release_whose_caller_is_cancelled_is_told(events: list[hooks.Event]) -> None:
    is_asked, answers = asyncio.Event(), asyncio.Event()

    class Slow(MemoryBackend):
        async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
            is_asked.set()
            await answers.wait()
            return await super().release(runtime, request, granted)

    store = Slow()
    lease = await AsyncLock(store, "a").acquire()
    task = asyncio.ensure_future(lease.release())
    await is_asked.wait()
    task.cancel()
    answers.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kinds_of(store, events) == ["acquired", "released"]


class Losing(Away):
    """Grants but loses its reply, and then cannot be asked to abandon the request."""

    transaction: Any = None

    async def try_acquire(self, runtime: Any, request: Any, ticket: Any = None, *, unsure: bool = False) -> Any:
        answer = await super().try_acquire(runtime, request, ticket, unsure=unsure)
        if self.failure is not None:
            raise BackendUnavailable(request.name, reason=self.failure, refused=self.is_refused)
        return answer

    async def abandon(self, runtime: Any, request: Any, ticket: Any = None) -> None:
        self.asked.append(request.name)
        if self.failure is not None:
            raise BackendUnavailable(request.name, reason=self.failure, refused=self.is_refused)
        await super().abandon(runtime, request, ticket)


class TestGrantWhoseAnswerWasLost:
    @pytest.fixture
    def backend(self) -> Iterator[Losing]:
        store = Losing()
        yield store
        end(store)

    def test_is_abandoned_as_soon_as_the_store_answers(self, harness: Harness, backend: Losing) -> None:  # noqa: F811
        with pytest.raises(BackendUnavailable):
            harness.acquire("a", ttl=TTL_S, wait=0)
        assert len(harness.holders("a")) == 1
        come_back(backend, after=3)
        harness.until(lambda: harness.holders("a") == [])

    @pytest.mark.parametrize("lock", [partial(AsyncLock, name="c"), partial(AsyncMultiLock, names=["a", "b", "c"])])
    def test_is_abandoned_although_the_loop_of_its_caller_ends_before_the_store_answers(
        self, monkeypatch: pytest.MonkeyPatch, lock: Any
    ) -> None:
        """async_to_sync ends its loop after each call; locks that were granted before are released, too."""

        class Silent(Losing):
            async def try_acquire(self, runtime: Any, request: Any, ticket: Any = None, *, unsure: bool = False) -> Any:
                kind = Losing if request.name == "c" else MemoryBackend
                return await kind.try_acquire(self, runtime, request, ticket, unsure=unsure)

            async def abandon(self, runtime: Any, request: Any, ticket: Any = None) -> None:
                await silence(runtime)
                await super().abandon(runtime, request, ticket)

            async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
                await silence(runtime)
                released.add(request.name)
                return await super().release(runtime, request, granted)

        monkeypatch.setattr(acquisition, "MAX_OVERTIME_S", -1.0)  # every answer takes too long
        released = set[str]()
        store = Silent()
        with pytest.raises(BackendUnavailable):
            asyncio.run(lock(store, ttl=TTL_S, wait=0).acquire())
        assert "c" in [state.name for state in run(store.inspect(BLOCKING))]
        store.failure = None
        until(lambda: not run(store.inspect(BLOCKING)))
        assert released == ({"a", "b"} if lock.func is AsyncMultiLock else set())

    def test_is_not_abandoned_in_the_background_where_that_is_refused(
        self,
        harness: Harness,  # noqa: F811
        backend: Losing,
    ) -> None:
        backend.is_refused = True
        with pytest.raises(BackendUnavailable):
            harness.acquire("a", ttl=TTL_S, wait=0)
        assert not is_any_repeated()

    def test_is_left_to_the_transaction_in_which_the_lock_was_asked_for(self, backend: Losing) -> None:
        options = LockOptions(TTL_S, 0.0)
        request = new_request("a", options, transaction=object())
        with pytest.raises(BackendUnavailable):
            run(Acquisition(BLOCKING, backend, request, options).acquire())
        assert not is_any_repeated()


def test_pause_between_two_rounds_doubles_up_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses, store = 100.0, [], Away()
    monkeypatch.setattr(late_releases, "clock", lambda: now)
    monkeypatch.setattr(late_releases.Scheduler, "plan", lambda *_: None)
    steps = late_releases._LateSteps()
    add(steps, record_of(store))
    for _ in range(7):
        now = steps._due
        steps._run_due()
        pauses.append(round(steps._due - now, 3))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_acquires_that_fail_while_the_store_is_away_leave_no_endless_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_releases, "MAX_ABANDONED", 3)
    monkeypatch.setattr(late_releases.Scheduler, "plan", lambda *_: None)
    store = Losing()
    for number in range(10):
        with pytest.raises(BackendUnavailable):
            Lock(store, str(number), wait=0).acquire()
    assert len(late_releases._late_steps.pop(store)._late) == 3
