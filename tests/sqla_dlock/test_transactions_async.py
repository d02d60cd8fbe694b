"""The promises of sqla_dlock.transactions for an AsyncSession, on every driver for asyncio."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from dlock_core.transactions.tie import Outcome
from sqla_dlock import commit_status
from sqla_dlock.connections import note_xid
from sqla_dlock.greenlets import await_
from sqla_dlock.transactions import before_work, in_transaction, on_end, on_transaction
from tests.garbage import collect_garbage
from tests.proxy import Proxy
from tests.sqla_dlock.engines import ASYNC
from tests.sqla_dlock.lost import held_in_commit, port_of, terminate_held, url_through
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.sessions import committed, kill_session, session_id

COMMITTED, ROLLED_BACK, UNKNOWN = Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.UNKNOWN
BESIDE = {
    "aiosqlite": "sqlite",
    "asyncpg": "postgresql",
    "psycopg_async": "postgresql",
    "aiomysql": "mariadb",
    "asyncmy": "mariadb",
}
SERVERS = [name for name in ASYNC if name != "aiosqlite"]
POSTGRESQL = ["asyncpg", "psycopg_async"]

every_driver = pytest.mark.parametrize("name", ASYNC)
servers_only = pytest.mark.parametrize("name", SERVERS)
postgresql_only = pytest.mark.parametrize("name", POSTGRESQL)
endings = pytest.mark.parametrize("ending", ["rollback", "close"])

XID = text("SELECT CAST(pg_current_xact_id() AS text)")


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def heard() -> list[Any]:
    """What the callbacks have reported, in order."""
    return []


@pytest.fixture
def sound(name: str, make_engine: Callable[..., Engine]) -> Engine:
    """A blocking engine on the same database, which does not go through `network`."""
    return make_engine(BESIDE[name])


@pytest.fixture
def engine(name: str, sound: Engine, make_async_engine: Callable[..., AsyncEngine]) -> AsyncEngine:
    return make_async_engine(name)


@pytest.fixture
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session:
        yield session


@pytest.fixture
def network(name: str, sound: Engine) -> Iterator[Proxy]:
    """The network between the session `far` and the server."""
    with Proxy(port_of(name)) as proxy:
        yield proxy


@pytest.fixture
async def far(name: str, network: Proxy) -> AsyncIterator[AsyncSession]:
    """A session behind the network."""
    engine = create_async_engine(url_through(name, network.port), poolclass=NullPool)
    session = AsyncSession(engine)
    yield session
    network.forward()
    await session.close()
    await engine.dispose()


async def add(session: AsyncSession, name: str) -> None:
    await session.execute(text("INSERT INTO counter (name, value) VALUES (:name, 0)"), {"name": name})


def names(engine: Engine) -> set[str]:
    return {name for (name,) in committed(engine, "SELECT name FROM counter")}


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def settle_awaiting(heard: list[Any]) -> Callable[[Outcome], None]:
    """Return a settler that awaits something, as a lease awaits its release."""

    def settle(outcome: Outcome) -> None:
        await_(asyncio.sleep(0))
        heard.append(outcome)

    return settle


async def end(session: AsyncSession, ending: str) -> None:
    with contextlib.suppress(DBAPIError):
        await getattr(session, ending)()


# How it ends


@every_driver
async def test_settle_hears_committed_when_other_sessions_can_see_the_work(sound, session, heard):
    await add(session, "a")
    on_end(session.sync_session, lambda outcome: heard.extend([outcome, names(sound)]))
    await session.commit()
    assert heard == [COMMITTED, {"a"}]


@postgresql_only
@pytest.mark.parametrize("failing", ["SELECT 1 / 0", "SELECT CAST(:text AS integer)", "savepoint"])
async def test_commit_that_postgresql_takes_for_a_rollback_is_rolled_back(sound, session, heard, failing):
    """asyncpg does not report the state of the transaction, and some errors come from the driver alone."""
    await add(session, "a")
    on_end(session.sync_session, heard.append)
    savepoint = await session.begin_nested() if failing == "savepoint" else None
    with pytest.raises(DBAPIError):
        await session.execute(text("SELECT 1 / 0" if savepoint else failing), {} if savepoint else {"text": "x"})
    if savepoint is not None:
        await savepoint.rollback()
    await session.commit()
    assert heard == [COMMITTED if "a" in names(sound) else ROLLED_BACK]
    assert ("a" in names(sound)) is (savepoint is not None or is_drivers_own(session, failing))


def is_drivers_own(session: AsyncSession, statement: str) -> bool:
    """Return whether the error is the driver's own: asyncpg checks parameters before it sends them."""
    return ":" in statement and session.get_bind().dialect.driver == "asyncpg"


@every_driver
@pytest.mark.parametrize("ending", ["rollback", "close", "reset", "invalidate"])
async def test_settle_hears_rolled_back_when_the_session_lets_go(sound, session, heard, ending):
    await add(session, "a")
    on_end(session.sync_session, settle_awaiting(heard))
    await getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@every_driver
async def test_settler_awaits_in_every_form_of_ending(sound, engine, heard):
    """SQLAlchemy ends the block of `async with AsyncSession` in another task."""
    async with AsyncSession(engine) as session:
        await add(session, "a")
        on_end(session.sync_session, settle_awaiting(heard))
    assert heard == [ROLLED_BACK]
    async with async_sessionmaker(engine).begin() as session:
        await add(session, "b")
        on_end(session.sync_session, settle_awaiting(heard))
    async with AsyncSession(engine) as session, session.begin():
        on_end(session.sync_session, settle_awaiting(heard))
    with pytest.raises(Sorry):
        async with AsyncSession(engine) as session, session.begin():
            await add(session, "c")
            on_end(session.sync_session, settle_awaiting(heard))
            raise Sorry
    async with AsyncSession(engine) as session:
        await add(session, "d")
        on_end(session.sync_session, settle_awaiting(heard))
        await session.run_sync(lambda session: session.commit())
    assert heard == [ROLLED_BACK, COMMITTED, COMMITTED, ROLLED_BACK, COMMITTED]
    assert names(sound) == {"b", "d"}


@every_driver
async def test_rollback_of_an_inner_savepoint_does_not_settle(sound, session, heard):
    async with session.begin():
        await add(session, "a")
        with pytest.raises(Sorry):
            async with session.begin_nested():
                on_end(session.sync_session, heard.append)
                await add(session, "b")
                raise Sorry
        assert heard == []
    assert heard == [COMMITTED]
    assert names(sound) == {"a"}


@every_driver
async def test_every_transaction_of_a_session_settles_only_its_own(sound, session, heard):
    for number, ending in enumerate(("commit", "rollback", "commit", "close")):
        await add(session, f"{number}")
        on_end(session.sync_session, lambda outcome, number=number: heard.append((number, outcome)))
        await getattr(session, ending)()
    assert heard == [(0, COMMITTED), (1, ROLLED_BACK), (2, COMMITTED), (3, ROLLED_BACK)]
    assert names(sound) == {"0", "2"}


@every_driver
async def test_flush_that_fails_inside_commit_is_rolled_back(sound, session, heard):
    await session.execute(text("INSERT INTO counter (id, name, value) VALUES (12345, 'b', 0)"))
    on_end(session.sync_session, heard.append)
    session.add(Counter(id=12345, name="c"))
    with pytest.raises(IntegrityError):
        await session.commit()
    await session.close()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@postgresql_only
@endings
async def test_constraint_refused_at_commit_is_rolled_back(sound, session, heard, ending):
    await session.execute(text("CREATE TEMPORARY TABLE target (id INTEGER PRIMARY KEY)"))
    await session.execute(
        text("CREATE TEMPORARY TABLE note (id INTEGER REFERENCES target DEFERRABLE INITIALLY DEFERRED)")
    )
    await session.execute(text("INSERT INTO note VALUES (1)"))
    on_end(session.sync_session, heard.append)
    with pytest.raises(IntegrityError):
        await session.commit()
    await getattr(session, ending)()
    assert heard == [ROLLED_BACK]


@every_driver
async def test_joined_transaction_settles_when_the_connection_commits(sound, engine, heard):
    async with engine.connect() as connection:
        await connection.begin()
        async with AsyncSession(connection) as session:
            await add(session, "a")
            on_end(session.sync_session, settle_awaiting(heard))
            await session.commit()
        assert heard == []
        await connection.commit()
    assert heard == [COMMITTED]
    assert names(sound) == {"a"}


@servers_only
@pytest.mark.filterwarnings("ignore:The garbage collector is trying to clean up", "ignore::ResourceWarning")
async def test_forgotten_session_with_a_live_connection_is_unknown(session, engine, heard):
    forgotten = AsyncSession(engine)
    await add(forgotten, "a")
    on_end(forgotten.sync_session, heard.append)
    del forgotten
    collect_garbage()
    assert heard == [UNKNOWN]


# Hooks


@every_driver
async def test_hook_comes_before_the_first_statement_of_each_transaction(engine, session):
    sent: list[str] = []
    event.listen(
        engine.sync_engine,
        "after_cursor_execute",
        lambda _connection, _cursor, statement, *_: sent.append(statement.split()[0]),
    )

    def hook(connection: Connection) -> None:
        connection.execute(text("SELECT 1"))
        sent.append("hook")

    before_work(session.sync_session, hook)
    for _ in range(2):
        await add(session, "a")
        await session.commit()
    assert [word for word in sent if word != "BEGIN"] == ["SELECT", "hook", "INSERT"] * 2


@every_driver
async def test_hook_undone_by_a_savepoint_is_called_again_before_the_next_statement(session, heard):
    savepoint = await session.begin_nested()
    await add(session, "a")

    def hook(connection: Connection) -> None:
        heard.append(connection.execute(text("SELECT 1")).scalar())

    await session.run_sync(lambda session: before_work(session, hook))
    await savepoint.rollback()
    assert heard == [1]
    await add(session, "b")
    await add(session, "c")
    assert heard == [1, 1]


@every_driver
async def test_statement_that_a_hook_refuses_is_not_sent_nor_the_next_one(sound, session):
    stop = before_work(session.sync_session, fail_with(Sorry()))
    for _ in range(2):
        with pytest.raises(Sorry):
            await add(session, "a")
    stop()
    await add(session, "b")
    await session.commit()
    assert names(sound) == {"b"}


@every_driver
async def test_begin_is_heard_for_each_outermost_transaction(session, heard):
    on_transaction(session.sync_session, lambda: heard.append("begin"))
    for _ in range(2):
        await add(session, "a")
        assert in_transaction(session.sync_session)
        await session.commit()
    assert heard == ["begin", "begin"]


@every_driver
@endings
@pytest.mark.parametrize("error", [Sorry, asyncio.CancelledError])
async def test_check_that_raises_rolls_back_and_leaves_the_connection_sound(sound, session, heard, error, ending):
    await add(session, "a")

    def check() -> None:
        await_(asyncio.sleep(0))
        raise error

    on_end(session.sync_session, heard.append, before_commit=check)
    with pytest.raises(error):
        await session.commit()
    await getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    await add(session, "b")
    await session.commit()
    assert names(sound) == {"b"}


# Lost and cancelled


@servers_only
@endings
async def test_session_killed_before_a_statement_is_rolled_back(sound, session, heard, ending):
    await add(session, "a")
    on_end(session.sync_session, settle_awaiting(heard))
    kill_session(sound, await session.run_sync(lambda session: session_id(session.connection())))
    with pytest.raises(DBAPIError):
        await add(session, "b")
    await getattr(session, ending)()
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@servers_only
@pytest.mark.parametrize("ending", ["rollback", "close", "reset", "invalidate"])
async def test_session_killed_in_silence_is_rolled_back_when_it_ends(sound, session, heard, ending):
    await add(session, "a")
    on_end(session.sync_session, settle_awaiting(heard))
    kill_session(sound, await session.run_sync(lambda session: session_id(session.connection())))
    await end(session, ending)
    assert heard == [ROLLED_BACK]


@servers_only
@endings
async def test_commit_that_never_arrives_is_unknown(sound, network, far, heard, ending):
    await add(far, "a")
    on_end(far.sync_session, settle_awaiting(heard))
    network.cut_request(matching=b"COMMIT")
    with pytest.raises(DBAPIError):
        await far.commit()
    await end(far, ending)
    assert heard == [UNKNOWN]
    assert names(sound) == set()


@servers_only
@endings
async def test_commit_whose_answer_is_lost_is_unknown(sound, network, far, heard, ending):
    await add(far, "a")
    on_end(far.sync_session, settle_awaiting(heard))
    network.cut_reply(matching=b"COMMIT")
    with pytest.raises(DBAPIError):
        await far.commit()
    await end(far, ending)
    assert heard == [UNKNOWN]
    assert names(sound) == {"a"}


@postgresql_only
@pytest.mark.parametrize(("lost", "outcome"), [("cut_request", ROLLED_BACK), ("cut_reply", COMMITTED)])
async def test_lost_commit_is_known_when_postgresql_can_be_asked(sound, network, far, heard, lost, outcome):
    note(far)
    await add(far, "a")
    on_end(far.sync_session, settle_awaiting(heard))
    getattr(network, lost)(matching=b"COMMIT")
    with pytest.raises(DBAPIError):
        await far.commit()
    await far.close()
    assert heard == [outcome]
    assert names(sound) == ({"a"} if outcome is COMMITTED else set())


@postgresql_only
async def test_server_that_does_not_answer_in_time_leaves_it_unknown(sound, network, far, heard, monkeypatch):
    monkeypatch.setattr(commit_status, "MAX_STATUS_WAIT_S", 0.2)
    note(far)
    await add(far, "a")
    on_end(far.sync_session, heard.append)
    network.cut_reply(matching=b"COMMIT")
    event.listen(far.sync_session.get_bind(), "do_connect", lambda *_: network.deaf())
    with pytest.raises(DBAPIError):
        await far.commit()
    await far.close()
    assert heard == [UNKNOWN]


def note(session: AsyncSession) -> None:
    """Note the transaction's number, as an admit does on PostgreSQL."""
    before_work(session.sync_session, lambda connection: note_xid(connection, connection.scalar(XID)))


@postgresql_only
async def test_session_terminated_inside_commit_is_unknown(sound, session, heard):
    on_transaction(session.sync_session, lambda: on_end(session.sync_session, settle_awaiting(heard)))
    event.listen(session.sync_session, "before_commit", add_a)
    with held_in_commit(sound, terminate_held), pytest.raises(DBAPIError):
        await commit(session)
    await session.close()
    assert heard == [UNKNOWN]


@postgresql_only
@pytest.mark.parametrize("noted", [False, True])
async def test_task_cancelled_inside_commit_is_unknown_unless_postgresql_can_be_asked(sound, session, heard, noted):
    """Both drivers ask the server to cancel the COMMIT, which may be too late."""
    loop, tasks = asyncio.get_running_loop(), []
    if noted:
        note(session)
    on_transaction(session.sync_session, lambda: on_end(session.sync_session, settle_awaiting(heard)))
    event.listen(session.sync_session, "before_commit", add_a)
    with held_in_commit(sound, lambda _: cancel(loop, tasks)):
        tasks.append(asyncio.ensure_future(commit(session)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
    await session.close()
    known = COMMITTED if names(sound) else ROLLED_BACK
    assert heard == [known if noted else UNKNOWN]


def cancel(loop: asyncio.AbstractEventLoop, tasks: list[asyncio.Future[Any]]) -> None:
    done = threading.Event()
    loop.call_soon_threadsafe(lambda: (tasks[0].cancel(), done.set()))
    assert done.wait(30)


def add_a(session: Any) -> None:
    session.execute(text("INSERT INTO counter (name, value) VALUES ('a', 0)"))


async def commit(session: AsyncSession) -> None:
    await session.connection()
    await session.commit()


@every_driver
async def test_task_cancelled_in_its_block_is_rolled_back(sound, engine, heard):
    session = AsyncSession(engine)

    async def work() -> None:
        async with session:
            await add(session, "a")
            on_end(session.sync_session, settle_awaiting(heard))
            working.set()
            await asyncio.Event().wait()

    working = asyncio.Event()
    task = asyncio.ensure_future(work())
    await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == [ROLLED_BACK]
    assert names(sound) == set()


@every_driver
async def test_session_closed_in_another_task_settles_there(sound, session, heard):
    await add(session, "a")
    on_end(session.sync_session, settle_awaiting(heard))
    await asyncio.create_task(session.commit())
    assert heard == [COMMITTED]
