"""The numbers and names under which databases know our locks; any other language can compute the same.

PostgreSQL: `('x' || left(encode(sha256('dlock:order:42'), 'hex'), 16))::bit(64)::bigint` is -1484960212693564947.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

__all__ = ["PREFIX", "checked_prefix", "key_of", "word_of"]

PREFIX: Final = "dlock:"
LONGEST: Final = 64
"""Characters of a lock's name in MySQL; MariaDB takes 192 bytes."""
_PLAIN: Final = re.compile(r"[a-z0-9_.~:-]+")
_HASH: Final = 32


def checked_prefix(prefix: str) -> str:
    """Check what is put before every name; a hash has to find room after it."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is text, not {type(prefix).__name__}")
    if not _PLAIN.fullmatch(prefix) or len(prefix) >= LONGEST - _HASH:
        raise ValueError(f"prefix must be 1 to 31 of the characters a-z 0-9 _ . ~ : -, not {prefix!r:.80}")
    return prefix


def key_of(name: str, prefix: str = PREFIX) -> int:
    """Give PostgreSQL's key: the first 8 bytes, big endian and signed, of the SHA-256 of prefix and name."""
    return int.from_bytes(sha256((prefix + name).encode()).digest()[:8], "big", signed=True)


def word_of(name: str, prefix: str = PREFIX) -> str:
    """Give the name for GET_LOCK: prefix and name as they are, or, if too long or not plain, "#" and 32 hex digits.

    MySQL compares names without regard to case, so that capitals are not plain.
    """
    word = prefix + name
    if len(word) <= LONGEST and _PLAIN.fullmatch(word):
        return word
    return f"{prefix}#{sha256(word.encode()).hexdigest()[:_HASH]}"
