"""Lease tables for tests: through Django's aliases and through SQLAlchemy's engines, in the same tables."""

from typing import Any, Final

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from dlock_core.backends.table.backend import TableBackend
from tests import settings
from tests.mysql_server import DIALECT

_POSTGRESQL: Final = f"postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/postgres"
_MARIADB: Final = f"root@127.0.0.1:{settings.MARIADB_PORT}/dlock?charset=utf8mb4"

URLS: Final = {
    "psycopg": f"postgresql+psycopg://{_POSTGRESQL}",
    "psycopg2": f"postgresql+psycopg2://{_POSTGRESQL}",
    "asyncpg": f"postgresql+asyncpg://{_POSTGRESQL}",
    "psycopg_async": f"postgresql+psycopg_async://{_POSTGRESQL}",
    "mysqldb": f"{DIALECT}+mysqldb://{_MARIADB}",
    "pymysql": f"mysql+pymysql://{_MARIADB}",
    "aiomysql": f"{DIALECT}+aiomysql://{_MARIADB}",
    "asyncmy": f"mysql+asyncmy://{_MARIADB}",
    "sqlite": f"sqlite:///{settings.TEST_DIRECTORY}/default.sqlite3",
    "aiosqlite": f"sqlite+aiosqlite:///{settings.TEST_DIRECTORY}/default.sqlite3",
}
ASYNC: Final = ("asyncpg", "psycopg_async", "aiomysql", "asyncmy", "aiosqlite")
DJANGO: Final = ("default", "postgresql", "mariadb")


def server_of(store: str) -> str:
    """Return the fixture that starts what a store needs, and makes its tables."""
    if store in DJANGO:
        return store
    return {"postgresql": "postgresql", "sqlite": "default"}.get(
        URLS[store].partition("+")[0].partition(":")[0], "mariadb"
    )


def table(request: pytest.FixtureRequest, store: str, **options: Any) -> TableBackend:
    """Return a store by its Django alias, or by its driver in SQLAlchemy."""
    request.getfixturevalue(server_of(store))
    if store in DJANGO:
        from django_dlock.backends.table import from_url

        return from_url(f"database://{store}", **options)
    from sqla_dlock.backends.table import from_engine

    create = create_async_engine if store in ASYNC else create_engine
    return from_engine(create(URLS[store]), **options)
