"""What options of stores have in common; checked before any I/O."""

from __future__ import annotations

from typing import Final

__all__ = ["check_prefix", "check_seconds"]

LONGEST: Final = 86400.0
LONGEST_PREFIX: Final = 512


def check_seconds(what: str, value: object) -> None:
    """Raise ValueError for what is no time that a store could wait."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST:
        raise ValueError(f"{what} is in seconds, more than 0 and at most a day, not {value!r:.80}")


def check_prefix(prefix: object) -> None:
    """Raise ValueError for what no key could begin with."""
    if not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX or not prefix.isprintable():
        raise ValueError(f"prefix is printable text, at most {LONGEST_PREFIX} characters, not {prefix!r:.80}")
