"""The promises of sqla_dlock.transactions when the connection is lost, or an interrupt comes, around COMMIT."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from dlock_core.transactions.tie import Outcome
from sqla_dlock import commit_status
from sqla_dlock.connections import ConnectionTracker, note_xid, tracker_of
from sqla_dlock.transactions import before_work, on_end
from tests.proxy import Proxy
from tests.sqla_dlock.lost import held_in_commit, interrupt_once, port_of, terminate_held, url_through
from tests.sqla_dlock.sessions import committed, kill_session, run_sql, session_id

COMMITTED, ROLLED_BACK, UNKNOWN = Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.UNKNOWN
SERVERS = ["postgresql", "psycopg2", "mariadb", "pymysql"]

servers_only = pytest.mark.parametrize("name", SERVERS)
postgresql_only = pytest.mark.parametrize("name", ["postgresql", "psycopg2"])
every_engine = pytest.mark.parametrize("name", ["sqlite", *SERVERS])
endings = pytest.mark.parametrize("ending", ["rollback", "close"])


@pytest.fixture
def heard() -> list[Any]:
    """What the callbacks have reported, in order."""
    return []


@pytest.fixture
def sound(name: str, make_engine: Callable[..., Engine]) -> Engine:
    """An engine that does not go through `network`."""
    return make_engine(name)


@pytest.fixture
def session(name: str, sound: Engine, heard: list[Any]) -> Iterator[Session]:
    """A session of `sound`; after the fault, its engine still works, and no outcome is reported late."""
    with Session(sound) as session:
        yield session
    before = list(heard)
    with Session(session.get_bind()) as after:
        add(after, "next")
        on_end(after, heard.append)
        after.commit()
    assert heard == [*before, COMMITTED]
    assert "next" in names(sound)


@pytest.fixture
def network(name: str, sound: Engine) -> Iterator[Proxy]:
    """The network between the session `far` and the server."""
    with Proxy(port_of(name)) as proxy:
        yield proxy


@pytest.fixture
def far(name: str, network: Proxy) -> Iterator[Session]:
    """A session behind the network."""
    engine = create_engine(url_through(name, network.port), poolclass=NullPool)
    session = Session(engine)
    yield session
    network.forward()
    session.close()
    engine.dispose()


def add(session: Session, name: str) -> None:
    session.execute(text("INSERT INTO counter (name, value) VALUES (:name, 0)"), {"name": name})


def names(engine: Engine) -> set[str]:
    return {name for (name,) in committed(engine, "SELECT name FROM counter")}


def note(session: Session) -> None:
    """Note the transaction's number, as an admit does on PostgreSQL."""
    before_work(session, lambda connection: note_xid(connection, connection.scalar(XID)))


XID = text("SELECT CAST(pg_current_xact_id() AS text)")


# Before COMMIT


@servers_only
@endings
def test_session_killed_before_a_statement_is_rolled_back(sound, session, heard, ending):
    add(session, "a")
    on_end(session, heard.append)
    kill_session(sound, session_id(session.connection()))
    with pytest.raises(DBAPIError):
        add(session, "b")
    with pytest.raises(PendingRollbackError):
        add(session, "c")
    getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@servers_only
@pytest.mark.parametrize("ending", ["rollback", "close", "reset", "invalidate"])
def test_session_killed_in_silence_is_rolled_back_when_it_ends(sound, session, heard, ending):
    """SQLAlchemy never reports the end of the transaction when close() is the first to notice."""
    add(session, "a")
    on_end(session, heard.append)
    kill_session(sound, session_id(session.connection()))
    with contextlib.suppress(DBAPIError):
        getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@servers_only
def test_session_killed_in_a_block_is_rolled_back(sound, session, heard):
    with pytest.raises(DBAPIError), session.begin():
        add(session, "a")
        on_end(session, heard.append)
        kill_session(sound, session_id(session.connection()))
        add(session, "b")
    assert heard == [ROLLED_BACK]


@servers_only
def test_loss_that_was_noticed_before_commit_is_rolled_back(sound, session, heard):
    add(session, "a")
    on_end(session, heard.append)
    kill_session(sound, session_id(session.connection()))
    with pytest.raises(DBAPIError):
        add(session, "b")
    with pytest.raises(PendingRollbackError):
        session.commit()
    session.close()
    assert heard == [ROLLED_BACK]


@servers_only
@endings
def test_network_lost_before_the_rollback_is_rolled_back(sound, network, far, heard, ending):
    add(far, "a")
    on_end(far, heard.append)
    network.cut()
    with contextlib.suppress(DBAPIError):
        getattr(far, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


# Inside COMMIT


@servers_only
@endings
def test_session_killed_just_before_commit_is_unknown_because_the_answer_to_commit_is_missing(
    sound, session, heard, ending
):
    add(session, "a")
    number = session_id(session.connection())
    on_end(session, heard.append, before_commit=lambda: kill_session(sound, number))
    with pytest.raises(OperationalError):
        session.commit()
    getattr(session, ending)()
    assert heard == [UNKNOWN]
    assert names(sound) == set()


@servers_only
@endings
def test_commit_that_never_arrives_is_unknown(sound, network, far, heard, ending):
    add(far, "a")
    on_end(far, heard.append, before_commit=lambda: network.cut_request(matching=b"COMMIT"))
    with pytest.raises(OperationalError):
        far.commit()
    getattr(far, ending)()
    assert heard == [UNKNOWN]
    assert names(sound) == set()


@servers_only
@endings
def test_commit_whose_answer_is_lost_is_unknown(sound, network, far, heard, ending):
    add(far, "a")
    on_end(far, heard.append, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
    with pytest.raises(OperationalError):
        far.commit()
    getattr(far, ending)()
    assert heard == [UNKNOWN]
    assert names(sound) == {"a"}


@servers_only
def test_lost_commit_of_a_joined_connection_is_unknown_at_once(sound, network, far, heard):
    with far.get_bind().connect() as connection:
        connection.begin()
        session = Session(connection)
        add(session, "a")
        on_end(session, heard.append, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
        session.commit()
        with pytest.raises(OperationalError):
            connection.commit()
        assert heard == [UNKNOWN]
    assert heard == [UNKNOWN]


@postgresql_only
def test_session_terminated_inside_commit_is_unknown(sound, session, heard):
    add_committing(session, heard)
    with held_in_commit(sound, terminate_held), pytest.raises(OperationalError):
        session.commit()
    session.close()
    assert heard == [UNKNOWN]
    assert names(sound) == set()


@postgresql_only
def test_ctrl_c_inside_commit_is_unknown(sound, session, heard):
    add_committing(session, heard)
    with held_in_commit(sound, interrupt), pytest.raises(KeyboardInterrupt):
        session.commit()
    session.close()
    assert heard == [UNKNOWN]


def add_committing(session: Session, heard: list[Any]) -> None:
    session.begin()
    on_end(session, heard.append)
    event.listen(session, "before_commit", lambda session: add(session, "a"))


def interrupt(_: object) -> None:
    """Do what Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


@every_engine
@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
@pytest.mark.parametrize("when", ["before", "after"])
@endings
def test_interrupt_inside_commit_is_unknown_and_commits_nothing_afterwards(sound, session, heard, when, error, ending):
    """The interrupt is put where the driver would raise it: before the server gets COMMIT, or after it has committed."""
    add(session, "a")
    on_end(session, heard.append)
    interrupt_once(sound, "do_commit", when, error)
    with pytest.raises(error):
        session.commit()
    getattr(session, ending)()
    assert heard == [UNKNOWN]
    assert names(sound) == (set() if when == "before" else {"a"})


@every_engine
@endings
def test_interrupt_inside_rollback_commits_nothing_afterwards(sound, session, heard, ending):
    add(session, "a")
    on_end(session, heard.append)
    interrupt_once(sound, "do_rollback", "before", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


# PostgreSQL can be asked


@postgresql_only
@endings
def test_commit_that_never_arrives_is_rolled_back_when_postgresql_can_be_asked(sound, network, far, heard, ending):
    note(far)
    add(far, "a")
    on_end(far, heard.append, before_commit=lambda: network.cut_request(matching=b"COMMIT"))
    with pytest.raises(OperationalError):
        far.commit()
    getattr(far, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@postgresql_only
@endings
def test_commit_whose_answer_is_lost_is_committed_when_postgresql_can_be_asked(sound, network, far, heard, ending):
    note(far)
    add(far, "a")
    on_end(far, heard.append, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
    with pytest.raises(OperationalError):
        far.commit()
    getattr(far, ending)()
    assert heard == [COMMITTED]
    assert names(sound) == {"a"}


@postgresql_only
def test_session_terminated_inside_commit_is_rolled_back_when_postgresql_can_be_asked(sound, session, heard):
    note(session)
    add_committing(session, heard)
    session.connection()
    with held_in_commit(sound, terminate_held), pytest.raises(OperationalError):
        session.commit()
    session.close()
    assert heard == [ROLLED_BACK]


@postgresql_only
def test_commit_still_at_work_is_waited_for(sound, network, far, heard):
    """The connection is cut while COMMIT stands still; COMMIT goes on after its outcome was asked for."""
    asked = threading.Event()

    def cut_and_wait(_: object) -> None:
        network.cut()
        assert asked.wait(30)

    @event.listens_for(far.get_bind(), "after_cursor_execute")
    def sent(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "pg_sleep" in statement:
            asked.set()

    note(far)
    add_committing(far, heard)
    far.connection()
    with held_in_commit(sound, cut_and_wait), pytest.raises(OperationalError):
        far.commit()
    far.close()
    assert heard == [COMMITTED]
    assert names(sound) == {"a"}


@postgresql_only
def test_server_that_cannot_be_asked_leaves_it_unknown(sound, network, far, heard):
    note(far)
    add(far, "a")
    on_end(far, heard.append, before_commit=network.refuse)
    with pytest.raises(OperationalError):
        far.commit()
    far.close()
    assert heard == [UNKNOWN]


@postgresql_only
def test_server_that_does_not_answer_in_time_leaves_it_unknown(sound, network, far, heard, monkeypatch):
    monkeypatch.setattr(commit_status, "MAX_STATUS_WAIT_S", 0.2)
    note(far)
    add(far, "a")
    on_end(far, heard.append)
    fault = network.cut_reply(matching=b"COMMIT")
    event.listen(far.get_bind(), "do_connect", lambda *_: network.deaf())
    with pytest.raises(OperationalError):
        far.commit()
    assert fault.happened
    far.close()
    assert heard == [UNKNOWN]
    network.forward()
    for thread in threading.enumerate():
        if thread.name == "dlock-commit-status":
            thread.join(30)


def interrupted(*_: object) -> None:
    """Stands for a signal handler that raises."""
    raise KeyboardInterrupt


def in_the_query(_: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_status, "outcome_of", interrupted)


def in_the_rollback(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = tracker_of(session.connection())
    assert tracker is not None
    monkeypatch.setattr(tracker.sqlalchemy, "_rollback_impl", interrupted)


@postgresql_only
@pytest.mark.parametrize("interrupt_it", [in_the_query, in_the_rollback])
def test_commit_without_a_reply_stays_unknown_when_an_interrupt_comes_after_it(
    sound, network, far, heard, monkeypatch, interrupt_it
):
    note(far)
    add(far, "a")
    on_end(far, heard.append)
    interrupt_it(far, monkeypatch)
    network.cut_reply(matching=b"COMMIT")
    with pytest.raises(KeyboardInterrupt):
        far.commit()
    far.close()
    assert heard == [UNKNOWN]
    assert names(sound) == {"a"}


class Refusal(Exception):
    """What a check of the transaction raises."""


def refused() -> None:
    raise Refusal


@every_engine
def test_outcome_that_interrupts_kept_from_being_told_is_not_the_next_transactions(sound, heard, monkeypatch):
    end, interrupts = ConnectionTracker._end, iter(range(3))

    def interrupted_end(self: ConnectionTracker, *args: Any, **more: Any) -> None:
        if next(interrupts, None) is not None:
            raise KeyboardInterrupt
        end(self, *args, **more)

    monkeypatch.setattr(ConnectionTracker, "_end", interrupted_end)
    with sound.connect() as connection:
        first = Session(connection)
        add(first, "a")
        on_end(first, lambda outcome: heard.append(("first", outcome)))
        with pytest.raises(KeyboardInterrupt):
            first.commit()
        with contextlib.suppress(PendingRollbackError):
            first.close()
        connection.rollback()
        second = Session(connection)
        add(second, "b")
        on_end(second, lambda outcome: heard.append(("second", outcome)), before_commit=refused)
        with pytest.raises(Refusal):
            second.commit()
        second.close()
    assert heard == [("first", COMMITTED), ("second", ROLLED_BACK)]
    assert names(sound) == {"a"}


@postgresql_only
def test_number_of_another_transaction_is_not_used(sound, network, far, heard):
    stop = before_work(far, lambda connection: note_xid(connection, connection.scalar(XID)))
    add(far, "a")
    far.commit()
    stop()
    add(far, "b")
    on_end(far, heard.append, before_commit=lambda: network.cut_reply(matching=b"COMMIT"))
    with pytest.raises(OperationalError):
        far.commit()
    far.close()
    assert heard == [UNKNOWN]


# Two-phase commit


@pytest.mark.parametrize("name", ["mariadb", "pymysql"])
@pytest.mark.parametrize("phase", [b"XA PREPARE", b"XA COMMIT"])
def test_twophase_commit_that_is_lost_is_unknown(sound, network, far, heard, phase):
    with Session(far.get_bind(), twophase=True) as session:
        add(session, "a")
        on_end(session, heard.append)
        network.cut_reply(matching=phase)
        with pytest.raises(DBAPIError):
            session.commit()
    assert heard == [UNKNOWN]
    if phase == b"XA PREPARE":
        for row in committed(sound, "XA RECOVER"):
            name = row[3] if isinstance(row[3], str) else row[3].decode()  # bytes of MariaDB
            run_sql("mariadb", f"XA ROLLBACK '{name}'")


# SQLite that cannot commit now


def test_commit_refused_by_a_busy_sqlite_is_rolled_back_and_leaves_the_pool_sound(tmp_path, heard):
    engine = create_engine(f"sqlite:///{tmp_path}/busy.sqlite3", connect_args={"timeout": 0})
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (id INTEGER PRIMARY KEY, name TEXT, value INTEGER)")
    with engine.connect() as reader:
        with Session(engine) as session:
            add(session, "a")
            on_end(session, heard.append)
            reader.exec_driver_sql("BEGIN")
            reader.exec_driver_sql("SELECT * FROM counter")
            with pytest.raises(OperationalError, match="locked"):
                session.commit()
        reader.exec_driver_sql("ROLLBACK")
        assert heard == [ROLLED_BACK]
    with Session(engine) as session:
        add(session, "b")
        session.commit()
    assert names(engine) == {"b"}
    engine.dispose()
