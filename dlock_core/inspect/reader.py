"""Reads a database for the inspector: on a dedicated connection, read-only, within a time limit."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dlock_core.backends.sql.handover import Handover
from dlock_core.errors import BackendUnavailable
from dlock_core.owner import printable
from dlock_core.runtime import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CONNECT_TIMEOUT_S", "DatabaseReader", "ReaderConnection"]

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 4
"""Whole seconds, as the drivers' `connect_timeout` takes them; shorter than QUERY_TIMEOUT_S, which bounds both."""
QUERY_TIMEOUT_S: Final = 5.0
"""Seconds after which a read is given up, even if the driver never returns."""

_BEGIN_READING: Final = {
    "postgresql": (
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY",
        "SET LOCAL statement_timeout = 4000",
        "SET LOCAL lock_timeout = 500",
    ),
    "mysql": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),  # InnoDB reports times in that zone.
    "mariadb": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),
}


class ReaderConnection(Protocol):
    """A connection in autocommit, of any driver; its methods are called from several threads, one at a time."""

    def execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Send one statement, with `%s` for each parameter, and return its rows."""

    def close(self) -> None:
        """Close the connection, and anything open on it."""


class DatabaseReader:
    """A `Database` for the inspector: it connects at the first query, and again after `close()` or an error.

    Each query runs in its own daemon thread, because no driver can promise to return: a server that stops answering
    must not hang a listing. A query that was given up closes its own connection if it ever returns.
    """

    def __init__(
        self, alias: str, vendor: str, connect: Callable[[], ReaderConnection], *, fence_remedy: str = ""
    ) -> None:
        self.alias, self._vendor, self._connect, self.fence_remedy = alias, vendor, connect, fence_remedy
        self._is_sure = vendor != "mysql"
        self._connection: ReaderConnection | None = None
        self._current_query: object = None

    @property
    def vendor(self) -> str:
        """The name of the database system; MariaDB and MySQL are told apart by a query."""
        if not self._is_sure:
            ((version,),) = self.query("SELECT VERSION()")
            self._vendor, self._is_sure = "mariadb" if "mariadb" in str(version).lower() else "mysql", True
        return self._vendor

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return rows; raises BackendUnavailable after an error, or without an answer within QUERY_TIMEOUT_S."""
        self._current_query = query = object()
        try:
            return _run_within(QUERY_TIMEOUT_S, partial(self._query, query, sql, tuple(params)))
        except TimeoutError as error:
            self._current_query = self._connection = None
            raise BackendUnavailable("", reason=str(error)) from error
        except Exception as error:
            self.close()
            raise BackendUnavailable("", reason=_reason(error)) from error

    def session(self) -> ReaderConnection:
        """Return a new connection for another purpose, which the caller closes; raises what the driver raises."""
        return self._connect()

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                _run_within(QUERY_TIMEOUT_S, connection.close)

    def _query(self, query: object, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        connection = self._connection or self._opened()
        if query is self._current_query:
            self._connection = connection
        try:
            return connection.execute(sql, params)
        finally:
            if query is not self._current_query:  # The caller gave up on this query, and forgot its connection.
                connection.close()

    def _opened(self) -> ReaderConnection:
        connection = self._connect()
        try:
            for statement in _BEGIN_READING.get(self._vendor, ()):
                connection.execute(statement, ())
        except BaseException:
            connection.close()
            raise
        return connection


def _run_within(seconds: float, function: Callable[[], T]) -> T:
    call = Handover(function)
    start_thread(threading.Thread(target=call.perform, name="dlock-inspector", daemon=True))
    if not call.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return call.outcome()


def _reason(error: BaseException) -> str:
    # The driver's own words, without our statement.
    original = getattr(error, "orig", None) or error.__cause__ or error
    words = " ".join(str(original).split()) or type(original).__name__
    return printable(words)
