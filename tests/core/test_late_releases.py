"""A release that could not be carried out is repeated behind the caller, until the store answers or the lease runs out."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from dlock_core import Lock, MultiLock
from dlock_core.backend import Granted, Released
from dlock_core.errors import BackendUnavailable
from dlock_core.leases import late_releases, watchdog
from dlock_core.leases.engine import new_request
from dlock_core.leases.lease import LeaseRecord
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.testing import MemoryBackend
from dlock_core.testing.contract import harness  # noqa: F401 - a fixture
from dlock_core.testing.contract.harness import Harness
from dlock_core.testing.contract.observed import WITHIN, Observed
from tests.waiting import until

TTL_S = 1000.0
"""No test waits for so long: what is released, is released by a request."""


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


@pytest.fixture
def backend() -> Away:
    return Away()


@pytest.fixture
def events() -> Iterator[list[hooks.Event]]:
    seen: list[hooks.Event] = []
    hooks.subscribe(seen.append)
    yield seen
    hooks.unsubscribe(seen.append)


def fail_to_release(harness: Harness, lease: Any) -> None:  # noqa: F811
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)


def come_back(store: Away, *, after: int) -> None:
    """Answer again once so many releases were asked for."""
    until(lambda: len(store.asked) >= after)
    store.failure = None


def record_of(store: Any, name: str = "a") -> LeaseRecord:
    return LeaseRecord(store, new_request(name, LockOptions(TTL_S, 0.0)), Granted(7, TTL_S), watchdog.clock())


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
    gc.collect()
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
    assert [event.kind for event in events] == ["acquired"]
    backend.failure = None
    until(lambda: len(events) > 1)
    assert harness.do(lease.release) is Released.RELEASED
    assert [(event.kind, event.reason) for event in events[1:]] == [("released", "released")]


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
    assert backend not in late_releases._late_releases
    assert backend.asked == ["a"]


def test_release_that_comes_to_be_refused_is_given_up(backend: Away) -> None:
    late = late_releases._LateReleases()
    backend.is_refused = True
    late.add(record_of(backend), TTL_S)
    until(lambda: not late._late)
    assert backend.asked == ["a"]


def test_lease_that_has_run_out_is_neither_released_nor_kept(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=0.2, renew=False).acquire()
    known = weakref.ref(lease._held)
    with pytest.raises(BackendUnavailable):
        lease.release()
    del lease
    late = late_releases._late_releases[backend]
    until(lambda: not late._late)
    backend.asked.clear()
    until(lambda: known() is None)
    assert backend.asked == []


def test_lease_that_had_run_out_before_its_release_is_not_released_in_the_background(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    lease._held.lose("a test")
    with pytest.raises(BackendUnavailable):
        lease.release()
    assert backend not in late_releases._late_releases


def test_lease_that_was_released_in_the_background_is_not_kept(backend: Away) -> None:
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    known = weakref.ref(lease._held)
    with pytest.raises(BackendUnavailable):
        lease.release()
    del lease
    backend.failure = None
    until(lambda: known() is None)


def test_lease_that_its_caller_has_released_meanwhile_is_asked_for_no_more(backend: Away) -> None:
    late = late_releases._LateReleases()
    held = record_of(backend)
    held.begin_release()
    held.end(Released.RELEASED)
    late.add(held, TTL_S)
    until(lambda: not late._late)
    assert backend.asked == []


def test_store_that_is_closed_is_asked_no_more() -> None:
    class Closable(Away):
        def close(self) -> None:
            late_releases.forget_releases(self)

    store = Closable()
    lease = Lock(store, "a", ttl=TTL_S).acquire()
    with pytest.raises(BackendUnavailable):
        lease.release()
    store.close()
    assert late_releases._late_releases[store]._late == {}


def test_failure_ends_the_round_and_the_others_come_first_in_the_next(
    backend: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = late_releases._LateReleases()
    monkeypatch.setattr(late._scheduler, "plan", lambda due: None)
    for name in "abc":
        late.add(record_of(backend, name), TTL_S)
    pauses = []
    for _ in range(8):
        late._due = 0.0
        before = watchdog.clock()
        late._run_due()
        pauses.append(late._due - before)
    assert backend.asked == [*"abc", *"abc", *"ab"]
    assert [round(pause, 1) for pause in pauses] == sorted(round(pause, 1) for pause in pauses)
    assert pauses[0] < 1.0 <= pauses[-1]
    backend.failure, late._due = None, 0.0
    late._run_due()
    assert (late._late, late._pause) == ({}, late_releases.MIN_PAUSE_S)


def test_surprise_in_one_release_costs_no_other(backend: Away, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Away):
        async def release(self, runtime: Any, request: Any, granted: Any) -> Released:
            if request.name == "a":
                raise ZeroDivisionError
            return await super().release(runtime, request, granted)

    store, late = Odd(), late_releases._LateReleases()
    store.failure = None
    held = record_of(store, "b")
    late.add(record_of(store, "a"), TTL_S)
    late.add(held, TTL_S)
    until(lambda: held.ended)
    until(lambda: "a release failed" in caplog.text)
    assert late._late == {}


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
    assert len(late_releases._late_releases[backend]._late) == 2
    child = os.fork()
    if not child:
        os._exit(len(late_releases._late_releases))
    assert os.waitpid(child, 0)[1] == 0
    late_releases.forget_releases(backend)


def test_exit_of_the_interpreter_waits_for_no_release() -> None:
    program = """
from dlock_core import Lock
from dlock_core.errors import BackendUnavailable
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
    known = late_releases._release_in_background
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(held: LeaseRecord) -> None:
        for interrupt in interrupts:
            raise interrupt
        known(held)

    monkeypatch.setattr(late_releases, "_release_in_background", interrupted)
    lease = Lock(backend, "a", ttl=TTL_S).acquire()
    with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
        lease.release()
    come_back(backend, after=4)
    until(partial(getattr, lease._held, "ended"))
