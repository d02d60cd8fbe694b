"""The statements of a fence on the protected row: what each database is sent, with which parameters."""

import re
import sqlite3
from types import SimpleNamespace

import pytest

from dlock_core.backend import Granted
from dlock_core.errors import RowLocked
from dlock_core.runtime import clock
from dlock_core.transactions import fence_sql, fencing
from dlock_core.transactions.fencing import FenceEntry, FenceGate
from tests.core.scripted import driver_error

DATABASES = ["sqlite", "postgresql", "mysql", "mariadb"]
CLAIM = FenceEntry("order:42", 10, "us", limit=1.5)


def names(sql):
    return set(re.findall(r"(?<!:):(\w+)", sql))


@pytest.mark.parametrize("database", DATABASES)
def test_every_statement_takes_the_parameters_of_a_claim_and_the_key(database):
    for sql in vars_of(fence_sql.statements(database, "parcel", "id = :key")):
        assert names(sql) <= {*fencing.params(CLAIM), "key"}
        assert "{" not in sql


def test_wait_that_no_database_can_count_is_the_longest_that_each_can():
    """PostgreSQL counts milliseconds in 32 bits; innodb_lock_wait_timeout is at most 100,000,000."""
    told = fencing.params(CLAIM._replace(limit=1e300))
    assert (int(told["milliseconds"]), told["seconds"]) == (2**31 - 1, 100_000_000)


def vars_of(statements):
    return statements.admit, statements.first_admit, statements.confirm, statements.highest


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_every_wait_for_the_row_is_limited(database):
    statements = fence_sql.statements(database, "parcel", "id = :key")
    waiting = vars_of(statements) if database == "mariadb" else vars_of(statements)[:3]
    for sql in waiting:
        assert names(sql) & {"seconds", "milliseconds"}


@pytest.mark.parametrize(
    ("limit", "milliseconds", "seconds"), [(None, "0", 100_000_000), (0.0, "1", 0), (0.4, "400", 0), (1.6, "1600", 2)]
)
def test_limit_of_a_wait_is_told_in_the_unit_of_each_database(limit, milliseconds, seconds):
    """0 ms would be no limit on PostgreSQL, and MariaDB counts whole seconds."""
    told = fencing.params(CLAIM._replace(limit=limit))
    assert (told["milliseconds"], told["seconds"]) == (milliseconds, seconds)


@pytest.mark.parametrize(("limit", "waited"), [(None, 0.0), (0.0, 0.0), (1.5, 1.5)])
def test_wait_for_the_row_that_ran_out_says_how_long_it_was(limit, waited):
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    error = fencing.refusal(busy, CLAIM._replace(limit=limit), "sqlite")
    assert isinstance(error, RowLocked)
    assert error.waited == waited


def test_first_wait_for_the_row_ends_with_that_for_the_lock():
    held = SimpleNamespace(request=SimpleNamespace(name="a", holder="us", shared=False), granted=Granted(7, 30.0))
    for wait, left in ((None, None), (5.0, 0.0)):
        gate = FenceGate(held, None, wait=wait, deadline=clock() - 1.0, runtime=None)
        assert gate.entry().limit == left


@pytest.mark.parametrize("database", ["mysql", "mariadb"])
def test_looking_for_the_row_takes_no_snapshot_where_a_plain_read_would(database):
    assert fence_sql.statements(database, "parcel", "id = :key").highest.endswith(" FOR UPDATE")


def test_statements_of_a_row_are_written_once():
    assert fence_sql.statements("sqlite", "a", "id = :key") is fence_sql.statements("sqlite", "a", "id = :key")
    assert fence_sql.statements("sqlite", "a", "id = :key") != fence_sql.statements("sqlite", "b", "id = :key")


# What they do, on the database that needs no server


@pytest.fixture
def row():
    """Return a function that executes a statement on one row, and returns whether its answer is yes."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE parcel (id integer, dlock_token bigint, dlock_holder text)")
    connection.execute("INSERT INTO parcel VALUES (7, 0, '')")
    statements = fence_sql.statements("sqlite", "parcel", "id = :key")

    def ask(step, token, holder, key=7):
        params = {**fencing.params(FenceEntry("order:42", token, holder)), "key": key}
        cursor = connection.execute(getattr(statements, step), params)
        return fencing.is_yes(cursor.rowcount, cursor.fetchone())

    yield ask
    connection.close()


def test_newer_holder_is_admitted_and_an_older_one_is_not(row):
    assert row("first_admit", 10, "us")
    assert row("admit", 11, "them")
    assert not row("admit", 10, "us")
    assert not row("first_admit", 10, "us")


def test_row_without_a_token_is_raised_only_after_the_table_was_asked(row):
    assert not row("admit", 10, "us")
    assert row("first_admit", 10, "us")
    assert row("admit", 10, "us")


def test_holder_is_admitted_again_but_nobody_else_with_its_token(row):
    assert row("first_admit", 10, "us")
    for step in ("admit", "first_admit"):
        assert row(step, 10, "us")
        assert not row(step, 10, "them")


def test_only_the_newest_holder_is_confirmed(row):
    assert not row("confirm", 0, "us")
    row("first_admit", 10, "us")
    assert row("confirm", 10, "us")
    assert not row("confirm", 10, "them")
    assert not row("confirm", 9, "us")
    row("admit", 11, "them")
    assert not row("confirm", 10, "us")


def test_highest_tells_the_row_from_none(row):
    row("first_admit", 10, "us")
    assert row("highest", 0, "")
    assert not row("highest", 0, "", key=8)
    assert not row("first_admit", 10, "us", key=8)


@pytest.mark.parametrize("times", [3, 9])
def test_mark_of_shared_holders_is_written_although_many_write_one_at_the_same_moment(times):
    """Of n transactions that insert neighbouring rows, MySQL and MariaDB roll back one n - 1 times at most."""
    deadlocks = [driver_error("pymysql.err", "OperationalError", 1213, "Deadlock found")] * times
    written = []

    def execute(sql, params):
        if sql is fence_sql.DIALECTS["mysql"].is_marked:
            return 1, None
        if deadlocks:
            raise deadlocks.pop()
        written.append(sql)
        return 1, None

    fencing.prepare(SimpleNamespace(execute=execute), fence_sql.DIALECTS["mysql"], CLAIM)
    assert written == [fence_sql.DIALECTS["mysql"].mark]
