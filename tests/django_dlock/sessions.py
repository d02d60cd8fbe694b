"""Other sessions on the database of a test: what they see is committed, and they can end the session of the test."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.testapp.models import Counter
from tests.waiting import meanwhile, until


def add(alias: str, name: str) -> Counter:
    return Counter.objects.using(alias).create(name=name)


def committed(alias: str) -> set[str]:
    """Return the names of all counters, as another session sees them."""
    with second_session(alias) as second:
        return {name for (name,) in rows(second, "SELECT name FROM testapp_counter")}


@contextlib.contextmanager
def second_session(alias: str) -> Iterator[BaseDatabaseWrapper]:
    connection = connections[alias].copy()
    connection.inc_thread_sharing()
    try:
        yield connection
    finally:
        connection.close()


def rows(connection: BaseDatabaseWrapper, sql: str, *params: object) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchall() if cursor.description else []


def session_id(alias: str) -> int:
    function = "pg_backend_pid" if connections[alias].vendor == "postgresql" else "connection_id"
    ((number,),) = rows(connections[alias], f"SELECT {function}()")
    return number


def kill_session(alias: str) -> None:
    """Have the server end this thread's session on a database, and wait until it has."""
    number = session_id(alias)
    with second_session(alias) as second:
        if second.vendor == "postgresql":
            rows(second, "SELECT pg_terminate_backend(%s, 10000)", number)
            return
        rows(second, f"KILL {number}")
        until(lambda: not rows(second, "SELECT 1 FROM information_schema.processlist WHERE id = %s", number))


@contextlib.contextmanager
def held_in_commit(alias: str, then: Callable[[BaseDatabaseWrapper], None]) -> Iterator[None]:
    """On PostgreSQL, stop a COMMIT that adds a Counter in a deferred trigger, and call `then` in another thread.

    `then` gets its own session; after it, the COMMIT goes on.
    """
    with second_session(alias) as blocker, second_session(alias) as watcher:
        rows(blocker, "SELECT pg_advisory_lock(4711)")
        rows(blocker, HOLD_COMMIT)

        def interfere() -> None:
            try:
                _wait_until_held(watcher)
                then(watcher)
            finally:
                rows(blocker, "SELECT pg_advisory_unlock(4711)")

        try:
            with meanwhile(interfere):
                yield
        finally:
            rows(watcher, "DROP FUNCTION hold_commit() CASCADE")


@contextlib.contextmanager
def killed_in_commit(alias: str) -> Iterator[None]:
    """On MariaDB or MySQL, stop the next COMMIT of this thread, as a backup does, and end it by KILL QUERY."""
    number = session_id(alias)
    held = "SELECT 1 FROM information_schema.processlist WHERE id = %s AND info = 'commit'"
    with second_session(alias) as backup, second_session(alias) as watcher:
        rows(backup, "FLUSH TABLES WITH READ LOCK")

        def kill() -> None:
            until(lambda: rows(watcher, held, number))
            rows(watcher, f"KILL QUERY {number}")

        try:
            with meanwhile(kill):
                yield
        finally:
            rows(backup, "UNLOCK TABLES")


HOLD_COMMIT = """
CREATE FUNCTION hold_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hold_commit AFTER INSERT ON testapp_counter DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION hold_commit();
"""


def _wait_until_held(watcher: BaseDatabaseWrapper) -> None:
    until(lambda: rows(watcher, "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"))


def interrupt(_: BaseDatabaseWrapper) -> None:
    """Send SIGINT, as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def terminate_held(watcher: BaseDatabaseWrapper) -> None:
    """End the session that is stopped in its COMMIT, as an administrator can."""
    held = "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"
    rows(watcher, held)
