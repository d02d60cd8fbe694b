"""HTTP/1.1 over one connection, for threads and for tasks: h11 writes the requests and reads the replies.

This module adds what a lock needs and a general client does not provide: several requests are sent in one write, the
steps share one time limit, nothing is ever sent twice, and a time limit does not end a stream.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from dlock_core.extras import needed_by
from dlock_core.runtime import Asyncio, within

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dlock_core.runtime import Runtime

with needed_by("the etcd store"):
    import h11

__all__ = ["HTTPConnection", "HTTPError", "HTTPReply", "HTTPStream", "Member"]

MAX_READ_BYTES: Final = 1 << 16
MIN_TIMEOUT_S: Final = 0.001
"""Seconds for a step whose time is over: for a socket, 0 would mean non-blocking."""


class Member(NamedTuple):
    """The address at which one member of the cluster listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HTTPError(OSError):
    """The reply cannot be parsed."""


class HTTPReply(NamedTuple):
    """One reply: its status, and its body, which may be several JSON documents, one a line."""

    status: int
    body: bytes


class HTTPConnection:
    """One connection to one member, used by one caller at a time; what waits raises OSError, TimeoutError in time."""

    def __init__(self, member: Member, stream: _Stream) -> None:
        self.member, self.was_used = member, False
        """Whether it was used before: an idle connection may have died since; the failure of a new one is the
        member's."""
        self._stream, self._received = stream, b""
        self.close = stream.close
        """Closes it at once: its requests must not be executed after our clean-up."""

    @classmethod
    async def open(cls, runtime: Runtime, member: Member, tls: ssl.SSLContext | None, until: float) -> HTTPConnection:
        """Connect to a member."""
        kind = _AsyncioStream if isinstance(runtime, Asyncio) else _BlockingStream
        return cls(member, await runtime.call(kind.open, member, tls, _left(runtime, until)))

    def is_usable(self) -> bool:
        """Return whether an idle connection is open and has no unexpected data, which would pass for the next reply."""
        return not self._received and self._stream.is_usable()

    async def exchange(
        self, runtime: Runtime, requests: Sequence[tuple[str, bytes]], auth_token: str, until: float
    ) -> list[HTTPReply]:
        """Send requests (a path and a body each) in one write, and return their replies, which come in their order."""
        machines = await self._send(runtime, requests, auth_token, until)
        return [await self._reply(runtime, machine, until) for machine in machines]

    async def stream(self, runtime: Runtime, path: str, body: bytes, auth_token: str, until: float) -> HTTPStream:
        """Send a request whose reply has no end; the connection cannot be used otherwise from now on."""
        (machine,) = await self._send(runtime, [(path, body)], auth_token, until)
        return HTTPStream(self, machine)

    async def event(self, runtime: Runtime, machine: h11.Connection, until: float) -> Any:
        """Return the next event of the reply to one request; can be repeated after a TimeoutError."""
        try:
            while (event := machine.next_event()) is h11.NEED_DATA:
                data = await runtime.call(self._stream.read, _left(runtime, until))
                if not data:
                    raise ConnectionResetError("the server closed the connection")
                machine.receive_data(data)
        except h11.RemoteProtocolError:
            raise HTTPError("the server's reply is not HTTP") from None
        return event

    async def _send(
        self, runtime: Runtime, requests: Sequence[tuple[str, bytes]], auth_token: str, until: float
    ) -> list[h11.Connection]:
        """Write the requests, each by a separate machine, because h11 follows only one request at a time."""
        machines = [h11.Connection(h11.CLIENT) for _ in requests]
        host = str(self.member) if self.member.host.isascii() else self.member.host.encode("idna").decode()
        always = [("Host", host), ("Content-Type", "application/json")]
        if auth_token:
            always.append(("Authorization", auth_token))
        data = b""
        for machine, (path, body) in zip(machines, requests, strict=True):
            head = h11.Request(method="POST", target=path, headers=[*always, ("Content-Length", str(len(body)))])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                data += machine.send(event) or b""
        await runtime.call(self._stream.write, data, _left(runtime, until))
        return machines

    async def _reply(self, runtime: Runtime, machine: h11.Connection, until: float) -> HTTPReply:
        if self._received:
            machine.receive_data(self._received)
        status, body = 0, b""
        while not isinstance(event := await self.event(runtime, machine, until), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
        self._received, _ = machine.trailing_data  # The beginning of the next reply.
        return HTTPReply(status, body)


class HTTPStream:
    """A reply that has no end: JSON documents, one a line."""

    def __init__(self, connection: HTTPConnection, machine: h11.Connection) -> None:
        self.close = connection.close
        self._connection, self._machine, self._lines = connection, machine, b""

    async def document(self, runtime: Runtime, until: float) -> Any:
        """Return the next document; can be repeated after a TimeoutError."""
        while True:
            line, newline, rest = self._lines.partition(b"\n")
            if not newline:
                self._lines += await self._part(runtime, until)
                continue
            self._lines = rest
            if line:
                return json.loads(line)

    async def _part(self, runtime: Runtime, until: float) -> bytes:
        event = await self._connection.event(runtime, self._machine, until)
        if isinstance(event, h11.EndOfMessage):
            raise HTTPError("the server ended the stream")
        if isinstance(event, h11.Response) and event.status_code != 200:
            raise HTTPError(f"HTTP {event.status_code} instead of a stream")
        return bytes(event.data) if isinstance(event, h11.Data) else b""


def _left(runtime: Runtime, until: float) -> float:
    return max(MIN_TIMEOUT_S, until - runtime.now())


class _Stream(Protocol):
    """A connected socket, with TLS or without; `read` and `write` wait for at most `limit` seconds."""

    def read(self, limit: float) -> Any:
        """Return the next data, empty at the end of the connection; raises OSError."""

    def write(self, data: bytes, limit: float) -> Any:
        """Send all of it; raises OSError."""

    def is_usable(self) -> bool:
        """Return whether an idle connection is open and has no data."""

    def close(self) -> None:
        """Close it, without waiting for anything."""


class _BlockingStream:
    """For threads."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.close = connected.close

    @classmethod
    def open(cls, member: Member, tls: ssl.SSLContext | None, limit: float) -> _BlockingStream:
        connected = socket.create_connection(member, timeout=limit)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(tls.wrap_socket(connected, server_hostname=member.host) if tls else connected)
        except BaseException:
            connected.close()
            raise

    def read(self, limit: float) -> bytes:
        self._socket.settimeout(limit)
        return self._socket.recv(MAX_READ_BYTES)

    def write(self, data: bytes, limit: float) -> None:
        self._socket.settimeout(limit)
        self._socket.sendall(data)

    def is_usable(self) -> bool:
        try:
            self._socket.settimeout(0)
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)  # Below TLS, whose own method cannot peek.
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class _AsyncioStream:
    """For the tasks of one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.close = writer.transport.abort
        """A plain `close` would wait for the other side over TLS, and the loop may end before that."""

    @classmethod
    async def open(cls, member: Member, tls: ssl.SSLContext | None, limit: float) -> _AsyncioStream:
        return cls(*await within(limit, asyncio.open_connection(*member, ssl=tls)))

    async def read(self, limit: float) -> bytes:
        return await within(limit, self._reader.read(MAX_READ_BYTES))

    async def write(self, data: bytes, limit: float) -> None:
        self._writer.write(data)
        await within(limit, self._writer.drain())

    def is_usable(self) -> bool:
        if self._writer.transport.is_closing():
            return False
        unasked = self._reader.read(1)
        try:
            unasked.send(None)
        except (StopIteration, OSError):  # There is data, or the end of the connection.
            return False
        unasked.close()
        return True
