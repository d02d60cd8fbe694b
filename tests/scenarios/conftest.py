"""Fixtures of the scenarios: the application at a place, its store, and holders of a lock."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dlock_core.backends.memory import MemoryBackend
from sqla_dlock import stores
from tests.chaos import EverybodyIn
from tests.conftest import give_up
from tests.django_dlock.conftest import isolated  # noqa: F401 - a fixture
from tests.scenarios.application import Application, Holder, Place
from tests.scenarios.django_application import DjangoApplication
from tests.scenarios.sqlalchemy_application import BESIDE, AsyncSqlalchemyApplication, SqlalchemyApplication
from tests.servers import Server
from tests.sqla_dlock.conftest import make_engine, sqla_tables  # noqa: F401 - fixtures
from tests.sqla_dlock.engines import missing_driver, server_of


@pytest.fixture
def application(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    """The application at the place that `places(...)` names."""
    place: Place = request.param
    monkeypatch.setattr(stores, "_stores", dict(stores._stores))
    made: Application
    if place.orm == "django":
        alias = "default" if place.driver == "sqlite" else place.driver
        made = DjangoApplication(place, request.getfixturevalue("isolated")(alias, place.level))
    else:
        if missing := missing_driver(place.driver):
            give_up(missing)
        request.getfixturevalue("make_engine")(BESIDE[server_of(place.driver) or "sqlite"])  # its tables
        made = AsyncSqlalchemyApplication(place) if place.orm == "asyncio" else SqlalchemyApplication(place)
    yield made
    made.close()


@pytest.fixture
def broken(application: Application) -> EverybodyIn:
    """A store that grants everybody everything; `broken.tokens` are what it gives next."""
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
