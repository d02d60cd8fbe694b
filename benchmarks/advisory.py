"""Compare our advisory locks with those of django-pglock and sqlalchemy-dlock, on the same PostgreSQL.

    python -m benchmarks.advisory --rounds 15 --count 200

Inside a transaction, an operation is BEGIN, lock, one SELECT, COMMIT; held by a session, it is acquire and release,
without a fence. The floor is the same transaction without a lock, or the two bare statements. All processes share one
CPU.
"""

from collections.abc import Callable
from typing import Any

import psycopg
from django.conf import settings
from django.core.management import call_command
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy_dlock import create_sadlock

from benchmarks import measure
from tests import servers

TITLES = {
    "Django": "Inside a transaction, Django",
    "SQLAlchemy": "Inside a transaction, SQLAlchemy",
    "session": "Held by a session, no transaction",
}


def setup(port: int) -> Engine:
    import django

    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": "127.0.0.1"}
    advisory = {"BACKEND": "advisory://default"}
    settings.configure(
        DATABASES={"default": {**database, "PORT": port, "CONN_MAX_AGE": None}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DLOCK={"default": advisory, "session": {**advisory, "OPTIONS": {"session": True}}},
        INSTALLED_APPS=["django.contrib.contenttypes", "pgactivity", "pglock", "django_dlock"],
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0)
    return create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres", pool_size=2)


def in_django() -> dict[str, measure.Operation]:
    import pglock
    from django.db import connection, transaction

    from django_dlock import lock

    def ask(sql: str = "SELECT 1") -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    def bare() -> None:
        with transaction.atomic():
            ask()

    def by_hand() -> None:
        with transaction.atomic():
            ask("SELECT pg_advisory_xact_lock(42)")
            ask()

    def ours() -> None:
        with transaction.atomic(), lock("order", 42):
            ask()

    def peer() -> None:
        with transaction.atomic():
            pglock.advisory("order:42", xact=True).acquire()
            ask()

    return {"no lock": bare, "pg_advisory_xact_lock by hand": by_hand, "dlock": ours, "django-pglock": peer}


def in_sqlalchemy(engine: Engine) -> dict[str, measure.Operation]:
    from sqla_dlock import configure, lock
    from sqla_dlock.backends.advisory import from_engine

    configure(default=from_engine(engine))

    def operation(take: Callable[[Session], Any]) -> measure.Operation:
        def transact() -> None:
            with Session(engine) as session:
                take(session)
                session.execute(text("SELECT 1"))
                session.commit()

        return transact

    return {
        "no lock": operation(lambda _: None),
        "pg_advisory_xact_lock by hand": operation(lambda s: s.execute(text("SELECT pg_advisory_xact_lock(42)"))),
        "dlock": operation(lambda session: lock(session, "order", 42).acquire()),
        "sqlalchemy-dlock": operation(lambda session: create_sadlock(session, "order:42", xact=True).acquire()),
    }


def of_sessions(engine: Engine, port: int) -> dict[str, measure.Operation]:
    import pglock

    from django_dlock.conf import stores
    from dlock_core import Lock
    from sqla_dlock.backends.advisory import from_engine

    raw = psycopg.connect(f"host=127.0.0.1 port={port} user=postgres dbname=postgres", autocommit=True)
    kept = engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def bare() -> None:
        raw.execute("SELECT pg_advisory_lock(42)")
        raw.execute("SELECT pg_advisory_unlock(42)")

    def ours(backend: Any) -> measure.Operation:
        return lambda: Lock(backend, "order:42").acquire().release()

    def django_pglock() -> None:
        with pglock.advisory("order:42"):
            pass

    def sqlalchemy_dlock() -> None:
        with create_sadlock(kept, "order:42"):
            pass

    return {
        "the bare statements": bare,
        "dlock, Django's connection settings": ours(stores["session"].backend),
        "dlock, SQLAlchemy's driver": ours(from_engine(engine, session=True)),
        "django-pglock": django_pglock,
        "sqlalchemy-dlock, connection kept": sqlalchemy_dlock,
    }


def sessions_of(port: int) -> list[int]:
    """Return the pids of the open sessions; they change: the server ends a session of ours that is silent for a ttl."""
    with psycopg.connect(f"host=127.0.0.1 port={port} user=postgres dbname=postgres") as connection:
        others = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return [pid for (pid,) in others]


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=200)
    report = measure.Report(options.format)
    with measure.scratch() as directory:
        server = servers.postgresql(directory / "postgresql", servers.free_port())
        server.start()
        engine = setup(server.port)
        ways = {
            "Django": in_django(),
            "SQLAlchemy": in_sqlalchemy(engine),
            "session": of_sessions(engine, server.port),
        }
        for name, every in ways.items():
            for operation in every.values():
                operation()
            pids = [server.process.pid, *sessions_of(server.port)]
            measure.pin("same", *pids)
            runs = measure.interleave(every, next(iter(every)), options.rounds, options.count, pids)
            report.add(TITLES[name], [{"contestant": each, **runs[each].row()} for each in every])
        engine.dispose()
        server.stop()
    report.end()


if __name__ == "__main__":
    main()
