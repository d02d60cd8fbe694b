"""What we put in the place of parts of kazoo: answers without locks and threads, sockets that are asked less often."""

from __future__ import annotations

import logging
import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kazoo.handlers.threading import SequentialThreadingHandler

if TYPE_CHECKING:
    from collections.abc import Sized

    from dlock_core.runtime import Signal

__all__ = ["Handler", "Reply", "Stream", "quiet", "tell"]

READ: Final = 1 << 16
"""Bytes read at once."""

quiet = logging.getLogger("dlock.kazoo")
"""kazoo's own log: its debug level shows credentials, and it warns at every attempt to connect."""
quiet.setLevel(logging.ERROR)


def tell(signal: Signal) -> None:
    """Set a signal from kazoo's thread."""
    with suppress(RuntimeError):  # its event loop was closed meanwhile
        signal.set()


class Reply:
    """What kazoo's own result objects do, without their locks and their detour over another thread."""

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
        """Take an error for an answer."""
        self.set(error)


class Stream(socket.socket):
    """A connection that reads ahead, and sends in one go what is asked together: one system call for each."""

    def __init__(self, plain: socket.socket, limit: float) -> None:
        super().__init__(fileno=plain.detach())
        self._limit = limit
        self._queue: Sized = ()
        self._held, self._ahead = bytearray(), b""

    def hold_for(self, queue: Sized) -> None:
        """Keep from now on what is sent until it is the last of kazoo's queue, where it stands meanwhile."""
        self._queue = queue

    def send(self, data: Any, flags: int = 0) -> int:
        """Send all that was kept and this, or keep it; raises TimeoutError when it is not taken from us."""
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
        """Read what has come; to be called when there is something, or the end."""
        self._ahead += super().recv(READ)

    def pending(self) -> int:
        """Tell how many bytes are here already."""
        return len(self._ahead)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Take what is here; nothing means the end."""
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Bounds what kazoo waits for while it connects, and calls watchers at once: ours only set a signal."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def create_connection(self, *args: Any, **options: Any) -> Stream:
        """Connect within the limit, not within a session's length."""
        options["timeout"] = min(self._limit, options.get("timeout") or self._limit)
        return Stream(super().create_connection(*args, **options), self._limit)

    def select(self, readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
        """Wait for the connection and for what wakes kazoo, without making a selector each time as kazoo does.

        The connection alone means the rest of a message, or the answer to a request to connect: the server must not be
        silent. It waits by itself when it sends.
        """
        if writers:
            return [], writers, []
        stream, *_ = readers
        if stream.pending():
            return [stream], [], []
        if timeout is not None and len(readers) == 1:
            timeout = min(timeout, self._limit)
        found = select.poll()
        for one in readers:
            found.register(one, select.POLLIN)
        ready = [fd for fd, _ in found.poll(None if timeout is None else 1000 * timeout)]
        if stream.fileno() in ready:
            stream.fill()
        return [one for one in readers if one.fileno() in ready], [], []

    def dispatch_callback(self, callback: Any) -> None:
        """Call a watcher in kazoo's own thread."""
        with suppress(RuntimeError):
            callback.func(*callback.args)
