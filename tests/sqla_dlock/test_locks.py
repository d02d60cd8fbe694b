"""`lock(session, ...)`: the lease lives until its transactions have ended, however they end."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, PendingRollbackError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, aliased, scoped_session, sessionmaker

from dlock_core.backend import Capabilities, Released
from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import BackendUnavailable, LeaseLost, NotHeld, NotSupported, StaleToken
from dlock_core.leases.lease import LeaseState
from dlock_core.stores import Store, connect
from sqla_dlock import configure, lock, stores
from sqla_dlock.tie import current
from tests.chaos import EverybodyIn
from tests.garbage import collect_garbage
from tests.leases import is_held, until_expired, until_waited_for
from tests.mysql_server import DIALECT
from tests.proxy import Proxy
from tests.servers import free_port
from tests.sqla_dlock.engines import begin_immediate
from tests.sqla_dlock.models import Base, Counter, Stock
from tests.sqla_dlock.sessions import kill_session, names, session_id

servers_only = pytest.mark.parametrize("engine", ["postgresql", "mariadb", "pymysql"], indirect=True)
postgresql_only = pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
sqlite_only = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def session(engine):
    """A session in READ COMMITTED, where a lock may be requested after a read."""
    is_mariadb = engine.dialect.name == DIALECT
    engine.connect().close()  # a short lease may not last until a driver has connected for the first time
    with Session(engine.execution_options(isolation_level="READ COMMITTED") if is_mariadb else engine) as session:
        yield session
    assert current(session) == []


@pytest.fixture
def dlock_log(caplog):
    caplog.set_level(logging.INFO, logger="dlock")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "dlock"]


def order(session, **options):
    return lock(session, "order", 42, **options)


def add(session, name):
    session.add(Counter(name=name))
    session.flush()


def fence_token(session):
    return session.execute(text("SELECT token FROM dlock_fence WHERE name = 'order:42'")).scalar()


# The block, without a transaction


@sqlite_only
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_walks_out_of_the_block_and_leaves_its_parents_lease_alone(session, store):
    block = order(session)
    with block as lease:
        if (child := os.fork()) == 0:
            status = 1
            try:
                block.__exit__(None, None, None)
                status = 2 if lease.remaining() else 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert is_held(store)
    assert not is_held(store)


@sqlite_only
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_is_told_that_it_cannot_release_also_while_a_transaction_needs_the_lease(engine, session, store):
    with order(session) as lease:
        add(session, "a")
        if (child := os.fork()) == 0:
            status = 1
            try:
                lease.release()
            except NotHeld:
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        session.commit()
    assert names(engine) == {"a"}
    assert not is_held(store)


# Without a block


@pytest.mark.parametrize("together", [False, True])
@sqlite_only
def test_block_of_what_acquire_returned_is_refused_and_leaves_no_lease(session, store, together):
    one = order(session)
    given = lock(one, lock(session, "order", 1)) if together else one
    with pytest.raises(TypeError, match="`with` with the lock itself"), given.acquire():
        pass
    assert not is_held(store)


def test_acquire_is_held_to_the_end_of_the_next_transaction(session, store):
    lease = order(session).acquire()
    assert is_held(store)
    add(session, "a")
    assert is_held(store)
    session.commit()
    assert not is_held(store)
    assert lease.release() is Released.RELEASED


def test_acquire_is_held_to_the_end_of_the_next_transaction_that_sends_nothing(session, store):
    order(session).acquire()
    with session.begin():
        assert is_held(store)
    assert not is_held(store)


def test_lease_may_be_renewed_by_hand(session, store):
    with order(session, ttl=5) as lease:
        lease.renew(60)
        assert lease.remaining() > 50


# Each ending of a transaction


@pytest.mark.parametrize("end", ["rollback", "close", "reset", "invalidate"])
def test_transaction_that_is_not_committed_releases(engine, session, store, end):
    with order(session):
        add(session, "a")
    assert is_held(store)
    getattr(session, end)()
    assert not is_held(store)
    assert names(engine) == set()


def test_session_left_without_a_commit_releases(engine, store):
    with Session(engine) as session, order(session):
        add(session, "a")
    assert not is_held(store)
    assert names(engine) == set()


def test_flush_that_fails_releases_at_the_rollback(engine, session, store):
    add(session, "a")
    session.commit()
    taken = session.query(Counter.id).scalar()
    session.rollback()
    with order(session):
        session.add(Counter(id=taken, name="twin"))
        with pytest.raises(IntegrityError):
            session.flush()
        with pytest.raises(PendingRollbackError):
            session.commit()
    assert is_held(store)
    session.rollback()
    assert not is_held(store)


@postgresql_only
def test_commit_that_the_server_refuses_releases(engine, session, store):
    session.execute(text("CREATE TEMPORARY TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with order(session):
        session.execute(text("INSERT INTO late VALUES (1), (1)"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
    assert not is_held(store)


def test_session_is_used_again_after_the_lease(engine, session, store):
    for name in ("a", "b"):
        with order(session):
            add(session, name)
        session.commit()
        assert not is_held(store)
    add(session, "without")
    session.commit()
    assert names(engine) == {"a", "b", "without"}


@pytest.mark.parametrize("expire_on_commit", [True, False])
def test_attributes_read_after_the_commit_do_not_take_the_lease_again(engine, store, expire_on_commit):
    with Session(engine, expire_on_commit=expire_on_commit) as session:
        with order(session):
            counter = Counter(name="a")
            session.add(counter)
        session.commit()
        assert not is_held(store)
        assert counter.name == "a"
        assert not is_held(store)


# Several databases


@pytest.fixture
def second_engine(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/second.sqlite3")
    begin_immediate(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_lease_is_held_until_the_session_has_ended_on_every_database(engine, second_engine, store):
    with Session(binds={Counter: engine}) as session:
        with lock(session, "order", 42, bind=Counter):
            session.add(Counter(name="a"))
            session.flush()
            session.execute(
                text("INSERT INTO counter (name, value) VALUES ('b', 0)"), bind_arguments={"bind": second_engine}
            )
        assert is_held(store)
        session.commit()
    assert not is_held(store)
    assert names(engine) == {"a"}
    assert names(second_engine) == {"b"}


def test_lease_lost_is_rolled_back_on_every_database(engine, second_engine, store):
    with Session(engine) as session, pytest.raises(LeaseLost):  # it may run out before the second statement
        with order(session, ttl=0.25, renew=False) as lease:
            add(session, "a")
            session.execute(
                text("INSERT INTO counter (name, value) VALUES ('b', 0)"), bind_arguments={"bind": second_engine}
            )
            until_expired(lease, store)
        session.commit()
    assert names(engine) == set()
    assert names(second_engine) == set()


def test_session_of_several_databases_has_to_say_which_one_is_protected(second_engine, store):
    with Session(binds={Counter: second_engine}) as session:
        with pytest.raises(UnboundExecutionError, match="pass bind= with its engine"):
            order(session).acquire()
        assert not is_held(store)


def test_classes_of_several_databases_need_to_be_told_which_one_is_protected(engine, second_engine, store):
    with Session(binds={Counter: engine, Stock: second_engine}) as session:
        both = Counter, 1, Stock, 2
        with pytest.raises(ValueError, match=r"Counter, Stock.*several databases.*bind="):
            lock(session, *both).acquire()
        assert not is_held(store)
        for fits in ({"bind": Stock}, {"bind": engine}, {"fence": False}):
            with lock(session, *both, **fits):
                pass
        session.bind_mapper(Stock, engine)
        with lock(session, *both):
            pass


# Loss of the lease


def test_lease_lost_after_a_savepoint_without_a_statement_rolls_back(engine, session, store):
    """The end of the savepoint is no COMMIT: what was checked there is checked again."""
    with order(session, ttl=0.25, renew=False) as lease:
        with session.begin_nested():
            pass
        add(session, "a")
        until_expired(lease, store)
    with pytest.raises(LeaseLost):
        session.commit()
    session.rollback()
    assert names(engine) == set()


def test_engine_that_was_disposed_of_is_still_protected(engine, session, store):
    with order(session) as lease:
        engine.dispose()
        add(session, "a")
        assert fence_token(session) == lease.token
        session.commit()


def test_refusal_that_the_program_swallows_still_refuses_the_commit(engine, session, store):
    with order(session, ttl=0.25, renew=False) as lease:
        until_expired(lease, store)
        with pytest.raises(LeaseLost):
            session.execute(text("SELECT 1"))
        with pytest.raises(LeaseLost):
            session.execute(text("INSERT INTO counter (name, value) VALUES ('a', 0)"))
        with pytest.raises(LeaseLost):
            session.commit()
        session.rollback()
    assert names(engine) == set()


# A COMMIT with an unknown outcome, and connections that die


@pytest.fixture
def network(engine):
    """The network between the server and another engine of the same driver: `network.engine`."""
    with Proxy(engine.url.port) as proxy:
        proxy.engine = create_engine(engine.url.set(port=proxy.port))
        yield proxy
        proxy.engine.dispose()


@postgresql_only
@pytest.mark.parametrize("fault", ["cut_request", "cut_reply"])
def test_fenced_commit_that_may_have_worked_is_looked_up_on_postgresql(engine, store, network, fault):
    with Session(network.engine) as session, pytest.raises(DBAPIError):
        with order(session):
            add(session, "a")
            getattr(network, fault)(matching=b"COMMIT")
        session.commit()
    assert not is_held(store)
    assert names(engine) == ({"a"} if fault == "cut_reply" else set())


@servers_only
@pytest.mark.parametrize("end", ["rollback", "close"])
def test_session_killed_in_the_transaction_releases(engine, session, store, end):
    with order(session):
        add(session, "a")
        kill_session(engine, session_id(session.connection()))
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1"))
    getattr(session, end)()
    assert not is_held(store)
    assert names(engine) == set()


def test_forgotten_session_lets_its_lease_run_out(engine, store, dlock_log):
    session = Session(engine)
    order(session, ttl=60).acquire()
    add(session, "a")
    (tie,) = current(session)
    held = tie.held
    del session, tie
    collect_garbage()
    assert held.state is not LeaseState.HELD
    assert is_held(store)
    assert names(engine) == set()


# Asking again


def test_block_that_joins_the_lease_of_the_transaction_keeps_it_to_its_own_end(session, store):
    order(session).acquire()
    add(session, "a")
    with order(session) as lease:
        session.commit()
        assert is_held(store)
        assert lease.remaining() > 0
    assert not is_held(store)


def test_asking_again_after_the_fence_refused_to_join_is_protected(engine, session, store):
    def refuse(*_):
        raise Sorry

    with order(session, fence=False):
        connection = session.connection()
        event.listen(connection, "before_cursor_execute", refuse)
        with pytest.raises(Sorry):
            order(session).acquire()
        session.rollback()
        session.begin()
        lease = order(session).acquire()
        assert fence_token(session) == lease.token
        session.commit()


def test_another_session_of_the_thread_is_another_holder(engine, session, store):
    with order(session), Session(engine) as other, pytest.raises(TimeoutError):
        order(other, wait=0).acquire()


# Sessions of every kind


def test_scoped_session_is_a_session(engine, store):
    registry = scoped_session(sessionmaker(engine))
    with order(registry):
        registry.add(Counter(name="a"))
        registry.flush()
    assert is_held(store)
    registry.remove()
    assert not is_held(store)


def test_scoped_session_of_a_thread_holds_for_itself(engine, store):
    registry = scoped_session(sessionmaker(engine))

    def other():
        with pytest.raises(TimeoutError):
            order(registry, wait=0).acquire()
        registry.remove()

    with order(registry):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    registry.remove()


def test_session_may_be_ended_in_another_thread(engine, store):
    session = Session(engine, autoflush=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(order(session).acquire).result()
        session.add(Counter(name="a"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(session.commit).result() if engine.dialect.name != "sqlite" else session.commit()
    assert not is_held(store)
    session.close()


# Sessions inside an outer transaction


def test_lease_of_a_session_inside_an_outer_transaction_is_held_to_its_end(engine, store):
    with engine.connect() as connection:
        with connection.begin():
            session = Session(connection, join_transaction_mode="create_savepoint")
            with session, order(session, snapshot="ignore"):
                add(session, "a")
                session.commit()
            assert is_held(store)
        assert not is_held(store)
    assert names(engine) == {"a"}


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
@pytest.mark.parametrize("fence", ["transaction", False])
def test_lease_of_a_session_inside_a_test_is_held_to_the_sessions_own_end(engine, store, end, fence):
    """This is SQLAlchemy's recipe for tests; each session of the program takes the same lock."""
    with engine.connect().execution_options(dlock_test_transaction=True) as connection, connection.begin() as outer:
        for name in ("a", "b"):
            session = Session(connection, join_transaction_mode="create_savepoint")
            with order(session, fence=fence) as lease:
                add(session, name)
                if fence:
                    assert fence_token(session) == lease.token
            assert is_held(store)
            getattr(session, end)()
            assert not is_held(store)
            session.close()
        found = set(connection.scalars(text("SELECT name FROM counter")))
        assert found == ({"a", "b"} if end == "commit" else set())
        outer.rollback()
    assert names(engine) == set()


def test_lease_lost_inside_a_test_is_refused_as_in_production(engine, store):
    with engine.connect().execution_options(dlock_test_transaction=True) as connection, connection.begin():
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with order(session, ttl=0.25, renew=False) as lease:
                add(session, "a")
                until_expired(lease, store)
            with pytest.raises(LeaseLost):
                session.commit()
        assert not connection.scalars(text("SELECT name FROM counter")).all()


# Bad input


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ttl": 0}, ValueError),
        ({"ttl": float("nan")}, ValueError),
        ({"ttl": "30"}, TypeError),
        ({"wait": -1}, ValueError),
        ({"fence": "row"}, ValueError),
        ({"snapshot": "restart"}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
@sqlite_only
def test_wrong_option_is_refused_by_name(session, options, error):
    with pytest.raises(error, match=next(iter(options))):
        order(session, **options)


@pytest.mark.parametrize(
    ("bind", "named"),
    [
        ("postgresql://", "str"),
        (make_url("postgresql://"), "URL"),
        (sessionmaker(), "sessionmaker"),
        (Session(), "Session"),
        (Counter.__table__, "Table"),
        (Counter(), "Counter"),
        (Base, "the class Base"),
        (aliased(Counter), "AliasedClass"),
    ],
)
def test_bind_that_is_no_database_is_refused_before_any_io(bind, named):
    with pytest.raises(TypeError, match=f"bind= is an engine, a connection or a mapped class, not {named}$"):
        lock(Session(), "order", 42, bind=bind)


@pytest.mark.parametrize("async_engine", ["aiosqlite"], indirect=True)
async def test_bind_is_an_engine_or_connection_of_either_kind_or_a_mapped_class(async_engine):
    for bind in (None, async_engine, async_engine.sync_engine, async_engine.connect(), Counter):
        assert lock(Session(), "order", 42, bind=bind).bind is bind
    async with async_engine.connect() as connection:
        for bind in (connection, connection.sync_connection):
            assert lock(Session(), "order", 42, bind=bind).bind is bind


@pytest.mark.parametrize("parts", [(), ("",), (None,), (True,), (1.5,), ("order", [])])
@sqlite_only
def test_name_that_is_none_is_refused(session, parts):
    with pytest.raises((TypeError, ValueError)):
        lock(session, *parts)


@pytest.mark.parametrize("hostile", ["'; DROP TABLE counter; --", "{}", "%s", ":name", "\x00", "ä" * 60, "a b"])
def test_hostile_text_is_a_name_like_any_other(session, store, hostile):
    with lock(session, "order", hostile) as lease:
        add(session, "a")
        assert is_held(store, lease.name)
    session.commit()
    assert not is_held(store, lease.name)


@sqlite_only
def test_mapped_class_stands_for_its_table(session, store):
    with lock(session, Counter, 42) as lease:
        assert lease.name == "counter:42"


async def test_async_session_is_a_type_error_before_any_io(store):
    engine = create_async_engine("sqlite+aiosqlite://")
    async with AsyncSession(engine) as session:
        with pytest.raises(TypeError, match="alock"):
            order(session)
    await engine.dispose()


@pytest.mark.parametrize("nothing", [None, "session", object(), Session])
def test_what_is_no_session_is_a_type_error(nothing):
    with pytest.raises(TypeError, match="Session is needed"):
        order(nothing)


@sqlite_only
def test_session_that_was_closed_for_good_is_refused_before_any_io(engine, store):
    session = Session(engine, close_resets_only=False)
    session.close()
    with pytest.raises(InvalidRequestError, match="closed for good"):
        order(session).acquire()
    assert not is_held(store)


def test_session_that_was_closed_may_be_used_again(session, store):
    session.close()
    with order(session):
        add(session, "a")
    session.commit()
    assert not is_held(store)


@sqlite_only
@pytest.mark.parametrize("how", ["close", "reset", "invalidate"])
def test_session_that_is_closed_before_any_statement_lets_go_at_once(engine, store, how):
    with Session(engine) as session:
        add(session, "of an earlier transaction")
        session.commit()
        for _ in range(2):  # the session goes on
            order(session).acquire()
            assert is_held(store)
            getattr(session, how)()
            assert not is_held(store)
        order(session).acquire()
        add(session, "of a later one")
        session.commit()
        assert not is_held(store)
    assert not {"close", "reset", "invalidate", "_dlock_hooks"} & vars(session).keys()


@sqlite_only
def test_lease_that_is_released_before_a_transaction_begins_leaves_no_hook_on_its_session(session, store):
    order(session).acquire().release()
    assert not {"close", "reset", "invalidate", "_dlock_hooks"} & vars(session).keys()


def close_after_more_work(session):
    session.rollback()
    session.execute(text("SELECT 1"))
    session.commit()
    session.close()


@sqlite_only
@pytest.mark.parametrize(
    "close", [lambda session: session.close(), close_after_more_work], ids=["at_once", "after_more_work"]
)
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_session_that_is_closed_while_it_waits_gets_no_lease_that_nothing_would_end(
    engine, store, several, has_begun, close
):
    with Session(engine) as holder, Session(engine) as session, ThreadPoolExecutor(1) as thread:
        lease = order(holder).acquire()
        if has_begun:
            session.execute(text("SELECT 1"))
        wanted = lock(order(session), lock(session, "other")) if several else order(session)
        waiting = thread.submit(wanted.acquire)
        until_waited_for(store)
        close(session)
        lease.release()
        with pytest.raises(InvalidRequestError, match="closed while it waited for the lock 'order:42'"):
            waiting.result(60)
        assert not is_held(store)
        assert not is_held(store, "other")
        order(session).acquire()  # the session itself may be used again
        session.close()
        assert not is_held(store)
    assert not {"close", "reset", "invalidate", "_dlock_hooks"} & vars(session).keys()


@sqlite_only
def test_missing_store_is_named(session):
    with pytest.raises(LookupError, match="ledger"):
        order(session, store="ledger").acquire()


@sqlite_only
def test_shared_lock_in_a_store_without_them_is_refused_before_it_is_asked(session, monkeypatch):
    class Exclusive(MemoryBackend):
        capabilities = Capabilities()

    with pytest.raises(NotSupported, match="shared"):
        order(session, store=Exclusive(), shared=True).acquire()


# Stores


@sqlite_only
def test_two_stores_have_locks_of_their_own(session, store):
    other = MemoryBackend()
    with order(session), order(session, store=other):
        assert is_held(other)
        assert is_held(store)


@sqlite_only
def test_ttl_and_wait_come_from_the_store_unless_given(engine, session, monkeypatch):
    backend = MemoryBackend()
    monkeypatch.setitem(stores._stores, "quick", Store("quick", backend, ttl=5.0, wait=0.0))
    with order(session, store="quick") as lease, Session(engine) as other:
        assert lease.remaining() <= 5.0
        with pytest.raises(TimeoutError):
            order(other, store="quick").acquire()


@sqlite_only
def test_store_of_the_environment_is_the_default(session, monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setenv("DLOCK_URL", "memory://")
    with order(session) as lease:
        assert lease.remaining() > 0


def test_signal_handler_that_asks_for_the_store_of_the_environment_while_it_is_made_shares_it(monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setenv("DLOCK_URL", "memory://")
    asked, connect_once = [], stores.connect

    def interrupted(url):
        if not asked:
            asked.append(None)
            asked[:] = [stores.store_of("default")]
        return connect_once(url)

    monkeypatch.setattr(stores, "connect", interrupted)
    assert [stores.store_of("default")] == asked


def test_wrong_store_changes_nothing(monkeypatch):
    monkeypatch.setattr(stores, "_stores", {})
    with pytest.raises(ValueError, match="scheme"):
        configure(good="memory://", bad="nonsense://")
    assert stores._stores == {}


@pytest.fixture
def nobody(monkeypatch):
    """A store without a server."""
    backend = connect(f"redis://127.0.0.1:{free_port()}/0", timeout=0.2)
    monkeypatch.setitem(stores._stores, "default", Store("default", backend, wait=0.2))


@pytest.mark.usefixtures("nobody")
def test_store_down_leaves_the_transaction_usable(engine, session):
    add(session, "a")
    with pytest.raises(BackendUnavailable):
        order(session).acquire()
    add(session, "b")
    session.commit()
    assert names(engine) == {"a", "b"}


def test_lock_without_a_fence_needs_no_connection_that_is_usable(session, store):
    session.connection().invalidate()
    with order(session, fence=False, snapshot="ignore"):
        assert is_held(store)


def test_store_lost_after_the_commit_does_not_spoil_it(engine, session, redis_server, monkeypatch, dlock_log):
    with Proxy(redis_server.port) as proxy:
        backend = connect(f"redis://127.0.0.1:{proxy.port}/0", timeout=0.2)
        with lock(session, "flaky", engine.url.drivername, store=backend):
            add(session, "a")
        proxy.refuse()
        session.commit()
    assert names(engine) == {"a"}
    assert any("runs out" in line for line in dlock_log())


# A failed acquire leaves no duty


def test_acquire_that_failed_at_the_fence_does_not_hinder_the_commit(engine, session):
    with engine.begin() as connection:
        insert = "INSERT INTO dlock_fence (name, token, holder, s_token) VALUES ('order:42', :token, 'newer', 0)"
        connection.execute(text(insert), {"token": 2**62})
    forgetful = EverybodyIn([1])
    forgetful.forgetful = True
    add(session, "a")
    with pytest.raises(StaleToken):
        order(session, store=forgetful).acquire()
    session.commit()
    assert names(engine) == {"a"}


# The packages that are needed


@pytest.mark.parametrize("block", ["greenlet", "redis"])
def test_everything_but_asyncio_works_without(block, tmp_path):
    program = f"""
import sys
sys.modules[{block!r}] = None
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session
import sqla_dlock
from sqla_dlock import configure, lock
from sqla_dlock.fencing import metadata
engine = create_engine("sqlite:///{tmp_path}/one.sqlite3")
metadata.create_all(engine)
configure(default="memory://")
with Session(engine) as session, lock(session, "order", 42) as lease:
    assert session.scalar(text("SELECT token FROM dlock_fence WHERE name = 'order:42'")) == lease.token
    session.commit()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_instance_is_no_name(session, store):
    with pytest.raises(TypeError, match=r"lock\(session, Counter, key\)"):
        lock(session, Counter(id=1))


def test_client_is_no_store_before_it_is_configured(session):
    with redis.Redis() as client, pytest.raises(TypeError, match="configure"):
        lock(session, "order", 42, store=client).acquire()
