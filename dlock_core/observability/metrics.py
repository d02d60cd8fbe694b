"""Prometheus: `metrics.install()` once per process; needs prometheus-client (extra "prometheus").

Histograms and counters only, so that the client's multi-process mode works.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dlock_core.extras import needed_by
from dlock_core.observability import hooks
from dlock_core.observability.patterns import BUCKETS, MAX_PATTERNS, MEASURES, Measure, Patterns, measure, pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry

__all__ = ["install"]


def install(
    registry: CollectorRegistry | None = None,
    *,
    naming: Callable[[str], str] = pattern,
    max_patterns: int = MAX_PATTERNS,
    buckets: Iterable[float] = BUCKETS,
) -> Callable[[], None]:
    """Measure all locks of this process from now on, and return the function that ends that.

    Args:
        registry: The registry of the metrics; None for the client library's own.
        naming: Returns the value of the label `lock` for the name of a lock.
        max_patterns: How many different values that label may have; further ones become "other".
        buckets: The upper ends of the histograms' buckets, in seconds.

    Raises ValueError if the registry measures locks already, and MissingLibrary without prometheus-client.
    """
    with needed_by("metrics.install()"):
        import prometheus_client

    patterns, where = Patterns(naming, max_patterns), prometheus_client.REGISTRY if registry is None else registry
    made: dict[Measure, Any] = {each: _instrument(prometheus_client, each, where, buckets) for each in MEASURES}

    def hook(event: hooks.Event) -> None:
        for each, amount, labels in measure(event, patterns):
            known = made[each].labels(**labels)
            known.observe(amount) if each.is_seconds else known.inc(amount)

    hooks.subscribe(hook)
    return partial(_uninstall, hook, where, list(made.values()))


def _instrument(client: Any, each: Measure, registry: Any, buckets: Iterable[float]) -> Any:
    labels = ["lock", *([each.label] if each.label else [])]
    if each.is_seconds:
        return client.Histogram(f"dlock_{each.name}_seconds", each.help, labels, registry=registry, buckets=buckets)
    return client.Counter(f"dlock_{each.name}_total", each.help, labels, registry=registry)


def _uninstall(hook: Callable[[hooks.Event], None], registry: Any, made: list[Any]) -> None:
    """Do so once; the function may be called again."""
    hooks.unsubscribe(hook)
    while made:
        registry.unregister(made.pop())
