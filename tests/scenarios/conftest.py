"""Fixtures of the scenarios: the application at a place, its store, and holders of a lock."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from dlock_core.backends.memory import MemoryBackend
from sqla_dlock import stores
from tests.chaos import EverybodyIn
from tests.conftest import give_up
from tests.scenarios.application import Application, Holder, Place
from tests.scenarios.django_application import database_of
from tests.scenarios.places import open_application
from tests.scenarios.sqlalchemy_application import BESIDE
from tests.servers import Server
from tests.sqla_dlock.conftest import make_engine, sqla_tables  # noqa: F401 - fixtures
from tests.sqla_dlock.engines import missing_driver, server_of


@pytest.fixture
def application(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    """The application at the place that `where(...)` names, with a counter "a" at 0; its tables are emptied after the test."""
    place: Place = request.param
    if place.orm == "django":
        request.getfixturevalue("use_database")(database_of(place))
    elif missing := missing_driver(place.driver):
        give_up(missing)
    else:
        monkeypatch.setattr(stores, "_stores", dict(stores._stores))
        request.getfixturevalue("make_engine")(BESIDE[server_of(place.driver) or "sqlite"])  # it empties the tables
    with closing(open_application(place)) as made:
        made.add_counter()
        yield made


@pytest.fixture
def broken(application: Application) -> EverybodyIn:
    """A store that grants every request; `broken.tokens` are its next tokens."""
    backend = EverybodyIn()
    application.use_store(backend)
    return backend


@pytest.fixture
def store(application: Application) -> MemoryBackend:
    """A store that works, in memory."""
    backend = MemoryBackend()
    application.use_store(backend)
    return backend


@pytest.fixture
def redis_store(application: Application, redis_server: Server) -> Any:
    """A real Redis; empty at the start."""
    from dlock_core import connect

    flush(redis_server)
    backend = connect(redis_server.url)
    application.use_store(backend)
    return backend


def flush(server: Server) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        client.flushall()


@pytest.fixture
def holder(application: Application) -> Iterator[Callable[..., Holder]]:
    """Make a holder of order:42, or of the lock that is named."""
    with ExitStack() as stack:

        def make(*parts: Any, **options: Any) -> Holder:
            made = Holder(application, *parts, **options)
            stack.callback(made.close)
            return made

        yield make
