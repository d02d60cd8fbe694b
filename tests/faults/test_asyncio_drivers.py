"""The connections of asyncio drivers share an event loop of ours: the end of one ends no other."""

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import psycopg
import pytest
from packaging.version import Version
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from dlock_core.backend import LockState
from dlock_core.backends.table import waiting
from dlock_core.backends.table.backend import TableBackend
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends.table import from_engine
from tests import settings
from tests.proxy import Proxy
from tests.table_stores import URLS, server_of

LISTEN, LISTING = b"LISTEN", b"FROM dlock_lease"
WITHIN = 20.0
CANCELS_WITHOUT_BLOCKING = 170000
"""The first libpq that needs no PQcancel, in which psycopg's C code keeps the GIL."""

CLOSING = {"asyncpg": "0.32", "asyncmy": "0.2.18"}
"""Drivers that have been seen to leave a connection open when an event of the engine fails on it, and from when on not."""


@pytest.fixture
def name() -> str:
    return f"asyncio:{secrets.token_hex(4)}"


LISTENING = ["asyncpg", "psycopg_async"]


@pytest.fixture(params=[*LISTENING, "aiomysql", "asyncmy"])
def driver(request: pytest.FixtureRequest) -> str:
    if request.param == "psycopg_async" and psycopg.pq.version() < CANCELS_WITHOUT_BLOCKING:
        pytest.skip("this psycopg stops the whole process, our proxy too, while it asks a silent server to cancel")
    request.getfixturevalue(server_of(request.param))
    return str(request.param)


@pytest.fixture
def proxy(driver: str) -> Iterator[Proxy]:
    with Proxy(settings.POSTGRESQL_PORT if driver in LISTENING else settings.MARIADB_PORT) as proxy:
        yield proxy


@pytest.fixture
def store(driver: str, proxy: Proxy) -> Iterator[TableBackend]:
    store = from_engine(create_async_engine(URLS[driver].replace(f":{proxy.target}/", f":{proxy.port}/")), timeout=1.0)
    yield store
    proxy.cut()
    store.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(4)
    yield threads
    threads.shutdown(wait=False)


def look(store: TableBackend, name: str) -> list[LockState]:
    return run(store.inspect(BLOCKING, name))


def assert_step_fails_in_time(store: TableBackend, threads: ThreadPoolExecutor, name: str) -> None:
    failed = threads.submit(look, store, name)
    assert isinstance(failed.exception(WITHIN), BackendUnavailable)


@pytest.mark.parametrize("driver", LISTENING, indirect=True)
def test_step_that_is_under_way_ends_although_listeners_were_cut(
    store: TableBackend, proxy: Proxy, threads: ThreadPoolExecutor, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the step and the driver's notice of the end close such a connection."""
    monkeypatch.setattr(waiting, "RECONNECT_DELAY_S", -1.0)
    held = proxy.hold_reply(matching=LISTING)
    answer: Future[Any] = threads.submit(look, store, name)
    held.wait()
    for _ in range(2):
        cut = proxy.cut_reply(matching=LISTEN)
        run(store._listener.open(BLOCKING))
        cut.wait()
    store.pool.close()
    held.release()
    assert answer.result(WITHIN) == [LockState(name)]


def test_step_fails_in_time_although_idle_connections_are_half_open(
    store: TableBackend, proxy: Proxy, threads: ThreadPoolExecutor, name: str
) -> None:
    """The step also closes them, and asyncpg waits for the server to do the same."""
    held = proxy.hold_reply(matching=LISTING)
    first = threads.submit(look, store, name)
    held.wait()
    look(store, name)
    held.release()
    first.result(WITHIN)
    proxy.strand()
    assert_step_fails_in_time(store, threads, name)


def test_step_fails_in_time_although_its_new_connection_is_half_open(
    store: TableBackend, proxy: Proxy, threads: ThreadPoolExecutor, name: str
) -> None:
    """An event of the engine has begun a transaction whose COMMIT gets no reply."""
    engine = store.pool.connector._source  # type: ignore[attr-defined]

    @event.listens_for(engine, "connect")
    def ask(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SELECT 1")
        cursor.close()
        proxy.drop_reply(matching=b"COMMIT")

    assert_step_fails_in_time(store, threads, name)


def test_step_fails_in_time_although_an_event_cleans_up_on_a_silent_connection(
    store: TableBackend, proxy: Proxy, threads: ThreadPoolExecutor, name: str, driver: str
) -> None:
    needed = {"sqlalchemy": "2.0.55", driver: CLOSING.get(driver, "0")}
    if driver in CLOSING and any(Version(version(library)) < Version(least) for library, least in needed.items()):
        pytest.skip(f"an older {driver} or SQLAlchemy leaves this connection to the garbage collector, which warns")
    engine = store.pool.connector._source  # type: ignore[attr-defined]

    @event.listens_for(engine, "connect")
    def ask(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        proxy.deaf()
        try:
            cursor.execute("SELECT 1")
        finally:
            cursor.execute("SELECT 2")

    assert_step_fails_in_time(store, threads, name)
