"""The interface to an integration: connections in AUTOCOMMIT and their factory; and the time limit of calls.

Not every driver can limit a call, so a thread aborts the connections whose answer is late.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from dlock_core.errors import format_seconds
from dlock_core.runtime import clock
from dlock_core.scheduler import Scheduler, after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.runtime import Runtime

__all__ = [
    "DEADLINES",
    "Connection",
    "Connector",
    "Deadlines",
    "SocketKey",
    "leave_to_parent",
    "shut_socket",
    "socket_key",
    "socket_of",
]

T = TypeVar("T")


class Connection(Protocol):
    """One connection in AUTOCOMMIT, used by one step at a time; its methods block and raise the driver's errors."""

    vendor: str
    """postgresql, mariadb, mysql or sqlite."""
    driver: Any
    """The driver's own connection, for driver-specific calls."""

    def execute(self, sql: str, params: Mapping[str, Any] = ...) -> list[tuple[Any, ...]]:
        """Run one statement with `:name` parameters, commit it, and return its rows, if it has any.

        A percent sign in the text is a percent sign, and a cast is written CAST(… AS …).
        """

    def changed(self) -> int:
        """Return how many rows the last statement has changed."""

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        """PostgreSQL: call `heard` with the payload of each NOTIFY until the session is aborted, and then `ended`.

        The connection cannot be used otherwise from now on, and aborting it also closes it.
        """

    def close(self) -> None:
        """Close the connection; never raises."""

    def abort(self) -> None:
        """Abort the connection, from any thread; a caller that waits for an answer gets an error. Never raises."""


class Connector(Protocol):
    """Opens connections to one database; `connect` blocks, so it is only called inside `call`."""

    vendor: str
    """postgresql, mysql (which may turn out to be mariadb) or sqlite: known without I/O."""
    title: str
    """Names the database in errors, without a password: "the database 'default'"."""
    remedy: str
    """The command to run if a table of dlock is missing: "python manage.py migrate"."""
    errors: tuple[type[Exception], ...]
    """The errors of the driver, including those while it connects."""

    def connect(self, limit: float) -> Connection:
        """Open a connection within `limit` seconds; raises one of `errors`, OSError or TimeoutError."""

    async def call(self, runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function where this database's connections may be used, to its end even when cancelled."""


class Deadlines:
    """The time limits of the calls in progress."""

    def __init__(self) -> None:
        self._begin()
        after_fork_in_child(self._begin)

    def _begin(self) -> None:
        """Start without calls; also in a forked child, which does not have its parent's calls."""
        self._guard = threading.RLock()  # A signal handler may also make a call, in the middle of one of these methods.
        self._due: dict[Connection, float] = {}
        self._scheduler = Scheduler(
            "dlock-database-limits", "to cut off databases that do not answer", self._next_due, self._abort_late
        )

    def call(self, connection: Connection, seconds: float, function: Callable[[Connection], T]) -> T:
        """Call a function of the connection; if it takes longer, abort the connection and raise TimeoutError."""
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
                # This happens under the mutex: once the call has ended, its connection may be in use by another call.
                connection.abort()


DEADLINES: Final = Deadlines()
"""Those of this process."""


def socket_of(driver: Any) -> int:
    """Return the socket of a driver's connection, -1 if it exposes none; call this while it is not in use."""
    shown: Any = driver if hasattr(driver, "fileno") else getattr(driver, "_sock", None)
    try:
        return int(shown.fileno())
    except Exception:  # noqa: BLE001 - asyncio's drivers expose none
        return -1


def shut_socket(number: int) -> None:
    """Shut a socket down, from any thread; never raises."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connected:
        connected.shutdown(socket.SHUT_RDWR)


class SocketKey(NamedTuple):
    """A socket, recognized although its number may be another file's by now."""

    number: int
    inode: int


def socket_key(driver: Any) -> SocketKey | None:
    """Return the socket of a driver's connection that has just been opened, None if it exposes none."""
    number = socket_of(driver)
    return SocketKey(number, os.fstat(number).st_ino) if number >= 0 else None


def leave_to_parent(key: SocketKey) -> None:
    """In a forked child: keep a driver from ending the parent's session when the child's copy is deallocated.

    mysqlclient says goodbye to the server then, also at the end of the process. The other drivers only do so in the
    process that connected.
    """
    with suppress(OSError):
        if os.fstat(key.number).st_ino == key.inode:
            os.close(key.number)  # Now one descriptor is free, even if the process had used up all of them.
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != key.number:
                os.dup2(nowhere, key.number)
                os.close(nowhere)
