"""The promises of lock_row and lock_rows, with every driver."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from sqlalchemy import ForeignKey, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError, NoResultFound
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.ext.declarative import ConcreteBase
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, scoped_session, sessionmaker

from dlock_core.errors import NotSupported, RowLocked
from dlock_core.transactions.retry import DatabaseFailure, classify
from sqla_dlock.row_sql import waiting_on_mysql
from sqla_dlock.rows import alock_row, alock_rows, lock_row, lock_rows
from tests.mysql_server import mariadb_only
from tests.sqla_dlock.engines import ASYNC, SYNC, server_of
from tests.sqla_dlock.models import Article, ColdStock, Counter, Delivery, Shelf, Stock
from tests.sqla_dlock.parties import Party, lock_there
from tests.waiting import until

POSTGRESQL = ["postgresql", "psycopg2", "asyncpg", "psycopg_async"]
MARIADB = ["mariadb", "pymysql", "aiomysql", "asyncmy"]
SQLITE = ["sqlite", "aiosqlite"]
with_row_locks = pytest.mark.parametrize("party", [*POSTGRESQL, *MARIADB], indirect=True)
on_postgresql = pytest.mark.parametrize("party", POSTGRESQL, indirect=True)
on_mariadb = pytest.mark.parametrize("party", MARIADB, indirect=True)
on_sqlite = pytest.mark.parametrize("party", SQLITE, indirect=True)


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture(params=[*SYNC, *ASYNC])
def party(request: pytest.FixtureRequest, make_engine, make_async_engine) -> Party:
    name = request.param
    other = make_engine(server_of(name) or "sqlite")
    return Party(name, make_async_engine(name) if name in ASYNC else make_engine(name), other)


@pytest.fixture
async def stock(party: Party) -> Stock:
    (made,) = await create(party, Stock(pieces=5))
    return made


async def create(party: Party, *made: Any) -> list[Any]:
    """Commit rows, and return their instances, which are detached."""

    def work(session: Session) -> list[Any]:
        session.add_all(made)
        session.flush()
        for each in made:
            session.refresh(each)
        session.expunge_all()
        return list(made)

    return await party.transact(work)


async def pieces(party: Party, stock: Stock) -> int:
    return await party.transact(lambda session: session.get_one(Stock, stock.id).pieces)


def selects(party: Party) -> list[str]:
    return [sql for sql in party.sql if "FROM stock" in sql and sql.startswith("SELECT")]


# what a lock does


@with_row_locks
async def test_row_is_locked_until_the_end_of_the_transaction(stock, party):
    def work(session: Session) -> None:
        with session.begin_nested():
            assert lock_row(session, Stock, stock.id).id == stock.id
        assert not party.is_free(stock)

    await party.transact(work)
    assert party.is_free(stock)


@with_row_locks
async def test_waiter_reads_the_row_as_the_first_has_left_it(stock, party):
    def second(session: Session) -> int:
        assert session.get_one(Stock, stock.id).pieces == 5
        return lock_row(session, Stock, stock.id).pieces

    with party.others.connect() as first, first.begin():
        lock_there(first, stock)
        waiter = asyncio.create_task(party.transact(second))
        await party.until_blocked()
        first.execute(text("UPDATE stock SET pieces = 4"))
        assert not waiter.done()
        first.commit()
        assert await waiter == 4


@with_row_locks
async def test_shared_lock_lets_others_share_and_not_write(stock, party):
    def work(session: Session) -> None:
        assert lock_row(session, Stock, stock.id, shared=True).pieces == 5
        assert party.is_free(stock, party.share)
        assert not party.is_free(stock)

    await party.transact(work)
    assert party.is_free(stock)


@with_row_locks
async def test_shared_lock_and_our_exclusive_one_exclude_each_other(stock, party):
    with party.other_transaction() as other:
        lock_there(other, stock, party.share)
        assert await party.transact(lambda session: lock_row(session, Stock, stock.id, shared=True, nowait=True))
        with pytest.raises(RowLocked):
            await party.transact(lambda session: lock_row(session, Stock, stock.id, nowait=True))


@on_postgresql
@pytest.mark.parametrize("no_key", [True, False])
async def test_rows_that_refer_to_a_locked_row_can_be_inserted_unless_asked_otherwise(stock, party, no_key):
    def work(session: Session) -> None:
        lock_row(session, Stock, stock.id, no_key=no_key)
        with party.other_transaction() as other:
            other.execute(text("SET LOCAL lock_timeout = 50"))
            insert = Delivery.__table__.insert().values(stock_id=stock.id)
            if no_key:
                other.execute(insert)
            else:
                with pytest.raises(DBAPIError):
                    other.execute(insert)

    await party.transact(work)


@on_postgresql
async def test_share_of_the_key_lets_others_update_and_not_delete(stock, party):
    def work(session: Session) -> None:
        lock_row(session, Stock, stock.id, shared=True, key=True)
        assert party.is_free(stock, "FOR NO KEY UPDATE")
        assert not party.is_free(stock, "FOR UPDATE")

    await party.transact(work)


@on_mariadb
async def test_share_of_the_key_is_a_plain_share_where_there_is_none(stock, party):
    def work(session: Session) -> None:
        lock_row(session, Stock, stock.id, shared=True, key=True)
        assert party.is_free(stock, party.share)
        assert not party.is_free(stock)

    await party.transact(work)


async def test_row_that_is_not_there_does_not_exist(party):
    def work(session: Session) -> None:
        with pytest.raises(NoResultFound, match=r"Stock\(7\) does not exist"):
            lock_row(session, Stock, 7)
        assert lock_row(session, Stock, 7, skip_locked=True) is None

    await party.transact(work)


@with_row_locks
async def test_row_that_changed_since_it_was_read_is_read_again(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        with party.others.begin() as other:
            other.execute(text("UPDATE stock SET pieces = 9"))
        assert lock_row(session, Stock, stock.id) is mine
        assert mine.pieces == 9

    await party.transact(work)


@with_row_locks
async def test_versioned_row_that_changed_since_it_was_read_is_read_again(party):
    (article,) = await create(party, Article())

    def work(session: Session) -> None:
        for how in ((Article, article.id), (session.get_one(Article, article.id),)):
            with party.others.begin() as other:
                table = Article.__table__
                other.execute(table.update().values(version=table.c.version + 1, reads=table.c.reads + 10))
            lock_row(session, *how).reads += 1
            session.flush()
            session.commit()

    def changed(session: Session) -> tuple[int, int]:
        found = session.get_one(Article, article.id)
        return found.reads, found.version

    await in_own_session(party, work)
    assert await party.transact(changed) == (22, 5)


async def in_own_session(party: Party, work: Callable[[Session], None]) -> None:
    """Do work that commits by itself."""
    if isinstance(party.engine, AsyncEngine):
        async with AsyncSession(party.engine) as session:
            await session.run_sync(work)
    else:
        with Session(party.engine) as session:
            await asyncio.to_thread(work, session)


# how long to wait


@with_row_locks
@pytest.mark.parametrize("how", [{"nowait": True}, {"wait": 0}, {"wait": timedelta(0)}], ids=str)
async def test_locked_row_is_refused_at_once(stock, party, how):
    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(RowLocked) as caught:
            await party.transact(lambda session: lock_row(session, Stock, stock.id, **how))
    assert caught.value.name == f"Stock({stock.id})"
    assert isinstance(caught.value.__cause__, DBAPIError)


@with_row_locks
@pytest.mark.parametrize("how", [{}, {"shared": True}], ids=str)
async def test_wait_runs_out_and_says_how_long_it_was(stock, party, how):
    wait = 0.05 if party.server == "postgresql" else 1
    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(RowLocked) as caught:
            await party.transact(
                lambda session: lock_row(session, Stock, stock.id, wait=timedelta(seconds=wait), **how)
            )
    assert caught.value.waited >= wait * 0.9


@with_row_locks
async def test_row_that_is_free_is_locked_with_a_wait_too(stock, party):
    def work(session: Session) -> None:
        assert lock_row(session, Stock, stock.id, wait=2, shared=True).id == stock.id
        assert not party.is_free(stock)

    await party.transact(work)


@mariadb_only
@on_mariadb
@pytest.mark.parametrize(
    ("wait", "clause"), [(0.001, "WAIT 1"), (1, "WAIT 1"), (1.5, "WAIT 2"), (1e300, "WAIT 100000000")]
)
async def test_mariadb_waits_whole_seconds_rounded_up(stock, party, wait, clause):
    def work(session: Session) -> None:
        lock_row(session, Stock, stock.id, wait=wait)
        lock_rows(session, Stock, [stock.id], wait=wait, shared=True)

    party.sql.clear()
    await party.transact(work)
    assert [sql.rstrip().endswith(clause) for sql in selects(party)] == [True, True]


@on_postgresql
@pytest.mark.parametrize("wait", [0.0001, 1e300])
async def test_postgresql_takes_the_shortest_and_the_longest_wait_it_can(stock, party, wait):
    assert await party.transact(lambda session: lock_row(session, Stock, stock.id, wait=wait).id) == stock.id


def lock_timeout(session: Session) -> str:
    return session.execute(text("SHOW lock_timeout")).scalar_one()


@on_postgresql
async def test_wait_is_two_statements_and_does_not_strengthen_the_lock(stock, party):
    def work(session: Session) -> None:
        party.sql.clear()
        lock_row(session, Stock, stock.id, wait=2)
        sent = party.sql[:]
        assert [sql.split()[0] for sql in sent] == ["SELECT", "SELECT"]
        assert sent[0].rstrip().endswith("FOR NO KEY UPDATE OF stock")

    await party.transact(work)


@on_postgresql
async def test_limit_is_left_alone_when_there_is_nothing_to_look_for(stock, party):
    def work(session: Session) -> None:
        lock_row(session, Stock, stock.id, wait=1)
        session.execute(text("SET LOCAL lock_timeout = '7s'"))
        assert lock_rows(session, Stock, [], wait=1) == []
        assert lock_rows(session, select(Stock).where(text("false")), wait=1) == []
        assert lock_timeout(session) == "7s"

    await party.transact(work)


@on_postgresql
async def test_former_limit_is_back_after_the_lock(stock, party):
    def work(session: Session) -> None:
        session.execute(text("SET LOCAL lock_timeout = '7s'"))
        lock_row(session, Stock, stock.id, wait=1)
        assert lock_timeout(session) == "7s"
        with pytest.raises(NoResultFound):
            lock_row(session, Stock, 0, wait=1)
        assert lock_timeout(session) == "7s"

    await party.transact(work)


@on_postgresql
async def test_former_limit_is_back_after_the_wait_ran_out_in_a_savepoint(stock, party):
    def work(session: Session) -> None:
        session.add(Counter(name="kept"))
        with pytest.raises(RowLocked), session.begin_nested():
            lock_row(session, Stock, stock.id, wait=0.01)
        assert lock_timeout(session) == "0"
        assert session.get_one(Stock, stock.id).pieces == 5

    with party.other_transaction() as other:
        lock_there(other, stock)
        await party.transact(work)
    assert await party.transact(lambda session: session.scalars(select(Counter.name)).all()) == ["kept"]


@on_postgresql
async def test_transaction_of_postgresql_has_failed_after_a_locked_row_outside_a_savepoint(stock, party):
    def work(session: Session) -> None:
        with pytest.raises(RowLocked):
            lock_row(session, Stock, stock.id, nowait=True)
        session.execute(text("SELECT 1"))

    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(DBAPIError, match="aborted"):
            await party.transact(work)


@on_postgresql
async def test_row_that_is_free_is_not_told_as_locked_while_the_error_of_another_is_handled(stock, party):
    free = await party.transact(another_stock)

    def work(session: Session) -> None:
        try:
            lock_row(session, Stock, stock.id, nowait=True)
        except RowLocked:
            lock_row(session, Stock, free)

    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(DBAPIError, match="aborted"):
            await party.transact(work)


def another_stock(session: Session) -> int:
    session.add(made := Stock())
    session.flush()
    return made.id


@on_mariadb
async def test_transaction_stays_usable_after_the_wait_ran_out_on_mariadb(stock, party):
    def work(session: Session) -> None:
        with pytest.raises(RowLocked):
            lock_row(session, Stock, stock.id, nowait=True)
        session.add(Counter(name="after"))

    with party.other_transaction() as other:
        lock_there(other, stock)
        await party.transact(work)
    assert await party.transact(lambda session: session.scalars(select(Counter.name)).all()) == ["after"]


@on_mariadb
async def test_limit_of_a_mysql_without_wait_clause_is_the_session_s_and_is_given_back(stock, party):
    def work(session: Session) -> None:
        connection = session.connection()

        def limit() -> int:
            return connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one()

        former = limit()
        with waiting_on_mysql(connection, 2.5):
            assert limit() == 3
        assert limit() == former
        with pytest.raises(DBAPIError) as caught, waiting_on_mysql(connection, 1):
            lock_there(connection, stock)
        assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT
        assert limit() == former

    with party.other_transaction() as other:
        lock_there(other, stock)
        await party.transact(work)


@pytest.mark.parametrize("party", [*MARIADB, *SQLITE], indirect=True)
async def test_interrupt_while_a_lock_is_waited_for_is_not_replaced_by_the_error_of_its_connection(
    stock, party, monkeypatch
):
    def work(session: Session) -> None:
        dialect = session.connection().dialect
        monkeypatch.setattr(dialect, "is_mariadb", False, raising=False)
        execute = dialect.do_execute

        def interrupted(cursor: Any, statement: str, *rest: Any) -> None:
            if statement.startswith(("SELECT stock", "DELETE")):
                raise asyncio.CancelledError
            execute(cursor, statement, *rest)

        monkeypatch.setattr(dialect, "do_execute", interrupted)
        try:
            lock_row(session, Stock, stock.id, wait=1)
        finally:
            monkeypatch.undo()

    with pytest.raises(asyncio.CancelledError):
        await party.transact(work)


@on_mariadb
async def test_mysql_waits_by_the_session_s_limit(stock, party, monkeypatch):
    def work(session: Session) -> None:
        monkeypatch.setattr(session.connection().dialect, "is_mariadb", False)
        lock_row(session, Stock, stock.id, wait=1)

    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(RowLocked) as caught:
            await party.transact(work)
    assert caught.value.waited >= 0.9


@pytest.mark.parametrize("how", [{}, {"shared": True}, {"nowait": True}, {"skip_locked": True}, {"wait": 1}], ids=str)
def test_database_whose_row_locks_are_not_known_is_refused_before_any_io(how):
    never_connects = create_engine("mssql+pymssql://", module=sqlite3)
    with Session(never_connects) as session, pytest.raises(NotSupported, match="mssql"):
        lock_row(session, Stock, 1, **how)


@pytest.fixture
def unbound() -> Session:
    """A session that could not do any I/O."""
    return Session()


class FromQueries(DeclarativeBase):
    """Classes that are selected from a derived table, and one whose subclasses are joined with it."""


class Employee(ConcreteBase, FromQueries):
    __tablename__ = "employee"
    id: Mapped[int] = mapped_column(primary_key=True)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "employee", "concrete": True}


class Manager(Employee):
    __tablename__ = "manager"
    id: Mapped[int] = mapped_column(primary_key=True)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "manager", "concrete": True}


class Place(FromQueries):
    __tablename__ = "joined_place"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "with_polymorphic": "*"}


class Shop(Place):
    __tablename__ = "joined_shop"
    id: Mapped[int] = mapped_column(ForeignKey("joined_place.id"), primary_key=True)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "shop"}


class Market(Shop):
    __tablename__ = "joined_market"
    id: Mapped[int] = mapped_column(ForeignKey("joined_shop.id"), primary_key=True)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "market"}


class OpenPlace(FromQueries):
    __table__ = select(Place.__table__.c.id).subquery("open_place")
    __mapper_args__: ClassVar[Any] = {"primary_key": [__table__.c.id]}


@pytest.mark.parametrize("cls", [Employee, Manager, OpenPlace])
def test_class_that_is_selected_from_a_query_is_refused_before_any_io(unbound, cls):
    for lock in (
        lambda: lock_row(unbound, cls, 1),
        lambda: lock_rows(unbound, cls, [1]),
        lambda: lock_rows(unbound, select(cls), skip_locked=True),
    ):
        with pytest.raises(NotSupported, match=rf"{cls.__name__} is selected from a query.*with_for_update"):
            lock()


@pytest.mark.parametrize("cls", [Place, Shop, Market])
def test_class_that_is_selected_from_joined_tables_is_locked(make_engine, cls):
    engine = make_engine("postgresql")
    FromQueries.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            session.add(Market(id=1))
            session.commit()
            assert type(lock_row(session, cls, 1)) is Market
            with engine.connect() as other, other.begin():
                for table in ("joined_place", "joined_shop", "joined_market"):
                    assert other.execute(text(f"SELECT id FROM {table} FOR UPDATE SKIP LOCKED")).all() == []
    finally:
        FromQueries.metadata.drop_all(engine)


@pytest.mark.parametrize("wait", [-1, -0.001, float("nan"), float("inf"), 10**400, timedelta(seconds=-1)])
def test_wait_that_makes_no_sense_is_refused_before_any_io(unbound, wait):
    with pytest.raises(ValueError, match="wait must be"):
        lock_row(unbound, Stock, 1, wait=wait)


@pytest.mark.parametrize("wait", [True, "1", b"1", [1]])
def test_wait_that_is_no_time_is_refused_before_any_io(unbound, wait):
    with pytest.raises(TypeError, match="wait is seconds"):
        lock_rows(unbound, Stock, [1], wait=wait)


@pytest.mark.parametrize(
    "how",
    [
        {"nowait": True, "skip_locked": True},
        {"nowait": True, "wait": 1},
        {"skip_locked": True, "wait": 1},
        {"nowait": True, "wait": 0},
    ],
    ids=str,
)
def test_contradicting_answers_to_a_locked_row_are_refused_before_any_io(unbound, how):
    with pytest.raises(ValueError, match="give only one"):
        lock_row(unbound, Stock, 1, **how)


def test_share_of_the_key_alone_is_refused_before_any_io(unbound):
    with pytest.raises(ValueError, match="shared=True"):
        lock_row(unbound, Stock, 1, key=True)


def test_unknown_option_is_refused_before_any_io(unbound):
    with pytest.raises(TypeError, match="no_wait"):
        lock_row(unbound, Stock, 1, no_wait=True)


# many rows


@with_row_locks
async def test_locked_rows_are_skipped(party):
    first, second = await create(party, Stock(pieces=1), Stock(pieces=2))

    def work(session: Session) -> None:
        assert lock_row(session, Stock, first.id, skip_locked=True) is None
        assert lock_row(session, Stock, second.id, skip_locked=True).pieces == 2
        assert [row.id for row in lock_rows(session, select(Stock), skip_locked=True)] == [second.id]

    with party.other_transaction() as other:
        lock_there(other, first)
        await party.transact(work)


@with_row_locks
async def test_next_jobs_that_nobody_has_are_taken_in_their_own_order(party):
    made = await create(party, *(Stock(pieces=pieces) for pieces in (3, 2, 1)))
    query = select(Stock).order_by(Stock.pieces).limit(2)

    def work(session: Session) -> list[int]:
        return [row.pieces for row in lock_rows(session, query, skip_locked=True)]

    with party.other_transaction() as other:
        lock_there(other, made[2])
        taken = await party.transact(work)
    assert taken == [2, 3][: len(taken)]  # MariaDB counts skipped rows towards LIMIT
    assert taken[:1] == [2]


async def test_rows_are_locked_in_the_order_of_their_keys(party):
    made = [each.id for each in await create(party, *(Stock(pieces=pieces) for pieces in (3, 2, 1)))]
    for what in ((select(Stock).order_by(Stock.pieces),), (Stock, made[::-1])):
        party.sql.clear()
        found = await party.transact(lambda session, what=what: [row.id for row in lock_rows(session, *what)])
        assert found == made
        (sent,) = selects(party)
        assert "pieces" not in sent.partition("ORDER BY")[2]


async def test_rows_that_do_not_exist_are_left_out(stock, party):
    found = await party.transact(lambda session: [row.id for row in lock_rows(session, Stock, [0, stock.id])])
    assert found == [stock.id]


@with_row_locks
async def test_timeout_of_many_rows_names_their_model(stock, party):
    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(RowLocked, match="'Stock'"):
            await party.transact(lambda session: lock_rows(session, Stock, [stock.id], nowait=True))


def test_limited_select_is_refused_where_order_by_key_would_choose_other_rows(unbound):
    with pytest.raises(ValueError, match="skip_locked"):
        lock_rows(unbound, select(Stock).order_by(Stock.pieces).limit(2))


@pytest.mark.parametrize(
    "what",
    [
        (Stock,),
        (Stock, "12"),
        (Stock, 1),
        (Stock, {"id": 1}),
        (select(Stock.id),),
        (select(Stock, Counter),),
        (select(aliased(Stock)),),
        (select(Stock.__table__),),
        (select(Stock), [1]),
        (text("SELECT 1"),),
        ("Stock", [1]),
        (Sorry, [1]),
        (None, [1]),
    ],
)
def test_rows_that_cannot_be_told_are_refused_before_any_io(unbound, what):
    with pytest.raises(TypeError):
        lock_rows(unbound, *what)


# where it would protect nothing


@with_row_locks
@pytest.mark.parametrize("how", [{}, {"shared": True}, {"wait": 1}, {"skip_locked": True}], ids=str)
async def test_in_autocommit_it_is_refused(stock, party, how):
    def work(session: Session) -> None:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        party.sql.clear()
        for lock in (
            lambda: lock_row(session, Stock, stock.id, **how),
            lambda: lock_rows(session, Stock, [1], **how),
        ):
            with pytest.raises(NotSupported, match="AUTOCOMMIT"):
                lock()
        assert selects(party) == []

    await party.transact(work)


@pytest.mark.parametrize("name", ["sqlite", "postgresql", "mariadb", "pymysql"])
def test_engine_in_autocommit_is_refused(make_engine, name):
    for engine in (make_engine(name, isolation_level="AUTOCOMMIT"), autocommit(make_engine(name))):
        with Session(engine) as session, pytest.raises(NotSupported, match="AUTOCOMMIT"):
            lock_row(session, Stock, 1)


def autocommit(engine: Any) -> Any:
    return engine.execution_options(isolation_level="AUTOCOMMIT")


def test_connection_that_commits_behind_sqlalchemy_s_back_is_refused(make_engine):
    engine = make_engine("postgresql", connect_args={"autocommit": True})
    with Session(engine) as session, pytest.raises(NotSupported, match="AUTOCOMMIT"):
        lock_row(session, Stock, 1)


@on_postgresql
async def test_read_only_transaction_is_the_database_s_own_error(stock, party):
    def work(session: Session) -> None:
        session.execute(text("SET TRANSACTION READ ONLY"))
        lock_row(session, Stock, stock.id)

    with pytest.raises(DBAPIError, match="read-only"):
        await party.transact(work)


def plain_sqlite(make_engine: Callable[..., Any], **options: Any) -> Any:
    """Return an engine of SQLite without our events: a SELECT begins nothing."""
    url = make_engine("sqlite").url
    return create_engine(url, connect_args={"timeout": 0}, **options)


def test_plain_transaction_of_sqlite_locks_the_database_too(make_engine):
    plain = plain_sqlite(make_engine)
    with Session(plain) as setup, setup.begin():
        setup.add(Stock(id=1, pieces=5))
    with Session(plain) as session, session.begin():
        assert session.get_one(Stock, 1).pieces == 5
        with Session(plain) as other, other.begin():
            other.get_one(Stock, 1).pieces = 7
        assert lock_row(session, Stock, 1).pieces == 7
        with Session(plain) as other, pytest.raises(RowLocked, match="the database is busy"):
            lock_row(other, Stock, 1)
    plain.dispose()


@pytest.mark.parametrize(
    ("how", "limit"),
    [({"nowait": True}, 0), ({"wait": 0}, 0), ({"skip_locked": True}, 0), ({"wait": 0.01}, 10)],
    ids=str,
)
def test_database_that_another_has_locked_is_a_locked_row(make_engine, how, limit):
    plain = create_engine(make_engine("sqlite").url)
    sent = []
    event.listen(plain, "before_cursor_execute", lambda *given: sent.append(given[2]))
    with Session(plain) as session, session.begin():
        session.add(Stock(id=1))
        session.flush()
        with Session(plain) as other:
            with pytest.raises(RowLocked, match=r"Stock\(1\)"):
                lock_row(other, Stock, 1, **how)
            assert f"PRAGMA busy_timeout = {limit}" in sent
            assert other.connection().exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
    plain.dispose()


def test_sqlite_transaction_that_has_read_what_is_no_longer_so_must_start_over(make_engine):
    engine = make_engine("sqlite")
    deferred = create_engine(engine.url)
    event.listen(deferred, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(deferred, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    with Session(engine) as setup, setup.begin():
        setup.add(Stock(id=1, pieces=5))
    with Session(deferred) as session:
        session.get_one(Stock, 1)
        with engine.begin() as other:
            other.execute(text("UPDATE stock SET pieces = 6"))
        with pytest.raises(DBAPIError) as caught:
            lock_row(session, Stock, 1)
    assert classify(caught.value) is DatabaseFailure.SERIALIZATION
    deferred.dispose()


def test_sqlite_without_any_transaction_is_refused(make_engine):
    loose = create_engine(make_engine("sqlite").url, connect_args={"isolation_level": None})
    with Session(loose) as session, pytest.raises(NotSupported, match="BEGIN IMMEDIATE"):
        lock_row(session, Stock, 1)
    loose.dispose()


@on_sqlite
@pytest.mark.parametrize("how", [{}, {"shared": True}, {"wait": 1}, {"nowait": True}, {"skip_locked": True}], ids=str)
async def test_immediate_transaction_of_sqlite_has_locked_the_database(stock, party, how):
    def work(session: Session) -> None:
        assert lock_row(session, Stock, stock.id, **how).id == stock.id
        other = sqlite3.connect(str(party.others.url.database), timeout=0)
        with closing(other), pytest.raises(sqlite3.OperationalError) as caught:
            other.execute("BEGIN IMMEDIATE")
        assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT

    await party.transact(work)


# joins, inheritance


@with_row_locks
@pytest.mark.parametrize("shared", [False, True])
async def test_nullable_relation_may_be_loaded_along(party, shared):
    plain, counted = await create(party, Stock(), Stock(counter=Counter(name="a")))

    def work(session: Session) -> list[str | None]:
        found = lock_rows(session, Stock, [plain.id, counted.id], shared=shared)
        return [row.counter and row.counter.name for row in found]

    assert await party.transact(work) == [None, "a"]


@on_postgresql
@pytest.mark.parametrize("shared", [False, True])
async def test_joined_rows_are_not_locked(party, shared):
    (stock,) = await create(party, Stock(counter=Counter(name="a")))

    def work(session: Session) -> None:
        (row,) = lock_rows(session, select(Stock).join(Counter).where(Counter.name == "a"), shared=shared)
        assert party.is_free(row.counter)
        assert not party.is_free(stock)

    await party.transact(work)


@with_row_locks
@pytest.mark.parametrize("shared", [False, True])
async def test_both_tables_of_an_inherited_model_are_locked(party, shared):
    (stock,) = await create(party, ColdStock(pieces=1, degrees=4))

    def work(session: Session) -> None:
        lock_row(session, ColdStock, stock.id, shared=shared)
        assert not party.is_free(stock, table="stock")
        assert not party.is_free(stock, table="cold_stock")

    await party.transact(work)


async def test_row_of_a_subclass_is_found_by_its_base(party):
    (stock,) = await create(party, ColdStock(degrees=4))
    found = await party.transact(lambda session: type(lock_row(session, Stock, stock.id)))
    assert found is ColdStock


@pytest.mark.parametrize("ident", [("a", 1), ["a", 1], {"number": 1, "aisle": "a"}])
async def test_key_of_several_columns_is_given_as_to_session_get(party, ident):
    await create(party, Shelf(aisle="a", number=1, pieces=3), Shelf(aisle="a", number=2))

    def work(session: Session) -> None:
        assert lock_row(session, Shelf, ident).pieces == 3
        assert [row.number for row in lock_rows(session, Shelf, [("a", 2), ident, ("b", 1)])] == [1, 2]
        with pytest.raises(NoResultFound, match=r"Shelf\('b', 1\)"):
            lock_row(session, Shelf, ("b", 1))

    await party.transact(work)


@pytest.mark.parametrize("ident", [1, ("a",), ("a", 1, 2), {"aisle": "a"}, {"aisle": "a", "no": 1}])
def test_key_of_the_wrong_shape_is_refused_before_any_io(unbound, ident):
    with pytest.raises(ValueError, match=r"give \(aisle, number\)"):
        lock_row(unbound, Shelf, ident)
    with pytest.raises(ValueError, match=r"give \(aisle, number\)"):
        lock_rows(unbound, Shelf, [("a", 1), ident])


# instances


async def test_instance_is_refreshed_under_its_lock(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        session.execute(text("UPDATE stock SET pieces = 9"))
        assert lock_row(session, mine) is mine
        assert mine.pieces == 9

    await party.transact(work)


@with_row_locks
async def test_instance_locks_its_row_as_asked(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        lock_row(session, mine, shared=True)
        assert party.is_free(stock, party.share)
        lock_row(session, mine, wait=1)
        assert not party.is_free(stock, party.share)

    await party.transact(work)
    with party.other_transaction() as other:
        lock_there(other, stock)
        with pytest.raises(RowLocked, match=rf"Stock\({stock.id}\)"):
            await party.transact(lambda session: lock_row(session, session.get_one(Stock, stock.id), nowait=True))


async def test_instance_with_unsaved_changes_is_refused_and_keeps_them(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        with session.no_autoflush:
            mine.pieces, mine.counter = 1, Counter(name="a")
        for lock in (
            lambda: lock_row(session, mine),
            lambda: lock_row(session, Stock, stock.id),
            lambda: lock_rows(session, Stock, [stock.id]),
            lambda: lock_rows(session, select(Stock)),
        ):
            with pytest.raises(ValueError, match=r"not saved, in .*pieces"):
                lock()
        assert mine.pieces == 1

    await party.transact(work)
    assert await pieces(party, stock) == 1


async def test_instance_may_be_locked_after_its_changes_are_saved_or_dropped(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        mine.pieces = 1
        session.flush()
        assert lock_row(session, mine).pieces == 1
        mine.pieces = 3
        session.refresh(mine)
        assert lock_row(session, mine).pieces == 1

    await party.transact(work)


async def test_other_changes_are_flushed_before_the_lock(stock, party):
    def work(session: Session) -> None:
        changed = session.merge(Counter(name="a"))
        session.flush()
        changed.name = "b"
        assert lock_row(session, Stock, stock.id).pieces == 5
        assert changed not in session.dirty

    await party.transact(work)


async def test_without_autoflush_any_unsaved_change_is_refused(stock, party):
    def work(session: Session) -> None:
        other = Counter(name="a")
        session.add(other)
        session.flush()
        other.name = "b"
        with pytest.raises(ValueError, match="in name"):
            lock_row(session, Stock, stock.id)
        session.flush()
        assert lock_row(session, Stock, stock.id).pieces == 5

    await party.transact(work, autoflush=False)


async def test_change_whose_save_was_rolled_back_is_forgotten_and_read_again(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        with pytest.raises(Sorry), session.begin_nested():
            mine.pieces = 1
            session.flush()
            raise Sorry
        assert lock_row(session, mine).pieces == 5

    await party.transact(work)


async def test_instance_that_was_never_read_or_saved_is_refused(stock, party):
    def work(session: Session) -> None:
        pending, deleted = Stock(), session.get_one(Stock, stock.id)
        session.delete(deleted)
        session.flush()
        session.add(pending)
        other = Session(session.bind)
        with session.no_autoflush:
            for instance, word in (
                (Stock(id=1), "transient"),
                (pending, "pending"),
                (deleted, "deleted"),
                (stock, "detached"),
            ):
                with pytest.raises(ValueError, match=f"is {word}"):
                    lock_row(session, instance)
            persistent = session.merge(Stock(pieces=1))
            session.flush()
            with pytest.raises(ValueError, match="of another session"):
                lock_row(other, persistent)

    await party.transact(work)


async def test_instance_whose_row_is_gone_does_not_exist(stock, party):
    def work(session: Session) -> None:
        mine = session.get_one(Stock, stock.id)
        session.execute(text("DELETE FROM stock"))
        with pytest.raises(NoResultFound):
            lock_row(session, mine)
        assert lock_row(session, mine, skip_locked=True) is None

    await party.transact(work)


# sessions


@pytest.mark.parametrize(
    "what", [(Stock,), (Sorry, 1), ("Stock", 1), (Stock(id=1), 1), (Sorry(),), (None,), (Stock.__table__, 1)]
)
def test_what_is_no_row_is_refused_before_any_io(unbound, what):
    with pytest.raises(TypeError):
        lock_row(unbound, *what)


def test_session_for_asyncio_is_refused_before_any_io():
    scoped = async_scoped_session(async_sessionmaker(), scopefunc=int)
    for session in (AsyncSession(), scoped):
        with pytest.raises(TypeError, match="alock_row"):
            lock_row(session, Stock, 1)
        with pytest.raises(TypeError, match="alock_rows"):
            lock_rows(session, Stock, [1])


async def test_session_for_threads_is_refused_before_any_io():
    for session in (Session(), scoped_session(sessionmaker())):
        with pytest.raises(TypeError, match="use lock_row"):
            await alock_row(session, Stock, 1)
        with pytest.raises(TypeError, match="use lock_rows"):
            await alock_rows(session, Stock, [1])


@pytest.mark.parametrize("session", [None, "session", sessionmaker(), Session], ids=repr)
async def test_what_is_no_session_is_refused(session):
    with pytest.raises(TypeError, match="a Session is needed"):
        lock_row(session, Stock, 1)
    with pytest.raises(TypeError, match="an AsyncSession is needed"):
        await alock_row(session, Stock, 1)


def test_closed_session_is_sqlalchemy_s_error(make_engine):
    session = Session(make_engine("sqlite"), close_resets_only=False)
    session.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        lock_row(session, Stock, 1)


def test_scoped_session_locks_in_its_own_session(make_engine):
    scoped = scoped_session(sessionmaker(make_engine("sqlite")))
    scoped.add(Stock(id=1))
    scoped.flush()
    assert lock_row(scoped, Stock, 1) is scoped.get(Stock, 1)
    scoped.remove()


async def test_row_is_locked_through_an_async_session(async_engine):
    async with AsyncSession(async_engine) as session, session.begin():
        session.add_all([Stock(id=1), Stock(id=2)])
        await session.flush()
        mine = await alock_row(session, Stock, 1, wait=1)
        assert await alock_row(session, mine) is mine
        assert await alock_rows(session, Stock, [2, 1]) == await alock_rows(session, select(Stock))
        assert await alock_row(session, Stock, 3, skip_locked=True) is None


@pytest.mark.parametrize("party", ["asyncpg", "psycopg_async", "aiomysql", "asyncmy"], indirect=True)
async def test_cancelled_waiter_leaves_nothing_locked(stock, party):
    with party.other_transaction() as other:
        lock_there(other, stock)
        waiter = asyncio.create_task(party.transact(lambda session: lock_row(session, Stock, stock.id)))
        await party.until_blocked()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    until(lambda: party.is_free(stock))  # MariaDB's server sees a moment later that the client has gone


# deadlocks


@pytest.mark.parametrize("engine", ["postgresql", "mariadb", "pymysql"], indirect=True)
def test_deadlock_is_left_to_retry_and_not_called_a_locked_row(engine):
    with Session(engine) as setup, setup.begin():
        setup.add_all([Stock(id=1), Stock(id=2)])
    both_hold = threading.Barrier(2)
    errors: list[BaseException] = []

    def cross(first: int, second: int) -> None:
        try:
            with Session(engine) as session, session.begin():
                lock_row(session, Stock, first)
                both_hold.wait(30)
                lock_row(session, Stock, second)
        except DBAPIError as error:
            errors.append(error)

    threads = [threading.Thread(target=cross, args=pair) for pair in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (victim,) = errors
    assert classify(victim) is DatabaseFailure.DEADLOCK


@pytest.mark.parametrize("async_engine", ["asyncpg", "psycopg_async", "aiomysql", "asyncmy"], indirect=True)
async def test_deadlock_of_tasks_is_left_to_retry_and_not_called_a_locked_row(async_engine):
    async with AsyncSession(async_engine) as setup, setup.begin():
        setup.add_all([Stock(id=1), Stock(id=2)])
    both_hold = asyncio.Barrier(2)

    async def cross(first: int, second: int) -> None:
        async with AsyncSession(async_engine) as session, session.begin():
            await alock_row(session, Stock, first)
            await both_hold.wait()
            await alock_row(session, Stock, second)

    done = await asyncio.gather(cross(1, 2), cross(2, 1), return_exceptions=True)
    (victim,) = [error for error in done if error is not None]
    assert classify(victim) is DatabaseFailure.DEADLOCK


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_serialization_failure_is_left_to_retry(engine):
    with Session(engine) as setup, setup.begin():
        setup.add(Stock(id=1))
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.get(Stock, 1)
        with engine.begin() as other:
            other.execute(text("UPDATE stock SET pieces = 1"))
        with pytest.raises(DBAPIError) as caught:
            lock_row(session, Stock, 1)
    assert classify(caught.value) is DatabaseFailure.SERIALIZATION
