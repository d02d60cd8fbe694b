"""The database and its sessions."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Depends
from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from example_project.sqla_shop.models import Base
from sqla_dlock import fencing

DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+mysqldb",
    "mariadb": "mariadb+mysqldb",
    "sqlite": "sqlite+pysqlite",
}
SERVER = {"connect_args": {"connect_timeout": 10}}
# As on PostgreSQL, and as Django sets it: under REPEATABLE READ, locking a missing row locks the gap around it.
MYSQL = SERVER | {"isolation_level": "READ COMMITTED"}
OPTIONS: dict[str, dict[str, Any]] = {
    "postgresql": SERVER,
    "mysql": MYSQL,
    "mariadb": MYSQL,
    "sqlite": {"connect_args": {"timeout": 30}},
}

# Without autoflush, so that only `save_unchecked` or `save_with_version` writes the changes of an order.
sessions = sessionmaker(expire_on_commit=False, autoflush=False)


def get_session() -> Iterator[Session]:
    with sessions() as session:
        yield session


SessionDep = Annotated[Session, Depends(get_session)]


def open_database(url: str) -> Engine:
    """Use this database for all sessions; its tables are not created yet."""
    target = with_driver(make_url(url))
    engine = create_engine(target, **OPTIONS[target.get_backend_name()])
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
    sessions.configure(bind=engine)
    return engine


def make_tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    fencing.metadata.create_all(engine)


def with_driver(url: URL) -> URL:
    """Name the driver where the URL does not; raises ArgumentError for a database that the shop does not know."""
    if url.drivername.partition("+")[0] not in DRIVERS:
        raise ArgumentError(f"the shop does not know {url.drivername}")
    return url.set(drivername=DRIVERS.get(url.drivername, url.drivername))


def begin_immediate(engine: Engine) -> None:
    """Make transactions take SQLite's write lock when they begin, and wait for it.

    By default SQLite asks at the first write, and then answers "database is locked" at once to one that has read.
    """

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # SQLAlchemy begins transactions, not the driver
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
