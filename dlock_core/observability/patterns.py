"""What metrics show: the measured events, and a lock's pattern ("order:*" for "order:42"), so that labels stay few.

The first part of a name says what is locked, the others which one. That is a habit, not a rule: a first part that looks
like a key or an address is starred as well, and after `max_patterns` different patterns every new one is "other".
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlock_core.observability.hooks import Event

__all__ = ["MAX_PATTERNS", "OTHER", "Patterns", "pattern"]

MAX_PATTERNS: Final = 100
OTHER: Final = "other"
_WORD: Final = re.compile(r"[A-Za-z_](?!(?:[^0-9]*[0-9]){4})[\w.~-]{0,47}", re.ASCII)
"""A word has no more than three digits: "s3-report" is one; a UUID, a number and what is percent-encoded are not."""


def pattern(name: str) -> str:
    """Keep the first part of a lock's name if it is a word, and star the rest; of "Order(42)" keep the class."""
    head, parenthesis, _ = name.partition("(")
    if parenthesis:
        return f"{_starred(head)}(*)"
    first, *rest = name.split(":")
    return ":".join([_starred(first), *("*" for _ in rest)])


def _starred(part: str) -> str:
    return part if not part or _WORD.fullmatch(part) else "*"


class Patterns:
    """Names patterns by `naming`, and allows `max_patterns` different ones; for any number of threads."""

    def __init__(self, naming: Callable[[str], str] = pattern, max_patterns: int = MAX_PATTERNS) -> None:
        if max_patterns < 1:
            raise ValueError(f"max_patterns must be at least 1, not {max_patterns}")
        self._naming, self._max_patterns = naming, max_patterns
        self._known: set[str] = set()
        self._guard = threading.RLock()  # the garbage collector may end a lease, of which we hear in the middle

    def __call__(self, name: str) -> str:
        """Give the pattern of a name."""
        found = self._naming(name)
        if found in self._known:
            return found
        with self._guard:
            if len(self._known) >= self._max_patterns:
                return OTHER
            self._known.add(found)
        return found


BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends in seconds: from a round trip to a store to the longest wait and ttl that are usual."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number over time: seconds whose distribution counts, or how often something happened."""

    name: str
    help: str
    label: str = ""
    """What it is divided by, beside the pattern of the lock's name."""
    is_seconds: bool = False


WAIT: Final = Measure("wait", "How long an acquire took", "outcome", is_seconds=True)
HOLD: Final = Measure("hold", "How long a lease was held", "outcome", is_seconds=True)
CONTENDED: Final = Measure("contended", "Acquires that found the lock taken")
LOST: Final = Measure("lost", "Leases that were lost before their release")
CONFLICTS: Final = Measure("conflicts", "Writes and COMMITs that were refused because somebody was faster", "error")
RETRIES: Final = Measure("retries", "Times that work was begun again after a conflict", "reason")
FORCED: Final = Measure("forced_releases", "Leases that an operator ended from this process")

MEASURES: Final = (WAIT, HOLD, CONTENDED, LOST, CONFLICTS, RETRIES, FORCED)


def measure(event: Event, patterns: Patterns) -> Iterator[tuple[Measure, float, dict[str, str]]]:
    """Tell what an event adds to which measures, and under which labels."""
    lock = {"lock": patterns(event.name)}
    if event.kind in {"acquired", "timeout", "unavailable"}:
        yield WAIT, event.seconds, {**lock, "outcome": event.kind}
        if event.contended:
            yield CONTENDED, 1, lock
    elif event.kind == "released":
        yield HOLD, event.seconds, {**lock, "outcome": event.reason}
    elif event.kind == "lost":
        yield LOST, 1, lock
    elif event.kind == "conflict":
        yield CONFLICTS, 1, {**lock, "error": event.reason}
    elif event.kind == "retry":
        yield RETRIES, 1, {**lock, "reason": event.reason}
    elif event.kind == "forced":
        yield FORCED, 1, lock
