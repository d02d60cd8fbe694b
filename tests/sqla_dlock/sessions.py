"""Other sessions on the database of a test: what they see is committed, and they can end the session of the test."""

from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, text

from tests import settings
from tests.mysql_server import DIALECT
from tests.waiting import until

_ADMIN = {
    "postgresql": f"postgresql+psycopg://postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/postgres",
    "mariadb": f"{DIALECT}+pymysql://root@127.0.0.1:{settings.MARIADB_PORT}/",
}


def run_sql(server: str, sql: str) -> None:
    """Run a statement on a server as its administrator, outside of any transaction."""
    engine = create_engine(_ADMIN[server], isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(sql)
    finally:
        engine.dispose()


def committed(engine: Engine, sql: str, **params: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query, as another session sees them."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql), params)]


def names(engine: Engine) -> set[str]:
    """Return the names of the counters, as another session sees them."""
    return {name for (name,) in committed(engine, "SELECT name FROM counter")}


def session_id(connection: Connection) -> int:
    function = "pg_backend_pid" if connection.dialect.name == "postgresql" else "connection_id"
    return connection.exec_driver_sql(f"SELECT {function}()").scalar_one()


def kill_session(engine: Engine, number: int) -> None:
    """Have the server end a session, and wait until it has."""
    with create_engine(engine.url, poolclass=NullPool).connect() as second:
        if second.dialect.name == "postgresql":
            second.execute(text("SELECT pg_terminate_backend(:number, 10000)"), {"number": number})
            return
        second.exec_driver_sql(f"KILL {number}")
        until(
            lambda: (
                not second.exec_driver_sql(f"SELECT 1 FROM information_schema.processlist WHERE id = {number}").first()
            )
        )
