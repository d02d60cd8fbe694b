"""What this process knows of a grant: its validity, its loss, its end."""

import logging
import os
from typing import Any

import pytest

from dlock_core.backend import Granted, Released
from dlock_core.errors import LeaseLost, NotHeld
from dlock_core.leases import lease
from dlock_core.leases.acquisition import new_request
from dlock_core.leases.lease import LeaseRecord, LeaseState, valid_until
from dlock_core.observability import hooks
from dlock_core.options import LockOptions
from dlock_core.testing import ManualRuntime, MemoryBackend
from tests.waiting import until


@pytest.fixture
def runtime() -> ManualRuntime:
    return ManualRuntime()


@pytest.fixture
def held(runtime: ManualRuntime) -> LeaseRecord:
    request = new_request("a", LockOptions(10.0, 0.0))
    return LeaseRecord(MemoryBackend(), request, Granted(7, 10.0), runtime.now(), runtime.now)


def test_validity_is_less_than_the_ttl_by_drift_and_coarseness() -> None:
    assert valid_until(100.0, 10.0) == pytest.approx(100 + 9.9 - 0.002)
    assert valid_until(100.0, 0.001) < 100.0


def test_lease_is_lost_when_its_time_is_over_without_any_question(held: LeaseRecord, runtime: ManualRuntime) -> None:
    assert not held.is_lost()
    runtime.advance(9.9)
    assert held.remaining() == 0.0
    assert held.is_lost()
    with pytest.raises(LeaseLost, match="ran out before it was renewed"):
        held.ensure()


def test_extension_never_shortens(held: LeaseRecord, runtime: ManualRuntime) -> None:
    before = held.remaining()
    held.extend(runtime.now() - 5.0, 10.0)
    assert held.remaining() == before


def test_a_loss_is_final(held: LeaseRecord, runtime: ManualRuntime) -> None:
    runtime.advance(9.9)
    held.extend(runtime.now(), 10.0)
    assert held.is_lost()
    assert held.loss_reason


def test_loss_is_told_once_and_a_failing_callback_stops_nobody(
    held: LeaseRecord, runtime: ManualRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    events: list[hooks.Event] = []

    def fail() -> None:
        told.append("on_lost")
        raise ZeroDivisionError

    held = LeaseRecord(MemoryBackend(), held.request, held.granted, held.since, held.now, on_lost=fail)
    hooks.subscribe(events.append)
    try:
        with caplog.at_level(logging.WARNING, logger="dlock"):
            runtime.advance(5.0)
            held.lose("the first reason")
            held.lose("the second reason")
            until(lambda: told)  # The callback runs in another thread.
    finally:
        hooks.unsubscribe(events.append)
    assert told == ["on_lost"]
    assert [(event.kind, event.reason) for event in events] == [("lost", "the first reason")]
    assert (events[0].seconds, events[0].contended) == (5.0, False)
    assert held.why() == "the first reason"
    assert "'a' (token 7) is lost: the first reason" in caplog.text


def test_state_is_that_of_what_happened_last_and_an_end_is_final(held: LeaseRecord) -> None:
    assert held.state is LeaseState.HELD
    held.abandon()
    assert held.state is LeaseState.ABANDONED
    held.begin_release()
    assert held.state is LeaseState.RELEASING
    held.lose("another has it")
    assert held.state is LeaseState.LOST
    held.end(Released.STOLEN)
    assert held.state is LeaseState.ENDED


def test_release_is_told_with_how_long_the_lease_was_held(held: LeaseRecord, runtime: ManualRuntime) -> None:
    events: list[hooks.Event] = []
    hooks.subscribe(events.append)
    try:
        runtime.advance(3.0)
        held.emit("released", "released")
    finally:
        hooks.unsubscribe(events.append)
    assert [(event.seconds, event.contended, event.lease) for event in events] == [(3.0, False, held)]


def test_released_lease_is_not_lost_and_cannot_be_lost_any_more(held: LeaseRecord) -> None:
    assert held.end(Released.RELEASED)
    held.lose("too late")
    assert not held.end(Released.STOLEN)
    assert held.ended is Released.RELEASED
    assert held.remaining() == 0.0
    assert not held.is_lost()
    assert held.why() == "it was released"


def test_lease_of_another_process_is_not_ours(held: LeaseRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getpid()
    monkeypatch.setattr(lease, "_own_pid", parent + 1)
    assert held.remaining() == 0.0
    with pytest.raises(LeaseLost, match=f"process {parent}"):
        held.ensure()
    with pytest.raises(NotHeld, match="forked"):
        held.ensure_own_process()


def test_forked_child_leaves_the_lease_of_its_parent_alone(held: LeaseRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_own_pid", os.getpid() + 1)
    with pytest.raises(NotHeld, match="forked"):
        held.leave(None)
    assert held.has_handles


def test_errors_carry_the_token(held: LeaseRecord, runtime: ManualRuntime) -> None:
    runtime.advance(60.0)
    caught: Any
    with pytest.raises(LeaseLost) as caught:
        held.ensure()
    assert (caught.value.name, caught.value.token) == ("a", 7)


@pytest.mark.parametrize("found", [Released.EXPIRED, Released.STOLEN])
def test_lost_lease_stays_lost_when_it_is_released(held: LeaseRecord, runtime: ManualRuntime, found: Released) -> None:
    runtime.advance(31)
    assert held.is_lost()
    held.begin_release()
    held.end(found)
    assert held.is_lost()


def test_lease_whose_loss_was_reported_stays_lost_although_the_store_still_had_it(held: LeaseRecord) -> None:
    held.lose("no answer")
    held.begin_release()
    held.end(Released.RELEASED)
    assert held.is_lost()


def test_lease_that_was_released_is_not_lost(held: LeaseRecord, runtime: ManualRuntime) -> None:
    held.begin_release()
    held.end(Released.RELEASED)
    runtime.advance(31)
    assert not held.is_lost()
