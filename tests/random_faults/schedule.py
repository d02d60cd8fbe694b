"""The schedule of the faults is drawn from a seed before the run begins, so that the same seed draws it again."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.random_faults.items import STORES

STORM_S: Final = 14.0
QUIET_S: Final = 6.0
"""What a quiet time takes if nothing delays it; it ends with its checks."""
STORES_AT_A_TIME: Final = 2
FAULTS_PER_S: Final = 1.4
LENGTHS_S: Final = (0.2, 3.0)

WORKERS: Final = ("stop worker", "stop worker", "kill worker")
NETWORK: Final = (
    "latency", "mute", "silence", "refuse", "cut", "half open", "lose request", "lose reply", "drop reply", "hold reply",
)  # fmt: skip
OF_STORE: Final[dict[str, tuple[str, ...]]] = {
    "redis": ("flush", "restart", "restart empty", "stop server", "kill clients", "pause clients", "evict", *NETWORK),
    "turned": ("clock", "clock", "clock", "stop server", "restart", "kill clients", *NETWORK),
    "sentinel": ("fail over", "fail over losing writes", "stop master"),
    "cluster": ("fail over", "fail over losing writes", "stop master"),
    "redlock": ("stop server", "restart", "restart empty", "flush", "clock", *NETWORK),
    "etcd": ("stop server", "restart", *NETWORK),
    "zookeeper": ("stop server", "restart", *NETWORK),
    "table": (), "session": (), "advisory": (), "version": (),
}  # fmt: skip
OF_DATABASE: Final = (
    "kill sessions", "kill sessions", "crash", "lock rows", "lock rows", "lose COMMIT", "lose COMMIT", "drop COMMIT",
    "late COMMIT",
    "latency", "mute", "cut", "half open",
)  # fmt: skip
KINDS: Final = sorted({*WORKERS, *OF_DATABASE, *(kind for kinds in OF_STORE.values() for kind in kinds)})
SLOW: Final = ("fail over", "fail over losing writes", "crash", "stop master")
"""Faults that take seconds to heal; a storm has at most one of each."""
TRIES: Final = 20
"""How many targets are drawn in search of one that can fail."""
CLOCK_STEPS_S: Final = (-3600, -60, -3, 3, 60, 3600)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it begins `at` seconds after its storm, and lasts for `seconds`."""

    at: float
    kind: str
    target: str
    """The name of a server or proxy, a store, or the place of a worker."""
    seconds: float
    step: int = 0
    """By how many seconds a clock is stepped."""


@dataclass(frozen=True, slots=True)
class Storm:
    """Some seconds in which the workers use a few stores, while these, the databases and the workers fail."""

    cycle: int
    stores: tuple[str, ...]
    seconds: float
    faults: tuple[Fault, ...]


def plan(seed: int, minutes: float, stores: list[str], workers: int, only: tuple[str, ...] = ()) -> list[Storm]:
    """Draw the storms of a run. Every store has a turn before one has its second. `only` excludes other kinds."""
    chance = random.Random(seed)
    number = max(1, round(minutes * 60 / (STORM_S + QUIET_S)))
    turns, bags = _bag(chance, stores), _Bags(chance, only)
    size = min(STORES_AT_A_TIME, len(stores))
    return [_storm(chance, bags, cycle, _several(turns, size), workers) for cycle in range(number)]


def _storm(chance: random.Random, bags: "_Bags", cycle: int, stores: tuple[str, ...], workers: int) -> Storm:
    moments = sorted(chance.uniform(0, STORM_S - 1) for _ in range(round(STORM_S * FAULTS_PER_S)))
    faults: list[Fault] = []
    for at in moments:
        fault = _fault(chance, bags, at, stores, workers)
        if fault is not None and (fault.kind not in SLOW or fault.kind not in {each.kind for each in faults}):
            faults.append(fault)
    return Storm(cycle, stores, STORM_S, tuple(faults))


def _fault(chance: random.Random, bags: "_Bags", at: float, stores: tuple[str, ...], workers: int) -> Fault | None:
    seconds, store = chance.uniform(*LENGTHS_S), chance.choice(stores)
    database = chance.choice(["postgresql", "postgresql", *STORES[store].databases]).replace("sqlite", "postgresql")
    for target in chance.choices(["workers", database, store], [30, 25, 45], k=TRIES):
        kind = bags.next(target)
        if kind is None:
            continue
        step = chance.choice(CLOCK_STEPS_S) if kind == "clock" else 0
        if target == "workers":
            return Fault(at, kind, str(chance.randrange(workers)), seconds)
        place = {"redlock": f"redlock{2 if kind == 'clock' else chance.randrange(3)}"}.get(target, target)
        return Fault(at, kind, place, seconds, step)
    return None


class _Bags:
    """Draws each kind of a target's faults once before it repeats one."""

    def __init__(self, chance: random.Random, only: tuple[str, ...]) -> None:
        kinds = {**OF_STORE, "workers": WORKERS, "postgresql": OF_DATABASE, "mariadb": OF_DATABASE}
        allowed = {target: [kind for kind in each if not only or kind in only] for target, each in kinds.items()}
        self._bags = {target: _bag(chance, each) for target, each in allowed.items() if each}

    def next(self, target: str) -> str | None:
        """Return the next kind of a target's faults; None if it has none."""
        return next(self._bags[target]) if target in self._bags else None


def _bag(chance: random.Random, things: list[str]) -> Iterator[str]:
    while True:
        yield from chance.sample(things, len(things))


def _several(turns: Iterator[str], number: int) -> tuple[str, ...]:
    chosen: list[str] = []
    while len(chosen) < number:
        one = next(turns)
        if one not in chosen:
            chosen.append(one)
    return tuple(chosen)
