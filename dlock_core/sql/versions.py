"""What both integrations say of a version: the number at which it begins, and the one that a caller expects."""

from __future__ import annotations

import time
from secrets import randbits
from typing import Final

__all__ = ["FIRST_VERSION_SQL", "first_version", "require_sent"]


FIRST_VERSION_SQL: Final = {
    "postgresql": "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    # SQLite's clock has milliseconds. There is no percent sign, which drivers would treat as a parameter.
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000 + (random() & 511)",
}
"""The first version as DEFAULT of a column, for rows that other software inserts; MariaDB takes that of MySQL."""


_CLOCK_BITS: Final = 51
"""Bits of the time in microseconds, until the year 2041."""


def first_version(bits: int = 63) -> int:
    """Return the version of a row that is about to be inserted: the time in microseconds.

    A row that is deleted and created again under the same key must never reach a version that its predecessor had, or
    a client that still has the old one would save over the new row. Versions grow by one with each write, so they fall
    behind the clock, and a later row begins above all that an earlier one had. Between clocks that differ by a second
    there is still room for a million writes. The number needs 64 bits in the database; until the year 2255 it is also
    exact in JavaScript.

    A smaller column begins at a random number in the lower half of its range: one of 32 bits repeats an old version
    once in a billion times, one of 16 bits once in 16,384.

    Args:
        bits: How many bits the largest number of the column has: 31 for an INTEGER.
    """
    return time.time_ns() // 1000 if bits > _CLOCK_BITS else 1 + randbits(bits - 1)


def require_sent(expected: object) -> None:
    """Raise TypeError for an expected version of None, such as that of a payload without one."""
    if expected is None:
        raise TypeError(
            "the expected version is None, so nothing would be compared: refuse a request that brings no version, or "
            "leave `expected` out to compare only the version that was read"
        )
