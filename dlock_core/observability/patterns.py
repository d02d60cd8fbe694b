"""What metrics show: the measured events, and a lock's pattern ("order:*" for "order:42"), so that labels stay few.

The first part of a name says what is locked, the others say which one. That is a habit and no rule. So a first part
that looks like a key or an address becomes a star as well, and after `max_patterns` different patterns each new one is
"other".
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlock_core.options import check_callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlock_core.observability.hooks import Event

__all__ = ["MAX_PATTERNS", "OTHER", "Patterns", "pattern"]

MAX_PATTERNS: Final = 100
OTHER: Final = "other"
_WORD: Final = re.compile(r"[A-Za-z_](?!(?:[^0-9]*[0-9]){4})[\w.~-]{0,47}", re.ASCII)
"""A word has at most three digits: "s3-report" is one; a UUID, a number and percent-encoded text are not."""


def pattern(name: str) -> str:
    """Return a lock's name with a star for each part but the first, which becomes a star too unless it is a word.

    For the object of a conflict, such as "Order(42)", it is "Order(*)".
    """
    head, parenthesis, _ = name.partition("(")
    if parenthesis:
        return f"{_starred(head)}(*)"
    first, *rest = name.split(":")
    return ":".join([_starred(first), *("*" for _ in rest)])


def _starred(part: str) -> str:
    return part if not part or _WORD.fullmatch(part) else "*"


class Patterns:
    """A function that returns the pattern of a name, but "other" once there are `max_patterns` of them; thread-safe."""

    def __init__(self, naming: Callable[[str], str] = pattern, max_patterns: int = MAX_PATTERNS) -> None:
        check_callback("naming", naming, "")
        if max_patterns < 1:
            raise ValueError(f"max_patterns must be at least 1, not {max_patterns}")
        self._naming, self._max_patterns = naming, max_patterns
        self._known: set[str] = set()
        # Reentrant, because the garbage collector may end a lease, and so emit an event, while the lock is held.
        self._guard = threading.RLock()

    def __call__(self, name: str) -> str:
        """Return the pattern of a name."""
        found = self._naming(name)
        if found in self._known:
            return found
        with self._guard:
            if len(self._known) >= self._max_patterns:
                return OTHER
            self._known.add(found)
        return found


BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends in seconds, from one round trip to a store up to the longest usual wait and ttl."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity: seconds, as a histogram, or a count."""

    name: str
    help: str
    label: str = ""
    """The label that divides it further, next to the pattern of the lock's name."""
    is_seconds: bool = False


WAIT: Final = Measure("wait", "How long an acquire took", "outcome", is_seconds=True)
HOLD: Final = Measure("hold", "How long a lease was held", "outcome", is_seconds=True)
CONTENDED: Final = Measure("contended", "Acquires that found the lock taken")
LOST: Final = Measure("lost", "Leases that were lost before their release")
CONFLICTS: Final = Measure("conflicts", "Writes and COMMITs that were refused because another one was faster", "error")
RETRIES: Final = Measure("retries", "Attempts that were started over after a conflict", "reason")
FORCED: Final = Measure("forced_releases", "Leases that an operator released by force from this process")

MEASURES: Final = (WAIT, HOLD, CONTENDED, LOST, CONFLICTS, RETRIES, FORCED)


def measure(event: Event, patterns: Patterns) -> Iterator[tuple[Measure, float, dict[str, str]]]:
    """Yield what an event adds to which measures: the measure, the amount, and the labels."""
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
