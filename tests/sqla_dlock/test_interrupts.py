"""An interrupt at each executed line of acquire, block, COMMIT, ROLLBACK and release leaves nothing that is renewed."""

import logging
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, delete, event, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from dlock_core.backends.memory import MemoryBackend
from dlock_core.stores import Store
from sqla_dlock import fencing, lock, locked, stores
from sqla_dlock.fencing import metadata as fence_metadata
from tests.garbage import collect_garbage
from tests.interrupts import OURS, TELLS_OTHERS, SoftLimit, Tracer, each_line, renewed
from tests.mysql_server import LIKE_A_DEADLOCK, mariadb_only
from tests.sqla_dlock.engines import begin_immediate
from tests.sqla_dlock.models import Base, Counter

pytestmark = [
    pytest.mark.timeout(600),  # some 800 interrupted runs each, line by line: a loaded machine needs minutes
    pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning"),  # an interrupt may come before it is awaited
    pytest.mark.usefixtures("garbage_is_collected"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    backend = MemoryBackend()
    monkeypatch.setitem(stores._stores, "default", Store("default", backend, wait=0.0))
    return backend


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Each of its connections has its own tables in memory: nothing waits for what an interrupted session keeps."""
    first = create_engine("sqlite://", poolclass=StaticPool)
    for metadata in (Base.metadata, fence_metadata):
        metadata.create_all(first)
    with first.connect() as connection:
        driver: Any = connection.connection.driver_connection
        tables = driver.serialize()
    first.dispose()

    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(":memory:", check_same_thread=False)
        made.deserialize(tables)
        return made

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    begin_immediate(engine)
    yield engine
    engine.dispose()


class Sorry(Exception):
    """Raised by user code."""


def write(session: Session) -> None:
    session.add(Counter(name=uuid.uuid4().hex))


def block(session: Session) -> None:
    with lock(session, "order", 42):
        write(session)
        session.commit()


def acquire(session: Session) -> None:
    lock(session, "order", 42).acquire()
    write(session)
    session.commit()


def acquire_inside(session: Session) -> None:
    with session.begin():
        lock(session, "order", 42).acquire()
        write(session)


def rollback(session: Session) -> None:
    with pytest.raises(Sorry), lock(session, "order", 42), session.begin():
        write(session)
        session.flush()
        raise Sorry


def joined(session: Session) -> None:
    with lock(session, "order", 42), session.begin():
        lock(session, "order", 42).acquire()
        with lock(session, "order", 42):
            write(session)


def several(session: Session) -> None:
    with lock(lock(session, "order", 42), lock(session, "order", 43)):
        write(session)
        session.commit()


@locked("order", 42)
def decorated(session: Session) -> None:
    write(session)
    session.commit()


def savepoint(session: Session) -> None:
    with lock(session, "order", 42), session.begin():
        with pytest.raises(Sorry), session.begin_nested():
            write(session)
            session.flush()
            raise Sorry
        write(session)


def closed(session: Session) -> None:
    lock(session, "order", 42).acquire()
    session.close()


WITHOUT_BLOCK = (acquire, acquire_inside, closed)
"""Their leases end with a transaction, or with the session's close, which comes next if an interrupt has hidden its end."""
WORKS = (block, acquire, acquire_inside, rollback, joined, several, decorated, savepoint, closed)


@pytest.mark.parametrize(("work", "error"), [*((work, SoftLimit) for work in WORKS), (block, KeyboardInterrupt)])
def test_interrupt_at_any_line_leaves_no_lease_that_is_renewed(
    engine: Engine, memory: MemoryBackend, work: Callable[[Session], None], error: type[BaseException]
) -> None:
    sessions, left = [Session()], list[str]()

    def with_session() -> None:
        sessions[0] = Session(engine)  # it outlives the interrupt, as a scoped_session does
        work(sessions[0])

    for line, granted, surfaced in each_line(with_session, OURS, error):
        assert not renewed(granted) or work in WITHOUT_BLOCK or sessions[0].in_transaction(), line
        try:
            sessions[0].close()
        except InvalidRequestError:  # its own state may be broken: then it is dropped
            sessions[0] = Session()
            collect_garbage()
        assert not renewed(granted), line
        assert surfaced or line.function.rpartition(".")[2] in TELLS_OTHERS, line
        if memory._states:
            left.append(line.function)
        memory._states.clear()
    assert len(left) < 50, left  # nearly always it is released at once


def first_statement(session: Session) -> None:
    session.execute(text("SELECT 1"))


def undone_savepoint(session: Session) -> None:
    with pytest.raises(Sorry), session.begin_nested():
        session.execute(text("SELECT 1"))
        raise Sorry


@pytest.mark.parametrize("has_listener", [False, True], ids=["", "listener"])
@pytest.mark.parametrize("work", [first_statement, undone_savepoint])
def test_program_that_goes_on_after_an_interrupt_commits_nothing_that_was_not_fenced(
    engine: Engine, memory: MemoryBackend, work: Callable[[Session], None], has_listener: bool
) -> None:
    class OwnSession(Session):
        """A session whose listeners no other session has."""

    if has_listener:
        event.listen(OwnSession, "after_begin", lambda *_: None)
    unfenced: list[str] = []

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        driver: Any = connection.connection.driver_connection
        is_own = statement.startswith(("BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK")) or "dlock_fence" in statement
        if not is_own and not driver.execute("SELECT 1 FROM dlock_fence WHERE name = 'order:42'").fetchall():
            unfenced.append(statement)

    def committed(tracer: Tracer) -> bool:
        unfenced.clear()
        try:
            with OwnSession(engine) as session, lock(session, "order", 42):
                with suppress(SoftLimit), tracer:
                    work(session)
                write(session)
                session.commit()
        except Exception:  # also SQLAlchemy's, whose own state may be broken
            return False
        finally:
            memory._states.clear()
        return True

    event.listen(engine, "after_cursor_execute", note)
    try:
        files = (*OURS, "sqlalchemy/orm/session.py", "sqlalchemy/engine/base.py")
        counting = Tracer(files)
        assert committed(counting)
        for at in counting.places:
            tracer = Tracer(files, at)
            assert not committed(tracer) or not unfenced, tracer.hit
    finally:
        event.remove(engine, "after_cursor_execute", note)


@mariadb_only
@pytest.mark.parametrize("name", ["pymysql", "mariadb"])
def test_deadlock_whose_error_gives_way_to_an_interrupt_lets_nothing_be_committed_that_was_not_fenced(
    make_engine: Callable[..., Engine], memory: MemoryBackend, name: str
) -> None:
    engine = make_engine(name)

    def committed(tracer: Tracer) -> bool:
        with suppress(Exception), Session(engine) as session, lock(session, "order", 42):
            session.execute(text("SELECT 1"))
            with suppress(Exception), tracer:
                session.execute(text(LIKE_A_DEADLOCK))
            write(session)
            session.commit()
        memory._states.clear()
        with engine.begin() as connection:
            connection.execute(delete(fencing.table).where(fencing.table.c.name != ""))
            return bool(connection.execute(delete(Counter)).rowcount)

    fenced: list[bool] = []

    @event.listens_for(engine, "commit")
    def note(connection: Connection) -> None:
        rows = "SELECT COUNT(*) FROM counter", "SELECT COUNT(*) FROM dlock_fence WHERE name = 'order:42'"
        written, admitted = (connection.exec_driver_sql(sql).scalar() for sql in rows)
        fenced.append(not written or bool(admitted))

    files = (*OURS, "sqlalchemy/engine/base.py")
    counting = Tracer(files)
    assert committed(counting)
    for at in counting.places:
        tracer = Tracer(files, at)
        committed(tracer)
        assert all(fenced), tracer.hit
