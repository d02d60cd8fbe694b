"""What an integration provides, a connection in AUTOCOMMIT and what makes it; and the time limit of a call on one.

Not every driver can bound a call, so a thread of ours aborts the connections whose answer is late.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dlock_core.errors import format_seconds
from dlock_core.runtime import clock
from dlock_core.scheduler import Scheduler, after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.runtime import Runtime

__all__ = ["DEADLINES", "Connection", "Connector", "Deadlines", "shut_socket", "socket_of"]

T = TypeVar("T")


class Connection(Protocol):
    """One connection in AUTOCOMMIT, used by one step at a time; its methods block and raise the driver's errors."""

    vendor: str
    """postgresql, mariadb, mysql or sqlite."""
    driver: Any
    """The driver's own connection, for what only drivers can do."""

    def execute(self, sql: str, params: Mapping[str, Any] = ...) -> list[tuple[Any, ...]]:
        """Run one statement with `:name` parameters, commit it, and return its rows, if it has any.

        A percent sign in the text is a percent sign, and a cast is written CAST(… AS …).
        """

    def changed(self) -> int:
        """Return how many rows the last statement has changed."""

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        """PostgreSQL: have `heard` called with the payload of each NOTIFY until the session is cut, and `ended` then.

        It is of no other use from now on, and cutting it closes it, too.
        """

    def close(self) -> None:
        """Close the connection; never raises."""

    def abort(self) -> None:
        """Break the connection off, from any thread; a caller that waits for an answer gets an error. Never raises."""


class Connector(Protocol):
    """Makes sessions with one database; `connect` blocks, so it is only called inside `call`."""

    vendor: str
    """postgresql, mysql (which may turn out to be mariadb) or sqlite: known without I/O."""
    title: str
    """Names the database in errors, without a password: "the database 'default'"."""
    remedy: str
    """What to run when a table of ours is missing: "python manage.py migrate"."""
    errors: tuple[type[Exception], ...]
    """What the driver raises, while it connects, too."""

    def connect(self, limit: float) -> Connection:
        """Open a connection within `limit` seconds; raises one of `errors`, OSError or TimeoutError."""

    async def call(self, runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function where this database's sessions may be used, to its end even when cancelled."""


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
