"""One thread renews every lease of a store, in batches, and says what was lost."""

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dlock_core import Lock, hooks, watchdog
from dlock_core.backend import Granted
from dlock_core.errors import BackendUnavailable
from dlock_core.held import Held
from dlock_core.lock import new_request
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing import ManualRuntime, MemoryBackend
from dlock_core.testing.contract.observed import Observed
from tests.core.scripted import DOWN, Scripted

WITHIN = 30.0


def until(condition: Callable[[], object]) -> None:
    for _ in range(int(WITHIN * 200)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise TimeoutError


class Flaky(Observed):
    """A store in memory whose renewals fail while `failure` is set."""

    failure: BaseException | None = None

    async def renew_many(self, runtime: Any, renewals: Any) -> list[float | None]:
        answers = await super().renew_many(runtime, renewals)
        if self.failure is not None:
            raise self.failure
        return answers


@pytest.fixture
def store() -> Flaky:
    return Flaky(MemoryBackend())


@pytest.fixture
def runtime() -> ManualRuntime:
    return ManualRuntime()


@pytest.fixture
def held(runtime: ManualRuntime) -> Held:
    store = Scripted(runtime, [30.0])
    return Held(
        store, new_request("a", 30.0, 0.0, shared=False, fair=True), Granted(7, 30.0), runtime.now(), runtime.now
    )


def renewals(store: Observed) -> int:
    return sum(call.what == "renew_many" for call in list(store.calls))


def test_lease_that_comes_while_the_watchdog_is_idle_is_renewed(store: Flaky) -> None:
    Lock(store, "a", ttl=1.0).acquire().release()
    until(lambda: watchdog._dogs[store]._next == watchdog._dogs[store]._ends)
    with Lock(store, "a", ttl=1.0) as lease:
        store.until(lambda _: renewals(store) >= 1)
        assert not lease.lost


def test_short_lease_is_renewed_although_a_long_one_is_due_later(store: Flaky) -> None:
    with Lock(store, "long", ttl=1000.0):
        until(lambda: watchdog._dogs[store]._next > 0)
        with Lock(store, "short", ttl=1.0) as lease:
            store.until(lambda _: renewals(store) >= 1)
            assert not lease.lost


def test_one_thread_for_any_number_of_leases(store: Flaky) -> None:
    leases = [Lock(store, f"a:{number}", ttl=0.8).acquire() for number in range(300)]
    store.until(lambda _: renewals(store) >= 4)
    assert (
        sum(
            thread.name == "dlock-watchdog" and thread is watchdog._dogs[store]._thread
            for thread in threading.enumerate()
        )
        == 1
    )
    assert renewals(store) < 100
    for lease in leases:
        lease.release()


def test_unanswered_renewals_are_asked_again_and_lose_nothing(store: Flaky) -> None:
    told: list[bool] = []
    with Lock(store, "a", ttl=1.0, on_lost=lambda: told.append(True)) as lease:
        store.failure = DOWN
        store.until(lambda _: renewals(store) >= 3)
        store.failure = None
        store.until(lambda _: renewals(store) >= 6)
        assert not lease.lost
    assert told == []


def test_lease_that_nobody_can_renew_is_lost_with_the_reason_and_told_once(store: Flaky) -> None:
    told: list[bool] = []
    lost = threading.Event()

    def on_lost() -> None:
        told.append(True)
        lost.set()

    lease = Lock(store, "a", ttl=0.3, on_lost=on_lost).acquire()
    store.failure = DOWN
    assert lost.wait(WITHIN)
    assert lease.lost
    with pytest.raises(Exception, match="could not be renewed in time: no answer"):
        lease.ensure_held()
    assert told == [True]


def test_any_surprise_in_a_renewal_is_logged_and_the_watchdog_lives_on(
    store: Flaky, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="dlock"), Lock(store, "a", ttl=1.0) as lease:
        store.failure = ZeroDivisionError()
        store.until(lambda _: renewals(store) >= 2)
        store.failure = None
        store.until(lambda _: renewals(store) >= 4)
        assert not lease.lost
    assert "a renewal failed" in caplog.text


def test_lease_without_renewal_is_left_alone(store: Flaky) -> None:
    with Lock(store, "a", ttl=1.0, renew=False) as lease, Lock(store, "b", ttl=0.6):
        store.until(lambda _: renewals(store) >= 2)
        assert all(lease.holder not in call.holders for call in store.calls if call.what == "renew_many")


def test_thread_ends_when_there_was_nothing_to_do_for_long_and_comes_back(
    store: Flaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "IDLE", 0.01)
    Lock(store, "a", ttl=1.0).acquire().release()
    until(lambda: watchdog._dogs[store]._thread is None)
    with Lock(store, "a", ttl=1.0) as lease:
        store.until(lambda _: renewals(store) >= 1)
        assert not lease.lost


def test_lease_whose_time_is_over_is_lost_without_a_question(held: Held, runtime: ManualRuntime) -> None:
    runtime.advance(31.0)
    watchdog.Watchdog()._renew([held])
    assert held.lost_because
    assert held.backend.calls == []  # type: ignore[attr-defined]


def test_renewal_answered_after_the_lease_ran_out_does_not_heal_it(held: Held, runtime: ManualRuntime) -> None:
    held.backend.takes = 31.0  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert held.lost_because


def test_renewal_for_an_earlier_ttl_does_not_stretch_a_lease_that_was_shortened(
    held: Held, runtime: ManualRuntime
) -> None:
    def shorten() -> None:
        held.request = new_request("a", 1.0, 0.0, shared=False, fair=True)
        held.until = runtime.now() + 1.0

    runtime.at(runtime.now() + 0.5, shorten)
    held.backend.takes = 0.6  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert held.remaining() <= 1.0


def test_release_during_a_renewal_is_not_a_loss(held: Held, runtime: ManualRuntime) -> None:
    def release() -> None:
        held.renewing = False

    held.backend.script = [[None]]  # type: ignore[attr-defined]
    held.backend.takes = 1.0  # type: ignore[attr-defined]
    runtime.at(runtime.now() + 0.5, release)
    watchdog.Watchdog()._renew([held])
    assert not held.lost_because


def test_backend_that_nobody_uses_any_more_is_forgotten() -> None:
    store = MemoryBackend()
    Lock(store, "a").acquire().release()
    assert store in watchdog._dogs
    before = len(watchdog._dogs)
    del store
    gc.collect()
    assert len(watchdog._dogs) < before


def test_unavailable_store_is_never_a_loss_by_itself(held: Held) -> None:
    held.backend.script = [BackendUnavailable("a", reason="down")]  # type: ignore[attr-defined]
    watchdog.Watchdog()._renew([held])
    assert not held.is_lost()
    assert "down" in held.trouble


def test_leases_of_a_process_that_had_no_thread_to_spare_are_renewed_as_soon_as_there_is_one(
    store: Flaky, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = Lock(store, "a", ttl=6).acquire()
    assert "no thread to renew leases" in caplog.text
    second = Lock(store, "b", ttl=6).acquire()
    for lease in (first, second):
        store.until(
            lambda calls, lease=lease: any(  # type: ignore[misc]
                call.what == "renew_many" and lease.holder in call.holders for call in calls
            )
        )
        lease.release()


@pytest.mark.parametrize("where", ["on_lost", "hook"])
def test_callback_that_wants_to_exit_ends_neither_the_thread_nor_the_renewal_of_others(
    store: Flaky, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def leave(event: hooks.Event | None = None) -> None:
        if event is None or event.kind == "lost":
            sys.exit(3)

    if where == "hook":
        hooks.subscribe(leave)
    try:
        lost = Lock(store, "a", ttl=6, on_lost=leave if where == "on_lost" else None).acquire()
        other = Lock(store, "b", ttl=6).acquire()
        assert run(store.force_release(BLOCKING, "a", lost.token))
        until(lambda: lost.lost)
        asked = len(store.calls)
        store.until(
            lambda calls: any(call.what == "renew_many" and other.holder in call.holders for call in calls[asked:])
        )
        assert "SystemExit: 3" in caplog.text
        other.release()
    finally:
        hooks.unsubscribe(leave)


def test_lease_that_the_garbage_collector_ends_in_the_middle_of_watching_another_locks_nobody_out(store: Flaky) -> None:
    Lock(store, "a").acquire().release()
    dog, left = watchdog._dogs[store], Lock(store, "left").acquire()

    class Collected(dict[int, Any]):
        """As if a session were collected between any two steps."""

        def setdefault(self, *given: Any) -> Any:
            watchdog.unwatch(left._held)
            return super().setdefault(*given)

    dog._due = Collected(dog._due)
    thread = threading.Thread(target=lambda: Lock(store, "b").acquire().release(), daemon=True)
    thread.start()
    thread.join(WITHIN)
    assert not thread.is_alive()
    left.release()


def test_lease_that_is_due_at_another_time_by_now_is_renewed_then_and_once(store: Flaky) -> None:
    with Lock(store, "a", ttl=60) as lease:
        dog, held = watchdog._dogs[store], lease._held
        early = int(clock() * watchdog.TICKS) - 1
        with dog._guard:
            dog._due[early] = {weakref.ref(held)}
            assert held.due > early
        assert dog._take() == []
