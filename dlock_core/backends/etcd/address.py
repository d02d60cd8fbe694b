"""Read etcd:// and etcds:// URLs; no error shows a password."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

from dlock_core.backends.etcd.connections import Member

__all__ = ["Address", "read"]

PORT: Final = 2379
_URL: Final = re.compile(r"(etcds?)://(?:([^/?#]*)@)?([^/?#@]+)/?")
_MEMBER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+))(?::(\d{1,5}))?")
_BAD: Final = (
    "bad etcd URL: expected etcd://[user:password@]host:port,host:port,host:port (etcds:// for TLS), "
    "with every : / ? # @ , of user and password percent-encoded"
)


class Address(NamedTuple):
    """The members of a cluster, and how to be let in."""

    members: tuple[Member, ...]
    user: str
    password: str
    is_encrypted: bool


def read(url: str) -> Address:
    """Take a URL apart; raises ValueError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(_BAD)
    scheme, credentials, members = found.groups(default="")
    user, _, password = credentials.partition(":")
    if bool(user) != bool(password):
        raise ValueError(_BAD)
    listed = tuple(_member(member) for member in members.split(","))
    if len(set(listed)) != len(listed):
        raise ValueError("bad etcd URL: a member is named twice")
    return Address(listed, unquote(user), unquote(password), scheme == "etcds")


def _member(member: str) -> Member:
    found = _MEMBER.fullmatch(member)
    if found is None or not 0 < int(found[3] or PORT) < 65536:
        raise ValueError(_BAD)
    return Member(found[1] or found[2], int(found[3] or PORT))
