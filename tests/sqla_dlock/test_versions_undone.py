"""Versions after a COMMIT that has committed nothing: what is in memory is read again."""

from contextlib import suppress

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.mysql_server import LIKE_A_DEADLOCK, mariadb_only
from tests.sqla_dlock.version_models import Order

READ = select(Order.title, Order.version)


def fail(session: Session, statement: str) -> None:
    with pytest.raises(DBAPIError):
        session.execute(text(statement))


def loaded(order: Order) -> bool:
    return "version" in vars(order)


@pytest.mark.parametrize("engine", ["postgresql", "psycopg2"], indirect=True)
def test_versions_match_the_database_after_a_commit_that_postgresql_turned_into_a_rollback(session, order):
    order.title = "new"
    session.flush()
    fail(session, "SELECT 1 / 0")
    session.commit()
    assert not loaded(order)
    assert (order.title, order.version) == ("old", 1)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_versions_match_the_database_in_a_transaction_of_the_caller_too(engine, order):
    with engine.connect() as connection, connection.begin(), Session(connection, expire_on_commit=False) as session:
        mine = session.get_one(Order, order.id)
        mine.title = "new"
        session.flush()
        fail(session, "SELECT 1 / 0")
        session.commit()
        assert not loaded(mine)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_versions_match_the_database_after_an_error_that_rolled_sqlite_back(session, order):
    order.title = "new"
    session.flush()
    fail(session, f"INSERT OR ROLLBACK INTO orders (id, title) VALUES ({order.id}, 'twice')")
    session.commit()
    assert not loaded(order)


def test_versions_are_kept_if_an_error_has_undone_only_its_savepoint(session, order):
    order.title = "new"
    session.flush()
    with suppress(DBAPIError), session.begin_nested():
        session.execute(text("SELECT * FROM no_such_table"))
    session.commit()
    assert loaded(order)
    assert session.execute(READ).one() == ("new", 2)


@mariadb_only
@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
def test_versions_match_the_database_after_a_deadlock_that_was_swallowed(session, order):
    order.title = "new"
    session.flush()
    fail(session, LIKE_A_DEADLOCK)
    session.commit()
    assert not loaded(order)
    assert (order.title, order.version) == ("old", 1)


@pytest.mark.parametrize("name", ["asyncpg", "psycopg_async"])
async def test_versions_match_the_database_in_an_async_session(make_async_engine, name):
    async with AsyncSession(make_async_engine(name), expire_on_commit=False) as session:
        session.add(order := Order(title="old"))
        await session.commit()
        order.title = "new"
        await session.flush()
        with pytest.raises(DBAPIError):
            await session.execute(text("SELECT 1 / 0"))
        await session.commit()
        assert not loaded(order)
        await session.refresh(order)
        assert (order.title, order.version) == ("old", 1)
