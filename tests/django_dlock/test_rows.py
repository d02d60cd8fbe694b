"""RowLockMixin, lock_row, lock_rows and select_for_share keep their promises."""

import asyncio
import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import django
import pytest
from asgiref.sync import sync_to_async
from django.core.files.base import ContentFile
from django.db import DatabaseError, InternalError, OperationalError, connections, models
from django.db.models import Count, Value, Window
from django.db.models.functions import RowNumber
from django.db.models.sql import Query
from django.db.transaction import TransactionManagementError, atomic, mark_for_rollback_on_error
from django.test.utils import CaptureQueriesContext

from django_dlock.errors import NotSupported, RowLocked
from django_dlock.querysets import RowLockQuerySet
from django_dlock.row_sql import _waiting_on_mysql, waiting
from django_dlock.rows import _copied, _is_changed
from dlock_core import errors as core
from dlock_core.transactions.retry import DatabaseFailure, classify
from tests.django_dlock.parties import until_blocked
from tests.django_dlock.sessions import rows, second_session
from tests.mysql_server import MYSQLD, mariadb_only
from tests.testapp.models import Account, ColdStock, Counter, Delivery, Job, Scan, Stock, Team

with_row_locks = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
on_mariadb = pytest.mark.parametrize("database", ["mariadb"], indirect=True)
on_sqlite = pytest.mark.parametrize("database", ["default"], indirect=True)

UPDATE = "FOR UPDATE"
JOBS = {"table": "testapp_job", "key": "title"}
NO_KEY_UPDATE = "FOR NO KEY UPDATE"
SHARE = {"postgresql": "FOR SHARE", "mysql": "FOR SHARE" if MYSQLD else "LOCK IN SHARE MODE"}


KEY_SHARES = [
    lambda rows, pk: rows.select_for_share(key=True).get(pk=pk),
    lambda rows, pk: rows.lock_row(pk, shared=True, key=True),
    lambda rows, pk: rows.filter(pk=pk).lock_rows(shared=True, key=True),
    lambda rows, pk: rows.get(pk=pk).lock_row(shared=True, key=True),
]


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def stock(database: str) -> Stock:
    return Stock.objects.using(database).create(pieces=5)


def stocks(alias: str) -> Any:
    return Stock.objects.using(alias)


@contextmanager
def other_transaction(alias: str) -> Iterator[Any]:
    """A transaction of another session, which has done nothing yet; it is rolled back."""
    with second_session(alias) as other, atomic_on(other):
        yield other


@contextmanager
def atomic_on(connection: Any) -> Iterator[None]:
    connection.set_autocommit(False)
    try:
        yield
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def lock_there(other: Any, pk: int, clause: str = UPDATE, table: str = "testapp_stock", key: str = "id") -> None:
    rows(other, f"SELECT 1 FROM {table} WHERE {key} = %s {clause}", pk)


def is_free(alias: str, pk: int, clause: str = UPDATE, **where: str) -> bool:
    """Return whether another session could take this lock now."""
    with other_transaction(alias) as other:
        try:
            lock_there(other, pk, f"{clause} NOWAIT", **where)
        except DatabaseError as error:
            if classify(error) is DatabaseFailure.LOCK_TIMEOUT:
                return False
            raise
        return True


def share(alias: str) -> str:
    return SHARE[connections[alias].vendor]


@pytest.fixture
def sql(database: str) -> Iterator[Callable[[], list[str]]]:
    with CaptureQueriesContext(connections[database]) as context:
        yield lambda: [query["sql"] for query in context.captured_queries]


# what a lock does


@with_row_locks
def test_row_is_locked_until_the_end_of_the_transaction(stock, database):
    with atomic(database):
        with atomic(database):
            assert stocks(database).lock_row(stock.pk) == stock
        assert not is_free(database, stock.pk)
    assert is_free(database, stock.pk)


@with_row_locks
def test_waiter_reads_the_row_as_the_first_has_left_it(stock, database):
    found = []

    def second() -> None:
        with Stock.locked_row(stock.pk, using=database) as row:
            found.append(row.pieces)
        connections[database].close()

    waiter = threading.Thread(target=second)
    with Stock.locked_row(stock.pk, using=database) as row:
        waiter.start()
        until_blocked(database)
        row.pieces = 4
        row.save()
        assert found == []
    waiter.join(30)
    assert found == [4]


@with_row_locks
def test_shared_lock_lets_others_share_and_not_write(stock, database):
    with atomic(database):
        assert stocks(database).lock_row(stock.pk, shared=True) == stock
        assert is_free(database, stock.pk, share(database))
        assert not is_free(database, stock.pk)
    assert is_free(database, stock.pk)


@with_row_locks
def test_shared_lock_and_our_exclusive_one_exclude_each_other(stock, database):
    with other_transaction(database) as other:
        lock_there(other, stock.pk, share(database))
        with atomic(database):
            assert stocks(database).lock_row(stock.pk, shared=True, nowait=True) == stock
        with pytest.raises(RowLocked), atomic(database):
            stocks(database).lock_row(stock.pk, nowait=True)


@on_postgresql
def test_rows_that_refer_to_a_locked_row_can_be_inserted_unless_asked_otherwise(stock, database):
    for no_key in (True, False):
        with atomic(database), other_transaction(database) as other:
            stocks(database).lock_row(stock.pk, no_key=no_key)
            rows(other, "SET LOCAL lock_timeout = 50")
            rows(other, "SET CONSTRAINTS ALL IMMEDIATE")
            insert = "INSERT INTO testapp_delivery (stock_id) VALUES (%s)"
            if no_key:
                rows(other, insert, stock.pk)
            else:
                with pytest.raises(OperationalError):
                    rows(other, insert, stock.pk)
    assert not Delivery.objects.using(database).exists()


@on_postgresql
@pytest.mark.parametrize("how", KEY_SHARES)
def test_share_of_the_key_lets_others_update_and_not_delete(stock, database, how):
    with atomic(database):
        how(stocks(database), stock.pk)
        assert is_free(database, stock.pk, NO_KEY_UPDATE)
        assert not is_free(database, stock.pk, UPDATE)


@on_mariadb
@pytest.mark.parametrize("how", KEY_SHARES)
def test_share_of_the_key_is_a_plain_share_where_there_is_none(stock, database, how):
    with atomic(database):
        how(stocks(database), stock.pk)
        assert is_free(database, stock.pk, share(database))
        assert not is_free(database, stock.pk, UPDATE)


def test_key_of_an_exclusive_lock_is_refused(stock, database):
    with atomic(database), pytest.raises(ValueError, match="shared=True"):
        stocks(database).lock_row(stock.pk, key=True)


def test_row_that_is_not_there_does_not_exist(database):
    with atomic(database):
        with pytest.raises(Stock.DoesNotExist, match=r"Stock\(7\) does not exist"):
            stocks(database).lock_row(7)
        assert stocks(database).lock_row(7, skip_locked=True) is None


# how long to wait


@with_row_locks
@pytest.mark.parametrize("how", [{"nowait": True}, {"wait": 0}, {"wait": timedelta(0)}], ids=str)
def test_locked_row_is_refused_at_once(stock, database, how):
    with other_transaction(database) as other:
        lock_there(other, stock.pk)
        with pytest.raises(RowLocked) as caught, atomic(database):
            stocks(database).lock_row(stock.pk, **how)
    assert caught.value.name == f"Stock({stock.pk})"
    assert isinstance(caught.value, core.RowLocked)
    assert isinstance(caught.value, DatabaseError)
    assert isinstance(caught.value.__cause__, OperationalError)


@on_postgresql
def test_row_that_is_free_is_not_told_as_locked_while_the_error_of_another_is_handled(stock, database):
    free = Stock.objects.using(database).create(pieces=1)
    with other_transaction(database) as other, pytest.raises(InternalError), atomic(database):
        lock_there(other, stock.pk)
        try:
            stocks(database).lock_row(stock.pk, nowait=True)
        except RowLocked:
            stocks(database).lock_row(free.pk)


@with_row_locks
def test_row_that_is_free_is_not_told_as_locked_in_a_transaction_that_django_has_given_up(stock, database):
    """An update() whose error is swallowed leaves such a transaction."""
    free = Stock.objects.using(database).create(pieces=1)
    with other_transaction(database) as other, pytest.raises(TransactionManagementError), atomic(database):
        lock_there(other, stock.pk)
        with suppress(RowLocked), mark_for_rollback_on_error(database):
            stocks(database).lock_row(stock.pk, nowait=True)
        stocks(database).lock_row(free.pk)


@with_row_locks
def test_wait_runs_out_and_says_how_long_it_was(stock, database):
    wait = 0.05 if connections[database].vendor == "postgresql" else 1
    with other_transaction(database) as other:
        lock_there(other, stock.pk)
        for how in ({}, {"shared": True}):
            with pytest.raises(RowLocked) as caught, atomic(database):
                stocks(database).lock_row(stock.pk, wait=timedelta(seconds=wait), **how)
            assert caught.value.waited >= wait * 0.9


@with_row_locks
def test_row_that_is_free_is_locked_with_a_wait_too(stock, database):
    with atomic(database):
        assert stocks(database).lock_row(stock.pk, wait=2, shared=True) == stock
        assert not is_free(database, stock.pk)


@mariadb_only
@on_mariadb
@pytest.mark.parametrize(
    ("wait", "clause"), [(0.001, "WAIT 1"), (1, "WAIT 1"), (1.5, "WAIT 2"), (1e300, "WAIT 100000000")]
)
def test_mariadb_waits_whole_seconds_rounded_up(stock, database, sql, wait, clause):
    with atomic(database):
        stocks(database).lock_row(stock.pk, wait=wait)
        stocks(database).lock_rows(wait=wait, shared=True)
    assert [text.endswith(clause) for text in sql() if text.startswith("SELECT")] == [True, True]


@on_postgresql
@pytest.mark.parametrize("wait", [0.0001, 1e300])
def test_postgresql_takes_the_shortest_and_the_longest_wait_it_can(stock, database, wait):
    with atomic(database):
        assert stocks(database).lock_row(stock.pk, wait=wait) == stock


def lock_timeout(alias: str) -> str:
    ((value,),) = rows(connections[alias], "SHOW lock_timeout")
    return value


@on_postgresql
def test_wait_is_two_statements_and_does_not_strengthen_the_lock(stock, database, sql):
    with atomic(database):
        sent = len(sql())
        stocks(database).lock_row(stock.pk, wait=2)
        assert [text.split()[0] for text in sql()[sent:]] == ["SELECT", "SELECT"]
        assert sql()[sent].endswith('FOR NO KEY UPDATE OF "testapp_stock"')


@on_postgresql
def test_limit_is_left_alone_when_there_is_nothing_to_look_for(stock, database):
    with atomic(database):
        stocks(database).lock_row(stock.pk, wait=1)
        rows(connections[database], "SET LOCAL lock_timeout = '7s'")
        assert stocks(database).filter(pk__in=[]).lock_rows(wait=1) == []
        assert lock_timeout(database) == "7s"


@with_row_locks
def test_wait_limits_each_statement_of_a_block(stock, database):
    with other_transaction(database) as other:
        lock_there(other, stock.pk)
        with pytest.raises(OperationalError) as caught, atomic(database), waiting(connections[database], 0.1):
            stocks(database).update(pieces=1)
    assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT


@on_postgresql
def test_former_limit_is_back_after_the_lock(stock, database):
    with atomic(database):
        rows(connections[database], "SET LOCAL lock_timeout = '7s'")
        stocks(database).lock_row(stock.pk, wait=1)
        assert lock_timeout(database) == "7s"
        with pytest.raises(Stock.DoesNotExist):
            Stock(pk=0).refresh_from_db(using=database, from_queryset=stocks(database))
        with pytest.raises(Stock.DoesNotExist):
            stocks(database).lock_row(0, wait=1)
        assert lock_timeout(database) == "7s"


@on_postgresql
def test_former_limit_is_back_when_the_instance_s_row_is_gone(stock, database):
    stocks(database).all().delete()
    with atomic(database):
        rows(connections[database], "SET LOCAL lock_timeout = '7s'")
        with pytest.raises(Stock.DoesNotExist):
            stock.lock_row(wait=1)
        assert lock_timeout(database) == "7s"


@on_postgresql
def test_former_limit_is_back_after_the_wait_ran_out_in_a_savepoint(stock, database):
    with other_transaction(database) as other, atomic(database):
        lock_there(other, stock.pk)
        with pytest.raises(RowLocked), atomic(database):
            stocks(database).lock_row(stock.pk, wait=0.01)
        assert lock_timeout(database) == "0"
        assert stocks(database).filter(pk=stock.pk).exists()


@on_mariadb
def test_transaction_stays_usable_after_the_wait_ran_out_on_mariadb(stock, database):
    with other_transaction(database) as other, atomic(database):
        lock_there(other, stock.pk)
        with pytest.raises(RowLocked):
            stocks(database).lock_row(stock.pk, nowait=True)
        Counter.objects.using(database).create(name="after")
    assert Counter.objects.using(database).exists()


@on_mariadb
def test_limit_of_a_mysql_without_wait_clause_is_the_session_s_and_is_given_back(stock, database):
    def limit() -> int:
        ((seconds,),) = rows(connections[database], "SELECT @@innodb_lock_wait_timeout")
        return seconds

    former = limit()
    with atomic(database), _waiting_on_mysql(connections[database], 2.5):
        assert limit() == 3
    assert limit() == former
    with other_transaction(database) as other, atomic(database):
        lock_there(other, stock.pk)
        with pytest.raises(OperationalError), _waiting_on_mysql(connections[database], 1):
            lock_there(connections[database], stock.pk)
        assert limit() == former


def test_database_that_cannot_limit_a_wait_says_so():
    class Features:
        has_select_for_update = True

    class Oracle:
        vendor, display_name, features = "oracle", "Oracle", Features

    with pytest.raises(NotSupported, match="Oracle"):
        waiting(Oracle, 1.0)


@pytest.mark.parametrize("wait", [-1, -0.001, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_wait_that_makes_no_sense_is_refused_before_any_io(wait):
    with pytest.raises(ValueError, match="wait must be"):
        Stock.objects.lock_row(1, wait=wait)


@pytest.mark.parametrize("wait", [True, "1", b"1", [1]])
def test_wait_that_is_no_time_is_refused_before_any_io(wait):
    with pytest.raises(TypeError, match="wait is seconds"):
        Stock.objects.lock_rows(wait=wait)


@pytest.mark.parametrize(
    "how",
    [
        {"nowait": True, "skip_locked": True},
        {"nowait": True, "wait": 1},
        {"skip_locked": True, "wait": 1},
        {"nowait": True, "wait": 0},
    ],
    ids=str,
)
def test_contradicting_answers_to_a_locked_row_are_refused_before_any_io(how):
    with pytest.raises(ValueError, match="give only one"):
        Stock.objects.lock_row(1, **how)


def test_unknown_option_is_refused_before_any_io():
    with pytest.raises(TypeError, match="no_wait"), Stock.locked_row(1, no_wait=True):
        pass


def test_locked_row_of_an_instance_or_a_block_cannot_be_skipped(stock, database, sql):
    with pytest.raises(TypeError, match=r"Stock\.objects\.lock_row\(pk, skip_locked=True\)"):
        stock.lock_row(skip_locked=True)
    with pytest.raises(TypeError, match="returns None"), Stock.locked_row(stock.pk, using=database, skip_locked=True):
        pass
    with pytest.raises(TypeError, match="returns None"):
        asyncio.run(Stock.alocked_row(stock.pk, str, using=database, skip_locked=True))
    assert not sql()


# many rows


@with_row_locks
@pytest.mark.parametrize("how", [{}, {"shared": True}], ids=str)
def test_locked_rows_are_skipped(database, how):
    first, second = stocks(database).create(pieces=1), stocks(database).create(pieces=2)
    with other_transaction(database) as other, atomic(database):
        lock_there(other, first.pk)
        assert stocks(database).lock_row(first.pk, skip_locked=True, **how) is None
        assert stocks(database).lock_row(second.pk, skip_locked=True, **how) == second
        assert stocks(database).lock_rows(skip_locked=True, **how) == [second]


@with_row_locks
def test_next_jobs_that_nobody_has_are_taken_in_their_own_order(database):
    made = [stocks(database).create(pieces=pieces) for pieces in (3, 2, 1)]
    with other_transaction(database) as other, atomic(database):
        lock_there(other, made[2].pk)
        taken = stocks(database).order_by("pieces")[:2].lock_rows(skip_locked=True)
    expected = made[1], made[0]
    assert taken == list(expected)[: len(taken)]  # MariaDB counts skipped rows towards LIMIT
    assert taken[:1] == [made[1]]


def test_rows_are_locked_in_the_order_of_their_keys(database, sql):
    made = [stocks(database).create(pieces=pieces) for pieces in (3, 2, 1)]
    with atomic(database):
        assert stocks(database).order_by("pieces").lock_rows() == made
    assert "ORDER BY" in sql()[-2]
    assert "pieces" not in sql()[-2].partition("ORDER BY")[2]
    with atomic(database):
        assert stocks(database).order_by("pieces").reverse().lock_rows() == made
    assert "DESC" not in sql()[-2]


def test_slice_has_its_own_order_and_is_refused(database):
    with atomic(database), pytest.raises(NotSupported, match=r"add skip_locked=True, or lock the rows whose keys"):
        stocks(database).order_by("pieces")[:1].lock_rows()


@with_row_locks
def test_timeout_of_many_rows_names_their_model(stock, database):
    with other_transaction(database) as other:
        lock_there(other, stock.pk)
        with pytest.raises(RowLocked, match="'Stock'"), atomic(database):
            stocks(database).lock_rows(nowait=True)


# where it would protect nothing


@pytest.mark.parametrize("how", [{}, {"shared": True}, {"wait": 1}, {"skip_locked": True}], ids=str)
def test_outside_a_transaction_it_is_refused(stock, database, sql, how):
    sent = len(sql())
    with pytest.raises(TransactionManagementError, match=r"inside transaction.atomic\(\)"):
        stocks(database).lock_row(stock.pk, **how)
    with pytest.raises(TransactionManagementError):
        stocks(database).lock_rows(**how)
    assert len(sql()) == sent


def test_share_outside_a_transaction_is_refused(stock, database):
    with pytest.raises(TransactionManagementError):
        stocks(database).select_for_share().get()


@with_row_locks
def test_autocommit_turned_off_by_hand_is_a_transaction(stock, database):
    connection = connections[database]
    with atomic_on(connection):
        stocks(database).lock_row(stock.pk)
        assert not is_free(database, stock.pk)


@on_sqlite
@pytest.mark.parametrize("mode", [None, "DEFERRED"])
def test_deferred_transaction_of_sqlite_is_refused(stock, database, monkeypatch, mode):
    monkeypatch.setattr(connections[database], "transaction_mode", mode)
    with atomic(database):
        for lock in (
            lambda: stocks(database).lock_row(stock.pk),
            lambda: stocks(database).lock_rows(),
            lambda: stocks(database).select_for_share().get(),
            stock.lock_row,
        ):
            with pytest.raises(NotSupported, match="'transaction_mode'"):
                lock()


@on_sqlite
def test_transaction_of_sqlite_begun_by_hand_is_refused(stock, database):
    with atomic_on(connections[database]), pytest.raises(NotSupported):
        stocks(database).lock_row(stock.pk)


@on_sqlite
@pytest.mark.parametrize("mode", ["IMMEDIATE", "EXCLUSIVE"])
@pytest.mark.parametrize("how", [{}, {"shared": True}, {"wait": 1}, {"nowait": True}, {"skip_locked": True}], ids=str)
def test_immediate_transaction_of_sqlite_has_locked_the_database(stock, database, monkeypatch, mode, how):
    monkeypatch.setattr(connections[database], "transaction_mode", mode)
    with second_session(database) as other:
        rows(other, "PRAGMA busy_timeout = 0")
        with atomic(database):
            assert stocks(database).lock_row(stock.pk, **how) == stock
            with pytest.raises(OperationalError) as caught:
                rows(other, "UPDATE testapp_stock SET pieces = 1")
    assert classify(caught.value) is DatabaseFailure.LOCK_TIMEOUT


# joins, inheritance, other ways to read


@with_row_locks
def test_nullable_relation_may_be_selected_along(stock, database):
    with atomic(database):
        assert stocks(database).select_related("counter").lock_row(stock.pk) == stock
        assert stocks(database).select_related("counter").lock_row(stock.pk, shared=True) == stock


@with_row_locks
@pytest.mark.parametrize("has_team", [True, False])
def test_order_over_another_table_locks_nothing_there(database, sql, has_team):
    """The default order of the model follows a foreign key that may be NULL."""
    team = Team.objects.using(database).create(name="a")
    job = Job.objects.using(database).create(title="a", team=team if has_team else None)
    for lock in (
        lambda: Job.objects.using(database).lock_row(job.pk),
        lambda: Job.objects.using(database).lock_row(job.pk, shared=True),
        lambda: Job.objects.using(database).lock_rows(),
        job.lock_row,
    ):
        with atomic(database):
            lock()
            assert "JOIN" not in sql()[-1]
            assert not is_free(database, job.title, **JOBS)
            assert is_free(database, team.pk, table="testapp_team")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_rows_in_an_order_over_another_table_are_locked_alone(database):
    team = Team.objects.using(database).create(name="a")
    jobs = [Job.objects.using(database).create(title=title, team=team) for title in "ab"]
    for lock in (
        lambda: Job.objects.using(database).lock_rows(skip_locked=True),
        lambda: list(Job.objects.using(database).select_for_share()),
        lambda: list(Job.objects.using(database).select_related("team").select_for_share()),
    ):
        with atomic(database):
            assert set(lock()) == set(jobs)
            assert not is_free(database, jobs[1].title, **JOBS)
            assert is_free(database, team.pk, table="testapp_team")


@on_postgresql
@pytest.mark.parametrize("many", [lambda rows: rows.annotate(n=Count("delivery")), lambda rows: rows.distinct()])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_groups_that_the_database_cannot_lock_are_refused_before_any_io(database, stock, sql, many, shared):
    rows = many(stocks(database))
    with atomic(database):
        before = len(sql())
        for lock in (rows.lock_rows, partial(rows.lock_row, stock.pk)):
            with pytest.raises(NotSupported, match=r"Stock\.lock_row\(\) of an instance"):
                lock(shared=shared)
        with pytest.raises(NotSupported, match=r"Stock\.lock_row\(\) of an instance"):
            list(rows.select_for_share())
        assert len(sql()) == before
        stock.lock_row(shared=shared)


@on_postgresql
@pytest.mark.parametrize("shared", [False, True])
def test_joined_rows_are_not_locked(database, shared):
    counter = Counter.objects.using(database).create(name="a")
    stock = stocks(database).create(counter=counter)
    with atomic(database):
        assert stocks(database).filter(counter__name="a").lock_rows(shared=shared) == [stock]
        assert is_free(database, counter.pk, table="testapp_counter")
        assert not is_free(database, stock.pk)


@with_row_locks
@pytest.mark.parametrize("shared", [False, True])
def test_both_tables_of_an_inherited_model_are_locked(database, shared):
    stock = ColdStock.objects.using(database).create(pieces=1, degrees=4)
    with atomic(database):
        ColdStock.objects.using(database).lock_row(stock.pk, shared=shared)
        assert not is_free(database, stock.pk)
        assert not is_free(database, stock.pk, table="testapp_coldstock", key="stock_ptr_id")


KINDS = {
    "values": (lambda rows: rows.values("pieces"), {"pieces": 5}),
    "tuples": (lambda rows: rows.values_list("pieces", "degrees_below"), (5, 0)),
    "flat": (lambda rows: rows.values_list("pieces", flat=True), 5),
    "named": (lambda rows: rows.values_list("pieces", named=True), (5,)),
}
LOCKED = [
    lambda rows: list(rows.select_for_share()),
    lambda rows: list(rows.select_for_share().select_for_update()),
    lambda rows: list(rows.select_for_share().all()),
    lambda rows: rows.lock_rows(),
    lambda rows: rows.lock_rows(shared=True),
    lambda rows: rows.lock_rows(wait=1),
]


@with_row_locks
@pytest.mark.parametrize("lock", LOCKED)
@pytest.mark.parametrize("kind", KINDS)
def test_locked_rows_are_of_the_kind_that_the_queryset_gives(database, stock, kind, lock):
    values, expected = KINDS[kind]
    rows = values(stocks(database).annotate(degrees_below=Value(0)))
    with atomic(database):
        found = lock(rows)
        assert found == [expected]
        assert type(found[0]).__name__ == ("Row" if kind == "named" else type(expected).__name__)
        assert rows.lock_row(stock.pk, wait=1) == expected
        assert list(stocks(database).select_for_share().values_list("pieces", flat=True).select_for_update()) == [5]


@with_row_locks
def test_shared_queryset_can_be_read_in_every_way(stock, database):
    shared = stocks(database).select_for_share()
    ways: list[Callable[[], object]] = [
        lambda: shared.get(pk=stock.pk),
        lambda: list(shared.filter(pieces=5)),
        lambda: list(shared.order_by("pk")[:1]),
        lambda: list(shared.values("pieces")),
        lambda: list(shared.iterator()),
        shared.first,
        lambda: stock.refresh_from_db(from_queryset=shared),
        lambda: list(stocks(database).filter(pk__in=[stock.pk]).select_for_share(nowait=True)),
    ]
    for way in ways:
        with atomic(database):
            way()
            assert is_free(database, stock.pk, share(database))
            assert not is_free(database, stock.pk)


@with_row_locks
def test_shared_query_pickles(stock, database):
    shared = stocks(database).select_for_share()
    again = stocks(database).all()
    again.query = pickle.loads(pickle.dumps(shared.query))
    with atomic(database):
        assert again.get() == stock
        assert not is_free(database, stock.pk)
        assert is_free(database, stock.pk, share(database))


@on_postgresql
def test_last_clause_is_the_query_s_own_and_not_a_subquery_s(stock, database, sql):
    inner = stocks(database).select_for_update(nowait=True).filter(pieces=5)
    with atomic(database):
        assert list(stocks(database).select_for_share(nowait=True).filter(pk__in=inner)) == [stock]
    assert sql()[-2].endswith('FOR SHARE OF "testapp_stock" NOWAIT')
    assert sql()[-2].count("FOR UPDATE NOWAIT") == 1


@pytest.mark.parametrize("combinator", ["union", "intersection", "difference"])
def test_combined_queryset_whose_rows_no_database_locks_is_refused_before_any_io(combinator):
    combined = getattr(Stock.objects.filter(pieces=5), combinator)(Stock.objects.filter(counter=None))
    locks: list[Callable[[], object]] = [
        combined.lock_rows,
        lambda: combined.lock_rows(shared=True),
        lambda: combined.lock_rows(wait=1),
        lambda: combined.lock_rows(skip_locked=True),
        combined.select_for_share,
        combined.select_for_update,
    ]
    for lock in locks:
        with pytest.raises(NotSupported, match=rf"^{combinator}\(\) gives rows .*Q\("):
            lock()


@pytest.mark.parametrize("combinator", ["union", "intersection", "difference"])
def test_combination_of_a_queryset_that_locks_is_refused_before_any_io(combinator):
    rows = Stock.objects.filter(pieces=5)
    for first, second in (
        (rows.select_for_update(), rows),
        (rows, rows.select_for_update()),
        (rows, rows.select_for_share()),
        (rows.select_for_share(), rows.select_for_share()),
    ):
        with pytest.raises(NotSupported, match=rf"^{combinator}\(\) gives rows .*Q\("):
            getattr(first, combinator)(second)


def test_union_that_would_lose_the_lock_of_an_empty_queryset_is_refused_before_any_io():
    rows = Stock.objects.filter(pieces=5)
    with pytest.raises(NotSupported, match="after the combination"):
        rows.none().select_for_update().union(rows)


@with_row_locks
def test_combination_of_one_queryset_keeps_its_lock(stock, database):
    rows = stocks(database)
    with atomic(database):
        assert list(rows.none().union(rows.select_for_share())) == [stock]
        assert not is_free(database, stock.pk)
    assert not list(rows.select_for_update().intersection(rows.none()))


@with_row_locks
@pytest.mark.parametrize("combine", [operator.or_, operator.xor, RowLockQuerySet.union, RowLockQuerySet.difference])
def test_empty_queryset_that_is_added_takes_no_lock_away_and_adds_none(stock, database, combine):
    rows = stocks(database)
    with atomic(database):
        assert list(combine(rows.all(), rows.none().select_for_update())) == [stock]
        assert is_free(database, stock.pk)
        assert list(combine(rows.select_for_share(), rows.none())) == [stock]
        assert not is_free(database, stock.pk)
        assert is_free(database, stock.pk, share(database))


@pytest.mark.parametrize("combine", [operator.and_, operator.or_, operator.xor])
def test_operator_that_would_lose_the_lock_of_a_queryset_is_refused_before_any_io(combine):
    rows = Stock.objects.filter(pieces=5)
    lost: list[tuple[Any, Any]] = [
        (rows, rows.select_for_share()),
        (rows, rows.select_for_update()),
        (rows.select_for_share(), rows.select_for_update()),
        (rows.select_for_share(key=True), rows.select_for_share()),
        (rows.select_for_update(of=("self",)), rows.select_for_update(of=("counter",))),
    ]
    for first, second in lost:
        with pytest.raises(NotSupported, match=r"^Django keeps .* after the combination"):
            combine(first, second)


@pytest.mark.parametrize("combine", [operator.or_, operator.xor])
def test_lock_of_a_sliced_or_empty_queryset_is_not_lost_to_an_operator(combine):
    rows = Stock.objects.filter(pieces=5)
    for first, second in (
        (rows.select_for_update()[:2], rows),
        (rows.none().select_for_update(), rows),
        (rows, rows.select_for_share()[:2]),
    ):
        with pytest.raises(NotSupported, match="after the combination"):
            combine(first, second)


@with_row_locks
def test_operator_keeps_the_lock_of_its_first_queryset(stock, database):
    rows = stocks(database)
    for combined in (
        rows.filter(pieces=5).select_for_update() | rows.filter(pieces=6),
        rows.select_for_share(nowait=True) & rows.filter(pieces=5).select_for_share(nowait=True),
        (rows.filter(pieces=5) ^ rows.filter(pieces=6)).select_for_update(),
        rows.none() | rows.select_for_update(),
    ):
        with atomic(database):
            assert list(combined) == [stock]
            assert not is_free(database, stock.pk)
    assert not list(rows.none() & rows.select_for_update())


@with_row_locks
def test_share_that_a_window_query_would_lose_is_refused_before_any_io(stock, database, sql):
    first = Window(RowNumber(), partition_by="counter", order_by="pk")
    windowed = stocks(database).annotate(row=first).filter(row=1)
    for lock in (lambda: list(windowed.select_for_share()), lambda: windowed.lock_rows(shared=True)):
        with atomic(database), pytest.raises(NotSupported, match="window"):
            lock()
    assert not any("testapp_stock" in each for each in sql()[1:])


@with_row_locks
def test_counts_and_updates_of_a_shared_queryset_are_as_ever(stock, database):
    shared = stocks(database).select_for_share()
    with atomic(database):
        assert shared.count() == 1
        assert shared.update(pieces=6) == 1


@with_row_locks
def test_stronger_lock_replaces_a_shared_one(stock, database):
    with atomic(database):
        stocks(database).select_for_share().select_for_update().get()
        assert not is_free(database, stock.pk, share(database))


def test_query_of_an_unknown_kind_is_refused():
    class Unusual(Query):
        pass

    unusual = Stock.objects.all()
    unusual.query = unusual.query.chain(Unusual)
    with pytest.raises(NotSupported, match="Unusual"):
        unusual.select_for_share()


# instances


def test_instance_is_refreshed_under_its_lock(stock, database):
    stocks(database).update(pieces=9)
    with atomic(database):
        stock.lock_row()
        assert stock.pieces == 9


@with_row_locks
def test_instance_locks_its_row_as_asked(stock, database):
    with atomic(database):
        stock.lock_row(shared=True)
        assert is_free(database, stock.pk, share(database))
        stock.lock_row(wait=1)
        assert not is_free(database, stock.pk, share(database))
    with other_transaction(database) as other:
        lock_there(other, stock.pk)
        with pytest.raises(RowLocked, match=rf"Stock\({stock.pk}\)"), atomic(database):
            stock.lock_row(nowait=True)


def test_instance_with_unsaved_changes_is_refused_and_keeps_them(stock, database):
    stock.pieces = 1
    stock.counter = Counter.objects.using(database).create(name="a")
    with atomic(database), pytest.raises(ValueError, match="not saved, in pieces, counter"):
        stock.lock_row()
    assert stock.pieces == 1


def test_instance_may_be_locked_after_its_changes_are_saved_or_dropped(stock, database):
    with atomic(database):
        stock.pieces = 1
        stock.save()
        stock.lock_row()
        stock.pieces = 2
        stock.save(update_fields=["pieces"])
        stock.lock_row()
        stock.pieces = 3
        stock.refresh_from_db(fields=["pieces"])
        stock.lock_row()
    assert stock.pieces == 2


def test_refresh_of_some_fields_leaves_the_others_unsaved(stock, database):
    stock.pieces = 1
    for some in ({"from_queryset": stocks(database).defer("pieces")}, {"fields": ["deliveries"]}, {"fields": []}):
        stock._prefetched_objects_cache = {"deliveries": []}
        stock.refresh_from_db(**some)
        with atomic(database), pytest.raises(ValueError, match="in pieces"):
            stock.lock_row()


def test_saving_one_field_leaves_the_others_unsaved(stock, database):
    stock.pieces, stock.counter_id = 1, 4711
    stock.save(update_fields=["pieces"])
    with atomic(database), pytest.raises(ValueError, match="in counter:"):
        stock.lock_row()


def test_change_whose_save_was_rolled_back_is_unsaved(stock, database):
    with pytest.raises(Sorry), atomic(database):
        stock.pieces = 1
        stock.save()
        raise Sorry
    with atomic(database), pytest.raises(ValueError, match="in pieces"):
        stock.lock_row()


def test_version_that_counts_is_no_unsaved_change(database):
    account = Account.objects.using(database).create(balance=1)
    first = account.version
    with pytest.raises(Sorry), atomic(database):
        account.save_with_version()
        raise Sorry
    Account.objects.using(database).bulk_update([account], ["balance"])
    with atomic(database):
        account.lock_row()
        account.save_with_version()
    assert account.version == first + 2


class Vector:
    """A value like numpy's arrays: a comparison gives one truth value for each element, and none for the whole."""

    def __init__(self, *elements):
        self.elements = elements

    def __len__(self):
        return len(self.elements)

    def __bool__(self):
        if len(self) != 1:
            raise ValueError("the truth value of an array is ambiguous")
        return bool(self.elements[0])

    def __eq__(self, other):
        return Vector(*map(operator.eq, self.elements, other.elements))

    def __ne__(self, other):
        return Vector(*map(operator.ne, self.elements, other.elements))

    __hash__ = None


class Unequal:
    """A value that equals nothing, and cannot be pickled."""

    __hash__ = None

    def __eq__(self, other):
        return False

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle")


@pytest.mark.parametrize(
    "value", [float("nan"), Decimal("NaN"), Vector(1.5, 2.5), Vector(float("nan")), Vector(), {"a": [None]}]
)
def test_value_that_is_the_same_as_before_is_no_unsaved_change_however_it_compares(value):
    assert not _is_changed(value, value)
    assert not _is_changed(value, _copied(value))
    assert not _is_changed(value, pickle.loads(pickle.dumps(value)))


def test_value_that_nothing_tells_about_is_unchanged_if_it_is_the_same_object():
    value = Unequal()
    assert not _is_changed(value, _copied(value))
    assert _is_changed(value, Unequal())


@pytest.mark.parametrize(
    ("value", "saved"),
    [
        (float("nan"), 1.0),
        (Vector(1.5, 2.5), Vector(1.5, 3.5)),
        (Vector(1.5), Vector(2.5)),
        (Vector(), Vector(1.5)),
        (Vector(1.5, 1.5), Vector(1.5)),
        (Vector(1.5), None),
    ],
)
def test_value_that_differs_is_an_unsaved_change_however_it_compares(value, saved):
    assert _is_changed(value, saved)


@on_postgresql
def test_row_with_a_number_that_equals_nothing_can_be_locked(database):
    scan = Scan.objects.using(database).create()
    vars(scan)["pages"] = vars(scan)["_dlock_saved"]["pages"] = float("nan")
    with atomic(database):
        scan.lock_row()
    assert scan.pages == 0


def test_value_that_was_changed_in_place_is_an_unsaved_change(database):
    for make in (lambda rows: rows.create(data={"list": [1]}), lambda rows: rows.get()):
        job = make(Job.objects.using(database))
        job.data["list"].append(2)
        with atomic(database), pytest.raises(ValueError, match="not saved, in data"):
            job.lock_row()
        job.save()
        job.data["list"].append(3)
        with atomic(database), pytest.raises(ValueError, match="not saved, in data"):
            job.lock_row()
        job.refresh_from_db()
        with atomic(database):
            job.lock_row()


def assign_a_file_of_the_same_name(scan: Scan) -> None:
    scan.paper = ContentFile(b"2", name=scan.paper.name)
    assert scan.paper.name


@pytest.mark.parametrize(
    "change",
    [
        lambda scan: scan.raw.extend(b"2"),
        lambda scan: scan.paper.save("b.txt", ContentFile(b"2"), save=False),
        lambda scan: scan.paper.delete(save=False),
        assign_a_file_of_the_same_name,
    ],
)
def test_file_or_buffer_that_was_changed_in_place_is_an_unsaved_change(database, change):
    scan = Scan.objects.using(database).create(paper=ContentFile(b"1", name="a.txt"), raw=bytearray(b"1"))
    with atomic(database):
        scan.save()
        change(scan)
        with pytest.raises(ValueError, match=r"not saved, in (raw|paper):"):
            scan.lock_row()
        scan.save()
        scan.lock_row()


def test_value_that_the_database_computes_is_no_unsaved_change(database):
    scan = Scan.objects.using(database).create()
    scan.pages = 4
    scan.save(update_fields=["pages"])
    with atomic(database):
        scan.lock_row()
    assert scan.sheets == 2


def test_deferred_field_is_no_change_until_it_is_set(stock, database):
    part = stocks(database).only("pk").get()
    with atomic(database):
        part.lock_row()
        assert "pieces" not in vars(part)
        part.pieces = 1
        with pytest.raises(ValueError, match="in pieces"):
            part.lock_row()


@pytest.mark.skipif(django.VERSION < (6, 1), reason="Django 6.1 added fetch modes")
def test_field_that_was_read_along_with_that_of_another_instance_is_no_change(database):
    counters = [Counter.objects.using(database).create(name=name) for name in "ab"]
    for counter in counters:
        stocks(database).create(counter=counter)
    parts = stocks(database).fetch_mode(models.FETCH_PEERS).defer("pieces").order_by("pk")
    first, second = parts
    second.counter_id = counters[0].pk
    assert (first.pieces, first.counter.name) == (0, "a")
    assert pickle.loads(pickle.dumps(first)).pieces == 0
    with atomic(database):
        first.lock_row()
        with pytest.raises(ValueError, match="in counter:"):
            second.lock_row()
        second.counter_id = counters[1].pk
        second.lock_row()
        second.pieces = 1
        with pytest.raises(ValueError, match="in pieces:"):
            second.lock_row()


def test_instance_that_was_never_read_or_saved_is_refused(database):
    (made,) = stocks(database).bulk_create([Stock(pk=1)])
    for instance in (Stock(), Stock(pk=1), made):
        with atomic(database), pytest.raises(ValueError, match="was not read or saved"):
            instance.lock_row(using=database)


def test_instance_whose_row_is_gone_does_not_exist(stock, database):
    stocks(database).all().delete()
    with atomic(database), pytest.raises(Stock.DoesNotExist):
        stock.lock_row()


# locked_row


def test_locked_row_gives_a_fresh_row_and_commits(stock, database):
    with Stock.locked_row(stock.pk, using=database) as row:
        assert connections[database].in_atomic_block
        row.pieces -= 1
        row.save()
    stock.refresh_from_db()
    assert stock.pieces == 4


def test_locked_row_rolls_back_on_an_exception(stock, database):
    with pytest.raises(Sorry), Stock.locked_row(stock.pk, using=database) as row:
        row.pieces = 0
        row.save()
        raise Sorry
    stock.refresh_from_db()
    assert stock.pieces == 5


@with_row_locks
def test_locked_row_inside_a_transaction_is_locked_to_its_end(stock, database):
    with atomic(database):
        with Stock.locked_row(stock.pk, using=database):
            pass
        assert not is_free(database, stock.pk)


async def test_work_under_a_lock_runs_in_one_thread_and_gives_its_result(use_database):
    await sync_to_async(use_database)("default")
    stock = await Stock.objects.acreate(pieces=5)

    def take(row: Stock) -> int:
        row.pieces -= 1
        row.save()
        return row.pieces

    assert await Stock.alocked_row(stock.pk, take) == 4
    await stock.arefresh_from_db()
    assert stock.pieces == 4


async def test_cancelled_work_still_runs_to_its_end_under_its_lock(use_database):
    await sync_to_async(use_database)("default")
    stock = await Stock.objects.acreate(pieces=5)
    begun, go_on = threading.Event(), threading.Event()

    def take(row: Stock) -> None:
        begun.set()
        go_on.wait(30)
        row.pieces -= 1
        row.save()

    task = asyncio.create_task(Stock.alocked_row(stock.pk, take))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stock.arefresh_from_db()
    assert stock.pieces == 4


# deadlocks


@with_row_locks
def test_deadlock_is_left_to_retry_and_not_called_a_locked_row(database):
    one, other = stocks(database).create(), stocks(database).create()
    both_hold = threading.Barrier(2)
    errors: list[BaseException] = []

    def cross(first: models.Model, second: models.Model) -> None:
        try:
            with atomic(database):
                stocks(database).lock_row(first.pk)
                both_hold.wait(30)
                stocks(database).lock_row(second.pk)
        except DatabaseError as error:
            errors.append(error)
        finally:
            connections[database].close()

    threads = [threading.Thread(target=cross, args=pair) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (victim,) = errors
    assert not isinstance(victim, RowLocked)
    assert classify(victim) is DatabaseFailure.DEADLOCK


class Uncopyable:
    def __init__(self, error):
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


def test_value_that_cannot_be_copied_stays_itself_but_an_interrupt_passes():
    value = Uncopyable(TypeError())
    assert _copied(value) is value
    with pytest.raises(Interrupted):
        _copied(Uncopyable(Interrupted()))


class Interrupted(Exception):
    """Raised by a signal handler, such as that of Celery's soft time limit."""
