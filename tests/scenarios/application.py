"""The vocabulary of the scenarios: an application, its sessions, and the holders that compete for a lock.

A scenario states a promise of the tie or of the fence once. It runs over every `Application`: Django, SQLAlchemy with
threads and SQLAlchemy with asyncio, on each database, driver and isolation level that the promise names (`where`).

    def test_older_holder_is_refused_after_a_newer_one(application, broken, holder):
        broken.tokens = iter([10, 11])               # what a broken lock service grants
        older, newer = holder(), holder()            # two threads, each with a session and a lock
        older.acquire(), newer.acquire()
        assert newer.begin_and_read() == 0           # a step that is taken to its end
        reading = older.start(older.begin_and_read)  # a step that may have to wait: a Future
        application.until_blocked()                  # ... until the server says that it waits
        newer.write_and_commit()
        assert application.value() == 1              # what has been committed

- An *application* is one ORM with one driver on one database at one isolation level. It makes sessions and shows what
  has been committed.
- A *session* is what one user works with: in Django the connection of the calling thread, in SQLAlchemy a Session. All
  are used with plain calls; an AsyncSession does its work in an event loop of another thread.
- A *holder* is an actor with a session and a lock, who adds one to the counter "a" by reading it and writing it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlock_core.errors import LeaseLost, RowLocked, SnapshotTooOld, StaleToken
from dlock_core.transactions.retry import DatabaseFailure, classify, is_conflict
from tests import databases, settings
from tests.actors import Actor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlock_core.transactions.tie import Outcome


PORTS = {"postgresql": settings.POSTGRESQL_PORT, "mariadb": settings.MARIADB_PORT}


@dataclass(frozen=True)
class Place:
    """Where a scenario runs."""

    orm: str
    driver: str
    level: str

    def __str__(self) -> str:
        return f"{self.orm}-{self.driver}-{self.level}".replace(" ", "_")


class Session(ABC):
    """What one user of the application works with."""

    @abstractmethod
    def lock(self, *parts: Any, **options: Any) -> AbstractContextManager[Any]:
        """Return a lock of the session; it is a context manager, and has `acquire()`."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a transaction on the database."""

    @abstractmethod
    def commit(self) -> None:
        """Commit; if that fails, the transaction is rolled back."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll back, if there is a transaction."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[Any]:
        """Return a block in a savepoint; an exception rolls it back."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""

    @abstractmethod
    def read(self) -> int:
        """Read the counter."""

    @abstractmethod
    def write(self, value: int) -> None:
        """Write the counter."""

    @abstractmethod
    def add_one(self) -> None:
        """Add one to the counter without reading it."""

    @abstractmethod
    def add(self, name: str) -> None:
        """Insert another counter."""

    @abstractmethod
    def add_parcel(self, key: int) -> None:
        """Insert a parcel, whose row carries its fence."""

    @abstractmethod
    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Send a statement by hand, and return its rows."""

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a lease, which is a coroutine function with asyncio."""

    @abstractmethod
    def note_ends(self, journal: list[str]) -> None:
        """Write COMMIT and ROLLBACK into a journal when the driver has carried them out; has to be called first."""

    @abstractmethod
    def ties(self) -> list[Any]:
        """Return the ties of the leases that the session holds."""

    @abstractmethod
    def on_end(self, settle: Callable[[Outcome], object], *, before_commit: Callable[[], object] | None = None) -> None:
        """Call back before the COMMIT of the open transaction, and after its end."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block in a transaction; an exception rolls it back."""
        try:
            self.begin()
            yield
        except BaseException:
            self.rollback()
            raise
        self.commit()


class Application(ABC):
    """One ORM with one driver on one database at one isolation level."""

    parcel: type
    """The class of the parcels, whose rows carry their fence."""
    parcels: str
    """The table of the parcels."""

    def __init__(self, place: Place, server: str) -> None:
        self.place, self.server = place, server

    @property
    def is_sqlite(self) -> bool:
        return self.server == "sqlite"

    @property
    def is_postgresql_snapshot(self) -> bool:
        """Whether PostgreSQL refuses what its snapshot has not seen, before the fence can."""
        return self.server == "postgresql" and self.place.level != "read committed"

    @abstractmethod
    def session(self, *, lock_timeout: bool = False) -> Session:
        """Return a session for the calling thread; if asked for, its connection has a lock timeout of 77 s."""

    @abstractmethod
    def session_behind(self, port: int) -> Session:
        """Return a session for the calling thread that connects to another port."""

    @property
    def port(self) -> int:
        """The port of the server."""
        return PORTS[self.server]

    def kill(self, session: Session) -> None:
        """Have the server end a session's connection, and wait until it has."""
        ((number,),) = session.ask(databases.SESSION_ID[self.server])
        databases.kill_session(self.server, int(number), self.ask)

    @abstractmethod
    def use_store(self, backend: Any, *, ttl: float = 60.0) -> None:
        """Make a backend the store "default"."""

    @abstractmethod
    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Send a statement in a separate session, outside of any transaction, and return its rows."""

    @property
    @abstractmethod
    def counters(self) -> str:
        """Name the table of the counters."""

    def add_counter(self) -> None:
        """Insert the counter "a"."""
        self.ask(f"INSERT INTO {self.counters} (name, value) VALUES ('a', 0)")

    def value(self) -> int:
        """Return the counter as other sessions see it."""
        ((found,),) = self.ask(f"SELECT value FROM {self.counters} WHERE name = 'a'")
        return int(found)

    def names(self) -> set[str]:
        """Return the names of all counters, as other sessions see them."""
        return {str(name) for (name,) in self.ask(f"SELECT name FROM {self.counters}")}

    def add_fence(self, *, name: str = "order:42", token: int = 1, s_token: int = 0) -> None:
        """Insert a row, as if the fence had seen a token before the test."""
        self.ask(
            "INSERT INTO dlock_fence (name, token, holder, s_token) "
            f"VALUES ('{name}', {token}, '{'x' * bool(name)}', {s_token})"
        )

    def fences(self) -> list[tuple[str, int]]:
        """Return the rows of dlock_fence: names and tokens."""
        return [
            (str(name), int(token)) for name, token in self.ask("SELECT name, token FROM dlock_fence ORDER BY name")
        ]

    def fence_token(self) -> int | None:
        """Return the token in the fence of order:42."""
        return dict(self.fences()).get("order:42")

    def shared_mark(self) -> int:
        """Return the highest shared token in the fence of order:42."""
        ((found,),) = self.ask("SELECT s_token FROM dlock_fence WHERE name = 'order:42'")
        return int(found)

    def until_blocked(self) -> None:
        """Wait until some session waits for a lock of another, as the server sees it."""
        databases.until_blocked(self.server, self.ask)

    def is_refusal(self, error: BaseException) -> bool:
        """Whether an older holder was refused; with snapshots, PostgreSQL refuses it before the fence can."""
        return isinstance(error, StaleToken) or (self.is_postgresql_snapshot and is_serialization_failure(error))

    @abstractmethod
    def close(self) -> None:
        """Close what the application has opened."""


class Holder(Actor):
    """Adds one to the counter by reading and writing it, under a lock, step by step in its own thread."""

    def __init__(self, application: Application, *parts: Any, lock_timeout: bool = False, **options: Any) -> None:
        super().__init__()
        self.session: Session = self.do(application.session, lock_timeout=lock_timeout)
        self.lock = self.session.lock(*(parts or ("order", 42)), **{"wait": 20, **options})
        self.server = application.server
        self.seen = 0
        self.lease: Any = None

    def close(self) -> None:
        self.do(self._close)
        super().close()

    def _close(self) -> None:
        self.session.rollback()
        if self.lease is not None:
            with suppress(LeaseLost):
                self.lock.__exit__(None, None, None)
        self.session.close()

    def acquire(self) -> int:
        """Acquire the lock, and return its token."""
        self.do(self._acquire)
        token: int = self.lease.token
        return token

    def start_acquiring(self) -> Any:
        """Acquire in a step that has to wait."""
        return self.start(self._acquire)

    def _acquire(self) -> None:
        self.lease = self.lock.__enter__()

    def release(self) -> None:
        self.lease = None
        self.do(self.lock.__exit__, None, None, None)

    def begin(self) -> None:
        self.do(self.session.begin)

    def begin_and_read(self) -> int:
        """Begin a transaction and read the counter."""
        seen: int = self.do(self._begin_and_read)
        return seen

    def start_reading(self) -> Any:
        """Begin and read in a step that may have to wait, or may fail."""
        return self.start(self._begin_and_read)

    def start_acquiring_and_reading(self) -> Any:
        """Acquire, begin and read in one step, whichever of them has to wait."""
        return self.start(lambda: (self._acquire(), self._begin_and_read())[1])

    def _begin_and_read(self) -> int:
        self.session.begin()
        return self._read()

    def read(self) -> int:
        seen: int = self.do(self._read)
        return seen

    def _read(self) -> int:
        self.seen = self.session.read()
        return self.seen

    def write(self) -> None:
        """Write one more than was read."""
        self.do(self.session.write, self.seen + 1)

    def add_one(self) -> None:
        self.do(self.session.add_one)

    def commit(self) -> None:
        self.do(self.session.commit)

    def rollback(self) -> None:
        self.do(self.session.rollback)

    def write_and_commit(self) -> None:
        self.write()
        self.commit()

    def lock_timeout(self) -> int:
        """Return the lock timeout of its connection, in seconds."""
        ((answer,),) = self.do(self.session.ask, databases.LOCK_TIMEOUT[self.server])
        return databases.seconds(answer)


def is_serialization_failure(error: BaseException) -> bool:
    return classify(error) is DatabaseFailure.SERIALIZATION


def succeeds(work: Callable[[], object]) -> bool:
    """Whether a holder's work was committed; it may only fail in a conflict, or because its lock was refused."""
    try:
        work()
    except Exception as error:
        if isinstance(error, LeaseLost | StaleToken | RowLocked | SnapshotTooOld) or is_conflict(error):
            return False
        raise
    return True


def noting(work: Callable[..., None], journal: list[str], word: str) -> Callable[..., None]:
    """Return a function that does some work, and then writes a word into a journal."""

    def noted(*args: Any) -> None:
        work(*args)
        journal.append(word)

    return noted


def in_order(journal: list[str], *entries: str) -> bool:
    """Whether the first of each of these entries are in this order; a pool adds its own ROLLBACK to every COMMIT."""
    places = [journal.index(entry) for entry in entries]
    return places == sorted(places)
