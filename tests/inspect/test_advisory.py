"""Advisory locks of our own stores are listed by name, once, and as locks of the actors that requested them."""

import threading
from contextlib import closing

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from dlock_core import Lock
from dlock_core.inspect import take_snapshot
from sqla_dlock import lock
from sqla_dlock.backends.advisory import from_engine
from sqla_dlock.inspect import database as sqla_database
from tests.inspect.parties import URLS
from tests.mysql_server import DIALECT
from tests.waiting import INNODB_REFRESH_S, until

WITHIN = 60.0


@pytest.fixture
def engine(database):
    engine = create_engine(URLS[database])
    yield engine
    engine.dispose()


def look(stores, engine, kind):
    """Return the entries of a snapshot in which a lock of this kind has a waiter."""

    def waited_for():
        found = take_snapshot(stores, [one])
        if any((entry.role, entry.kind) == ("waiter", kind) for entry in found.entries):
            assert not found.unreadable
            return found.entries
        return None

    with closing(sqla_database(engine, alias="db")) as one:
        return until(waited_for, every=INNODB_REFRESH_S)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_session_lock_is_told_once_and_by_its_name(engine):
    store = from_engine(engine, session=True)
    with Lock(store, "order:42"):
        thread = threading.Thread(target=lambda: Lock(store, "order:42", wait=100).acquire().release())
        thread.start()
        both = look([("locks", store)], engine, "lease")
        alone = look([], engine, "advisory")
    thread.join()
    store.close()
    if engine.dialect.name == DIALECT:  # there, an idle holder does not show whose lock it holds
        both = [entry for entry in both if entry.kind == "lease"]
    assert [(entry.kind, entry.name, entry.role) for entry in both] == [
        ("lease", "order:42", "holder"), ("lease", "order:42", "waiter"),
    ]  # fmt: skip
    assert [(entry.kind, entry.name, entry.role) for entry in alone] == [
        ("advisory", "order:42", "holder"), ("advisory", "order:42", "waiter"),
    ]  # fmt: skip


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_lock_of_a_transaction_belongs_to_the_session_that_waits_for_a_row(engine):
    store = from_engine(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO testapp_stock (id, pieces) VALUES (7, 0)"))
    with engine.begin() as other, Session(engine) as session:
        other.execute(text("SELECT * FROM testapp_stock WHERE id = 7 FOR UPDATE"))
        session.execute(text("SELECT 1"))
        lock(session, "order", 42, store=store, fence=False).acquire()
        query = text("SELECT * FROM testapp_stock WHERE id = 7 FOR UPDATE")
        thread = threading.Thread(target=session.execute, args=(query,))
        thread.start()
        entries = look([("locks", store)], engine, "row")
        other.rollback()
        thread.join()
        session.rollback()
    store.close()
    (lease,) = (entry for entry in entries if entry.kind == "lease")
    (waiter,) = (entry for entry in entries if entry.role == "waiter")
    assert (lease.name, waiter.name) == ("order:42", "testapp_stock 7")
    assert lease.actor == waiter.actor
