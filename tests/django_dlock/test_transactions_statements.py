"""django_dlock.transactions keeps its promises about hooks before statements."""

import threading
from collections.abc import Callable

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.transaction import atomic

from django_dlock import connections as known
from django_dlock import tracker
from django_dlock.connections import restore_on_rollback
from tests.django_dlock.sessions import add, committed, rows
from tests.django_dlock.tracking import before_statements, transaction_key
from tests.testapp.models import Counter


@pytest.fixture
def heard(database) -> list[tuple[str, bool]]:
    """What a hook on the database has received: each statement, and whether it is in a transaction."""
    told: list[tuple[str, bool]] = []
    connections[database].ensure_connection()
    before_statements(lambda _, sql, inside: told.append((sql, inside)), using=database)
    return told


def test_hook_is_called_before_every_statement_of_the_user(database, heard):
    connection = connections[database]
    rows(connection, "SELECT 1")
    with atomic(database):
        rows(connection, "SELECT 2")
        with connection.cursor() as cursor:
            cursor.executemany("UPDATE testapp_counter SET value = %s WHERE id = %s", [(1, 1), (2, 2)])
    assert [inside for _, inside in heard] == [False, True, True]
    assert [sql.split()[0] for sql, _ in heard] == ["SELECT", "SELECT", "UPDATE"]


def test_hook_sees_a_manual_transaction(database, heard):
    transaction.set_autocommit(False, using=database)
    rows(connections[database], "SELECT 1")
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)
    assert heard == [("SELECT 1", True)]


def test_hook_comes_before_a_savepoint_but_not_before_its_end(database, heard):
    with atomic(database):
        with atomic(database):
            pass
        with pytest.raises(ZeroDivisionError), atomic(database):
            raise ZeroDivisionError
    assert [(sql.split()[0], inside) for sql, inside in heard] == [("SAVEPOINT", True)] * 2


def test_hook_that_queries_lets_a_failed_statement_be_undone_by_its_savepoint(database):
    before_statements(lambda connection, *_: rows(connection, "SELECT 1"), using=database)
    with atomic(database):
        add(database, "a")
        with pytest.raises(DatabaseError), atomic(database):
            rows(connections[database], "SELECT no_such_column FROM testapp_counter")
        add(database, "b")
    assert committed(database) == {"a", "b"}


def test_hook_is_not_called_for_its_own_statements_nor_for_another_hooks(database):
    said: list[str] = []

    def asking(name: str) -> Callable[..., None]:
        def hook(connection, sql, inside) -> None:
            said.append(f"{name} {sql}")
            rows(connection, f"SELECT '{name}'")

        return hook

    connections[database].ensure_connection()
    before_statements(asking("first"), using=database)
    before_statements(asking("second"), using=database)
    rows(connections[database], "SELECT 1")
    rows(connections[database], "SELECT 2")
    assert said == ["first SELECT 1", "second SELECT 1", "first SELECT 2", "second SELECT 2"]


def test_hook_installed_twice_is_called_once(database):
    said: list[str] = []

    def hook(connection, sql, inside) -> None:
        said.append(sql)

    connections[database].ensure_connection()
    before_statements(hook, using=database)
    before_statements(hook, using=database)
    rows(connections[database], "SELECT 1")
    assert said == ["SELECT 1"]


def test_hook_survives_close_and_reconnect(database, heard):
    connections[database].close()
    rows(connections[database], "SELECT 1")
    assert ("SELECT 1", False) in heard


def test_hook_installed_inside_an_execute_wrapper_outlives_it_and_the_wrapper_does_not(database):
    said: list[str] = []

    def wrapper(execute, *args):
        said.append("wrapper")
        return execute(*args)

    connections[database].ensure_connection()
    with connections[database].execute_wrapper(wrapper):
        before_statements(lambda *_: said.append("hook"), using=database)
    rows(connections[database], "SELECT 1")
    assert said == ["hook"]


def test_statement_that_a_hook_refuses_is_not_sent(database):
    def refuse(connection, sql, inside) -> None:
        if sql.startswith("INSERT"):
            raise DatabaseError("no writes here")

    before_statements(refuse, using=database)
    with pytest.raises(DatabaseError, match="no writes here"):
        add(database, "a")
    assert committed(database) == set()
    with pytest.raises(DatabaseError, match="no writes here"):
        add(database, "a")


def test_hook_can_tell_transactions_apart_by_their_key(database):
    keys: list[object] = []
    before_statements(lambda *_: keys.append(transaction_key(database)), using=database)
    for _ in range(2):
        with atomic(database):
            list(Counter.objects.using(database))
            list(Counter.objects.using(database))
    first, again, second, _ = keys[-4:]
    assert first is again
    assert second is not first


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_hook_gets_the_text_of_statements_that_are_no_strings(database, heard):
    sql = pytest.importorskip("django.db.backends.postgresql.psycopg_any").sql
    rows(connections[database], sql.SQL("SELECT {}").format(sql.Literal(1)))
    rows(connections[database], b"SELECT 2")
    assert heard == [("SELECT 1", False), ("SELECT 2", False)]


# A process without locks


@pytest.fixture
def without_locks(database, monkeypatch):
    """A new connection, as in a process that has not loaded the code of locks."""
    monkeypatch.setattr(known, "_visitors", [])
    connections[database].close()
    former = connections[database]
    connections[database] = former.copy()
    yield connections[database]
    connections[database].close()
    connections[database] = former


def test_process_without_locks_sends_its_statements_past_us(without_locks):
    rows(without_locks, "SELECT 1")
    assert without_locks.execute_wrappers == []
    known.listen_to_all()
    assert len(without_locks.execute_wrappers) == 1


def test_connection_that_is_opened_while_all_are_visited_is_visited_too(database, without_locks):
    rows(without_locks, "SELECT 1")
    visited = []

    def visit(connection) -> None:
        visited.append(connection)
        if len(visited) == 1:  # another thread may connect at any moment
            thread = threading.Thread(target=connect)
            thread.start()
            thread.join()

    def connect() -> None:
        rows(connections[database], "SELECT 1")
        opened.append(connections[database])
        connections[database].close()

    opened = []
    known.for_each_connection(visit)
    assert without_locks in visited
    assert opened[0] in visited


def test_two_threads_that_ask_at_once_get_the_same_tracker(without_locks, monkeypatch):
    found = []
    second = threading.Thread(target=lambda: found.append(tracker.tracker_for(without_locks)))

    def interrupted(_: str) -> None:
        if second.ident is None:
            second.start()
            second.join(0.2)  # without a guard, it would make its own

    monkeypatch.setattr(tracker, "warn_unless_known", interrupted)
    first = tracker.tracker_for(without_locks)
    second.join()
    assert found == [first]
    assert tracker.tracker_for(without_locks) is first


def test_process_without_locks_restores_values_after_a_savepoint_that_was_made_by_hand(database, without_locks):
    instance = Counter()
    vars(instance)["version"] = 2
    with atomic(database):
        restore_on_rollback(instance, {"version": 1}, using=database)
        rows(without_locks, "SAVEPOINT ours")
        instance.version = 3
        restore_on_rollback(instance, {"version": 2}, using=database)
        rows(without_locks, "ROLLBACK TO SAVEPOINT ours")
        assert instance.version == 2
