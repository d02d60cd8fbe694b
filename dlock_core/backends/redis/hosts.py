"""Take URLs apart that name several servers; no error shows a password."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["Hosts", "split"]

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+)(?::(\d{1,5}))?")


class Hosts(NamedTuple):
    """The parts of scheme://[user:password@]host:port,host:port/path?options."""

    user: str
    """What goes before a host in a URL: "user:password@", or nothing."""
    hosts: list[str]
    """Each with its port."""
    path: str
    options: str
    """With its question mark, or nothing."""


def split(url: str, *, port: int, path: str, bad: str) -> Hosts:
    """Take a URL apart whose path matches; hosts without a port get `port`. Raises ValueError(`bad`)."""
    found = re.fullmatch(rf"[a-z+]+://(?:([^/?#,]*)@)?([^/?#@]+)({path})(\?[^#]*)?", url)
    if found is None:
        raise ValueError(bad)
    credentials, hosts, rest, options = found.groups(default="")
    user = f"{credentials}@" if credentials else ""
    return Hosts(user, [_host(text, port, bad) for text in hosts.split(",")], rest, options)


def _host(text: str, port: int, bad: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError(bad)
    return f"{found[1]}:{found[2] or port}"
