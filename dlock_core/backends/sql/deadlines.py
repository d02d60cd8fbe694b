"""Deadlines for calls to a database: one thread aborts the connections whose answer is late."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.errors import format_seconds
from dlock_core.runtime import clock
from dlock_core.scheduler import Scheduler, after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backends.sql.port import Connection

__all__ = ["DEADLINES", "Deadlines", "shut_socket", "socket_of"]

T = TypeVar("T")


class Deadlines:
    """The time limits of the questions that are being asked now."""

    def __init__(self) -> None:
        self._begin()
        after_fork_in_child(self._begin)

    def _begin(self) -> None:
        """Start without calls; also in a forked child, because the calls of its parent are not its own."""
        self._guard = threading.RLock()  # A signal handler may ask a question, too, in the middle of a method of ours.
        self._due: dict[Connection, float] = {}
        self._scheduler = Scheduler(
            "dlock-database-limits", "to cut off databases that do not answer", self._next_due, self._abort_late
        )

    def call(self, connection: Connection, seconds: float, function: Callable[[Connection], T]) -> T:
        """Call a function of the session, which is cut if that takes longer: TimeoutError, and it is of no more use."""
        until = clock() + seconds
        try:
            self._enter(connection, until)
            answer = function(connection)
        except BaseException as error:
            if self._end(connection) or clock() < until or not isinstance(error, Exception):
                raise
            raise TimeoutError(f"no answer within {format_seconds(seconds)}") from error
        if not self._end(connection):
            raise TimeoutError(f"no answer within {format_seconds(seconds)}")
        return answer

    def _enter(self, connection: Connection, until: float) -> None:
        with self._guard:
            self._due[connection] = until
        self._scheduler.plan(until)

    def _end(self, connection: Connection) -> bool:
        """Return whether it was in time."""
        with self._guard:
            return self._due.pop(connection, None) is not None

    def _next_due(self) -> float | None:
        with self._guard:
            return min(self._due.values(), default=None)

    def _abort_late(self) -> None:
        with self._guard:
            now = clock()
            for connection in [late for late, until in self._due.items() if until <= now]:
                del self._due[connection]
                # This happens under the guard: once the call has ended, its connection may be in use by another call.
                connection.abort()


DEADLINES: Final = Deadlines()
"""Those of this process."""


def socket_of(driver: Any) -> int:
    """Return the socket under a driver's connection, -1 if it shows none; call this while it is not in use."""
    shown: Any = driver if hasattr(driver, "fileno") else getattr(driver, "_sock", None)
    try:
        return int(shown.fileno())
    except Exception:  # noqa: BLE001 - asyncio's drivers show none
        return -1


def shut_socket(number: int) -> None:
    """Shut a socket down, from any thread; never raises."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connected:
        connected.shutdown(socket.SHUT_RDWR)
