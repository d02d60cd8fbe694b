"""The inspector reads PostgreSQL while real sessions wait."""

import contextlib
import time

import psycopg
import pytest
from django.conf import settings
from django.db import connections

from django_dlock.inspect import databases
from dlock_core.inspect import postgresql, take_snapshot, waits
from sqla_dlock.inspect import database as sqla_database
from tests.inspect.parties import URLS
from tests.testapp.models import Counter, Stock

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
WITHIN = 60.0
WHERE = f"host=127.0.0.1 port={settings.POSTGRESQL_PORT} user=postgres dbname=postgres"


@pytest.fixture
def sessions(database):
    """Yield a function that connects; its sessions end before the tables are emptied: `sessions("psql")`."""
    with contextlib.ExitStack() as stack:

        def connect(name):
            connection = stack.enter_context(contextlib.closing(psycopg.connect(WHERE, application_name=name)))
            stack.callback(end, connection.info.backend_pid)
            return connection

        yield connect


def end(session):
    """End a session and wait for that: a waiting one does not notice that its client is gone, and would still write."""
    with contextlib.closing(psycopg.connect(WHERE, autocommit=True)) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, %s)", [session, int(WITHIN * 1000)])


@pytest.fixture
def begin(sessions):
    """Return a function that sends statements without awaiting the last reply: `begin("a", "SELECT …")`."""

    def begin(name, *statements):
        connection = sessions(name)
        *first, last = statements
        for statement in first:
            connection.execute(statement)
        connection.pgconn.send_query(last.encode())
        connection.pgconn.flush()
        return connection.info.backend_pid

    return begin


def read(expected, by=None):
    """Read until as many sessions wait as expected, and return the entries."""
    database = by or databases(["postgresql"])[0]
    give_up = time.monotonic() + WITHIN
    with contextlib.closing(database):
        while True:
            reading = postgresql.locks(database)
            database.close()
            if sum(entry.role == "waiter" for entry in reading.entries) == expected:
                return reading.entries
            assert time.monotonic() < give_up, reading.entries


def told(entries):
    return [(entry.kind, entry.name, entry.role, entry.position, entry.owner["application_name"]) for entry in entries]


def test_row_that_is_waited_for_is_told_by_its_key_with_its_queue_in_order(begin):
    Stock.objects.using("postgresql").create(pk=7)
    query = "SELECT * FROM testapp_stock WHERE id = 7 FOR "
    begin("first", "BEGIN", query + "NO KEY UPDATE", "SELECT 1")
    for place, name in enumerate(["second", "third", "fourth"], 1):
        begin(name, query + "UPDATE")
        found = read(place)
    assert told(found) == [
        ("row", "testapp_stock 7", "holder", None, "first"),
        ("row", "testapp_stock 7", "waiter", 1, "second"),
        ("row", "testapp_stock 7", "waiter", 2, "third"),
        ("row", "testapp_stock 7", "waiter", 3, "fourth"),
    ]
    assert {entry.mode for entry in found[1:]} == {"FOR UPDATE"}
    assert all(entry.seconds >= 0 for entry in found)
    assert len({entry.actor for entry in found}) == 4
    assert found[0].described.startswith("first pid ")
    assert found[0].described.endswith("(postgres@127.0.0.1), idle in transaction")


def test_row_locks_that_nobody_waits_for_are_told_by_their_table(begin):
    Stock.objects.using("postgresql").create(pk=7)
    begin("quiet", "BEGIN", "UPDATE testapp_stock SET pieces = 1", "SELECT count(*) FROM testapp_counter")
    begin("reader", "BEGIN", "SELECT * FROM testapp_stock", "SELECT 1")
    assert told(read(0)) == [("row", "testapp_stock", "holder", None, "quiet")], "who only reads is not told"


def test_shared_row_locks_are_told_as_such(begin):
    Stock.objects.using("postgresql").create(pk=7)
    begin("writer", "BEGIN", "UPDATE testapp_stock SET pieces = 1", "SELECT 1")
    begin("reader", "SELECT * FROM testapp_stock WHERE id = 7 FOR SHARE")
    assert [entry.mode for entry in read(1)] == ["exclusive", "FOR SHARE"]


def test_insert_that_waits_for_the_same_key_names_the_transaction(begin):
    insert = "INSERT INTO testapp_stock (id, pieces) VALUES (8, 0)"
    begin("first", "BEGIN", insert, "SELECT 1")
    begin("second", insert)
    holder, waiter, *others = read(1)
    assert holder.name == waiter.name
    assert holder.name.startswith("transaction ")
    assert [entry.owner["application_name"] for entry in (holder, waiter)] == ["first", "second"]
    assert sorted(told(others)) == [
        ("row", "testapp_stock", "holder", None, "first"),
        ("row", "testapp_stock", "holder", None, "second"),
    ]


def test_table_that_is_locked_as_a_whole_is_told(begin):
    begin("alter", "BEGIN", "LOCK TABLE testapp_stock IN ACCESS EXCLUSIVE MODE", "SELECT 1")
    begin("reader", "SELECT * FROM testapp_stock")
    holder, waiter = read(1)
    assert (holder.name, holder.mode, holder.owner["application_name"]) == (
        "table testapp_stock", "AccessExclusiveLock", "alter",
    )  # fmt: skip
    assert (waiter.name, waiter.mode) == ("table testapp_stock", "AccessShareLock")


def test_rows_of_a_table_that_is_locked_as_a_whole_are_told_by_their_place(begin):
    Stock.objects.using("postgresql").create(pk=7)
    begin("first", "BEGIN", "SELECT * FROM testapp_stock FOR UPDATE", "SELECT 1")
    begin("second", "UPDATE testapp_stock SET pieces = 1")
    read(1)
    begin("alter", "BEGIN", "LOCK TABLE testapp_stock")
    assert {entry.name.partition(" ")[0] for entry in read(2) if entry.kind == "row"} == {"testapp_stock", "table"}


@pytest.mark.parametrize(
    ("function", "key", "mode"),
    [
        ("pg_advisory_lock(42)", "42", "exclusive"),
        ("pg_advisory_lock(-9223372036854775808)", "-9223372036854775808", "exclusive"),
        ("pg_advisory_xact_lock(-1, 7)", "-1,7", "exclusive"),
        ("pg_advisory_lock_shared(9)", "9", "shared"),
    ],
)
def test_advisory_locks_are_told_by_their_keys(begin, function, key, mode):
    begin("first", "BEGIN", f"SELECT {function}", "SELECT 1")
    begin("second", f"SELECT {function.replace('_shared', '')}")
    holder, waiter = read(1)
    assert told([holder, waiter]) == [
        ("advisory", key, "holder", None, "first"),
        ("advisory", key, "waiter", 1, "second"),
    ]
    assert holder.mode == mode


def test_prepared_transaction_stands_in_the_way_without_a_session(begin):
    Stock.objects.using("postgresql").create(pk=7)
    begin("prepares", "BEGIN", "SELECT * FROM testapp_stock FOR UPDATE", "PREPARE TRANSACTION 'left'", "SELECT 1")
    try:
        begin("waits", "UPDATE testapp_stock SET pieces = 1")
        holder, waiter = read(1)
    finally:
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("ROLLBACK PREPARED 'left'")
    assert (holder.actor, holder.name) == ("pg:prepared left", "testapp_stock 7")
    assert holder.described == "prepared transaction left of postgres"
    assert holder.seconds >= 0
    assert waiter.owner["application_name"] == "waits"


def test_rows_with_keys_of_several_columns_and_names_that_need_quotes_are_told(begin):
    with connections["postgresql"].cursor() as cursor:
        cursor.execute('CREATE TABLE "Odd ""name" (b text, a int, PRIMARY KEY (b, a))')
        cursor.execute('INSERT INTO "Odd ""name" VALUES (\'x\', 1)')
    try:
        begin("first", "BEGIN", 'SELECT * FROM "Odd ""name" FOR UPDATE', "SELECT 1")
        begin("second", 'DELETE FROM "Odd ""name"')
        assert read(1)[0].name == '"Odd ""name" x,1'
        (second,) = (entry.owner["pid"] for entry in read(1) if entry.role == "waiter")
    finally:
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("SELECT pg_cancel_backend(%s)", [second])
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'first'")
            cursor.execute('DROP TABLE "Odd ""name"')


def test_without_privileges_less_is_told_and_nothing_fails(begin):
    with connections["postgresql"].cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS stranger")
        cursor.execute("CREATE ROLE stranger LOGIN")
    Stock.objects.using("postgresql").create(pk=7)
    begin("first", "BEGIN", "SELECT * FROM testapp_stock FOR UPDATE", "SELECT 1")
    begin("second", "UPDATE testapp_stock SET pieces = 1")
    holder, waiter = read(1, by=sqla_database(URLS["postgresql"].replace("postgres@", "stranger@")))
    assert (holder.role, waiter.role) == ("holder", "waiter")
    assert holder.name == waiter.name
    assert holder.name.startswith("testapp_stock (0,")
    assert holder.owner["state"] is None


def test_looking_takes_no_part_in_the_callers_transaction(begin):
    from django.db import transaction

    with transaction.atomic("postgresql"):
        Counter.objects.using("postgresql").create(name="mine")
        found = take_snapshot([], databases(["postgresql"]))
        assert [(entry.name, entry.role) for entry in found.entries] == [("testapp_counter", "holder")]
        transaction.set_rollback(True, using="postgresql")
    assert not Counter.objects.using("postgresql").exists()


def test_many_transactions_that_nobody_waits_for_are_counted_not_listed(begin, monkeypatch):
    from dlock_core.inspect import sessions

    monkeypatch.setattr(sessions, "MAX_UNCONTENDED_LOCKS", 1)
    Stock.objects.using("postgresql").create(pk=7)
    for name in ("a", "b", "c"):
        begin(name, "BEGIN", f"INSERT INTO testapp_counter (name, value) VALUES ('{name}', 0)", "SELECT 1")
    begin("d", "BEGIN", "SELECT * FROM testapp_stock FOR UPDATE", "SELECT 1")
    begin("e", "UPDATE testapp_stock SET pieces = 1")
    read(1)
    found = take_snapshot([], databases(["postgresql"]))
    assert [entry.name for entry in found.entries] == ["testapp_stock 7", "testapp_stock 7", "testapp_counter"]
    assert found.left_out == found.as_dict()["left_out"] == {"postgresql": 2}


def test_who_only_reads_a_table_is_not_in_the_way_of_a_lock_that_lets_it_read(begin):
    writer = begin("writer", "BEGIN", "UPDATE testapp_stock SET pieces = 1", "SELECT 1")
    begin("reader", "BEGIN", "SELECT * FROM testapp_stock", "SELECT 1")
    sharing = begin("sharing", "BEGIN", "LOCK TABLE testapp_stock IN SHARE MODE")
    assert edges(read(1)) == [(sharing, writer)]


def test_who_wait_for_the_same_transaction_do_not_wait_for_each_other(begin):
    insert = "INSERT INTO testapp_stock (id, pieces) VALUES (8, 0)"
    first = begin("first", "BEGIN", insert, "SELECT 1")
    others = [begin(name, insert) for name in ("second", "third")]
    assert edges(read(2)) == sorted((other, first) for other in others)


def test_in_the_way_are_the_holder_and_the_last_before_one_in_the_queue(begin):
    Stock.objects.using("postgresql").create(pk=7)
    query = "SELECT * FROM testapp_stock WHERE id = 7 FOR UPDATE"
    first = begin("first", "BEGIN", query, "SELECT 1")
    waiting = [begin("second", query)]
    for name in ("third", "fourth"):
        read(len(waiting))
        waiting.append(begin(name, query))
    second, third, fourth = waiting
    in_queue = [(third, second), (fourth, third)]
    assert edges(read(3)) == sorted([(second, first), (third, first), (fourth, first), *in_queue])


def test_table_that_lets_nobody_read_is_asked_for_a_key_once_only(begin, monkeypatch):
    asked, look_up = [], postgresql._primary_key
    Stock.objects.using("postgresql").bulk_create(Stock(pk=pk) for pk in (7, 8, 9))
    begin("holder", "BEGIN", "SELECT * FROM testapp_stock FOR UPDATE", "SELECT 1")
    for pk in (7, 8, 9):
        begin("waiter", f"SELECT * FROM testapp_stock WHERE id = {pk} FOR UPDATE")
    read(3)
    begin("migration", "BEGIN", "LOCK TABLE testapp_stock")
    read(4)
    monkeypatch.setattr(postgresql, "_primary_key", lambda *of: asked.append(of) or look_up(*of))
    waiters = [entry.name for entry in read(4) if entry.role == "waiter"]
    assert sum(name.startswith("testapp_stock (0,") for name in waiters) == 3
    assert len(asked) == 1


def edges(entries):
    return sorted((wait.waiter.owner["pid"], wait.blocker.owner["pid"]) for wait in waits(entries))
