"""What we put in the place of parts of kazoo: answers without locks and threads, and a handler that does not wait."""

from __future__ import annotations

import logging
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kazoo.handlers.threading import SequentialThreadingHandler

if TYPE_CHECKING:
    from dlock_core.runtime import Signal

__all__ = ["Handler", "Reply", "quiet", "tell"]

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


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """Bounds what kazoo waits for while it connects, and calls watchers at once: ours only set a signal."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def create_connection(self, *args: Any, **options: Any) -> Any:
        """Connect within the limit, not within a session's length."""
        options["timeout"] = min(self._limit, options.get("timeout") or self._limit)
        return super().create_connection(*args, **options)

    def select(self, readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
        """Wait for sockets, without making a selector each time as kazoo does, which is most of its cost.

        One alone means the rest of a message, or the answer to a request to connect: the server must not be silent.
        """
        poll = select.poll()
        for one in readers:
            poll.register(one, select.POLLIN)
        for one in writers:
            poll.register(one, select.POLLOUT)
        if timeout is not None:
            timeout = 1000 * (timeout if len(readers) > 1 else min(timeout, self._limit))
        ready = poll.poll(timeout)
        if len(ready) == len(readers) + len(writers):
            return readers, writers, []
        fds = [fd for fd, _ in ready]
        return [one for one in readers if one.fileno() in fds], [one for one in writers if one.fileno() in fds], []

    def dispatch_callback(self, callback: Any) -> None:
        """Call a watcher in kazoo's own thread."""
        with suppress(RuntimeError):
            callback.func(*callback.args)
