"""django_dlock.transactions keeps its promises about how a transaction ends whose database answers."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, OperationalError, ProgrammingError, connections, transaction
from django.db.transaction import TransactionManagementError, atomic
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from django_dlock.connections import in_transaction, on_rollback
from dlock_core.transactions.tie import Outcome
from tests.django_dlock.sessions import add, committed, rows, second_session
from tests.django_dlock.tracking import on_end, transaction_key
from tests.garbage import collect_garbage
from tests.testapp.models import Note

COMMITTED, ROLLED_BACK, UNKNOWN = Outcome.COMMITTED, Outcome.ROLLED_BACK, Outcome.UNKNOWN


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def heard() -> list[object]:
    """What the callbacks have recorded, in order."""
    return []


# How it ends


def test_settle_hears_committed_when_other_sessions_can_see_the_work(database, heard):
    with atomic(database):
        on_end(lambda outcome: heard.extend([outcome, committed(database)]), using=database)
        add(database, "a")
        assert heard == []
    assert heard == [COMMITTED, {"a"}]


def test_settle_hears_rolled_back_after_an_exception(database, heard):
    with pytest.raises(Sorry), atomic(database):
        on_end(lambda outcome: heard.extend([outcome, committed(database)]), using=database)
        add(database, "a")
        raise Sorry
    assert heard == [ROLLED_BACK, set()]


def test_settle_hears_rolled_back_after_set_rollback(database, heard):
    with atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
        transaction.set_rollback(True, using=database)
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


def test_settle_hears_rolled_back_when_a_generator_is_closed_inside(database, heard):
    def work():
        with atomic(database):
            on_end(heard.append, using=database)
            yield add(database, "a")

    generator = work()
    next(generator)
    generator.close()
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


def test_settle_hears_rolled_back_after_a_keyboard_interrupt_in_the_block(database, heard):
    with pytest.raises(KeyboardInterrupt), atomic(database):
        on_end(heard.append, using=database)
        add(database, "a")
        raise KeyboardInterrupt
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


def test_durable_block_settles_like_any_other(database, heard):
    with atomic(database, durable=True):
        on_end(heard.append, using=database)
    assert heard == [COMMITTED]


def test_nested_block_settles_with_the_outermost(database, heard):
    with atomic(database):
        with atomic(database), atomic(database, savepoint=False):
            on_end(heard.append, using=database)
        assert heard == []
    assert heard == [COMMITTED]


def test_rollback_of_an_inner_savepoint_does_not_settle(database, heard):
    with atomic(database):
        with pytest.raises(Sorry), atomic(database):
            on_end(heard.append, using=database)
            raise Sorry
        assert heard == []
    assert heard == [COMMITTED]


@pytest.mark.parametrize("database", ["default", "postgresql"], indirect=True)
def test_constraint_refused_at_commit_is_rolled_back(database, heard):
    with pytest.raises(IntegrityError), atomic(database):
        on_end(lambda outcome: heard.extend([outcome, in_transaction(database)]), using=database)
        Note.objects.using(database).create(counter_id=12345)
    assert heard == [ROLLED_BACK, False]
    assert not Note.objects.using(database).exists()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("is_undone", [True, False], ids=["whole transaction", "savepoint"])
def test_commit_that_postgresql_takes_for_a_rollback_is_rolled_back(database, heard, is_undone):
    """PostgreSQL does so after an error that the program has swallowed, and no driver reports it."""
    with atomic(database):
        add(database, "a")
        on_rollback(lambda: heard.append("undone"), using=database)
        on_end(heard.append, using=database)
        with contextlib.suppress(DatabaseError), contextlib.nullcontext() if is_undone else atomic(database):
            rows(connections[database], "SELECT 1 / 0")
    assert heard == (["undone", ROLLED_BACK] if is_undone else [COMMITTED])
    assert committed(database) == (set() if is_undone else {"a"})


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_serialization_failure_at_commit_is_rolled_back(database, heard):
    begin_serializable = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
    count = "SELECT count(*) FROM testapp_counter"
    insert = "INSERT INTO testapp_counter (name, value) VALUES (%s, 0)"
    with second_session(database) as second, pytest.raises(OperationalError), atomic(database):
        rows(connections[database], begin_serializable)
        rows(connections[database], count)
        second.set_autocommit(False)
        for statement in (begin_serializable, count):
            rows(second, statement)
        on_end(heard.append, using=database)
        rows(connections[database], insert, "ours")
        rows(second, insert, "theirs")
        second.commit()
    assert heard == [ROLLED_BACK]
    assert committed(database) == {"theirs"}


def test_close_inside_the_block_settles_at_once(database, heard):
    with atomic(database):
        on_end(lambda outcome: heard.extend([outcome, in_transaction(database)]), using=database)
        add(database, "a")
        connections[database].close()
        assert heard == [ROLLED_BACK, False]
        assert not in_transaction(database)
        with pytest.raises(RuntimeError, match="on_end"):
            on_end(heard.append, using=database)
    assert heard == [ROLLED_BACK, False]
    assert committed(database) == set()
    with atomic(database):
        on_end(heard.append, using=database)
    assert heard == [ROLLED_BACK, False, COMMITTED]


def test_every_transaction_settles_only_its_own(database, heard):
    with atomic(database):
        on_end(lambda outcome: heard.append(("first", outcome)), using=database)
    with atomic(database):
        on_end(lambda outcome: heard.append(("second", outcome)), using=database)
    assert heard == [("first", COMMITTED), ("second", COMMITTED)]


def test_two_databases_settle_each_at_its_own_end(database, use_database, heard):
    other = use_database("other")
    with atomic(database):
        on_end(lambda outcome: heard.append((database, outcome)), using=database)
        with pytest.raises(Sorry), atomic(other):
            on_end(lambda outcome: heard.append((other, outcome)), using=other)
            raise Sorry
        assert heard == [(other, ROLLED_BACK)]
    assert heard == [(other, ROLLED_BACK), (database, COMMITTED)]


def test_two_threads_settle_each_its_own_transaction(database, heard):
    def work():
        with atomic(database):
            on_end(lambda outcome: heard.append(("thread", outcome)), using=database)
        connections[database].close()

    connections[database].close()  # SQLite lets one write at a time
    with atomic(database):
        on_end(lambda outcome: heard.append(("main", outcome)), using=database)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [("main", COMMITTED), ("thread", COMMITTED)]


async def test_function_under_sync_to_async_settles_before_it_returns(database, heard):
    def work():
        with atomic(database):
            on_end(heard.append, using=database)
            add(database, "a")
        result = list(heard)
        connections[database].close()
        return result

    assert await sync_to_async(work)() == [COMMITTED]


def a_view(request: HttpRequest, *, alias: str, fail: bool) -> HttpResponse:
    on_end(request.META["heard"].append, using=alias)
    add(alias, "a")
    assert request.META["heard"] == []
    if fail:
        raise Sorry
    return HttpResponse("done")


@pytest.mark.parametrize(("fail", "status", "outcome"), [(False, 200, COMMITTED), (True, 500, ROLLED_BACK)])
def test_request_with_atomic_requests_settles_after_the_view(database, heard, monkeypatch, fail, status, outcome):
    monkeypatch.setitem(connections.settings[database], "ATOMIC_REQUESTS", True)
    urls = type("urls", (), {"urlpatterns": [path("", a_view, {"alias": database, "fail": fail})]})
    with override_settings(ROOT_URLCONF=urls):
        response = Client(raise_request_exception=False).get("/", heard=heard)
    assert response.status_code == status
    assert heard == [outcome]
    assert bool(committed(database)) is (outcome is COMMITTED)


# Autocommit turned off by hand


@pytest.fixture
def manual(database) -> str:
    transaction.set_autocommit(False, using=database)
    return database


def test_manual_transactions_settle_at_each_commit_and_rollback(manual, heard):
    on_end(heard.append, using=manual)
    add(manual, "a")
    transaction.commit(using=manual)
    assert heard == [COMMITTED]
    on_end(heard.append, using=manual)
    add(manual, "b")
    transaction.rollback(using=manual)
    assert heard == [COMMITTED, ROLLED_BACK]
    on_end(heard.append, using=manual)
    transaction.commit(using=manual)
    transaction.set_autocommit(True, using=manual)
    assert heard == [COMMITTED, ROLLED_BACK, COMMITTED]
    assert committed(manual) == {"a"}


def test_atomic_block_in_a_manual_transaction_does_not_settle(manual, heard):
    with atomic(manual):
        on_end(heard.append, using=manual)
        add(manual, "a")
    assert heard == []
    transaction.commit(using=manual)
    assert heard == [COMMITTED]


def test_settler_that_queries_leaves_no_transaction_open_in_manual_mode(manual, heard):
    on_end(lambda _: heard.append(len(rows(connections[manual], "SELECT 1"))), using=manual)
    add(manual, "a")
    transaction.commit(using=manual)
    assert not transaction.get_autocommit(using=manual)
    transaction.set_autocommit(True, using=manual)
    assert heard == [1]


def test_autocommit_that_is_turned_on_settles_the_transaction_and_stays_on(manual, heard):
    on_end(lambda _: heard.append(len(rows(connections[manual], "SELECT 1"))), using=manual)
    transaction.set_autocommit(True, using=manual)
    assert heard == [1]
    add(manual, "after it")
    assert committed(manual) == {"after it"}
    with atomic(manual):
        add(manual, "in a block")
    assert committed(manual) == {"after it", "in a block"}


def test_check_that_fails_rolls_a_manual_transaction_back(manual, heard):
    on_end(heard.append, using=manual, before_commit=fail_with(DatabaseError("no")))
    add(manual, "a")
    with pytest.raises(DatabaseError, match="no"):
        transaction.commit(using=manual)
    assert heard == [ROLLED_BACK]
    transaction.commit(using=manual)
    transaction.set_autocommit(True, using=manual)
    assert committed(manual) == set()


def test_commit_forbidden_inside_a_block_settles_nothing(database, heard):
    with atomic(database):
        on_end(heard.append, using=database, before_commit=lambda: heard.append("checked"))
        for forbidden in (transaction.commit, transaction.rollback):
            with pytest.raises(TransactionManagementError):
                forbidden(using=database)
        assert heard == []
    assert heard == ["checked", COMMITTED]


# Where there is no transaction


def test_on_end_outside_a_transaction_raises_and_on_rollback_does_nothing(database, heard):
    with pytest.raises(RuntimeError, match=database):
        on_end(heard.append, using=database)
    on_rollback(lambda: heard.append("undone"), using=database)
    with pytest.raises(Sorry), atomic(database):
        raise Sorry
    assert heard == []


def test_in_transaction_is_true_in_blocks_and_without_autocommit_only(database):
    connections[database].close()
    assert not in_transaction(database)
    with atomic(database):
        assert in_transaction(database)
        with atomic(database):
            assert in_transaction(database)
        assert in_transaction(database)
    assert not in_transaction(database)
    transaction.set_autocommit(False, using=database)
    assert in_transaction(database)
    transaction.set_autocommit(True, using=database)
    assert not in_transaction(database)


# Identity


def test_transaction_key_is_one_per_transaction(database):
    assert transaction_key(database) is None
    reused = atomic(database)
    keys = []
    for _ in range(2):
        with reused:
            keys.append(transaction_key(database))
            with atomic(database):
                assert transaction_key(database) is keys[-1]
            with pytest.raises(Sorry), atomic(database):
                raise Sorry
            assert transaction_key(database) is keys[-1]
        assert transaction_key(database) is None
    assert None not in keys
    assert keys[0] is not keys[1]


def test_transaction_key_is_new_after_each_commit_and_rollback_of_a_manual_transaction(manual):
    keys = [transaction_key(manual)]
    assert transaction_key(manual) is keys[0]
    transaction.commit(using=manual)
    keys.append(transaction_key(manual))
    transaction.rollback(using=manual)
    keys.append(transaction_key(manual))
    transaction.set_autocommit(True, using=manual)
    assert len({id(key) for key in keys}) == 3


# Order, and errors of callbacks


def test_settlers_are_called_last_in_first_out(database, heard):
    with atomic(database):
        for number in range(3):
            on_end(lambda _, number=number: heard.append(number), using=database)
    assert heard == [2, 1, 0]


def test_settler_that_fails_is_repeated_and_raises_when_the_others_were_called(database, heard):
    """The exception of a signal handler, such as a task's time limit, may have cut it short."""
    with pytest.raises(Sorry, match="broken settler"), atomic(database):
        transaction.on_commit(lambda: heard.append("on_commit"), using=database)
        on_end(heard.append, using=database)
        on_end(lambda _: heard.append("again") or fail_with(Sorry("broken settler"))(), using=database)
        add(database, "a")
    assert heard == ["again", "again", COMMITTED, "on_commit"]
    assert committed(database) == {"a"}


def test_settler_with_an_error_of_the_database_is_logged_because_django_would_roll_back(database, heard, caplog):
    with caplog.at_level(logging.ERROR, logger="dlock"), atomic(database):
        transaction.on_commit(lambda: heard.append("on_commit"), using=database)
        on_end(lambda _: fail_with(OperationalError("broken settler"))(), using=database)
        add(database, "a")
    assert "broken settler" in caplog.text
    assert heard == ["on_commit"]
    assert committed(database) == {"a"}


def test_interrupted_settler_lets_the_others_and_the_on_commit_functions_run_first(database, heard):
    with pytest.raises(KeyboardInterrupt), atomic(database):
        transaction.on_commit(lambda: heard.append("on_commit"), using=database)
        on_end(heard.append, using=database)
        on_end(lambda _: fail_with(KeyboardInterrupt())(), using=database)
    assert heard == [COMMITTED, "on_commit"]


def test_settle_runs_after_commit_and_before_on_commit_functions(database, heard):
    with atomic(database):
        transaction.on_commit(lambda: heard.append("on_commit"), using=database)
        on_end(heard.append, using=database)
        transaction.on_commit(lambda: heard.append("on_commit, later"), using=database)
    assert heard == [COMMITTED, "on_commit", "on_commit, later"]


def test_failing_on_commit_function_changes_nothing_about_the_outcome(database, heard):
    with pytest.raises(Sorry), atomic(database):
        transaction.on_commit(fail_with(Sorry()), using=database)
        on_end(heard.append, using=database)
        add(database, "a")
    assert heard == [COMMITTED]
    assert committed(database) == {"a"}


# What settlers may do


def test_settler_may_commit_and_roll_back_transactions_of_its_own(database, heard):
    def settle(outcome):
        assert not in_transaction(database)
        assert transaction.get_autocommit(using=database)
        with atomic(database, durable=True):
            transaction.on_commit(lambda: heard.append("settler's"), using=database)
            on_end(lambda outcome: heard.append(("settler's", outcome)), using=database)
            add(database, "by the settler")
        with pytest.raises(Sorry), atomic(database):
            raise Sorry
        heard.append(outcome)

    with atomic(database):
        transaction.on_commit(lambda: heard.append("user's"), using=database)
        on_end(settle, using=database)
        add(database, "by the user")
    assert heard == [("settler's", COMMITTED), "settler's", COMMITTED, "user's"]
    assert committed(database) == {"by the user", "by the settler"}


def test_settler_may_use_the_connection_after_a_rollback(database, heard):
    def settle(outcome):
        add(database, "by the settler")
        heard.append(outcome)

    with pytest.raises(Sorry), atomic(database):
        transaction.on_commit(lambda: heard.append("never"), using=database)
        on_end(settle, using=database)
        add(database, "by the user")
        raise Sorry
    assert committed(database) == {"by the settler"}
    with atomic(database):
        add(database, "later")
    assert heard == [ROLLED_BACK]


def test_settler_may_close_the_connection(database, heard):
    with atomic(database):
        transaction.on_commit(lambda: heard.append("on_commit"), using=database)
        on_end(lambda _: connections[database].close(), using=database)
        add(database, "a")
    assert heard == ["on_commit"]
    assert committed(database) == {"a"}


# Checks before COMMIT


def test_check_runs_inside_the_transaction_and_first_in_first_out(database, heard):
    with atomic(database):
        on_end(heard.append, using=database, before_commit=lambda: heard.append(in_transaction(database)))
        on_end(heard.append, using=database, before_commit=lambda: heard.append(add(database, "checked").name))
        add(database, "a")
        assert heard == []
    assert heard == [True, "checked", COMMITTED, COMMITTED]
    assert committed(database) == {"a", "checked"}


def test_check_may_use_a_block_and_register_more(database, heard):
    def check():
        with atomic(database):
            add(database, "checked")
            on_end(lambda _: heard.append("late"), using=database, before_commit=lambda: heard.append("late check"))

    with atomic(database):
        on_end(heard.append, using=database, before_commit=check)
    assert heard == ["late check", "late", COMMITTED]
    assert committed(database) == {"checked"}


@pytest.mark.parametrize("error", [DatabaseError, ProgrammingError, Sorry, KeyboardInterrupt, GeneratorExit])
def test_check_that_raises_rolls_back_and_leaves_the_connection_sound(database, heard, error):
    with pytest.raises(error), atomic(database):
        transaction.on_commit(lambda: heard.append("never"), using=database)
        on_end(heard.append, using=database, before_commit=fail_with(error("not now")))
        add(database, "a")
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()
    with atomic(database):
        on_end(heard.append, using=database)
        add(database, "b")
    assert heard == [ROLLED_BACK, COMMITTED]
    assert committed(database) == {"b"}


def test_check_does_not_run_when_the_transaction_is_rolled_back(database, heard):
    with atomic(database):
        on_end(heard.append, using=database, before_commit=lambda: heard.append("checked"))
        transaction.set_rollback(True, using=database)
    assert heard == [ROLLED_BACK]


def test_check_that_closes_the_connection_is_not_taken_for_a_commit(database, heard):
    with pytest.raises(TransactionManagementError), atomic(database):
        on_end(heard.append, using=database, before_commit=connections[database].close)
        add(database, "a")
    assert heard == [ROLLED_BACK]
    assert committed(database) == set()


# Restoring what was undone


def test_restore_is_called_when_its_savepoint_is_rolled_back(database, heard):
    with atomic(database):
        on_rollback(lambda: heard.append("outer"), using=database)
        with pytest.raises(Sorry), atomic(database):
            on_rollback(lambda: heard.append("inner"), using=database)
            raise Sorry
        assert heard == ["inner"]
    assert heard == ["inner"]


def test_restore_is_called_when_an_enclosing_savepoint_is_rolled_back(database, heard):
    with atomic(database):
        on_rollback(lambda: heard.append("outermost"), using=database)
        with pytest.raises(Sorry), atomic(database):
            with atomic(database):
                on_rollback(lambda: heard.append("innermost"), using=database)
            with atomic(database):
                pass
            on_rollback(lambda: heard.append("inner"), using=database)
            raise Sorry
        assert heard == ["inner", "innermost"]
    assert heard == ["inner", "innermost"]


def test_restore_is_called_once_when_savepoint_and_transaction_are_rolled_back(database, heard):
    with pytest.raises(Sorry), atomic(database):
        on_rollback(lambda: heard.append("outer"), using=database)
        with pytest.raises(Sorry), atomic(database):
            on_rollback(lambda: heard.append("inner"), using=database)
            raise Sorry
        with atomic(database):
            on_rollback(lambda: heard.append("kept"), using=database)
        raise Sorry
    assert heard == ["inner", "kept", "outer"]


def test_restore_is_not_called_after_commit(database, heard):
    with atomic(database), atomic(database):
        on_rollback(lambda: heard.append("undone"), using=database)
    with pytest.raises(Sorry), atomic(database):
        raise Sorry
    assert heard == []


def test_restore_follows_savepoints_made_by_hand(database, heard):
    connection = connections[database]
    with atomic(database):
        first = connection.savepoint()
        on_rollback(lambda: heard.append("after first"), using=database)
        second = connection.savepoint()
        on_rollback(lambda: heard.append("after second"), using=database)
        connection.savepoint_rollback(second)
        assert heard == ["after second"]
        on_rollback(lambda: heard.append("after second, again"), using=database)
        connection.savepoint_rollback(second)
        assert heard == ["after second", "after second, again"]
        connection.savepoint_rollback(first)
    assert heard == ["after second", "after second, again", "after first"]


def test_restore_is_called_before_settle_and_its_error_is_raised_after_all(database, heard):
    with pytest.raises(ValueError, match="broken restore"), atomic(database):
        on_end(heard.append, using=database)
        on_rollback(lambda: heard.append("undone"), using=database)
        on_rollback(fail_with(ValueError("broken restore")), using=database)
        raise Sorry
    assert heard == ["undone", ROLLED_BACK]


def test_restore_is_called_in_manual_transactions(manual, heard):
    on_rollback(lambda: heard.append("undone"), using=manual)
    transaction.rollback(using=manual)
    assert heard == ["undone"]
    on_rollback(lambda: heard.append("kept"), using=manual)
    transaction.commit(using=manual)
    transaction.rollback(using=manual)
    transaction.set_autocommit(True, using=manual)
    assert heard == ["undone"]


# Good manners


def test_connection_that_is_dropped_is_not_kept_alive(database):
    connections[database].close()
    del connections[database]  # It may be older than conftest.py's gc.freeze(), and would never be collected then.
    with atomic(database):
        on_end(lambda _: None, using=database)
        on_rollback(lambda: None, using=database)
    connections[database].close()
    gone = weakref.ref(connections[database])
    del connections[database]
    collect_garbage()
    assert gone() is None


def test_connection_nobody_asked_about_keeps_djangos_methods(database):
    with atomic(database):
        on_end(lambda _: None, using=database)
    with second_session(database) as second:
        assert not {"_commit", "_rollback", "close"} & vars(second).keys()


def fail_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail
