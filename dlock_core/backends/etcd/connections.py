"""The connections to the members of an etcd cluster: one member is used until it fails, then the next."""

from __future__ import annotations

import re
from operator import methodcaller
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from dlock_core.backends.etcd.transport import HTTPConnection, Member
from dlock_core.backends.idle import IdlePool, LoopPools
from dlock_core.options import has_swallowed_options, is_host
from dlock_core.runtime import Asyncio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dlock_core.runtime import Runtime

__all__ = ["ClusterAddress", "ClusterConnections", "read_url"]

MAX_IDLE_CONNECTIONS: Final = 64
"""Idle connections kept open for threads, and as many for each event loop; more are opened on demand."""


class ClusterConnections:
    """The idle connections to the current member; they are closed when this object is garbage-collected."""

    def __init__(self, members: Sequence[Member], tls: ssl.SSLContext | None) -> None:
        self.members, self._tls = tuple(members), tls
        self._now = 0
        close, is_usable = methodcaller("close"), methodcaller("is_usable")
        self._of_threads: IdlePool[HTTPConnection] = IdlePool(close, MAX_IDLE_CONNECTIONS, is_usable=is_usable)
        self._of_tasks: LoopPools[HTTPConnection] = LoopPools(close, MAX_IDLE_CONNECTIONS, is_usable=is_usable)

    async def checkout(self, runtime: Runtime, until: float) -> HTTPConnection:
        """Return an open connection for one caller: an idle one, otherwise a new one."""
        pool = self._pool(runtime)
        while (connection := pool.take()) is not None:
            if connection.member == self.member:
                return connection
            connection.close()
        return await self.open(runtime, until)

    async def open(self, runtime: Runtime, until: float) -> HTTPConnection:
        """Connect to the current member, or to the next one that can be reached in time."""
        for left in range(len(self.members), 0, -1):
            member, now = self.member, runtime.now()
            try:
                return await HTTPConnection.open(runtime, member, self._tls, now + (until - now) / left)
            except BaseException as error:
                self.skip(member)
                if left == 1 or not isinstance(error, OSError):
                    raise
        raise AssertionError("there is at least one member")

    def checkin(self, runtime: Runtime, connection: HTTPConnection) -> None:
        """Take back a connection whose replies were all read."""
        connection.was_used = True
        self._pool(runtime).put(connection)

    @property
    def member(self) -> Member:
        """The current member."""
        return self.members[self._now % len(self.members)]

    def skip(self, member: Member) -> None:
        """Use the next member from now on, unless another caller has already moved on."""
        if member == self.member:
            self._now = (self._now + 1) % len(self.members)

    def close(self) -> None:
        """Close the idle connections."""
        self._of_threads.clear()
        self._of_tasks.clear()

    def _pool(self, runtime: Runtime) -> IdlePool[HTTPConnection]:
        return self._of_tasks.here() if isinstance(runtime, Asyncio) else self._of_threads


DEFAULT_PORT: Final = 2379
_URL: Final = re.compile(r"(etcds?)://(?:([^/?#]*)@)?([^/?#@]+)/?")
_MEMBER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+))(?::(\d{1,5}))?")
_BAD_URL: Final = (
    "bad etcd URL: expected etcd://[user:password@]host:port,host:port,host:port (etcds:// for TLS), "
    "with every : / ? # @ , of user and password percent-encoded"
)


class ClusterAddress(NamedTuple):
    """The members of a cluster, and the login that they require."""

    members: tuple[Member, ...]
    user: str
    password: str
    is_encrypted: bool


def read_url(url: str) -> ClusterAddress:
    """Parse a URL; raises ValueError, which never quotes the URL."""
    found = _URL.fullmatch(url)
    if found is None or has_swallowed_options(found[3]):
        raise ValueError(_BAD_URL)
    scheme, credentials, members = found.groups(default="")
    user, _, password = credentials.partition(":")
    if bool(user) != bool(password):
        raise ValueError(_BAD_URL)
    listed = tuple(_member(member) for member in members.split(","))
    if len(set(listed)) != len(listed):
        raise ValueError("bad etcd URL: a member is named twice")
    return ClusterAddress(listed, unquote(user), unquote(password), scheme == "etcds")


def _member(member: str) -> Member:
    found = _MEMBER.fullmatch(member)
    if found is None or not is_host(found[1] or found[2]) or not 0 < int(found[3] or DEFAULT_PORT) < 65536:
        raise ValueError(_BAD_URL)
    return Member(found[1] or found[2], int(found[3] or DEFAULT_PORT))
