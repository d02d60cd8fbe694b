"""Fixtures for locks in Django: a store, threads with their own sessions, aliases with an isolation level, a journal."""

import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import override_settings

from django_dlock.ownership import apart
from django_dlock.tie import current
from dlock_core.backends.memory import MemoryBackend
from dlock_core.observability import hooks
from tests.django_dlock import isolation
from tests.django_dlock.admin_fixtures import admin_pages, browser, late_replica, on_postgresql, ticket  # noqa: F401 - fixtures
from tests.django_dlock.parties import Party
from tests.django_dlock.thread_work import forget_connections
from tests.servers import Server


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """Leave no lease to the tests that follow, which run in the same context."""
    with apart():
        yield


@pytest.fixture
def store() -> Iterator[MemoryBackend]:
    """Leases in memory, as the store "default"."""
    backend = MemoryBackend()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 30, "WAIT": 20}}):
        yield backend


@pytest.fixture
def redis_store(redis_server: Server) -> Iterator[Any]:
    """Leases in a real Redis, as the store "default"; empty at the start."""
    from django_dlock.conf import stores

    with override_settings(DLOCK={"default": {"BACKEND": redis_server.url, "TTL": 30, "WAIT": 20}}):
        flush(redis_server)
        yield stores["default"].backend


def flush(server: Server) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        client.flushall()


@pytest.fixture
def party() -> Iterator[Callable[[], Party]]:
    """Return a function that makes a thread with its own connections and leases, which runs the steps it is given."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Party())


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt even when the tests run in the background, where shells have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def isolated(request: pytest.FixtureRequest, use_database, monkeypatch) -> Callable[[str, str | None], str]:
    """Make a second alias of a database, with an isolation level: `isolated("mariadb", "repeatable read")`."""

    def make(database: str, level: str | None) -> str:
        use_database(database)
        alias, settings = isolation.alias(database, level)
        monkeypatch.setitem(connections.settings, alias, settings)
        request.addfinalizer(lambda: _forget(alias))
        return alias

    return make


def _forget(alias: str) -> None:
    connections[alias].close()
    del connections[alias]


@pytest.fixture
def journal(monkeypatch) -> Iterator[list[str]]:
    """Events of leases: "acquired order:42", "released order:42", "lost order:42"; `follow` adds the transactions."""
    entries: list[str] = []

    def hear(event: hooks.Event) -> None:
        entries.append(f"{event.kind} {event.name}")

    hooks.subscribe(hear)
    yield entries
    hooks.unsubscribe(hear)


@pytest.fixture
def follow(journal) -> Callable[[str], None]:
    """Record BEGIN, COMMIT and ROLLBACK on this thread's connection to a database in the journal."""

    def start(alias: str) -> None:
        connections[alias].close()
        del connections[alias]
        connection = connections[alias]
        for method, word in (("_commit", "COMMIT"), ("_rollback", "ROLLBACK")):
            vars(connection)[method] = _noting(getattr(connection, method), journal, word)
        begin = connection.set_autocommit

        def set_autocommit(autocommit: bool, **options: Any) -> None:
            if not autocommit:
                journal.append("BEGIN")
            begin(autocommit, **options)

        vars(connection)["set_autocommit"] = set_autocommit

    return start


def _noting(work: Callable[[], None], journal: list[str], word: str) -> Callable[[], None]:
    def noting() -> None:
        work()
        journal.append(word)

    return noting


@pytest.fixture
async def _connections_of_the_worker() -> AsyncIterator[None]:
    """The thread that `sync_to_async` uses starts each test with new connections."""
    yield
    await sync_to_async(forget_connections)()
    assert current() == []
