"""Statements through libpq return the same rows and raise the same errors as psycopg, and a signal ends them."""

from collections.abc import Iterator

import psycopg
import pytest

from dlock_core.backends.advisory.libpq import Libpq
from tests import settings
from tests.faults.looking import interrupted

DSN = settings.DATABASES["postgresql"]


@pytest.fixture
def connection(postgresql: object) -> Iterator[psycopg.Connection]:
    where = {"host": DSN["HOST"], "port": DSN["PORT"], "user": DSN["USER"], "dbname": DSN["NAME"]}
    with psycopg.connect(**where, autocommit=True) as made:
        yield made


@pytest.mark.parametrize(
    "expression",
    ["true", "false", "NULL", "-7", "2::smallint", "9223372036854775807", "'order 42'", "1795269526.5::float8", "''"],
)
def test_statement_answers_what_a_cursor_answers_every_time(connection, expression):
    sql = f"SELECT {expression} AS a, 1 AS b UNION ALL SELECT {expression}, 2 ORDER BY b"
    expected = connection.execute(sql).fetchall()
    session = Libpq(connection)
    assert session.execute(sql, {}) == expected
    assert [session.prepared(sql, {}) for _ in range(2)] == [expected] * 2


def test_text_is_the_same_in_the_encoding_of_the_connection(connection):
    connection.execute("SET client_encoding TO latin1")
    session = Libpq(connection)
    for run in (session.execute, session.prepared):
        assert run("SELECT CAST(:name AS text), length(:name)", {"name": "bäcker"}) == [("bäcker", 6)]


def test_parameters_go_where_their_names_are(connection):
    session = Libpq(connection)
    sql = "SELECT CAST(:b AS bigint) - CAST(:a AS bigint), 'a'::text || :text, CAST(:a AS bigint)"
    for run, a, b in ((session.execute, 1, 44), (session.prepared, 2**62, -1), (session.prepared, -1, 0)):
        assert run(sql, {"text": "%s :x '\\", "a": a, "b": b}) == [(b - a, "a%s :x '\\", a)]


def test_error_of_the_server_is_psycopgs_and_the_next_statement_is_answered(connection):
    session = Libpq(connection)
    for run in (session.execute, session.prepared, session.prepared):
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as refused:
            run("SELECT 1 / CAST(:a AS integer)", {"a": 0})
        assert refused.value.sqlstate == "22012"
        with pytest.raises(psycopg.errors.UndefinedColumn):
            run("SELECT nothing", {})
        assert run("SELECT 1 / CAST(:a AS integer)", {"a": 1}) == [(1,)]


def test_session_that_was_ended_raises_psycopgs_error(connection, postgresql):
    session = Libpq(connection)
    session.execute("SELECT pg_backend_pid()", {})
    with psycopg.connect(connection.info.dsn, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 10000)", [connection.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        session.execute("SELECT pg_backend_pid()", {})


def test_signal_ends_a_statement_that_takes_long(connection):
    number = connection.info.backend_pid
    watching = psycopg.connect(connection.info.dsn, autocommit=True)

    sleeping = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
    with interrupted(lambda: watching.execute(sleeping, [number]).fetchone()):
        Libpq(connection).execute("SELECT pg_sleep(3600)", {})
    connection.close()
    watching.execute("SELECT pg_terminate_backend(%s)", [number])
    watching.close()
