"""The algorithm itself, in no time: with a clock advanced by hand and a store with scripted answers."""

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from dlock_core.backend import AcquireRequest, Busy, Granted, Released, RenewalFailure
from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost, format_seconds
from dlock_core.leases import engine
from dlock_core.leases.acquisition import Acquisition, new_request
from dlock_core.leases.lease import LeaseRecord
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import ManualRuntime
from tests.core.scripted import BROKEN, DOWN, REFUSED, Ahead, Answer, Scripted

GRANTED = Granted(7, 30.0)
BUSY = Busy(2.0, owner='{"app":"shop","host":"h","pid":1,"thread":"t"}', ticket="place 3")


@pytest.fixture
def runtime() -> ManualRuntime:
    return ManualRuntime()


@pytest.fixture
def events() -> Iterator[list[hooks.Event]]:
    told: list[hooks.Event] = []
    hooks.subscribe(told.append)
    yield told
    hooks.unsubscribe(told.append)


def ask(
    runtime: ManualRuntime, store: Any, wait: float | None = 10.0, ttl: float = 30.0, **options: Any
) -> LeaseRecord:
    request = new_request("a", LockOptions(ttl, wait))
    return runtime.run(Acquisition(runtime, store, request, LockOptions(ttl, wait, renew=False)).acquire())


def held(runtime: ManualRuntime, store: Any, ttl: float = 30.0) -> LeaseRecord:
    return LeaseRecord(store, new_request("a", LockOptions(ttl, 0.0)), Granted(7, ttl), runtime.now(), runtime.now)


def test_free_lock_costs_one_question(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, GRANTED)
    lease = ask(runtime, store)
    assert (lease.token, [what for what, _ in store.calls], store.abandoned) == (7, ["try_acquire"], [])


def test_validity_counts_from_before_the_question_was_sent(runtime: ManualRuntime) -> None:
    lease = ask(runtime, Scripted(runtime, GRANTED, takes=5.0))
    assert lease.remaining() == pytest.approx(30 * 0.99 - 0.002 - 5)
    runtime.advance(lease.remaining())
    assert lease.is_lost()


def test_grant_that_arrives_old_is_confirmed_by_another_question(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, GRANTED)
    store.takes = 25.0
    runtime.at(runtime.now() + 25.0, lambda: setattr(store, "takes", 0.0))
    lease = ask(runtime, store, wait=100.0)
    assert len(store.asked("try_acquire")) == 2
    assert lease.remaining() > 29


def test_store_slower_than_the_ttl_is_unavailable_and_never_a_lease(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, GRANTED, takes=40.0)
    with pytest.raises(BackendUnavailable, match="more slowly than the ttl"):
        ask(runtime, store, wait=100.0)
    assert len(store.abandoned) == 1


def test_store_slower_than_the_ttl_is_told_to_the_hooks(runtime: ManualRuntime, events: list[hooks.Event]) -> None:
    with pytest.raises(BackendUnavailable):
        ask(runtime, Scripted(runtime, GRANTED, takes=40.0), wait=100.0)
    assert [(event.kind, event.reason) for event in events] == [
        ("unavailable", "it answers more slowly than the ttl of 30.0 s")
    ]


def test_last_question_is_asked_at_the_deadline(runtime: ManualRuntime) -> None:
    store, start = Scripted(runtime, BUSY), runtime.now()
    with pytest.raises(AcquireTimeout):
        ask(runtime, store, wait=5.0)
    assert store.asked("try_acquire") == [start, start + 2, start + 4, start + 5]


def test_lock_that_becomes_free_at_the_very_deadline_is_taken(runtime: ManualRuntime) -> None:
    assert ask(runtime, Scripted(runtime, BUSY, BUSY, BUSY, GRANTED), wait=5.0).token == 7


def test_wake_ups_do_not_restart_the_wait(runtime: ManualRuntime) -> None:
    store, start = Scripted(runtime, Busy(0.3)), runtime.now()
    with pytest.raises(AcquireTimeout) as caught:
        ask(runtime, store, wait=2.0)
    assert runtime.now() == pytest.approx(start + 2.0)
    assert caught.value.waited == pytest.approx(2.0)


def test_grant_that_comes_with_the_wake_up_costs_no_further_question(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, BUSY)
    store.news = GRANTED
    assert ask(runtime, store).token == 7
    assert [what for what, _ in store.calls] == ["try_acquire", "wait"]


def test_wait_of_zero_asks_once_and_never_waits(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, BUSY)
    with pytest.raises(AcquireTimeout):
        ask(runtime, store, wait=0.0)
    assert [what for what, _ in store.calls] == ["try_acquire"]


def test_waiting_for_ever_ends_when_the_lock_is_free(runtime: ManualRuntime) -> None:
    assert ask(runtime, Scripted(runtime, *[BUSY] * 1000, GRANTED), wait=None).token == 7


def test_timeout_carries_name_owner_and_advice(runtime: ManualRuntime, events: list[hooks.Event]) -> None:
    with pytest.raises(
        AcquireTimeout, match=r"lock 'a' was not acquired within 1 s because it is held by shop@h pid 1 t: try"
    ) as caught:
        ask(runtime, Scripted(runtime, BUSY), wait=1.0)
    assert (caught.value.name, caught.value.held_by) == ("a", "shop@h pid 1 t")
    assert [(event.kind, event.name) for event in events] == [("timeout", "a")]


@pytest.mark.parametrize(("free_in", "advice"), [(0.3, 0.3), (1.5, 1.0)])
def test_advice_is_to_come_back_when_the_lock_may_be_free_and_after_a_second_at_most(
    runtime: ManualRuntime, free_in: float, advice: float
) -> None:
    with pytest.raises(AcquireTimeout) as caught:
        ask(runtime, Scripted(runtime, Busy(free_in)), wait=0.0)
    assert caught.value.retry_after == advice


def test_timeout_of_a_single_try_says_so_and_no_time_that_nobody_waited(runtime: ManualRuntime) -> None:
    with pytest.raises(
        AcquireTimeout, match=r"lock 'a' is held by shop@h pid 1 t, and wait=0 tries only once: try again later"
    ):
        ask(runtime, Scripted(runtime, BUSY), wait=0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (8.19e-05, "less than 1 ms"),
        (0.0537, "54 ms"),
        (0.303, "303 ms"),
        (1.0, "1 s"),
        (2.54, "2.5 s"),
        (600.04, "600 s"),
    ],
)
def test_seconds_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert f"within {text}" in str(AcquireTimeout("a", waited=seconds))


def test_try_acquire_takes_no_place_in_the_queue(runtime: ManualRuntime) -> None:
    seen: list[AcquireRequest] = []

    class Watched(Scripted):
        async def try_acquire(self, runtime: Any, request: AcquireRequest, *args: Any, **kwargs: Any) -> Any:
            seen.append(request)
            return await super().try_acquire(runtime, request, *args, **kwargs)

    store = Watched(runtime, BUSY)
    request = new_request("a", LockOptions(30.0, None))
    assert (
        runtime.run(
            Acquisition(runtime, store, request._replace(queue=False), LockOptions(wait=0.0, renew=False)).run()
        )
        is None
    )  # type: ignore[arg-type]
    assert [one.queue for one in seen] == [False]
    assert store.abandoned == []


def test_unreachable_store_is_asked_again_as_the_same_holder_until_the_deadline(
    runtime: ManualRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    store, start = Scripted(runtime, DOWN), runtime.now()
    with caplog.at_level(logging.WARNING, logger="dlock"), pytest.raises(BackendUnavailable, match="no answer"):
        ask(runtime, store, wait=3.0)
    asked = store.asked("try_acquire")
    assert start + 2.7 < asked[-1] <= start + 3.0
    assert max(later - earlier for earlier, later in pairwise(asked)) <= 0.25
    assert store.unsure == [False] + [True] * (len(store.unsure) - 1)
    assert len(store.abandoned) == 1
    assert len(caplog.records) == 1


def test_lost_reply_is_asked_for_again_and_granted(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, DOWN, GRANTED)
    assert ask(runtime, store).token == 7
    assert store.unsure == [False, True]
    assert store.abandoned == []


def test_idle_connection_that_was_dead_costs_one_more_question_even_with_no_wait(runtime: ManualRuntime) -> None:
    store, start = Scripted(runtime, BROKEN, GRANTED), runtime.now()
    assert ask(runtime, store, wait=0.0).token == 7
    assert runtime.now() == start


def test_store_that_refuses_us_is_not_asked_again(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, REFUSED)
    with pytest.raises(BackendUnavailable, match="wrong password"):
        ask(runtime, store, wait=None)
    assert len(store.asked("try_acquire")) == 1


def test_unreachable_store_with_no_wait_is_an_error_and_not_a_taken_lock(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, DOWN)
    with pytest.raises(BackendUnavailable):
        ask(runtime, store, wait=0.0)
    assert len(store.asked("try_acquire")) == 1
    request = new_request("a", LockOptions(30.0, 0.0))
    with pytest.raises(BackendUnavailable):
        runtime.run(
            Acquisition(runtime, store, request._replace(queue=False), LockOptions(wait=0.0, renew=False)).run()
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [BUSY, DOWN, KeyboardInterrupt(), RuntimeError("a bug in the backend")], ids=repr)
def test_every_end_without_the_lock_abandons_once(runtime: ManualRuntime, last: Answer) -> None:
    store = Scripted(runtime, BUSY, last)
    with pytest.raises((AcquireTimeout, BackendUnavailable, KeyboardInterrupt, RuntimeError)):
        ask(runtime, store, wait=1.0)
    assert len(store.abandoned) == 1
    assert store.tickets[-1] == "place 3"


@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_silent_store_is_rid_of_our_traces_behind_the_caller(wait: float) -> None:
    runtime = Ahead()
    began = runtime.now()
    store = Scripted(runtime, DOWN, takes=2.0)
    with pytest.raises(BackendUnavailable):
        ask(runtime, store, wait=wait)
    assert (runtime.now() - began, store.abandoned) == (pytest.approx(2.0), [])
    (clean_up,) = runtime.left
    runtime.run(clean_up)
    assert len(store.abandoned) == 1


@pytest.mark.parametrize("last", [DOWN, KeyboardInterrupt()], ids=repr)
def test_caller_who_has_time_or_was_interrupted_waits_for_the_abandon(last: Answer) -> None:
    runtime = Ahead()
    store = Scripted(runtime, last, takes=0.0 if last is DOWN else 2.0)
    with pytest.raises((BackendUnavailable, KeyboardInterrupt)):
        ask(runtime, store, wait=0.0)
    assert (runtime.left, len(store.abandoned)) == ([], 1)


def test_interrupt_while_waiting_abandons_with_the_ticket(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, BUSY)

    def interrupt() -> None:
        raise KeyboardInterrupt

    runtime.at(runtime.now() + 1.0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(runtime, store)
    assert (len(store.abandoned), store.tickets[-1]) == (1, "place 3")


def test_abandon_that_fails_does_not_hide_why_we_gave_up(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, KeyboardInterrupt())

    def fail() -> None:
        raise DOWN

    store.on_abandon = fail
    with pytest.raises(KeyboardInterrupt):
        ask(runtime, store)
    assert len(store.abandoned) == 1


def test_abandon_over_a_dead_connection_is_tried_once_more(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, BUSY)

    def fail() -> None:
        raise BROKEN

    store.on_abandon = fail
    with pytest.raises(AcquireTimeout):
        ask(runtime, store, wait=1.0)
    assert len(store.abandoned) == 2


def test_first_answer_of_a_release_stands(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, Released.RELEASED, Released.STOLEN)
    lease = held(runtime, store)
    answers = [runtime.run(engine.release(runtime, lease)) for _ in range(3)]
    assert answers == [Released.RELEASED] * 3
    assert len(store.asked("release")) == 1


def test_lease_that_has_ended_with_its_transaction_is_released_and_told_so_once(
    runtime: ManualRuntime, events: list[hooks.Event]
) -> None:
    store = Scripted(runtime, Released.STOLEN)
    lease = held(runtime, store)
    for _ in range(2):
        engine.released(lease)
    assert (lease.ended, runtime.run(engine.release(runtime, lease))) == (Released.RELEASED, Released.RELEASED)
    assert [(event.kind, event.reason) for event in events] == [("released", "released")]
    assert store.calls == []


@pytest.mark.parametrize("found", [Released.EXPIRED, Released.STOLEN])
def test_release_tells_what_it_found(runtime: ManualRuntime, found: Released) -> None:
    assert runtime.run(engine.release(runtime, held(runtime, Scripted(runtime, found)))) is found


@pytest.mark.parametrize("second", [Released.EXPIRED, Released.STOLEN])
def test_release_whose_first_answer_was_lost_is_a_release(runtime: ManualRuntime, second: Released) -> None:
    lease = held(runtime, Scripted(runtime, DOWN, second))
    assert runtime.run(engine.release(runtime, lease)) is Released.RELEASED


def test_release_that_failed_may_be_repeated_and_is_a_release(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, DOWN, DOWN, Released.EXPIRED))
    with pytest.raises(BackendUnavailable):
        runtime.run(engine.release(runtime, lease))
    assert runtime.run(engine.release(runtime, lease)) is Released.RELEASED


def test_release_after_the_lease_ran_out_is_never_called_a_release_of_ours(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, DOWN, Released.STOLEN))
    runtime.advance(31.0)
    assert runtime.run(engine.release(runtime, lease)) is Released.STOLEN


def test_renewal_counts_from_before_it_was_sent(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, [30.0], takes=5.0))
    runtime.advance(10.0)
    runtime.run(engine.renew(runtime, lease))
    assert lease.remaining() == pytest.approx(30 * 0.99 - 0.002 - 5)


def test_renewal_of_a_lease_that_ran_out_is_refused_without_a_question(runtime: ManualRuntime) -> None:
    store = Scripted(runtime, [30.0])
    lease = held(runtime, store)
    runtime.advance(31.0)
    with pytest.raises(LeaseLost):
        runtime.run(engine.renew(runtime, lease))
    assert store.calls == []


def test_renewal_answered_after_the_lease_ran_out_does_not_heal_it(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, [30.0], takes=31.0))
    with pytest.raises(LeaseLost):
        runtime.run(engine.renew(runtime, lease))
    assert lease.is_lost()


def test_renewal_that_finds_it_gone_is_a_loss(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, [RenewalFailure.LOST]))
    with pytest.raises(LeaseLost, match="or lost it"):
        runtime.run(engine.renew(runtime, lease))
    assert lease.is_lost()


def test_renewal_that_finds_it_released_by_another_thread_is_no_loss(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, [RenewalFailure.LOST], takes=1.0))
    runtime.at(runtime.now() + 0.5, lease.begin_release)
    with pytest.raises(LeaseLost, match="is being released"):
        runtime.run(engine.renew(runtime, lease))
    assert not lease.is_lost()


def test_unanswered_renewal_says_nothing_about_the_lease(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, DOWN))
    before = lease.remaining()
    with pytest.raises(BackendUnavailable):
        runtime.run(engine.renew(runtime, lease))
    assert lease.remaining() == before


def test_unanswered_renewal_for_a_shorter_time_counts_as_done(runtime: ManualRuntime) -> None:
    lease = held(runtime, Scripted(runtime, DOWN))
    with pytest.raises(BackendUnavailable):
        runtime.run(engine.renew(runtime, lease, 5.0))
    assert lease.remaining() <= 5.0


def test_store_that_lost_its_time_is_asked_for_a_greater_token(runtime: ManualRuntime) -> None:
    class Both(Scripted):
        async def renew(self, runtime: Any, renewals: Any) -> Any:
            return [30.0]

    lease = held(runtime, Both(runtime, Granted(100, 30.0)))
    assert runtime.run(engine.raise_token(runtime, lease, 99))
    assert lease.token == 100
    assert not runtime.run(engine.raise_token(runtime, lease, 100))
    assert lease.token == 100


def test_lease_that_is_released_while_a_greater_token_is_asked_for_leaves_nothing() -> None:
    class Overtaken(MemoryBackend):
        """A store whose lease is released before the request for a greater token arrives."""

        async def try_acquire(self, runtime: Any, request: Any, ticket: Any = None, *, unsure: bool = False) -> Any:
            if request.floor:
                await engine.release(runtime, lease)
            return await super().try_acquire(runtime, request, ticket, unsure=unsure)

    store, runtime = Overtaken(), BLOCKING
    request, options = new_request("a", LockOptions(30.0, 0.0)), LockOptions(30.0, 0.0, renew=False)
    lease = run(Acquisition(runtime, store, request, options).acquire())
    assert not run(engine.raise_token(runtime, lease, lease.token))
    assert [state.holders for state in run(store.inspect(runtime, "a"))] == [()]


@pytest.mark.parametrize("failing", ["renew", "try_acquire"])
def test_store_that_cannot_be_reached_gives_no_greater_token(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise BackendUnavailable("a", reason="it is away")

    store, options = MemoryBackend(), LockOptions(30.0, 0.0, renew=False)
    lease = run(Acquisition(BLOCKING, store, new_request("a", options), options).acquire())
    monkeypatch.setattr(store, failing, away)
    assert not run(engine.raise_token(BLOCKING, lease, lease.token))


def test_two_holders_of_one_memory_store_take_turns_in_no_time(runtime: ManualRuntime) -> None:
    store, start = MemoryBackend(runtime.now), runtime.now()
    first = ask(runtime, store)
    runtime.at(start + 4.0, lambda: runtime.run(engine.release(runtime, first)))
    second = ask(runtime, store, wait=None)
    assert runtime.now() == start + 4.0
    assert second.token > first.token


def test_dead_holder_is_followed_when_its_ttl_is_over(runtime: ManualRuntime) -> None:
    store, start = MemoryBackend(runtime.now), runtime.now()
    first = ask(runtime, store)
    second = ask(runtime, store, wait=None)
    assert start + 30 <= runtime.now() <= start + 31.1
    assert first.is_lost()
    assert not second.is_lost()
