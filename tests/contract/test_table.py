"""The lease table keeps the contract: PostgreSQL, MariaDB and SQLite, through Django and through SQLAlchemy."""

from collections.abc import Iterator

import pytest

from dlock_core.backends.table.backend import TableBackend
from dlock_core.testing.contract import *  # noqa: F403
from tests.table_stores import table

STORES = ("default", "postgresql", "pymysql", "asyncpg")
"""Each database, both integrations, blocking and asyncio drivers; all of them together: test_table_drivers.py."""


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[TableBackend]:
    backend = table(request, request.param)
    with django_db_blocker.unblock():
        yield backend
    backend.close()
