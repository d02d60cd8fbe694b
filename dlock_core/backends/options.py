"""Checks of options that every store makes before any I/O, and of texts that may contain a password."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

__all__ = ["check_prefix", "check_seconds"]

MAX_SECONDS: Final = 86400.0
MAX_PREFIX_LENGTH: Final = 512


def check_seconds(what: str, value: object) -> None:
    """Raise ValueError unless `value` is a time in seconds that a store can wait."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise ValueError(f"{what} must be in seconds, more than 0 and at most a day, not {value!r:.80}")


def check_prefix(prefix: object) -> None:
    """Raise ValueError unless `prefix` is a text that a key can begin with."""
    if not isinstance(prefix, str) or len(prefix) > MAX_PREFIX_LENGTH or not prefix.isprintable():
        raise ValueError(f"prefix must be printable text of at most {MAX_PREFIX_LENGTH} characters, not {prefix!r:.80}")


def masked(text: str) -> str:
    """Return a text whose URLs show neither the user nor the password, nor what may be a piece of them."""
    return re.sub(r"(?i)(pass\w*=)[^&#\s]*", r"\1***", re.sub(r"(?s)(?<=://).*@", "***@", text))


def has_swallowed_options(part: str) -> bool:
    """Return whether a host or a path of a URL contains options, because "&" or ";" was typed instead of "?", say.

    Errors and logs quote hosts and paths, and such an option may be a password. So a URL like that is refused.
    """
    return re.search("[&=;]", part) is not None


def is_host(name: str) -> bool:
    """Return whether a name can be looked up: no part between its dots is empty, or has more than 63 letters.

    Python refuses others only when it connects, with UnicodeError.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def tells_secret(text: str, url: str) -> bool:
    """Return whether a text contains a piece of a URL's password: a "/" in one makes parsers quote one half of it."""
    login = url.partition(":")[2].rpartition("@")[0]
    secrets = [login, *re.findall(r"(?i)pass\w*=([^&#]*)", url)]
    pieces = {piece for secret in secrets for whole in (secret, unquote(secret)) for piece in re.split(r"\W", whole)}
    return any(piece in text for piece in pieces if piece)
