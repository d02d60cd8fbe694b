"""The sessions of a database and the locks that they hold or wait for: read within a time limit, made into entries."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

from dlock_core.errors import BackendUnavailable
from dlock_core.inspect.entries import Entry
from dlock_core.owner import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["AwaitedLock", "DatabaseLocks", "DatabaseReader", "DatabaseSession", "HeldLock", "Kind", "make_entries"]

Kind: TypeAlias = Literal["row", "advisory"]
_Lock: TypeAlias = tuple[Kind, str]

MAX_UNCONTENDED_LOCKS: Final = 500
"""Locks without waiters that are listed per database; the rest is only counted."""

_MARK: Final = re.compile(r"\bdlock:([0-9a-f]{8}|[0-9]{15,}(?=#))(?!\w)|/\* dlock \S+ ([0-9a-f]{8})")
"""A session's mark of its lease: the beginning of the holder, which the fence and an advisory lock's comment write, or
the token in an advisory lock's label."""


@dataclass(frozen=True, slots=True)
class DatabaseSession:
    """A database session, or a prepared transaction; ages in seconds."""

    actor: str
    """Such as "pg:4711/shop", the form in which the owner of a lease names its sessions."""
    title: str
    owner: dict[str, Any]
    transaction_age: float | None = None

    @property
    def lease_marks(self) -> set[str]:
        """The leases under which the session works, as its label and query show them: beginnings of holders, tokens."""
        texts = (str(self.owner.get(key) or "") for key in ("application_name", "query"))
        return {first or second for text in texts for first, second in _MARK.findall(text)}

    def described(self) -> str:
        """Return the session in words, as one printable line."""
        state = self.owner.get("state")
        return printable(f"{self.title}, {state}" if state else self.title)


@dataclass(frozen=True, slots=True)
class AwaitedLock:
    """A lock that a session waits for, and the actors that block it."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None
    blocked_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a session holds, with or without waiters."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DatabaseLocks:
    """What was found in one database; `left_out` counts the locks without waiters that are not listed."""

    sessions: Mapping[str, DatabaseSession] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    left_out: int = 0


def make_entries(
    source: str, sessions: Mapping[str, DatabaseSession], wanted: Iterable[AwaitedLock], held: Iterable[HeldLock]
) -> DatabaseLocks:
    """Return the entries: each lock with waiters, its holders before its queue, and then the locks without waiters."""
    queues: dict[_Lock, list[AwaitedLock]] = defaultdict(list)
    for one in wanted:
        queues[one.kind, one.name].append(one)
    known = {(one.kind, one.name, one.actor): one for one in held}
    contended = [entry for lock, queue in queues.items() for entry in _contended(source, sessions, known, lock, queue)]
    uncontended = [one for one in known.values() if (one.kind, one.name) not in queues]
    listed = [_holder(source, sessions, one) for one in uncontended[:MAX_UNCONTENDED_LOCKS]]
    return DatabaseLocks(sessions, contended + listed, len(uncontended) - len(listed))


def _contended(
    source: str,
    sessions: Mapping[str, DatabaseSession],
    known: Mapping[tuple[Kind, str, str], HeldLock],
    lock: _Lock,
    queue: list[AwaitedLock],
) -> Iterator[Entry]:
    waiting = {one.actor for one in queue}
    # A database may name a blocker whose own lock it does not list, as PostgreSQL does for row locks. Whatever blocks
    # and does not wait itself is taken for a holder. A dict keeps the order that the database reported.
    holders = {actor: None for one in queue for actor in one.blocked_by if actor not in waiting}
    holders |= {actor: None for kind, name, actor in known if (kind, name) == lock}
    for actor in holders:
        age = sessions[actor].transaction_age if actor in sessions else None
        yield _holder(source, sessions, known.get((*lock, actor)) or HeldLock(actor, *lock, "exclusive", age))
    for position, one in enumerate(sorted(queue, key=lambda one: _queue_order(one, waiting)), 1):
        yield _entry(source, sessions, one, "waiter", position)


def _queue_order(one: AwaitedLock, waiting: set[str]) -> tuple[int, float]:
    """Return the sort key of a waiter: those blocked by fewer other waiters first, then those that waited longer."""
    return len(waiting.intersection(one.blocked_by)), -(one.seconds or 0.0)


def _holder(source: str, sessions: Mapping[str, DatabaseSession], held: HeldLock) -> Entry:
    return _entry(source, sessions, held, "holder", None)


def _entry(
    source: str,
    sessions: Mapping[str, DatabaseSession],
    one: HeldLock | AwaitedLock,
    role: Literal["holder", "waiter"],
    position: int | None,
) -> Entry:
    session = sessions.get(one.actor) or DatabaseSession(
        one.actor, f"session {one.actor}", {}
    )  # It ended between two queries.
    seconds = None if one.seconds is None else max(0.0, one.seconds)
    return Entry(
        one.kind, source, one.name, role, one.mode, session.owner, session.described(), None, seconds, None, position,
        one.actor, one.blocked_by if isinstance(one, AwaitedLock) else None,
    )  # fmt: skip


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
        for statement in _BEGIN_READING.get(self._vendor, ()):
            connection.execute(statement, ())
        return connection


def _run_within(seconds: float, function: Callable[[], T]) -> T:
    done: list[T | BaseException] = []

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
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
    original = (
        getattr(error, "orig", None) or error.__cause__ or error
    )  # The driver's own words, without our statement.
    words = " ".join(str(original).split()) or type(original).__name__
    return printable(words)
