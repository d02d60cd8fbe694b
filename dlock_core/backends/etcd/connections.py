"""HTTP connections to the members of an etcd cluster, kept between requests, for threads and for tasks.

A socket belongs to no thread and no event loop, so the same idle ones serve both worlds. One member is asked until it
fails, then the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from dlock_core.backends.idle import close_excess, drain, drain_when_forgotten
from dlock_core.backends.options import has_swallowed_options
from dlock_core.runtime import Asyncio, clock

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
        self.since = 0.0
        """When it was last used."""
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
        """Close it at once: what it carries must not be carried out after our clean-up."""
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
        connection.used, connection.since = True, clock()
        self._idle.append(connection)
        close_excess(self._idle, attrgetter("since"), Connection.close, IDLE_KEPT)

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


_END: Final = b"\r\n"
_HEAD_END: Final = b"\r\n\r\n"


class HTTPError(OSError):
    """What came back is not a reply that we understand."""


class Reply(NamedTuple):
    """One reply: its status, and its body, which may be several JSON documents, one a line."""

    status: int
    body: bytes


def post(host: str, path: str, body: bytes, token: str = "") -> bytes:
    """Write a request; several may be sent at once, and are answered in their order."""
    permit = f"Authorization: {token}\r\n" if token else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{permit}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


class Reader:
    """Takes bytes as they come, and gives whole replies, or the lines of one that never ends."""

    def __init__(self) -> None:
        self._data = b""
        self._lines = b""
        self.streaming = False

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._data += data

    def reply(self) -> Reply | None:
        """Give the next reply, once all of it is here."""
        head = _head(self._data)
        if head is None:
            return None
        status, headers, start = head
        if b"content-length" not in headers:
            return self._chunked_reply(status, start)
        end = start + _number(headers[b"content-length"], 10)
        if len(self._data) < end:
            return None
        body, self._data = self._data[start:end], self._data[end:]
        return Reply(status, body)

    def line(self) -> Any:
        """Give the next JSON document of a reply that never ends, or None while it is not here yet."""
        if not self.streaming and not self._begin():
            return None
        while b"\n" not in self._lines:
            chunk = _chunk(self._data, 0)
            if chunk is None:
                return None
            start, end = chunk
            if start == end:
                raise HTTPError("the server ended the stream")
            self._lines, self._data = self._lines + self._data[start:end], self._data[end + 2 :]
        line, _, self._lines = self._lines.partition(b"\n")
        return json.loads(line) if line else self.line()

    def _begin(self) -> bool:
        head = _head(self._data)
        if head is None:
            return False
        status, _, start = head
        if status != 200:
            raise HTTPError(f"HTTP {status} instead of a stream")
        self._data, self.streaming = self._data[start:], True
        return True

    def _chunked_reply(self, status: int, start: int) -> Reply | None:
        body = b""
        while (chunk := _chunk(self._data, start)) is not None:
            begin, end = chunk
            if begin == end:
                return self._finish(status, body, begin)
            body, start = body + self._data[begin:end], end + 2
        return None

    def _finish(self, status: int, body: bytes, start: int) -> Reply | None:
        """Pass over the trailers, the last of which is an empty line."""
        end = start if self._data.startswith(_END, start) else self._data.find(_HEAD_END, start) + 2
        if end < start or len(self._data) < end + 2:
            return None
        self._data = self._data[end + 2 :]
        return Reply(status, body)


def _head(data: bytes) -> tuple[int, dict[bytes, bytes], int] | None:
    """Give status and headers of the reply that begins here, and where its body begins."""
    end = data.find(_HEAD_END)
    if end < 0:
        return None
    first, *lines = data[:end].split(_END)
    if not first.startswith(b"HTTP/1.1 "):
        raise HTTPError("the server does not speak HTTP/1.1")
    pairs = (line.partition(b":") for line in lines)
    return _number(first[9:12], 10), {key.strip().lower(): value.strip() for key, _, value in pairs}, end + 4


def _chunk(data: bytes, start: int) -> tuple[int, int] | None:
    """Give where the chunk that begins here has its content, once all of it is here; empty for the last one."""
    line_end = data.find(_END, start)
    if line_end < 0:
        return None
    size = _number(data[start:line_end].partition(b";")[0], 16)
    end = line_end + 2 + size
    return (line_end + 2, end) if size == 0 or len(data) >= end + 2 else None


def _number(text: bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise HTTPError("the server's reply is not HTTP") from None


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
    if found is None or has_swallowed_options(found[3]):
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
