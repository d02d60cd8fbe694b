"""`database://alias` in Django keeps leases next to the data: in transactions, test cases and settings."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test import TestCase, override_settings

from django_dlock import lock
from django_dlock.backends.connector import pool_of
from django_dlock.conf import InvalidStore, stores
from django_dlock.errors import AcquireTimeout
from dlock_core.backends.table.backend import TableBackend
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import connect
from tests.django_dlock.parties import Party
from tests.leases import is_held
from tests.testapp.models import Counter


@pytest.fixture
def table(database: str) -> Iterator[TableBackend]:
    """The store "default", in the database under test."""
    with override_settings(DLOCK={"default": {"BACKEND": f"database://{database}", "WAIT": 20}}):
        yield stores["default"].backend


def test_lock_is_released_after_the_commit_and_fences_it(
    table: TableBackend, database: str, party: Callable[[], Party]
) -> None:
    with transaction.atomic(using=database), lock("order", 42, using=database) as lease:
        Counter.objects.using(database).create()
        assert is_held(table)
        with pytest.raises(AcquireTimeout, match="held by"):
            party().now(lambda: lock("order", 42, using=database, wait=0).acquire())
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT token FROM dlock_fence WHERE name = %s", ["order:42"])
            assert cursor.fetchone() == (lease.token,)
    assert not is_held(table)
    with lock("order", 42, using=database) as later:
        assert later.token > lease.token


def test_second_thread_waits_for_the_commit_of_the_first(
    table: TableBackend, database: str, party: Callable[[], Party]
) -> None:
    second = party()
    with transaction.atomic(using=database), lock("order", 42, using=database) as lease:
        waiting = second.do(lambda: lock("order", 42, using=database, wait=60).acquire())
        Counter.objects.using(database).create()
    later = waiting.result(60)
    assert later.token > lease.token
    second.now(later.release)


def test_tokens_go_on_growing_when_the_table_was_emptied(table: TableBackend, database: str) -> None:
    """TransactionTestCase empties every table; a backup may be older than the fence."""

    def empty() -> None:
        run(table.pool.step(BLOCKING, "", lambda session: session.execute("DELETE FROM dlock_lease")))

    empty()  # of rows whose tokens other tests have raised above the clock
    with lock("order", 42, using=database) as before:
        pass
    sleep(0.001)  # the clock of SQLite counts milliseconds
    empty()
    with lock("order", 42, using=database) as after:
        assert after.token > before.token


def test_locks_work_inside_a_test_case(table: TableBackend, database: str) -> None:
    class Case(TestCase):
        databases = {database}

        def runTest(self) -> None:
            Counter.objects.using(database).create(name="before")
            with transaction.atomic(using=database), lock("order", 42, using=database):
                Counter.objects.using(database).create(name="under the lock")
                assert is_held(table)
            assert not is_held(table)

    result = Case().run()
    assert result is not None
    assert result.testsRun == 1
    assert [*result.failures, *result.errors] == []


def test_connections_are_made_to_the_database_that_an_alias_has_now(
    use_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test runner gives an alias the name of another database after the store was made."""
    use_database("default")
    pool = pool_of("default")
    with monkeypatch.context() as patch:
        patch.setitem(connections.settings["default"], "NAME", tmp_path / "test.sqlite3")
        run(pool.step(BLOCKING, "", lambda session: session.execute("SELECT 1")))
    pool.close()
    assert (tmp_path / "test.sqlite3-dlock").exists()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_connections_come_from_no_pool_of_django(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters for our locks may have used it up; here its package is not even installed."""
    pool = pool_of(database)
    ask = "SELECT pg_backend_pid()"
    with monkeypatch.context() as patch:
        patch.setitem(connections.settings[database]["OPTIONS"], "pool", {"min_size": 1, "max_size": 1})
        kept = [run(pool.dedicated(BLOCKING, "")) for _ in range(3)]
    assert len({run(one.step(BLOCKING, "", lambda session: session.execute(ask)[0][0])) for one in kept}) == 3
    for one in kept:
        run(one.close(BLOCKING))


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_steps_commit_by_themselves_whatever_the_settings_say(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, other = pool_of(database), pool_of(database)
    insert = "INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at) VALUES ('steps', 1, '', '', 0, 0)"
    with monkeypatch.context() as patch:
        patch.setitem(connections.settings[database], "AUTOCOMMIT", False)
        run(pool.step(BLOCKING, "", lambda session: session.execute(insert)))
    ask = "SELECT token FROM dlock_lease WHERE name = 'steps'"
    assert run(other.step(BLOCKING, "", lambda session: session.execute(ask))) == [(1,)]
    pool.close()
    other.close()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"BACKEND": "database://nowhere"}, "no alias 'nowhere', only: default"),
        ({"BACKEND": "database://"}, "no alias ''"),
        ({"BACKEND": "database://default", "OPTIONS": {"timeout": 0}}, "timeout must be in seconds"),
        ({"BACKEND": "database://default", "OPTIONS": {"prefix": "a"}}, "prefix"),
    ],
)
def test_wrong_setting_is_told_before_anything_is_sent(entry: dict[str, Any], told: str) -> None:
    with override_settings(DLOCK={"default": entry}), pytest.raises(InvalidStore, match=told):
        stores["default"]


@pytest.mark.parametrize("url", ["database://default", "advisory://default"])
def test_core_alone_says_who_can_reach_a_database(url: str) -> None:
    with pytest.raises(ValueError, match=r"setting DLOCK.*configure\(\).*\+postgresql\+psycopg://"):
        connect(url)


def test_migrations_are_complete(use_database: Callable[[str], str]) -> None:
    use_database("default")
    call_command("makemigrations", "django_dlock", check_changes=True, dry_run=True, verbosity=0)


def test_sqlite_has_no_table_for_leases_in_the_database(use_database: Callable[[str], str]) -> None:
    use_database("default")
    assert "dlock_lease" not in connections["default"].introspection.table_names()
