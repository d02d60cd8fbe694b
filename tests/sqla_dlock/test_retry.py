"""The promises of retry_on_conflict, on real conflicts of real databases, with every driver."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, event, func, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.exc import DetachedInstanceError, StaleDataError

from dlock_core.errors import AcquireTimeout, RowLocked, StaleObject, StaleToken
from dlock_core.sql.driver_errors import DatabaseFailure, classify
from dlock_core.transactions.retry import is_conflict
from sqla_dlock.retry import is_retry, retry_on_conflict
from sqla_dlock.rows import alock_row, lock_row
from tests import processes
from tests.mysql_server import LIKE_A_DEADLOCK, mariadb_only
from tests.sqla_dlock.engines import ASYNC, SYNC, new_async_engine, new_engine, server_of
from tests.sqla_dlock.models import Article, Counter, Stock
from tests.sqla_dlock.sessions import kill_session, session_id

on_postgresql = pytest.mark.parametrize("engine", ["postgresql", "psycopg2"], indirect=True)
with_row_locks = pytest.mark.parametrize("engine", ["postgresql", "psycopg2", "mariadb", "pymysql"], indirect=True)
with_row_locks_async = pytest.mark.parametrize(
    "async_engine", ["asyncpg", "psycopg_async", "aiomysql", "asyncmy"], indirect=True
)


class Sorry(Exception):
    """Raised by user code."""


class Attempts:
    """Raises the given errors in turn, and then succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.made = 0

    def make(self, *_: object) -> int:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.made


def stale() -> StaleObject:
    return StaleObject(Counter(id=1), expected=1, found=2)


def names(engine: Engine) -> list[str]:
    """Return the committed names."""
    with Session(engine) as session:
        return list(session.scalars(select(Counter.name)))


# runs


def test_work_is_done_again_in_a_new_transaction_after_a_conflict(engine):
    attempts = Attempts(stale(), StaleToken("a", token=1), RowLocked("a"), StaleDataError("a"))
    sessions = []

    @retry_on_conflict(sessionmaker(engine), attempts=5)
    def work(session: Session, name: str) -> str:
        sessions.append(session)
        assert session.in_transaction()
        assert session.scalars(select(Counter)).all() == []
        session.add(Counter(name=name))
        session.flush()
        return f"{name} {attempts.make()}"

    assert work("a") == "a 5"
    assert names(engine) == ["a"]
    assert len({id(session) for session in sessions}) == 5
    assert not any(session.in_transaction() for session in sessions)


async def test_coroutine_function_is_run_again_in_a_new_transaction(async_engine):
    attempts = Attempts(stale(), RowLocked("a"))

    @retry_on_conflict(async_sessionmaker(async_engine), attempts=3)
    async def work(session: AsyncSession, name: str) -> int:
        assert (await session.scalars(select(Counter))).all() == []
        session.add(Counter(name=name))
        await session.flush()
        return attempts.make()

    assert inspect.iscoroutinefunction(work)
    assert await work("a") == 3
    async with AsyncSession(async_engine) as session:
        assert (await session.scalars(select(Counter.name))).all() == ["a"]


def test_last_conflict_is_raised_with_a_note_and_nothing_is_committed(engine):
    last = stale()
    attempts = Attempts(stale(), last)

    @retry_on_conflict(sessionmaker(engine), attempts=2)
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.flush()
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value is last
    assert caught.value.__notes__ == ["gave up after 2 attempts"]
    assert names(engine) == []


@pytest.mark.parametrize(
    "error", [Sorry(), AcquireTimeout("a", waited=1), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_what_is_no_conflict_is_raised_at_once_and_rolled_back(engine, error):
    attempts = Attempts(error)

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.flush()
        attempts.make()

    with pytest.raises(type(error)):
        work()
    assert attempts.made == 1
    assert names(engine) == []


@on_postgresql
def test_error_that_has_undone_everything_cannot_be_swallowed(engine):
    """PostgreSQL would treat the COMMIT as a ROLLBACK, and no driver would report it."""

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.flush()
        with suppress(DBAPIError):
            session.execute(text("SELECT 1 / 0"))

    with pytest.raises(InvalidRequestError, match="swallowed an error that undid its transaction"):
        work()
    assert names(engine) == []


@pytest.mark.parametrize("async_engine", ["asyncpg", "psycopg_async"], indirect=True)
async def test_error_that_has_undone_everything_cannot_be_swallowed_async(async_engine):
    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession) -> None:
        session.add(Counter(name="a"))
        await session.flush()
        with suppress(DBAPIError):
            await session.execute(text("SELECT 1 / 0"))

    with pytest.raises(InvalidRequestError, match="swallowed an error that undid its transaction"):
        await work()
    async with AsyncSession(async_engine) as session:
        assert (await session.scalars(select(Counter.name))).all() == []


@on_postgresql
def test_error_in_a_savepoint_can_be_swallowed(engine):
    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.flush()
        with suppress(DBAPIError), session.begin_nested():
            session.execute(text("SELECT 1 / 0"))

    work()
    assert names(engine) == ["a"]


@mariadb_only
@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
@pytest.mark.parametrize("how", ["goes on", "ends", "in a savepoint"])
def test_deadlock_cannot_be_swallowed(engine, how):
    """MariaDB and MySQL roll everything back, and commit what comes after that."""

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.flush()
        with suppress(DBAPIError), session.begin_nested() if how == "in a savepoint" else nullcontext():
            session.execute(text(LIKE_A_DEADLOCK))
        if how == "goes on":
            session.add(Counter(name="b"))

    with pytest.raises(InvalidRequestError, match="swallowed an error that undid its transaction"):
        work()
    assert names(engine) == []


@mariadb_only
@pytest.mark.parametrize("async_engine", ["aiomysql", "asyncmy"], indirect=True)
async def test_deadlock_cannot_be_swallowed_async(async_engine):
    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession) -> None:
        session.add(Counter(name="a"))
        await session.flush()
        with suppress(DBAPIError):
            await session.execute(text(LIKE_A_DEADLOCK))

    with pytest.raises(InvalidRequestError, match="swallowed an error that undid its transaction"):
        await work()
    async with AsyncSession(async_engine) as session:
        assert (await session.scalars(select(Counter.name))).all() == []


@pytest.mark.parametrize("undone", ["postgresql", pytest.param("mariadb", marks=mariadb_only)])
@pytest.mark.parametrize("is_first", [True, False])
def test_error_that_has_undone_everything_on_one_of_several_databases_leaves_nothing_on_the_others(
    make_engine, undone, is_first
):
    engine, other = make_engine(undone), make_engine("sqlite")

    @retry_on_conflict(sessionmaker(binds={Counter: engine, Stock: other}))
    def work(session: Session) -> None:
        first, second = Counter(name="a"), Stock(id=1)
        for each in (first, second) if is_first else (second, first):
            session.add(each)
            session.flush()
        with suppress(DBAPIError):
            failing = LIKE_A_DEADLOCK if undone == "mariadb" else "SELECT 1 / 0"
            session.execute(text(failing), bind_arguments={"mapper": Counter})

    with pytest.raises(InvalidRequestError, match="swallowed an error that undid its transaction"):
        work()
    with Session(other) as session:
        assert session.scalars(select(Stock)).all() == []
    assert names(engine) == []


@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
def test_lock_timeout_that_has_undone_only_its_statement_can_be_swallowed(engine):
    with Session(engine) as session, session.begin():
        session.add(Counter(name="a"))

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        with suppress(DBAPIError):
            session.scalars(select(Counter).with_for_update(nowait=True)).all()
        session.add(Stock(id=1))

    with Session(engine) as other, other.begin():
        other.scalars(select(Counter).with_for_update()).all()
        work()
    with Session(engine) as session:
        assert session.scalars(select(Stock.id)).all() == [1]


@pytest.mark.parametrize("async_engine", ["aiomysql", "asyncmy"], indirect=True)
async def test_lock_timeout_that_has_undone_only_its_statement_can_be_swallowed_async(async_engine):
    async with AsyncSession(async_engine) as session, session.begin():
        session.add(Counter(name="a"))

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession) -> None:
        with suppress(DBAPIError):
            (await session.scalars(select(Counter).with_for_update(nowait=True))).all()
        session.add(Stock(id=1))

    async with AsyncSession(async_engine) as other, other.begin():
        (await other.scalars(select(Counter).with_for_update())).all()
        await work()
    async with AsyncSession(async_engine) as session:
        assert (await session.scalars(select(Stock.id))).all() == [1]


async def test_coroutine_function_gives_up_as_a_function_does(async_engine):
    attempts = Attempts(stale(), stale())

    @retry_on_conflict(async_sessionmaker(async_engine), attempts=2)
    async def work(session: AsyncSession) -> None:
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        await work()
    assert caught.value.__notes__ == ["gave up after 2 attempts"]


async def test_cancelled_coroutine_is_not_run_again(async_engine):
    started, runs = asyncio.Event(), []

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession) -> None:
        session.add(Counter(name="a"))
        await session.flush()
        runs.append(1)
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == [1]
    async with AsyncSession(async_engine) as session:
        assert (await session.scalars(select(Counter))).all() == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_instance_that_is_returned_is_detached_and_expired_unless_the_factory_keeps_it(engine):
    def work(session: Session) -> Counter:
        counter = Counter(name="a")
        session.add(counter)
        return counter

    kept = retry_on_conflict(sessionmaker(engine, expire_on_commit=False))(work)()
    assert kept.name == "a"
    expired = retry_on_conflict(sessionmaker(engine))(work)()
    with pytest.raises(DetachedInstanceError):
        _ = expired.name


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_work_that_has_committed_by_itself_is_not_run_again(engine):
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="a"))
        session.commit()
        attempts.make()

    with pytest.raises(StaleObject):
        work()
    assert attempts.made == 1
    assert names(engine) == ["a"]


def test_several_engines_are_rolled_back_together(make_engine):
    one, other = make_engine("sqlite"), make_engine("postgresql")
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(binds={Counter: one, Article: other}))
    def work(session: Session) -> None:
        for kind in (Counter, Article):
            assert session.scalars(select(kind)).all() == []
        session.add_all([Counter(name="a"), Article()])
        session.flush()
        attempts.make()

    work()
    assert attempts.made == 2
    assert names(one) == ["a"]
    with Session(other) as session:
        assert session.scalar(select(func.count(Article.id))) == 1


REFUSE_COMMIT = """
CREATE FUNCTION refuse_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION USING ERRCODE = 'serialization_failure'; END $$;
CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON article DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION refuse_commit();
"""


@pytest.fixture
def refusing(make_engine) -> Iterator[Engine]:
    """PostgreSQL, where a COMMIT that has added an Article raises a serialization failure."""
    engine = make_engine("postgresql")
    with engine.begin() as connection:
        connection.exec_driver_sql(REFUSE_COMMIT)
    yield engine
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP FUNCTION refuse_commit() CASCADE")


@pytest.mark.filterwarnings("ignore:transaction already deassociated")  # of the engine that has committed
def test_conflict_at_a_commit_after_that_of_another_engine_is_not_run_again(make_engine, refusing):
    """What the first has committed would be done twice; SQLAlchemy leaves it to chance which is first."""
    other = make_engine("sqlite")

    @retry_on_conflict(sessionmaker(binds={Counter: other, Article: refusing}), attempts=3)
    def work(session: Session, name: str) -> None:
        session.add_all([Counter(name=name), Article()])

    for name in "abcdefgh":
        with pytest.raises(DBAPIError) as caught:
            work(name)
        assert is_conflict(caught.value)
        assert names(other).count(name) <= 1


# where it refuses


def test_inside_a_transaction_it_refuses_before_it_runs(engine):
    attempts = Attempts()
    work = retry_on_conflict(sessionmaker(engine))(lambda session, *rest: attempts.make())
    with Session(engine) as session, session.begin():
        for call in (lambda: work(session), lambda: work(1, session)):
            with pytest.raises(InvalidRequestError, match="already open: a session among the arguments"):
                call()
    assert attempts.made == 0
    with Session(engine) as session:
        assert work(session) == 1


async def test_inside_a_transaction_it_refuses_before_it_runs_async(async_engine):
    attempts = Attempts()

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession, *, old: AsyncSession | None = None) -> None:
        attempts.make()

    async with AsyncSession(async_engine) as session, session.begin():
        with pytest.raises(InvalidRequestError, match="a session among the arguments"):
            await work(old=session)
    assert attempts.made == 0


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_inside_a_transaction_of_the_scoped_session_it_refuses(engine):
    attempts = Attempts()
    scoped = scoped_session(sessionmaker(engine))
    work = retry_on_conflict(scoped)(attempts.make)
    scoped.begin()
    with pytest.raises(InvalidRequestError, match="the current session of the scoped session"):
        work()
    assert attempts.made == 0
    scoped.rollback()
    assert work() == 1
    scoped.remove()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_inside_itself_it_refuses(engine):
    scoped = scoped_session(sessionmaker(engine))
    inner = retry_on_conflict(scoped)(Attempts().make)
    outer = retry_on_conflict(scoped)(lambda session: inner())
    with pytest.raises(InvalidRequestError):
        outer()
    assert not scoped.registry.has()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_inside_itself_it_refuses_though_the_inner_one_has_a_session_of_its_own(engine):
    attempts = Attempts()
    inner = retry_on_conflict(sessionmaker(engine.execution_options(logging_token="inner")))(attempts.make)
    outer = retry_on_conflict(sessionmaker(engine))(lambda session: inner())
    with pytest.raises(InvalidRequestError, match="inside another one"):
        outer()
    assert attempts.made == 0


@pytest.mark.parametrize("async_engine", ["aiosqlite", "asyncpg"], indirect=True)
async def test_inside_itself_it_refuses_async(async_engine):
    attempts = Attempts()

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def inner(session: AsyncSession) -> None:
        attempts.make()

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def outer(session: AsyncSession) -> None:
        await inner()

    with pytest.raises(InvalidRequestError, match="inside another one"):
        await outer()
    assert attempts.made == 0


# what is committed is never done twice


def test_conflict_after_work_that_another_session_has_committed_is_raised_at_once(make_engine):
    """The other session is an ordinary one, or that of a retry on another engine."""
    engine, other = make_engine("postgresql"), make_engine("sqlite")

    def log(session: Session) -> None:
        session.add(Counter(name="log"))

    def in_a_session_of_its_own() -> None:
        with Session(other) as session, session.begin():
            log(session)

    for number, write in enumerate((in_a_session_of_its_own, retry_on_conflict(sessionmaker(other))(log))):

        @retry_on_conflict(sessionmaker(engine))
        def pay(session: Session, write: Any) -> None:
            write()
            raise stale()

        with pytest.raises(StaleObject) as caught:
            pay(write)
        assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
        assert names(other) == ["log"], number
        with Session(other) as session, session.begin():
            session.execute(delete(Counter))


def test_session_that_was_rolled_back_or_never_asked_a_database_is_no_obstacle(engine, make_engine):
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> int:
        with Session(engine) as idle, idle.begin():
            pass
        with Session(make_engine("sqlite") if engine.dialect.name != "sqlite" else engine) as reading:
            if engine.dialect.name != "sqlite":
                reading.scalars(select(Counter)).all()
        return attempts.make()

    assert work() == 2


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_conflict_after_a_write_in_a_session_that_stays_open_is_raised_at_once(engine):
    kept: list[Session] = []

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        kept.append(Session(engine))
        kept[0].add(Counter(name="log"))
        kept[0].flush()
        raise stale()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is in a transaction that goes on"]
    kept[0].close()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_conflict_after_the_commit_of_a_test_suite_s_savepoint_is_raised_at_once(engine):
    with engine.connect() as connection, connection.begin() as transaction:

        @retry_on_conflict(sessionmaker(connection, join_transaction_mode="create_savepoint"))
        def work(session: Session) -> None:
            session.add(Counter(name="a"))
            event.listen(session, "after_commit", lambda *_: Attempts(stale()).make(), once=True)

        with pytest.raises(StaleObject):
            work()
        assert connection.scalar(select(func.count(Counter.id))) == 1
        transaction.rollback()


@pytest.mark.parametrize(
    "pay",
    [
        lambda session: session.begin_nested(),
        lambda session: session.execute(text("WITH a AS (SELECT 'a') INSERT INTO counter SELECT NULL, 'a', 0 FROM a")),
        lambda session: session.execute(text("WITH a AS (SELECT 1) UPDATE counter SET value = 1 RETURNING value")),
        lambda session: session.execute(text("CREATE TABLE IF NOT EXISTS made (id integer)")),
    ],
    ids=["savepoint", "statement", "statement with an answer", "DDL"],
)
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_what_sqlite_has_committed_although_the_transaction_goes_on_is_not_done_again(engine, pay):
    """Its driver sends BEGIN only before some writes: without our events, the end of a savepoint may be a COMMIT."""
    plain = create_engine(engine.url)
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(plain))
    def work(session: Session) -> None:
        with pay(session):
            session.add(Counter(name="paid"))
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
    assert attempts.made == 1
    plain.dispose()


on_every_database = pytest.mark.parametrize("engine", ["sqlite", "postgresql", "mariadb"], indirect=True)
AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}


@on_every_database
@pytest.mark.parametrize("how", ["engine", "connection"])
def test_what_was_written_in_autocommit_is_not_done_again(engine, how):
    plain, attempts = create_engine(engine.url), Attempts(stale())

    @retry_on_conflict(sessionmaker(plain.execution_options(**AUTOCOMMIT) if how == "engine" else plain))
    def work(session: Session) -> None:
        if how == "connection":
            session.connection(execution_options=AUTOCOMMIT)
        session.add(Counter(name="paid"))
        session.flush()
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
    assert names(engine) == ["paid"]
    plain.dispose()


@on_every_database
def test_what_was_only_read_in_autocommit_is_done_again(engine):
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine.execution_options(**AUTOCOMMIT)))
    def work(session: Session) -> None:
        session.scalars(select(Counter)).all()
        attempts.make()

    work()
    assert attempts.made == 2


@on_every_database
def test_conflict_of_versions_in_autocommit_is_cured_by_reading_again(engine):
    """Its UPDATE has found no row, so nothing is committed."""
    plain = create_engine(engine.url)
    with Session(plain) as session, session.begin():
        session.add(Article(id=1))
    attempts = Attempts()

    @retry_on_conflict(sessionmaker(plain.execution_options(**AUTOCOMMIT)))
    def work(session: Session) -> None:
        article = session.get_one(Article, 1)
        if attempts.make() == 1:
            with plain.begin() as other:
                other.execute(update(Article.__table__).values(version=2))
        article.reads += 1

    work()
    assert attempts.made == 2
    plain.dispose()


def has_paid_once(engine: Engine, engine_of_work: Engine, pay: Callable[[Session], Any]) -> bool:
    """Return whether work that pays, and then meets a conflict, has paid and is not done again."""
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine_of_work))
    def work(session: Session) -> None:
        pay(session)
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
    return names(engine).count("paid") == attempts.made == 1


PAY = "INSERT INTO counter (name, value) VALUES ('paid', 0)"


@pytest.mark.parametrize(
    ("engine", "statement"),
    [
        ("postgresql", f"WITH a AS ({PAY}) DELETE FROM counter WHERE id = -1"),
        ("psycopg2", f"WITH a AS ({PAY}) DELETE FROM counter WHERE id = -1"),
        ("psycopg2", f"{PAY}; DELETE FROM counter WHERE id = -1"),
        ("postgresql", "INSERT INTO redirected VALUES (1)"),
        ("psycopg2", "INSERT INTO redirected VALUES (1)"),
        ("sqlite", "INSERT INTO redirected VALUES (1)"),
        ("mariadb", "DO pay()"),
        ("pymysql", "DO pay()"),
    ],
    indirect=["engine"],
)
def test_statement_in_autocommit_that_counts_no_row_but_has_written_is_not_done_again(engine, statement, redirected):
    with_autocommit = create_engine(engine.url, **AUTOCOMMIT)
    assert has_paid_once(engine, with_autocommit, lambda session: session.execute(text(statement)))
    with_autocommit.dispose()


@pytest.fixture
def redirected(engine: Engine) -> Iterator[None]:
    """Create the table `redirected` and the function `pay`, which both write to another table."""
    create, drop = {
        "postgresql": (
            [
                "CREATE TABLE redirected (id int)",
                f"CREATE FUNCTION pay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {PAY}; RETURN NULL; END $$",
                "CREATE TRIGGER redirects BEFORE INSERT ON redirected FOR EACH ROW EXECUTE FUNCTION pay()",
            ],
            ["DROP TABLE redirected", "DROP FUNCTION pay"],
        ),
        "sqlite": (
            [
                "CREATE VIEW redirected AS SELECT 1 AS id",
                f"CREATE TRIGGER redirects INSTEAD OF INSERT ON redirected BEGIN {PAY}; END",
            ],
            ["DROP VIEW redirected"],
        ),
        "mariadb": (
            [f"CREATE FUNCTION pay() RETURNS int MODIFIES SQL DATA BEGIN {PAY}; RETURN 1; END"],
            ["DROP FUNCTION pay"],
        ),
    }["mariadb" if engine.dialect.name == "mysql" else engine.dialect.name]
    with engine.begin() as connection:
        for statement in create:
            connection.exec_driver_sql(statement)
    yield
    with engine.begin() as connection:
        for statement in drop:
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize("engine", ["sqlite", "psycopg2", "mariadb", "pymysql"], indirect=True)
@pytest.mark.parametrize("is_raw", [True, False], ids=["driver's SQL", "text"])
def test_rows_before_one_that_fails_in_autocommit_are_not_written_again(engine, is_raw):
    with_autocommit = create_engine(engine.url, **AUTOCOMMIT)
    keys = [{"id": 1}, {"id": 1}]

    def pay(session: Session) -> None:
        with suppress(IntegrityError):
            if is_raw:
                mark = "?" if engine.dialect.name == "sqlite" else "%s"
                statement = f"INSERT INTO counter (id, name, value) VALUES ({mark}, 'paid', 0)"
                session.connection().exec_driver_sql(statement, [tuple(key.values()) for key in keys])
            else:
                session.execute(text("INSERT INTO counter (id, name, value) VALUES (:id, 'paid', 0)"), keys)

    assert has_paid_once(engine, with_autocommit, pay)
    with_autocommit.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_rows_that_sqlite_has_written_before_an_update_fails_are_not_written_again(engine):
    never = create_engine(engine.url, connect_args={"isolation_level": None})
    with Session(never) as session, session.begin():
        session.add_all([Counter(id=1, name="a"), Counter(id=2, name="b")])

    def pay(session: Session) -> None:
        with suppress(IntegrityError):
            session.execute(text("UPDATE OR FAIL counter SET name = 'paid', id = 3"))

    assert has_paid_once(engine, never, pay)
    never.dispose()


@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
@pytest.mark.parametrize(
    "begin",
    [
        lambda session: session.execute(text("SET autocommit = 1")),
        lambda session: session.execute(text("SET @@session.autocommit = ON")),
    ],
    ids=["SET", "SET @@"],
)
def test_what_is_written_after_autocommit_is_set_by_hand_is_not_done_again(engine, begin):
    plain = create_engine(engine.url)

    def pay(session: Session) -> None:
        begin(session)
        session.execute(text(PAY))

    assert has_paid_once(engine, plain, pay)
    plain.dispose()


REFUSED_OR_VOID = [
    "/* tag */ INSERT INTO counter (id, name, value) VALUES (1, 'a;b', 0);",
    "-- again\ninsert into counter (id, name, value) values (1, 'b', 0)",
    "ALTER TABLE counter ADD COLUMN name varchar(80)",
    "CREATE TABLE counter (selected integer)",
    "INSERT INTO counter (id, name, value) VALUES (1, 'a--b', 0) -------",
    "/* tag */ UPDATE counter SET name = ';' WHERE id = -1;",
]


@on_every_database
@pytest.mark.parametrize("options", [AUTOCOMMIT, {}], ids=["autocommit", "transaction"])
@pytest.mark.parametrize("statement", REFUSED_OR_VOID)
def test_statement_that_was_refused_or_has_found_no_row_is_no_obstacle(engine, statement, options):
    if engine.dialect.name in ("mysql", "mariadb") and statement.startswith(("ALTER", "CREATE")) and not options:
        pytest.skip("DDL commits there what came before, even if it is refused")
    plain = create_engine(engine.url, **options)
    with Session(plain) as session, session.begin():
        session.add(Counter(id=1, name="a"))
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(plain))
    def work(session: Session) -> None:
        with suppress(DBAPIError):
            session.execute(text(statement))
        attempts.make()
        session.rollback()

    work()
    assert attempts.made == 2
    plain.dispose()


@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
@pytest.mark.parametrize(
    ("options", "statement"),
    [
        ({}, "ALTER TABLE counter ADD COLUMN name varchar(80)"),
        (AUTOCOMMIT, "CREATE OR REPLACE TABLE made AS SELECT nothing FROM nowhere"),
    ],
    ids=["DDL after an unseen write", "DDL that has dropped a table"],
)
def test_what_a_ddl_that_mariadb_refuses_has_committed_is_not_done_again(engine, options, statement):
    plain = create_engine(engine.url, **options)

    def pay(session: Session) -> None:
        with closing(session.connection().connection.cursor()) as cursor:  # the driver's
            cursor.execute(PAY)
        with suppress(DBAPIError):
            session.execute(text(statement))

    assert has_paid_once(engine, plain, pay)
    plain.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("statement", ["UPDATE counter SET value = 1", "CREATE TABLE made (id integer)"])
def test_interrupt_of_a_statement_that_sqlite_commits_at_once_is_raised_unchanged(engine, statement):
    with_autocommit = create_engine(engine.url, **AUTOCOMMIT)

    @event.listens_for(with_autocommit, "do_execute")
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    @retry_on_conflict(sessionmaker(with_autocommit))
    def work(session: Session) -> None:
        session.execute(text(statement))

    with pytest.raises(KeyboardInterrupt):
        work()
    with_autocommit.dispose()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
@pytest.mark.parametrize("first", ["START TRANSACTION WITH CONSISTENT SNAPSHOT", "BEGIN", "ROLLBACK"])
def test_transaction_that_is_begun_by_hand_on_mariadb_is_done_again(engine, first):
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.execute(text(first))
        session.add(Counter(name="paid"))
        session.flush()
        attempts.make()

    work()
    assert attempts.made == 2
    assert names(engine) == ["paid"]


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_any_number_of_sessions_can_use_one_connection_in_an_attempt(engine):
    depths = []

    def measure(_connection, _cursor, statement, *_):
        if statement.startswith("SELECT"):
            depths.append(len(inspect.stack(0)))

    event.listen(engine, "before_cursor_execute", measure)

    @retry_on_conflict(sessionmaker(engine))
    def work(_: Session) -> None:
        with engine.connect() as connection, connection.begin():
            for _ in range(3):
                with Session(connection, join_transaction_mode="create_savepoint") as inner:
                    inner.scalars(select(Counter.id)).all()
                    inner.commit()

    work()
    assert len(depths) == 3
    assert len(set(depths)) == 1


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_what_mariadb_has_committed_implicitly_is_not_done_again(engine):
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        session.add(Counter(name="paid"))
        session.flush()
        session.execute(text("ANALYZE TABLE counter"))
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
    assert names(engine) == ["paid"]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("begins", [True, False], ids=["event", "nothing"])
def test_what_sqlite_commits_by_itself_where_its_driver_never_begins_is_not_done_again(engine, begins):
    """As after an error that has rolled everything back: only the engine's event sends BEGIN, and not once more."""
    never = create_engine(engine.url, connect_args={"isolation_level": None})
    if begins:
        event.listen(never, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(never))
    def work(session: Session) -> None:
        session.add(Counter(id=1, name="undone"))
        session.flush()
        with suppress(IntegrityError):
            session.execute(text("INSERT OR ROLLBACK INTO counter (id, name, value) VALUES (1, 'again', 0)"))
        session.execute(text("INSERT INTO counter (name, value) VALUES ('paid', 0)"))
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value.__notes__ == ["not tried again: work of a session is committed"]
    assert names(engine)[-1:] == ["paid"]
    never.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_savepoint_that_has_only_read_is_no_work_that_sqlite_has_committed(engine):
    plain = create_engine(engine.url)
    attempts = Attempts(stale())

    @retry_on_conflict(sessionmaker(plain))
    def work(session: Session) -> None:
        with session.begin_nested():
            session.execute(text("PRAGMA user_version"))
            session.scalars(select(Counter)).all()
        attempts.make()

    work()
    assert attempts.made == 2
    plain.dispose()


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_inside_the_transaction_of_its_connection_it_refuses(engine):
    attempts = Attempts()
    with engine.connect() as connection:
        with (
            connection.begin(),
            pytest.raises(InvalidRequestError, match="the connection that the session is bound to"),
        ):
            retry_on_conflict(sessionmaker(connection))(attempts.make)()
        assert attempts.made == 0
        assert retry_on_conflict(sessionmaker(connection))(attempts.make)() == 1


@pytest.mark.parametrize("engine", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_test_suite_s_own_transaction_does_not_count(engine):
    attempts = Attempts(stale())
    with engine.connect() as connection, connection.begin() as transaction:

        @retry_on_conflict(sessionmaker(connection, join_transaction_mode="create_savepoint"), attempts=2)
        def work(session: Session) -> int:
            assert session.scalars(select(Counter)).all() == []
            session.add(Counter(name="a"))
            session.flush()
            return attempts.make()

        assert work() == 2
        assert connection.scalar(select(func.count(Counter.id))) == 1
        transaction.rollback()
    assert names(engine) == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_factory_that_gives_a_session_at_work_is_refused(engine):
    with Session(engine) as session, session.begin():
        with pytest.raises(InvalidRequestError, match="the session that the factory made"):
            retry_on_conflict(lambda: session)(Attempts().make)()
        assert session.in_transaction()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_new_session_is_the_current_one_of_a_scoped_session_while_it_runs(engine):
    scoped = scoped_session(sessionmaker(engine))
    former = scoped()
    attempts, seen = Attempts(stale()), []

    @retry_on_conflict(scoped)
    def work(session: Session) -> None:
        assert scoped() is session
        seen.append(session)
        scoped.add(Counter(name="a"))
        attempts.make()

    work()
    assert len({id(each) for each in (*seen, former)}) == 3
    assert scoped() is former
    assert names(engine) == ["a"]
    scoped.remove()
    work()
    assert not scoped.registry.has()


async def test_new_session_is_the_current_one_of_an_async_scoped_session_while_it_runs(async_engine):
    scoped = async_scoped_session(async_sessionmaker(async_engine), scopefunc=asyncio.current_task)
    attempts = Attempts(stale())

    @retry_on_conflict(scoped)
    async def work(session: AsyncSession) -> int:
        assert scoped() is session
        return attempts.make()

    assert await work() == 2
    assert not scoped.registry.has()


# bad input


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": -1}, ValueError),
        ({"attempts": True}, TypeError),
        ({"attempts": 2.5}, TypeError),
        ({"attempts": "5"}, TypeError),
        ({"within": -1}, ValueError),
        ({"within": float("nan")}, ValueError),
        ({"within": "1"}, TypeError),
        ({"tries": 5}, TypeError),
    ],
)
def test_wrong_options_are_refused_when_decorating(how: dict[str, Any], error):
    (name,) = how
    with pytest.raises(error, match=name):
        retry_on_conflict(sessionmaker(), **how)


def test_decorator_without_parentheses_is_refused():
    def work(session: Session) -> None:
        pass

    with pytest.raises(TypeError, match="without arguments"):
        retry_on_conflict(work)


@pytest.mark.parametrize("factory", [None, "sessionmaker", Session(), AsyncSession(), create_engine("sqlite://")])
def test_what_makes_no_sessions_is_refused_when_decorating(factory):
    with pytest.raises(TypeError, match="a new session for every run"):
        retry_on_conflict(factory)


async def test_factory_of_the_other_kind_is_refused_before_it_runs():
    attempts = Attempts()

    async def coroutine(session: AsyncSession) -> None:
        attempts.make()

    for factory in (async_sessionmaker(), dict):
        with pytest.raises(TypeError, match="not Session"):
            retry_on_conflict(factory)(attempts.make)()
    for factory in (sessionmaker(), dict):
        with pytest.raises(TypeError, match="not AsyncSession"):
            await retry_on_conflict(factory)(coroutine)()
    assert attempts.made == 0


def test_generators_are_refused_when_decorating():
    def generator(session):
        yield 1

    async def asynchronous(session):
        yield 1

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match="cannot be taken back"):
            retry_on_conflict(sessionmaker())(function)


@pytest.mark.parametrize("function", [lambda: None, lambda *, session: None, lambda **options: None])
def test_function_without_a_place_for_the_session_is_refused_when_decorating(function):
    with pytest.raises(TypeError, match="no argument for the session"):
        retry_on_conflict(sessionmaker())(function)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_blocking_function_that_answers_with_a_coroutine_is_refused(engine):
    async def coroutine(session: Session) -> None:
        pass

    with pytest.raises(TypeError, match="coroutine"):
        retry_on_conflict(sessionmaker(engine))(lambda session: coroutine(session))()  # noqa: PLW0108


def test_function_keeps_its_name_text_and_signature_but_for_the_session():
    def work(session: Session, a: int, *, b: str = "") -> None:
        """Say why."""

    def same(a: int, *, b: str = "") -> None:
        pass

    wrapped = retry_on_conflict(sessionmaker())(work)
    assert (wrapped.__name__, wrapped.__doc__) == ("work", "Say why.")
    assert inspect.signature(wrapped) == inspect.signature(same)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_methods_can_be_decorated(engine):
    class Service:
        attempts = Attempts(stale())

        @retry_on_conflict(sessionmaker(engine))
        def work(self, session: Session, add: int) -> int:
            assert session.in_transaction()
            return self.attempts.make() + add

        @classmethod
        @retry_on_conflict(sessionmaker(engine))
        def of_class(cls, session: Session) -> str:
            assert session.in_transaction()
            return cls.__name__

    assert Service().work(10) == 12
    assert Service.of_class() == "Service"
    assert list(inspect.signature(Service().work).parameters) == ["add"]


# real conflicts


def interfere(engine: Engine, statement: Any) -> None:
    with engine.begin() as other:
        other.execute(statement)


RAISE_READS = Article.__table__.update().values(
    reads=Article.__table__.c.reads + 1, version=Article.__table__.c.version + 1
)


@with_row_locks
def test_conflict_of_versions_is_cured_by_reading_again(engine):
    maker = sessionmaker(engine)
    with maker.begin() as session:
        session.add(Article(id=1))
    interfering = [RAISE_READS]

    @retry_on_conflict(maker)
    def work(session: Session) -> None:
        mine = session.get_one(Article, 1)
        while interfering:
            interfere(engine, interfering.pop())
        mine.reads += 10

    work()
    with maker() as session:
        assert session.get_one(Article, 1).reads == 11


@with_row_locks
def test_row_can_be_locked_from_the_second_attempt_on(engine):
    maker = sessionmaker(engine)
    with maker.begin() as session:
        session.add(Article(id=1))
    runs: list[bool] = []

    @retry_on_conflict(maker)
    def work(session: Session) -> None:
        runs.append(is_retry())
        mine = session.get_one(Article, 1, with_for_update=is_retry())
        if not is_retry():
            interfere(engine, RAISE_READS)
        mine.reads += 10

    work()
    assert runs == [False, True]


async def test_conflict_of_versions_is_cured_by_reading_again_async(make_async_engine, make_engine):
    for name in ("asyncpg", "psycopg_async", "aiomysql", "asyncmy"):
        await cure_a_conflict_of_versions(make_async_engine(name), make_engine(server_of(name)))


async def cure_a_conflict_of_versions(async_engine: AsyncEngine, others: Engine) -> None:
    maker = async_sessionmaker(async_engine)
    async with maker.begin() as session:
        session.add(article := Article())
        await session.flush()
        key = article.id
    interfering = [RAISE_READS]

    @retry_on_conflict(maker)
    async def work(session: AsyncSession) -> None:
        mine = await session.get_one(Article, key)
        while interfering:
            interfere(others, interfering.pop())
        mine.reads += 10

    await work()
    async with maker() as session:
        assert (await session.get_one(Article, key)).reads == 11


@on_postgresql
def test_serialization_failure_is_cured_by_a_new_snapshot(engine):
    maker = sessionmaker(engine.execution_options(isolation_level="REPEATABLE READ"))
    with maker.begin() as session:
        session.add(Counter(id=1))
    interfering = [text("UPDATE counter SET value = value + 1")]

    @retry_on_conflict(maker)
    def work(session: Session) -> None:
        mine = session.get_one(Counter, 1)
        while interfering:
            interfere(engine, interfering.pop())
        mine.value += 10

    work()
    with maker() as session:
        assert session.get_one(Counter, 1).value == 11


@on_postgresql
def test_serialization_failure_at_commit_is_cured_too(engine):
    serializable = engine.execution_options(isolation_level="SERIALIZABLE")
    maker, total = sessionmaker(serializable), select(func.sum(Counter.value))
    with maker.begin() as session:
        session.add_all([Counter(name="a"), Counter(name="b")])
    attempts = Attempts()

    @retry_on_conflict(maker)
    def work(session: Session) -> int:
        seen = session.scalars(total).one()
        session.execute(text("UPDATE counter SET value = :value WHERE name = 'a'"), {"value": seen + 1})
        if attempts.make() == 1:
            with serializable.begin() as other:
                theirs = other.scalar(total)
                other.execute(text("UPDATE counter SET value = :value WHERE name = 'b'"), {"value": theirs + 10})
        return seen

    assert work() == 10
    assert attempts.made == 2


@with_row_locks
def test_deadlock_is_cured_by_starting_over(engine):
    maker = sessionmaker(engine)
    with maker.begin() as session:
        session.add_all([Stock(id=1), Stock(id=2)])
    both_hold = threading.Barrier(2)
    met, runs = threading.local(), []

    @retry_on_conflict(maker)
    def cross(session: Session, first: int, second: int) -> None:
        runs.append(1)
        lock_row(session, Stock, first)
        if not hasattr(met, "once"):
            met.once = True
            both_hold.wait(30)
        lock_row(session, Stock, second).pieces += 1

    threads = [threading.Thread(target=cross, args=pair) for pair in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) >= 3  # one that starts over at once may lock its row before the other wakes: they meet again
    with maker() as session:
        assert session.scalars(select(Stock.pieces)).all() == [1, 1]


@with_row_locks_async
async def test_deadlock_of_tasks_is_cured_by_starting_over(async_engine):
    maker = async_sessionmaker(async_engine)
    async with maker.begin() as session:
        session.add_all([Stock(id=1), Stock(id=2)])
    both_hold, met = asyncio.Barrier(2), []

    @retry_on_conflict(maker)
    async def cross(session: AsyncSession, first: int, second: int) -> None:
        await alock_row(session, Stock, first)
        if first not in met:
            met.append(first)
            await both_hold.wait()
        (await alock_row(session, Stock, second)).pieces += 1

    await asyncio.gather(cross(1, 2), cross(2, 1))
    async with maker() as session:
        assert (await session.scalars(select(Stock.pieces))).all() == [1, 1]


@with_row_locks
def test_locked_row_is_tried_again(engine):
    maker, runs = sessionmaker(engine), []
    with maker.begin() as session:
        session.add(Stock(id=1))
    with engine.connect() as other:
        other.execute(text("SELECT 1 FROM stock FOR UPDATE"))

        @retry_on_conflict(maker)
        def work(session: Session) -> None:
            runs.append(1)
            if len(runs) == 2:
                other.rollback()
            lock_row(session, Stock, 1, nowait=True)

        work()
    assert len(runs) == 2


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_busy_sqlite_is_tried_again(engine):
    impatient = create_engine(engine.url, connect_args={"timeout": 0})
    attempts = Attempts()
    with engine.connect() as other:
        other.begin()

        @retry_on_conflict(sessionmaker(impatient))
        def work(session: Session) -> None:
            if attempts.make() == 2:
                other.rollback()
            session.add(Counter(name="a"))

        work()
    impatient.dispose()
    assert attempts.made == 2
    assert names(engine) == ["a"]


@with_row_locks
def test_dead_connection_is_not_tried_again(engine):
    attempts = Attempts()

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        attempts.make()
        kill_session(engine, session_id(session.connection()))
        session.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError) as caught:
        work()
    assert classify(caught.value) is DatabaseFailure.DISCONNECT
    assert attempts.made == 1


@with_row_locks_async
async def test_dead_connection_is_not_tried_again_async(async_engine, make_engine):
    server = make_engine("postgresql" if async_engine.dialect.name == "postgresql" else "mariadb")
    attempts = Attempts()

    @retry_on_conflict(async_sessionmaker(async_engine))
    async def work(session: AsyncSession) -> None:
        attempts.make()
        number = await session.run_sync(lambda own: session_id(own.connection()))
        await asyncio.to_thread(kill_session, server, number)
        await session.execute(text("SELECT 1"))

    with pytest.raises(DBAPIError) as caught:
        await work()
    assert classify(caught.value) is DatabaseFailure.DISCONNECT
    assert attempts.made == 1


@with_row_locks
def test_commit_whose_connection_dies_is_not_tried_again(engine):
    attempts, killing = Attempts(), []

    @event.listens_for(engine, "commit")
    def kill(connection: Any) -> None:
        if killing:
            killing.clear()
            kill_session(engine, number[0])

    number = []

    @retry_on_conflict(sessionmaker(engine))
    def work(session: Session) -> None:
        attempts.make()
        session.add(Counter(name="a"))
        session.flush()
        number.append(session_id(session.connection()))
        killing.append(1)

    with pytest.raises(DBAPIError):
        work()
    assert attempts.made == 1


# many writers


def increment(_: processes.Link, name: str, isolation: str, key: int, times: int) -> None:
    options = {"isolation_level": isolation} if isolation else {}
    if name in ASYNC:
        asyncio.run(increment_async(name, options, key, times))
        return
    engine = new_engine(name, **options)

    @retry_on_conflict(sessionmaker(engine), attempts=1000, within=60)
    def add_one(session: Session) -> None:
        session.get_one(Article, key).reads += 1

    for _round in range(times):
        add_one()
    engine.dispose()


async def increment_async(name: str, options: dict[str, str], key: int, times: int) -> None:
    engine = new_async_engine(name, **options)

    @retry_on_conflict(async_sessionmaker(engine), attempts=1000, within=60)
    async def add_one(session: AsyncSession) -> None:
        (await session.get_one(Article, key)).reads += 1

    for _round in range(times):
        await add_one()
    await engine.dispose()


@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        *((name, "") for name in (*SYNC, *ASYNC)),
        ("postgresql", "REPEATABLE READ"),
        ("asyncpg", "SERIALIZABLE"),
        ("mariadb", "SERIALIZABLE"),
        ("asyncmy", "READ COMMITTED"),
    ],
)
def test_no_update_of_several_processes_is_lost(make_engine, name, isolation):
    maker = sessionmaker(make_engine(server_of(name) or "sqlite"))
    with maker.begin() as session:
        session.add(Article(id=1))
    processes.run(increment, [(name, isolation, 1, 20)] * 3)
    with maker() as session:
        assert session.get_one(Article, 1).reads == 60


@with_row_locks
def test_without_versions_or_isolation_an_update_is_lost(engine):
    """The same function loses an update that is written between its read and its write."""
    maker = sessionmaker(engine)
    with maker.begin() as session:
        session.add(Counter(id=1))

    @retry_on_conflict(maker)
    def work(session: Session) -> None:
        mine = session.get_one(Counter, 1)
        interfere(engine, text("UPDATE counter SET value = value + 1"))
        mine.value += 1

    work()
    with maker() as session:
        assert session.get_one(Counter, 1).value == 1
