"""The fence: no update is lost, whatever the lock service does. Every interleaving is determined, step by step."""

import concurrent.futures
import contextlib
import itertools
import threading

import pytest
from sqlalchemy import create_engine, event, select, text, update
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from dlock_core.errors import NotSupported, StaleToken
from dlock_core.transactions.fencing import FenceEntry
from sqla_dlock import fencing, lock, tables
from sqla_dlock.fencing import TABLE_FENCE
from tests.chaos import EverybodyIn
from tests.leases import is_held
from tests.mysql_server import DIALECT
from tests.sqla_dlock.adders import (
    WITHIN,
    Adder,
    add_counter,
    add_fence,
    fences,
    isolated,
    value,
)
from tests.sqla_dlock.engines import URLS
from tests.sqla_dlock.models import Counter, Delivery, Stock
from tests.sqla_dlock.parties import until_blocked

SERVERS = [
    ("psycopg2", "read committed"),
    ("postgresql", "read committed"),
    ("postgresql", "repeatable read"),
    ("postgresql", "serializable"),
    ("mariadb", "read committed"),
    ("mariadb", "repeatable read"),
    ("mariadb", "serializable"),
    ("pymysql", "repeatable read"),
]
SQLITE = [("sqlite", "IMMEDIATE"), ("sqlite", "DEFERRED")]
EVERY = [*SERVERS, *SQLITE]
COMMITTED = [pair for pair in SERVERS if pair[1] == "read committed"]
ONCE = [*COMMITTED, ("pymysql", "repeatable read"), ("sqlite", "IMMEDIATE")]
OUTER = [*COMMITTED, ("pymysql", "read committed"), ("sqlite", "IMMEDIATE")]
FORMS = ["transaction", "lease"]
AT_ONCE = {"stream_results": False, "yield_per": None}


def levels(pairs):
    return pytest.mark.parametrize("engine", pairs, ids=lambda pair: "-".join(pair).replace(" ", "_"), indirect=True)


@pytest.fixture
def another(request, make_engine):
    """Make one more engine for the database and the isolation level of the test."""
    return lambda **options: isolated(make_engine, *request.node.callspec.params["engine"], **options)


@pytest.fixture
def engine(another):
    """A database at an isolation level, with a counter "a" at 0."""
    made = another()
    add_counter(made)
    return made


@pytest.fixture
def broken():
    """A store that grants every request; `broken.tokens` are its next tokens."""
    return EverybodyIn()


@pytest.fixture
def adder(broken):
    with contextlib.ExitStack() as stack:
        yield lambda *args, store=broken, **options: stack.enter_context(Adder(*args, store=store, **options))


def set_to(session, number):
    session.execute(update(Counter).values(value=number))


# fence="transaction"


@levels([("postgresql", "read committed"), ("psycopg2", "read committed")])
@pytest.mark.parametrize("where", ["session", "engine"])
def test_holder_whose_level_a_listener_sets_sees_what_the_shared_one_that_it_waited_for_has_committed(
    engine, another, broken, adder, where
):
    broken.tokens = iter([10, 11])
    posting, closing = adder(engine, shared=True), adder(another())
    target, name = (closing.session, "after_begin") if where == "session" else (closing.session.get_bind(), "begin")
    set_level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    event.listen(target, name, lambda *given: given[-1].exec_driver_sql(set_level))
    posting.take()
    posting.now(posting.read)
    posting.write()
    closing.take()
    reading = closing.start()
    until_blocked(engine)
    posting.commit()
    assert reading.result(WITHIN) == 1
    closing.commit()


@levels([("mariadb", "repeatable read"), ("pymysql", "repeatable read")])
@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("question", ["admit", "confirm"])
def test_newer_holder_that_has_committed_since_the_snapshot_is_not_overlooked(engine, question, shared):
    """A plain read would find the old row, with the older lease in it."""
    older = FenceEntry("order:42", 10, "older", shared)
    newer = FenceEntry("order:42", 11, "newer")
    with engine.begin() as connection:
        TABLE_FENCE.admit(connection, older)
    with engine.connect() as connection:
        assert connection.execute(select(Counter.value)).scalar_one() == 0
        with engine.begin() as other:
            TABLE_FENCE.admit(other, newer)
        with pytest.raises(StaleToken):
            getattr(TABLE_FENCE, question)(connection, older)


@levels(ONCE)
def test_shared_holder_with_the_token_of_the_newest_exclusive_one_is_refused(engine):
    """No store that works grants a token twice; the mark of another shared holder is above it."""
    with engine.begin() as connection:
        TABLE_FENCE.admit(connection, FenceEntry("order:42", 10, "exclusive"))
    with engine.begin() as connection:
        assert TABLE_FENCE.admit(connection, FenceEntry("order:42", 11, "newer", shared=True)) == 10
    with engine.begin() as connection, pytest.raises(StaleToken):
        TABLE_FENCE.admit(connection, FenceEntry("order:42", 10, "shared", shared=True))


@levels([("mariadb", "read committed"), ("pymysql", "repeatable read")])
@pytest.mark.parametrize("nested", [False, True])
def test_transaction_that_a_deadlock_has_rolled_back_is_admitted_again_before_it_goes_on(engine, broken, nested):
    """MariaDB and MySQL roll all of it back, and a program that swallows the error goes on in a new transaction."""
    broken.tokens = iter([10])
    with Session(engine) as session, session.begin():
        session.add_all(Stock(id=number) for number in (1, 2))

    def change(connection, number):
        connection.execute(update(Stock).where(Stock.id == number).values(pieces=Stock.pieces + 1))

    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        engine.connect() as other,
        Session(engine) as session,
        lock(session, "order", 42, store=broken),
    ):
        change(session, 1)
        other.execute(Stock.__table__.insert(), [{"id": number} for number in range(100, 200)])  # not the victim
        change(other, 2)
        blocked = pool.submit(change, other, 1)
        with pytest.raises(DBAPIError), session.begin_nested() if nested else contextlib.nullcontext():
            change(session, 2)
        blocked.result(30)
        other.rollback()
        assert session.scalar(select(fencing.table.c.token).where(fencing.table.c.name == "order:42")) == 10
        session.commit()
    assert fences(engine) == [("order:42", 10)]


@pytest.mark.parametrize("form", FORMS)
def test_transaction_that_sqlite_has_rolled_back_by_itself_commits_nothing_that_is_not_fenced(
    make_engine, broken, form
):
    """INSERT OR ROLLBACK does that, and so does a full disk; here only the engine's event begins a transaction."""
    broken.tokens = iter([10])
    engine = make_engine("sqlite")
    add_counter(engine)
    with Session(engine) as session, lock(session, "order", 42, store=broken, fence=form):
        be_rolled_back(session)
        with pytest.raises(NotSupported, match="in no transaction"):
            set_to(session, 2)
    assert value(engine) == 0


def test_transaction_that_sqlite_has_rolled_back_is_admitted_again_where_the_driver_begins_another(make_engine, broken):
    broken.tokens = iter([10])
    add_counter(make_engine("sqlite"))
    engine = create_engine(URLS["sqlite"])
    with Session(engine) as session, lock(session, "order", 42, store=broken):
        be_rolled_back(session)
        set_to(session, 2)
        session.commit()
    assert value(engine) == 2
    assert fences(engine) == [("order:42", 10)]
    engine.dispose()


@pytest.mark.parametrize("name", ["mariadb", "pymysql"])
def test_tables_have_transactions_where_those_of_the_server_have_none(make_engine, name):
    engine = make_engine(name)
    with engine.connect() as connection:
        connection.execute(text("CREATE DATABASE IF NOT EXISTS without_transactions"))
        connection.execute(text("USE without_transactions"))
        connection.execute(text("SET default_storage_engine = MyISAM"))
        try:
            for table in (tables.fence_table, tables.lease_table):
                table.create(connection)
            engines = "SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = DATABASE()"
            assert connection.execute(text(engines)).all() == [("InnoDB",)]
        finally:
            connection.execute(text("DROP DATABASE without_transactions"))
            connection.invalidate()


def be_rolled_back(session):
    set_to(session, 1)
    with pytest.raises(DBAPIError):
        session.execute(text("INSERT OR ROLLBACK INTO counter SELECT * FROM counter"))


@levels(ONCE)
def test_statement_waits_for_the_admit_however_it_is_sent(engine, broken, adder):
    """The first may be a flush, a Core statement, a bulk insert, or a statement on the session's connection."""
    broken.tokens, broken.forgetful = itertools.count(10), True
    firsts = [
        lambda session: (session.add(Counter(name="b")), session.flush()),
        lambda session: session.execute(Counter.__table__.insert(), [{"name": "b", "value": 0}] * 2),
        lambda session: session.bulk_save_objects([Counter(name="b")]),
        lambda session: session.connection().exec_driver_sql("INSERT INTO counter (name, value) VALUES ('b', 0)"),
        lambda session: session.connection().connection.cursor().execute("INSERT INTO counter VALUES (7, 'b', 0)"),
    ]
    add_fence(engine, token=99)
    for first in firsts:
        late = adder(engine)
        late.take()
        with pytest.raises(StaleToken):
            late.now(first, late.session)
        late.rollback()
    with engine.connect() as connection:
        assert connection.execute(select(Counter.name)).all() == [("a",)]


# Several locks, engines, connections


@pytest.fixture
def ledger(make_engine):
    """A second database."""
    return make_engine("sqlite")


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
def test_engine_that_the_lock_does_not_protect_gets_no_fence(engine, ledger, broken):
    broken.tokens = iter([10])
    with (
        Session(engine, binds={Delivery: ledger, Stock: ledger, Counter: engine}) as session,
        lock(session, "order", 42, bind=Counter, store=broken),
    ):
        session.execute(select(Delivery)).all()
        set_to(session, 1)
        session.commit()
    assert fences(engine) == [("order:42", 10)]
    assert fences(ledger) == []


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
@pytest.mark.parametrize("stale", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_stale_lock_on_one_of_two_engines_commits_on_neither(engine, ledger, broken, stale, form):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    add_counter(ledger)
    with Session(engine, binds={Stock: ledger}) as session:
        locks = [
            lock(session, "order", 1, store=broken, fence=form),
            lock(session, "shelf", 1, store=broken, fence=form, bind=ledger),
        ]
        with locks[0], locks[1]:
            if form == "lease":
                overtake(engine if stale == 1 else ledger, "order:1" if stale == 1 else "shelf:1")
            else:
                add_fence(engine if stale == 1 else ledger, name="order:1" if stale == 1 else "shelf:1", token=99)
            for bind in (engine, ledger):
                with contextlib.suppress(StaleToken):
                    session.execute(update(Counter).values(value=1), bind_arguments={"bind": bind})
            with pytest.raises(StaleToken):
                session.commit()
            session.rollback()
    assert (value(engine), value(ledger)) == (0, 0)


def overtake(engine, name):
    with engine.begin() as connection:
        connection.execute(update(fencing.table).where(fencing.table.c.name == name).values(token=99, holder="x"))


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
def test_two_leases_on_two_engines_protect_one_each(engine, ledger, broken):
    broken.tokens = iter([10, 11])
    add_counter(ledger)
    with Session(engine) as session:
        locks = lock(session, "order", 1, store=broken), lock(session, "shelf", 1, store=broken, bind=ledger)
        with locks[0], locks[1]:
            for bind in (engine, ledger):
                session.execute(update(Counter).values(value=1), bind_arguments={"bind": bind})
            session.commit()
    assert (fences(engine), fences(ledger)) == ([("order:1", 10)], [("shelf:1", 11)])
    assert (value(engine), value(ledger)) == (1, 1)


@levels([("mariadb", "repeatable read"), ("postgresql", "read committed")])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stale", [False, True])
def test_two_phase_commit_is_fenced_before_it_is_prepared(engine, broken, form, stale):
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            if connection.exec_driver_sql("SHOW max_prepared_transactions").scalar() == "0":
                pytest.skip("max_prepared_transactions is 0 on this server")
    broken.tokens, broken.forgetful = iter([10]), True
    with Session(engine, twophase=True) as session, lock(session, "order", 42, store=broken, fence=form):
        if stale and form == "lease":
            overtake(engine, "order:42")
        elif stale:
            add_fence(engine, token=99)
        if stale:
            with pytest.raises(StaleToken):
                set_to(session, 1)
                session.commit()
            session.rollback()
        else:
            set_to(session, 1)
            session.commit()
    assert value(engine) == (not stale)


MODES = ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


@levels(OUTER)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_session_on_a_connection_with_an_outer_transaction_is_fenced_in_it(engine, broken, mode, form):
    broken.tokens, broken.forgetful = iter([10]), True
    with engine.connect() as connection, connection.begin() as outer:
        with (
            Session(connection, join_transaction_mode=mode) as session,
            lock(session, "order", 42, store=broken, fence=form),
        ):
            set_to(session, 1)
            session.commit()
        if mode != "control_fully":
            outer.commit()
    assert value(engine) == 1
    assert fences(engine) == [("order:42", 10)]


@levels(OUTER)
@pytest.mark.parametrize("mode", MODES)
def test_session_on_a_connection_with_an_outer_transaction_is_refused_in_it(engine, broken, mode):
    broken.tokens, broken.forgetful = iter([10]), True
    add_fence(engine, token=99)
    with pytest.raises(StaleToken), engine.begin() as connection:
        with (
            Session(connection, join_transaction_mode=mode) as session,
            contextlib.suppress(StaleToken),
            lock(session, "order", 42, store=broken),
        ):
            set_to(session, 1)
        if mode == "control_fully":
            raise StaleToken("order:42", token=10)  # the session has rolled back itself
    assert value(engine) == 0


@levels([("postgresql", "read committed"), ("mariadb", "read committed")])
def test_outer_transaction_is_fenced_also_when_its_engine_was_named(engine, broken):
    broken.tokens, broken.forgetful = iter([10]), True
    with (
        pytest.raises(StaleToken),
        engine.begin() as connection,
        Session(connection) as session,
        lock(session, "order", 42, store=broken, fence="lease", bind=engine),
    ):
        overtake(engine, "order:42")
        if not fences(engine):
            add_fence(engine, token=99)
        set_to(session, 1)
        session.commit()
    assert value(engine) == 0


# What cannot be fenced


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_engine_in_autocommit_is_refused_before_anything_is_written(engine, broken, form):
    broken.tokens = itertools.count(10)
    automatic = engine.execution_options(isolation_level="AUTOCOMMIT")
    with (
        Session(automatic) as session,
        lock(session, "order", 42, store=broken, fence=form),
        pytest.raises(NotSupported, match="AUTOCOMMIT"),
    ):
        set_to(session, 1)
    with Session(automatic) as session, lock(session, "order", 42, store=broken, fence=False):
        set_to(session, 2)
        session.commit()
    assert value(engine) == 2


@pytest.mark.parametrize("name", ["postgresql", "mariadb", "pymysql"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.skipif(not hasattr(DefaultDialect, "detect_autocommit_setting"), reason="SQLAlchemy 2.0.43")
def test_connection_that_commits_behind_sqlalchemys_back_is_refused(make_engine, store, name, form):
    engine = make_engine(name, connect_args={"autocommit": True})
    with Session(engine) as session, lock(session, "order", 42, fence=form), pytest.raises(NotSupported):
        session.execute(text("SELECT 1"))


def make_read_only(engine):
    sql = {
        "postgresql": "SET default_transaction_read_only = on",
        DIALECT: "SET SESSION TRANSACTION READ ONLY",
        "sqlite": "PRAGMA query_only = ON",
    }[engine.dialect.name]

    @event.listens_for(engine, "connect")
    def connected(connection, _):
        cursor = connection.cursor()
        cursor.execute(sql)
        cursor.close()
        connection.commit()


@levels([*COMMITTED, ("pymysql", "repeatable read"), ("sqlite", "DEFERRED")])
@pytest.mark.parametrize("form", FORMS)
def test_database_that_may_not_be_written_says_so_and_the_lease_is_given_back(another, engine, store, form):
    read_only = another()
    make_read_only(read_only)
    with Session(read_only) as session, pytest.raises(DBAPIError) as caught, lock(session, "order", 42, fence=form):
        session.scalars(select(Counter)).all()
    assert "in a writable database" in caught.value.__notes__[0]
    assert not is_held(store)
    with Session(read_only) as session, lock(session, "order", 42, fence=False):
        assert session.scalars(select(Counter.value)).one() == 0


@levels(ONCE)
@pytest.mark.parametrize("option", [{"stream_results": True}, {"yield_per": 10}], ids=lambda option: next(iter(option)))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [False, True])
def test_session_whose_connection_streams_its_results_is_fenced(engine, broken, option, form, shared):
    """A server-side cursor takes only plain queries, so the fence's statements use none."""
    engine = engine.execution_options(**option)

    def set_to(number, **options):
        with Session(engine) as session, lock(session, "a", store=broken, fence=form, **options):
            session.execute(update(Counter).values(value=number), execution_options=AT_ONCE)
            session.commit()

    broken.tokens = iter([5])
    set_to(1, shared=shared)
    broken.tokens, broken.forgetful = iter([4]), True
    with pytest.raises(StaleToken):
        set_to(2)
    assert value(engine) == 1


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_missing_table_says_how_to_make_it_and_the_lease_is_given_back(engine, store, form):
    fencing.metadata.drop_all(engine)
    try:
        with (
            Session(engine) as session,
            pytest.raises(DBAPIError) as caught,
            lock(session, "order", 42, fence=form),
        ):
            session.scalars(select(Counter)).all()
        assert "sqla_dlock.fencing.metadata.create_all()" in caught.value.__notes__[0]
        assert not is_held(store)
    finally:
        fencing.metadata.create_all(engine)


# New names, no transaction, and a long wait


@levels([("mariadb", "repeatable read"), ("mariadb", "serializable"), ("pymysql", "repeatable read")])
@pytest.mark.parametrize("shared", [False, True])
def test_new_names_do_not_lock_each_other_out(engine, store, shared):
    """An UPDATE of a missing row would lock the gap against every other INSERT: 43 of 100 were deadlocks."""
    add_fence(engine, token=0, name="")  # the floor, which `create_all` and Django's migration make
    barrier = threading.Barrier(4)

    def worker(number):
        for turn in range(20):
            barrier.wait(30)
            with Session(engine) as session, lock(session, "new", number, turn, shared=shared):
                session.connection()
                session.commit()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [None] * 4


def test_sqlite_that_begins_no_transaction_cannot_be_fenced_and_says_so(tmp_path, store):
    engine = create_engine(f"sqlite:///{tmp_path}/loose.sqlite3", connect_args={"isolation_level": None})
    for metadata in (Counter.metadata, fencing.metadata):
        metadata.create_all(engine)
    with Session(engine) as session, lock(session, "order", 42):
        with pytest.raises(NotSupported, match="BEGIN IMMEDIATE"):
            session.add(Counter(id=1))
            session.flush()
        session.rollback()
    with engine.connect() as connection:
        assert connection.scalars(select(Counter.id)).all() == []
    engine.dispose()


@levels(SERVERS[:1])
def test_lease_is_renewed_while_its_admit_waits(engine, store):
    add_fence(engine, token=0)
    lost = threading.Event()

    def worker():
        with Session(engine) as session:
            session.connection()
            order = lock(session, "order", 42, ttl=0.5, wait=30, snapshot="ignore", on_lost=lost.set)
            with order:
                session.add(Counter(name="admitted late"))
                session.commit()

    with engine.connect() as other, other.begin() as blocking, concurrent.futures.ThreadPoolExecutor(1) as pool:
        other.execute(update(fencing.table).values(s_token=0))
        working = pool.submit(worker)
        until_blocked(engine)
        assert not lost.wait(1.0)
        blocking.rollback()
        working.result(30)
    assert not is_held(store)
