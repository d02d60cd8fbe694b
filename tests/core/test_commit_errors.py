"""The promises of dlock_core.commit_errors, on the exceptions of the real drivers."""

import sqlite3

import pytest

from dlock_core.commit_errors import is_refusal


def caused_by(cause: BaseException) -> Exception:
    """What Django and SQLAlchemy make of a driver's exception."""
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


@pytest.mark.parametrize(("psycopg", "asyncpg", "refused"), SQLSTATES)
def test_postgresql_errors_are_told_apart_by_sqlstate(psycopg, asyncpg, refused):
    errors = pytest.importorskip("psycopg.errors")
    assert is_refusal(caused_by(getattr(errors, psycopg)("text"))) is refused
    errors = pytest.importorskip("asyncpg.exceptions")
    assert is_refusal(caused_by(caused_by(getattr(errors, asyncpg)("text")))) is refused


@pytest.mark.parametrize("driver", ["MySQLdb", "pymysql.err", "asyncmy.errors"])
@pytest.mark.parametrize(
    ("number", "refused"),
    [(1213, True), (1205, True), (1062, True), (4025, True)]
    + [(number, False) for number in (0, 1053, 1180, 1317, 1927, 2006, 2013, 2055)],
)
def test_mysql_errors_are_told_apart_by_number(driver, number, refused):
    errors = pytest.importorskip(driver)
    assert is_refusal(caused_by(errors.OperationalError(number, "text"))) is refused


def test_mysql_error_without_a_number_is_no_answer():
    errors = pytest.importorskip("pymysql.err")
    assert not is_refusal(errors.InterfaceError())
    assert not is_refusal(errors.InterfaceError("text"))


def test_sqlite_always_answers_because_it_is_the_database():
    assert is_refusal(sqlite3.OperationalError("database is locked"))
    assert is_refusal(caused_by(sqlite3.OperationalError("database is locked")))


def test_error_that_no_server_has_sent_is_no_answer():
    assert not is_refusal(Exception("by somebody else"))
    assert not is_refusal(caused_by(KeyboardInterrupt()))
    assert not is_refusal(None)
