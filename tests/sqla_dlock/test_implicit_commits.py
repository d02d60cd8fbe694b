"""SQLite's driver sends BEGIN only before some writes: a savepoint that comes first is committed at its RELEASE."""

import contextlib

import pytest
from sqlalchemy import create_engine, event, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from dlock_core.errors import LeaseLost, StaleToken
from sqla_dlock import alock, lock
from sqla_dlock.tie import current
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.sessions import names

every_fence = pytest.mark.parametrize("fence", [True, "lease", False])


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def engine(make_engine):
    """An engine without our events: it begins transactions as SQLAlchemy and its driver do by default."""
    engine = create_engine(make_engine("sqlite").url)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine):
    with Session(engine) as session:
        yield session
    assert current(session) == []


def add(session, name):
    session.add(Counter(name=name))
    session.flush()


def lose(lease):
    lease._held.until = 0.0  # as after a pause


@contextlib.contextmanager
def lock_around(session, fence):
    with lock(session, "order", 42, fence=fence) as lease:
        session.execute(text("SELECT 1"))
        with session.begin_nested():
            yield lease


@contextlib.contextmanager
def lock_inside(session, fence):
    with session.begin_nested():
        session.execute(text("SELECT 1"))
        with lock(session, "order", 42, fence=fence) as lease:
            yield lease


@contextlib.contextmanager
def lock_left(session, fence):
    with session.begin_nested():
        session.execute(text("SELECT 1"))
        with lock(session, "order", 42, fence=fence) as lease:
            pass
        yield lease


@contextlib.contextmanager
def lock_of_core(session, fence):
    with lock(session, "order", 42, fence=fence) as lease, session.connection().begin_nested():
        yield lease


@every_fence
@pytest.mark.parametrize("order", [lock_around, lock_inside, lock_left, lock_of_core])
@pytest.mark.parametrize("inner", ["none", "released", "rolled back"])
def test_savepoint_whose_release_commits_is_refused_when_the_lease_is_lost(engine, session, store, fence, order, inner):
    with pytest.raises(LeaseLost):
        with order(session, fence) as lease:
            add(session, "refused")
            if inner != "none":
                with contextlib.suppress(Sorry), session.begin_nested():
                    add(session, "inside")
                    if inner == "rolled back":
                        raise Sorry
            lose(lease)
        session.commit()
    session.rollback()
    assert names(engine) == set()
    add(session, "later")
    session.commit()
    assert names(engine) == {"later"}


@every_fence
@pytest.mark.parametrize("order", [lock_around, lock_inside])
def test_refusal_that_the_program_swallows_refuses_the_commit_too(engine, session, store, fence, order):
    with contextlib.suppress(LeaseLost), order(session, fence) as lease:
        add(session, "refused")
        lose(lease)
    with pytest.raises(LeaseLost):
        session.commit()
    session.close()
    assert names(engine) == set()


@pytest.mark.parametrize("fence", ["lease", False])
def test_release_of_an_outer_savepoint_is_the_commit_of_those_inside(engine, session, store, fence):
    with lock(session, "order", 42, fence=fence) as lease:
        outer = session.connection().begin_nested()
        session.connection().begin_nested()
        add(session, "refused")
        lose(lease)
        with pytest.raises(LeaseLost):
            outer.commit()
        session.rollback()
    assert names(engine) == set()


def test_savepoint_whose_release_commits_is_refused_when_a_newer_holder_was_announced(engine, session, store):
    """The lease is still valid as far as its holder knows, as after the store has lost its data."""
    with pytest.raises(StaleToken), lock_around(session, "lease") as lease:
        with engine.begin() as newer:
            newer.execute(text("UPDATE dlock_fence SET s_token = :token"), {"token": lease.token + 1})
        add(session, "refused")
    session.rollback()
    assert names(engine) == set()


@every_fence
@pytest.mark.parametrize(
    "statement",
    [
        "WITH one AS (SELECT 1) INSERT INTO counter (name, value) SELECT 'by hand', 0 FROM one",
        "CREATE TABLE by_hand (id integer)",
    ],
)
def test_write_that_commits_by_itself_is_refused_when_the_lease_is_lost(engine, session, store, fence, statement):
    with pytest.raises(LeaseLost):
        with lock(session, "order", 42, fence=fence) as lease:
            session.execute(text("SELECT 1"))
            lose(lease)
            session.execute(text(statement))
        session.commit()
    session.rollback()
    assert names(engine) == set()
    assert not inspect(engine).has_table("by_hand")


@every_fence
@pytest.mark.parametrize("order", [lock_around, lock_inside])
def test_work_after_a_release_that_commits_is_still_locked_and_admitted_anew(
    engine, session, store, journal, fence, order
):
    with order(session, fence) as lease:
        add(session, "first")
    is_committed = fence is not True or order is lock_inside  # otherwise the admit has begun a transaction
    assert names(engine) == ({"first"} if is_committed else set())
    assert journal == ["acquired order:42"]
    if fence is True and is_committed:
        with engine.begin() as other:
            other.execute(text("DELETE FROM dlock_fence"))
    add(session, "second")
    token = session.execute(text("SELECT token FROM dlock_fence WHERE name = 'order:42'")).scalar()
    assert fence is not True or token == lease.token
    session.commit()
    assert journal == ["acquired order:42", "released order:42"]
    assert names(engine) == {"first", "second"}


@every_fence
def test_commit_after_a_release_that_commits_is_checked_again(engine, session, store, fence):
    with pytest.raises(LeaseLost), lock(session, "order", 42, fence=fence) as lease:
        with session.begin_nested():
            add(session, "first")
        add(session, "second")
        lose(lease)
        session.commit()
    session.rollback()
    assert names(engine) == (set() if fence is True else {"first"})


def test_savepoint_in_autocommit_is_refused_when_the_lease_is_lost(engine, store):
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with pytest.raises(LeaseLost), lock_around(session, fence=False) as lease:
            add(session, "refused")
            lose(lease)
        session.rollback()
    assert names(engine) == set()


@pytest.fixture
def never(make_engine):
    """An engine whose driver begins no transactions, as in the documented recipe, but without its event."""
    engine = create_engine(make_engine("sqlite").url, connect_args={"isolation_level": None})
    yield engine
    engine.dispose()


@every_fence
def test_savepoint_is_the_transaction_where_nothing_begins_one(never, store, fence):
    with Session(never) as session:
        with pytest.raises(LeaseLost), lock_inside(session, fence) as lease:
            add(session, "refused")
            lose(lease)
        session.rollback()
    assert names(never) == set()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_write_after_a_rollback_that_the_driver_does_not_see_is_refused_when_the_lease_is_lost(never, store, begin):
    event.listen(never, "begin", lambda connection: connection.exec_driver_sql(begin))
    with Session(never) as session:
        with pytest.raises(LeaseLost), lock(session, "order", 42, fence=False) as lease:
            session.execute(text("INSERT INTO counter (id, name, value) VALUES (1, 'undone', 0)"))
            with pytest.raises(IntegrityError):
                session.execute(text("INSERT OR ROLLBACK INTO counter (id, name, value) VALUES (1, 'again', 0)"))
            lose(lease)
            session.execute(text("INSERT INTO counter (name, value) VALUES ('refused', 0)"))
        session.rollback()
    assert names(never) == set()


@every_fence
@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_savepoint_in_a_transaction_that_has_begun_is_released_unchecked(make_engine, store, fence, begin):
    engine = make_engine("sqlite", begin=begin)
    updates = []
    with Session(engine) as session, lock(session, "order", 42, fence=fence) as lease:
        session.execute(text("SELECT 1"))
        event.listen(engine, "before_cursor_execute", lambda *given: updates.append(given[2].startswith("UPDATE")))
        with session.begin_nested():
            add(session, "refused")
            lose(lease)
        assert not any(updates)
        with pytest.raises(LeaseLost):
            session.commit()
    assert names(engine) == set()


@every_fence
async def test_savepoint_whose_release_commits_is_refused_in_asyncio_too(make_engine, store, fence):
    url = make_engine("sqlite").url
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite"))
    async with AsyncSession(engine) as session:
        with pytest.raises(LeaseLost):
            async with alock(session, "order", 42, fence=fence) as lease:
                async with session.begin_nested():
                    session.add(Counter(name="refused"))
                    await session.flush()
                    lose(lease)
                await session.commit()
        await session.rollback()
        assert (await session.execute(text("SELECT name FROM counter"))).all() == []
    await engine.dispose()
