"""Engines for tests: every supported driver, on real servers, in a separate database from Django's."""

import importlib.util
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests import settings
from tests.mysql_server import DIALECT

DATABASE: Final = "sqla"

_POSTGRESQL: Final = f"postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/{DATABASE}"
_MARIADB: Final = f"root@127.0.0.1:{settings.MARIADB_PORT}/{DATABASE}?charset=utf8mb4"
_SQLITE: Final = str(settings.TEST_DIRECTORY / "sqla.sqlite3")

URLS: Final = {
    "sqlite": f"sqlite:///{_SQLITE}",
    "postgresql": f"postgresql+psycopg://{_POSTGRESQL}",
    "psycopg2": f"postgresql+psycopg2://{_POSTGRESQL}",
    "mariadb": f"{DIALECT}+mysqldb://{_MARIADB}",
    "pymysql": f"{DIALECT}+pymysql://{_MARIADB}",
    "aiosqlite": f"sqlite+aiosqlite:///{_SQLITE}",
    "asyncpg": f"postgresql+asyncpg://{_POSTGRESQL}",
    "psycopg_async": f"postgresql+psycopg_async://{_POSTGRESQL}",
    "aiomysql": f"{DIALECT}+aiomysql://{_MARIADB}",
    "asyncmy": f"{DIALECT}+asyncmy://{_MARIADB}",
}
SYNC: Final = ["sqlite", "postgresql", "psycopg2", "mariadb", "pymysql"]
ASYNC: Final = ["aiosqlite", "asyncpg", "psycopg_async", "aiomysql", "asyncmy"]
_DRIVERS: Final = {"sqlite": "sqlite3", "postgresql": "psycopg", "mariadb": "MySQLdb", "psycopg_async": "psycopg"}


def missing_driver(name: str) -> str:
    """Return which driver has to be installed for an engine, or an empty text."""
    module = _DRIVERS.get(name, name)
    return "" if importlib.util.find_spec(module) else f"the driver {module} is missing"


def server_of(name: str) -> str | None:
    """Return the fixture that starts the server of an engine."""
    backend = make_url(URLS[name]).get_backend_name()
    return {"sqlite": None, DIALECT: "mariadb"}.get(backend, backend)


def new_engine(name: str, begin: str = "BEGIN IMMEDIATE", **options: Any) -> Engine:
    engine = create_engine(URLS[name], **options)
    if server_of(name) is None:
        begin_immediate(engine, begin)
    return engine


def new_isolated_engine(name: str, level: str, **options: Any) -> Engine:
    """Make an engine with an isolation level; SQLite has IMMEDIATE and DEFERRED."""
    if server_of(name) is None:
        return new_engine(name, f"BEGIN {level}", **options)
    return new_engine(name, isolation_level=level.upper(), **options)


def new_async_engine(name: str, **options: Any) -> AsyncEngine:
    engine = create_async_engine(URLS[name], **options)
    if server_of(name) is None:
        begin_immediate(engine.sync_engine)
    return engine


def begin_immediate(engine: Engine, begin: str = "BEGIN IMMEDIATE") -> None:
    """Make SQLite's transactions begin with the write lock, and wait for it, or begin in another way."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=OFF", "busy_timeout=20000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql(begin)
