"""Nobody waits for ever for a database: connections whose answer does not come in time are cut, by one thread."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.port import Session

__all__ = ["Limits", "of_process", "shut", "socket_of"]

T = TypeVar("T")

IDLE: Final = 10.0
"""Seconds without a question after which the thread ends."""


class Limits:
    """The time limits of the questions that are being asked now."""

    def __init__(self) -> None:
        self._guard, self._wake = threading.Lock(), threading.Event()
        self._due: dict[Session, float] = {}
        self._next = self._ends = 0.0  # until when the thread sleeps, and when it ends if nothing comes
        self._thread: threading.Thread | None = None

    def call(self, session: Session, seconds: float, function: Callable[[Session], T]) -> T:
        """Call a function of the session, which is cut if that takes longer: TimeoutError, and it is of no more use."""
        self._begin(session, clock() + seconds)
        try:
            answer = function(session)
        except BaseException as error:
            if self._end(session) or not isinstance(error, Exception):
                raise
            raise TimeoutError(f"no answer within {seconds:.3g} s") from error
        if not self._end(session):
            raise TimeoutError(f"no answer within {seconds:.3g} s")
        return answer

    def _begin(self, session: Session, until: float) -> None:
        with self._guard:
            self._due[session] = until
            self._ends = max(self._ends, until + IDLE)
            if self._thread is None:
                self._next = until
                self._thread = threading.Thread(target=self._run, name="dlock-database-limits", daemon=True)
                self._thread.start()
            elif until < self._next:
                self._next = until
                self._wake.set()

    def _end(self, session: Session) -> bool:
        """Tell whether it was in time."""
        with self._guard:
            return self._due.pop(session, None) is not None

    def _run(self) -> None:
        while (pause := self._turn()) is not None:
            self._wake.wait(pause)
            self._wake.clear()

    def _turn(self) -> float | None:
        """Cut what is late, and tell how long to sleep; None, and no thread any more, when nothing came for long."""
        with self._guard:
            now = clock()
            for session in [late for late, until in self._due.items() if until <= now]:
                del self._due[session]
                session.cut()  # under the guard: once it has ended, its connection is somebody else's
            if not self._due and now >= self._ends:
                self._thread = None
                return None
            self._next = min(self._due.values(), default=self._ends)
            return self._next - now


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
