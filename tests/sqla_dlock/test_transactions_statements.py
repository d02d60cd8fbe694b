"""The promises of sqla_dlock.transactions about hooks before a transaction's work."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from sqla_dlock.transactions import before_work, connections_of, on_end
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.sessions import committed


class Sorry(Exception):
    """Raised by a hook."""


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def sent(engine: Engine) -> list[str]:
    """The first word of every statement that was sent, with the words of hooks in between."""
    words: list[str] = []
    event.listen(
        engine,
        "after_cursor_execute",
        lambda _connection, _cursor, statement, *_: words.append(statement.split()[0]),
    )
    return words


def add(session: Session | Connection, name: str) -> None:
    session.execute(text("INSERT INTO counter (name, value) VALUES (:name, 0)"), {"name": name})


def names(engine: Engine) -> set[str]:
    return {name for (name,) in committed(engine, "SELECT name FROM counter")}


def savepoint_in(session: Session) -> SessionTransaction:
    """Make a savepoint on the database, too: a session makes it there when something is sent inside."""
    savepoint = session.begin_nested()
    session.execute(text("SELECT 1"))
    return savepoint


def without_begin(sent: list[str]) -> list[str]:
    return [word for word in sent if word != "BEGIN"]


def test_hook_comes_before_the_first_statement_of_each_transaction(session, sent):
    before_work(session, lambda _: sent.append("hook"))
    assert sent == []
    for _ in range(2):
        session.execute(text("SELECT 1"))
        session.execute(text("SELECT 1"))
        session.commit()
    assert without_begin(sent) == ["hook", "SELECT", "SELECT"] * 2


def test_hook_gets_the_connection_that_will_work(session):
    got: list[Connection] = []
    before_work(session, got.append)
    session.add(Counter(name="a"))
    session.flush()
    assert got == connections_of(session)


def test_hook_comes_after_what_the_programs_own_listeners_of_begin_send(engine, sent):
    """They choose the schema or the tenant: before them the hook would work on another tenant's rows."""
    with Session(engine) as session:
        event.listen(session, "after_begin", lambda *args: args[2].execute(text(setting(engine))))
        before_work(session, lambda _: sent.append("hook"))
        for _ in range(2):
            session.execute(text("SELECT 1"))
            session.execute(text("SELECT 1"))
            session.commit()
    assert without_begin(sent) == [setting(engine).split()[0], "hook", "SELECT", "SELECT"] * 2


def setting(engine: Engine) -> str:
    """Return a statement that takes no snapshot."""
    return (
        "PRAGMA user_version"
        if engine.dialect.name == "sqlite"
        else "SET @tenant = 1"
        if is_mysql(engine)
        else "SET LOCAL a.tenant = 1"
    )


def is_mysql(engine: Engine) -> bool:
    return engine.dialect.name in ("mysql", "mariadb")


def test_hook_comes_before_what_takes_the_snapshot_on_mysql_and_on_commit_without_a_statement(engine, sent):
    with Session(engine) as session:
        event.listen(session, "after_begin", lambda *args: args[2].execute(text("SELECT 1")))
        before_work(session, lambda _: sent.append("hook"))
        session.connection()
        session.commit()
    assert without_begin(sent) == (["hook", "SELECT"] if is_mysql(engine) else ["SELECT", "hook"])


def test_hook_comes_at_once_where_a_connection_has_joined(session, sent):
    session.execute(text("SELECT 1"))
    before_work(session, lambda _: sent.append("hook"))
    assert without_begin(sent) == ["SELECT", "hook"]
    session.execute(text("SELECT 1"))
    assert without_begin(sent) == ["SELECT", "hook", "SELECT"]


def test_hook_is_not_called_for_savepoints(session, sent):
    before_work(session, lambda _: sent.append("hook"))
    with session.begin_nested():
        session.execute(text("SELECT 1"))
        with session.begin_nested():
            session.execute(text("SELECT 1"))
    assert sent.count("hook") == 1


def test_hook_called_before_a_savepoint_is_not_called_again_after_its_rollback(session, sent):
    before_work(session, lambda _: sent.append("hook"))
    session.execute(text("SELECT 1"))
    savepoint_in(session).rollback()
    session.execute(text("SELECT 1"))
    session.commit()
    assert sent.count("hook") == 1


def test_hook_called_inside_a_savepoint_is_called_again_before_the_next_statement_after_its_rollback(session, sent):
    session.execute(text("SELECT 1"))
    savepoint = savepoint_in(session)
    before_work(session, lambda _: sent.append("hook"))
    del sent[:]
    savepoint.rollback()
    session.execute(text("SELECT 1"))
    session.execute(text("SELECT 1"))
    assert sent == ["ROLLBACK", "hook", "SELECT", "SELECT"]


def test_hook_is_called_again_after_the_rollback_of_an_outer_savepoint(session, sent):
    session.execute(text("SELECT 1"))
    outer = savepoint_in(session)
    with savepoint_in(session):
        before_work(session, lambda _: sent.append("hook"))
    del sent[:]
    outer.rollback()
    with session.begin_nested():
        session.execute(text("SELECT 1"))
    assert sent == ["ROLLBACK", "hook", "SAVEPOINT", "SELECT", "RELEASE"]


def test_hook_undone_by_a_savepoint_is_called_again_before_commit(session, sent):
    session.execute(text("SELECT 1"))
    savepoint = savepoint_in(session)
    before_work(session, lambda _: sent.append("hook"))
    on_end(session, lambda _: None, before_commit=lambda: sent.append("check"))
    del sent[:]
    savepoint.rollback()
    session.commit()
    assert sent == ["ROLLBACK", "hook", "check"]


def test_hook_lets_a_failed_statement_be_undone_by_its_savepoint(engine, session):
    outer = savepoint_in(session)
    before_work(session, lambda connection: connection.exec_driver_sql("SELECT 1"))
    outer.rollback()
    add(session, "a")
    with pytest.raises(DBAPIError), savepoint_in(session), savepoint_in(session):
        session.execute(text("SELECT no_such_column FROM counter"))
    add(session, "b")
    session.commit()
    assert names(engine) == {"a", "b"}


def test_hooks_are_not_called_for_their_own_statements_nor_for_one_anothers(session, sent):
    def asking(name: str) -> Any:
        def hook(connection: Connection) -> None:
            sent.append(name)
            with connection.begin_nested():
                connection.exec_driver_sql("SELECT 1")

        return hook

    savepoint = savepoint_in(session)
    before_work(session, asking("first"))
    before_work(session, asking("second"))
    savepoint.rollback()
    del sent[:]
    session.execute(text("SELECT 1"))
    one = ["SAVEPOINT", "SELECT", "RELEASE"]
    assert sent == ["first", *one, "second", *one, "SELECT"]


@pytest.mark.parametrize("inside", [True, False], ids=["inside a savepoint", "at the begin"])
def test_statement_that_a_hook_refuses_is_not_sent_nor_the_next_one(engine, session, sent, inside):
    refusing = [True]

    def refuse(_: Connection) -> None:
        sent.append("hook")
        if refusing:
            raise Sorry

    if inside:
        refusing.clear()
        savepoint = savepoint_in(session)
        before_work(session, refuse)
        savepoint.rollback()
        refusing.append(True)
    else:
        before_work(session, refuse)
    del sent[:]
    for _ in range(2):
        with pytest.raises(Sorry):
            add(session, "a")
    with pytest.raises(Sorry):
        savepoint_in(session)
    assert without_begin(sent) == ["hook"] * 3
    refusing.clear()
    add(session, "b")
    session.commit()
    assert names(engine) == {"b"}


def test_commit_that_a_hook_refuses_commits_nothing(engine, session):
    add(session, "a")
    savepoint = savepoint_in(session)
    calls: list[Connection] = []

    def refuse_twice(connection: Connection) -> None:
        calls.append(connection)
        if len(calls) > 1:
            raise Sorry

    before_work(session, refuse_twice)
    savepoint.rollback()
    with pytest.raises(Sorry):
        session.commit()
    session.close()
    assert names(engine) == set()


def test_hook_that_refuses_a_connection_that_has_joined_is_not_kept(engine, session, sent):
    def refuse(_: Connection) -> None:
        raise Sorry

    add(session, "a")
    with pytest.raises(Sorry):
        before_work(session, refuse)
    add(session, "b")
    session.commit()
    assert names(engine) == {"a", "b"}


def test_hook_is_called_no_more_after_it_was_stopped(session, sent):
    savepoint = savepoint_in(session)
    stop = before_work(session, lambda _: sent.append("hook"))
    savepoint.rollback()
    stop()
    stop()
    session.execute(text("SELECT 1"))
    session.commit()
    session.execute(text("SELECT 1"))
    assert sent.count("hook") == 1


def test_hook_that_stops_itself_is_called_once(session, sent):
    def hook(_: Connection) -> None:
        sent.append("hook")
        stop()

    stop = before_work(session, hook)
    savepoint = savepoint_in(session)
    savepoint.rollback()
    session.execute(text("SELECT 1"))
    session.commit()
    session.execute(text("SELECT 1"))
    assert sent.count("hook") == 1


def test_hook_of_a_joined_connection_comes_before_the_sessions_first_statement(engine, sent):
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        for _ in range(2):
            with Session(connection) as session:
                before_work(session, lambda _: sent.append("hook"))
                session.execute(text("SELECT 1"))
    assert without_begin(sent) == ["SELECT", "hook", "SELECT", "hook", "SELECT"]


def test_connection_that_goes_on_keeps_no_listener(engine):
    with engine.connect() as connection:
        before = len(connection.dispatch.before_cursor_execute)
        for _ in range(2):
            with Session(connection) as session:
                savepoint = savepoint_in(session)
                before_work(session, lambda _: None)
                savepoint.rollback()
                session.commit()
            connection.rollback()
        assert len(connection.dispatch.before_cursor_execute) == before


@pytest.mark.parametrize("engine", ["sqlite", "mariadb"], indirect=True)
def test_hook_of_several_transactions_of_a_session_in_one_of_the_connection_is_called_once_after_an_error(engine, sent):
    with engine.connect() as connection, connection.begin(), Session(connection) as session:
        before_work(session, lambda _: sent.append("hook"))
        for _ in range(2):
            session.execute(text("SELECT 1"))
            session.commit()
        session.connection()
        sent.clear()
        with suppress(DBAPIError), connection.begin_nested():
            connection.execute(text("SELECT nothing"))
        session.execute(text("SELECT 1"))
    assert sent.count("hook") == 1


def test_hook_is_called_on_every_engine(engine, make_engine, sent):
    other = make_engine("postgresql" if engine.dialect.name == "sqlite" else "sqlite")
    engines: list[Engine] = []
    with Session() as session:
        before_work(session, lambda connection: engines.append(connection.engine))
        for bind in (engine, other, engine):
            session.execute(text("SELECT 1"), bind_arguments={"bind": bind})
    assert engines == [engine, other]


def test_hook_comes_after_listeners_that_were_there_before_ours():
    code = """if True:
        from sqlalchemy import create_engine, event, text
        from sqlalchemy.orm import Session
        sent = []
        event.listen(Session, "after_begin", lambda *_: sent.append("listener"))
        from sqla_dlock.transactions import before_work
        with Session(create_engine("sqlite://")) as session:
            before_work(session, lambda _: sent.append("hook"))
            session.execute(text("SELECT 1"))
        assert sent == ["listener", "hook"], sent
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hook_that_is_due_waits_for_the_end_of_an_outer_savepoint(session, sent):
    outer = savepoint_in(session)
    before_work(session, lambda _: sent.append("hook"))
    inner = savepoint_in(session)
    del sent[:]
    inner.rollback()
    outer.rollback()
    session.execute(text("SELECT 1"))
    assert sent == ["ROLLBACK", "ROLLBACK", "hook", "SELECT"]
