"""As much of HTTP/1.1 (RFC 9112) as etcd's gateway needs, without I/O: requests as bytes, replies out of bytes."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

__all__ = ["HTTPError", "Reader", "Reply", "post"]

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
