"""SQLite: dlock's tables are in a separate file next to the database's, called its sibling in this module.

A SQLite file has one writer at a time. In the database's own file a lease could be neither taken nor renewed while the
caller's transaction writes: a second connection waits for it, and so the caller waits for itself.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from dlock_core.backends.sql.threads import in_threads
from dlock_core.runtime import clock
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SQLiteConnector", "file_of"]

SUFFIX: Final = "-dlock"
_CREATE: Final = (
    """CREATE TABLE IF NOT EXISTS dlock_lease (name TEXT PRIMARY KEY, token INTEGER NOT NULL, holder TEXT NOT NULL,
owner TEXT NOT NULL, since INTEGER NOT NULL, expires_at INTEGER NOT NULL,
wanted_until INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS dlock_lease_expires_at ON dlock_lease (expires_at)",
    "CREATE INDEX IF NOT EXISTS dlock_lease_token ON dlock_lease (token)",
)


class SQLiteConnector:
    """The sibling of a database; `database` returns its name as SQLite uses it, at every new connection.

    A database in memory is visible to this process only, and so is its sibling.
    """

    vendor = "sqlite"
    remedy = "nothing, it is made by itself"
    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    call = staticmethod(in_threads)

    def __init__(self, title: str, database: Callable[[], str]) -> None:
        self.title, self._database = title, database
        self._memories: dict[int, _Memory] = {}

    def connect(self, limit: float) -> SQLiteConnection:
        file = file_of(self._database())
        if file is not None:
            return SQLiteConnection(_opened(f"{file}{SUFFIX}", limit))
        pid = os.getpid()
        memory = self._memories.get(pid) or self._memories.setdefault(pid, _Memory(_opened(":memory:", limit)))
        return _Guest(memory)


class SQLiteConnection:
    """One connection to a sibling."""

    vendor = "sqlite"

    def __init__(self, driver: sqlite3.Connection) -> None:
        self.driver, self._changed = driver, 0

    def execute(self, sql: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        with closing(self.driver.cursor()) as cursor:
            rows = cursor.execute(sql, params).fetchall()
            self._changed = cursor.rowcount
        return rows

    def changed(self) -> int:
        return self._changed

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.driver.close()

    def abort(self) -> None:
        self.driver.interrupt()


class _Memory:
    """The only connection to a sibling in memory: without it, its leases would be gone."""

    def __init__(self, driver: sqlite3.Connection) -> None:
        self.driver = driver
        self.guard = threading.RLock()  # A signal handler may also request a lock, in the middle of a statement.

    def __del__(self) -> None:
        self.driver.close()


class _Guest(SQLiteConnection):
    """A user of that shared connection; a statement on it never blocks the others for long."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__(memory.driver)
        self._memory = memory

    def execute(self, sql: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        with self._memory.guard:
            return super().execute(sql, params)

    def close(self) -> None:
        """Others go on."""

    abort = close


def file_of(database: str) -> Path | None:
    """Return the file of SQLite's name for a database, a path or a URI; None if it is in memory."""
    if database.startswith("file:"):
        uri = urlsplit(database)
        database = "" if "memory" in parse_qs(uri.query).get("mode", ()) else unquote(uri.path)
    return None if database in {"", ":memory:"} else Path(database).resolve()


def _opened(path: str, limit: float) -> sqlite3.Connection:
    driver = sqlite3.connect(path, timeout=limit, isolation_level=None, check_same_thread=False)
    try:
        _set_up(driver, clock() + limit)
    except BaseException:
        driver.close()
        raise
    return driver


def _set_up(driver: sqlite3.Connection, until: float) -> None:
    """Turn on the write-ahead log, whose readers never wait; while it starts, SQLite refuses other connections."""
    while True:
        try:
            for sql in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", *_CREATE):
                driver.execute(sql)
        except sqlite3.OperationalError as error:
            if failure_of_statement(error) is not DatabaseFailure.LOCK_TIMEOUT or clock() > until:
                raise
            time.sleep(0.01)
        else:
            return
