"""Faults of the databases."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from tests.proxy import Proxy
from tests.random_faults.items import every_item
from tests.random_faults.network_faults import one_request
from tests.random_faults.schedule import Fault
from tests.random_faults.sqla_clients import engine_of
from tests.random_faults.world import World


@contextmanager
def connected(world: World, database: str) -> Iterator[Connection]:
    """Yield a connection that bypasses the proxies."""
    engine = engine_of(database, world.direct())
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


@contextmanager
def kill_sessions(world: World, fault: Fault) -> Iterator[None]:
    """The server ends about every second session."""
    with suppress(SQLAlchemyError), connected(world, fault.target) as connection:
        if fault.target == "postgresql":
            others = "pid <> pg_backend_pid() AND backend_type = 'client backend' AND pid % 2 = :parity"
            statement = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
            connection.execute(text(statement), {"parity": int(fault.seconds * 100) % 2})
        else:
            own = "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user = 'root'"
            for (session,) in connection.execute(text(own)).all():
                if session % 2:
                    with suppress(SQLAlchemyError):
                        connection.execute(text(f"KILL {session}"))
    yield


@contextmanager
def crash(world: World, fault: Fault) -> Iterator[None]:
    """The server dies at once, and recovers when it is started again."""
    server = world.servers[fault.target]
    server.stop() if fault.target == "postgresql" else server.kill()
    yield
    server.start()


@contextmanager
def lock_rows(world: World, fault: Fault) -> Iterator[None]:
    """A stranger locks rows of items, then rows of the fence, in another order than workers do: deadlocks occur."""
    keys = [key for key, item in every_item(world.stores).items() if item.database == fault.target]
    with suppress(SQLAlchemyError), connected(world, fault.target) as connection:
        for key in reversed(keys):
            _lock(connection, "SELECT name FROM item WHERE name = :name FOR UPDATE", key)
            time.sleep(0.05)
        for key in keys:
            _lock(connection, "SELECT name FROM dlock_fence WHERE name = :name FOR UPDATE", f"item:{key}")
        connection.rollback()
    yield


def _lock(connection: Connection, statement: str, name: str) -> None:
    connection.execute(text(statement), {"name": name})


def _at_commit(plan: Callable[..., Any]) -> Callable[[World, Fault], Any]:
    return one_request(lambda proxy: plan(proxy, matching=b"COMMIT"))


FAULTS: Final[dict[str, Callable[[World, Fault], Any]]] = {
    "kill sessions": kill_sessions, "crash": crash, "lock rows": lock_rows,
    "late COMMIT": _at_commit(Proxy.hold_request), "lose COMMIT": _at_commit(Proxy.cut_reply), "drop COMMIT": _at_commit(Proxy.drop_reply),
}  # fmt: skip
