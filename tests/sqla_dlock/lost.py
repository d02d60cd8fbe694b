"""Ways to lose a connection, for sessions of both kinds."""

import contextlib
from collections.abc import Callable, Iterator

from sqlalchemy import URL, Connection, Engine, make_url, text

from tests import settings
from tests.sqla_dlock.engines import URLS, server_of
from tests.waiting import meanwhile, until

PORTS = {"postgresql": settings.POSTGRESQL_PORT, "mariadb": settings.MARIADB_PORT}


def port_of(name: str) -> int:
    """Return the port of an engine's server."""
    return PORTS[server_of(name) or ""]


def url_through(name: str, port: int) -> URL:
    """Return the address of an engine's database behind a proxy."""
    return make_url(URLS[name]).set(port=port)


@contextlib.contextmanager
def held_in_commit(engine: Engine, then: Callable[[Connection], object]) -> Iterator[None]:
    """Hold a COMMIT of PostgreSQL that has added a Counter in a deferred trigger, and call `then` in another thread.

    `then` gets its own connection; after it, the COMMIT goes on.
    """
    engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as blocker, engine.connect() as watcher:
        blocker.exec_driver_sql("SELECT pg_advisory_lock(4711)")
        blocker.exec_driver_sql(HOLD_COMMIT)

        def interfere() -> None:
            try:
                until(lambda: watcher.exec_driver_sql(f"SELECT 1 {HELD}").first())
                then(watcher)
            finally:
                blocker.exec_driver_sql("SELECT pg_advisory_unlock(4711)")

        try:
            with meanwhile(interfere):
                yield
        finally:
            watcher.exec_driver_sql("DROP FUNCTION hold_commit() CASCADE")


HOLD_COMMIT = """
CREATE FUNCTION hold_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hold_commit AFTER INSERT ON counter DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION hold_commit();
"""
HELD = "FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"


def terminate_held(watcher: Connection) -> None:
    """End the held session, as an administrator does."""
    watcher.execute(text(f"SELECT pg_terminate_backend(pid, 10000) {HELD}"))


def interrupt_once(engine: Engine, method: str, when: str, error: type[BaseException]) -> None:
    """Have a method of the dialect raise once, where a driver would: before or after its work."""
    work = getattr(engine.dialect, method)
    pending = [error]

    def interrupted(*args: object) -> None:
        if pending and when == "before":
            raise pending.pop()
        work(*args)
        if pending:
            raise pending.pop()

    vars(engine.dialect)[method] = interrupted
