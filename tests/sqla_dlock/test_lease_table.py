"""Leases in an engine's database: `configure(default=engine)`, released after COMMIT, on the same table as Django's."""

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, create_mock_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from dlock_core.backends.table.backend import TableBackend
from dlock_core.errors import AcquireTimeout
from dlock_core.runtime import BLOCKING, run
from sqla_dlock import alock, configure, lock, stores, tables
from sqla_dlock.backends import advisory, table
from sqla_dlock.backends.connector import pool_of
from sqla_dlock.backends.table import from_url
from tests import settings
from tests.mysql_server import DIALECT


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the lease table, configure an engine as the default store, and return the backend."""
    monkeypatch.setattr(stores, "_stores", {})
    made: list[TableBackend] = []

    def configure_(engine: Any, sync_engine: Any) -> TableBackend:
        tables.lease_metadata.create_all(sync_engine)
        configure(default=engine)
        made.append(stores.store_of("default").backend)  # type: ignore[arg-type]
        return made[-1]

    yield configure_
    for backend in made:
        backend.close()


def holders(backend: TableBackend, name: str) -> list[str]:
    (state,) = run(backend.inspect(BLOCKING, name))
    return [holder.holder for holder in state.holders]


@pytest.mark.parametrize("engine", ["postgresql", "mariadb", "sqlite"], indirect=True)
def test_lock_is_released_after_the_commit(engine: Any, configured: Any) -> None:
    backend = configured(engine, engine)
    with Session(engine) as session, Session(engine) as other, lock(session, "order", 42) as lease:
        session.execute(text("UPDATE dlock_fence SET holder = holder"))
        assert holders(backend, "order:42") == [lease.holder]
        with pytest.raises(AcquireTimeout):
            lock(other, "order", 42, wait=0, fence=False).acquire()
        session.commit()
    assert holders(backend, "order:42") == []


@pytest.mark.parametrize("name", ["asyncpg", "asyncmy", "aiosqlite"])
async def test_lock_of_an_async_session_is_released_after_the_commit(
    make_async_engine: Any, sqla_tables: Any, configured: Any, name: str
) -> None:
    engine = make_async_engine(name)
    backend = configured(engine, sqla_tables(name))
    async with AsyncSession(engine) as session, alock(session, "order", 42) as lease:
        await session.execute(text("UPDATE dlock_fence SET holder = holder"))
        assert holders(backend, "order:42") == [lease.holder]
        await session.commit()
    assert holders(backend, "order:42") == []


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_pool_of_an_engine_may_be_used_up(engine: Any, configured: Any, make_engine: Any) -> None:
    """A session has its last connection, and wants a lock."""
    small = make_engine("postgresql", pool_size=1, max_overflow=0, pool_timeout=1)
    configured(small, engine)
    with Session(small) as session:
        session.execute(text("SELECT 1"))
        with lock(session, "order", 42, fence=False):
            session.commit()


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_table_of_a_django_migration_is_the_same(engine: Any) -> None:
    database = {"postgresql": "postgres", DIALECT: "dlock"}[engine.dialect.name]
    django = create_engine(make_url(engine.url).set(database=database))
    try:
        with django.connect() as connection:
            options = {
                "compare_type": True,
                "compare_server_default": True,
                "include_name": lambda name, kind, _: kind != "table" or name == "dlock_lease",
            }
            context = MigrationContext.configure(connection, opts=options)
            differences = compare_metadata(context, tables.lease_metadata)
    finally:
        django.dispose()
    of_index = [one for one in differences if one[0] in {"add_index", "remove_index"}]  # Django names it otherwise
    assert [one for one in differences if one not in of_index] == []
    assert {tuple(column.name for column in index.columns) for kind, index in of_index if kind == "add_index"} == {
        ("expires_at",)
    }


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("database://default", "pass an engine to"),
        ("database+nonsense", "cannot use the URL after"),
        ("database+nonsense://u:s3cr3t@h/d", "cannot use the URL after"),
        ("database+postgresql+psycopg://user:s3cr3t/d", "cannot use the URL after"),
        ("database+mssql+pyodbc://u:s3cr3t@h/d", "no leases on mssql|pyodbc"),
    ],
)
def test_wrong_url_is_told_before_anything_is_sent(url: str, told: str) -> None:
    with pytest.raises((ValueError, ImportError), match=told) as caught:
        from_url(url)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite+aiosqlite://", "postgresql+asyncpg://nobody@localhost:1/a"])
@pytest.mark.parametrize("made", [advisory.from_engine, table.from_engine, lambda engine: configure(default=engine)])
def test_sync_engine_of_an_async_engine_is_refused_before_any_io(url: str, made: Any) -> None:
    with pytest.raises(TypeError, match="not its sync_engine"):
        made(create_async_engine(url).sync_engine)


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="leases need an Engine or AsyncEngine, not Session"):
        pool_of(Session())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="leases need an Engine"):
        pool_of(create_mock_engine("postgresql+psycopg://", lambda *_: None))  # type: ignore[arg-type]


def test_leases_of_one_file_are_shared_by_both_integrations(default: None) -> None:
    from django_dlock.backends.table import from_url as of_django

    url = f"database+sqlite:///{settings.DATABASES['default']['NAME']}"
    ours, theirs = from_url(url), of_django("database://default")
    from dlock_core import Lock

    with Lock(ours, "shared") as lease:
        assert holders(theirs, "shared") == [lease.holder]
    ours.close()
    theirs.close()
