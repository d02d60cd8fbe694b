"""Session locks whose holder dies, stops or loses its connection, or whose session the server ends."""

import asyncio
import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from dlock_core.backend import Released, Renewal, RenewalFailure
from dlock_core.backends.advisory import mysql, session
from dlock_core.backends.advisory.labels import key_of, word_of
from dlock_core.backends.sql.connection import SocketKey, leave_to_parent
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost, NotSupported
from dlock_core.leases import watchdog
from dlock_core.leases.acquisition import new_request
from dlock_core.leases.lock import AsyncLock, Lock
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, Blocking, run
from dlock_core.testing.contract.observed import WITHIN
from sqla_dlock.backends.advisory import from_engine
from tests import servers, settings
from tests.advisory_stores import made, sessions
from tests.faults.looking import interrupted
from tests.processes import Link, worker
from tests.proxy import Proxy
from tests.table_stores import ASYNC, URLS, server_of
from tests.waiting import auntil, until

NAME = "order:42"
LIMIT_S = 0.5
both = pytest.mark.parametrize("store", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, django_db_blocker: Any) -> Iterator[Any]:
    backend = sessions(request, request.param)
    with django_db_blocker.unblock():
        other = made(request.param, session=True)
        # The server may still be ending a session of the test before, which has the lock until then.
        until(lambda: not run(other._server.is_held(BLOCKING, NAME)))
        other.close()
        yield backend
    backend.close()


@pytest.fixture
def alias(request: pytest.FixtureRequest, store: Any) -> str:
    return str(request.node.callspec.params["store"])


def hold(link: Link, alias: str, ttl: float) -> None:
    lease = Lock(made(alias, session=True), NAME, ttl=ttl).acquire()
    link.say(lease.token)
    while link.hear() == "renew":
        lease.renew()
        link.say("renewed")
    link.say(lease.lost)


@both
def test_lock_of_a_killed_process_is_free_at_once(store, alias):
    with worker(hold, alias, 3600.0) as holder:
        token = holder.hear()
        assert Lock(store, NAME).try_acquire() is None
        holder.kill()
        with Lock(store, NAME, wait=WITHIN) as lease:
            assert lease.token > token


@both
def test_holder_that_tells_nothing_of_itself_is_shown_as_its_session(store, alias):
    prefix = store._server._prefix
    take = {"postgresql": "SELECT pg_advisory_lock(:lock)", "mariadb": "SELECT GET_LOCK(:lock, 0)"}[alias]
    known = {"postgresql": key_of(NAME, prefix), "mariadb": word_of(NAME, prefix)}[alias]
    engine = create_engine(URLS[{"postgresql": "psycopg", "mariadb": "mysqldb"}[alias]])
    with engine.connect() as other:
        if alias == "postgresql":
            other.execute(text("SET application_name = 'psql'"))
        other.execute(text(take), {"lock": known})
        ((holder,),) = [state.holders for state in run(store.inspect(BLOCKING, NAME))]
        other.invalidate()
    engine.dispose()
    owner = json.loads(holder.owner)
    assert owner["app"] == {"postgresql": "psql", "mariadb": "session"}[alias]
    assert owner["host"].partition("@")[0] == {"postgresql": "postgres", "mariadb": "root"}[alias]
    assert str(owner["pid"]) in owner["session"]


@both
def test_session_is_ended_at_its_own_lock_only_and_not_for_one_of_before_a_restart(store):
    lease = Lock(store, NAME).acquire()
    session = store._reservations[lease.holder].connection.session
    assert not run(store._server.end(BLOCKING, "order:43", session))
    assert not run(store._server.end(BLOCKING, NAME, session._replace(proof="1")))
    assert run(store._server.is_held(BLOCKING, NAME))
    assert run(store._server.end(BLOCKING, NAME, session))
    assert not run(store._server.is_held(BLOCKING, NAME))
    with suppress(BackendUnavailable):
        lease.release()


@both
def test_lock_of_a_process_that_stands_still_ends_with_its_ttl_and_it_learns_of_it(store, alias):
    with worker(hold, alias, 2.0) as holder:
        holder.hear()
        holder.pause()
        with Lock(store, NAME, wait=WITHIN):
            holder.resume()
            holder.say("are you still there?")
            assert holder.hear() is True


async def fail(*_: object) -> None:
    """Take the place of a method that the server does not answer."""
    raise BackendUnavailable(NAME, reason="it is away")


@both
def test_request_that_could_not_be_abandoned_is_abandoned_when_the_server_answers_again(store, alias, monkeypatch):
    request = new_request(NAME, LockOptions(3600.0))
    run(store.try_acquire(BLOCKING, request))
    connection = store._reservations[request.holder].connection
    with monkeypatch.context() as away:
        away.setattr(connection, "step", fail)
        with pytest.raises(BackendUnavailable):
            run(store.abandon(BLOCKING, request))
    run(store.abandon(BLOCKING, request))
    lease = Lock(store, NAME).try_acquire()
    assert lease is not None
    lease.release()


@both
def test_renewal_tells_of_a_session_that_the_server_has_ended(store, alias):
    lost: list[bool] = []
    lease = Lock(store, NAME, on_lost=lambda: lost.append(True)).acquire()
    assert run(store.force_release(BLOCKING, NAME, lease.token))
    with pytest.raises(LeaseLost):
        lease.renew()
    assert lease.lost
    until(lambda: lost)
    assert lost == [True]
    lease.release()


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_block_whose_session_the_server_has_ended_is_told_although_nobody_can_be_asked(store, monkeypatch):
    async def is_held(*_: Any) -> bool:  # as if the other connections had ended, too
        raise BackendUnavailable(NAME, reason="terminated", broken=True)

    with pytest.raises(LeaseLost), Lock(store, NAME, renew=False) as lease:
        (seat,) = store._held()
        assert run(store.force_release(BLOCKING, NAME, lease.token))
        until(seat.connection.has_ended)
        monkeypatch.setattr(store._server, "is_held", is_held)


KILL = {"postgresql": "SELECT pg_terminate_backend({})", "mariadb": "KILL {}"}
FATAL = b"E\0\0\0\x26SFATAL\0VFATAL\0C57P01\0Mterminated\0\0"
"""PostgreSQL's last message to a session that it ends: https://www.postgresql.org/docs/current/protocol-message-formats.html"""


def kill_session(store: Any, lease: Any, server: str) -> None:
    engine = create_engine(URLS[{"postgresql": "psycopg", "mariadb": "mysqldb"}[server]])
    with engine.connect() as operator:
        operator.execute(text(KILL[server].format(store._reservations[lease.holder].connection.session.number)))
    engine.dispose()


@pytest.mark.parametrize(
    "store",
    ["postgresql", "mariadb", "psycopg", "psycopg_async", "asyncpg", "pymysql", "aiomysql", "asyncmy"],
    indirect=True,
)
def test_holder_whose_session_was_killed_learns_that_another_has_the_lock(store, alias):
    server = server_of(alias)
    lease = Lock(store, NAME, renew=False).acquire()
    kill_session(store, lease, server)
    other = made(server, session=True)
    with Lock(other, NAME, wait=WITHIN):
        assert lease.release() is Released.STOLEN
    other.close()


@pytest.mark.usefixtures("postgresql")
def test_holder_on_asyncpg_learns_it_from_the_last_message_of_its_killed_session():
    with Proxy(settings.POSTGRESQL_PORT) as proxy:
        store: Any = made("asyncpg", behind=proxy, session=True)
        lease = Lock(store, NAME, renew=False).acquire()
        proxy.mute()  # Neither the end of the connection arrives, nor an answer to who holds the lock now.
        driver: Any = store._reservations[lease.holder].connection.dedicated.connection.driver
        told = threading.Event()
        driver._loop.call_soon_threadsafe(driver._protocol.data_received, FATAL)
        driver._loop.call_soon_threadsafe(told.set)
        assert told.wait(WITHIN)
        assert lease.release() is Released.EXPIRED
        proxy.cut()
        store.close()


@pytest.fixture
def behind(store: Any, alias: str) -> Iterator[tuple[Any, Proxy]]:
    """Yield another store for the same server, and the proxy through which it connects."""
    port = make_url(URLS[alias]).port
    assert port is not None
    with Proxy(port) as proxy:
        through = made(alias, behind=proxy, session=True, timeout=1.0)
        yield through, proxy
        proxy.cut()
        through.close()


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_renewed", [False, True])
@pytest.mark.parametrize("store", [driver for driver in URLS if "sqlite" not in driver], indirect=True)
def test_release_over_a_half_open_connection_frees_the_lock_and_says_so(store, behind, is_renewed, is_reset):
    """Otherwise its session, of whose end the server does not know, would keep the lock for a ttl.

    With `is_reset`, our end of every connection is told so, as by a machine in between that has forgotten them.
    """
    through, proxy = behind
    lease = Lock(through, NAME, ttl=60, renew=False).acquire()
    if is_reset:
        run(through.inspect(BLOCKING, NAME))  # This leaves an idle connection.
    proxy.strand()
    if is_reset:
        proxy.hang_up()
    if is_renewed:
        with pytest.raises(LeaseLost):
            lease.renew()
    assert lease.release() is Released.RELEASED
    with Lock(store, NAME, wait=0):
        pass


def given_up(step: Callable[[], object]) -> None:
    with pytest.raises(LeaseLost):
        step()


@pytest.mark.parametrize("store", [driver for driver in URLS if "sqlite" not in driver], indirect=True)
def test_release_that_waits_for_a_renewal_in_vain_does_not_claim_the_lock_of_another(store, behind):
    """Its statement is never sent, because the renewal has closed the connection; the operator has ended the session."""
    through, proxy = behind
    lease = Lock(through, NAME, ttl=60, renew=False).acquire()
    connection = through._reservations[lease.holder].connection
    proxy.strand()
    renewing = threading.Thread(target=lambda: given_up(lease.renew))
    renewing.start()
    until(lambda: bool(connection._in_use))
    assert run(store._server.end(BLOCKING, NAME, connection.session))
    with Lock(store, NAME, wait=WITHIN) as other:
        assert lease.release() is not Released.RELEASED
        assert other.remaining() > 0
    renewing.join()


@pytest.mark.parametrize("store", ["psycopg", "mysqldb"], indirect=True)
def test_release_that_cannot_end_its_session_yet_is_unknown_and_ends_it_later(store, behind, monkeypatch):
    through, proxy = behind
    lease = Lock(through, NAME, ttl=60, renew=False).acquire()
    proxy.strand()
    with monkeypatch.context() as away, pytest.raises(BackendUnavailable, match="away"):
        away.setattr(type(through._server), "end", fail)
        lease.release()
    with Lock(store, NAME, wait=WITHIN):
        assert lease.release() is Released.RELEASED


@pytest.fixture
def role(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the part of a URL with which a session assumes a role that may do little."""
    request.getfixturevalue("postgresql")
    with create_engine(URLS["psycopg"], isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as operator:
        operator.execute(text("DROP ROLE IF EXISTS dlock_role"))
        operator.execute(text("CREATE ROLE dlock_role"))
        yield "?options=-crole%3Ddlock_role"
        operator.execute(text("DROP ROLE dlock_role"))


def test_holder_in_another_role_learns_of_the_end_of_its_session(role):
    """Such a session may not see in the catalogue when it began."""
    store: Any = from_engine(create_engine(URLS["psycopg"] + role), session=True)
    lease = Lock(store, NAME, renew=False).acquire()
    session = store._reservations[lease.holder].connection
    kill_session(store, lease, "postgresql")
    until(session.has_ended)
    assert lease.release() is Released.EXPIRED
    store.close()


def test_release_over_a_half_open_connection_in_another_role_frees_the_lock(role):
    """Such a session may not end others of its login."""
    port = settings.POSTGRESQL_PORT
    with Proxy(port) as proxy:
        url = URLS["psycopg"].replace(f":{port}/", f":{proxy.port}/") + role
        store: Any = from_engine(create_engine(url), session=True, timeout=1.0)
        lease = Lock(store, NAME, ttl=60, renew=False).acquire()
        proxy.strand()
        assert lease.release() is Released.RELEASED
        assert not run(store._server.is_held(BLOCKING, NAME))
        proxy.cut()
        store.close()


@pytest.mark.parametrize("store", ["psycopg"], indirect=True)
def test_holder_whose_session_cannot_be_ended_is_not_told_that_another_has_the_lock(store, behind, monkeypatch):
    through, proxy = behind
    lease = Lock(through, NAME, ttl=60, renew=False).acquire()
    run(through.inspect(BLOCKING, NAME))  # This leaves an idle connection.
    proxy.strand()
    proxy.hang_up()
    monkeypatch.setattr(type(through._server), "end", fail)
    monkeypatch.setattr(through._server, "is_held", store._server.is_held)  # over connections that work
    assert lease.release() is Released.EXPIRED


@pytest.mark.parametrize("store", ["mysqldb", "pymysql"], indirect=True)
def test_lock_that_is_released_while_it_is_forced_costs_no_other_lock_its_session(store, monkeypatch):
    lease, taken, waiting = Lock(store, NAME).acquire(), [], mysql._waiting

    def meanwhile(connection: Any) -> Any:
        """Stand between the look at the holder and its end."""
        if not taken:
            lease.release()
            taken.append(Lock(store, "order:43").acquire())
        return waiting(connection)

    monkeypatch.setattr(mysql, "_waiting", meanwhile)
    run(store.force_release(BLOCKING, NAME, lease.token))
    taken[0].renew()
    assert taken[0].release() is Released.RELEASED


@pytest.mark.parametrize("store", ["psycopg", "psycopg2"], indirect=True)
def test_session_of_another_process_that_has_released_a_forced_lock_keeps_its_next_one(store, alias, monkeypatch):
    """It is found among all locks of the server, which takes time, and its end is another statement."""
    holder, taken, step = made(alias, session=True), [], store._server._sessions._pool.step
    lease = Lock(holder, NAME).acquire()

    class Slow:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def execute(self, sql: str, params: Any) -> Any:
            rows = self._connection.execute(sql, params)
            if not taken and "pg_locks" in sql:
                lease.release()
                taken.append(Lock(holder, "order:43").acquire())
            return rows

    def slowly(runtime: Any, name: str, function: Any, limit: float | None = None) -> Any:
        return step(runtime, name, lambda connection: function(Slow(connection)), limit)

    monkeypatch.setattr(store._server._sessions._pool, "step", slowly)
    run(store.force_release(BLOCKING, NAME, lease.token))
    taken[0].renew()
    assert taken[0].release() is Released.RELEASED
    holder.close()


@pytest.mark.parametrize("store", ["mysqldb", "pymysql"], indirect=True)
def test_lock_that_is_granted_while_another_is_forced_is_not_that_of_another_process(store, monkeypatch):
    granted, holder = [], store._server._holder

    async def meanwhile(*args: Any) -> Any:
        granted.append(Lock(store, NAME).acquire())
        return await holder(*args)

    monkeypatch.setattr(store._server, "_holder", meanwhile)
    assert not run(store.force_release(BLOCKING, NAME, 1))
    monkeypatch.undo()
    assert granted[0].release() is Released.RELEASED


@pytest.mark.parametrize("store", ["mysqldb", "pymysql"], indirect=True)
def test_session_of_another_with_our_number_is_not_ours(store):
    """As after a restart of the server, or on one that took over."""
    lease = Lock(store, NAME, renew=False).acquire()
    connection = store._reservations[lease.holder].connection
    connection.session = connection.session._replace(proof="that of an earlier one")
    ((holder,),) = [state.holders for state in run(store.inspect(BLOCKING, NAME))]
    assert holder.token == 0
    assert not run(store.force_release(BLOCKING, NAME, lease.token))
    assert lease.release() is Released.RELEASED


@both
def test_session_that_holds_is_shown_to_another_process(store, alias):
    with worker(hold, alias, 3600.0) as holder:
        token = holder.hear()
        (seen,) = run(store.inspect(BLOCKING, NAME))[0].holders
        assert "session" in seen.owner
        assert seen.token == (token if alias == "postgresql" else 0)
        if alias == "postgresql":
            holder.say("renew")
            holder.hear()
            (seen,) = run(store.inspect(BLOCKING, NAME))[0].holders
            assert f'"pid":{holder.process.pid}' in seen.owner


@pytest.mark.parametrize("store", ["postgresql", "asyncpg"], indirect=True)
async def test_waiter_that_is_cancelled_leaves_the_holder_alone(store, alias):
    """Whatever the name contains, the server has to end the waiter's session, and not the holder's."""
    name = "order:0a-4f"
    holder, other = await asyncio.to_thread(Lock(store, name).acquire), made(alias, session=True)
    waiting = asyncio.create_task(AsyncLock(other, name, wait=None).acquire())
    await auntil(lambda: run(store.inspect(BLOCKING, name))[0].waiters)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not run(store.inspect(BLOCKING, name))[0].waiters
    holder.renew()
    assert holder.release() is Released.RELEASED
    other.close()


@pytest.mark.parametrize("store", ["postgresql", "psycopg", "pymysql", "mariadb"], indirect=True)
def test_interrupted_waiter_leaves_its_place_and_the_holder_alone(store, alias, monkeypatch):
    """A real Ctrl-C arrives while the server makes it wait; mysqlclient notices it when its statement has ended."""
    monkeypatch.setattr(session, "MAX_WAIT_S", 1.0)
    holder, other = Lock(store, NAME).acquire(), made(alias, session=True)
    with interrupted(lambda: run(store.inspect(BLOCKING, NAME))[0].waiters):
        Lock(other, NAME, wait=None).acquire()
    until(lambda: not run(store.inspect(BLOCKING, NAME))[0].waiters)
    assert holder.release() is Released.RELEASED
    Lock(store, NAME, wait=0).acquire().release()
    other.close()


PRELUDE = """
import os, signal, sys, threading
from dlock_core import Lock
from sqla_dlock.backends.advisory import from_engine
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

def lock(wait=10):
    url, is_async = sys.argv[1:]
    engine = (create_async_engine if is_async else create_engine)(url)
    return Lock(from_engine(engine, session=True), "order:42", ttl=60, wait=wait, renew=False)
"""
FORK = """
lease = lock().acquire()
if not os.fork():
    sys.exit()
os.wait()
"""
FORK_IN_WAIT = """
first = lock().acquire()

def fork(*_):
    if not os.fork():
        sys.exit()
    os.wait()

signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.3)
threading.Timer(1.5, first.release).start()  # Two drivers wait in C, so that the handler is called only then.
lease = lock(wait=60).acquire()
"""
END = """
lease.renew()
print(lease.release().name)
"""


@pytest.mark.parametrize(
    ("program", "driver"),
    [
        *[(FORK, each) for each in ("psycopg", "psycopg2", "asyncpg", "mysqldb", "pymysql", "aiomysql", "asyncmy")],
        *[(FORK_IN_WAIT, each) for each in ("psycopg", "psycopg2", "mysqldb")],
    ],
    ids=lambda value: "" if "\n" in value else value,
)
def test_child_that_ends_like_a_program_ends_no_session_of_its_parent(request, driver, program):
    request.getfixturevalue(server_of(driver))
    words = [sys.executable, "-c", PRELUDE + program + END, URLS[driver], "yes" if driver in ASYNC else ""]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=WITHIN)
    assert told.stdout == "RELEASED\n", told.stderr


def test_socket_is_left_to_the_parent_only_if_its_number_is_not_another_files_by_now():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        key = SocketKey(ours.fileno(), os.fstat(ours.fileno()).st_ino)
        leave_to_parent(key._replace(inode=key.inode + 1))
        assert stat.S_ISSOCK(os.fstat(key.number).st_mode)
        leave_to_parent(key)
        assert stat.S_ISCHR(os.fstat(key.number).st_mode)  # the null device


@both
def test_forked_child_leaves_its_parents_connections_alone(store, alias):
    """This holds even if the child takes the parent's lease, which it does not renew, for a discarded one."""
    lease, spare = Lock(store, NAME, ttl=3600.0).acquire(), Lock(store, "spare").acquire()
    spare.release()
    if not (child := os.fork()):
        status = 1
        try:
            for seat in store._held():
                seat.until = -math.inf
            Lock(store, "spare").acquire().release()
            store.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    lease.renew()
    with Lock(store, "spare"):
        assert lease.release() is Released.RELEASED


@both
def test_forked_child_ends_no_holder_by_a_token_that_its_parent_has_given_back(store, alias):
    """The session may have the lock again, with another token, of which the child does not know."""
    old = Lock(store, NAME).acquire()
    begin, go = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.read(begin, 1)
            with suppress(NotSupported):
                run(store.force_release(BLOCKING, NAME, old.token))
            status = 0
        finally:
            os._exit(status)
    old.release()
    new = Lock(store, NAME).acquire()
    os.write(go, b"1")
    assert os.waitpid(child, 0)[1] == 0
    os.close(begin)
    os.close(go)
    new.renew()
    assert new.release() is Released.RELEASED


IDLE_LIMIT = {
    "postgresql": "SELECT CAST(setting AS integer) / 1000.0 FROM pg_settings WHERE name = 'idle_session_timeout'",
    "mariadb": "SELECT @@wait_timeout",
}


@both
def test_renewal_that_is_late_does_not_shorten_the_one_of_the_caller(store, alias):
    lease = Lock(store, NAME, ttl=2.0, renew=False).acquire()
    late = Renewal(lease._held.request, lease._held.granted)
    lease.renew(60.0)
    assert run(store.renew(BLOCKING, [late])) == [2.0]
    connection = store._reservations[lease.holder].connection
    ((limit,),) = run(connection.step(BLOCKING, NAME, lambda session: session.execute(IDLE_LIMIT[alias])))
    assert limit > 30.0
    lease.release()


@pytest.mark.parametrize("due_after_s", [0.0, 0.2])
@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_sessions_that_do_not_answer_delay_the_renewal_of_no_other(store, due_after_s):
    leases = [Lock(store, name, ttl=30.0).acquire() for name in ("a", "b", "c", "well")]
    *stuck, well = [lease._held for lease in leases]
    sessions = [store._reservations[held.request.holder].connection for held in stuck]
    renewed, dog = well.until, watchdog._watchdogs[store]
    for connection in sessions:
        os.kill(connection.session.number, signal.SIGSTOP)
    try:
        dog.plan(0.0, *stuck)
        dog.plan(due_after_s, well)
        until(lambda: well.until > renewed)
        assert all(connection.is_open for connection in sessions)  # Nobody has given them up yet.
    finally:
        for connection in sessions:
            os.kill(connection.session.number, signal.SIGCONT)
    for lease in leases:
        lease.release()


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@both
def test_lock_is_unavailable_where_no_more_threads_can_be_started(store, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailable, match="can't start new thread"):
            Lock(store, NAME, wait=0).acquire()
    Lock(store, NAME, wait=0).acquire().release()


@both
def test_leases_are_renewed_where_no_more_threads_can_be_started(store, monkeypatch):
    leases = [Lock(store, name, ttl=30.0).acquire() for name in ("a", "b")]
    renewed = [lease._held.until for lease in leases]
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        watchdog._watchdogs[store]._renew_each([lease._held for lease in leases])
    assert all(lease._held.until > before for lease, before in zip(leases, renewed, strict=True))
    for lease in leases:
        assert lease.release() is Released.RELEASED


@pytest.mark.parametrize(("fault", "is_asked_again"), [("deaf", False), ("cut", True)])
@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_server_that_is_silent_costs_one_time_limit_and_not_two(store, fault, is_asked_again):
    """A kept connection that has ended is worth a second attempt; one on which no reply comes is not."""
    with Proxy(settings.POSTGRESQL_PORT) as proxy:
        url = f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/postgres"
        behind = from_engine(create_engine(url), session=True, timeout=1.0)
        Lock(behind, NAME).acquire().release()
        line = run(behind._connections.take(BLOCKING, NAME))
        getattr(proxy, fault)()
        with pytest.raises(BackendUnavailable) as caught:
            run(line.step(BLOCKING, NAME, lambda session: session.execute("SELECT 1")))
        assert caught.value.broken is is_asked_again
        proxy.forward()
        behind.close()


@pytest.mark.parametrize(
    ("step", "answer"), [("renew", [RenewalFailure.LOST]), ("release", Released.RELEASED), ("abandon", None)]
)
@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_step_that_comes_after_the_release_does_not_touch_who_has_the_connection_now(store, step, answer):
    first = Lock(store, NAME, ttl=1.0, renew=False).acquire()
    request, granted = first._held.request, first._held.granted
    asked = {"renew": ([Renewal(request, granted)],), "release": (request, granted), "abandon": (request,)}
    seat = store._reservations[request.holder]

    class Late(Blocking):
        """Lets another holder get the connection while the step waits for it."""

        async def sleep(self, seconds: float) -> None:
            del seat.connection._in_use["by"]
            first.release()
            after.append(Lock(store, NAME, ttl=3600.0, renew=False).acquire())

    after: list[Any] = []
    seat.connection._in_use["by"] = "another"
    assert run(getattr(store, step)(Late(), *asked[step])) == answer
    assert store._reservations[after[0]._held.request.holder].connection is seat.connection
    assert (
        "1h"
        in run(seat.connection.step(BLOCKING, "", lambda session: session.execute("SHOW idle_session_timeout")))[0][0]
    )
    assert after[0].release() is Released.RELEASED


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_cancelled_renewal_leaves_the_lock(store):
    lease = await AsyncLock(store, NAME).acquire()
    renewal = asyncio.create_task(lease.renew())
    await asyncio.sleep(0)
    renewal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewal
    await lease.renew()
    assert await lease.release() is Released.RELEASED


@pytest.mark.parametrize("store", ["asyncpg", "aiomysql", "asyncmy"], indirect=True)
async def test_waiter_that_is_cancelled_twice_leaves_no_error_behind(store):
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with AsyncLock(store, NAME):
        waiting = asyncio.create_task(AsyncLock(store, NAME, wait=None).acquire())
        state = lambda: run(store.inspect(BLOCKING, NAME))[0]  # noqa: E731
        await auntil(lambda: len(state().waiters) == 1)
        waiting.cancel()
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await auntil(lambda: not state().waiters)
    await auntil(lambda: len(asyncio.all_tasks()) == 1)
    gc.collect()
    assert told == []


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_tasks_that_wait_leave_room_for_the_release(store):
    async def pass_on() -> Released:
        lease = await AsyncLock(store, NAME, wait=None).acquire()
        return await lease.release()

    holder = await AsyncLock(store, NAME).acquire()
    waiting = [asyncio.create_task(pass_on()) for _ in range(40)]
    await auntil(lambda: len(run(store.inspect(BLOCKING, NAME))[0].waiters) >= len(waiting))
    await holder.release()
    assert set(await asyncio.gather(*waiting)) == {Released.RELEASED}


class Pooled:
    """A session from a pooler: closing it does not end it on the server."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def close(self) -> None: ...


@pytest.mark.parametrize("session", [False, True])
def test_close_ends_the_idle_sessions_of_the_store(request, django_db_blocker, session):
    request.getfixturevalue(server_of("postgresql"))
    with django_db_blocker.unblock():
        store: Any = made("postgresql", session=session)
        sessions = store._server._sessions if session else store._sessions
        ((number,),) = run(sessions._ask(BLOCKING, NAME, "SELECT pg_backend_pid()"))
        store.close()
    engine = create_engine(URLS["psycopg"])
    with engine.connect() as other:
        ended = text("SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = :number)")
        until(lambda: other.scalar(ended, {"number": number}))
    engine.dispose()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("store", ["postgresql", "psycopg", "psycopg2", "asyncpg"], indirect=True)
def test_waiter_whose_limit_ends_just_after_the_grant_keeps_no_lock(store, alias, shared):
    """PostgreSQL then reports that the limit is over, and the session has the lock nevertheless."""
    other: Any = made(alias, session=True)
    lease = Lock(store, NAME).acquire()

    def wait() -> None:
        with suppress(AcquireTimeout):
            Lock(other, NAME, wait=LIMIT_S, shared=shared).acquire().release()

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: run(store.inspect(BLOCKING, NAME))[0].waiters)
    (reservation,) = other._reservations.values()
    os.kill(reservation.connection.session.number, signal.SIGSTOP)
    try:
        assert lease.release() is Released.RELEASED
        time.sleep(LIMIT_S)  # the server's timer runs on while its process stands still
    finally:
        os.kill(reservation.connection.session.number, signal.SIGCONT)
    waiter.join()
    assert not run(store._server.is_held(BLOCKING, NAME))
    other.close()


def zone_whose_summer_ends_at(end: float) -> str:
    """Return a time zone in the form of POSIX.

    That of a place would need a server whose clock is months ahead, and sometimes it would not start: it waits until a
    time on that clock, which the system compares with its own.
    """
    last = datetime.fromtimestamp(end, UTC) + timedelta(hours=1)
    day = last.timetuple().tm_yday - 1
    return f"STD0DST,{(day + 180) % 365},{day}/{last:%H:%M:%S}"


def test_tokens_grow_when_summer_time_ends(servers_directory, shim):
    clock = servers_directory / "summer.clock"
    library = shutil.copy(shim, servers_directory / "summer.so")  # where the server's account may read it
    left = 2 * servers.START_WITHIN
    end = time.time() + left
    port = servers.free_port()
    server = servers.mariadb(servers_directory / "summer", port)
    zone = f"TZ={zone_whose_summer_ends_at(end)}"
    server.command = ["env", zone, f"LD_PRELOAD={library}", f"CLOCK_FILE={clock}", *server.command]
    server.start()
    engine = create_engine(make_url(URLS["mysqldb"]).set(port=port))
    store = from_engine(engine, session=True)
    before = Lock(store, NAME).acquire()
    before.release()
    clock.write_text(str(int(left)))
    with engine.connect() as connection:
        until(lambda: connection.scalar(text("SELECT UNIX_TIMESTAMP()")) > end)
    with Lock(store, NAME) as after:
        assert after.token > before.token
    store.close()
    engine.dispose()
    server.kill()


@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
def test_server_waits_for_a_part_of_a_second_if_it_can(store):
    """MySQL counts whole seconds: it would round a wait of less than half a second to none."""
    engine = create_engine(URLS["mysqldb"])
    lease = Lock(store, NAME).acquire()
    waiter = threading.Thread(target=lambda: Lock(store, NAME, wait=30.25).acquire().release())
    waiter.start()
    with engine.connect() as other:
        sent = until(
            lambda: other.scalar(text("SELECT info FROM information_schema.processlist WHERE state = 'User lock'"))
        )
        is_mariadb = other.dialect.is_mariadb  # type: ignore[attr-defined]
    lease.release()
    waiter.join()
    engine.dispose()
    (seconds,) = re.findall(r"GET_LOCK\('[^']*', ([0-9.]+)(?:e0)?\)", sent)
    assert 29 < float(seconds) <= 31
    assert float(seconds).is_integer() is not is_mariadb


@both
def test_session_that_is_closed_during_a_step_is_closed_at_its_end(store):
    """As that of a renewal which comes just after the release: left to the garbage collector, it would stay open."""
    begun, may_end = threading.Event(), threading.Event()
    connection = run(store._connections.take(BLOCKING, NAME))

    def late(_):
        begun.set()
        may_end.wait(WITHIN)

    renewing = threading.Thread(target=lambda: run(connection.step(BLOCKING, NAME, late)))
    renewing.start()
    begun.wait(WITHIN)
    store._connections.keep(connection)
    store.close()
    assert connection.dedicated.is_open
    assert not connection.is_open
    may_end.set()
    renewing.join()
    assert not connection.dedicated.is_open


@both
def test_session_whose_answer_two_interrupts_leave_unread_serves_no_other_lock(store, monkeypatch):
    """The next lock would read the answer to the statement before."""
    connection = run(store._connections.take(BLOCKING, NAME))
    unread = connection.dedicated.connection

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_twice(_: object) -> None:
        monkeypatch.setattr(os, "getpid", interrupt)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(connection.step(BLOCKING, NAME, interrupt_twice))
    monkeypatch.undo()
    assert not connection.is_open
    unread.close()


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_session_that_has_lost_its_lock_is_closed_at_the_release(store):
    """Such as by DISCARD ALL: the session holds unknown things, and no later holder may get it."""
    lease = Lock(store, NAME, renew=False).acquire()
    connection = store._reservations[lease._held.request.holder].connection
    run(connection.step(BLOCKING, NAME, lambda session: session.execute("SELECT pg_advisory_unlock_all()")))
    assert lease.release() is Released.EXPIRED
    assert not connection.is_open


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
def test_session_that_a_pooler_gives_to_two_is_refused_to_the_second(store, monkeypatch):
    """In one session, each would be granted the other's lock, as one that the session already has."""
    lease = Lock(store, NAME).acquire()
    session = Pooled(store._reservations[lease._held.request.holder].connection.dedicated.connection)
    other = made("postgresql", session=True)
    monkeypatch.setattr(other._pool.connector, "connect", lambda limit: session)
    with pytest.raises(BackendUnavailable, match="connect directly") as caught:
        Lock(other, NAME, wait=None).acquire()
    assert caught.value.refused
    assert lease.release() is Released.RELEASED


def test_standby_is_refused(servers_directory):
    """Its locks are separate: the primary would grant the same lock to another holder."""
    standby = servers.postgresql(servers_directory / "standby", servers.free_port())
    standby.start()
    standby.stop()
    (standby.directory / "standby.signal").touch()
    standby.ready = "ready to accept read-only connections"
    standby.start()
    store = from_engine(create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{standby.port}/postgres"), session=True)
    with pytest.raises(BackendUnavailable, match="use the primary"):
        Lock(store, NAME, wait=None).acquire()
    store.close()
    standby.stop()


@pytest.mark.parametrize(
    "store", ["postgresql", "psycopg2", "asyncpg", "mariadb", "pymysql", "aiomysql", "asyncmy"], indirect=True
)
def test_server_that_has_ended_every_idle_session_costs_no_single_try(store, alias):
    leases = [Lock(store, f"{NAME}:{number}").acquire() for number in range(4)]
    for lease in leases:
        lease.release()
    end_all_sessions(alias)
    Lock(store, NAME, wait=0).acquire().release()


def end_all_sessions(store: str) -> None:
    url = URLS["psycopg" if server_of(store) == "postgresql" else "pymysql"]
    with create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as operator:
        if server_of(store) == "postgresql":
            others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
            operator.execute(text(f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE {others}"))
            return
        ours = "id <> connection_id() AND user = 'root'"
        for (number,) in operator.execute(text(f"SELECT id FROM information_schema.processlist WHERE {ours}")).all():
            with suppress(OperationalError):
                operator.execute(text(f"KILL {number}"))


@pytest.mark.parametrize("store", ["postgresql", "asyncpg", "mariadb"], indirect=True)
def test_lease_with_a_longer_ttl_than_the_server_can_wait_is_held_for_that_long(store):
    """No server ends a session later than after 24.8 days of silence, so no lease may count on more."""
    lease = Lock(store, NAME, ttl=timedelta(days=30), wait=0).acquire()
    assert 24 * 86400.0 < lease.remaining() < 25 * 86400.0
    lease.renew(timedelta(days=366))
    assert 24 * 86400.0 < lease.remaining() < 25 * 86400.0
    assert lease.release() is Released.RELEASED
    short = Lock(store, NAME).acquire()
    short.renew(timedelta(days=30))
    assert run(store._server.is_held(BLOCKING, NAME))
    assert short.release() is Released.RELEASED


@pytest.mark.parametrize("store", ["postgresql", "psycopg2", "asyncpg", "mariadb", "pymysql"], indirect=True)
def test_renewal_that_the_server_refuses_costs_no_lease(store, monkeypatch):
    """Such as one that an administrator has cancelled: the session goes on, and with it the lock."""
    lease = Lock(store, NAME, renew=False).acquire()
    with monkeypatch.context() as refusing:
        refusing.setattr(store._server, "prove", lambda connection, *_: connection.execute("SELECT refused", {}))
        with pytest.raises(BackendUnavailable):
            lease.renew()
    assert not lease.lost
    assert run(store._server.is_held(BLOCKING, NAME))
    lease.renew()
    assert lease.release() is Released.RELEASED
