"""How a session names the lock that it holds: its advisory key, its `application_name`, and a comment in its statement.

`pg_locks` shows only keys. A label "dlock:1795269526619918#order:42" (prefix, token, name) in the application_name
costs nothing, ends with the lock, and can be read by every user; the key proves the name. The part that does not fit in
its 63 characters, and the owner of the lock, are in a comment, which only members of the session's role may read.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from dlock_core.backend import AcquireRequest

__all__ = ["SESSION_PREFIX", "Label", "Told", "comment", "in_comment", "in_label", "label_of"]


_MAX_LABEL_LENGTH: Final = 63
_DIGITS: Final = 16
"""Digits of a time in microseconds, until the year 2286."""
_COMMENT: Final = re.compile(r"/\* dlock (\S+) ([0-9a-f]+) ([sx]) (\S*)")


class Told(NamedTuple):
    """What a session reports about one lock; empty where it does not."""

    name: str = ""
    token: int = 0
    holder: str = ""
    shared: bool = False
    owner: str = ""


def comment(request: AcquireRequest) -> str:
    """Return the comment; it contains neither ":" nor quotes nor "*/", whatever the name."""
    name, mode = request.name.replace(":", "/"), "s" if request.shared else "x"
    return f"/* dlock {name} {request.holder} {mode} {quote(request.owner, safe='')} */"


class Label(NamedTuple):
    """The key of a lock, and the label around the token that the server will put into it."""

    key: int
    head: str
    tail: str
    room: int
    """The number of characters left for the earlier application_name and a space."""

    def token_in(self, text: str) -> int:
        """Parse the token in the server's text; no name contains a "#"."""
        return int(text.rpartition("#")[0].rpartition(self.head)[2])


@lru_cache(maxsize=1024)
def label_of(name: str, prefix: str) -> Label:
    """Return the label of a lock; the name is cut to fit."""
    tail = f"#{name}"[: _MAX_LABEL_LENGTH - len(prefix) - _DIGITS]
    return Label(key_of(name, prefix), prefix, tail, max(0, _MAX_LABEL_LENGTH - len(prefix) - _DIGITS - len(tail) - 1))


def in_comment(statement: str) -> Told | None:
    """Parse the comment; its end may have been cut off."""
    found = _COMMENT.search(statement)
    if found is None:
        return None
    name, holder, mode, owner = found.groups()
    return Told(name.replace("/", ":"), holder=holder, shared=mode == "s", owner=unquote(owner))


def in_label(application_name: str, prefix: str, key: int) -> Told | None:
    """Find the label of a key; if there is only one and its name was cut off, it ends in "…"."""
    words = [word.removeprefix(prefix).partition("#") for word in application_name.split() if word.startswith(prefix)]
    labels = [Told(name, int(token)) for token, _, name in words if token.isdecimal()]
    for told in labels:
        if key_of(told.name, prefix) == key:
            return told
    if len(labels) == 1 and len(application_name) >= _MAX_LABEL_LENGTH:
        return labels[0]._replace(name=f"{labels[0].name}…")
    return None


PREFIX: Final = "dlock:"
SESSION_PREFIX: Final = "dlock-session-"
"""Begins the name that a session on MySQL or MariaDB locks for as long as it lasts: no lock of a caller's."""
MAX_NAME_LENGTH: Final = 64
"""Characters of a lock's name in MySQL; MariaDB takes 192 bytes."""
_PLAIN: Final = re.compile(r"[a-z0-9_.~:-]+")
_HASH_LENGTH: Final = 32


def checked_prefix(prefix: str) -> str:
    """Check the prefix of every name; it has to leave room for a hash."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is text, not {type(prefix).__name__}")
    if not _PLAIN.fullmatch(prefix) or len(prefix) >= MAX_NAME_LENGTH - _HASH_LENGTH:
        raise ValueError(f"prefix must be 1 to 31 of the characters a-z 0-9 _ . ~ : -, not {prefix!r:.80}")
    return str.__str__(prefix)


def key_of(name: str, prefix: str = PREFIX) -> int:
    """Return PostgreSQL's key: the first 8 bytes, big endian and signed, of the SHA-256 of prefix and name."""
    return int.from_bytes(sha256((prefix + name).encode()).digest()[:8], "big", signed=True)


def word_of(name: str, prefix: str = PREFIX) -> str:
    """Return the name for GET_LOCK: prefix and name unchanged, or, if too long or not plain, "#" and 32 hex digits.

    MySQL compares names without regard to case, so capitals are not plain.
    """
    word = prefix + name
    if len(word) <= MAX_NAME_LENGTH and _PLAIN.fullmatch(word):
        return word
    return f"{prefix}#{sha256(word.encode()).hexdigest()[:_HASH_LENGTH]}"
