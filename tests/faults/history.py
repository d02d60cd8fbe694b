"""Many processes record what they did with one lock, and a checker trusts none of them.

All processes of a machine read the same clock, so the order in the history is exact.
"""

import json
import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlock_core import DLockError, Lock, connect
from dlock_core.runtime import clock
from dlock_core.testing.contract.observed import Observed
from tests.processes import Link


@dataclass(frozen=True)
class Section:
    """One holder's time inside: from its grant until it left, or until its lease expired by its own clock."""

    asked: float
    queued: float | None
    """When it was certainly queued; None if it did not have to wait."""
    begin: float
    end: float
    token: int
    process: int


class WithClock(Observed):
    """Records when a waiter began to wait."""

    queued: float | None = None

    def record(self, method: str, name: str, *holders: str) -> None:
        if method == "wait" and self.queued is None:
            self.queued = clock()


def work(
    link: Link, url: str, prefix: str, path: str, rounds: int, options: dict[str, Any] | None, inside: float = 0.0005
) -> None:
    """Run many sections under the lock, or without a lock if `options` is None, and append a line after each."""
    backend = WithClock(connect(url, prefix=prefix))
    with Path(path).open("a", buffering=1) as history:
        for _ in range(rounds):
            try:
                section = _section(backend, options, inside) if options is not None else _unprotected(inside)
            except DLockError:
                continue
            history.write(json.dumps(asdict(section)) + "\n")


def _section(backend: WithClock, options: dict[str, Any], inside: float) -> Section:
    asked, backend.queued = clock(), None
    lease = Lock(backend, "a", wait=None, **options).acquire()  # type: ignore[arg-type]
    begin, queued = clock(), backend.queued
    _do_something(inside)
    end = min(clock(), lease._held.until)
    lease.release()
    return Section(asked, queued, begin, end, lease.token, os.getpid())


def _unprotected(inside: float) -> Section:
    begin = clock()
    _do_something(inside)
    return Section(begin, None, begin, clock(), int(begin * 1e6), os.getpid())


def _do_something(seconds: float) -> None:
    until = clock() + seconds
    while clock() < until:
        pass


def read(path: Path) -> list[Section]:
    lines = path.read_text().rpartition("\n")[0].splitlines()  # The last line may just be being written.
    return sorted((Section(**json.loads(line)) for line in lines), key=lambda section: section.token)


def overlaps(history: list[Section]) -> list[tuple[Section, Section]]:
    """Return the neighbours in token order of which the second entered before the first had left."""
    return [(one, next_one) for one, next_one in pairwise(history) if next_one.begin < one.end]


def repeated_tokens(history: list[Section]) -> list[int]:
    tokens = [section.token for section in history]
    return sorted({token for token in tokens if tokens.count(token) > 1})


def overtaken(history: list[Section]) -> list[tuple[Section, Section]]:
    """Return pairs (early, late): the late section asked when the early one was queued, and was served before it."""
    found = []
    for place, late in enumerate(history):
        found += [
            (early, late) for early in history[place + 1 :] if early.queued is not None and early.queued < late.asked
        ]
    return found
