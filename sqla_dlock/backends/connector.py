"""Separate connections to the database of an Engine or AsyncEngine, made as it makes them but outside its pool."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from dlock_core.backends.sql import Pool, in_threads, notifications, read_in_thread, shut_socket, socket_of, within
from dlock_core.backends.sql.sqlite import SQLiteConnector, file_of
from dlock_core.options import is_host
from dlock_core.sql.database import cursor_of
from sqla_dlock.backends.loops import Loop
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy import Dialect
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dlock_core.backends.sql import Connection, Connector

__all__ = ["as_driver_takes", "pool_of"]

VENDORS: Final = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
SOCKET_PATHS: Final = ("/", "%2F", "%2f")
"""The first characters of a socket's path where PostgreSQL's drivers also accept a host."""
CLOSE_LIMIT_S: Final = 1.0
"""Seconds for which an asyncio driver may wait for its server when it closes a connection."""
REMEDY: Final = "sqla_dlock.tables.lease_metadata.create_all(engine), or your own migration"


def pool_of(engine: Engine | AsyncEngine, *, timeout: float = 5.0) -> Pool:
    """Return connections to an engine's database: its driver, arguments and events, but not its pool.

    Raises TypeError for anything but an engine and for the sync_engine of an AsyncEngine, and ValueError for a database
    that dlock does not support, or an invalid host name.
    """
    if not isinstance(getattr(engine, "sync_engine", engine), Engine):
        raise TypeError(f"leases need an Engine or AsyncEngine, not {type(engine).__name__}")
    if isinstance(engine, Engine) and engine.dialect.is_async:
        raise TypeError("leases need the AsyncEngine itself, not its sync_engine: its driver could not be awaited here")
    return Pool(_connector(engine), timeout=timeout)


def _connector(engine: Engine | AsyncEngine) -> Connector:
    vendor = VENDORS.get(engine.dialect.name)
    title = f"the database {engine.url.database!r} at {engine.url.host or 'this machine'}"
    if vendor is None:
        raise ValueError(f"no leases on {engine.dialect.name} ({title}): use one of {', '.join(VENDORS)}")
    host = engine.url.host or ""
    if not (is_host(host) or host.startswith(SOCKET_PATHS)):
        raise ValueError(f"{host!r:.80} is not a valid host name ({title:.80})")
    if vendor == "sqlite":
        file = file_of(engine.url.database or "")  # now: a process may change its directory
        return SQLiteConnector(title, lambda: str(file or ""))
    if isinstance(engine, Engine):
        return EngineConnector(engine, vendor, title)
    return AsyncEngineConnector(engine.sync_engine, vendor, title)


class EngineConnector:
    """A database behind a blocking driver."""

    remedy = REMEDY
    call = staticmethod(in_threads)

    def __init__(self, engine: Engine, vendor: str, title: str) -> None:
        self.vendor, self.title = vendor, title
        self._dialect, self._source = engine.dialect, engine.pool.recreate()
        self.errors: tuple[type[Exception], ...] = (SQLAlchemyError, engine.dialect.loaded_dbapi.Error)

    def connect(self, limit: float) -> Connection:
        return within(limit, lambda: EngineConnection(self._dialect, self._connected()))

    def _connected(self) -> Any:
        """Take a new connection out of the pool for good, so that the pool's size is no limit."""
        fairy = self._source.connect()
        fairy.detach()
        connection: Any = fairy.dbapi_connection
        try:
            self._dialect.do_commit(connection)  # the transaction of an event of the engine, such as SET search_path
            self._dialect.set_isolation_level(connection, "AUTOCOMMIT")
        except BaseException:
            self._close(connection)
            raise
        return connection

    def _close(self, connection: Any) -> None:
        self._dialect.do_close(connection)


class AsyncEngineConnector(EngineConnector):
    """A database behind an asyncio driver, in our own event loop: any thread and any loop may use it."""

    def __init__(self, engine: Engine, vendor: str, title: str) -> None:
        super().__init__(engine, vendor, title)
        self._loop = Loop()
        self._loop_of_source: asyncio.AbstractEventLoop | None = None
        self.errors = (*self.errors, *_own_errors(engine.dialect))
        self.call = self._loop.call

    def connect(self, limit: float) -> Connection:
        return self._loop.within(limit, self._open)

    def _open(self) -> Connection:
        # SQLAlchemy initializes the dialect under a lock of the pool, which belongs to the loop in which two
        # connections have met at it.
        loop = asyncio.get_running_loop()
        if self._loop_of_source is not loop:
            self._source, self._loop_of_source = self._source.recreate(), loop
        return AsyncEngineConnection(self._dialect, self._connected(), self._loop)

    def _close(self, connection: Any) -> None:
        _close_soon(self._loop, self._dialect, connection)


class EngineConnection:
    """One connection, used below SQLAlchemy's own: no log, no events, no transactions."""

    def __init__(self, dialect: Dialect, connection: Any) -> None:
        self._dialect, self._connection, self._changed = dialect, connection, 0
        self.driver: Any = dialect.get_driver_connection(connection)
        self._socket = socket_of(self.driver)
        self.vendor = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name

    def execute(self, sql: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        with cursor_of(self._connection) as cursor:
            cursor.execute(*as_driver_takes(sql, params, self._dialect))
            self._changed = cursor.rowcount
            return list(map(tuple, cursor.fetchall())) if cursor.description else []

    def changed(self) -> int:
        return self._changed

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        self.execute(f"LISTEN {channel}")
        read_in_thread(self, heard, ended)

    def close(self) -> None:
        self._socket = -1  # from now on the number may belong to another socket
        with suppress(Exception):
            self._dialect.do_close(self._connection)

    def abort(self) -> None:
        shut_socket(self._socket)


class AsyncEngineConnection(EngineConnection):
    """The same in our own event loop."""

    def __init__(self, dialect: Dialect, connection: Any, loop: Loop) -> None:
        super().__init__(dialect, connection)
        self._loop = loop

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        def closed(*_: object) -> None:
            self.close()
            ended()

        if hasattr(self.driver, "add_listener"):  # asyncpg
            self.driver.add_termination_listener(closed)
            await_(self.driver.add_listener(channel, lambda *told: heard(told[-1])))
        else:
            self.execute(f"LISTEN {channel}")
            self._loop.read(self._socket, partial(notifications, self.driver), heard, closed)

    def close(self) -> None:
        self._socket = -1  # from now on the number may belong to another socket
        with suppress(Exception):
            _close_soon(self._loop, self._dialect, self._connection)

    def abort(self) -> None:
        """Abort the connection: only psycopg exposes its socket, and only psycopg cannot be terminated."""
        shut_socket(self._socket)
        _terminate(self._loop, self._connection)


def _close_soon(loop: Loop, dialect: Dialect, connection: Any) -> None:
    """Close a connection in the background: asyncpg waits for its server to close it, too, which may never happen."""

    def close() -> None:
        try:
            loop.within(CLOSE_LIMIT_S, partial(dialect.do_close, connection))
        except Exception:  # noqa: BLE001 - there is no answer, or the connection was broken
            _terminate(loop, connection)

    loop.spawn(close)


def _terminate(loop: Loop, connection: Any) -> None:
    if hasattr(connection, "terminate"):
        loop.call_soon(connection.terminate)


def as_driver_takes(sql: str, params: Mapping[str, Any], dialect: Dialect) -> tuple[str, Any]:
    """Convert a statement with `:name` parameters to the driver's style."""
    statement, order = _compiled(sql, dialect)
    return statement, params if order is None else tuple([params[name] for name in order])


@lru_cache(maxsize=256)
def _compiled(sql: str, dialect: Dialect) -> tuple[str, Sequence[str] | None]:
    compiled: Any = text(sql).compile(dialect=dialect)
    return compiled.string, compiled.positiontup if compiled.positional else None


def _own_errors(dialect: Dialect) -> tuple[type[Exception], ...]:
    """Return asyncpg's own errors: SQLAlchemy does not translate those that occur while it connects or listens."""
    asyncpg = getattr(dialect.loaded_dbapi, "asyncpg", None)
    return () if asyncpg is None else (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
