"""Fixtures for SQLAlchemy: engines of every driver, on the servers that the whole suite shares, with tables that are emptied after each test."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, MetaData, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from dlock_core import connect
from dlock_core.backends.memory import MemoryBackend
from dlock_core.stores import Store
from sqla_dlock import stores
from sqla_dlock.fencing import metadata as fence_metadata
from sqla_dlock.versions import mapping
from tests.conftest import give_up
from tests.leases import events
from tests.servers import Server
from tests.sqla_dlock.engines import ASYNC, SYNC, missing_driver, new_async_engine, new_engine, server_of
from tests.sqla_dlock.models import Base
from tests.sqla_dlock.sessions import run_sql
from tests.sqla_dlock.version_models import Order

METADATA: list[MetaData] = [Base.metadata, fence_metadata]
CREATE = {"postgresql": "CREATE DATABASE sqla", "mariadb": "CREATE DATABASE sqla CHARACTER SET utf8mb4"}
TABLES = {None: "sqlite", "postgresql": "postgresql", "mariadb": "mariadb"}
"""The engine that makes and empties the tables, by the fixture of its server."""
MADE: dict[str | None, Engine] = {}
"""The engines of the databases that are made; global, because tests/scenarios has this fixture, too."""


@pytest.fixture(scope="session")
def sqla_tables(request: pytest.FixtureRequest) -> Callable[[str], Engine]:
    """Make the database and its tables, once per server; return an engine that empties them."""

    def prepare(name: str) -> Engine:
        server = server_of(name)
        if server not in MADE:
            if server is not None:
                request.getfixturevalue(server)
                run_sql(server, CREATE[server])
            # A test may have restarted the server since, or ended its sessions.
            MADE[server] = new_engine(TABLES[server], pool_pre_ping=True)
            request.addfinalizer(MADE[server].dispose)
            for metadata in METADATA:
                metadata.create_all(MADE[server])
            empty(MADE[server])
        return MADE[server]

    return prepare


@pytest.fixture
def make_engine(
    request: pytest.FixtureRequest, sqla_tables: Callable[[str], Engine]
) -> Iterator[Callable[..., Engine]]:
    """Make an engine by its name in `engines.URLS`; it is disposed of and its tables are emptied after the test."""
    made: list[tuple[str, Engine]] = []

    def make(name: str, **options: Any) -> Engine:
        if missing := missing_driver(name):
            give_up(missing)
        sqla_tables(name)
        made.append((name, new_engine(name, **options)))
        return made[-1][1]

    yield make
    for _, engine in made:
        engine.dispose()
    for name in {name for name, _ in made}:
        empty(sqla_tables(name))


@pytest.fixture
async def make_async_engine(sqla_tables: Callable[[str], Engine]) -> AsyncIterator[Callable[..., AsyncEngine]]:
    """Make an engine for asyncio."""
    made: list[tuple[str, AsyncEngine]] = []

    def make(name: str, **options: Any) -> AsyncEngine:
        if missing := missing_driver(name):
            give_up(missing)
        sqla_tables(name)
        made.append((name, new_async_engine(name, **options)))
        return made[-1][1]

    yield make
    for _, engine in made:
        await engine.dispose()
    for name in {name for name, _ in made}:
        empty(sqla_tables(name))


@pytest.fixture(params=SYNC)
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    """Every driver for threads in turn; `parametrize("engine", ["postgresql"], indirect=True)` selects some of them."""
    return make_engine(request.param)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session whose instances keep their state after COMMIT, so that a test can compare it with the row."""
    with Session(engine, expire_on_commit=False) as session:
        yield session


@pytest.fixture
def order(session: Session) -> Order:
    """An order that this session has inserted and committed."""
    session.add(order := Order(title="old"))
    session.commit()
    return order


@pytest.fixture
def statements(engine: Engine) -> Iterator[list[str]]:
    """The first word of each statement that is sent."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        sent.append(statement.split(maxsplit=1)[0])

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture(params=ASYNC)
def async_engine(request: pytest.FixtureRequest, make_async_engine: Callable[..., AsyncEngine]) -> AsyncEngine:
    """Every driver for asyncio in turn."""
    return make_async_engine(request.param)


@pytest.fixture(autouse=True)
def rows_begin_at_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give new rows version 1, which reads better than the clock; a module that needs the clock overrides this."""
    monkeypatch.setattr(mapping, "first_version", lambda _bits=63: 1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    """Use a store in memory as "default"."""
    backend = MemoryBackend()
    monkeypatch.setitem(stores._stores, "default", Store("default", backend, wait=20.0))
    return backend


@pytest.fixture
def redis_store(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Use a real Redis, emptied first, as the store "default"."""
    backend = connect(redis_server.url)
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    monkeypatch.setitem(stores._stores, "default", Store("default", backend, wait=20.0))
    return backend


@pytest.fixture
def journal() -> Iterator[list[str]]:
    """What happens to leases, in order; `note_ends(engine, journal)` adds COMMIT and ROLLBACK."""
    with events() as entries:
        yield entries


def empty(engine: Engine) -> None:
    """Delete every row; one statement asks first which tables have any."""
    question, deletions = emptying(engine)
    with engine.begin() as connection:
        has_rows = connection.exec_driver_sql(question).one()
        for deletion in itertools.compress(deletions, has_rows):
            connection.exec_driver_sql(deletion)


@cache
def emptying(engine: Engine) -> tuple[str, list[str]]:
    """Return the question which tables have rows, and a DELETE for each; to build it took longer than to ask it."""
    quote = engine.dialect.identifier_preparer.format_table
    tables = [quote(table) for metadata in METADATA for table in reversed(metadata.sorted_tables)]
    question = f"SELECT {', '.join(f'EXISTS (SELECT 1 FROM {table})' for table in tables)}"
    return question, [f"DELETE FROM {table}" for table in tables]
