"""The promises of sqla_dlock.transactions about the endings of a transaction whose database answers."""

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, OperationalError, PendingRollbackError
from sqlalchemy.orm import Session, close_all_sessions, scoped_session, sessionmaker

from dlock_core.transactions.tie import Outcome
from sqla_dlock.transactions import connections_of, in_transaction, on_end, on_transaction
from tests.garbage import collect_garbage
from tests.sqla_dlock.engines import SYNC
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.sessions import committed

COMMITTED, ROLLED_BACK, UNKNOWN = Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.UNKNOWN


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def heard() -> list[Any]:
    """What the callbacks have reported, in order."""
    return []


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def add(session: Session | Connection, name: str) -> None:
    session.execute(text("INSERT INTO counter (name, value) VALUES (:name, 0)"), {"name": name})


def names(engine: Engine) -> set[str]:
    """Return the names of all counters, as another session sees them."""
    return {name for (name,) in committed(engine, "SELECT name FROM counter")}


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def on_end_at_begin(session: Session, heard: list[Any]) -> None:
    """Append the outcome of every transaction of the session to `heard`."""
    on_transaction(session, lambda: on_end(session, heard.append))


# How it ends


def test_settle_hears_committed_when_other_sessions_can_see_the_work(engine, session, heard):
    session.begin()
    on_end(session, lambda outcome: heard.extend([outcome, names(engine)]))
    add(session, "a")
    assert heard == []
    session.commit()
    assert heard == [COMMITTED, {"a"}]


def test_settle_hears_rolled_back_after_an_exception(engine, session, heard):
    with pytest.raises(Sorry), session.begin():
        on_end(session, lambda outcome: heard.extend([outcome, names(engine)]))
        add(session, "a")
        raise Sorry
    assert heard == [ROLLED_BACK, set()]


@pytest.mark.parametrize("ending", ["rollback", "close", "reset", "invalidate", "expunged and closed"])
def test_settle_hears_rolled_back_when_the_session_lets_go(engine, session, heard, ending):
    add(session, "a")
    on_end(session, heard.append)
    if ending == "expunged and closed":
        session.expunge_all()
        ending = "close"
    getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert not in_transaction(session)
    assert names(engine) == set()


def test_settle_hears_rolled_back_when_the_block_is_left_without_commit(engine, heard):
    with Session(engine) as session:
        add(session, "a")
        on_end(session, heard.append)
        assert heard == []
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


def test_settle_hears_rolled_back_when_every_session_is_closed(engine, session, heard):
    add(session, "a")
    on_end(session, heard.append)
    close_all_sessions()
    assert heard == [ROLLED_BACK]


def test_settle_hears_rolled_back_when_a_generator_is_closed_inside(engine, session, heard):
    def work() -> Iterator[None]:
        with session.begin():
            on_end(session, heard.append)
            yield add(session, "a")

    generator = work()
    next(generator)
    generator.close()
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


def test_settle_hears_rolled_back_after_a_keyboard_interrupt_in_the_block(engine, session, heard):
    with pytest.raises(KeyboardInterrupt), session.begin():
        on_end(session, heard.append)
        add(session, "a")
        raise KeyboardInterrupt
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


def test_transaction_without_a_statement_settles_like_any_other(session, heard):
    for end in (session.commit, session.rollback, session.close):
        session.begin()
        on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
        end()
    assert heard == ["checked", COMMITTED, ROLLED_BACK, ROLLED_BACK]


def test_work_that_only_the_last_flush_sends_settles_like_any_other(engine, session, heard):
    session.begin()
    on_end(session, heard.append, before_commit=lambda: heard.append(len(connections_of(session))))
    session.add(Counter(name="a"))
    session.commit()
    assert heard == [1, COMMITTED]
    assert names(engine) == {"a"}


def test_nested_transaction_settles_with_the_outermost(session, heard):
    with session.begin():
        with session.begin_nested(), session.begin_nested():
            on_end(session, heard.append)
            add(session, "a")
        assert heard == []
    assert heard == [COMMITTED]


def test_rollback_of_an_inner_savepoint_does_not_settle(engine, session, heard):
    with session.begin():
        add(session, "a")
        with pytest.raises(Sorry), session.begin_nested():
            on_end(session, heard.append)
            add(session, "b")
            raise Sorry
        assert heard == []
    assert heard == [COMMITTED]
    assert names(engine) == {"a"}


@pytest.mark.parametrize("way", ["session", "transaction"])
def test_commit_inside_a_savepoint_checks_and_settles_once(engine, session, heard, way):
    transaction = session.begin()
    session.begin_nested()
    on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
    add(session, "a")
    session.begin_nested()
    session.commit() if way == "session" else transaction.commit()
    assert heard == ["checked", COMMITTED]
    assert names(engine) == {"a"}


def test_flush_that_fails_settles_at_the_rollback_that_must_follow(engine, session, heard):
    session.execute(text("INSERT INTO counter (id, name, value) VALUES (1, 'a', 0)"))
    session.commit()
    session.begin()
    on_end(session, heard.append)
    session.add(Counter(id=1, name="b"))
    with pytest.raises(IntegrityError):
        session.flush()
    with pytest.raises(PendingRollbackError):
        session.execute(text("SELECT 1"))
    assert heard == []
    session.rollback()
    assert heard == [ROLLED_BACK]
    assert names(engine) == {"a"}


def test_flush_that_fails_inside_commit_is_rolled_back_and_unchecked(engine, session, heard):
    add(session, "a")
    on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
    session.execute(text("INSERT INTO counter (id, name, value) VALUES (12345, 'b', 0)"))
    session.add(Counter(id=12345, name="c"))
    with pytest.raises(IntegrityError):
        session.commit()
    session.close()
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


@pytest.fixture
def deferred(engine: Engine) -> Iterator[None]:
    """A table whose foreign key is checked by COMMIT."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
        engine.dispose()
    create = "CREATE TABLE note (id INTEGER REFERENCES counter (id) DEFERRABLE INITIALLY DEFERRED)"
    with engine.begin() as connection:
        connection.exec_driver_sql(create)
    yield
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE note")


deferring = pytest.mark.parametrize("engine", ["sqlite", "postgresql", "psycopg2"], indirect=True)


@deferring
@pytest.mark.parametrize("ending", ["rollback", "close"])
@pytest.mark.usefixtures("deferred")
def test_constraint_refused_at_commit_is_rolled_back(engine, session, heard, ending):
    on_end_at_begin(session, heard)
    session.execute(text("INSERT INTO note VALUES (12345)"))
    with pytest.raises(IntegrityError):
        session.commit()
    getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    add(session, "next")
    session.commit()
    assert heard == [ROLLED_BACK, COMMITTED]
    assert committed(engine, "SELECT id FROM note") == []
    assert names(engine) == {"next"}


@pytest.mark.parametrize("engine", ["postgresql", "psycopg2"], indirect=True)
@pytest.mark.parametrize("is_undone", [True, False], ids=["whole transaction", "savepoint"])
def test_commit_that_postgresql_takes_for_a_rollback_is_rolled_back(engine, session, heard, is_undone):
    """It does so after an error that the program has swallowed, and no driver reports it."""
    on_end_at_begin(session, heard)
    add(session, "a")
    savepoint = session.begin_nested() if not is_undone else None
    with pytest.raises(DBAPIError):
        session.execute(text("SELECT 1 / 0"))
    if savepoint is not None:
        savepoint.rollback()
    session.commit()
    assert heard == [ROLLED_BACK if is_undone else COMMITTED]
    assert names(engine) == (set() if is_undone else {"a"})
    add(session, "next")
    session.commit()
    assert heard[1:] == [COMMITTED]


@pytest.mark.parametrize("engine", ["postgresql", "psycopg2"], indirect=True)
def test_serialization_failure_at_commit_is_rolled_back(engine, heard):
    count = text("SELECT count(*) FROM counter")
    engine = engine.execution_options(isolation_level="SERIALIZABLE")
    with Session(engine) as first, Session(engine) as second:
        for session in (first, second):
            session.execute(count)
        on_end(first, heard.append)
        add(first, "ours")
        add(second, "theirs")
        second.commit()
        with pytest.raises(OperationalError):
            first.commit()
        assert heard == [ROLLED_BACK]  # at once: a scoped_session that is not rolled back would never report it
    assert heard == [ROLLED_BACK]
    assert names(engine) == {"theirs"}


def test_every_transaction_of_a_session_settles_only_its_own(engine, session, heard):
    for number, end in enumerate((session.commit, session.rollback, session.commit, session.close)):
        add(session, f"{number}")
        on_end(session, lambda outcome, number=number: heard.append((number, outcome)))
        end()
    assert heard == [(0, COMMITTED), (1, ROLLED_BACK), (2, COMMITTED), (3, ROLLED_BACK)]
    assert names(engine) == {"0", "2"}


def test_two_sessions_settle_each_at_its_own_end(make_engine, engine, heard):
    with Session(make_engine("postgresql")) as other, Session(engine) as session:
        for which in (session, other):
            which.begin()
            on_end(which, lambda outcome, which=which: heard.append((which is session, outcome)))
        other.rollback()
        assert heard == [(False, ROLLED_BACK)]
        session.commit()
    assert heard == [(False, ROLLED_BACK), (True, COMMITTED)]


def test_session_that_ends_in_another_thread_settles_there(engine, heard):
    session = Session(engine, autoflush=False)
    session.begin()
    on_end(session, lambda outcome: heard.extend([outcome, threading.current_thread().name]))
    thread = threading.Thread(target=lambda: (add(session, "a"), session.commit()), name="other")
    thread.start()
    thread.join()
    assert heard == [COMMITTED, "other"]
    session.close()


@pytest.mark.parametrize("expire_on_commit", [True, False])
def test_objects_are_usable_after_the_settlers(engine, heard, expire_on_commit):
    with Session(engine, expire_on_commit=expire_on_commit) as session:
        counter = Counter(name="a")
        session.add(counter)
        on_end_at_begin(session, heard)
        session.commit()
        assert heard == [COMMITTED]
        assert counter.name == "a"


def test_scoped_session_settles_when_it_is_removed(engine, heard):
    scoped = scoped_session(sessionmaker(engine))
    scoped.execute(text("SELECT 1"))
    on_end(scoped(), heard.append)
    scoped.remove()
    assert heard == [ROLLED_BACK]
    on_end_at_begin(scoped(), heard)
    scoped.execute(text("SELECT 1"))
    scoped.commit()
    scoped.remove()
    assert heard == [ROLLED_BACK, COMMITTED]


def test_session_of_a_sessionmaker_and_of_a_subclass_settle_like_any_other(engine, heard):
    class Mine(Session):
        pass

    for make in (sessionmaker(engine), sessionmaker(engine, class_=Mine)):
        with make.begin() as session:
            on_end(session, heard.append)
            add(session, "a")
    assert heard == [COMMITTED, COMMITTED]


def test_autocommit_engine_settles_at_the_sessions_end(engine, heard):
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.execute(text("SELECT 1"))
        on_end(session, heard.append)
        session.commit()
        session.execute(text("SELECT 1"))
        on_end(session, heard.append)
    assert heard == [COMMITTED, ROLLED_BACK]


# Two-phase commit


@pytest.fixture
def twophase(engine: Engine, heard: list[Any]) -> Iterator[Session]:
    """A session in a transaction that is prepared first; `heard` records its check and its outcome."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no two-phase commit")
    with Session(engine, twophase=True) as session:
        session.begin()
        on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
        yield session


def test_twophase_commit_is_committed(engine, twophase, heard):
    add(twophase, "a")
    twophase.prepare()
    assert heard == ["checked"]
    twophase.commit()
    assert heard == ["checked", COMMITTED]
    assert names(engine) == {"a"}


@pytest.mark.parametrize("ending", ["rollback", "close"])
@pytest.mark.parametrize("prepared", [True, False])
def test_twophase_transaction_that_is_not_committed_is_rolled_back(engine, twophase, heard, ending, prepared):
    add(twophase, "a")
    if prepared:
        twophase.prepare()
    getattr(twophase, ending)()
    assert heard[-1] is ROLLED_BACK
    assert names(engine) == set()


def test_twophase_check_that_raises_rolls_back(engine, twophase, heard):
    add(twophase, "a")
    on_end(twophase, heard.append, before_commit=fail_with(Sorry()))
    with pytest.raises(Sorry):
        twophase.commit()
    assert heard == ["checked", ROLLED_BACK, ROLLED_BACK]
    assert names(engine) == set()


# Several engines


@pytest.fixture
def second_engine(engine: Engine, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine("sqlite" if engine.dialect.name != "sqlite" else "postgresql")


@pytest.fixture
def both(engine: Engine, second_engine: Engine) -> Iterator[Session]:
    """A session that has worked on two engines."""
    with Session() as session:
        for each in (engine, second_engine):
            session.connection(bind_arguments={"bind": each}).execute(
                text("INSERT INTO counter (name, value) VALUES ('a', 0)")
            )
        yield session


def test_several_engines_settle_once_when_all_have_ended(engine, second_engine, both, heard):
    on_end(both, lambda outcome: heard.extend([outcome, names(engine), names(second_engine)]))
    assert {connection.engine for connection in connections_of(both)} == {engine, second_engine}
    both.commit()
    assert heard == [COMMITTED, {"a"}, {"a"}]


def test_several_engines_are_all_rolled_back_by_a_failing_check(engine, second_engine, both, heard):
    on_end(both, heard.append, before_commit=fail_with(Sorry()))
    with pytest.raises(Sorry):
        both.commit()
    both.rollback()
    assert heard == [ROLLED_BACK]
    assert names(engine) == names(second_engine) == set()


@pytest.mark.filterwarnings("ignore:transaction already deassociated")  # SQLAlchemy's own
@pytest.mark.parametrize("ending", ["rollback", "close"])
def test_engine_whose_commit_fails_after_anothers_is_unknown(engine, second_engine, both, heard, ending):
    """The order in which SQLAlchemy commits is unknown, so the second is refused, whichever it is."""
    on_end(both, heard.append)
    commits: list[Connection] = []

    def committing(connection: Connection) -> None:
        commits.append(connection)
        if len(commits) == 2:
            raise sqlite3.OperationalError("refused")

    for connection in connections_of(both):
        event.listen(connection, "commit", committing)
    with pytest.raises(sqlite3.OperationalError):
        both.commit()
    getattr(both, ending)()
    assert heard == [UNKNOWN]
    assert sorted(map(len, (names(engine), names(second_engine)))) == [0, 1]


def test_commit_that_a_listener_prevents_does_not_leave_its_work_in_the_pool(engine, session):
    add(session, "a")
    on_end(session, lambda _: None)
    event.listen(session.connection(), "commit", fail_with(Sorry()))
    with pytest.raises(Sorry):
        session.commit()
    session.close()
    add(session, "b")
    session.commit()
    assert names(engine) == {"b"}


# A Connection that the user has given to the session


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
@pytest.mark.parametrize("ending", ["commit", "close"])
def test_joined_transaction_settles_when_the_connection_commits(engine, connection, heard, mode, ending):
    connection.begin()
    session = Session(connection, join_transaction_mode=mode)
    add(session, "a")
    on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
    getattr(session, ending)()
    assert heard == []
    connection.commit()
    assert heard == ["checked", COMMITTED]
    assert names(engine) == ({"a"} if ending == "commit" or mode != "create_savepoint" else set())
    session.close()
    assert heard == ["checked", COMMITTED]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_joined_transaction_settles_when_the_connection_rolls_back(engine, connection, heard, mode):
    transaction = connection.begin()
    session = Session(connection, join_transaction_mode=mode)
    add(session, "a")
    on_end(session, heard.append)
    session.commit()
    assert heard == []
    transaction.rollback()
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


def test_joined_transaction_settles_when_the_connection_is_closed(engine, heard):
    with engine.connect() as connection:
        connection.begin()
        with Session(connection) as session:
            on_end_at_begin(session, heard)
            add(session, "a")
            session.commit()
        assert heard == []
    assert heard == [ROLLED_BACK]


def test_joined_savepoint_settles_with_the_connections_transaction(engine, connection, heard):
    connection.begin()
    savepoint = connection.begin_nested()
    with Session(connection) as session:
        add(session, "a")
        on_end(session, heard.append)
        session.commit()
    savepoint.rollback()
    assert heard == []
    connection.commit()
    assert heard == [COMMITTED]
    assert names(engine) == set()


@pytest.mark.parametrize(
    ("ending", "outcome"), [("commit", COMMITTED), ("rollback", ROLLED_BACK), ("close", ROLLED_BACK)]
)
@pytest.mark.parametrize("joins", [True, False])
def test_session_that_controls_the_connections_transaction_settles_with_it(
    engine, connection, heard, ending, outcome, joins
):
    if joins:
        connection.begin()
    session = Session(connection, join_transaction_mode="control_fully")
    add(session, "a")
    on_end(session, heard.append)
    getattr(session, ending)()
    assert heard == [outcome]
    assert not connection.in_transaction()
    assert names(engine) == ({"a"} if outcome is COMMITTED else set())


def test_rollback_of_a_joined_session_is_the_connections(engine, connection, heard):
    connection.begin()
    session = Session(connection)
    add(session, "a")
    on_end(session, heard.append)
    session.rollback()
    assert heard == [ROLLED_BACK]


def test_two_transactions_of_a_session_in_one_of_the_connection_settle_together(engine, connection, heard):
    connection.begin()
    session = Session(connection)
    for number in (1, 2):
        add(session, f"{number}")
        on_end(session, lambda outcome, number=number: heard.append((number, outcome)))
        session.commit()
    assert heard == []
    connection.commit()
    assert heard == [(1, COMMITTED), (2, COMMITTED)]


def test_session_that_outlives_the_connections_transaction_is_tied_to_the_next_one(engine, connection, heard):
    session = Session(connection)
    for number in (1, 2):
        connection.begin()
        add(session, f"{number}")
        on_end(session, lambda outcome, number=number: heard.append((number, outcome)))
        connection.commit()
    session.close()
    assert heard == [(1, COMMITTED), (2, COMMITTED)]


def test_check_that_fails_leaves_nothing_to_commit_on_the_users_connection(engine, connection, heard):
    connection.begin()
    session = Session(connection)
    add(session, "a")
    on_end(session, heard.append, before_commit=fail_with(Sorry()))
    session.commit()
    with pytest.raises(Sorry):
        connection.commit()
    assert heard == [ROLLED_BACK]
    connection.rollback()
    add(connection, "b")
    connection.commit()
    assert names(engine) == {"b"}


def test_mixed_connections_settle_when_both_have_ended(engine, second_engine, connection, heard):
    connection.begin()
    with Session() as session:
        for bind in (connection, second_engine):
            session.connection(bind_arguments={"bind": bind}).execute(text("SELECT 1"))
        on_end(session, heard.append)
        session.commit()
    assert heard == []
    connection.commit()
    assert heard == [COMMITTED]


# Where there is no transaction


def test_on_end_outside_a_transaction_raises(session, heard):
    with pytest.raises(RuntimeError, match="on_end"):
        on_end(session, heard.append)
    add(session, "a")
    session.commit()
    with pytest.raises(RuntimeError, match="on_end"):
        on_end(session, heard.append)
    assert heard == []


def test_in_transaction_is_true_from_begin_to_the_end(session):
    assert not in_transaction(session)
    with session.begin():
        assert in_transaction(session)
        with session.begin_nested():
            assert in_transaction(session)
        assert in_transaction(session)
    assert not in_transaction(session)
    session.execute(text("SELECT 1"))
    assert in_transaction(session)


def test_connections_are_told_and_never_acquired(engine, session):
    assert connections_of(session) == []
    session.begin()
    assert connections_of(session) == []
    with session.begin_nested():
        connection = session.connection()
        assert connections_of(session) == [connection]
    session.commit()
    assert connections_of(session) == []
    assert engine.pool.checkedout() == 0


# When it begins


def test_begin_is_heard_for_each_outermost_transaction_and_for_an_open_one(session, heard):
    session.begin()
    on_transaction(session, lambda: heard.append("begin"))
    assert heard == ["begin"]
    with session.begin_nested():
        add(session, "a")
    session.commit()
    assert heard == ["begin"]
    session.execute(text("SELECT 1"))
    assert heard == ["begin", "begin"]


def test_begin_is_heard_no_more_after_it_was_stopped(session, heard):
    stop = on_transaction(session, lambda: heard.append("begin"))
    session.begin()
    stop()
    stop()
    session.commit()
    session.begin()
    assert heard == ["begin"]


def test_begin_that_a_hook_refuses_has_not_happened(engine, session, heard):
    on_transaction(session, lambda: on_end(session, heard.append))
    stop = on_transaction(session, fail_with(Sorry()))
    for begin in (session.begin, session.connection, lambda: add(session, "a")):
        with pytest.raises(Sorry):
            begin()
        assert not in_transaction(session)
    assert heard == [ROLLED_BACK] * 3
    stop()
    add(session, "b")
    session.commit()
    assert heard == [ROLLED_BACK] * 3 + [COMMITTED]
    assert names(engine) == {"b"}


def test_hook_that_refuses_the_open_transaction_is_not_kept(session, heard):
    session.begin()
    with pytest.raises(Sorry):
        on_transaction(session, fail_with(Sorry()))
    session.commit()
    session.begin()


# Order, and errors of callbacks


def test_settlers_are_called_last_in_first_out(session, heard):
    with session.begin():
        for number in range(3):
            on_end(session, lambda _, number=number: heard.append(number))
    assert heard == [2, 1, 0]


def test_settler_that_fails_is_repeated_and_raises_when_the_others_were_called(engine, session, heard):
    """The exception of a signal handler, such as a task's time limit, may have cut it short."""
    with pytest.raises(Sorry, match="broken settler"), session.begin():
        on_end(session, heard.append)
        on_end(session, lambda outcome: heard.append("again") or fail_with(Sorry("broken settler"))(outcome))
        add(session, "a")
    assert heard == ["again", "again", COMMITTED]
    assert names(engine) == {"a"}


def test_interrupted_settler_lets_the_others_run_first(engine, session, heard):
    add(session, "a")
    on_end(session, heard.append)
    on_end(session, fail_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        session.commit()
    assert heard == [COMMITTED]
    assert names(engine) == {"a"}
    assert engine.pool.checkedout() == 0


def test_settler_may_use_a_session_of_its_own(engine, session, heard):
    def settle(outcome: Outcome) -> None:
        with Session(engine) as other, other.begin():
            on_end(other, lambda outcome: heard.append(("settler's", outcome)))
            add(other, "by the settler")
        heard.append(outcome)

    with session.begin():
        on_end(session, settle)
        add(session, "by the user")
    assert heard == [("settler's", COMMITTED), COMMITTED]
    assert names(engine) == {"by the user", "by the settler"}


# Checks before COMMIT


def test_check_runs_inside_the_transaction_after_the_last_flush_and_first_in_first_out(engine, session, heard):
    def look() -> None:
        (connection,) = connections_of(session)
        heard.append(connection.execute(text("SELECT name FROM counter")).scalars().all())

    with session.begin():
        on_end(session, heard.append, before_commit=look)
        on_end(session, heard.append, before_commit=lambda: add(connections_of(session)[0], "checked"))
        session.add(Counter(name="a"))
        assert heard == []
    assert heard == [["a"], COMMITTED, COMMITTED]
    assert names(engine) == {"a", "checked"}


def test_check_may_use_a_savepoint_and_register_more(engine, session, heard):
    def check() -> None:
        (connection,) = connections_of(session)
        with connection.begin_nested():
            add(connection, "checked")
        on_end(session, lambda _: heard.append("late"), before_commit=lambda: heard.append("late check"))

    with session.begin():
        add(session, "a")
        on_end(session, heard.append, before_commit=check)
    assert heard == ["late check", "late", COMMITTED]
    assert names(engine) == {"a", "checked"}


@pytest.mark.parametrize("error", [DBAPIError, Sorry, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("ending", ["rollback", "close", "block"])
@pytest.mark.parametrize("name", SYNC)
def test_check_that_raises_rolls_back_and_leaves_the_connection_sound(make_engine, name, heard, error, ending):
    engine = make_engine(name)
    problem = error("not now", {}, Exception()) if error is DBAPIError else error("not now")
    with Session(engine) as session:
        stop = on_transaction(session, lambda: on_end(session, heard.append, before_commit=fail_with(problem)))
        with pytest.raises(error):
            if ending == "block":
                with session.begin():
                    add(session, "a")
            else:
                add(session, "a")
                session.commit()
        if ending != "block":
            getattr(session, ending)()
        assert heard == [ROLLED_BACK]
        assert names(engine) == set()
        stop()
        on_end_at_begin(session, heard)
        add(session, "b")
        session.commit()
    assert heard == [ROLLED_BACK, COMMITTED]
    assert names(engine) == {"b"}


def test_check_does_not_run_when_the_transaction_is_rolled_back(session, heard):
    add(session, "a")
    on_end(session, heard.append, before_commit=lambda: heard.append("checked"))
    session.rollback()
    assert heard == [ROLLED_BACK]


@pytest.mark.filterwarnings("ignore:transaction already deassociated")  # SQLAlchemy's own
def test_check_that_closes_the_connection_is_not_taken_for_a_commit(engine, session, heard):
    add(session, "a")
    on_end(session, heard.append, before_commit=connections_of(session)[0].close)
    with pytest.raises((InvalidRequestError, AssertionError)):
        session.commit()
    session.close()
    assert heard == [ROLLED_BACK]
    assert names(engine) == set()


# Sessions that are forgotten


@pytest.mark.parametrize("engine", ["postgresql", "psycopg2", "mariadb", "pymysql"], indirect=True)
def test_forgotten_session_with_a_live_connection_is_unknown(engine, heard):
    session = Session(engine)
    add(session, "a")
    on_end(session, heard.append)
    del session
    collect_garbage()
    assert heard == [UNKNOWN]
    assert names(engine) == set()


def test_forgotten_session_without_a_connection_is_unknown(engine, heard):
    """No release may be sent from the garbage collector."""
    session = Session(engine)
    session.begin()
    on_end(session, heard.append)
    del session
    collect_garbage()
    assert heard == [UNKNOWN]


def test_forgotten_session_whose_connection_is_dead_is_unknown(engine, heard):
    session = Session(engine)
    add(session, "a")
    on_end(session, heard.append)
    session.connection().invalidate()
    del session
    collect_garbage()
    assert heard == [UNKNOWN]


# What is left behind, and what others do


def test_session_that_is_dropped_is_not_kept_alive(engine, heard):
    session = Session(engine)
    on_transaction(session, lambda: on_end(session_gone(), heard.append))
    session_gone = weakref.ref(session)
    add(session, "a")
    session.commit()
    assert heard == [COMMITTED]
    session.close()
    del session
    collect_garbage()
    assert session_gone() is None


def test_nothing_is_left_on_connections_and_sessions_when_nobody_listens_any_more(engine, connection, heard):
    connection.begin()
    with Session(connection, join_transaction_mode="control_fully") as session:
        untouched = set(vars(connection)), set(vars(session))
        add(session, "a")
        on_end(session, heard.append)
        session.commit()
        assert heard == [COMMITTED]
        session.expunge_all()
        assert set(vars(connection)) - untouched[0] <= {"dispatch"}
        assert set(vars(session)) - untouched[1] <= {"dispatch"}


def test_session_nobody_asked_about_keeps_sqlalchemys_methods(engine, session):
    with Session(engine) as other:
        add(session, "a") if engine.dialect.name != "sqlite" else session.begin()
        on_end(session, lambda _: None)
        assert not {"_commit_impl", "_dlock_tracker"} & vars(other.connection()).keys()
        assert "_dlock_hooks" not in vars(other)


def test_listeners_are_left_when_another_one_fails(engine, session, heard):
    """Other listeners cannot keep us from learning of the end of a transaction."""
    add(session, "a")
    on_end(session, heard.append)
    event.listen(session, "after_commit", fail_with(Sorry()))
    with pytest.raises(Sorry):
        session.commit()
    session.close()
    assert heard == [COMMITTED]
    assert names(engine) == {"a"}


def test_end_that_sqlalchemy_was_kept_from_telling_is_heard_at_the_next_begin(engine, session, heard):
    """An interrupt of the connection's return to its pool: COMMIT is done, but the session's end is never reported."""
    add(session, "a")
    on_end(session, heard.append)
    lost = session.connection().connection.driver_connection
    event.listen(engine, "checkin", fail_with(KeyboardInterrupt()), once=True)
    with pytest.raises(KeyboardInterrupt):
        session.commit()
    session.begin()
    assert heard == [COMMITTED]
    session.close()
    assert heard == [COMMITTED]
    assert names(engine) == {"a"}
    lost.close()


@pytest.mark.parametrize(
    ("ending", "outcome"), [("commit", COMMITTED), ("rollback", ROLLED_BACK), ("close", ROLLED_BACK)]
)
def test_end_that_sqlalchemy_was_kept_from_telling_is_heard_though_the_session_is_not_used_again(
    engine, session, heard, ending, outcome
):
    add(session, "a")
    on_end(session, heard.append)
    lost = session.connection().connection.driver_connection
    event.listen(engine, "checkin", fail_with(KeyboardInterrupt()), once=True)
    with pytest.raises(KeyboardInterrupt):
        getattr(session, ending)()
    assert heard == [outcome]
    session.close()
    assert heard == [outcome]
    lost.close()


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_connection_that_an_interrupt_keeps_open_leaves_the_end_unknown(engine, make_engine, heard):
    """One connection of the session was going back to its pool, and the other one is not rolled back."""
    other, pending = make_engine("sqlite"), [KeyboardInterrupt()]

    def interrupt(*_: object) -> None:
        if pending:
            raise pending.pop()

    for each in (engine, other):
        event.listen(each, "checkin", interrupt)
    session = Session()
    opened = [session.connection(bind_arguments={"bind": each}) for each in (engine, other)]
    in_pools = [connection.connection.driver_connection for connection in opened]
    on_end(session, heard.append)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert heard == [UNKNOWN]
    for connection in opened:
        connection.close()
    assert heard == [UNKNOWN]
    for lost in in_pools:
        lost.close()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_driver_whose_errors_are_not_known_is_named_in_the_log_before_anything_fails(engine, monkeypatch, caplog):
    monkeypatch.setattr(engine.dialect, "driver", "pg8001")
    for _ in range(2):
        with caplog.at_level("WARNING", "dlock"), Session(engine) as session, session.begin():
            on_end(session, lambda outcome: None)
            session.execute(text("SELECT 1"))
    assert [record.args[0] for record in caplog.records] == ["pg8001"]
