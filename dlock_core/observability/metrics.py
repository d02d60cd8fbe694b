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
    """Measure every lock of this process from now on; gives the function that ends that.

    `naming` makes the label `lock` out of a lock's name; beyond `max_patterns` different ones it is "other". `buckets`
    are seconds. Raises ValueError when the registry (None: the client's own) measures locks already.
    """
    with needed_by("metrics.install()"):
        import prometheus_client

    where = prometheus_client.REGISTRY if registry is None else registry
    made: dict[Measure, Any] = {each: _made(prometheus_client, each, where, buckets) for each in MEASURES}
    patterns = Patterns(naming, max_patterns)

    def hook(event: hooks.Event) -> None:
        for each, amount, labels in measure(event, patterns):
            known = made[each].labels(**labels)
            known.observe(amount) if each.is_seconds else known.inc(amount)

    hooks.subscribe(hook)
    return partial(_uninstall, hook, where, made.values())


def _made(client: Any, each: Measure, registry: Any, buckets: Iterable[float]) -> Any:
    labels = ["lock", *([each.label] if each.label else [])]
    if each.is_seconds:
        return client.Histogram(f"dlock_{each.name}_seconds", each.help, labels, registry=registry, buckets=buckets)
    return client.Counter(f"dlock_{each.name}_total", each.help, labels, registry=registry)


def _uninstall(hook: Callable[[hooks.Event], None], registry: Any, made: Iterable[Any]) -> None:
    hooks.unsubscribe(hook)
    for each in made:
        registry.unregister(each)
