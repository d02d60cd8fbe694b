"""One thread renews every lease of a store, in batches, and reports the losses."""

import asyncio
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dlock_core import Lock, scheduler
from dlock_core.backend import Granted, RenewalFailure, RenewalResult
from dlock_core.errors import BackendUnavailable
from dlock_core.leases import lease as records
from dlock_core.leases import watchdog
from dlock_core.leases.acquisition import new_request
from dlock_core.leases.lease import LeaseRecord, _told_in
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing import ManualRuntime, MemoryBackend
from dlock_core.testing.contract.observed import Observed
from tests.core.scripted import DOWN, Scripted
from tests.garbage import collect_garbage
from tests.waiting import WITHIN, until


class Flaky(Observed):
    """A store in memory whose renewals fail while `failure` is set."""

    failure: BaseException | None = None

    async def renew(self, runtime: Any, renewals: Any) -> list[RenewalResult]:
        answers = await super().renew(runtime, renewals)
        if self.failure is not None:
            # It is raised again and again, and would collect the frames of every time.
            raise self.failure.with_traceback(None)
        return answers


@pytest.fixture
def store() -> Flaky:
    return Flaky(MemoryBackend())


@pytest.fixture
def runtime() -> ManualRuntime:
    return ManualRuntime()


@pytest.fixture
def held(runtime: ManualRuntime) -> LeaseRecord:
    store = Scripted(runtime, [30.0])
    return LeaseRecord(store, new_request("a", LockOptions(30.0, 0.0)), Granted(7, 30.0), runtime.now(), runtime.now)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a minute are renewed five times a second: no pause of a loaded machine loses one."""
    watch = watchdog.Watchdog.plan

    def soon(dog: watchdog.Watchdog, seconds: float, *leases: LeaseRecord) -> None:
        watch(dog, max(seconds / 100, 1 / watchdog.TICKS_PER_S), *leases)  # no earlier than the next tick

    monkeypatch.setattr(watchdog.Watchdog, "plan", soon)


often = pytest.mark.usefixtures("eager")


def renewals(store: Observed) -> int:
    return sum(call.method == "renew" for call in list(store.calls))


@often
def test_lease_that_comes_while_the_watchdog_is_idle_is_renewed(store: Flaky) -> None:
    Lock(store, "a", ttl=60).acquire().release()
    until(lambda: clock() < watchdog._watchdogs[store].scheduler.sleeps_until < math.inf)
    with Lock(store, "a", ttl=60) as lease:
        store.until(lambda _: renewals(store) >= 1)
        assert not lease.lost


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lease_of_a_forked_child_is_renewed_though_its_parents_watchdog_did_not_come_along(
    store: Flaky, request: pytest.FixtureRequest
) -> None:
    with Lock(store, "parent's", ttl=60):
        until(lambda: clock() < watchdog._watchdogs[store].scheduler.sleeps_until < math.inf)
        if (child := os.fork()) == 0:
            status = 1
            try:
                request.getfixturevalue("eager")
                with Lock(store, "child's", ttl=60):
                    until(lambda: renewals(store) >= 1)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@often
def test_short_lease_is_renewed_although_a_long_one_is_due_later(store: Flaky) -> None:
    with Lock(store, "long", ttl=1000.0):
        until(lambda: clock() < watchdog._watchdogs[store].scheduler.sleeps_until < math.inf)
        with Lock(store, "short", ttl=60) as lease:
            store.until(lambda _: renewals(store) >= 1)
            assert not lease.lost


@often
@pytest.mark.filterwarnings("ignore:.*was never released:ResourceWarning")
def test_lease_that_is_thrown_away_runs_out_although_a_failed_renewal_still_refers_to_it(store: Flaky) -> None:
    """An error that is kept, or waits in a cycle for the garbage collector, keeps the watchdog's frames alive."""
    kept: list[BackendUnavailable] = []

    async def fail(runtime: Any, requested: Any) -> list[RenewalResult]:
        kept.append(BackendUnavailable("a", reason="down"))
        raise kept[-1]

    lease = Lock(store, "a", ttl=60).acquire()
    held = weakref.ref(lease._held)
    store.renew = fail  # type: ignore[method-assign]
    until(lambda: kept)
    del store.renew
    del lease
    known = held()
    assert known is not None, "the error's traceback leads to it"
    assert not known.is_to_be_renewed()


@often
def test_one_thread_for_any_number_of_leases(store: Flaky) -> None:
    before = sum(thread.name == "dlock-watchdog" for thread in threading.enumerate())
    leases = [Lock(store, f"a:{number}", ttl=60).acquire() for number in range(300)]
    store.until(lambda _: renewals(store) >= 4)
    assert sum(thread.name == "dlock-watchdog" for thread in threading.enumerate()) <= before + 1
    assert renewals(store) < 100
    for lease in leases:
        lease.release()


@often
def test_unanswered_renewals_are_asked_again_and_lose_nothing(store: Flaky) -> None:
    told: list[bool] = []
    with Lock(store, "a", ttl=60, on_lost=lambda: told.append(True)) as lease:
        store.failure = DOWN
        store.until(lambda _: renewals(store) >= 3)
        store.failure = None
        store.until(lambda _: renewals(store) >= 6)
        assert not lease.lost
    assert told == []


@often
def test_lease_that_nobody_can_renew_is_lost_with_the_reason_and_told_once(store: Flaky) -> None:
    told: list[bool] = []
    lost = threading.Event()

    def on_lost() -> None:
        told.append(True)
        lost.set()

    lease = Lock(store, "a", ttl=2.0, on_lost=on_lost).acquire()
    store.failure = DOWN
    assert lost.wait(WITHIN)
    assert lease.lost
    with pytest.raises(Exception, match="could not be renewed in time: no answer"):
        lease.ensure_held()
    assert told == [True]


@often
def test_any_surprise_in_a_renewal_is_logged_and_the_watchdog_lives_on(
    store: Flaky, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="dlock"), Lock(store, "a", ttl=60) as lease:
        store.failure = ZeroDivisionError()
        store.until(lambda _: renewals(store) >= 2)
        store.failure = None
        store.until(lambda _: renewals(store) >= 4)
        assert not lease.lost
    assert "a renewal failed" in caplog.text


@often
def test_lease_without_renewal_is_left_alone(store: Flaky) -> None:
    with Lock(store, "a", ttl=60, renew=False) as lease, Lock(store, "b", ttl=60):
        store.until(lambda _: renewals(store) >= 2)
        assert all(lease.holder not in call.holders for call in store.calls if call.method == "renew")


@often
def test_thread_ends_when_there_was_nothing_to_do_for_long_and_comes_back(
    store: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_IDLE_S", 0.01)
    Lock(store, "a", ttl=60).acquire().release()
    until(lambda: not watchdog._watchdogs[store].scheduler.thread.is_running)
    with Lock(store, "a", ttl=60) as lease:
        store.until(lambda _: renewals(store) >= 1)
        assert not lease.lost


def test_lease_whose_time_is_over_is_lost_without_a_question(held: LeaseRecord, runtime: ManualRuntime) -> None:
    runtime.advance(31.0)
    watchdog.Watchdog()._renew([held])
    assert held.loss_reason
    assert held.backend.calls == []  # type: ignore[attr-defined]


def test_lease_that_was_released_while_others_were_renewed_is_not_asked_for(held: LeaseRecord) -> None:
    held.begin_release()
    watchdog.Watchdog()._renew([held])
    assert held.backend.calls == []  # type: ignore[attr-defined]


def test_renewal_answered_after_the_lease_ran_out_does_not_heal_it(held: LeaseRecord, runtime: ManualRuntime) -> None:
    held.backend.takes = 31.0  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert held.loss_reason


def test_renewal_for_an_earlier_ttl_does_not_stretch_a_lease_that_was_shortened(
    held: LeaseRecord, runtime: ManualRuntime
) -> None:
    def shorten() -> None:
        held.change_ttl(runtime.now(), 1.0)

    runtime.at(runtime.now() + 0.5, shorten)
    held.backend.takes = 0.6  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert held.remaining() <= 1.0


def test_lease_that_was_shortened_during_a_renewal_is_renewed_in_time_for_its_new_ttl(
    held: LeaseRecord, runtime: ManualRuntime
) -> None:
    dog = watchdog.Watchdog()

    def shorten() -> None:
        held.change_ttl(runtime.now(), 1.0)
        dog.plan(1 / 3, held)

    runtime.at(runtime.now() + 0.5, shorten)
    held.backend.takes = 0.6  # type: ignore[attr-defined]
    dog._renew([held])
    assert held.renewal_tick / watchdog.TICKS_PER_S < clock() + 1.0


def test_release_during_a_renewal_is_not_a_loss(held: LeaseRecord, runtime: ManualRuntime) -> None:
    def release() -> None:
        held.begin_release()

    held.backend.script = [[RenewalFailure.LOST]]  # type: ignore[attr-defined]
    held.backend.takes = 1.0  # type: ignore[attr-defined]
    runtime.at(runtime.now() + 0.5, release)
    watchdog.Watchdog()._renew([held])
    assert not held.loss_reason


def test_backend_that_nobody_uses_any_more_is_forgotten() -> None:
    store = MemoryBackend()
    Lock(store, "a").acquire().release()
    assert store in watchdog._watchdogs
    before = len(watchdog._watchdogs)
    del store
    collect_garbage()
    assert len(watchdog._watchdogs) < before


def test_unavailable_store_is_never_a_loss_by_itself(held: LeaseRecord) -> None:
    held.backend.script = [BackendUnavailable("a", reason="down")]  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert not held.is_lost()
    assert "down" in held.renewal_trouble


@often
def test_leases_of_a_process_that_had_no_thread_to_spare_are_renewed_as_soon_as_there_is_one(
    store: Flaky, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = Lock(store, "a", ttl=60).acquire()
    assert "no thread to renew leases" in caplog.text
    second = Lock(store, "b", ttl=60).acquire()
    for lease in (first, second):
        store.until(
            lambda calls, lease=lease: any(  # type: ignore[misc]
                call.method == "renew" and lease.holder in call.holders for call in calls
            )
        )
        lease.release()


@pytest.mark.parametrize("where", ["on_lost", "hook"])
@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
@often
def test_callback_that_raises_anything_ends_neither_the_thread_nor_the_renewal_of_others(
    store: Flaky, caplog: pytest.LogCaptureFixture, where: str, error: BaseException
) -> None:
    def leave(event: hooks.Event | None = None) -> None:
        if event is None or event.kind == "lost":
            raise error

    if where == "hook":
        hooks.subscribe(leave)
    try:
        lost = Lock(store, "a", ttl=60, on_lost=leave if where == "on_lost" else None).acquire()
        other = Lock(store, "b", ttl=60).acquire()
        assert run(store.force_release(BLOCKING, "a", lost.token))
        until(lambda: lost.lost)
        asked = len(store.calls)
        store.until(
            lambda calls: any(call.method == "renew" and other.holder in call.holders for call in calls[asked:])
        )
        until(lambda: type(error).__name__ in caplog.text)
        other.release()
    finally:
        hooks.unsubscribe(leave)


@pytest.mark.parametrize("where", ["on_lost", "hook", "logging"])
@often
def test_callback_that_blocks_delays_nobodys_renewal(store: Flaky, where: str) -> None:
    told, free = threading.Event(), threading.Event()

    def block(event: Any = None) -> bool:
        if not isinstance(event, hooks.Event) or event.kind == "lost":
            told.set()
            free.wait(WITHIN)
        return True

    if where == "hook":
        hooks.subscribe(block)
    elif where == "logging":
        logging.getLogger("dlock").addFilter(block)
    try:
        lost = Lock(store, "a", ttl=60, on_lost=block if where == "on_lost" else None).acquire()
        other = Lock(store, "b", ttl=60).acquire()
        assert run(store.force_release(BLOCKING, "a", lost.token))
        assert told.wait(WITHIN)
        asked = renewals(store)
        store.until(lambda _: renewals(store) >= asked + 5)
        assert not other.lost
        other.release()
    finally:
        free.set()
        hooks.unsubscribe(block)
        logging.getLogger("dlock").removeFilter(block)


@often
def test_loss_is_told_before_the_release_that_follows_it(store: Flaky) -> None:
    events: list[str] = []
    free = threading.Event()

    def block(event: hooks.Event) -> None:
        if event.name == "told-in-order":  # Leases of other tests may still cause events.
            if event.kind == "lost":
                free.wait(WITHIN)
            events.append(event.kind)

    hooks.subscribe(block)
    try:
        lease = Lock(store, "told-in-order", ttl=60).acquire()
        assert run(store.force_release(BLOCKING, lease.name, lease.token))
        until(lambda: lease._held in _told_in)
        lease.release()
        free.set()
        until(lambda: len(events) == 3)
    finally:
        hooks.unsubscribe(block)
    assert events == ["acquired", "lost", "released"]


@often
def test_thread_that_has_died_is_replaced_at_the_next_lease(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    dog = watchdog.Watchdog()
    monkeypatch.setitem(watchdog._watchdogs, store, dog)
    with monkeypatch.context() as patch:
        patch.setattr(dog.scheduler.thread, "_serve", lambda: _die_in_this_thread(dog.scheduler.thread))
        patch.setattr(dog.scheduler.thread, "_has_work", Once())
        first = Lock(store, "a", ttl=60).acquire()
        until(lambda: not dog.scheduler.thread.is_running)
    second = Lock(store, "b", ttl=60).acquire()
    for lease in (first, second):
        store.until(
            lambda calls, lease=lease: any(  # type: ignore[misc]
                call.method == "renew" and lease.holder in call.holders for call in calls
            )
        )
        lease.release()


class Once:
    """True the first time only."""

    asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == 1


def _die_in_this_thread(thread: Any) -> None:
    raise GeneratorExit


@often
def test_renewal_that_fails_in_our_own_code_is_tried_again(store: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    dog, failures = watchdog.Watchdog(), [MemoryError(), asyncio.CancelledError()]
    monkeypatch.setitem(watchdog._watchdogs, store, dog)
    ask = dog._ask

    def fail(leases: Any) -> None:
        if failures:
            raise failures.pop()
        ask(leases)

    monkeypatch.setattr(dog, "_ask", fail)
    with Lock(store, "a", ttl=60) as lease:
        store.until(lambda _: renewals(store) >= 4)
        assert not lease.lost
    assert not failures


@pytest.mark.parametrize("step", ["plan", "abandon"])
def test_step_that_is_interrupted_at_any_bytecode_stops_no_renewal_and_locks_nobody_out(
    store: Flaky, step: str
) -> None:
    """A signal handler may raise after any bytecode; here a trace function does."""
    dog = watchdog.Watchdog()
    held = Lock(store, "a", ttl=60, renew=False).acquire()
    other = Lock(store, "b", ttl=60, renew=False).acquire()
    interrupts = 0
    for at in range(1, 200):
        dog.plan(30.0, other._held)
        dog.plan(30.0, held._held)
        call = (lambda: dog.plan(40.0, held._held)) if step == "plan" else held._held.abandon
        interrupted = interrupted_at(at, call)
        interrupts += interrupted
        left = [known() for bucket in dog._due.values() for known in bucket.values()]
        assert other._held in left
        if step == "plan":
            due = [tick for tick in dog._due if held.holder in dog._due[tick]]
            assert any(dog._is_due(held._held, tick) for tick in due)
        if not interrupted:
            break
    assert 5 < interrupts < 199
    held.release()
    other.release()


class Interrupted(BaseException):
    """Raised by a signal handler."""


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Call a function, and raise at its `number`-th bytecode in our modules; False if it has fewer."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_filename in {watchdog.__file__, records.__file__}:
            count += 1
            if count == number:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame asked for it before settrace.
    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def test_finalizer_that_ends_or_begins_a_lease_in_the_middle_of_watching_another_locks_nobody_out(store: Flaky) -> None:
    Lock(store, "a").acquire().release()
    dog, left = watchdog._watchdogs[store], Lock(store, "left").acquire()
    entered: list[bool] = []

    class Collected(dict[int, Any]):
        """Acts as if a session were collected in the middle of a step."""

        def setdefault(self, *given: Any) -> Any:
            if not entered:
                entered.append(True)
                left.release()
                Lock(store, "other", ttl=10).acquire().release()
            return super().setdefault(*given)

    dog._due = Collected(dog._due)
    thread = threading.Thread(target=lambda: Lock(store, "b", ttl=20).acquire().release(), daemon=True)
    thread.start()
    thread.join(WITHIN)
    assert not thread.is_alive()
    assert entered


def test_lease_that_is_due_at_another_time_by_now_is_renewed_then_and_once(store: Flaky) -> None:
    with Lock(store, "a", ttl=60) as lease:
        dog, held = watchdog._watchdogs[store], lease._held
        early = int(clock() * watchdog.TICKS_PER_S) - 1
        dog._due[early] = records.Bucket(early)
        dog._due[early][lease.holder] = weakref.ref(held)
        assert held.renewal_tick > early
        assert dog._take() == []


def test_released_leases_leave_nothing_behind_in_the_watchdog(store: Flaky) -> None:
    dog = watchdog.Watchdog()
    with Lock(store, "a", ttl=60, renew=False) as lease:
        for seconds in range(1, 50):
            dog.plan(seconds, lease._held)
            lease._held.abandon()
    assert dog._take(clean=True) == []
    assert not dog._due


def test_lease_that_is_released_waits_for_no_renewal(store: Flaky) -> None:
    dog, lease = watchdog.Watchdog(), Lock(store, "a", ttl=60, renew=False).acquire()
    dog.plan(30.0, lease._held)
    assert list(map(len, dog._due.values())) == [1]
    lease.release()
    assert list(map(len, dog._due.values())) == [0]


def test_lease_is_renewed_after_each_third_of_its_time(
    store: Flaky, held: LeaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[float] = []
    monkeypatch.setattr(watchdog.Watchdog, "plan", lambda _, seconds, *leases: planned.append(seconds))
    with Lock(store, "a", ttl=60):
        pass
    watchdog.Watchdog()._renew([held])
    assert planned == pytest.approx([20.0, 10.0], rel=0.02)


@pytest.mark.parametrize("ttl", [0.5, 1.0, 2.0])
def test_lease_of_any_ttl_is_renewed_and_planned_again(
    runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch, ttl: float
) -> None:
    planned: list[float] = []
    monkeypatch.setattr(watchdog.Watchdog, "plan", lambda _, seconds, *leases: planned.extend([seconds] * len(leases)))
    request = new_request("a", LockOptions(ttl, 0.0))
    held = LeaseRecord(Scripted(runtime, [ttl]), request, Granted(7, ttl), runtime.now() - ttl / 2, runtime.now)
    watchdog.Watchdog()._renew([held])
    assert planned == [ttl / 3]
