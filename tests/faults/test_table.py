"""Databases restart, cut connections and lose replies, and callers have transactions: no lock has two holders."""

import ast
import asyncio
import contextlib
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.test import override_settings
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

from dlock_core import AsyncLock, Lock
from dlock_core.backend import Released
from dlock_core.backends.sql.connection import Connection
from dlock_core.backends.sql.sqlite import SQLiteConnection
from dlock_core.backends.table import backend as module
from dlock_core.backends.table import waiting as waiting_module
from dlock_core.backends.table.backend import TableBackend
from dlock_core.errors import AcquireTimeout, BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing.contract.harness import Harness
from sqla_dlock.backends.table import from_engine, from_url
from sqla_dlock.tables import lease_metadata as metadata
from tests import processes, servers, settings
from tests.faults import table_workers
from tests.faults.history import overlaps, read, repeated_tokens
from tests.faults.looking import holders
from tests.faults.test_cancellation import Cancelled, attempt, sweep
from tests.processes import worker
from tests.proxy import Proxy
from tests.table_stores import URLS, server_of, table
from tests.waiting import until

LIMIT = 1.0
"""Seconds that one step may take in these tests."""
MAKE, RENEW, END = b"INSERT INTO dlock_lease", b"+ r.ttl", b"SET holder = ''"


@pytest.fixture
def name() -> str:
    return f"faults:{secrets.token_hex(4)}"


@pytest.fixture(params=["psycopg", "pymysql"])
def driver(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[str]:
    request.getfixturevalue(server_of(request.param))
    with django_db_blocker.unblock():
        yield request.param


@pytest.fixture
def proxy(driver: str) -> Iterator[Proxy]:
    with Proxy(settings.POSTGRESQL_PORT if driver == "psycopg" else settings.MARIADB_PORT) as proxy:
        yield proxy


def through(proxy: Proxy, driver: str) -> Engine:
    """Return an engine that always sends a statement's text, for which the proxy looks."""
    arguments = {"prepare_threshold": None} if driver == "psycopg" else {}
    return create_engine(URLS[driver].replace(f":{proxy.target}/", f":{proxy.port}/"), connect_args=arguments)


@pytest.fixture
def backend(proxy: Proxy, driver: str) -> Iterator[TableBackend]:
    """Yield the store as its users reach it: through the proxy."""
    backend = from_engine(through(proxy, driver), timeout=LIMIT)
    yield backend
    backend.close()


@pytest.fixture
def direct(request: pytest.FixtureRequest, driver: str) -> Iterator[TableBackend]:
    """Yield the same store over a good network."""
    direct = table(request, driver)
    yield direct
    direct.close()


@pytest.fixture
def postgres(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[TableBackend]:
    """Yield the lease table of Django's PostgreSQL alias."""
    yield from opened(request, "postgresql", django_db_blocker)


@pytest.fixture
def sqlite(request: pytest.FixtureRequest, use_database, django_db_blocker) -> Iterator[TableBackend]:
    """Yield the lease table in the file next to the SQLite file of Django's default alias."""
    use_database("default")
    yield from opened(request, "default", django_db_blocker)


def opened(request: pytest.FixtureRequest, store: str, django_db_blocker: Any) -> Iterator[TableBackend]:
    backend = table(request, store)
    with django_db_blocker.unblock():
        yield backend
    backend.close()


@pytest.mark.parametrize("fault", ["cut_request", "cut_reply"])
def test_acquire_whose_connection_is_cut_is_one_grant(
    harness: Harness, direct: TableBackend, proxy: Proxy, name: str, fault: str
) -> None:
    happened = getattr(proxy, fault)(matching=MAKE)
    lease = harness.acquire(name)
    assert happened.happened
    assert holders(direct, name) == [lease.holder]
    assert harness.state(name).holders[0].token == lease.token
    assert harness.do(lease.release) is Released.RELEASED
    assert holders(direct, name) == []


def test_acquire_whose_reply_never_comes_is_one_grant_after_the_time_limit(
    harness: Harness, direct: TableBackend, proxy: Proxy, name: str
) -> None:
    happened = proxy.drop_reply(matching=MAKE)
    lease = harness.acquire(name)
    assert happened.happened
    assert holders(direct, name) == [lease.holder]


def test_release_whose_reply_is_lost_is_a_release(
    harness: Harness, direct: TableBackend, proxy: Proxy, name: str
) -> None:
    lease = harness.acquire(name)
    happened = proxy.cut_reply(matching=END)
    assert harness.do(lease.release) is Released.RELEASED
    assert happened.happened
    assert holders(direct, name) == []


def test_renewal_whose_reply_is_lost_is_made_again(harness: Harness, proxy: Proxy, name: str) -> None:
    lease = harness.acquire(name, ttl=3)
    happened = proxy.cut_reply(matching=RENEW)
    happened.wait()
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 1)
    assert not lease.lost
    assert harness.do(lease.release) is Released.RELEASED


def test_connections_that_are_killed_while_idle_cost_nobody_anything(
    harness: Harness, direct: TableBackend, proxy: Proxy, name: str
) -> None:
    first = harness.acquire(f"{name}:1")
    proxy.cut()
    assert harness.try_acquire(f"{name}:1") is None
    proxy.cut()
    second = harness.acquire(f"{name}:2", wait=0)
    proxy.cut()
    assert harness.do(first.release) is Released.RELEASED
    proxy.cut()
    assert harness.do(second.release) is Released.RELEASED
    assert holders(direct, f"{name}:1") == holders(direct, f"{name}:2") == []


def test_waiter_whose_connections_are_killed_goes_on_waiting(
    harness: Harness, direct: TableBackend, proxy: Proxy, name: str
) -> None:
    first = Lock(direct, name).acquire()
    pending = harness.queue_up(name)
    for _ in range(3):
        proxy.cut()
        threading.Event().wait(0.05)
    first.release()
    assert pending.result(60).token > first.token


@pytest.mark.parametrize("how", ["deaf", "refuse"])
def test_database_that_is_not_there_is_unavailable_in_time(harness: Harness, proxy: Proxy, name: str, how: str) -> None:
    harness.do(harness.acquire(name).release)
    getattr(proxy, how)()
    began = clock()
    with pytest.raises(BackendUnavailable) as caught:
        harness.acquire(name, ttl=2, wait=0.2)
    assert clock() - began < 30, "nothing waits for ever"
    assert caught.value.name == name
    proxy.forward()  # a delayed request may now be executed, and its lease lasts for one ttl
    harness.do(harness.acquire(name, wait=None).release)


def test_lease_and_waiter_outlive_a_restart_of_the_database(servers_directory: Path, name: str) -> None:
    server = servers.postgresql(servers_directory / "postgresql-restarted", servers.free_port())
    server.start()
    engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{server.port}/postgres")
    metadata.create_all(engine)
    engine.dispose()
    store, other = from_engine(engine), from_engine(engine)
    first = Lock(store, name, ttl=60).acquire()
    pending, gotten = waiting(other, name)
    until(lambda: other._listener.is_listening)
    server.restart()
    until(lambda: holders_if_there(store, name) == [first.holder])
    until(lambda: other._listener.is_listening)
    assert not first.lost
    assert first.release() is Released.RELEASED
    pending.join(60)
    assert gotten[0].token > first.token
    assert gotten[0].release() is Released.RELEASED
    for one in (store, other):
        one.close()
    server.stop()


def holders_if_there(store: TableBackend, name: str) -> list[str] | None:
    try:
        return holders(store, name)
    except BackendUnavailable:
        return None


@pytest.mark.parametrize("driver", ["psycopg"], indirect=True)
def test_task_that_is_cancelled_at_any_await_leaves_no_grant(direct: TableBackend, name: str) -> None:
    cancel_everywhere(direct, name)


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
def test_task_that_is_cancelled_at_any_await_leaves_no_grant_of_an_asyncio_driver(
    direct: TableBackend, name: str
) -> None:
    cancel_everywhere(direct, name)


async def test_cancelled_task_waits_for_what_it_has_sent(
    proxy: Proxy, backend: TableBackend, direct: TableBackend, name: str
) -> None:
    """If the clean-up overtook the attempt, its grant would stay."""
    await (await AsyncLock(backend, f"{name}:warm-up").acquire()).release()
    attempt = proxy.hold_request(matching=MAKE)
    task = asyncio.ensure_future(AsyncLock(backend, name).acquire())
    await asyncio.to_thread(attempt.wait)
    task.cancel()
    await asyncio.sleep(0.2)
    assert not task.done()
    attempt.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert holders(direct, name) == []


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "mysqldb", "aiomysql"], indirect=True)
def test_storm_of_cancelled_tasks_leaves_no_lease_and_no_connection(
    direct: TableBackend, driver: str, name: str
) -> None:
    rng, before = random.Random(7), sessions(driver)

    async def work(number: int) -> None:
        while True:
            with contextlib.suppress(AcquireTimeout):
                async with AsyncLock(direct, f"{name}:{number % 6}", wait=rng.choice([0, 0.05, None])):
                    await asyncio.sleep(0)

    async def main() -> None:
        tasks = [asyncio.ensure_future(work(number)) for number in range(60)]
        for task in rng.sample(tasks, len(tasks)):
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(main())
    for number in range(6):
        Lock(direct, f"{name}:{number}", wait=0).acquire().release()
    direct.close()
    until(lambda: sessions(driver) <= before)


def sessions(driver: str) -> int:
    """Return how many sessions the server has, without the one of this query."""
    question = "SELECT count(*) - 1 FROM information_schema.processlist WHERE user = 'root'"
    if server_of(driver) == "postgresql":
        question = "SELECT count(*) - 1 FROM pg_stat_activity WHERE backend_type = 'client backend'"
    url = URLS["psycopg" if server_of(driver) == "postgresql" else "pymysql"]
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return int(connection.execute(text(question)).scalar_one())


def cancel_everywhere(store: TableBackend, name: str) -> None:
    async def at(k: int) -> bool:
        cancelled = Cancelled(k)
        lease = await attempt(cancelled, AsyncLock(store, name).acquire())
        assert [lease.holder] == holders(store, name) if lease else holders(store, name) == []
        if lease:
            await lease.release()
        return cancelled.happened

    sweep(at, awaits=1)


@pytest.mark.parametrize("driver", ["psycopg", "pymysql", "sqlite"], indirect=True)
def test_sections_of_many_processes_are_apart_in_the_order_of_tokens(driver: str, tmp_path: Path) -> None:
    path, name = tmp_path / "history", f"database+{URLS[driver]}"
    history = play(name, path, workers=3, rounds=100)
    assert len(history) == 300
    assert any(section.queued for section in history), "nobody had to wait: nothing was tested"
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def play(url: str, path: Path, workers: int, rounds: int) -> list[Any]:
    processes.run(table_workers.work, [(url, str(path), rounds, {})] * workers)
    return read(path)


@pytest.mark.parametrize("driver", ["psycopg"], indirect=True)
def test_killed_holder_is_followed_when_its_ttl_is_over(driver: str, direct: TableBackend, name: str) -> None:
    with worker(table_workers.hold, f"database+{URLS[driver]}", name, {"ttl": 1.0}) as holder:
        token = holder.hear()
        assert Lock(direct, name).try_acquire() is None
        holder.kill()
        lease = Lock(direct, name, wait=None).acquire()
    assert lease.token > token
    lease.release()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"], indirect=True)
def test_forked_child_has_connections_of_its_own_and_no_lease(driver: str, direct: TableBackend, name: str) -> None:
    with worker(table_workers.fork, f"database+{URLS[driver]}", name) as parent:
        found = ast.literal_eval(parent.hear())
        assert found == {"released": "NotHeld", "remaining": 0.0, "lost": True, "taken": None, "kept": True}
        parent.say("done")
        assert parent.result() == (False, True)
    assert holders(direct, name) == []


@pytest.mark.parametrize("driver", ["psycopg", "pymysql"], indirect=True)
@pytest.mark.usefixtures("direct")
def test_forked_child_that_forgets_the_store_ends_no_connection_of_its_parent(driver: str, name: str) -> None:
    ((answer,),) = processes.run(table_workers.fork_and_forget, [(f"database+{URLS[driver]}", name)])
    assert answer == (1,)


def test_waiter_is_told_of_a_release_and_asks_nothing_meanwhile(
    postgres: TableBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NOTIFIED_WAIT_S", 600.0)  # nothing else wakes it
    other = table_of_alias("postgresql")  # as in another process
    steps = counted(postgres, name, monkeypatch)
    first = Lock(other, name, ttl=600).acquire()
    pending, gotten = waiting(postgres, name)
    until(lambda: postgres._listener.is_listening)
    before = len(steps)
    threading.Event().wait(1.0)  # a waiter that polls would look more than ten times
    assert len(steps) <= before + 1
    first.release()
    pending.join(60)
    assert gotten[0].token > first.token
    assert len(steps) <= before + 3
    gotten[0].release()
    other.close()


def test_expiry_of_which_nobody_tells_wakes_a_waiter(postgres: TableBackend, name: str) -> None:
    other = table_of_alias("postgresql")
    first = Lock(other, name, ttl=1.0, renew=False).acquire()
    second = Lock(postgres, name, wait=None).acquire()
    assert second.token > first.token
    second.release()
    other.close()


def test_waiter_who_hears_nothing_looks_from_time_to_time(
    postgres: TableBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction pooler accepts LISTEN, but no notification ever arrives."""
    monkeypatch.setattr(waiting_module, "CHANNEL", "elsewhere")
    other = table_of_alias("postgresql")
    steps = counted(postgres, name, monkeypatch)
    first = Lock(other, name, ttl=60).acquire()
    pending, gotten = waiting(postgres, name)
    until(lambda: len(steps) > 5)
    assert not postgres._listener.is_listening
    first.release()
    pending.join(60)
    assert gotten[0].token > first.token
    gotten[0].release()
    other.close()


def test_listening_connection_that_is_killed_is_made_anew_and_nobody_is_forgotten(
    postgres: TableBackend, name: str
) -> None:
    other = table_of_alias("postgresql")
    first = Lock(other, name, ttl=60).acquire()
    pending, gotten = waiting(postgres, name)
    until(lambda: postgres._listener.is_listening)
    killed = postgres._listener._dedicated
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
    run(other.pool.step(BLOCKING, "", lambda session: session.execute(kill)))
    until(lambda: postgres._listener.is_listening and postgres._listener._dedicated is not killed)
    first.release()
    pending.join(60)
    assert gotten[0].token > first.token
    gotten[0].release()
    other.close()


def table_of_alias(alias: str) -> TableBackend:
    from django_dlock.backends.table import from_url

    return from_url(f"database://{alias}")


def counted(store: TableBackend, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the steps for one lock from now on, which grows with each."""
    steps: list[str] = []
    step = store.pool.step

    def counting(runtime: Any, of: str, *args: Any) -> Any:
        if of == name:
            steps.append(of)
        return step(runtime, of, *args)

    monkeypatch.setattr(store.pool, "step", counting)
    return steps


def waiting(store: TableBackend, name: str) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that waits for the lock; return it, and the list to which it adds its lease."""
    gotten: list[Any] = []
    thread = threading.Thread(target=lambda: gotten.append(Lock(store, name, ttl=60, wait=None).acquire()), daemon=True)
    thread.start()
    return thread, gotten


def test_own_write_transaction_on_sqlite_stands_in_nobodys_way(sqlite: TableBackend, name: str) -> None:
    """This holds if the lease is acquired inside it, and if it lasts longer than the lease's ttl."""
    with transaction.atomic():
        with connections["default"].cursor() as cursor:
            cursor.execute("UPDATE dlock_fence SET token = token")
        lease = Lock(sqlite, name, ttl=0.5).acquire()
        began = clock()
        while clock() < began + 1.5:
            threading.Event().wait(0.05)
            assert not lease.lost
        assert holders(sqlite, name) == [lease.holder]
    assert lease.release() is Released.RELEASED


def test_aborted_transaction_of_the_caller_does_not_matter(
    postgres: TableBackend, use_database: Callable[[str], str], name: str
) -> None:
    use_database("postgresql")
    with transaction.atomic(using="postgresql"):
        with pytest.raises(DatabaseError), connections["postgresql"].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        lease = Lock(postgres, name).acquire()
        transaction.set_rollback(True, using="postgresql")
    assert holders(postgres, name) == [lease.holder], "the lease is in nobody's transaction"
    assert lease.release() is Released.RELEASED


@pytest.mark.parametrize("driver", ["pymysql", "psycopg", "asyncpg"], indirect=True)
def test_row_that_somebody_locks_by_hand_is_unavailable_and_nothing_is_done_later(
    request: pytest.FixtureRequest, driver: str, direct: TableBackend, name: str
) -> None:
    """The server's time limit ends before ours."""
    store = table(request, driver, timeout=2.0)
    Lock(store, name).acquire().release()
    engine = create_engine(URLS["pymysql" if driver == "pymysql" else "psycopg"])
    with engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM dlock_lease WHERE name = :name FOR UPDATE"), {"name": name})
        with pytest.raises(BackendUnavailable):
            Lock(store, name, wait=0).acquire()
    engine.dispose()
    lease = Lock(direct, name, wait=0).acquire()
    assert holders(store, name) == [lease.holder]
    lease.release()
    store.close()


def test_missing_table_says_what_to_run(postgres: TableBackend, name: str) -> None:
    rename(postgres, "dlock_lease", "elsewhere")
    try:
        with pytest.raises(BackendUnavailable, match=r"has no table for it: run python manage\.py migrate --database"):
            Lock(postgres, name, wait=60).acquire()
    finally:
        rename(postgres, "elsewhere", "dlock_lease")


def rename(store: TableBackend, old: str, new: str) -> None:
    def step(session: Connection) -> None:
        session.execute(f"ALTER TABLE {old} RENAME TO {new}")

    run(store.pool.step(BLOCKING, "", step))


@pytest.mark.parametrize("driver", ["psycopg", "pymysql", "asyncpg"], indirect=True)
def test_wrong_password_is_refused_at_once_and_told_to_nobody(driver: str, name: str) -> None:
    """Psycopg gives no error code for a failure to connect."""
    secret = "s3cr3t"
    url = URLS[driver].replace("postgres@", f"nobody:{secret}@").replace("root@", f"nobody:{secret}@")
    store = from_url(f"database+{url}")
    with pytest.raises(BackendUnavailable) as caught:
        Lock(store, name, wait=0.1 if driver == "psycopg" else 60).acquire()
    assert caught.value.refused or driver == "psycopg"
    assert secret not in f"{caught.value} {caught.value.__cause__}"


def test_database_is_let_go_of_before_one_is_made_or_dropped(postgres: TableBackend, name: str) -> None:
    """PostgreSQL drops no database that has connections, and Django's test runner drops one."""
    from django_dlock.conf import stores

    mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND query LIKE '%%dlock_lease%%'"
    with override_settings(DLOCK={"default": {"BACKEND": "database://postgresql"}}):
        postgres.close()
        backend = stores["default"].backend
        first = Lock(backend, name).acquire()
        pending, gotten = waiting(backend, name)
        until(lambda: backend._listener.is_listening)
        first.release()
        pending.join(60)
        gotten[0].release()
        with connections["postgresql"]._nodb_cursor() as cursor:

            def connected() -> int:
                cursor.execute(mine.replace("query LIKE", "pid <> pg_backend_pid() AND query LIKE"))
                return int(cursor.fetchone()[0])

            until(lambda: not connected())


def test_two_names_of_one_sqlite_file_have_one_sibling(tmp_path: Path, name: str) -> None:
    """A file may be named by a path, a link or a URI."""
    (tmp_path / "link.db").symlink_to(tmp_path / "shop.db")
    names = [f"{tmp_path}/shop.db", f"{tmp_path}/link.db", f"file:{tmp_path}/shop.db?mode=rwc&uri=true"]
    stores = [from_url(f"database+sqlite:///{each}") for each in names]
    lease = Lock(stores[0], name).acquire()
    assert [holders(store, name) for store in stores] == [[lease.holder]] * 3
    lease.release()
    for store in stores:
        store.close()
    assert (tmp_path / "shop.db-dlock").exists()


def test_sqlite_in_memory_has_its_leases_in_memory(name: str) -> None:
    store = from_url("database+sqlite://")
    first = Lock(store, name).acquire()
    assert holders(store, name) == [first.holder]
    assert isinstance(store.pool.connector.connect(1.0), SQLiteConnection)
    store.close()
    assert first.release() is Released.RELEASED


LONG_AGO = 1_000_000_000_000_000


@pytest.mark.parametrize("driver", ["psycopg", "mysqldb", "sqlite"], indirect=True)
def test_rows_of_names_that_nobody_uses_any_more_go(direct: TableBackend, name: str) -> None:
    """Strangers may choose the names, so the rows that they leave must be bounded."""
    used = Lock(direct, f"{name}:used").acquire()
    statement = (
        "INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at, wanted_until) "
        "VALUES (:name, :token, '', '', 0, :expires_at, 0)"
    )

    def fill(session: Connection) -> None:
        for number in range(100):
            ended = [-LONG_AGO, 0, LONG_AGO][number % 3]
            session.execute(statement, {"name": f"{name}:{number}", "token": LONG_AGO, "expires_at": ended})

    run(direct.pool.step(BLOCKING, name, fill))
    for number in range(2000):
        Lock(direct, f"{name}:new:{number % 10}").acquire().release()
    left = names(direct, name)
    assert f"{name}:used" in left
    assert len(left) == 11
    assert used.release() is Released.RELEASED


@pytest.mark.parametrize("driver", ["psycopg", "mysqldb", "sqlite"], indirect=True)
@pytest.mark.parametrize("damaged", [2**63 - 1, 2**60, -(2**62)])
def test_token_that_was_spoiled_heals(direct: TableBackend, name: str, damaged: int) -> None:
    forget_all(direct)  # On SQLite the next token follows the greatest of all, which another test may have raised.
    before = Lock(direct, name).acquire()
    before.release()
    spoil = "UPDATE dlock_lease SET token = :token WHERE name = :name"
    run(direct.pool.step(BLOCKING, name, lambda session: session.execute(spoil, {"token": damaged, "name": name})))
    tokens = []
    for each in (name, f"{name}:other", name):
        with Lock(direct, each) as lease:
            tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    assert tokens[0] >= before.token  # They are equal if all this happens within one tick of SQLite's clock, 1 ms.
    assert tokens[-1] - before.token < 600_000_000


def forget_all(store: TableBackend) -> None:
    run(store.pool.step(BLOCKING, "", lambda session: session.execute("DELETE FROM dlock_lease")))


def names(store: TableBackend, start: str) -> set[str]:
    """Return the names of all rows that begin with `start`."""
    rows = run(store.pool.step(BLOCKING, "", lambda session: session.execute("SELECT name FROM dlock_lease", {})))
    return {name for (name,) in rows if name.startswith(start)}
