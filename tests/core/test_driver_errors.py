"""dlock_core.sql.driver_errors keeps its promises on the exceptions of the real drivers."""

import importlib.util
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dlock_core.sql.driver_errors import DatabaseFailure, classify, failure_of_statement, is_refusal, warn_unless_known
from tests.core.scripted import driver_error

psycopg = pytest.importorskip("psycopg")


@pytest.mark.parametrize(
    ("state", "trouble"),
    [
        ("40P01", DatabaseFailure.DEADLOCK),
        ("40001", DatabaseFailure.SERIALIZATION),
        ("55P03", DatabaseFailure.LOCK_TIMEOUT),
        ("57P01", DatabaseFailure.DISCONNECT),
        ("25P03", DatabaseFailure.SESSION_TIMEOUT),
        ("42P01", DatabaseFailure.MISSING_TABLE),
        ("28P01", DatabaseFailure.NO_ACCESS),
        ("08006", DatabaseFailure.DISCONNECT),
        ("57014", None),
        ("23505", None),
        ("25P02", None),
    ],
)
def test_postgresql_errors_are_told_by_sqlstate(state: str, trouble: DatabaseFailure | None) -> None:
    assert classify(psycopg.errors.lookup(state)() if state[:2] != "08" else sqlstate_error(state)) is trouble
    assert classify(driver_error("asyncpg.exceptions", "PostgresError", sqlstate=state)) is trouble
    assert classify(driver_error("psycopg2.errors", "OperationalError", pgcode=state)) is trouble


def sqlstate_error(state: str) -> psycopg.Error:
    return type("Lost", (psycopg.OperationalError,), {"sqlstate": state})()


def test_postgresql_error_that_the_server_did_not_send_is_a_disconnect() -> None:
    assert classify(psycopg.OperationalError("the connection is closed")) is DatabaseFailure.DISCONNECT
    assert classify(psycopg.ProgrammingError("bad placeholder")) is None


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (1213, DatabaseFailure.DEADLOCK),
        (1205, DatabaseFailure.LOCK_TIMEOUT),
        (3572, DatabaseFailure.LOCK_TIMEOUT),
        (1020, DatabaseFailure.SERIALIZATION),
        (2006, DatabaseFailure.DISCONNECT),
        (2013, DatabaseFailure.DISCONNECT),
        (1146, DatabaseFailure.MISSING_TABLE),
        (1045, DatabaseFailure.NO_ACCESS),
        (1317, DatabaseFailure.UNKNOWN_OUTCOME),
        (1969, None),
        (1062, None),
    ],
)
def test_mysql_errors_are_told_by_number(number: int, trouble: DatabaseFailure | None) -> None:
    for module in ("MySQLdb", "pymysql.err", "aiomysql", "asyncmy.errors"):
        assert classify(driver_error(module, "OperationalError", number, "text")) is trouble
    for module in ("MySQLdb", "pymysql.err", "asyncmy.errors"):
        if importlib.util.find_spec(module.partition(".")[0]):
            assert classify(importlib.import_module(module).OperationalError(number, "text")) is trouble


def test_number_goes_before_sqlstate_because_pymysql_calls_a_deadlock_40001() -> None:
    error = driver_error("pymysql.err", "OperationalError", 1213, "Deadlock found", sqlstate="40001")
    assert classify(error) is DatabaseFailure.DEADLOCK


def test_number_of_another_library_s_error_means_nothing() -> None:
    assert classify(KeyError(1213)) is None
    assert classify(driver_error("redis.exceptions", "ResponseError", 1205)) is None
    assert classify(driver_error("pymysqlite.err", "OperationalError", 1213)) is None


def test_sqlite_busy_is_a_lock_timeout(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(tmp_path / "a", timeout=0)) as other, pytest.raises(sqlite3.Error) as caught:
            other.execute("BEGIN IMMEDIATE")
    assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT


def test_sqlite_write_after_an_overtaken_read_is_a_serialization_failure(tmp_path: Path) -> None:
    def open_it() -> Any:
        return closing(sqlite3.connect(tmp_path / "a", isolation_level=None, timeout=0))

    with open_it() as one, open_it() as other:
        one.execute("PRAGMA journal_mode=WAL")
        one.execute("CREATE TABLE t (x)")
        one.execute("BEGIN")
        one.execute("SELECT * FROM t").fetchall()
        other.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(sqlite3.Error) as caught:
            one.execute("INSERT INTO t VALUES (2)")
    assert classify(caught.value) is DatabaseFailure.SERIALIZATION


def test_sqlite_error_of_another_kind_is_none() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(sqlite3.Error) as caught:
        connection.execute("SELECT nonsense")
    assert classify(caught.value) is None


def test_layers_of_frameworks_are_looked_through() -> None:
    wrapper = driver_error("sqlalchemy.exc", "DBAPIError", "wrapped")
    wrapper.__cause__ = psycopg.errors.DeadlockDetected()
    assert classify(wrapper) is DatabaseFailure.DEADLOCK


@pytest.mark.parametrize(
    ("driver", "name", "trouble"),
    [
        (
            driver_error("asyncmy.errors", "OperationalError", 1213, "Deadlock found"),
            "OperationalError",
            DatabaseFailure.DEADLOCK,
        ),
        (
            driver_error("pymysql.err", "OperationalError", 1205, "Timeout"),
            "OperationalError",
            DatabaseFailure.LOCK_TIMEOUT,
        ),
        (driver_error("asyncpg.exceptions", "X", sqlstate="40001"), "DBAPIError", DatabaseFailure.SERIALIZATION),
        (driver_error("psycopg2.errors", "X", pgcode="55P03"), "OperationalError", DatabaseFailure.LOCK_TIMEOUT),
    ],
)
def test_sqlalchemy_s_layers_are_looked_through_for_every_driver(
    driver: Exception, name: str, trouble: DatabaseFailure
) -> None:
    adapted = driver_error("sqlalchemy.dialects.postgresql.asyncpg", "AsyncAdapt_asyncpg_dbapi.Error")
    wrapper = driver_error("sqlalchemy.exc", name, connection_invalidated=False)
    adapted.__cause__, wrapper.__cause__ = driver, adapted
    assert classify(wrapper) is trouble


def test_connection_that_sqlalchemy_has_given_up_is_a_disconnect() -> None:
    wrapper = driver_error("sqlalchemy.exc", "DBAPIError", "wrapped", connection_invalidated=True)
    wrapper.__cause__ = driver_error("asyncpg.exceptions._base", "InterfaceError", "connection is closed")
    assert classify(wrapper) is DatabaseFailure.DISCONNECT


def test_aborted_transaction_does_not_hide_the_first_error() -> None:
    aborted = psycopg.errors.InFailedSqlTransaction()
    aborted.__context__ = psycopg.errors.SerializationFailure()
    assert classify(aborted) is DatabaseFailure.SERIALIZATION


def test_error_of_the_application_is_not_looked_through() -> None:
    for link in ("__cause__", "__context__"):
        decided = ValueError("the customer must be told")
        setattr(decided, link, psycopg.errors.DeadlockDetected())
        assert classify(decided) is None


def test_missing_table_of_sqlite_is_told_though_it_has_no_code_of_its_own() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(sqlite3.Error) as caught:
        connection.execute("SELECT * FROM nowhere")
    assert classify(caught.value) is DatabaseFailure.MISSING_TABLE


def test_original_of_sqlalchemy_is_found_where_the_cause_was_lost() -> None:
    wrapper = driver_error("sqlalchemy.exc", "DBAPIError", orig=psycopg.errors.DeadlockDetected())
    assert classify(wrapper) is DatabaseFailure.DEADLOCK
    assert is_refusal(wrapper)


def test_errors_that_explain_each_other_in_a_circle_end() -> None:
    one, other = psycopg.InterfaceError(), psycopg.InterfaceError()
    one.__context__, other.__context__ = other, one
    assert classify(one) is None


# -- the answer to COMMIT --


def caused_by(cause: BaseException) -> Exception:
    """Wrap a driver's exception as Django and SQLAlchemy do."""
    error = Exception(*cause.args)
    error.__cause__ = cause
    return error


SQLSTATES = [
    ("SerializationFailure", "SerializationError", True),
    ("DeadlockDetected", "DeadlockDetectedError", True),
    ("ForeignKeyViolation", "ForeignKeyViolationError", True),
    ("QueryCanceled", "QueryCanceledError", True),
    ("AdminShutdown", "AdminShutdownError", False),
    ("CrashShutdown", "CrashShutdownError", False),
    ("CannotConnectNow", "CannotConnectNowError", False),
    ("ConnectionFailure", "ConnectionFailureError", False),
    ("TransactionResolutionUnknown", "TransactionResolutionUnknownError", False),
    ("StatementCompletionUnknown", "StatementCompletionUnknownError", False),
    ("OperationalError", "InterfaceError", False),
]


@pytest.mark.parametrize(("of_psycopg", "of_asyncpg", "refused"), SQLSTATES)
def test_refusal_by_postgresql_is_told_by_sqlstate(of_psycopg, of_asyncpg, refused):
    errors = pytest.importorskip("psycopg.errors")
    assert is_refusal(caused_by(getattr(errors, of_psycopg)("text"))) is refused
    errors = pytest.importorskip("asyncpg.exceptions")
    assert is_refusal(caused_by(caused_by(getattr(errors, of_asyncpg)("text")))) is refused


@pytest.mark.parametrize("driver", ["MySQLdb", "pymysql.err", "asyncmy.errors"])
@pytest.mark.parametrize(
    ("number", "refused"),
    [(1213, True), (1205, True), (1062, True), (4025, True)]
    + [(number, False) for number in (0, 1053, 1180, 1317, 1927, 2006, 2013, 2055)],
)
def test_refusal_by_mysql_is_told_by_number(driver, number, refused):
    errors = pytest.importorskip(driver)
    assert is_refusal(caused_by(errors.OperationalError(number, "text"))) is refused


def test_mysql_error_without_a_number_is_no_answer():
    errors = pytest.importorskip("pymysql.err")
    assert not is_refusal(errors.InterfaceError())
    assert not is_refusal(errors.InterfaceError("text"))


def test_answer_to_a_statement_is_not_what_was_answered_before() -> None:
    earlier, answer = sqlstate_error("40P01"), sqlstate_error("25P02")
    answer.__context__ = earlier
    assert classify(answer) is DatabaseFailure.DEADLOCK
    assert failure_of_statement(caused_by(answer)) is None
    assert failure_of_statement(caused_by(earlier)) is DatabaseFailure.DEADLOCK


def test_sqlite_always_answers_because_it_is_the_database():
    assert is_refusal(sqlite3.OperationalError("database is locked"))
    assert is_refusal(caused_by(sqlite3.OperationalError("database is locked")))


def test_error_that_no_server_has_sent_is_no_answer():
    assert not is_refusal(Exception("by somebody else"))
    assert not is_refusal(caused_by(KeyboardInterrupt()))
    assert not is_refusal(None)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (driver_error("psycopg2.errors", "SerializationFailure", pgcode="40001"), True),
        (driver_error("psycopg2.errors", "AdminShutdown", pgcode="57P01"), False),
        (driver_error("psycopg2", "OperationalError", "server closed the connection", pgcode=None), False),
        (driver_error("psycopg.errors", "IdleInTransactionSessionTimeout", sqlstate="25P03"), True),
    ],
)
def test_refusal_is_told_for_every_other_driver(error, refused):
    assert is_refusal(caused_by(error)) is refused


@pytest.mark.parametrize("name", ["psycopg", "psycopg2", "asyncpg", "mysqldb", "MySQLdb", "pysqlite", "sqlite3.dbapi2"])
def test_supported_driver_is_known_by_each_of_its_names(caplog, name):
    with caplog.at_level(logging.WARNING, "dlock"):
        warn_unless_known(name)
    assert caplog.records == []


def test_driver_that_is_not_known_is_named_once_in_the_log(caplog):
    base = driver_error("cx_unknown", "DatabaseError")
    with caplog.at_level(logging.WARNING, "dlock"):
        for _ in range(2):
            assert not is_refusal(caused_by(base))
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " the errors of the database driver 'cx_unknown' are not known"
    ]
