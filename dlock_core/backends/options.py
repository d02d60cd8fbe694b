"""Options that every store checks before any I/O, and passwords that no message may show."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

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


def masked(text: str) -> str:
    """Take the user, the password and whatever may be a piece of them out of URLs in a text."""
    return re.sub(r"(?i)(pass\w*=)[^&#\s]*", r"\1***", re.sub(r"(?s)(?<=://).*@", "***@", text))


def has_swallowed_options(part: str) -> bool:
    """Tell whether a host or a path of a URL has what belongs into its options: "&" or ";" was typed for "?", say.

    Hosts and paths are quoted in errors and logs, and such an option may be a password. So a URL like that is refused.
    """
    return re.search("[&=;]", part) is not None


def tells_secret(text: str, url: str) -> bool:
    """Find any piece of a URL's password in a text; a "/" in a password makes parsers quote one half of it."""
    login = url.partition(":")[2].rpartition("@")[0]
    secrets = [login, *re.findall(r"(?i)pass\w*=([^&#]*)", url)]
    pieces = {piece for secret in secrets for whole in (secret, unquote(secret)) for piece in re.split(r"\W", whole)}
    return any(piece in text for piece in pieces if piece)
