"""OpenTelemetry: `tracing.install()` once per process; needs opentelemetry-api (extra "opentelemetry").

The wait for a lock is a span, and so is the time for which it is held. Both are children of the span that was current
when the lock was requested, whichever thread or task the lease ends in. A hold is never the current span itself,
because leases need not end in the order in which they began. Conflicts, retries and forced releases are events of the
current span.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dlock_core.extras import needed_by
from dlock_core.observability import hooks
from dlock_core.observability.patterns import BUCKETS, MAX_PATTERNS, MEASURES, Measure, Patterns, measure, pattern

__all__ = ["install"]

_ACQUIRES: Final = ("acquired", "timeout", "unavailable")
_ENDS: Final = ("released", "lost")
_ERRORS: Final = {"timeout": "AcquireTimeout", "unavailable": "BackendUnavailable"}


def install(
    tracer: Any = None, meter: Any = None, *, naming: Callable[[str], str] = pattern, max_patterns: int = MAX_PATTERNS
) -> Callable[[], None]:
    """Trace and measure all locks of this process from now on, and return the function that ends that.

    Args:
        tracer: The tracer of the spans; None for that of the global provider, False for no spans.
        meter: The meter of the metrics; None for that of the global provider, False for no metrics.
        naming: Returns the name of the spans, and the label `lock` of the metrics, for the name of a lock.
        max_patterns: How many different values that label may have; further ones become "other".

    Raises MissingLibrary without opentelemetry-api, and TypeError for what is no tracer or no meter.
    """
    for what, given, method in (("tracer", tracer, "start_span"), ("meter", meter, "create_counter")):
        if given is not None and given is not False and not hasattr(given, method):
            raise TypeError(f"{what} is a {what} of OpenTelemetry, None or False, not {given!r:.80}")
    with needed_by("tracing.install()"):
        from opentelemetry import metrics, trace

    patterns, installed = Patterns(naming, max_patterns), list[Callable[[hooks.Event], None]]()
    if tracer is not False:
        installed.append(_Spans(trace, tracer or trace.get_tracer("dlock"), patterns))
    if meter is not False:
        installed.append(_numbers(meter or metrics.get_meter("dlock"), patterns))
    for hook in installed:
        hooks.subscribe(hook)
    return partial(_uninstall, installed)


def _uninstall(installed: list[Callable[[hooks.Event], None]]) -> None:
    for hook in installed:
        hooks.unsubscribe(hook)


class _Spans:
    """A hook that makes spans: that of an acquire when it is over, that of a hold when it begins."""

    def __init__(self, trace: Any, tracer: Any, patterns: Patterns) -> None:
        self._trace, self._tracer, self._patterns = trace, tracer, patterns
        self._holds: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __call__(self, event: hooks.Event) -> None:
        if event.kind in _ACQUIRES:
            self._acquired(event)
        elif event.kind in _ENDS:
            self._ended(event)
        else:
            self._trace.get_current_span().add_event(f"dlock.{event.kind}", _attributes(event))

    def _acquired(self, event: hooks.Event) -> None:
        now, name = time.time_ns(), self._patterns(event.name)
        attributes = {**_attributes(event), "dlock.outcome": event.kind, "dlock.contended": event.contended}
        began = now - int(event.seconds * 1e9)
        span = self._tracer.start_span(f"dlock.acquire {name}", start_time=began, attributes=attributes)
        if event.kind != "acquired":
            self._fail(span, _ERRORS[event.kind])
        span.end(now)
        if event.lease is not None:
            attributes = _attributes(event)
            self._holds[event.lease] = self._tracer.start_span(f"dlock.hold {name}", attributes=attributes)

    def _ended(self, event: hooks.Event) -> None:
        span = None if event.lease is None else self._holds.pop(event.lease, None)
        if span is not None:
            span.set_attribute("dlock.outcome", event.reason if event.kind == "released" else event.kind)
            if event.kind == "lost":
                span.set_attribute("dlock.reason", event.reason)
                self._fail(span, "LeaseLost")
            span.end()

    def _fail(self, span: Any, error: str) -> None:
        span.set_attribute("error.type", error)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))


def _attributes(event: hooks.Event) -> dict[str, str | int]:
    found: dict[str, str | int] = {"dlock.name": event.name, "dlock.token": event.token, "dlock.reason": event.reason}
    return {key: value for key, value in found.items() if value}


def _numbers(meter: Any, patterns: Patterns) -> Callable[[hooks.Event], None]:
    made = {each: _made(meter, each) for each in MEASURES}

    def hook(event: hooks.Event) -> None:
        for each, amount, labels in measure(event, patterns):
            attributes = {f"dlock.{label}": value for label, value in labels.items()}
            made[each].record(amount, attributes) if each.is_seconds else made[each].add(amount, attributes)

    return hook


def _made(meter: Any, each: Measure) -> Any:
    if not each.is_seconds:
        return meter.create_counter(f"dlock.{each.name}", description=each.help)
    return meter.create_histogram(
        f"dlock.{each.name}.duration", unit="s", description=each.help, explicit_bucket_boundaries_advisory=BUCKETS
    )
