"""A transaction under a lease is marked in its database without an extra request, and the mark ends with it."""

import asyncio
import importlib.util
import re
from contextlib import ExitStack, contextmanager

import pytest
from django.db import connections
from django.db.transaction import atomic
from django.test import override_settings
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import sqla_dlock
from django_dlock import lock as django_lock
from django_dlock.acquire import open_sessions
from dlock_core.backends.memory import MemoryBackend
from dlock_core.runtime import BLOCKING
from sqla_dlock import lock
from tests.inspect.parties import URLS
from tests.mysql_server import MYSQLD
from tests.testapp.models import Counter

OURS = {
    "postgresql": "SELECT current_setting('application_name')",
    "mariadb": "SELECT info FROM information_schema.processlist WHERE id = CONNECTION_ID()",
}
SERVERS = {
    "psycopg": "postgresql", "asyncpg": "postgresql", "psycopg_async": "postgresql",
    "mysqldb": "mariadb", "pymysql": "mariadb", "aiomysql": "mariadb",
}  # fmt: skip
if importlib.util.find_spec("asyncmy"):
    SERVERS["asyncmy"] = "mariadb"
both = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def ask_django(database):
    with connections[database].cursor() as cursor:
        cursor.execute(OURS[database])
        return cursor.fetchone()[0]


@pytest.fixture
def store():
    backend = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": backend}}):
        yield backend


@both
def test_transaction_of_django_is_marked_until_its_end(database, store):
    with django_lock("order", 1, using=database) as lease:
        assert "dlock:" not in ask_django(database)
        for _ in range(2):
            with atomic(database):
                assert f"dlock:{lease.holder[:8]}" in ask_django(database)
            assert "dlock:" not in ask_django(database)


@both
def test_transaction_of_sqlalchemy_is_marked_until_its_end(database, store):
    engine = create_engine(URLS[database])
    with Session(engine) as session, lock(session, "order", 1, store=store) as lease:
        for end in (session.commit, session.rollback):
            assert f"dlock:{lease.holder[:8]}" in session.scalar(text(OURS[database]))
            end()
    with engine.connect() as connection:
        assert "dlock:" not in connection.scalar(text(OURS[database]))
    engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_marks_of_several_leases_fit_after_the_name_that_was_there(database, store):
    with connections[database].cursor() as cursor, ExitStack() as stack:
        cursor.execute("SET application_name = %s", ["x" * 63])
        leases = [stack.enter_context(django_lock("order", number, using=database)) for number in range(2)]
        stack.enter_context(atomic(database))
        name = ask_django(database)
    assert len(name) == 63
    assert name.startswith("x" * 33)
    assert any(name.endswith(f" dlock:{lease.holder[:8]}") for lease in leases)


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_statements_for_many_rows_are_left_as_they_are(database, store):
    """mysqlclient combines many rows in one statement only if it begins with INSERT."""
    with django_lock("order", 1, using=database), atomic(database), sent_by(database) as statements:
        with connections[database].cursor() as cursor:
            cursor.executemany("INSERT INTO testapp_counter (name, value) VALUES (%s, 0)", [("a",), ("b",)])
        assert Counter.objects.using(database).count() == 2
    *admit, many, one = statements
    assert many.startswith("INSERT")
    for statement in (*admit, one):
        assert re.match(r"/\* dlock:[0-9a-f]{8} \*/ [IS]", statement)


@contextmanager
def sent_by(database):
    found = []

    def note(execute, sql, *rest):
        found.append(sql)
        return execute(sql, *rest)

    with connections[database].execute_wrapper(note):
        yield found


@both
def test_marks_cost_no_statement(database, store):
    engine, sent = create_engine(URLS[database]), []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    for _ in range(2):
        sent.clear()  # An engine's first transaction looks for the fence's functions.
        with Session(engine) as session, lock(session, "order", 1, store=store):
            session.execute(text("SELECT 1"))
            session.commit()
    engine.dispose()
    admit = 4 if database == "mariadb" and MYSQLD else 1
    assert len(sent) == admit + 1, "the admit and the statement"


@both
def test_django_knows_the_number_of_its_session_without_asking(database):
    with connections[database].cursor() as cursor:
        cursor.execute({"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}[database])
        number = cursor.fetchone()[0]
    own, inside = open_sessions()
    name = connections[database].settings_dict["NAME"]
    assert f"{'pg' if database == 'postgresql' else 'my'}:{number}/{name}" in own
    assert inside == ()


async def test_tasks_claim_no_session_of_the_thread_that_they_share():
    assert open_sessions() == ((), ())


@pytest.mark.parametrize(
    ("driver", "database"),
    [(driver, SERVERS[driver]) for driver in SERVERS],
    indirect=["database"],
    ids=lambda value: value,
)
def test_sqlalchemy_knows_the_number_of_its_session_with_every_driver(driver, database):
    url = make_url(URLS[database])
    ask = text({"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}[database])
    url = url.set(drivername=f"{url.get_backend_name()}+{driver}")

    def name(session):
        lock = sqla_dlock.lock(session, "order", 1, store=MemoryBackend())
        assert lock._new_acquire(BLOCKING).sessions() == ((), ()), "no transaction, no session"
        number = session.scalar(ask)
        return number, lock._new_acquire(BLOCKING).sessions()

    async def in_loop():
        engine = create_async_engine(url)
        async with AsyncSession(engine) as session:
            found = await session.run_sync(name)
        await engine.dispose()
        return found

    if driver in ("asyncpg", "psycopg_async", "aiomysql", "asyncmy"):
        number, sessions = asyncio.run(in_loop())
    else:
        engine = create_engine(url)
        with Session(engine) as session:
            number, sessions = name(session)
        engine.dispose()
    assert sessions == ((), (f"{'pg' if database == 'postgresql' else 'my'}:{number}/{url.database}",))
