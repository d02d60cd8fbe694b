"""What a lock is called in a metric: "order:*" for "order:42", so that there are few labels whatever is locked.

The first part of a name says what is locked, the others which one. That is a habit, not a rule: a first part that looks
like a key or an address is starred as well, and after `most` different patterns every new one is "other".
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST", "OTHER", "Patterns", "pattern"]

MOST: Final = 100
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
    """Names patterns by `naming`, and allows `most` different ones; for any number of threads."""

    def __init__(self, naming: Callable[[str], str] = pattern, most: int = MOST) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1 pattern, not {most}")
        self._naming, self._most = naming, most
        self._known: set[str] = set()
        self._guard = threading.RLock()  # the garbage collector may end a lease, of which we hear in the middle

    def __call__(self, name: str) -> str:
        """Give the pattern of a name."""
        found = self._naming(name)
        if found in self._known:
            return found
        with self._guard:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(found)
        return found
