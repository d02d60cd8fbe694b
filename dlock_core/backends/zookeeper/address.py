"""Read zookeeper:// URLs: several servers, a chroot, perhaps a user; errors never show the password."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import unquote

__all__ = ["Address", "of_url"]

_URL: Final = re.compile(
    r"zookeeper://(?:(?P<user>[^:@/?#]+):(?P<password>[^:@/?#]+)@)?(?P<hosts>[^@/?#]+)(?P<chroot>(?:/[^/?#]+)*)/?"
)
_HOST: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::(?P<port>\d{1,5}))?")
_BAD: Final = (
    "bad ZooKeeper URL: expected zookeeper://[user:password@]host[:port],host[:port]/chroot, "
    "with every : / ? # @ of the password percent-encoded"
)
PORT: Final = 2181


class Address(NamedTuple):
    """Where the servers are, the path under which everything is kept, and the digest credential, if any."""

    hosts: str
    chroot: tuple[str, ...]
    credential: str = ""

    def __repr__(self) -> str:
        return f"Address({self.hosts}/{'/'.join(self.chroot)})"


def of_url(url: str) -> Address:
    """Parse a URL; raises ValueError, without the password."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(_BAD)
    chroot = tuple(found["chroot"].split("/")[1:])
    if not {".", ".."}.isdisjoint(chroot):
        raise ValueError(_BAD)
    credential = f"{unquote(found['user'])}:{unquote(found['password'])}" if found["user"] else ""
    return Address(",".join(_host(text) for text in found["hosts"].split(",")), chroot, credential)


def _host(text: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"] or PORT) < 1 << 16:
        raise ValueError(_BAD)
    return f"{found['host']}:{found['port'] or PORT}"
