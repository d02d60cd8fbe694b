"""Connections to one database: shared ones, kept between the steps of locks, and dedicated ones of one holder."""

from __future__ import annotations

import os
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from dlock_core.backends.idle import IdlePool, inherited
from dlock_core.backends.sql.connection import DEADLINES, leave_to_parent, socket_key
from dlock_core.errors import BackendUnavailable
from dlock_core.options import check_seconds
from dlock_core.owner import printable
from dlock_core.runtime import clock
from dlock_core.scheduler import after_fork_in_child
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.backends.sql.connection import Connection, Connector, SocketKey
    from dlock_core.runtime import Runtime

__all__ = ["DedicatedConnection", "Pool"]

T = TypeVar("T")

MAX_IDLE_CONNECTIONS: Final = 4
"""Idle connections kept open, at most: steps are short, and a database has few connections."""
MAX_CONFLICT_RETRIES: Final = 10
"""How often a step that was the victim of a deadlock is retried; each time, another transaction made progress."""
_MYSQL: Final = "SET SESSION innodb_lock_wait_timeout = %d"
_POSTGRESQL: Final = "SET lock_timeout = %d"


class Pool:
    """Connections to one database; `timeout` is the limit of each step, and of each new connection, in seconds.

    Raises ValueError for an invalid timeout. Every method may be called from any thread or task.
    """

    def __init__(self, connector: Connector, *, timeout: float = 5.0) -> None:
        check_seconds("timeout", timeout)
        self.connector, self.timeout = connector, timeout
        self.idle: IdlePool[Connection] = IdlePool(methodcaller("close"), MAX_IDLE_CONNECTIONS, is_inherited=True)
        self._sockets: WeakKeyDictionary[Connection, SocketKey] = WeakKeyDictionary()
        """Of the connections to MariaDB and MySQL."""
        after_fork_in_child(self._after_fork)

    def step(
        self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Return the result of a function, called with a connection that nothing else uses during the call.

        The function may be called again after a deadlock or serialization failure. Raises BackendUnavailable, and then
        it is unknown whether the step was executed; it is not executed later, unless the database stands still.
        """
        return self.connector.call(runtime, self._step, name, function, limit)

    async def dedicated(self, runtime: Runtime, name: str) -> DedicatedConnection:
        """Open a connection for one holder, which has to close it; raises BackendUnavailable."""
        dedicated = DedicatedConnection(self)
        try:
            await self.connector.call(runtime, dedicated.open, name)
        except BaseException:  # cancelled: the connection may exist nevertheless
            await dedicated.close(runtime)
            raise
        return dedicated

    def close(self) -> None:
        """Close the idle connections; more are opened when they are needed."""
        self.idle.clear()

    def run(self, connection: Connection, function: Callable[[Connection], T], limit: float | None) -> T:
        """Execute a step on a connection, and repeat it while it is the victim of others."""
        until = clock() + (self.timeout if limit is None else limit)
        for left in range(MAX_CONFLICT_RETRIES, -1, -1):
            try:
                return DEADLINES.call(connection, until - clock(), function)
            except self.connector.errors as error:
                trouble = failure_of_statement(error)
                if not left or trouble not in (DatabaseFailure.DEADLOCK, DatabaseFailure.SERIALIZATION):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def fail(self, name: str, error: BaseException, *, idle: bool = False) -> NoReturn:
        """Raise BackendUnavailable for an error of the database or the network; raise any other error unchanged."""
        if isinstance(error, (*self.connector.errors, OSError)):
            raise self._unavailable(name, error, idle=idle) from error
        raise error

    def _unavailable(self, name: str, error: BaseException, *, idle: bool) -> BackendUnavailable:
        """Return the error for a missing answer of the database; if the connection was `idle`, a new one may work."""
        trouble, connector = failure_of_statement(error), self.connector
        words = str(error).strip() or type(error).__name__
        reason = f"{connector.title}: {printable(words.splitlines()[0])}"
        if trouble is DatabaseFailure.MISSING_TABLE:
            reason = f"{connector.title} has no table for it: run {connector.remedy}"
        refused = trouble in (DatabaseFailure.MISSING_TABLE, DatabaseFailure.NO_ACCESS)
        return BackendUnavailable(name, reason=reason, broken=idle, refused=refused)

    def open(self, name: str) -> Connection:
        """Connect; blocks."""
        try:
            connection = self.connector.connect(self.timeout)
        except Exception as error:  # noqa: BLE001 - it is raised again
            self.fail(name, error)
        if connection.vendor in {"mariadb", "mysql"}:
            if (key := socket_key(connection.driver)) is not None:
                self._sockets[connection] = key
            wait = _MYSQL % max(1, int(self.timeout * 0.8))
            self._settle(name, connection, wait, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        return connection

    def _after_fork(self) -> None:
        for key in list(self._sockets.values()):
            leave_to_parent(key)

    def _open_for_steps(self, name: str) -> Connection:
        connection = self.open(name)
        if connection.vendor == "postgresql":  # not on dedicated ones, where a holder may wait for any time
            self._settle(name, connection, _POSTGRESQL % max(1, int(self.timeout * 800)))
        return connection

    def _settle(self, name: str, connection: Connection, *settings: str) -> None:
        """Make the server's limit shorter than ours; otherwise it could finish a step after we reported a failure."""
        try:
            for sql in settings:
                self.run(connection, lambda connection, sql=sql: connection.execute(sql), None)  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - it is raised again
            connection.close()
            self.fail(name, error)

    def _step(self, name: str, function: Callable[[Connection], T], limit: float | None) -> T:
        connection, pid = self.idle.take(), os.getpid()
        idle = connection is not None
        connection = connection or self._open_for_steps(name)
        try:
            answer = self.run(connection, function, limit)
        except BaseException as error:
            if pid != os.getpid():
                inherited.append(connection)
                raise
            connection.close()
            self.close()  # the cause that ended this connection may have ended the others
            self.fail(name, error, idle=idle and not isinstance(error, TimeoutError))
        self.idle.put(connection)
        return answer


class DedicatedConnection:
    """A connection that one holder keeps, for locks that last as long as a database session."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._pid = pool, os.getpid()
        self.connection: Connection | None = None
        """None before it is opened, and after it was closed."""

    @property
    def is_open(self) -> bool:
        """Whether it has not failed so far; False in a forked child, because it belongs to the parent."""
        return self.connection is not None and self._pid == os.getpid()

    def open(self, name: str) -> None:
        """Connect; blocks."""
        self.connection = self._pool.open(name)

    def step(
        self, runtime: Runtime, name: str, function: Callable[[Connection], T], limit: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Execute a step; a BackendUnavailable closes the connection, which ends everything that depends on it."""
        return self._pool.connector.call(runtime, self._step, name, function, limit)

    async def close(self, runtime: Runtime) -> None:
        """Close the connection; in a forked child it stays open, because it belongs to the parent."""
        if self._pid != os.getpid():
            self.forget()
        connection, self.connection = self.connection, None
        if connection is not None:
            await self._pool.connector.call(runtime, connection.close)

    def abort(self) -> None:
        """Abort the connection, from any thread; its reading thread closes it, or the next step, which fails."""
        connection = self.connection  # A step that fails in another thread may clear the attribute at any moment.
        if connection is not None and self._pid == os.getpid():
            connection.abort()

    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""
        inherited.append(self.connection)
        self.connection = None

    def _step(self, name: str, function: Callable[[Connection], T], limit: float | None) -> T:
        connection = self.connection
        if connection is None or not self.is_open:
            raise BackendUnavailable(name, reason="its dedicated connection is closed")
        try:
            return self._pool.run(connection, function, limit)
        except BaseException as error:
            self.connection = None  # first: a second interrupt would leave it open, with an answer that was not read
            if self._pid != os.getpid():  # A signal handler has forked this process, and has raised in the child.
                inherited.append(connection)
                raise
            connection.close()
            self._pool.fail(name, error)
