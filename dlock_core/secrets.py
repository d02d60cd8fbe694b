"""Keep passwords of URLs out of what people read."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["masked", "tells_secret"]


def masked(text: str) -> str:
    """Take the user, the password and whatever may be a piece of them out of URLs in a text."""
    return re.sub(r"(?i)(pass\w*=)[^&#\s]*", r"\1***", re.sub(r"(?s)(?<=://).*@", "***@", text))


def tells_secret(text: str, url: str) -> bool:
    """Find any piece of a URL's password in a text; a "/" in a password makes parsers quote one half of it."""
    login = url.partition(":")[2].rpartition("@")[0]
    secrets = [login, *re.findall(r"(?i)pass\w*=([^&#]*)", url)]
    pieces = {piece for secret in secrets for whole in (secret, unquote(secret)) for piece in re.split(r"\W", whole)}
    return any(piece in text for piece in pieces if piece)
