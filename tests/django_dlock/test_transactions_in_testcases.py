"""django_dlock.transactions keeps its promises inside test cases, whose own transaction never commits."""

import unittest
from collections.abc import Callable

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.transaction import TransactionManagementError, atomic
from django.test import TestCase, TransactionTestCase

from django_dlock.connections import in_transaction, on_rollback
from dlock_core.transactions.tie import Outcome
from tests.django_dlock.sessions import add, rows
from tests.django_dlock.tracking import before_statements, on_end, transaction_key
from tests.testapp.models import Counter

COMMITTED, ROLLED_BACK = Outcome.COMMITTED, Outcome.ROLLED_BACK


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture
def heard() -> list[object]:
    """What the callbacks have recorded, in order."""
    return []


@pytest.fixture
def in_testcase(database) -> Callable[..., None]:
    """Run a function as the one test of a TestCase on the database."""

    def run(body: Callable[[TestCase], object], base: type[TransactionTestCase] = TestCase) -> None:
        class Case(base):
            databases = {database}

            def runTest(self) -> None:
                body(self)

        result = unittest.TestResult()
        unittest.TestSuite([Case()]).run(result)
        assert result.testsRun == 1
        for _, trace in result.failures + result.errors:
            pytest.fail(trace, pytrace=False)

    return run


def test_block_in_a_testcase_settles_at_its_end(database, in_testcase, heard):
    def body(case):
        assert not in_transaction(database)
        with atomic(database):
            assert in_transaction(database)
            with atomic(database):
                on_end(lambda outcome: heard.extend([outcome, in_transaction(database)]), using=database)
            assert heard == []
        assert heard == [COMMITTED, False]
        with pytest.raises(Sorry), atomic(database):
            on_end(heard.append, using=database)
            raise Sorry
        assert heard == [COMMITTED, False, ROLLED_BACK]
        with atomic(database):
            on_end(heard.append, using=database)
            transaction.set_rollback(True, using=database)

    in_testcase(body)
    assert heard == [COMMITTED, False, ROLLED_BACK, ROLLED_BACK]


@pytest.mark.parametrize("error", [DatabaseError, Sorry, KeyboardInterrupt])
def test_check_that_raises_in_a_testcase_undoes_the_block(database, in_testcase, heard, error):
    def check():
        raise error

    def body(case):
        add(database, "before")
        with pytest.raises(error), atomic(database):
            on_end(heard.append, using=database, before_commit=check)
            add(database, "a")
        assert heard == [ROLLED_BACK]
        assert [counter.name for counter in Counter.objects.using(database).all()] == ["before"]

    in_testcase(body)
    assert heard == [ROLLED_BACK]


def test_check_in_a_testcase_runs_inside_the_transaction(database, in_testcase, heard):
    def body(case):
        with atomic(database):
            on_end(heard.append, using=database, before_commit=lambda: heard.append(in_transaction(database)))
            on_end(heard.append, using=database, before_commit=lambda: heard.append(transaction_key(database)))
            key = transaction_key(database)
        assert heard == [True, key, COMMITTED, COMMITTED]

    in_testcase(body)


def test_testcase_without_a_block_of_the_user_is_no_transaction(database, in_testcase, heard):
    def body(case):
        assert not in_transaction(database)
        assert transaction_key(database) is None
        on_rollback(lambda: heard.append("undone"), using=database)
        with pytest.raises(RuntimeError, match="on_end"):
            on_end(heard.append, using=database)

    in_testcase(body)
    assert heard == []


def test_transaction_key_in_a_testcase_is_new_for_each_block(database, in_testcase):
    def body(case):
        keys = []
        for savepoint in (True, False, False, True):
            with atomic(database, savepoint=savepoint):
                keys.append(transaction_key(database))
                assert transaction_key(database) is keys[-1]
            assert transaction_key(database) is None
        assert len({id(key) for key in keys}) == 4

    in_testcase(body)


def test_restore_in_a_testcase_is_called_when_block_or_savepoint_is_rolled_back(database, in_testcase, heard):
    def body(case):
        with pytest.raises(Sorry), atomic(database):
            on_rollback(lambda: heard.append("outer"), using=database)
            with pytest.raises(Sorry), atomic(database):
                on_rollback(lambda: heard.append("inner"), using=database)
                raise Sorry
            assert heard == ["inner"]
            raise Sorry
        assert heard == ["inner", "outer"]
        with atomic(database):
            on_rollback(lambda: heard.append("kept"), using=database)

    in_testcase(body)
    assert heard == ["inner", "outer"]


def test_block_without_savepoint_in_a_testcase_settles_at_its_end_with_no_statement_more(database, in_testcase, heard):
    def body(case):
        with case.assertNumQueries(3, using=database):  # an insert and an inner savepoint
            with atomic(database, savepoint=False):
                with atomic(database):
                    on_end(heard.append, using=database)
                    add(database, "a")
                assert heard == []
            assert heard == [COMMITTED]

    in_testcase(body)
    assert heard == [COMMITTED]


def test_failed_block_without_savepoint_leaves_a_testcase_as_django_does(database, in_testcase, heard):
    def body(case):
        with pytest.raises(Sorry), atomic(database, savepoint=False):
            on_end(heard.append, using=database)
            add(database, "a")
            raise Sorry
        assert heard == [ROLLED_BACK]
        with pytest.raises(TransactionManagementError):
            add(database, "b")

    in_testcase(body)
    assert heard == [ROLLED_BACK]


def test_capture_on_commit_callbacks_captures_and_executes_the_users_functions_only(database, in_testcase, heard):
    def body(case):
        with case.captureOnCommitCallbacks(using=database, execute=True) as callbacks:
            with atomic(database):
                on_end(heard.append, using=database)
                transaction.on_commit(lambda: heard.append("on_commit"), using=database)
            with pytest.raises(Sorry), atomic(database):
                on_end(heard.append, using=database)
                transaction.on_commit(lambda: heard.append("never"), using=database)
                raise Sorry
            assert heard == [COMMITTED, ROLLED_BACK]
        assert len(callbacks) == 1
        assert heard == [COMMITTED, ROLLED_BACK, "on_commit"]

    in_testcase(body)
    assert heard == [COMMITTED, ROLLED_BACK, "on_commit"]


def test_settler_in_a_testcase_may_use_blocks_of_its_own(database, in_testcase, heard):
    def settle(outcome):
        with atomic(database):
            on_end(heard.append, using=database)
            add(database, "by the settler")

    def body(case):
        with pytest.raises(Sorry), atomic(database):
            on_end(settle, using=database)
            raise Sorry
        assert heard == [COMMITTED]
        assert Counter.objects.using(database).get().name == "by the settler"

    in_testcase(body)


def test_statement_in_a_testcase_is_outside_a_transaction_until_the_user_opens_one(database, in_testcase, heard):
    def body(case):
        before_statements(lambda _, sql, inside: heard.append((sql, inside)), using=database)
        rows(connections[database], "SELECT 1")
        with atomic(database):
            rows(connections[database], "SELECT 2")

    in_testcase(body)
    assert [heard_one for heard_one in heard if heard_one[0].startswith("SELECT")] == [
        ("SELECT 1", False),
        ("SELECT 2", True),
    ]
    assert all(not sql.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK")) for sql, _ in heard)


def test_transaction_testcase_settles_like_production(database, in_testcase, heard):
    def body(case):
        with TestCase.captureOnCommitCallbacks(using=database, execute=True) as callbacks, atomic(database):
            transaction.on_commit(lambda: heard.append("on_commit"), using=database)
            on_end(heard.append, using=database)
            add(database, "a")
        assert callbacks == []
        with pytest.raises(Sorry), atomic(database):
            on_end(heard.append, using=database)
            raise Sorry

    in_testcase(body, TransactionTestCase)
    assert heard == [COMMITTED, "on_commit", ROLLED_BACK]


def test_block_under_pytest_django_db_settles_at_its_end(db, heard):
    assert not in_transaction()
    with atomic():
        on_end(heard.append)
        add("default", "a")
    assert heard == [COMMITTED]


def test_capture_fixture_of_pytest_django_sees_the_users_functions_only(db, heard, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True) as callbacks, atomic():
        on_end(heard.append)
        transaction.on_commit(lambda: heard.append("on_commit"))
    assert len(callbacks) == 1
    assert heard == [COMMITTED, "on_commit"]


def test_block_under_pytest_django_transactional_db_settles_at_its_end(transactional_db, heard):
    with atomic():
        transaction.on_commit(lambda: heard.append("on_commit"))
        on_end(heard.append)
    with pytest.raises(Sorry), atomic():
        on_end(heard.append)
        raise Sorry
    assert heard == [COMMITTED, "on_commit", ROLLED_BACK]
