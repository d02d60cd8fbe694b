"""The snapshot trap: a lock requested after the transaction took its snapshot is refused where it would protect nothing."""

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dlock_core.errors import SnapshotTooOld
from sqla_dlock import alock, lock
from sqla_dlock.fencing import keeps_snapshot
from tests.leases import is_held
from tests.sqla_dlock.adders import add_counter, isolated, value
from tests.sqla_dlock.models import Counter

OLD = [
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "repeatable read"),
    ("mariadb", "serializable"),
    ("pymysql", "repeatable read"),
]
FRESH = [("postgresql", "read committed"), ("mariadb", "read committed"), ("sqlite", "IMMEDIATE")]
DEFAULT_IS_OLD = ["aiomysql", "asyncmy"]


def levels(pairs):
    return pytest.mark.parametrize("engine", pairs, ids=lambda pair: "-".join(pair).replace(" ", "_"), indirect=True)


@pytest.fixture
def engine(request, make_engine):
    """A database at an isolation level, with a counter "a" at 0."""
    made = isolated(make_engine, *request.param)
    add_counter(made)
    return made


def seen(session):
    return session.scalars(select(Counter.value)).one()


def set_to(engine, number):
    with engine.begin() as other:
        other.execute(update(Counter).values(value=number))


@levels(OLD)
@pytest.mark.parametrize("form", ["transaction", "lease", False])
def test_lock_after_a_read_is_refused_and_no_lease_is_asked_for(engine, store, journal, form):
    with Session(engine) as session:
        assert seen(session) == 0
        with pytest.raises(SnapshotTooOld) as caught, lock(session, "order", 42, fence=form):
            pass
        assert journal == []
        assert caught.value.isolation.lower() == engine.dialect._on_connect_isolation_level.lower()
        session.commit()  # it was refused before it could do harm
        with lock(session, "order", 42, fence=form):
            assert seen(session) == 0


@levels(FRESH)
@pytest.mark.parametrize("form", ["transaction", "lease", False])
def test_lock_after_a_read_is_fine_where_each_statement_sees_what_is_committed(engine, store, form):
    with Session(engine) as session:
        assert seen(session) == 0
        if engine.dialect.name != "sqlite":
            set_to(engine, 5)
        with lock(session, "order", 42, fence=form):
            assert seen(session) == (0 if engine.dialect.name == "sqlite" else 5)
        session.commit()
    assert not is_held(store)


@levels([("mariadb", "read committed"), ("postgresql", "read committed")])
def test_isolation_of_the_one_transaction_decides(engine, store):
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        with pytest.raises(SnapshotTooOld):
            lock(session, "order", 42).acquire()
        session.rollback()
        seen(session)
        lock(session, "order", 42).acquire()


@levels(OLD)
def test_transaction_without_a_statement_has_no_snapshot(engine, store):
    with Session(engine) as session:
        session.begin()
        session.add(Counter(name="b"))
        set_to(engine, 5)
        with session.no_autoflush, lock(session, "order", 42):
            assert session.scalars(select(Counter.value).where(Counter.name == "a")).one() == 5
        session.commit()


@levels(OLD)
def test_snapshot_of_an_outer_transaction_counts_before_the_session_has_joined_it(engine, store):
    with engine.connect() as connection, Session(connection) as session:
        connection.execute(select(Counter)).all()
        with pytest.raises(SnapshotTooOld), lock(session, "order", 42):
            pass
        connection.rollback()
        with lock(session, "order", 42):
            assert seen(session) == 0
    assert not is_held(store)


@levels([("mariadb", "repeatable read"), ("pymysql", "repeatable read"), ("postgresql", "repeatable read")])
def test_careless_holder_reads_what_was_there_before_the_lock(engine, store):
    with Session(engine) as session:
        seen(session)
        set_to(engine, 5)
        with lock(session, "order", 42, snapshot="ignore"):
            assert seen(session) == 0


@levels([("sqlite", "DEFERRED")])
def test_sqlite_refuses_at_the_admit_when_somebody_wrote_after_the_snapshot(engine, store):
    with Session(engine) as session:
        seen(session)
        set_to(engine, 5)
        with pytest.raises(SnapshotTooOld, match="SQLite"):
            lock(session, "order", 42).acquire()
        assert not is_held(store)
        session.rollback()
        with lock(session, "order", 42):
            assert seen(session) == 5


@levels([("sqlite", "DEFERRED")])
def test_sqlite_lets_a_lock_in_after_a_read_when_nobody_wrote(engine, store):
    with Session(engine) as session:
        seen(session)
        with lock(session, "order", 42):
            session.execute(update(Counter).values(value=1))
        session.commit()
    assert value(engine) == 1


# asyncio


async def test_lock_after_a_read_of_an_async_session(async_engine, store):
    async with AsyncSession(async_engine) as session:
        await session.execute(select(Counter))
        if async_engine.driver in DEFAULT_IS_OLD:
            with pytest.raises(SnapshotTooOld):
                await alock(session, "order", 42).acquire()
        else:
            await alock(session, "order", 42).acquire()
            await session.commit()
    assert not is_held(store)


async def test_snapshot_of_an_outer_async_transaction_counts(async_engine, store):
    async with async_engine.connect() as connection, AsyncSession(connection) as session:
        await connection.execute(select(Counter))
        is_old = async_engine.driver in DEFAULT_IS_OLD
        for bind in (None, connection):
            if is_old:
                with pytest.raises(SnapshotTooOld):
                    await alock(session, "order", 42, bind=bind).acquire()
            else:
                async with alock(session, "order", 42, bind=bind):
                    await session.execute(select(Counter))
        await connection.rollback()
    assert not is_held(store)


@pytest.mark.parametrize("driver", ["postgresql", "psycopg2"])
def test_level_is_known_while_the_first_connection_is_still_asking_for_it(make_engine, driver):
    """Two tasks or threads may connect at once, but SQLAlchemy asks for the level only on the first connection."""
    engine = make_engine(driver)
    with engine.connect():
        del engine.dialect.default_isolation_level
    assert not keeps_snapshot(engine)
