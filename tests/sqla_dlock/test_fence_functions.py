"""The fence's functions on PostgreSQL: create_all and Alembic make them, exclusive locks call them, or do without."""

import contextlib
import hashlib

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from dlock_core.errors import StaleToken
from dlock_core.transactions import fence_functions
from sqla_dlock import alock, fencing, lock
from tests.sqla_dlock.sessions import committed

pytestmark = pytest.mark.usefixtures("store")

BOTH = ["dlock_admit", "dlock_confirm"]
NAMES = "SELECT p.proname FROM pg_proc AS p WHERE p.proname LIKE 'dlock%' ORDER BY 1"
WORK = text("UPDATE counter SET value = value + 1")


@pytest.fixture(params=["postgresql", "psycopg2"])
def engine(request, make_engine):
    yield make_engine(request.param)
    with make_engine("postgresql").begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS ten CASCADE"))
        fencing.metadata.create_all(connection)


@pytest.fixture
def sent(engine):
    """The statements that the engine has sent."""
    return listen(engine)


def listen(engine):
    statements = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    return statements


def fenced(engine, **options):
    with Session(engine) as session, lock(session, "order", 42, **options) as lease:
        session.execute(WORK)
        session.commit()
    return lease.token


def calls(statements):
    return [name for sql in statements for name in BOTH if f".{name}(" in sql]


def questions(statements):
    return sum("has_function_privilege" in sql for sql in statements)


def run(engine, *statements):
    with engine.begin() as connection:
        for each in statements:
            connection.execute(text(each))


def names(engine):
    return [name for (name,) in committed(engine, NAMES)]


def test_text_of_a_released_function_never_changes():
    """A release that runs before its migration calls the functions of the one before: a change needs new names."""
    released = {"admit": "97d48efac0075535", "confirm": "7112075ac902e05d"}
    made = {"admit": fence_functions.CREATE_ADMIT, "confirm": fence_functions.CREATE_CONFIRM}
    assert {name: hashlib.sha256(sql.encode()).hexdigest()[:16] for name, sql in made.items()} == released


def test_locks_call_them_and_ask_for_them_once_for_each_engine(engine, sent):
    fenced(engine)
    fenced(engine, fence="lease")
    engine.dispose()  # the next connection is another one
    fenced(engine)
    assert calls(sent) == ["dlock_admit", "dlock_admit", "dlock_confirm", "dlock_admit"]
    assert questions(sent) == 1


def test_create_all_makes_them_with_the_table_and_for_a_table_that_was_there_and_drop_all_drops_them(engine):
    def definitions():
        return committed(engine, "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname LIKE 'dlock%' ORDER BY 1")

    made = definitions()
    fencing.metadata.drop_all(engine)
    assert names(engine) == []
    fencing.metadata.create_all(engine)
    assert definitions() == made
    run(engine, "DROP FUNCTION dlock_admit, dlock_confirm")
    fencing.metadata.create_all(engine)
    assert definitions() == made


def test_role_that_may_create_nothing_passes_create_all_and_sends_the_statements(engine, sent):
    run(
        engine,
        "DROP FUNCTION dlock_admit, dlock_confirm",
        "CREATE ROLE clerk",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk",
    )
    try:
        with engine.connect() as connection:
            connection.execute(text("SET ROLE clerk"))
            fencing.metadata.create_all(connection)
            connection.commit()
            fenced(connection)
            connection.invalidate()
        assert names(engine) == []
        assert not calls(sent)
    finally:
        run(engine, "DROP OWNED BY clerk", "DROP ROLE clerk")


def test_one_line_in_a_migration_makes_them(engine, sent):
    run(engine, "DROP FUNCTION dlock_admit, dlock_confirm")
    with engine.begin() as connection:
        Operations(MigrationContext.configure(connection)).execute(fencing.CREATE_FUNCTIONS)
    assert names(engine) == BOTH
    fenced(engine)
    assert calls(sent) == ["dlock_admit"]


def test_where_they_are_missing_the_statements_are_sent_and_nothing_is_asked_again_at_once(engine, sent):
    run(engine, "DROP FUNCTION dlock_admit, dlock_confirm")
    for _ in range(3):
        token = fenced(engine)
    fenced(engine, fence="lease")
    assert not calls(sent)
    assert questions(sent) == 1
    assert committed(engine, "SELECT name FROM dlock_fence WHERE token >= :token", token=token) == [("order:42",)]


def test_process_that_runs_before_the_migration_calls_them_soon_after_it(engine, sent, monkeypatch):
    run(engine, "DROP FUNCTION dlock_admit, dlock_confirm")
    monkeypatch.setattr(fencing, "ASK_AGAIN_S", 0.0)
    fenced(engine)
    assert not calls(sent)
    run(engine, fencing.CREATE_FUNCTIONS.replace(":", "\\:"))
    fenced(engine)
    fenced(engine)
    assert calls(sent) == ["dlock_admit"] * 2
    assert questions(sent) == 2


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_in_a_snapshot_they_are_asked_for_in_a_transaction_before_it(engine, level):
    """The question would take the snapshot, which has to be younger than the admit."""
    engine = engine.execution_options(isolation_level=level)
    in_order = []

    @event.listens_for(engine, "commit")
    def note_commit(connection):
        in_order.append("COMMIT")

    @event.listens_for(engine, "before_cursor_execute")
    def note_statement(connection, cursor, sql, *rest):
        in_order.append("question" if questions([sql]) else (calls([sql]) or ["work"])[0])

    fenced(engine)
    assert in_order == ["question", "dlock_admit", "COMMIT", "dlock_admit", "work", "COMMIT"]


@pytest.mark.parametrize(
    "loss",
    [
        "DROP FUNCTION dlock_admit",
        "ALTER FUNCTION dlock_admit RENAME TO former_admit",
        "DROP SCHEMA ten CASCADE",
        "REVOKE EXECUTE ON FUNCTION dlock_admit FROM public, clerk",
    ],
)
def test_engine_that_loses_them_fails_one_transaction_and_then_sends_the_statements(make_engine, engine, loss):
    run(engine, "CREATE SCHEMA ten", "CREATE ROLE clerk LOGIN", "GRANT USAGE ON SCHEMA ten, public TO clerk")
    run(engine, "GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk")
    tenant = make_engine(
        "postgresql" if engine.driver == "psycopg" else "psycopg2",
        connect_args={"options": "-c search_path=ten,public -c role=clerk"},
    )
    sent = listen(tenant)
    try:
        run(engine, "SET LOCAL search_path = ten, public", fencing.CREATE_FUNCTIONS)
        fenced(tenant)
        assert "ten.dlock_admit(" in "\n".join(sent)
        run(engine, "SET LOCAL search_path = ten, public", loss)
        with pytest.raises(DBAPIError, match=r"dlock_admit|ten"):
            fenced(tenant)
        sent.clear()
        fenced(tenant)
        fenced(tenant)
        assert not calls(sent)
    finally:
        tenant.dispose()
        run(engine, "DROP OWNED BY clerk", "DROP ROLE clerk")


NEW_FENCE = "CREATE TABLE ten.dlock_fence (LIKE public.dlock_fence INCLUDING ALL)"
NEWER_HOLDER = "UPDATE ten.dlock_fence SET token = token + 1000, holder = 'newer' WHERE name = 'order:42'"


@pytest.mark.parametrize("fence", ["transaction", "lease"])
def test_table_that_comes_earlier_in_the_search_path_is_used_though_the_driver_has_prepared(make_engine, engine, fence):
    """PostgreSQL keeps the plan of a prepared statement as long as the path has the same text."""
    run(engine, "CREATE SCHEMA ten")
    driver = "postgresql" if engine.driver == "psycopg" else "psycopg2"
    tenant = make_engine(driver, pool_size=1, connect_args={"options": "-c search_path=ten,public"})
    for _ in range(8):
        fenced(tenant, fence=fence)
    run(engine, NEW_FENCE)
    token = fenced(tenant, fence=fence)
    assert committed(engine, "SELECT name, token FROM ten.dlock_fence") == [("order:42", token)]
    with pytest.raises(StaleToken), Session(tenant) as session, lock(session, "order", 42, fence=fence):
        session.execute(WORK)
        session.commit()
        run(engine, NEWER_HOLDER)
        session.execute(WORK)
        session.commit()


TENANT_PATH = {
    "asyncpg": {"server_settings": {"search_path": "ten,public"}},
    "psycopg_async": {"options": "-c search_path=ten,public"},
}


@pytest.mark.parametrize("fence", ["transaction", "lease"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
async def test_table_that_comes_earlier_is_used_also_with_asyncio(make_engine, make_async_engine, driver, fence):
    admin = make_engine("postgresql")
    tenant = make_async_engine(driver, pool_size=1, connect_args=TENANT_PATH[driver])
    with contextlib.ExitStack() as stack:
        run(admin, "CREATE SCHEMA ten")
        stack.callback(run, admin, "DROP SCHEMA ten CASCADE")

        async def fenced():
            async with AsyncSession(tenant) as session, alock(session, "order", 42, fence=fence) as lease:
                await session.execute(WORK)
                await session.commit()
            return lease.token

        for _ in range(8):
            await fenced()
        run(admin, NEW_FENCE)
        token = await fenced()
        assert committed(admin, "SELECT name, token FROM ten.dlock_fence") == [("order:42", token)]
        with pytest.raises(StaleToken):
            async with AsyncSession(tenant) as session, alock(session, "order", 42, fence=fence):
                await session.execute(WORK)
                await session.commit()
                run(admin, NEWER_HOLDER)
                await session.execute(WORK)
                await session.commit()
        await tenant.dispose()


@contextlib.contextmanager
def schema_ten(admin):
    """Make a tenant's empty schema; afterwards, restore the functions of the fence, whatever was dropped."""
    run(admin, "CREATE SCHEMA ten")
    try:
        yield
    finally:
        run(admin, "DROP SCHEMA ten CASCADE")
        fencing.metadata.create_all(admin)


@pytest.mark.parametrize(("shared", "functions"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
async def test_prepared_statement_of_the_fence_never_passes_a_table_that_is_no_longer_it(
    make_engine, make_async_engine, driver, shared, functions
):
    """Shared leases, and all leases where the functions are missing, send statements, which drivers prepare."""
    admin = make_engine("postgresql")
    tenant = make_async_engine(driver, pool_size=1, connect_args=TENANT_PATH[driver])
    with schema_ten(admin):
        if not functions:
            run(admin, "DROP FUNCTION dlock_admit, dlock_confirm")

        async def fenced(fence):
            async with AsyncSession(tenant) as session, alock(session, "order", 42, shared=shared, fence=fence):
                await session.execute(WORK)
                await session.commit()

        for fence in ["transaction"] * 8 + ["lease"] * 8:
            await fenced(fence)
        async with AsyncSession(tenant) as session, alock(session, "order", 42, shared=shared, fence="lease"):
            await session.execute(WORK)
            run(admin, NEW_FENCE, "INSERT INTO ten.dlock_fence VALUES ('order:42', 1000000, 'newer', 0)")
            with pytest.raises(StaleToken):
                await session.commit()
        run(admin, "DELETE FROM ten.dlock_fence")
        for fence in ["transaction", "lease"]:
            await fenced(fence)
        assert committed(admin, "SELECT name FROM ten.dlock_fence") == [("order:42",)]
        await tenant.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async"])
async def test_holder_is_not_refused_for_a_table_that_comes_earlier_between_two_of_its_transactions(
    make_engine, make_async_engine, driver
):
    """The prepared statement is sent once more; a holder that was admitted before may get no greater token."""
    admin = make_engine("postgresql")
    tenant = make_async_engine(driver, pool_size=1, connect_args=TENANT_PATH[driver])
    with schema_ten(admin):
        run(admin, "DROP FUNCTION dlock_admit, dlock_confirm")
        async with AsyncSession(tenant) as session, alock(session, "order", 42) as lease:
            for _ in range(8):
                await session.execute(WORK)
                await session.commit()
            run(admin, NEW_FENCE)
            await session.execute(WORK)
            await session.commit()
        assert committed(admin, "SELECT name, token FROM ten.dlock_fence") == [("order:42", lease.token)]
        await tenant.dispose()


def test_transaction_has_its_number_from_them(engine):
    """An unanswered COMMIT is looked up by this number."""
    from sqla_dlock.connections import tracker_of

    with Session(engine) as session, lock(session, "order", 42):
        (number,) = session.execute(select(text("CAST(pg_current_xact_id() AS text)"))).one()
        assert tracker_of(session.connection()).xid == number
