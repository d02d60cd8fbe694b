"""Many processes contend for one advisory lock: ours, django-pglock, sqlalchemy-dlock and tooz, on the same server.

    python -m benchmarks.contended_advisory --processes 2,8,32 --think 0,5

Inside a transaction the lock ends with its COMMIT; held by a session it is acquired and released. The bare statements
count as 1. All contestants block in the database, whose own queue decides who is next. tooz opens a connection for each
lock.
"""

import secrets
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy_dlock import create_sadlock
from tooz import coordination

from benchmarks import measure
from benchmarks.advisory import setup
from benchmarks.sections import Make, Pair, tables
from benchmarks.stores import started
from dlock_core import Lock
from sqla_dlock import configure, lock
from sqla_dlock.backends.advisory import from_engine
from tests import servers

BARE: Final = "the bare statements"


def entered(make: Callable[[], AbstractContextManager[Any]]) -> Pair:
    """Enter a block to acquire, and leave it to release."""

    def acquire() -> AbstractContextManager[Any]:
        block = make()
        block.__enter__()
        return block

    return acquire, lambda block: block.__exit__(None, None, None)


def in_transaction_of_django(take: Callable[[], Any]) -> Pair:
    from django.db import transaction

    def block() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(transaction.atomic())
        found = take()
        if hasattr(found, "__exit__"):
            stack.enter_context(found)
        return stack

    return entered(block)


def by_hand() -> Any:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(42)")


def ours_in_django() -> Any:
    from django_dlock import lock

    return lock("order", 42)


def pglock_in_django() -> Any:
    import pglock

    return pglock.advisory("order:42", xact=True).acquire()


def in_session_of_sqlalchemy(url: str, take: Callable[[Session, Any], Any]) -> Pair:
    engine = create_engine(url)

    def acquire() -> Session:
        session = Session(engine)
        take(session, engine)
        return session

    def release(session: Session) -> None:
        session.commit()
        session.close()

    return acquire, release


def ours_in_sqlalchemy(url: str) -> Pair:
    engine = create_engine(url)
    configure(default=from_engine(engine))
    return in_session_of_sqlalchemy(url, lambda session, _: lock(session, "order", 42).acquire())


def sadlock_in_transaction(url: str) -> Pair:
    return in_session_of_sqlalchemy(url, lambda session, _: create_sadlock(session, "order:42", xact=True).acquire())


def bare_statements(url: str, acquire: str, release: str) -> Pair:
    connection = create_engine(url).connect().execution_options(isolation_level="AUTOCOMMIT")
    return lambda: connection.execute(text(acquire)), lambda _: connection.execute(text(release))


def ours_of_session(url: str) -> Pair:
    backend = from_engine(create_engine(url), session=True)
    return lambda: Lock(backend, "order:42", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def pglock_of_session() -> Pair:
    import pglock

    return entered(lambda: pglock.advisory("order:42"))


def sadlock_of_session(url: str, **limit: float) -> Pair:
    connection = create_engine(url).connect().execution_options(isolation_level="AUTOCOMMIT")
    return entered(lambda: create_sadlock(connection, "order:42", **limit))


def tooz_of_session(url: str) -> Pair:
    warnings.simplefilter("ignore", DeprecationWarning)
    coordinator = coordination.get_coordinator(url, secrets.token_hex(8).encode())
    coordinator.start()

    def acquire() -> Any:
        lock = coordinator.get_lock(b"order:42")
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def on_postgresql(port: int) -> dict[str, dict[str, Make]]:
    url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
    within: dict[str, Make] = {
        BARE: partial(in_transaction_of_django, by_hand),
        "dlock, Django": partial(in_transaction_of_django, ours_in_django),
        "dlock, SQLAlchemy": partial(ours_in_sqlalchemy, url),
        "django-pglock": partial(in_transaction_of_django, pglock_in_django),
        "sqlalchemy-dlock": partial(sadlock_in_transaction, url),
    }
    of_sessions: dict[str, Make] = {
        BARE: partial(bare_statements, url, "SELECT pg_advisory_lock(42)", "SELECT pg_advisory_unlock(42)"),
        "dlock": partial(ours_of_session, url),
        "django-pglock": pglock_of_session,
        "sqlalchemy-dlock, connection kept": partial(sadlock_of_session, url),
        "tooz": partial(tooz_of_session, f"postgresql://postgres@127.0.0.1:{port}?dbname=postgres"),
    }
    return {"PostgreSQL, inside a transaction": within, "PostgreSQL, held by a session": of_sessions}


def on_mariadb(port: int) -> dict[str, Make]:
    url = f"mariadb+pymysql://root@127.0.0.1:{port}/dlock"
    return {
        BARE: partial(bare_statements, url, "SELECT GET_LOCK('order:42', 60)", "SELECT RELEASE_LOCK('order:42')"),
        "dlock": partial(ours_of_session, url),
        # without a limit it passes a number that MariaDB rejects; with one it would poll on PostgreSQL
        "sqlalchemy-dlock, connection kept": partial(sadlock_of_session, url, contextual_timeout=60),
        "tooz": partial(tooz_of_session, f"mysql://root:@127.0.0.1:{port}/dlock"),
    }


def main() -> None:
    options = measure.arguments(__doc__, repeat=3, seconds=2.0, processes="2,8,32", think="0,5")
    report = measure.Report(options.format)
    with measure.scratch() as home, ExitStack() as stack:
        postgresql = stack.enter_context(started(servers.postgresql(home / "postgresql", servers.free_port())))
        mariadb = stack.enter_context(started(servers.mariadb(home / "mariadb", servers.free_port())))
        setup(postgresql.port).dispose()
        from django.db import connections

        connections.close_all()  # forked contestants open their own
        for title, contestants in on_postgresql(postgresql.port).items():
            tables(report, title, BARE, contestants, options, [postgresql.process.pid])
        tables(report, "MariaDB, held by a session", BARE, on_mariadb(mariadb.port), options, [mariadb.process.pid])
    report.end()


if __name__ == "__main__":
    main()
