"""Session locks keep the contract: PostgreSQL and MariaDB, through Django and through SQLAlchemy."""

from collections.abc import Iterator

import pytest

from dlock_core.backends.advisory import SessionBackend
from dlock_core.testing.contract import *  # noqa: F403
from tests.advisory_stores import sessions

STORES = ("postgresql", "pymysql", "asyncpg")
"""Both databases and both integrations, a blocking and an asyncio driver."""


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[SessionBackend]:
    backend = sessions(request, request.param)
    with django_db_blocker.unblock():
        yield backend
    backend.close()


@pytest.mark.skip(
    "a place in the queue is taken by waiting, not by asking: nothing is handed over to who does not wait"
)
def test_hand_over_that_nobody_takes_up_passes_on() -> None: ...
