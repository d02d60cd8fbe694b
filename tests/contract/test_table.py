"""The lease table keeps the contract: PostgreSQL, MariaDB and SQLite, through Django and through SQLAlchemy."""

from collections.abc import Iterator

import pytest

from dlock_core.backend import Renewal
from dlock_core.backends.table.backend import TableBackend
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract import *  # noqa: F403
from tests.table_stores import table

STORES = ("default", "postgresql", "pymysql", "asyncpg")
"""Each database, both integrations, blocking and asyncio drivers; test_table_drivers.py covers every driver."""


def test_attempt_that_comes_late_shortens_no_lease(backend: TableBackend) -> None:
    """Its reply was lost, the next attempt was granted, and the lease has since been renewed for longer."""
    request = new_request("a", LockOptions(20.0, 0.0))
    granted = run(backend.try_acquire(BLOCKING, request))
    run(backend.renew(BLOCKING, [Renewal(request._replace(ttl=60.0), granted)]))
    run(backend.try_acquire(BLOCKING, request))
    run(backend.try_acquire(BLOCKING, request._replace(floor=granted.token)))
    ((holder,),) = [state.holders for state in run(backend.inspect(BLOCKING, "a"))]
    run(backend.abandon(BLOCKING, request))
    assert holder.expires_in > 40


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[TableBackend]:
    backend = table(request, request.param)
    with django_db_blocker.unblock():
        yield backend
    backend.close()
