"""SQLAlchemy, as the scenarios use it: a session is a Session, or an AsyncSession that works in an event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Engine, NullPool, create_engine, event, make_url, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session as OrmSession

from dlock_core.stores import Store
from sqla_dlock import alock, lock, stores
from sqla_dlock.tie import current
from sqla_dlock.transactions import on_end
from tests import databases
from tests.actors import WITHIN
from tests.scenarios.application import Application, Place, Session, noting
from tests.sqla_dlock.engines import URLS, new_async_engine, new_isolated_engine, server_of
from tests.sqla_dlock.models import Base, Counter, Parcel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from sqlalchemy.orm import SessionTransaction

    from dlock_core.transactions.tie import Outcome

BESIDE: Final = {"sqlite": "sqlite", "postgresql": "postgresql", "mariadb": "pymysql"}
"""The driver that observes each database from outside."""
S = TypeVar("S", bound="SqlalchemySession")
COUNTER = Counter.name == "a"


class SqlalchemySession(Session):
    def __init__(self, session: OrmSession) -> None:
        self.orm = session

    def lock(self, *parts: Any, **options: Any) -> AbstractContextManager[Any]:
        return lock(self.orm, *parts, **options)

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do work with the ORM's session."""
        return work(self.orm, *args)

    def begin(self) -> None:
        self.do(_begin)

    def commit(self) -> None:
        self.do(_commit)

    def rollback(self) -> None:
        self.do(OrmSession.rollback)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        nested = self.do(_begin_nested)
        try:
            yield
        except BaseException:
            self.do(lambda _: nested.rollback())
            raise
        self.do(lambda _: nested.commit())

    def close(self) -> None:
        self.do(OrmSession.close)

    def read(self) -> int:
        return self.do(_read)

    def write(self, value: int) -> None:
        self.do(OrmSession.execute, update(Counter).where(COUNTER).values(value=value))

    def add_one(self) -> None:
        self.do(OrmSession.execute, update(Counter).where(COUNTER).values(value=Counter.value + 1))

    def add(self, name: str) -> None:
        self.do(_add, Counter(name=name))

    def add_parcel(self, key: int) -> None:
        self.do(_add, Parcel(id=key))

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self.do(_ask, sql)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def note_ends(self, journal: list[str]) -> None:
        self.do(_connect)  # the first connection of an engine is rolled back once more than others
        dialect: Any = self.sync.get_bind().engine.dialect
        for method, word in (("do_commit", "COMMIT"), ("do_rollback", "ROLLBACK")):
            setattr(dialect, method, noting(getattr(dialect, method), journal, word))

    def ties(self) -> list[Any]:
        return list(current(self.sync))

    def on_end(self, settle: Callable[[Outcome], object], *, before_commit: Callable[[], object] | None = None) -> None:
        on_end(self.sync, settle, before_commit=before_commit)

    @property
    def sync(self) -> OrmSession:
        """The sync Session, to which callbacks refer."""
        return self.orm


def _connect(session: OrmSession) -> None:
    session.connection()
    session.rollback()


def _begin(session: OrmSession) -> None:
    """Begin on the database, too: a Session begins there with its first statement."""
    if not session.in_transaction():
        session.begin()
    session.connection()


def _begin_nested(session: OrmSession) -> SessionTransaction:
    """Make the savepoint on the database, too: a Session makes it with the next statement."""
    nested = session.begin_nested()
    session.connection()
    return nested


def _commit(session: OrmSession) -> None:
    try:
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _read(session: OrmSession) -> int:
    return session.scalars(select(Counter.value).where(COUNTER)).one()


def _add(session: OrmSession, instance: Base) -> None:
    session.add(instance)
    session.flush()


def _ask(session: OrmSession, sql: str) -> list[tuple[Any, ...]]:
    """Ask in the open transaction, or without one on a connection from the engine's pool."""
    if session.in_transaction():
        return _rows(session.execute(text(sql)))
    engine = session.get_bind().engine
    with engine.connect() as connection:
        return _rows(connection.execute(text(sql)))


def _rows(result: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in result] if result.returns_rows else []


class SqlalchemyApplication(Application):
    counters = "counter"
    parcel, parcels = Parcel, "parcel"

    def __init__(self, place: Place) -> None:
        super().__init__(place, server_of(place.driver) or "sqlite")
        engine = create_engine(URLS[BESIDE[self.server]], poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._beside = engine.connect()
        self._store: Store | None = None
        self._engines: list[Engine] = []
        self._sessions: list[SqlalchemySession] = []

    @property
    def engine(self) -> Engine:
        if not self._engines:
            self._new_engine()
        return self._engines[0]

    def _new_engine(self, **options: Any) -> Engine:
        engine = new_isolated_engine(self.place.driver, self.place.level, **options)
        self._engines.append(engine)
        return engine

    def session(self, *, lock_timeout: bool = False) -> SqlalchemySession:
        engine = self.engine
        if lock_timeout:
            engine = self._new_engine(pool_size=1, max_overflow=0)
            event.listen(engine, "connect", partial(_set_lock_timeout, databases.SET_LOCK_TIMEOUT[self.server]))
        return self._keep(SqlalchemySession(OrmSession(engine)))

    def session_behind(self, port: int) -> SqlalchemySession:
        url, level = make_url(URLS[self.place.driver]).set(port=port), self.place.level.upper()
        engine = create_engine(url, poolclass=NullPool, isolation_level=level)
        self._engines.append(engine)
        return self._keep(SqlalchemySession(OrmSession(engine)))

    def use_store(self, backend: Any, *, ttl: float = 60.0) -> None:
        stores._stores["default"] = Store("default", backend, ttl=ttl, wait=20.0)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return _rows(self._beside.exec_driver_sql(sql))

    def _keep(self, session: S) -> S:
        self._sessions.append(session)
        return session

    def _close_sessions(self) -> None:
        """Close what a failed test has left open: its locks would keep the next test waiting."""
        for session in self._sessions:
            with suppress(SQLAlchemyError):
                session.close()

    def close(self) -> None:
        self._close_sessions()
        self._beside.close()
        for engine in self._engines:
            engine.dispose()


def _set_lock_timeout(sql: str, connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute(sql)
    cursor.close()
    connection.commit()


class AsyncLock:
    """An `alock` that is used with plain calls."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], lock: Any) -> None:
        self._run, self._lock = run, lock
        self.name = lock.name

    def __enter__(self) -> Any:
        return self._run(self._lock.__aenter__())

    def __exit__(self, *error: object) -> Any:
        return self._run(self._lock.__aexit__(*error))

    def acquire(self) -> Any:
        return self._run(self._lock.acquire())


class AsyncSqlalchemySession(SqlalchemySession):
    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], session: AsyncSession) -> None:
        self._run, self.orm = run, session

    def lock(self, *parts: Any, **options: Any) -> AsyncLock:
        return AsyncLock(self._run, alock(self.orm, *parts, **options))

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        return self._run(self.orm.run_sync(work, *args))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._run(function(*args))

    @property
    def sync(self) -> OrmSession:
        return self.orm.sync_session


class AsyncSqlalchemyApplication(SqlalchemyApplication):
    """Its sessions live in one event loop, which has its own thread."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop")
        self._thread.start()
        level = {} if self.is_sqlite else {"isolation_level": place.level.upper()}
        self._async_engine = new_async_engine(place.driver, **level)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN)

    def session(self, *, lock_timeout: bool = False) -> AsyncSqlalchemySession:
        assert not lock_timeout, "the drivers for threads show it"
        return self._keep(AsyncSqlalchemySession(self.run, AsyncSession(self._async_engine)))

    def session_behind(self, port: int) -> AsyncSqlalchemySession:
        url, level = make_url(URLS[self.place.driver]).set(port=port), self.place.level.upper()
        engine = create_async_engine(url, poolclass=NullPool, isolation_level=level)
        return self._keep(AsyncSqlalchemySession(self.run, AsyncSession(engine)))

    def close(self) -> None:
        self._close_sessions()
        self._sessions.clear()
        self.run(self._async_engine.dispose())
        self.run(shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN)
        self._loop.close()
        super().close()


async def shut_down() -> None:
    """End what is left in the running loop as `asyncio.run` does: tasks are cancelled, and stores close their connections."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
