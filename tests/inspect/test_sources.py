"""Sources of a snapshot: one that cannot be read is one line, nothing hangs, and no password is shown."""

import asyncio
import json
import re
import socket
import threading
from contextlib import closing

import pytest
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist
from sqlalchemy import create_engine
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import create_async_engine

from django_dlock.inspect import databases
from dlock_core import AsyncLock, Lock, connect
from dlock_core.backend import Holder, LockState, Released
from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import BackendUnavailable
from dlock_core.inspect import reader, take_snapshot
from dlock_core.stores import force_release
from sqla_dlock.inspect import database as sqla_database
from tests import servers
from tests.inspect.parties import URLS
from tests.mysql_server import DIALECT

SECRET = "s3cret-word"


def test_leases_are_told_with_their_queue_and_party(store_url):
    backend, waiting = connect(store_url), threading.Event()
    lock = Lock(backend, "order:1", wait=60)
    with Lock(backend, "order:1") as lease:
        thread = threading.Thread(target=lambda: lock.acquire().release(), name="second")
        thread.start()
        while len((found := take_snapshot([("default", backend)])).entries) < 2:
            waiting.wait(0.01)
    thread.join()
    holder, waiter = found.entries
    assert (holder.kind, holder.source, holder.name, holder.role, holder.token) == (
        "lease", "default", "order:1", "holder", lease.token,
    )  # fmt: skip
    assert holder.owner["holder"] == lease.holder[:8]
    assert (waiter.position, waiter.owner["thread"], waiter.token) == (1, "second", None)
    assert holder.actor != waiter.actor
    assert json.loads(json.dumps(found.as_dict()))["schema"] == 1
    backend.close()


@pytest.mark.parametrize("name", ["daily report", "a@b.de", "50%"])
def test_lock_is_found_and_released_by_the_name_that_its_holder_gave(store_url, name):
    backend = connect(store_url)
    lease = Lock(backend, name, renew=False).acquire()
    (entry,) = take_snapshot([("default", backend)], name=name).entries
    assert entry.name == lease.name
    assert force_release(backend, name, lease.token, by="ops")
    assert not take_snapshot([("default", backend)], name=name).entries
    assert lease.release() is Released.EXPIRED
    backend.close()


def test_name_that_no_lock_can_have_is_refused_before_anything_is_sent():
    backend = connect("redis://127.0.0.1:1")
    for refused, error in (("a::b", ValueError), (5, TypeError)):
        with pytest.raises(error, match="name"):
            take_snapshot([("default", backend)], name=refused)
        with pytest.raises(error, match="name"):
            force_release(backend, refused, 1, by="ops")


@pytest.mark.parametrize("token", ["5", None, 1.5, True], ids=repr)
def test_token_that_is_no_integer_is_refused_before_anything_is_sent(token):
    with pytest.raises(TypeError, match="token"):
        force_release(connect("redis://127.0.0.1:1"), "a", token, by="ops")


def test_tasks_of_one_thread_are_different_parties():
    async def main():
        backend = MemoryBackend()
        async with AsyncLock(backend, "order:1"), asyncio.TaskGroup() as group:
            group.create_task(hold(backend, "order:2"))
            group.create_task(hold(backend, "order:3"))
        return held

    async def hold(backend, name):
        async with AsyncLock(backend, name):
            held.append(await asyncio.to_thread(take_snapshot, [("memory", backend)]))

    held = []
    found = asyncio.run(main())
    parties = {entry.name: entry.actor for each in found for entry in each.entries}
    assert len(set(parties.values())) == 3


def test_owners_that_are_hostile_stay_data():
    words = "\x1b[2J\n[red]\u202e"

    class Store:
        async def inspect(self, runtime, name=None):
            owners = [json.dumps({"pid": words, "app": [words], "own": 5, "id": {}}), words, "[" * 100_000, "{}"]
            return [LockState(words, tuple(Holder(words, 1, False, owner, None) for owner in owners))]

    found = take_snapshot([("odd", Store())])
    assert len(found.entries) == 4
    assert all(entry.described.isprintable() for entry in found.entries)
    assert all(entry.name == words for entry in found.entries)
    json.dumps(found.as_dict())


def test_store_whose_answer_surprises_us_is_one_line_and_the_others_are_told():
    class Odd(MemoryBackend):
        async def inspect(self, runtime, name=None):
            raise KeyError(SECRET)

    backend = MemoryBackend()
    with Lock(backend, "order:1"):
        found = take_snapshot([("odd", Odd()), ("good", backend)])
    assert [entry.source for entry in found.entries] == ["good"]
    assert [(each.source, each.reason) for each in found.unreadable] == [("odd", "reading it failed: KeyError")]


def test_store_that_is_down_is_one_line_and_the_others_are_told():
    memory = MemoryBackend()
    away = connect(f"redis://:{SECRET}@127.0.0.1:{servers.free_port()}/0")
    with Lock(memory, "order:1"):
        found = take_snapshot([("away", away), ("memory", memory)])
    assert [entry.name for entry in found.entries] == ["order:1"]
    (gone,) = found.unreadable
    assert gone.source == "away"
    assert gone.reason.isprintable()
    assert SECRET not in str(found.as_dict())


DOWN = {
    "psycopg": "postgresql+psycopg://u:{secret}@127.0.0.1:{port}/shop",
    "asyncpg": "postgresql+asyncpg://u:{secret}@127.0.0.1:{port}/shop",
    "mysqldb": "mariadb+mysqldb://u:{secret}@127.0.0.1:{port}/shop",
    "pymysql": "mysql+pymysql://u:{secret}@127.0.0.1:{port}/shop",
}


@pytest.mark.parametrize("driver", DOWN)
def test_database_that_is_down_is_one_line_without_its_password(driver):
    url = DOWN[driver].format(secret=SECRET, port=servers.free_port())
    found = take_snapshot([], [sqla_database(url, alias="reports")])
    assert [(gone.source, gone.reason.isprintable()) for gone in found.unreadable] == [("reports", True)]
    assert SECRET not in str(found.as_dict())


DRIVERS = pytest.mark.parametrize(
    ("driver", "database"),
    [("postgresql", "postgresql"), ("asyncpg", "postgresql"), ("mariadb", "mariadb"), ("aiomysql", "mariadb")],
    indirect=["database"],
    ids=lambda value: value,
)


@DRIVERS
def test_wrong_password_is_never_shown(driver, database, stranger):
    url = URLS[driver].replace("postgres@", f"stranger:{SECRET}@").replace("root@", f"stranger:{SECRET}@")
    (gone,) = take_snapshot([], [sqla_database(url.replace("/postgres", "/nowhere"))]).unreadable
    assert re.search("stranger|nowhere", gone.reason)
    assert SECRET not in gone.reason


@pytest.fixture
def stranger(database):
    """Create a MariaDB user with another password; PostgreSQL's test server asks for none, but lacks this database."""
    if database == "mariadb":
        with connections["mariadb"].cursor() as cursor:
            cursor.execute("CREATE USER IF NOT EXISTS stranger@'%%' IDENTIFIED BY 'another'")
            cursor.execute("GRANT USAGE ON *.* TO stranger@'%%'")


@DRIVERS
@pytest.mark.parametrize("given", ["url", "engine"])
def test_every_driver_is_asked_with_parameters_on_a_connection_of_its_own(driver, database, given):
    url = URLS[driver]
    make = create_async_engine if driver in ("asyncpg", "aiomysql") else create_engine
    one = sqla_database(url if given == "url" else make(url), alias="db")
    with closing(one):
        assert one.alias == "db"
        assert one.vendor == {"mariadb": DIALECT}.get(database, database)
        assert one.query("SELECT CAST(%s AS char(1)), 1 WHERE 2 = %s", ("x", 2)) == [("x", 1)]
        assert one.query("SELECT 1 WHERE 1 = 2") == []
        with pytest.raises(BackendUnavailable):
            one.query("SELECT nonsense")
        with pytest.raises(BackendUnavailable, match=r"(?i)read.only"):
            one.query("INSERT INTO testapp_counter (name, value) VALUES ('x', 1)")
        assert one.query("SELECT 1") == [(1,)], "an error does not end it"


def test_url_that_says_mysql_is_asked_what_it_is(use_database):
    use_database("mariadb")
    with closing(sqla_database(URLS["mariadb"].replace("mariadb+", "mysql+"))) as one:
        assert one.vendor == DIALECT
    (django,) = databases(["mariadb"])
    with closing(django):
        assert django.vendor == DIALECT


def test_sqlite_has_nothing_to_show(use_database):
    use_database("default")
    with Lock(MemoryBackend(), "x"), closing(sqla_database("sqlite://")) as one:
        found = take_snapshot([], [*databases(["default"]), one])
    assert (found.entries, found.unreadable) == ([], [])


def test_database_that_says_nothing_is_left_alone(monkeypatch):
    monkeypatch.setattr(reader, "QUERY_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql+psycopg://u@127.0.0.1:{silent.getsockname()[1]}/shop"
        (gone,) = take_snapshot([], [sqla_database(url)]).unreadable
    assert gone.reason == "no answer within 0.3 s"


def test_connection_that_comes_too_late_is_closed(monkeypatch):
    monkeypatch.setattr(reader, "QUERY_TIMEOUT_S", 0.1)
    come, closed = threading.Event(), threading.Event()

    class Session:
        def __init__(self):
            come.wait()

        def execute(self, sql, params):
            return []

        def close(self):
            closed.set()

    with pytest.raises(BackendUnavailable):
        reader.DatabaseReader("x", "other", Session).query("SELECT 1")
    come.set()
    assert closed.wait(30)


def test_connection_that_cannot_be_used_is_closed():
    closed = []

    class Session:
        def execute(self, sql, params):
            raise OSError("refused")

        def close(self):
            closed.append(self)

    with pytest.raises(BackendUnavailable, match="refused"):
        reader.DatabaseReader("x", "postgresql", Session).query("SELECT 1")
    assert len(closed) == 1


def test_unknown_alias_and_bad_url_are_refused_before_anything_is_sent():
    with pytest.raises(ConnectionDoesNotExist):
        databases(["nowhere"])
    with pytest.raises(ArgumentError):
        sqla_database("no url")
