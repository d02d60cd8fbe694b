"""Compare leases in a table, free and contended: ours and those of two peers.

    python -m benchmarks.table --rounds 9 --count 100 --processes 2,8

The floor is what no lease in a table can do without: two prepared UPDATEs of one row, each committed, on a bare
connection. Contended, django-database-locks counts as 1: it cannot wait, and is polled every 10 ms (by itself: 500 ms);
django-db-mutex can neither wait nor renew. The servers do not wait for a disk, so that only work counts.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import django
import psycopg
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import measure
from benchmarks.floors import Names
from benchmarks.sections import Make, Pair, tables
from dlock_core import AsyncLock, Lock
from dlock_core.backends.table.backend import TableBackend
from tests import servers

FLOOR: Final = "floor: two UPDATEs on a bare connection"
POLLED: Final = "django-database-locks, polled"
URL: Final = "postgres@127.0.0.1:{port}/postgres"


@contextlib.contextmanager
def running() -> Iterator[dict[str, servers.Server]]:
    """Start PostgreSQL, and MariaDB if it is installed, and set Django up on them and on a SQLite file."""
    with measure.scratch() as directory, contextlib.ExitStack() as stack:
        started = {"default": servers.postgresql(directory / "postgresql", servers.free_port())}
        with contextlib.suppress(servers.ServerMissing):
            started["mariadb"] = servers.mariadb(directory / "mariadb", servers.free_port())
        for server in started.values():
            server.start()
            stack.callback(server.stop)
        configure(started, str(directory / "db.sqlite3"))
        stack.callback(connections.close_all)
        yield started


def configure(started: dict[str, servers.Server], sqlite: str) -> None:
    there = {"HOST": "127.0.0.1", "CONN_MAX_AGE": None}
    known: dict[str, dict[str, Any]] = {
        "default": {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", **there},
        "mariadb": {"ENGINE": "django.db.backends.mysql", "NAME": "dlock", "USER": "root", **there},
    }
    databases: dict[str, Any] = {alias: {**known[alias], "PORT": server.port} for alias, server in started.items()}
    databases["sqlite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": sqlite}
    apps = ["django_dlock", "database_locks", "db_mutex"]
    settings.configure(DATABASES=databases, INSTALLED_APPS=apps, USE_TZ=True)
    django.setup()
    for alias in databases:
        call_command("migrate", database=alias, verbosity=0)
    connections.close_all()  # forked contestants open their own


def floor(port: int) -> measure.Operation:
    connection = psycopg.connect(f"host=127.0.0.1 port={port} user=postgres", autocommit=True)
    connection.execute("CREATE TABLE IF NOT EXISTS floor (name text PRIMARY KEY, holder text)")
    connection.execute(
        "INSERT INTO floor SELECT 'floor:' || g, '' FROM generate_series(0, 999) g ON CONFLICT DO NOTHING"
    )
    name = Names("floor").next

    def operation() -> None:
        key = name()
        for holder, before in (("me", ""), ("", "me")):
            update = "UPDATE floor SET holder = %s WHERE name = %s AND holder = %s RETURNING holder"
            assert connection.execute(update, (holder, key, before), prepare=True).fetchone()

    return operation


def in_django(alias: str) -> TableBackend:
    from django_dlock.backends.table import from_url

    return from_url(f"database://{alias}")


def in_sqlalchemy(port: int, driver: str = "psycopg") -> TableBackend:
    from sqla_dlock.backends.table import from_engine

    create = create_async_engine if driver == "asyncpg" else create_engine
    return from_engine(create(f"postgresql+{driver}://{URL.format(port=port)}"))


def ours(backend: TableBackend) -> measure.Operation:
    name = Names("dlock").next
    return lambda: Lock(backend, name(), ttl=30).acquire().release()


def ours_for_tasks(backend: TableBackend) -> measure.Operation:
    name, loop = Names("dlock-async").next, asyncio.new_event_loop()

    async def once() -> None:
        await (await AsyncLock(backend, name(), ttl=30).acquire()).release()

    return lambda: loop.run_until_complete(once())


def database_locks() -> measure.Operation:
    from database_locks.locks import DBLock

    name = Names("database-locks").next

    def operation() -> None:
        lock = DBLock(name())
        assert lock.acquire(lock_ttl=30)
        lock.release()

    return operation


def db_mutex() -> measure.Operation:
    from db_mutex.db_mutex import db_mutex

    name = Names("db-mutex").next

    def operation() -> None:
        with db_mutex(name()):
            pass

    return operation


def uncontended(port: int) -> dict[str, measure.Operation]:
    return {
        FLOOR: floor(port),
        "dlock, Django": ours(in_django("default")),
        "dlock, SQLAlchemy": ours(in_sqlalchemy(port)),
        "dlock, asyncpg, asyncio": ours_for_tasks(in_sqlalchemy(port, "asyncpg")),
        "django-database-locks": database_locks(),
        "django-db-mutex": db_mutex(),
    }


def waiting(backend: TableBackend) -> Pair:
    return lambda: Lock(backend, "ours", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def database_locks_polled() -> Pair:
    from database_locks.locks import DBLock

    locked_by = str(time.monotonic_ns())

    def acquire() -> Any:
        lock = DBLock("database-locks", locked_by=locked_by)
        while not lock.acquire(lock_ttl=30):
            time.sleep(0.01)
        return lock

    return acquire, lambda lock: lock.release()


def db_mutex_polled() -> Pair:
    from db_mutex.db_mutex import db_mutex
    from db_mutex.exceptions import DBMutexError

    def acquire() -> Any:
        while True:
            with contextlib.suppress(DBMutexError):
                lock = db_mutex("db-mutex")
                lock.start()
                return lock
            time.sleep(0.01)

    return acquire, lambda lock: lock.stop()


CONTENDED: Final[dict[str, Make]] = {
    POLLED: database_locks_polled,
    "dlock, PostgreSQL": lambda: waiting(in_django("default")),
    "dlock, MariaDB": lambda: waiting(in_django("mariadb")),
    "dlock, SQLite": lambda: waiting(in_django("sqlite")),
    "django-db-mutex, polled": db_mutex_polled,
}


def elsewhere(aliases: list[str]) -> dict[str, measure.Operation]:
    """Return the operations on the databases other than PostgreSQL."""
    names = {"mariadb": "dlock, MariaDB", "sqlite": "dlock, SQLite"}
    return {names[alias]: ours(in_django(alias)) for alias in names if alias in aliases}


def main() -> None:
    options = measure.arguments(__doc__, rounds=9, count=100, repeat=3, seconds=2.0, processes="2,8,32", think="0,5")
    report = measure.Report(options.format)
    with running() as started:
        if "mariadb" not in started:
            CONTENDED.pop("dlock, MariaDB")
            print("MariaDB is not installed", file=sys.stderr)
        pids = [server.process.pid for server in started.values() if server.process is not None]
        tables(report, "Lease table", POLLED, CONTENDED, options, pids)
        every = {**uncontended(started["default"].port), **elsewhere(list(connections))}
        every = measure.chosen(every, options.only, FLOOR)
        for layout in measure.LAYOUTS:
            measure.pin(layout, *pids)
            runs = measure.interleave(every, FLOOR, options.rounds, options.count, pids)
            rows = [{"contestant": name, **runs[name].row()} for name in every]
            report.add(f"Lease table, uncontended acquire and release, {layout} CPU", rows)
        measure.unpin(*pids)
    report.end()


if __name__ == "__main__":
    main()
