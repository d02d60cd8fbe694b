"""Nobody waits for ever for a database: connections whose answer does not come in time are cut, by one thread."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.errors import format_seconds
from dlock_core.runtime import clock
from dlock_core.scheduler import Background

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.port import Session

__all__ = ["Limits", "of_process", "shut", "socket_of"]

T = TypeVar("T")

IDLE: Final = 10.0
"""Seconds without a question after which the thread ends; also its longest sleep."""


class Limits:
    """The time limits of the questions that are being asked now."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # A signal handler may ask a question, too, in the middle of a method of ours.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._due: dict[Session, float] = {}
        self._next = 0.0  # until when the thread sleeps
        self._thread = Background(
            "dlock-database-limits", "to cut off databases that do not answer", self._serve, lambda: self._due
        )

    def call(self, session: Session, seconds: float, function: Callable[[Session], T]) -> T:
        """Call a function of the session, which is cut if that takes longer: TimeoutError, and it is of no more use."""
        until = clock() + seconds
        try:
            self._begin(session, until)
            answer = function(session)
        except BaseException as error:
            if self._end(session) or clock() < until or not isinstance(error, Exception):
                raise
            raise TimeoutError(f"no answer within {format_seconds(seconds)}") from error
        if not self._end(session):
            raise TimeoutError(f"no answer within {format_seconds(seconds)}")
        return answer

    def _begin(self, session: Session, until: float) -> None:
        with self._guard:
            self._due[session] = until
        if until < self._next:
            self._wake.put(None)
        self._thread.ensure()

    def _end(self, session: Session) -> bool:
        """Tell whether it was in time."""
        with self._guard:
            return self._due.pop(session, None) is not None

    def _serve(self) -> None:
        """Cut what is late, until nothing was asked for long."""
        was_idle = False
        while self._due or not was_idle:
            was_idle = not self._due
            with suppress(Empty):
                self._wake.get(timeout=self._cut())

    def _cut(self) -> float:
        """Cut what is late, and return for how many seconds nothing else can be."""
        with self._guard:
            now = clock()
            for session in [late for late, until in self._due.items() if until <= now]:
                del self._due[session]
                session.cut()  # under the guard: once it has ended, its connection is somebody else's
            self._next = min([*self._due.values(), now + IDLE])
            return max(0.0, self._next - now)


def socket_of(driver: Any) -> int:
    """Give the socket under a driver's connection, -1 where it shows none; to be asked while nobody uses it."""
    shown: Any = driver if hasattr(driver, "fileno") else getattr(driver, "_sock", None)
    try:
        return int(shown.fileno())
    except Exception:  # noqa: BLE001 - asyncio's drivers show none
        return -1


def shut(number: int) -> None:
    """Shut a socket down, from any thread; never raises."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connected:
        connected.shutdown(socket.SHUT_RDWR)


_of_processes: dict[int, Limits] = {}


def of_process() -> Limits:
    """Give the limits of this process; a forked child has none of its parent's threads."""
    pid = os.getpid()
    return _of_processes.get(pid) or _of_processes.setdefault(pid, Limits())
