"""Where the scenarios run. Each ORM runs at every isolation level of every database; other drivers run where SQL or errors could differ."""

from collections.abc import Callable

import pytest

from tests.scenarios.application import Application, Place
from tests.scenarios.django_application import DjangoApplication
from tests.scenarios.sqlalchemy_application import AsyncSqlalchemyApplication, SqlalchemyApplication

APPLICATIONS: dict[str, Callable[[Place], Application]] = {
    "django": DjangoApplication,
    "sqlalchemy": SqlalchemyApplication,
    "asyncio": AsyncSqlalchemyApplication,
}
LEVELS = ("read committed", "repeatable read", "serializable")
ORMS = ("django", "sqlalchemy")

SERVERS = [Place(orm, server, level) for orm in ORMS for server in ("postgresql", "mariadb") for level in LEVELS]
SQLITE = [Place(orm, "sqlite", level) for orm in ORMS for level in ("IMMEDIATE", "DEFERRED")]
EVERY = [*SERVERS, *SQLITE]

OTHER_SERVER_DRIVERS = [
    Place("sqlalchemy", "psycopg2", "read committed"),
    Place("sqlalchemy", "pymysql", "repeatable read"),
    Place("asyncio", "asyncpg", "read committed"),
    Place("asyncio", "psycopg_async", "read committed"),
    Place("asyncio", "aiomysql", "repeatable read"),
    Place("asyncio", "asyncmy", "repeatable read"),
]
OTHER_DRIVERS = [*OTHER_SERVER_DRIVERS, Place("asyncio", "aiosqlite", "IMMEDIATE")]

ASYNC = [
    Place("asyncio", "aiosqlite", "IMMEDIATE"),
    Place("asyncio", "asyncpg", "read committed"),
    Place("asyncio", "aiomysql", "read committed"),
]
"""Each database once with asyncio."""


def is_postgresql_snapshot(place: Place) -> bool:
    """Whether an exclusive holder is announced before its transaction, because its snapshot would be too old."""
    return place.driver == "postgresql" and place.level != "read committed"


def in_transaction(places: list[Place]) -> list[Place]:
    """Return those where an exclusive holder is first admitted in its transaction."""
    return [place for place in places if not is_postgresql_snapshot(place)]


def committed(places: list[Place]) -> list[Place]:
    return [place for place in places if place.level == "read committed"]


def once(places: list[Place]) -> list[Place]:
    """Return one level of each database, for promises that have nothing to do with snapshots."""
    return [place for place in places if place.level in {"read committed", "IMMEDIATE"}]


def open_application(place: Place) -> Application:
    """Make the application at a place, whose server runs and has its tables."""
    return APPLICATIONS[place.orm](place)


def where(places: list[Place]) -> pytest.MarkDecorator:
    """Run a scenario at some places."""
    return pytest.mark.parametrize("application", places, ids=str, indirect=True)
