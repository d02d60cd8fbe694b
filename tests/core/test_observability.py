"""Events reach logs, Prometheus and OpenTelemetry; raw names never become labels."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dlock_core import AsyncLock, Lock, MultiLock, connect, errors, scheduler
from dlock_core.names import join
from dlock_core.observability import hooks, logs, metrics, tracing
from dlock_core.observability.patterns import OTHER, Patterns, pattern
from dlock_core.owner import serving
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import force_release
from dlock_core.testing import MemoryBackend
from dlock_core.transactions.retry import Policy, retry
from tests.garbage import collect_garbage
from tests.waiting import until


@pytest.fixture
def events():
    seen: list[hooks.Event] = []
    hooks.subscribe(seen.append)
    yield seen
    hooks.unsubscribe(seen.append)


def kinds(events):
    return [event.kind for event in events]


class Silent(MemoryBackend):
    """A store that does not answer."""

    async def try_acquire(self, *_, **__):
        raise errors.BackendUnavailable("order:42", reason="connection refused", refused=True)


def conflict_once():
    """Run work that conflicts once and is retried."""
    outcomes = [errors.StaleObject(object(), expected=1, found=2, key=42), None]

    async def work():
        if error := outcomes.pop(0):
            raise hooks.emit_conflict(error)

    run(retry(BLOCKING, work, Policy(), lambda: 0.0))


def everything_happens():
    """Cause every kind of event at least once."""
    backend = MemoryBackend()
    with Lock(backend, "order:42"), pytest.raises(errors.AcquireTimeout):
        ask_elsewhere(backend)
    with pytest.raises(errors.BackendUnavailable):
        Lock(Silent(), "order:42", wait=0).acquire()
    lease = Lock(backend, "order:43", renew=False).acquire()
    assert force_release(backend, lease.name, lease.token, by="a test")
    with pytest.raises(errors.LeaseLost):
        lease.renew()
    lease.release()
    everything_is_told()
    conflict_once()


def everything_is_told():
    """Wait for the threads that report lost leases."""
    until(lambda: not any(thread.pending() for thread in scheduler._callback_threads))


def ask_elsewhere(backend, name="order:42", wait=0):
    """Acquire in another thread, because this one may already hold the lock."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: Lock(backend, name, wait=wait).acquire().release()).result(60)


def test_every_kind_of_event_is_told_where_it_happens(events):
    everything_happens()
    assert kinds(events) == [
        "acquired", "timeout", "released", "unavailable", "acquired", "forced", "lost", "released", "conflict", "retry",
    ]  # fmt: skip
    assert {*kinds(events)} == {*hooks.KINDS}
    timeout, unavailable, lost, ended, conflict, again = (events[place] for place in (1, 3, 6, 7, 8, 9))
    assert (timeout.name, timeout.contended) == ("order:42", True)
    assert unavailable.reason == "connection refused"
    assert lost.lease is ended.lease is events[4].lease
    assert (ended.reason, events[2].reason) == ("expired", "released")
    assert (conflict.name, conflict.reason) == ("object(42)", "StaleObject")
    assert (again.name, again.reason, again.seconds) == ("object(42)", "StaleObject", 0.0)


def test_acquire_that_waited_says_so_and_one_that_did_not_does_not(events):
    backend = MemoryBackend()
    lease = Lock(backend, "order:42").acquire()
    waiting = threading.Event()
    original = backend.wait

    async def wait(*args):
        waiting.set()
        return await original(*args)

    backend.wait = wait
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(lambda: Lock(backend, "order:42", wait=60).acquire().release())
        assert waiting.wait(60)
        lease.release()
        second.result(60)
    assert [(event.kind, event.contended) for event in events if event.kind == "acquired"] == [
        ("acquired", False),
        ("acquired", True),
    ]


def test_locks_taken_in_one_request_are_told_one_by_one(events, redis_server):
    backend = connect(redis_server.url)
    with MultiLock(backend, ["a", "b"]):
        pass  # the server knows the scripts from now on
    events.clear()
    with MultiLock(backend, ["a", "b"]):
        pass
    backend.close()
    assert [(event.kind, event.name) for event in events] == [
        ("acquired", "a"), ("acquired", "b"), ("released", "a"), ("released", "b"),
    ]  # fmt: skip
    assert events[0].lease is events[2].lease is not events[1].lease


@pytest.mark.parametrize("trouble", ["deadlock", "serialization failure", "lock timeout"])
def test_retry_tells_the_trouble_of_the_database(events, trouble):
    codes = {"deadlock": "40P01", "serialization failure": "40001", "lock timeout": "55P03"}
    error_class = type("Error", (Exception,), {"__module__": "psycopg.errors", "sqlstate": codes[trouble]})
    outcomes = [error_class(), None]

    async def work():
        if error := outcomes.pop(0):
            raise error

    run(retry(BLOCKING, work, Policy(), lambda: 0.0))
    assert [(event.kind, event.name, event.reason) for event in events] == [("retry", "", trouble)]


PATTERNS = [
    ("order:42", "order:*"),
    ("order:42:lines", "order:*:*"),
    ("nightly-report", "nightly-report"),
    ("s3-report:1", "s3-report:*"),
    ("42", "*"),
    ("42:order", "*:*"),
    (str(uuid.UUID(int=0xF47AC10B58CC4372A5670E02B2C3D479)), "*"),
    (join("ann@example.com", "profile"), "*:*"),
    (join("Größe", 1), "*:*"),
    ("x" * 49, "*"),
    ("Order(42)", "Order(*)"),
    ("Code(('a:b', 'c'))", "Code(*)"),
    ("", ""),
]


@pytest.mark.parametrize(("name", "found"), PATTERNS)
def test_pattern_keeps_what_is_locked_and_stars_which_one(name, found):
    assert pattern(name) == found


@given(st.lists(st.text(min_size=1, max_size=10), min_size=1, max_size=4).filter(lambda parts: ":" not in parts[0]))
@settings(max_examples=100, deadline=None)
def test_pattern_of_any_name_shows_no_more_than_its_first_part(parts):
    first, *rest = pattern(join(*parts)).split(":")
    assert rest == ["*"] * (len(parts) - 1)
    assert first in {"*", parts[0]}


def test_patterns_are_never_more_than_allowed_whatever_names_come():
    patterns = Patterns(max_patterns=3)
    assert [patterns(f"{letter}:1") for letter in "abcda"] == ["a:*", "b:*", "c:*", OTHER, "a:*"]
    with ThreadPoolExecutor(4) as threads:
        crowd = Patterns(naming=str, max_patterns=50)
        found = set(threads.map(crowd, [f"name-{number % 500}" for number in range(4000)]))
    assert len(found) == 51
    with pytest.raises(ValueError, match="at least 1"):
        Patterns(max_patterns=0)


def test_log_has_one_record_with_fields_for_each_event(caplog):
    uninstall = logs.install()
    try:
        with caplog.at_level(logging.DEBUG, logger="dlock.events"), serving("POST", "/orders/42"):
            everything_happens()
    finally:
        uninstall()
    records = [record for record in caplog.records if record.name == "dlock.events"]
    assert [record.dlock_event for record in records] == [
        "acquired", "timeout", "released", "unavailable", "acquired", "forced", "lost", "released", "conflict", "retry",
    ]  # fmt: skip
    first = records[0]
    assert first.getMessage() == "acquired order:42"
    assert (first.dlock_lock, first.dlock_pattern, first.dlock_request) == ("order:42", "order:*", "POST /orders/42")
    assert first.dlock_token > 0
    assert all(record.levelno == logs.LEVELS[record.dlock_event] for record in records)
    with caplog.at_level(logging.DEBUG, logger="dlock.events"):
        caplog.clear()
        everything_happens()
    assert not [record for record in caplog.records if record.name == "dlock.events"]


def test_log_leaves_out_what_is_not_wanted(caplog):
    uninstall = logs.install("shop.locks", {"timeout": logging.CRITICAL})
    try:
        everything_happens()
    finally:
        uninstall()
    assert [r.levelno for r in caplog.records if r.name == "shop.locks"] == [logging.CRITICAL]
    with pytest.raises(ValueError, match="no event 'stolen'"):
        logs.install(levels={"stolen": logging.INFO})
    with pytest.raises(TypeError, match="level of 'acquired'"):
        logs.install(levels={"acquired": "NOPE"})


@pytest.fixture
def registry():
    registry = prometheus_client.CollectorRegistry()
    uninstall = metrics.install(registry)
    yield registry
    uninstall()


def test_prometheus_counts_and_measures(registry):
    everything_happens()
    value = registry.get_sample_value
    assert value("dlock_wait_seconds_count", {"lock": "order:*", "outcome": "acquired"}) == 2
    assert value("dlock_wait_seconds_count", {"lock": "order:*", "outcome": "timeout"}) == 1
    assert value("dlock_wait_seconds_count", {"lock": "order:*", "outcome": "unavailable"}) == 1
    assert value("dlock_hold_seconds_count", {"lock": "order:*", "outcome": "released"}) == 1
    assert value("dlock_hold_seconds_count", {"lock": "order:*", "outcome": "expired"}) == 1
    assert value("dlock_contended_total", {"lock": "order:*"}) == 1
    assert value("dlock_lost_total", {"lock": "order:*"}) == 1
    assert value("dlock_conflicts_total", {"lock": "object(*)", "error": "StaleObject"}) == 1
    assert value("dlock_retries_total", {"lock": "object(*)", "reason": "StaleObject"}) == 1
    assert value("dlock_forced_releases_total", {"lock": "order:*"}) == 1


def test_prometheus_labels_stay_within_the_cap_and_follow_your_naming():
    registry = prometheus_client.CollectorRegistry()
    uninstall = metrics.install(registry, naming=lambda name: name.partition("-")[0], max_patterns=2)
    try:
        for name in ("user-ann", "user-bob", "order-1", "stock-1", "shelf-1"):
            with Lock(MemoryBackend(), name):
                pass
        labels = {sample.labels["lock"] for metric in registry.collect() for sample in metric.samples}
    finally:
        uninstall()
    assert labels == {"user", "order", OTHER}


def test_prometheus_cannot_be_installed_twice_and_can_again_after_uninstall(registry):
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.install(registry)
    other = prometheus_client.CollectorRegistry()
    uninstall = metrics.install(other)
    uninstall()
    uninstall()
    metrics.install(other)()


def test_prometheus_is_not_left_half_installed():
    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(ValueError, match="max_patterns"):
        metrics.install(registry, max_patterns=0)
    with pytest.raises(TypeError, match="naming"):
        metrics.install(registry, naming=None)
    metrics.install(registry)()


@pytest.fixture
def telemetry():
    """Spans and metrics of this test, without the global providers."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider([reader])
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    uninstall = tracing.install(tracers.get_tracer("test"), meters.get_meter("test"))
    yield tracers.get_tracer("shop"), spans, reader
    uninstall()
    tracers.shutdown()
    meters.shutdown()


def test_wait_and_hold_are_spans_below_what_the_caller_did(telemetry):
    tracer, spans, _ = telemetry
    with tracer.start_as_current_span("ship") as parent, Lock(MemoryBackend(), "order:42") as lease:
        token = lease.token
    acquire, hold, _ = spans.get_finished_spans()
    assert (acquire.name, hold.name) == ("dlock.acquire order:*", "dlock.hold order:*")
    assert acquire.parent.span_id == hold.parent.span_id == parent.get_span_context().span_id
    assert acquire.attributes == {
        "dlock.name": "order:42", "dlock.token": token, "dlock.outcome": "acquired", "dlock.contended": False,
    }  # fmt: skip
    assert hold.attributes["dlock.outcome"] == "released"
    assert acquire.start_time <= acquire.end_time <= hold.start_time <= hold.end_time
    assert acquire.status.is_unset
    assert hold.status.is_unset


def test_hold_is_never_the_current_span_and_may_end_in_another_thread(telemetry):
    tracer, spans, _ = telemetry
    with tracer.start_as_current_span("ship") as parent:
        lease = Lock(MemoryBackend(), "order:42").acquire()
        assert trace.get_current_span() is parent
    with ThreadPoolExecutor(1) as thread:
        thread.submit(contextvars.Context().run, lease.release).result(60)
    hold = spans.get_finished_spans()[-1]
    assert (hold.name, hold.parent.span_id) == ("dlock.hold order:*", parent.get_span_context().span_id)


def test_spans_of_threads_and_tasks_have_their_own_parents(telemetry):
    tracer, spans, _ = telemetry
    backend = MemoryBackend()

    def in_thread(number):
        with tracer.start_as_current_span(f"work {number}"), Lock(backend, f"thread:{number}"):
            pass

    async def in_task(number):
        with tracer.start_as_current_span(f"work {number}"):
            async with AsyncLock(backend, f"task:{number}"):
                await asyncio.sleep(0)

    async def tasks():
        await asyncio.gather(*(in_task(number) for number in range(10, 14)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(in_thread, range(4)))
    asyncio.run(tasks())
    by_id = {span.context.span_id: span for span in spans.get_finished_spans()}
    ours = [span for span in by_id.values() if span.name.startswith("dlock.")]
    assert len(ours) == 16
    for span in ours:
        assert by_id[span.parent.span_id].name == f"work {span.attributes['dlock.name'].split(':')[1]}"


def test_what_fails_is_an_error_and_what_is_refused_an_event_of_the_current_span(telemetry):
    tracer, spans, _ = telemetry
    with tracer.start_as_current_span("request"):
        everything_happens()
    finished = spans.get_finished_spans()
    failed = {span.attributes.get("error.type") for span in finished if span.status.status_code.name == "ERROR"}
    assert failed == {"AcquireTimeout", "BackendUnavailable", "LeaseLost"}
    assert [event.name for event in finished[-1].events] == ["dlock.forced", "dlock.conflict", "dlock.retry"]
    assert len([span for span in finished if span.name.startswith("dlock.hold")]) == 2


def test_lease_that_is_thrown_away_leaves_nothing_behind(telemetry):
    hook = next(hook for hook in hooks.subscribed if isinstance(hook, tracing._Spans))
    thrown_away = type("LeaseRecord", (), {})()
    hooks.emit("acquired", "order:42", lease=thrown_away)
    assert len(hook._holds) == 1
    del thrown_away
    collect_garbage()
    assert len(hook._holds) == 0


def test_opentelemetry_has_the_same_numbers(telemetry):
    _, _, reader = telemetry
    everything_happens()
    found = {
        metric.name: metric
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {name: metric.unit for name, metric in found.items() if metric.unit} == {
        "dlock.wait.duration": "s",
        "dlock.hold.duration": "s",
    }
    assert {*found} - {"dlock.wait.duration", "dlock.hold.duration"} == {
        "dlock.contended", "dlock.lost", "dlock.conflicts", "dlock.retries", "dlock.forced_releases",
    }  # fmt: skip
    (conflict,) = found["dlock.conflicts"].data.data_points
    assert (conflict.value, dict(conflict.attributes)) == (1, {"dlock.lock": "object(*)", "dlock.error": "StaleObject"})


def test_traces_or_metrics_alone():
    before = hooks.subscribed
    tracing.install(False, False)()
    uninstall = tracing.install(meter=False)
    assert len(hooks.subscribed) == len(before) + 1
    uninstall()
    assert hooks.subscribed == before


@pytest.mark.parametrize("given", [{"tracer": 5}, {"tracer": ""}, {"meter": 5}, {"meter": True}], ids=repr)
def test_what_is_no_tracer_and_no_meter_is_refused(given):
    before, (name,) = hooks.subscribed, given
    with pytest.raises(TypeError, match=name):
        tracing.install(**given)
    assert hooks.subscribed == before


def test_clients_are_imported_only_by_their_own_install():
    code = (
        "import sys, dlock_core.observability.logs, dlock_core.observability.metrics, dlock_core.observability.tracing;"
        "assert not {'prometheus_client', 'opentelemetry'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
