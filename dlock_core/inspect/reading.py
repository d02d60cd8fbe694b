"""Reads from a database for the inspector: on a connection of its own, in a read-only transaction, within a time limit.

The limit is kept by leaving the thread that reads: no driver has one for every way in which a server can be silent.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dlock_core.errors import BackendUnavailable
from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CONNECT_WITHIN", "Reader", "Session"]

T = TypeVar("T")

CONNECT_WITHIN: Final = 4
LIMIT: Final = 5.0

_BEGIN: Final = {
    "postgresql": (
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY",
        "SET LOCAL statement_timeout = 4000",
        "SET LOCAL lock_timeout = 500",
    ),
    "mysql": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),  # InnoDB tells times in that zone
    "mariadb": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),
}


class Session(Protocol):
    """A connection in autocommit, of any driver; methods are called from one thread after the other."""

    def execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Send one statement, `%s` standing for each parameter, and give its rows."""

    def close(self) -> None:
        """Close it, with what it has open."""


class Reader:
    """A `Database` that connects when it is first asked; after `close()`, or an error, it connects anew."""

    def __init__(self, alias: str, vendor: str, connect: Callable[[], Session]) -> None:
        self.alias, self._vendor, self._connect = alias, vendor, connect
        self._is_sure = vendor != "mysql"
        self._session: Session | None = None
        self._turn: object = None

    @property
    def vendor(self) -> str:
        """The database's name; MariaDB and MySQL are told apart by asking."""
        if not self._is_sure:
            ((version,),) = self.query("SELECT VERSION()")
            self._vendor, self._is_sure = "mariadb" if "mariadb" in str(version).lower() else "mysql", True
        return self._vendor

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read rows; raises BackendUnavailable after an error, and when there is no answer within some seconds."""
        self._turn = turn = object()
        try:
            return _within(LIMIT, partial(self._query, turn, sql, tuple(params)))
        except TimeoutError as error:
            self._turn = self._session = None
            raise BackendUnavailable("", reason=str(error)) from error
        except Exception as error:
            self.close()
            raise BackendUnavailable("", reason=_reason(error)) from error

    def session(self) -> Session:
        """Connect for another purpose than reading; the caller closes it. Raises what the driver raises."""
        return self._connect()

    def close(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                _within(LIMIT, session.close)

    def _query(self, turn: object, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        session = self._session or self._opened()
        if turn is self._turn:
            self._session = session
        try:
            return session.execute(sql, params)
        finally:
            if turn is not self._turn:  # nobody waits for us any more
                session.close()

    def _opened(self) -> Session:
        session = self._connect()
        for statement in _BEGIN.get(self._vendor, ()):
            session.execute(statement, ())
        return session


def _within(seconds: float, function: Callable[[], T]) -> T:
    done: list[T | BaseException] = []

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            done.append(error)

    thread = threading.Thread(target=call, name="dlock-inspector", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def _reason(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error.__cause__ or error  # the driver's own words, without our statement
    words = " ".join(str(original).split()) or type(original).__name__
    return printable(words)
