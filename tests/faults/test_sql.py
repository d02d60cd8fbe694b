"""The connections of stores in a database disturb no others, whatever has become of them."""

import asyncio
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from django.db.backends.signals import connection_created
from sqlalchemy import create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import await_only

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.backends.sql.pool import DedicatedConnection
from dlock_core.backends.table import waiting
from dlock_core.backends.table.backend import TableBackend
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends.table import from_engine, from_url
from tests.interrupts import SoftLimit
from tests.table_stores import ASYNC, URLS, server_of, table
from tests.waiting import WITHIN, until

END_LISTENERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"


@pytest.fixture
def name() -> str:
    return f"sql:{secrets.token_hex(4)}"


@pytest.fixture
def postgres(request: pytest.FixtureRequest, django_db_blocker: Any) -> Iterator[TableBackend]:
    with django_db_blocker.unblock():
        backend = table(request, getattr(request, "param", "postgresql"))
        yield backend
    backend.close()


@pytest.fixture
def memory() -> Iterator[TableBackend]:
    backend = from_engine(create_engine("sqlite://"))
    yield backend
    backend.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Open more files than select() supports."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    pairs = [socket.socketpair() for _ in range(600)]
    yield
    for pair in pairs:
        for end in pair:
            end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def each(steps: list[Callable[[], Any]]) -> list[Any]:
    """Run steps at the same time, each in its own thread, and return their results or errors."""
    gate, given = threading.Barrier(len(steps)), []

    def make(step: Callable[[], Any]) -> None:
        gate.wait()
        try:
            given.append(step())
        except Exception as error:
            given.append(error)

    threads = [threading.Thread(target=make, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given


def with_waiter(backend: TableBackend, name: str, look: Callable[[], Any]) -> None:
    """Call `look` while a thread waits for a held lock, and then release the lock."""
    holder = Lock(backend, name, ttl=60).acquire()
    waiter = threading.Thread(target=lambda: Lock(backend, name, wait=None).acquire().release())
    waiter.start()
    try:
        look()
    finally:
        holder.release()
        waiter.join()


@pytest.mark.parametrize("postgres", ["postgresql", "psycopg_async"], indirect=True)
def test_closing_a_connection_that_has_ended_leaves_whoever_got_its_number(postgres: TableBackend, name: str) -> None:
    with_waiter(postgres, name, lambda: until(lambda: postgres._listener.is_listening))
    kept = postgres._listener._dedicated
    assert kept is not None
    assert kept.connection is not None
    number = kept.connection.driver.fileno()
    run(postgres.pool.step(BLOCKING, "", lambda session: session.execute(END_LISTENERS)))
    until(lambda: not postgres._listener.is_listening)
    pairs = [socket.socketpair()]
    while pairs[-1][1].fileno() < number:
        pairs.append(socket.socketpair())
    assert number in {end.fileno() for pair in pairs for end in pair}
    with_waiter(postgres, name, lambda: until(lambda: postgres._listener.is_listening))
    for one, other in pairs:
        with one, other:
            one.sendall(b"hello")
            assert other.recv(5) == b"hello"


@pytest.mark.parametrize("postgres", ["postgresql", "psycopg", "psycopg2", "psycopg_async"], indirect=True)
def test_listener_that_is_closed_while_it_opens_closes_its_connection(postgres: TableBackend, monkeypatch: Any) -> None:
    opened, step = [], DedicatedConnection.step

    def step_after_close(dedicated: DedicatedConnection, *args: Any) -> Any:
        assert dedicated.connection is not None
        opened.append(dedicated.connection.driver)
        postgres._listener.close()
        return step(dedicated, *args)

    monkeypatch.setattr(DedicatedConnection, "step", step_after_close)
    run(postgres._listener.open(BLOCKING))
    assert [bool(driver.closed) for driver in opened] == [True]
    assert not postgres._listener.is_listening


@pytest.mark.parametrize("postgres", ["postgresql", "psycopg", "psycopg2", "psycopg_async"], indirect=True)
def test_listener_that_is_closed_while_it_connects_closes_its_connection(
    postgres: TableBackend, monkeypatch: Any
) -> None:
    connector: Any = postgres.pool.connector
    opened, connect = [], connector.connect

    def connect_and_close(limit: float) -> Any:
        opened.append(connect(limit))
        postgres._listener.close()
        return opened[-1]

    monkeypatch.setattr(connector, "connect", connect_and_close)
    run(postgres._listener.open(BLOCKING))
    (connection,) = opened
    until(lambda: connection.driver.closed)
    assert not postgres._listener.is_listening


@pytest.mark.parametrize("postgres", ["postgresql", "psycopg", "psycopg2"], indirect=True)
def test_listener_that_connects_after_another_one_was_opened_leaves_that_one_alone(
    postgres: TableBackend, monkeypatch: Any
) -> None:
    listener, connector, opened = postgres._listener, cast("Any", postgres.pool.connector), list[Any]()
    connect = connector.connect

    def connect_late(limit: float) -> Any:
        opened.append(connection := connect(limit))
        if len(opened) == 1:
            listener.close()
            run(listener.open(BLOCKING))
        return connection

    monkeypatch.setattr(connector, "connect", connect_late)
    run(listener.open(BLOCKING))
    until(lambda: listener.is_listening)
    assert listener._dedicated is not None
    postgres.close()
    until(lambda: all(connection.driver.closed for connection in opened))


@pytest.mark.parametrize("postgres", ["postgresql", "psycopg_async"], indirect=True)
def test_waiter_listens_again_when_its_store_was_closed(postgres: TableBackend, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(waiting, "RELISTEN_DELAY_S", 10_000.0)

    def look() -> None:
        until(lambda: postgres._listener.is_listening)
        postgres.close()
        until(lambda: postgres._listener.is_listening)

    with_waiter(postgres, name, look)


def test_waiter_listens_again_when_its_store_is_closed_before_it_waits(
    postgres: TableBackend, name: str, monkeypatch: Any
) -> None:
    opened, requests = threading.Event(), list[object]()
    listener, open_listener, try_acquire = postgres._listener, postgres._listener.open, postgres.try_acquire

    def count(*args: Any, **options: Any) -> Any:
        requests.append(args)
        return try_acquire(*args, **options)

    async def open_and_close(runtime: Any) -> None:
        await open_listener(runtime)
        if not opened.is_set():
            until(lambda: listener.is_listening)
            postgres.close()
            opened.set()

    def look() -> None:
        assert opened.wait(WITHIN)
        until(lambda: listener.is_listening)
        assert len(requests) == 2  # The holder's and the waiter's: it does not listen only when it asks again.

    monkeypatch.setattr(listener, "open", open_and_close)
    monkeypatch.setattr(postgres, "try_acquire", count)
    with_waiter(postgres, name, look)


def test_next_waiter_listens_when_the_first_was_interrupted_while_it_began(
    postgres: TableBackend, monkeypatch: Any
) -> None:
    monkeypatch.setattr(waiting, "RELISTEN_DELAY_S", 10_000.0)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(postgres._listener, "_begin", Mock(side_effect=SoftLimit))
        with pytest.raises(SoftLimit):
            run(postgres._listener.open(BLOCKING))
    run(postgres._listener.open(BLOCKING))
    until(lambda: postgres._listener.is_listening)


def test_server_that_ends_each_listening_session_is_not_asked_for_another_at_once(
    postgres: TableBackend, monkeypatch: Any
) -> None:
    monkeypatch.setattr(waiting, "RECONNECT_DELAY_S", 10_000.0)
    listener = postgres._listener
    run(listener.open(BLOCKING))
    until(lambda: listener.is_listening)
    ended = listener._dedicated
    run(postgres.pool.step(BLOCKING, "", lambda session: session.execute(END_LISTENERS)))
    until(lambda: not listener.is_listening)
    run(listener.open(BLOCKING))
    assert listener._dedicated is ended


@pytest.mark.usefixtures("many_files")
def test_waiter_is_told_in_a_process_with_many_files(postgres: TableBackend, name: str) -> None:
    with_waiter(postgres, name, lambda: until(lambda: postgres._listener.is_listening))


def test_connection_that_the_program_refuses_is_closed(postgres: TableBackend, name: str) -> None:
    opened = []

    def refuse(connection: Any, **_: Any) -> None:
        opened.append(connection.connection)
        raise LookupError("no tenant")

    connection_created.connect(refuse)
    try:
        with pytest.raises(LookupError):
            Lock(postgres, name).acquire()
    finally:
        connection_created.disconnect(refuse)
    assert {each.closed for each in opened} == {True}


def test_threads_that_begin_at_once_have_one_memory() -> None:
    for _ in range(10):
        backend = from_engine(create_engine("sqlite://"))
        granted = [lease for lease in each([Lock(backend, "m", renew=False).try_acquire] * 8) if lease is not None]
        for lease in granted:
            lease.release()
        assert len(granted) == 1, granted
        backend.close()


def test_lease_beside_a_relative_file_is_held_when_the_process_has_gone_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = from_engine(create_engine("sqlite:///app.sqlite3"))
    lease = Lock(backend, name).acquire()
    backend.close()  # so that it connects again
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    lease.renew()
    assert lease.release() is Released.RELEASED
    backend.close()


@pytest.mark.parametrize("place", ["user:s3cret/db", "user:s3@cret@host/db", "user@host:s3cret/db"])
def test_url_that_is_wrong_tells_no_piece_of_a_password(place: str) -> None:
    with pytest.raises(ValueError, match="cannot use the URL after") as caught:
        from_url(f"database+postgresql+psycopg://{place}")
    assert "cret" not in str(caught.value)


def test_threads_in_memory_are_no_time_limit_to_each_other(memory: TableBackend) -> None:
    def look() -> list[Any]:
        return [run(memory.inspect(BLOCKING, "m")) for _ in range(300)]

    assert [error for error in each([look] * 6) if isinstance(error, Exception)] == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "psycopg_async", "pymysql"])
def test_event_that_leaves_a_transaction_open_is_no_hindrance(request: pytest.FixtureRequest, driver: str) -> None:
    """An event that sets a search_path or a time zone does so."""
    request.getfixturevalue(server_of(driver))
    engine = (create_async_engine if driver in ASYNC else create_engine)(URLS[driver])

    @event.listens_for(getattr(engine, "sync_engine", engine), "connect")
    def ask(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SELECT 1")
        cursor.close()

    backend = from_engine(engine)
    assert run(backend.inspect(BLOCKING, "n")) is not None
    backend.close()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async", "asyncmy"])
def test_database_that_fails_several_first_connections_at_once_is_unavailable_each_time(
    request: pytest.FixtureRequest, driver: str
) -> None:
    """SQLAlchemy's lock around the first one belongs to one event loop, and ours ends when there is no connection."""
    request.getfixturevalue(server_of(driver))
    engine = create_async_engine(URLS[driver])

    @event.listens_for(engine.sync_engine, "connect")
    def fail(connection: Any, _: object) -> None:
        await_only(asyncio.sleep(0.1))  # Until another connection waits for this one.
        connection.close()  # SQLAlchemy before 2.0.55 leaves it to the garbage collector.
        raise OperationalError("SELECT version()", {}, ConnectionResetError())

    backend = from_engine(engine)
    for _ in range(3):
        errors = each([lambda: run(backend.inspect(BLOCKING, "n"))] * 3)
        assert {type(error) for error in errors} == {BackendUnavailable}
