"""Connections of our own to the members of a cluster, kept between requests, for threads and for tasks alike.

A socket belongs to no thread and no event loop, so the same idle ones serve both worlds. One member is asked until it
fails, then the next.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlock_core.backends.etcd.http import Reader
from dlock_core.backends.idle import drain, drain_when_forgotten
from dlock_core.runtime import Asyncio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.runtime import Runtime

__all__ = ["Connection", "Connections", "Member"]

IDLE_KEPT: Final = 64
"""Idle connections kept open, at most; more are made when more are needed at once."""
CHUNK: Final = 1 << 16


class Member(NamedTuple):
    """Where one member of the cluster listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connection:
    """One connection, used by one party at a time; every step has its limit in seconds."""

    def __init__(self, member: Member, tls: ssl.SSLContext | None) -> None:
        self.member, self.reader, self.used = member, Reader(), False
        self._socket: socket.socket | None = None
        self._tls = _Tls(tls, member.host) if tls else None

    async def open(self, runtime: Runtime, limit: float) -> None:
        """Connect; raises OSError."""
        connect = _aconnect if isinstance(runtime, Asyncio) else _connect
        self._socket = await runtime.call(connect, self.member, limit)
        if self._tls is not None:
            await self._shake_hands(self._tls, runtime, limit)

    async def send(self, runtime: Runtime, data: bytes, limit: float) -> None:
        """Send all of it; raises OSError."""
        await self._send(runtime, self._tls.encrypt(data) if self._tls else data, limit)

    async def receive(self, runtime: Runtime, limit: float) -> None:
        """Feed the reader with what comes next; raises OSError, also when the server has closed the connection."""
        data = await self._receive(runtime, limit)
        self.reader.feed(self._tls.decrypt(data) if self._tls else data)

    def is_alive(self) -> bool:
        """Tell whether an idle connection is open, and silent as it must be."""
        if self._socket is None:
            return False
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close it at once: what it carries must not be carried out after our withdrawal."""
        if self._socket is not None:
            self._socket.close()

    async def _send(self, runtime: Runtime, data: bytes, limit: float) -> None:
        await runtime.call(_asend if isinstance(runtime, Asyncio) else _send, self._socket, data, limit)

    async def _receive(self, runtime: Runtime, limit: float) -> bytes:
        receive = _areceive if isinstance(runtime, Asyncio) else _receive
        data: bytes = await runtime.call(receive, self._socket, limit)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    async def _shake_hands(self, tls: _Tls, runtime: Runtime, limit: float) -> None:
        while not tls.is_ready():
            if hello := tls.outgoing.read():
                await self._send(runtime, hello, limit)
            else:
                tls.incoming.write(await self._receive(runtime, limit))
        if rest := tls.outgoing.read():
            await self._send(runtime, rest, limit)


class _Tls:
    """Encryption between two buffers, so that it fits every way to wait."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)

    def is_ready(self) -> bool:
        """Go on with the handshake as far as it goes."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: bytes) -> bytes:
        self._object.write(data)
        return self.outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        self.incoming.write(data)
        plain = b""
        try:
            while part := self._object.read(CHUNK):
                plain += part
        except ssl.SSLWantReadError:
            return plain
        raise ConnectionResetError("the server closed the connection")


class Connections:
    """The idle connections to the member that is asked now; they are closed when it is forgotten."""

    def __init__(self, members: Sequence[Member], tls: ssl.SSLContext | None) -> None:
        self.members, self._tls = tuple(members), tls
        self._now, self._pid = 0, os.getpid()
        self._idle: deque[Connection] = deque()
        drain_when_forgotten(self, self._idle, Connection.close)

    async def checkout(self, runtime: Runtime, limit: float) -> Connection:
        """Give an open connection that nobody else uses: an idle one, or else a new one."""
        if self._pid != os.getpid():  # a forked child must not talk on its parent's sockets
            self._pid = os.getpid()
            self.close()
        while (connection := self._last()) is not None:
            if connection.member == self.member and connection.is_alive():
                return connection
            connection.close()
        return await self.open(runtime, limit)

    async def open(self, runtime: Runtime, limit: float) -> Connection:
        """Connect to the member that is asked now, or to the next one that can be reached, within `limit` seconds."""
        until = runtime.now() + limit
        for left in range(len(self.members), 0, -1):
            connection = Connection(self.member, self._tls)
            try:
                await connection.open(runtime, max(0.001, (until - runtime.now()) / left))
            except BaseException as error:
                connection.close()
                self.skip(connection.member)
                if left == 1 or not isinstance(error, OSError):
                    raise
            else:
                return connection
        raise AssertionError("there is at least one member")

    def checkin(self, connection: Connection) -> None:
        """Take back a connection whose replies were all read."""
        connection.used = True
        self._idle.append(connection)
        if len(self._idle) > IDLE_KEPT:
            self._idle.popleft().close()

    @property
    def member(self) -> Member:
        """The member that is asked now."""
        return self.members[self._now % len(self.members)]

    def skip(self, member: Member) -> None:
        """Ask the next member from now on, unless another has moved on already."""
        if member == self.member:
            self._now = (self._now + 1) % len(self.members)

    def close(self) -> None:
        """Close the idle connections."""
        drain(self._idle, Connection.close)

    def _last(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


def _connect(member: Member, limit: float) -> socket.socket:
    connected = socket.create_connection(member, timeout=limit)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


async def _aconnect(member: Member, limit: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(limit):
        found = await loop.getaddrinfo(member.host, member.port, type=socket.SOCK_STREAM)
        for last, (family, kind, protocol, _, address) in enumerate(found, 1 - len(found)):
            one = socket.socket(family, kind, protocol)
            try:
                one.setblocking(False)
                await loop.sock_connect(one, address)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except BaseException as error:
                one.close()
                if last == 0 or not isinstance(error, OSError):
                    raise
            else:
                return one
    raise OSError(f"no address for {member}")


def _send(connected: socket.socket, data: bytes, limit: float) -> None:
    connected.settimeout(limit)
    connected.sendall(data)


def _receive(connected: socket.socket, limit: float) -> bytes:
    connected.settimeout(limit)
    return connected.recv(CHUNK)


async def _asend(connected: Any, data: bytes, limit: float) -> None:
    connected.setblocking(False)
    async with asyncio.timeout(limit):
        await asyncio.get_running_loop().sock_sendall(connected, data)


async def _areceive(connected: Any, limit: float) -> bytes:
    connected.setblocking(False)
    async with asyncio.timeout(limit):
        return await asyncio.get_running_loop().sock_recv(connected, CHUNK)
