"""The sessions of a database and their locks: read within a time limit, and turned into entries."""

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

__all__ = ["AwaitedLock", "DatabaseLocks", "DatabaseSession", "HeldLock", "Kind", "read"]

Kind: TypeAlias = Literal["row", "advisory"]
_Lock: TypeAlias = tuple[Kind, str]

MAX_UNCONTENDED_LOCKS: Final = 500
"""Of the locks that nobody waits for, so many are told."""

_MARK: Final = re.compile(r"\bdlock:([0-9a-f]{8}|[0-9]{15,}(?=#))(?!\w)|/\* dlock \S+ ([0-9a-f]{8})")
"""The beginning of a holder's id, written by the fence or an advisory lock's comment; or the token in its label."""


@dataclass(frozen=True, slots=True)
class DatabaseSession:
    """A database session, or a prepared transaction; ages in seconds."""

    actor: str
    """Such as "pg:4711/shop", as it stands in the metadata of a lease, too."""
    title: str
    owner: dict[str, Any]
    transaction_age: float | None = None

    @property
    def marks(self) -> set[str]:
        """What the session tells of the leases under which it works: holders' beginnings, and tokens."""
        texts = (str(self.owner.get(key) or "") for key in ("application_name", "query"))
        return {first or second for text in texts for first, second in _MARK.findall(text)}

    def described(self) -> str:
        state = self.owner.get("state")
        return printable(f"{self.title}, {state}" if state else self.title)


@dataclass(frozen=True, slots=True)
class AwaitedLock:
    """A lock that a session waits for, and the actors that stand in its way."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None
    blocked_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a session holds, whether or not anybody waits for it."""

    actor: str
    kind: Kind
    name: str
    mode: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DatabaseLocks:
    """What was found in one database; `left_out` counts the locks that nobody waits for and that are not told."""

    sessions: Mapping[str, DatabaseSession] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    left_out: int = 0


def read(
    source: str, sessions: Mapping[str, DatabaseSession], wanted: Iterable[AwaitedLock], held: Iterable[HeldLock]
) -> DatabaseLocks:
    """Make entries: each lock that is waited for with its holders and its queue, then what else is held."""
    queues: dict[_Lock, list[AwaitedLock]] = defaultdict(list)
    for one in wanted:
        queues[one.kind, one.name].append(one)
    known = {(one.kind, one.name, one.actor): one for one in held}
    contended = [entry for lock, queue in queues.items() for entry in _contended(source, sessions, known, lock, queue)]
    rest = [one for one in known.values() if (one.kind, one.name) not in queues]
    free = [_holder(source, sessions, one) for one in rest[:MAX_UNCONTENDED_LOCKS]]
    return DatabaseLocks(sessions, contended + free, len(rest) - len(free))


def _contended(
    source: str,
    sessions: Mapping[str, DatabaseSession],
    known: Mapping[tuple[Kind, str, str], HeldLock],
    lock: _Lock,
    queue: list[AwaitedLock],
) -> Iterator[Entry]:
    waiting = {one.actor for one in queue}
    holders = {actor: None for one in queue for actor in one.blocked_by if actor not in waiting}
    holders |= {actor: None for kind, name, actor in known if (kind, name) == lock}
    for actor in holders:
        age = sessions[actor].transaction_age if actor in sessions else None
        yield _holder(source, sessions, known.get((*lock, actor)) or HeldLock(actor, *lock, "exclusive", age))
    for position, one in enumerate(sorted(queue, key=lambda one: _turn(one, waiting)), 1):
        yield _entry(source, sessions, one, "waiter", position)


def _turn(one: AwaitedLock, waiting: set[str]) -> tuple[int, float]:
    """Order a queue: who is behind more of the others comes later; then who has waited longer comes first."""
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
    )  # it has ended meanwhile
    seconds = None if one.seconds is None else max(0.0, one.seconds)
    return Entry(
        one.kind, source, one.name, role, one.mode, session.owner, session.described(), None, seconds, None, position,
        one.actor, one.blocked_by if isinstance(one, AwaitedLock) else None,
    )  # fmt: skip


T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 4
QUERY_TIMEOUT_S: Final = 5.0

_BEGIN: Final = {
    "postgresql": (
        "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY",
        "SET LOCAL statement_timeout = 4000",
        "SET LOCAL lock_timeout = 500",
    ),
    "mysql": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),  # InnoDB tells times in that zone
    "mariadb": ("SET time_zone = 'SYSTEM'", "START TRANSACTION READ ONLY"),
}


class ReaderConnection(Protocol):
    """A connection in autocommit, of any driver; methods are called from one thread after the other."""

    def execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Send one statement, `%s` standing for each parameter, and give its rows."""

    def close(self) -> None:
        """Close it, with what it has open."""


class DatabaseReader:
    """A `Database` that connects when it is first asked; after `close()`, or an error, it connects anew."""

    def __init__(
        self, alias: str, vendor: str, connect: Callable[[], ReaderConnection], *, fence_remedy: str = ""
    ) -> None:
        self.alias, self._vendor, self._connect, self.fence_remedy = alias, vendor, connect, fence_remedy
        self._is_sure = vendor != "mysql"
        self._session: ReaderConnection | None = None
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
            return _within(QUERY_TIMEOUT_S, partial(self._query, turn, sql, tuple(params)))
        except TimeoutError as error:
            self._turn = self._session = None
            raise BackendUnavailable("", reason=str(error)) from error
        except Exception as error:
            self.close()
            raise BackendUnavailable("", reason=_reason(error)) from error

    def session(self) -> ReaderConnection:
        """Connect for another purpose than reading; the caller closes it. Raises what the driver raises."""
        return self._connect()

    def close(self) -> None:
        """Close the connection."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                _within(QUERY_TIMEOUT_S, session.close)

    def _query(self, turn: object, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        session = self._session or self._opened()
        if turn is self._turn:
            self._session = session
        try:
            return session.execute(sql, params)
        finally:
            if turn is not self._turn:  # nobody waits for us any more
                session.close()

    def _opened(self) -> ReaderConnection:
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
