"""The report at the end of a soak: the slope of each quantity, and which of them grow."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.soak.slopes import MIN_SAMPLES, Slope, fitted, without_warm_up

ALLOWED_PER_HOUR: Final = {
    "memory, KiB": 1024.0,
    "Python's memory blocks": 2000.0,
}
"""Growth per hour that is no leak yet: the allocator's pages, and caches with a limit."""
ALLOWED_OF_OTHERS: Final = 1.0
"""The same for threads, descriptors, connections, keys and rows."""


@dataclass
class Report:
    """The samples of a run, by subject (a kind of worker, a store or a database) and quantity."""

    minutes: float
    samples: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    strange: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    deaths: list[str] = field(default_factory=list)
    """Workers that ended before the end."""
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, at: float, subject: str, values: dict[str, float]) -> None:
        for quantity, value in values.items():
            self.samples[subject, quantity].append((at, value))

    def slopes(self) -> dict[tuple[str, str], Slope]:
        """Return the slope of every quantity that was sampled often enough."""
        later = {key: without_warm_up(samples) for key, samples in self.samples.items()}
        return {key: fitted(samples) for key, samples in later.items() if len(samples) >= MIN_SAMPLES}

    def violations(self) -> list[str]:
        """Return the violations: growth, unexplained errors, and workers that died."""
        found = [f"{subject}: {quantity} grow" for (subject, quantity), slope in self.slopes().items()
                 if slope.grows(ALLOWED_PER_HOUR.get(quantity, ALLOWED_OF_OTHERS))]  # fmt: skip
        found += [f"{times} times: {error}" for error, times in self.strange.items()]
        return found + [f"{name} died" for name in self.deaths]

    def lines(self) -> Iterator[str]:
        total = sum(sum(counts.values()) for counts in self.outcomes.values())
        yield f"{self.minutes:.0f} minutes, {total} sections, {sum(self.restarts.values())} restarts of servers"
        for kind, counts in self.outcomes.items():
            yield f"  {kind:<14}" + ", ".join(f"{outcome} {times}" for outcome, times in counts.most_common())
        yield "processor time, % of one core: " + ", ".join(f"{who} {each:.1f}" for who, each in self.cpu_s.items())
        yield f"{'':<14}{'':<24}{'mean':>12}{'per hour':>12}{'error':>10}"
        for (subject, quantity), slope in self.slopes().items():
            figures = f"{slope.mean:>12.1f}{slope.per_hour:>+12.2f}{slope.error:>10.2f}"
            grows = slope.grows(ALLOWED_PER_HOUR.get(quantity, ALLOWED_OF_OTHERS))
            yield f"{subject:<14}{quantity:<24}{figures}{'  GROWS' if grows else ''}"
        yield from (f"VIOLATION {one}" for one in self.violations())
