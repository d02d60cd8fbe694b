"""Lock names: parts joined with ":", each percent-encoded (RFC 3986), so that ("a:b",) is not ("a", "b").

A name is plain ASCII text of 1 to 512 bytes, whatever it was made of, and safe in keys, paths and logs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote_to_bytes

__all__ = ["LONGEST", "canonical", "join"]

LONGEST: Final = 512
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~:-]+")
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9_.~-]+")
"""What percent-encoding leaves as it is."""
_NO_PARTS: Final = (bool, float, complex, list, tuple, dict, set, frozenset, type(None))


def join(*parts: object) -> str:
    """Make the name of a lock out of its parts, which may come from anywhere: a URL, a form, a primary key.

    Raises ValueError when a part is empty or the name too long, TypeError for None, bool, float and containers.
    """
    if not parts:
        raise ValueError("a lock needs a name: give at least one part, such as 'order', 42")
    return _checked(":".join([_part(part) for part in parts]))


def canonical(name: str) -> str:
    """Make a name out of text whose parts are already joined with ":"; escapes it has are kept, as in a URL.

    Use `join` for parts that somebody else chose: in this text a ":" separates and "%41" is "A".
    """
    if not isinstance(name, str):
        raise TypeError(f"a lock's name is text, not {type(name).__name__}: {name!r:.80}")
    return _canonical(name)


@lru_cache(maxsize=1024)
def _canonical(name: str) -> str:
    if not _PLAIN.fullmatch(name):
        parts = name.encode(errors="surrogatepass").split(b":")
        name = ":".join([quote(unquote_to_bytes(part), safe="") for part in parts])
    if "" in name.split(":"):
        raise ValueError(f"a lock's name has no empty parts: {name!r:.80}")
    return _checked(name)


def _part(part: object) -> str:
    if isinstance(part, _NO_PARTS):
        raise TypeError(f"a part of a lock's name is text, a number or a key, not {type(part).__name__}: {part!r:.80}")
    text = part if isinstance(part, bytes) else str(part)
    if not text:
        raise ValueError("a part of a lock's name is empty: 'order:' would lock all orders without a key")
    if isinstance(text, bytes):
        return quote(text, safe="")
    return text if _UNRESERVED.fullmatch(text) else quote(text, safe="", errors="surrogatepass")


def _checked(name: str) -> str:
    if len(name) > LONGEST:
        raise ValueError(
            f"a lock's name has at most {LONGEST} bytes when encoded, this one {len(name)}: {name[:60]!r}…; "
            "hash what is long"
        )
    return name
