"""How dlock hands requests to kazoo's thread, and how that thread waits and sends."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kazoo.client import CLOSED_STATES
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from dlock_core.runtime import Signal

__all__ = ["Handler", "KazooReply", "Stream", "send", "tell"]

MAX_READ_BYTES: Final = 1 << 16
"""Bytes read at once."""


def send(client: Any, requests: list[tuple[Any, KazooReply]]) -> None:
    """Queue requests for kazoo's thread, and wake it; `KazooClient._call` swallows what a signal handler raises."""
    waker = client._connection._write_sock
    if client._state in CLOSED_STATES or waker is None:
        for request, reply in requests:
            client._call(request, reply)  # sets the error
        return
    client._queue.extend(requests)
    with suppress(OSError):  # The client has just been closed, or enough wake-ups wait: `Handler.select` adds others.
        waker.send(bytes(len(requests)))


def tell(signal: Signal) -> None:
    """Set a signal from kazoo's thread."""
    with suppress(RuntimeError):  # Its event loop has been closed.
        signal.set()


class KazooReply:
    """A replacement for kazoo's result objects, without their mutexes and their detour over another thread."""

    __slots__ = ("answer", "done")

    def __init__(self, done: Signal | None = None) -> None:
        self.answer: Any = None
        self.done = done

    def set(self, answer: Any = None) -> None:
        """Take the answer."""
        self.answer = answer
        if self.done is not None:
            tell(self.done)

    def set_exception(self, error: Exception) -> None:
        """Store an error as the answer."""
        self.set(error)


class Stream(socket.socket):
    """A connection that reads ahead, and sends requests that belong together at once: one system call for each."""

    def __init__(self, plain: socket.socket, limit: float) -> None:
        super().__init__(fileno=plain.detach())
        self._limit = limit
        self._queue: Sized = ()
        self._held, self._ahead = bytearray(), b""

    def hold_for(self, queue: Sized) -> None:
        """From now on, buffer sent data until it is the last of kazoo's queue."""
        self._queue = queue

    def send(self, data: Any, flags: int = 0) -> int:
        """Send the buffered data and this, or buffer it; raises TimeoutError if the server does not accept it."""
        self._held += data
        if len(self._queue) <= 1:
            held, self._held = memoryview(self._held), bytearray()
            while held := held[self._sent(held) :]:
                pass
        return len(data)

    def _sent(self, data: memoryview) -> int:
        try:
            return super().send(data)
        except BlockingIOError:
            ready = select.poll()
            ready.register(self, select.POLLOUT)
            if ready.poll(1000 * self._limit):
                return 0
            raise TimeoutError("the server takes nothing") from None

    def fill(self) -> None:
        """Read the available data; to be called when there is some, or the end."""
        self._ahead += super().recv(MAX_READ_BYTES)

    @property
    def has_requests(self) -> bool:
        """Whether kazoo's queue contains requests that have not been sent."""
        return bool(self._queue)

    def pending(self) -> int:
        """Return how many bytes have been read."""
        return len(self._ahead)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return the available data; an empty result means the end."""
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Limits kazoo's waits while it connects, and calls watchers at once: ours only set a signal.

    kazoo sends one request for each byte that its thread reads from a pair of sockets. `select` adds the bytes that are
    missing, because a signal handler raised before the caller could write them, or because the pair was full: otherwise
    each request would wait for the next one, and so would the order to reconnect. Writing never blocks, because kazoo's
    thread, the only reader, writes as well.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self._waker: Any = None
        self.has_ended = False
        """Whether the thread of kazoo's connection has ended. `Thread.is_alive` is wrong about a living thread after a
        signal handler has raised in it (CPython before 3.13)."""

    def spawn(self, func: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        """Start one of kazoo's threads: that of the connection, or a worker, which ends as the interpreter exits."""

        def run_to_end() -> None:
            try:
                func(*args, **kwargs)
            finally:
                self.has_ended = self.has_ended or func.__name__ == ConnectionHandler.zk_loop.__name__

        return super().spawn(run_to_end)

    def create_socket_pair(self) -> tuple[Any, Any]:
        """Create the pair, and keep the end that wakes kazoo's thread."""
        reader, self._waker = super().create_socket_pair()
        self._waker.setblocking(False)
        return reader, self._waker

    def create_connection(self, *args: Any, **options: Any) -> Stream:
        """Connect within the limit, not within a session's length."""
        options["timeout"] = min(self._limit, options.get("timeout") or self._limit)
        return Stream(super().create_connection(*args, **options), self._limit)

    def select(self, readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
        """Wait for the connection and for kazoo's wake-ups, without making a selector each time as kazoo does.

        If the connection is the only reader, kazoo waits for the rest of a message, or the answer to a connect: then
        the server must not be silent. Sending has its own wait.
        """
        if writers:
            return [], writers, []
        stream, *wakes = readers
        if stream.pending():
            return [stream], [], []
        if timeout is not None and not wakes:
            timeout = min(timeout, self._limit)
        if wakes and stream.has_requests:
            timeout = 0.0
        found = select.poll()
        for one in readers:
            found.register(one, select.POLLIN)
        ready = [fd for fd, _ in found.poll(None if timeout is None else 1000 * timeout)]
        if wakes and stream.has_requests and wakes[0].fileno() not in ready:
            self._waker.send(b"\0")
            ready.append(wakes[0].fileno())
        if stream.fileno() in ready:
            stream.fill()
        return [one for one in readers if one.fileno() in ready], [], []

    def dispatch_callback(self, callback: Any) -> None:
        """Call a watcher in kazoo's own thread."""
        with suppress(RuntimeError):
            callback.func(*callback.args)
