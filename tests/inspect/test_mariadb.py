"""The inspector reads MariaDB while real sessions wait."""

import contextlib
import threading

import MySQLdb
import pytest
from django.conf import settings

from django_dlock.inspect import databases
from dlock_core.errors import BackendUnavailable
from dlock_core.inspect import mysql
from sqla_dlock.inspect import database as sqla_database
from tests.inspect.parties import URLS
from tests.mysql_server import MYSQLD
from tests.testapp.models import Counter, Stock
from tests.waiting import INNODB_REFRESH_S, until

pytestmark = pytest.mark.parametrize("database", ["mariadb"], indirect=True)
WITHIN = 60.0


@pytest.fixture
def session(database):
    """Yield a function that sends statements, the last in a thread: `session("BEGIN", then="SELECT …")`."""
    with contextlib.ExitStack() as stack:

        def session(*statements, then=None):
            connection = MySQLdb.connect(
                host="127.0.0.1", port=settings.MARIADB_PORT, user="root", database="dlock", autocommit=True
            )
            stack.callback(connection.close)
            number = connection.thread_id()
            for statement in statements:
                connection.query(statement)
                connection.store_result()
            if then is not None:
                thread = threading.Thread(target=send, args=(connection, then))
                thread.start()
                stack.callback(thread.join)
                stack.callback(kill, number)
            return number

        yield session


def send(connection, statement):
    with contextlib.suppress(MySQLdb.Error):
        connection.query(statement)
        connection.store_result()


def kill(number):
    with (
        contextlib.closing(MySQLdb.connect(host="127.0.0.1", port=settings.MARIADB_PORT, user="root")) as connection,
        contextlib.suppress(MySQLdb.Error),
    ):
        connection.query(f"KILL {number}")


def read(expected, least=0):
    """Read until as many sessions wait as expected, and return the entries."""
    (database,) = databases(["mariadb"])

    def complete():
        entries = mysql.locks(database).entries
        return (
            entries if sum(entry.role == "waiter" for entry in entries) == expected and len(entries) >= least else None
        )

    with contextlib.closing(database):
        return until(complete, every=INNODB_REFRESH_S)


def told(entries):
    return [(entry.kind, entry.name, entry.role, entry.position, entry.owner["pid"]) for entry in entries]


def test_row_that_is_waited_for_is_told_by_its_key_with_its_queue_in_order(session):
    Stock.objects.using("mariadb").create(pk=7)
    query = "SELECT * FROM testapp_stock WHERE id = 7 FOR UPDATE"
    pids = [session("BEGIN", query)]
    for place in (1, 2):
        pids.append(session("BEGIN", then=query))
        found = read(place)
    assert told(found) == [
        ("row", "testapp_stock 7", "holder", None, pids[0]),
        ("row", "testapp_stock 7", "waiter", 1, pids[1]),
        ("row", "testapp_stock 7", "waiter", 2, pids[2]),
    ]
    assert {entry.mode for entry in found} == {"exclusive"}
    assert all(0 <= (entry.seconds or 0.0) < WITHIN for entry in found)
    assert found[0].described == f"session {pids[0]} (root@127.0.0.1), idle in transaction"
    assert found[1].described == f"session {pids[1]} (root@127.0.0.1), active"


def test_entry_of_an_index_and_a_shared_lock_are_told_as_such(session):
    Counter.objects.using("mariadb").create(pk=3, name="a b")
    session("BEGIN", "SELECT * FROM testapp_counter WHERE name = 'a b' FOR UPDATE")
    session("BEGIN", then="SELECT * FROM testapp_counter WHERE name = 'a b' LOCK IN SHARE MODE")
    holder, waiter = read(1)
    assert waiter.mode == "shared"
    assert holder.name == waiter.name
    assert waiter.name.startswith("testapp_counter name 'a b'")


def test_row_locks_that_nobody_waits_for_are_counted(session):
    Stock.objects.using("mariadb").create(pk=7)
    number = session("BEGIN", "UPDATE testapp_stock SET pieces = 1 WHERE id = 7")
    session("BEGIN", "SELECT * FROM testapp_stock")
    assert told(read(0, least=1)) == [("row", f"1 row of session {number}", "holder", None, number)], (
        "who only reads is not told"
    )


@pytest.mark.parametrize("name", ["order:42", "it's", "50%", "Ä"])
def test_user_lock_that_is_waited_for_is_told_by_its_name(session, name):
    quoted = name.replace("'", "''")
    first = session("SET NAMES utf8mb4", f"SELECT GET_LOCK('{quoted}', 0)")
    second = session("SET NAMES utf8mb4", then=f"SELECT GET_LOCK('{quoted}', 50)")
    name = name.lower() if MYSQLD else name  # MySQL's names are in lower case
    assert told(read(1)) == [("advisory", name, "holder", None, first), ("advisory", name, "waiter", 1, second)]


def test_without_the_privilege_it_says_so(session):
    session("CREATE USER IF NOT EXISTS visitor@'%'", "GRANT SELECT ON dlock.* TO visitor@'%'")
    visitor = sqla_database(URLS["mariadb"].replace("root@", "visitor@"))
    with (
        contextlib.closing(visitor),
        pytest.raises(BackendUnavailable, match="data_lock_waits" if MYSQLD else "PROCESS"),
    ):
        mysql.locks(visitor)
