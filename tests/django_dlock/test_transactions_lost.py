"""django_dlock.transactions keeps its promises when a connection loss or an interrupt comes around COMMIT."""

from collections.abc import Callable, Iterator

import pytest
from django.db import Error, InterfaceError, OperationalError, ProgrammingError, connections, transaction
from django.db.transaction import atomic

from django_dlock.connections import in_transaction, on_rollback
from dlock_core.transactions.tie import Outcome
from tests.django_dlock import sessions
from tests.django_dlock.sessions import add, committed, held_in_commit, kill_session, killed_in_commit
from tests.django_dlock.tracking import on_end
from tests.proxy import Proxy

COMMITTED, ROLLED_BACK, UNKNOWN = Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.UNKNOWN

servers_only = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@pytest.fixture
def heard() -> list[object]:
    """What the callbacks have recorded, in order."""
    return []


@pytest.fixture
def network(database) -> Iterator[Proxy]:
    """The proxy that this thread's connection to the database goes through."""
    settings = connections.settings[database]
    port = settings["PORT"]
    with Proxy(port) as proxy:
        settings["PORT"] = proxy.port
        try:
            yield proxy
        finally:
            settings["PORT"] = port
            connections[database].close()


@pytest.fixture
def next_transaction_is_sound(database, heard) -> Iterator[None]:
    """After the fault the thread's connection works, and no earlier callback is called any more."""
    yield
    before = list(heard)
    with atomic(database):
        on_end(heard.append, using=database)
        add(database, "next")
    assert heard == [*before, COMMITTED]
    assert "next" in committed(database)


@servers_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_session_killed_before_a_statement_is_rolled_back(database, heard):
    with pytest.raises(Error), atomic(database):
        on_end(heard.append, using=database)
        on_rollback(lambda: heard.append("undone"), using=database)
        add(database, "a")
        kill_session(database)
        add(database, "b")
    assert heard == ["undone", ROLLED_BACK]
    assert committed(database) == set()


@servers_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_session_killed_just_before_commit_is_unknown_because_the_answer_to_commit_is_missing(database, heard):
    with pytest.raises(OperationalError), atomic(database):
        transaction.on_commit(lambda: heard.append("never"), using=database)
        on_rollback(lambda: heard.append("never"), using=database)
        on_end(heard.append, using=database, before_commit=lambda: kill_session(database))
        add(database, "a")
    assert heard == [UNKNOWN]
    assert committed(database) == set()


@postgresql_only
def test_loss_that_the_driver_has_noticed_before_commit_is_rolled_back(database, heard):
    with pytest.raises((OperationalError, InterfaceError)), atomic(database):  # The second is psycopg2's.
        on_end(heard.append, using=database)
        add(database, "a")
        kill_session(database)
        with pytest.raises(OperationalError):
            sessions.rows(connections[database], "SELECT 1")
    assert heard == [ROLLED_BACK]


@servers_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_commit_that_never_arrives_is_unknown(database, network, heard):
    with pytest.raises(OperationalError), atomic(database):
        on_end(heard.append, using=database, before_commit=lambda: network.cut_request(matching=b"COMMIT"))
        add(database, "a")
    assert heard == [UNKNOWN]
    assert committed(database) == set()


@servers_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_commit_whose_answer_is_lost_is_unknown(database, network, heard):
    with pytest.raises(OperationalError), atomic(database):
        on_end(heard.append, using=database, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
        add(database, "a")
    assert heard == [UNKNOWN]
    assert committed(database) == {"a"}


@servers_only
def test_lost_commit_of_a_manual_transaction_is_unknown(database, network, heard):
    transaction.set_autocommit(False, using=database)
    on_end(heard.append, using=database, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
    add(database, "a")
    with pytest.raises(OperationalError):
        transaction.commit(using=database)
    with pytest.raises(Error):
        transaction.rollback(using=database)
    assert heard == [UNKNOWN]
    connections[database].close()
    assert heard == [UNKNOWN]
    assert committed(database) == {"a"}


@servers_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_network_lost_before_the_rollback_is_rolled_back(database, network, heard):
    with pytest.raises(ValueError, match="user"), atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
        network.cut()
        raise ValueError("user")
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


@postgresql_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_session_terminated_inside_commit_is_unknown(database, heard):
    with held_in_commit(database, sessions.terminate_held), pytest.raises(OperationalError), atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
    assert heard == [UNKNOWN]
    assert committed(database) == set()


@postgresql_only
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_ctrl_c_inside_commit_is_unknown(database, heard):
    with held_in_commit(database, sessions.interrupt), pytest.raises(KeyboardInterrupt), atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
    assert heard == [UNKNOWN]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, GeneratorExit, InterfaceError, ValueError])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("next_transaction_is_sound")
def test_interrupt_inside_commit_is_unknown_and_commits_nothing_afterwards(database, heard, when, interrupt):
    """The interrupt is raised where the driver would raise it: before the server gets COMMIT, or after it committed."""
    interrupt_once(database, "_commit", when, interrupt)
    with pytest.raises(interrupt), atomic(database):
        transaction.on_commit(lambda: heard.append("never"), using=database)
        on_end(lambda outcome: heard.extend([outcome, in_transaction(database)]), using=database)
        add(database, "a")
    assert heard == [UNKNOWN, False]
    assert committed(database) == (set() if when == "before" else {"a"})


@pytest.mark.usefixtures("next_transaction_is_sound")
def test_interrupt_inside_rollback_commits_nothing_afterwards(database, heard):
    interrupt_once(database, "_rollback", "before", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
        raise ValueError
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


def interrupt_once(alias: str, method: str, when: str, error: type[BaseException]) -> None:
    """Have a method of a fresh connection raise once, before or after its work; the connection goes with the test."""
    connections[alias].close()
    del connections[alias]
    connection = connections[alias]
    work: Callable[[], None] = getattr(connection, method)
    pending = [error]

    def interrupted() -> None:
        if pending and when == "before":
            raise pending.pop()
        work()
        if pending:
            raise pending.pop()

    vars(connection)[method] = interrupted


# SQLite that cannot commit at the moment


@pytest.fixture
def busy(default, use_database, monkeypatch, tmp_path) -> Iterator[str]:
    """The alias of an SQLite file on which a reader makes writers fail at COMMIT."""
    options = {"timeout": 0, "init_command": "PRAGMA journal_mode=DELETE"}
    settings = {**connections.settings["default"], "NAME": tmp_path / "busy.sqlite3", "OPTIONS": options}
    monkeypatch.setitem(connections.settings, "busy", settings)
    sessions.rows(
        connections["busy"], "CREATE TABLE testapp_counter (id INTEGER PRIMARY KEY, name TEXT, value INTEGER)"
    )
    yield "busy"
    connections["busy"].close()
    del connections["busy"]


@pytest.fixture
def by_hand(database) -> Iterator[None]:
    transaction.set_autocommit(False, using=database)
    yield
    connections[database].close()


mariadb_only = pytest.mark.parametrize("database", ["mariadb"], indirect=True)


@mariadb_only
@pytest.mark.usefixtures("by_hand")
def test_commit_by_hand_that_was_killed_is_the_end_of_its_transaction(database, heard):
    on_end(heard.append, using=database)
    add(database, "a")
    with killed_in_commit(database), pytest.raises(OperationalError):
        transaction.commit(using=database)
    assert heard == [UNKNOWN]
    add(database, "b")
    transaction.commit(using=database)
    assert heard == [UNKNOWN]
    assert committed(database) == {"b"}


@mariadb_only
@pytest.mark.usefixtures("by_hand")
def test_commit_by_hand_that_could_not_be_sent_may_be_tried_again(database, heard):
    on_end(heard.append, using=database)
    add(database, "a")
    cursor = connections[database].connection.cursor()
    cursor.execute("SELECT 1; SELECT 2")
    with pytest.raises(ProgrammingError, match="out of sync"):
        transaction.commit(using=database)
    assert heard == []
    cursor.close()  # reads the second result
    transaction.commit(using=database)
    assert heard == [COMMITTED]
    assert committed(database) == {"a"}


def test_commit_refused_by_a_busy_sqlite_is_rolled_back(busy, heard):
    with sessions.second_session(busy) as reader:
        reader.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        sessions.rows(reader, "SELECT * FROM testapp_counter")
        with pytest.raises(OperationalError, match="locked"), atomic(busy):
            on_end(heard.append, using=busy)
            add(busy, "a")
    assert heard == [ROLLED_BACK]
    assert committed(busy) == set()


def test_commit_refused_by_a_busy_sqlite_may_be_tried_again_by_hand(busy, heard):
    transaction.set_autocommit(False, using=busy)
    with sessions.second_session(busy) as reader:
        reader.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        sessions.rows(reader, "SELECT * FROM testapp_counter")
        on_end(heard.append, using=busy)
        add(busy, "a")
        with pytest.raises(OperationalError, match="locked"):
            transaction.commit(using=busy)
    assert heard == []
    transaction.commit(using=busy)
    assert heard == [COMMITTED]
    assert committed(busy) == {"a"}
