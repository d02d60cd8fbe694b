"""retry_on_conflict keeps its promises on real conflicts of real databases."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, OperationalError, connections, models, transaction
from django.db.transaction import TransactionManagementError, atomic, set_autocommit, set_rollback
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory, TestCase, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.decorators import api_view
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock.connections import in_transaction
from django_dlock.errors import AcquireTimeout, RowLocked, StaleObject, StaleToken
from django_dlock.retry import is_retry, retry_on_conflict
from dlock_core.sql.driver_errors import DatabaseFailure, classify
from tests import processes
from tests.django_dlock.sessions import add, committed, rows, second_session
from tests.django_dlock.tracking import on_end
from tests.mysql_server import LIKE_A_DEADLOCK, mariadb_only
from tests.testapp.models import Article, Counter, Stock

on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
with_row_locks = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


class Sorry(Exception):
    """Raised by user code."""


def count(alias: str) -> int:
    return Counter.objects.using(alias).count()


class Attempts:
    """Raises the given errors in turn, then returns the number of attempts."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.made = 0

    def make(self) -> int:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.made


def stale() -> StaleObject:
    return StaleObject(Counter(pk=1), expected=1, found=2)


def test_work_is_done_again_in_a_new_transaction_after_a_conflict(database):
    attempts = Attempts(stale(), StaleToken("a", token=1), RowLocked("a"))

    @retry_on_conflict(attempts=4, using=database)
    def work(name: str) -> str:
        assert connections[database].in_atomic_block
        assert not Counter.objects.using(database).exists()
        add(database, name)
        return f"{name} {attempts.make()}"

    assert work("a") == "a 4"
    assert committed(database) == {"a"}
    assert not connections[database].in_atomic_block


def test_last_conflict_is_raised_with_a_note_and_nothing_is_committed(database):
    last = stale()
    attempts = Attempts(stale(), last)

    @retry_on_conflict(attempts=2, using=database)
    def work() -> None:
        add(database, "a")
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        work()
    assert caught.value is last
    assert caught.value.__notes__ == ["gave up after 2 attempts"]
    assert committed(database) == set()


@pytest.mark.parametrize(
    "error", [Sorry(), AcquireTimeout("a", waited=1), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_what_is_no_conflict_is_raised_at_once_and_rolled_back(database, error):
    attempts = Attempts(error)

    @retry_on_conflict(using=database)
    def work() -> None:
        add(database, "a")
        attempts.make()

    with pytest.raises(type(error)):
        work()
    assert attempts.made == 1
    assert committed(database) == set()


@on_postgresql
def test_error_that_has_undone_everything_cannot_be_swallowed(database):
    """PostgreSQL would take the COMMIT for a ROLLBACK, and no driver would report it."""

    @retry_on_conflict(using=database)
    def work() -> None:
        add(database, "a")
        with contextlib.suppress(DatabaseError):
            rows(connections[database], "SELECT 1 / 0")

    with pytest.raises(TransactionManagementError, match="swallowed an error that undid its transaction"):
        work()
    assert committed(database) == set()


@on_postgresql
@pytest.mark.parametrize("how", ["in a savepoint", "to be rolled back on purpose"])
def test_error_that_has_undone_what_the_function_gives_up_can_be_swallowed(database, how):
    in_savepoint = how == "in a savepoint"

    @retry_on_conflict(using=database)
    def work() -> str:
        add(database, "a")
        with contextlib.suppress(DatabaseError), atomic(database) if in_savepoint else contextlib.nullcontext():
            rows(connections[database], "SELECT 1 / 0")
        if not in_savepoint:
            set_rollback(True, using=database)
        return "done"

    assert work() == "done"
    assert committed(database) == ({"a"} if in_savepoint else set())


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@mariadb_only
@pytest.mark.parametrize("how", ["goes on", "ends", "in a savepoint"])
def test_deadlock_cannot_be_swallowed(database, how):
    """MariaDB and MySQL roll everything back, and commit what comes after that."""

    @retry_on_conflict(using=database)
    def work() -> None:
        add(database, "a")
        with (
            contextlib.suppress(DatabaseError),
            atomic(database) if how == "in a savepoint" else contextlib.nullcontext(),
        ):
            rows(connections[database], LIKE_A_DEADLOCK)
        if how == "goes on":
            add(database, "b")

    with pytest.raises(TransactionManagementError, match="swallowed an error that undid its transaction"):
        work()
    assert committed(database) == set()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_lock_timeout_that_has_undone_only_its_statement_can_be_swallowed(database):
    taken = Counter.objects.using(database).filter(pk=add(database, "a").pk)

    @retry_on_conflict(using=database)
    def work() -> None:
        with contextlib.suppress(OperationalError):
            taken.select_for_update(nowait=True).get()
        add(database, "b")

    with second_session(database) as other:
        rows(other, "BEGIN")
        rows(other, "SELECT * FROM testapp_counter FOR UPDATE")
        work()
        rows(other, "ROLLBACK")
    assert committed(database) == {"a", "b"}


@pytest.mark.parametrize("undone", ["postgresql", pytest.param("mariadb", marks=mariadb_only)])
@pytest.mark.parametrize("is_first", [True, False])
def test_error_that_has_undone_everything_on_one_of_several_databases_leaves_nothing_on_the_others(
    use_database, undone, is_first
):
    use_database(undone), use_database("other")

    @retry_on_conflict(using=(undone, "other") if is_first else ("other", undone))
    def work() -> None:
        add(undone, "a"), add("other", "a")
        with contextlib.suppress(DatabaseError):
            rows(connections[undone], LIKE_A_DEADLOCK if undone == "mariadb" else "SELECT 1 / 0")

    with pytest.raises(TransactionManagementError, match="swallowed an error that undid its transaction"):
        work()
    assert committed(undone) == committed("other") == set()


@pytest.mark.parametrize("alias", ["postgresql", pytest.param("mariadb", marks=mariadb_only)])
async def test_error_that_has_undone_everything_cannot_be_swallowed_in_a_coroutine(use_database, alias):
    await sync_to_async(use_database)(alias)

    @sync_to_async
    def step() -> None:
        with atomic(alias):
            add(alias, "a")
            with contextlib.suppress(DatabaseError):
                rows(connections[alias], LIKE_A_DEADLOCK if alias == "mariadb" else "SELECT 1 / 0")

    @retry_on_conflict(using=alias)
    async def work() -> None:
        await step()

    with pytest.raises(TransactionManagementError, match="swallowed an error that undid its transaction"):
        await work()
    assert await sync_to_async(committed)(alias) == set()


def test_several_databases_are_rolled_back_together(database, use_database):
    other = use_database("other")
    attempts = Attempts(stale())

    @retry_on_conflict(using=[database, other])
    def work() -> None:
        for alias in (database, other):
            assert not Counter.objects.using(alias).exists()
            add(alias, "a")
        attempts.make()

    work()
    assert committed(database) == committed(other) == {"a"}


# where it refuses


def test_inside_a_transaction_it_refuses_before_it_runs(database):
    attempts = Attempts()
    work = retry_on_conflict(using=database)(attempts.make)
    with atomic(database), pytest.raises(TransactionManagementError, match=f"on '{database}', and one is already open"):
        work()
    assert attempts.made == 0


def test_inside_a_transaction_begun_by_hand_it_refuses(database):
    work = retry_on_conflict(using=database)(Attempts().make)
    set_autocommit(False, using=database)
    try:
        with pytest.raises(TransactionManagementError):
            work()
    finally:
        set_autocommit(True, using=database)


def test_inside_itself_it_refuses(database):
    inner = retry_on_conflict(using=database)(Attempts().make)
    outer = retry_on_conflict(using=database)(inner)
    with pytest.raises(TransactionManagementError):
        outer()


@pytest.mark.parametrize("is_async", [False, True])
async def test_inside_itself_it_refuses_before_the_inner_one_runs_in_coroutines_too(use_database, is_async):
    await sync_to_async(use_database)("default")
    attempts = Attempts()

    @retry_on_conflict
    async def asynchronous() -> int:
        return attempts.make()

    blocking = sync_to_async(retry_on_conflict(attempts.make))

    @retry_on_conflict
    async def outer() -> None:
        await (asynchronous() if is_async else blocking())

    with pytest.raises(TransactionManagementError, match="inside another one"):
        await outer()
    assert attempts.made == 0


# what is committed is never done twice


def test_conflict_of_an_on_commit_function_is_raised_at_once(database):
    @retry_on_conflict(using=database)
    def pay() -> None:
        add(database, "paid")
        transaction.on_commit(Attempts(stale()).make, using=database)

    with pytest.raises(StaleObject) as caught:
        pay()
    assert caught.value.__notes__ == [f"not tried again: work on {database!r} is committed"]
    assert count(database) == 1


def test_work_done_with_the_driver_s_own_cursor_is_not_repeated_after_its_commit(database):
    @retry_on_conflict(using=database)
    def pay() -> None:
        with contextlib.closing(connections[database].connection.cursor()) as cursor:
            cursor.execute(f"INSERT INTO {Counter._meta.db_table} (name, value) VALUES ('paid', 1)")
        transaction.on_commit(Attempts(stale()).make, using=database)

    with pytest.raises(StaleObject):
        pay()
    assert count(database) == 1


def test_conflict_at_a_commit_after_that_of_another_database_is_raised_at_once(database, use_database):
    other, runs = use_database("other"), []

    @retry_on_conflict(using=[database, other])
    def pay() -> None:
        runs.append(1)
        add(database, "paid")
        add(other, "log")
        on_end(lambda outcome: None, using=database, before_commit=Attempts(stale()).make)

    with pytest.raises(StaleObject):
        pay()
    assert (runs, count(other), count(database)) == ([1], 1, 0)


def in_a_transaction_of_its_own(other: str) -> None:
    with atomic(other):
        add(other, "log")


def in_autocommit(other: str) -> None:
    add(other, "log")


def by_hand(other: str) -> None:
    set_autocommit(False, using=other)
    try:
        add(other, "log")
        transaction.commit(using=other)
    finally:
        set_autocommit(True, using=other)


def with_a_comment_before(other: str) -> None:
    with connections[other].cursor() as cursor:
        cursor.execute("/* by hand */ -- really\n INSERT INTO testapp_counter (name, value) VALUES ('log', 0)")


def by_a_retry_of_its_own(other: str) -> None:
    retry_on_conflict(using=other)(add)(other, "log")


@pytest.mark.parametrize(
    "write", [in_a_transaction_of_its_own, in_autocommit, by_hand, with_a_comment_before, by_a_retry_of_its_own]
)
def test_conflict_after_work_that_was_committed_on_another_database_is_raised_at_once(database, use_database, write):
    other = use_database("other")

    @retry_on_conflict(using=database)
    def pay() -> None:
        write(other)
        raise stale()

    with pytest.raises(StaleObject) as caught:
        pay()
    assert caught.value.__notes__ == ["not tried again: work on 'other' is committed"]
    assert count(other) == 1


PAY = "INSERT INTO testapp_counter (name, value) VALUES ('log', 0)"
REDIRECTED = {
    "postgresql": (
        [
            "CREATE TABLE redirected (id int)",
            f"CREATE FUNCTION redirect() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {PAY}; RETURN NULL; END $$",
            "CREATE TRIGGER redirects BEFORE INSERT ON redirected FOR EACH ROW EXECUTE FUNCTION redirect()",
        ],
        ["DROP TABLE redirected", "DROP FUNCTION redirect"],
    ),
    "sqlite": (
        [
            "CREATE VIEW redirected AS SELECT 1 AS id",
            f"CREATE TRIGGER redirects INSTEAD OF INSERT ON redirected BEGIN {PAY}; END",
        ],
        ["DROP VIEW redirected"],
    ),
}


@pytest.fixture
def redirected(database) -> Iterator[None]:
    """Create the table `redirected`, whose trigger writes to another table instead."""
    create, drop = REDIRECTED[connections[database].vendor]
    for statement in create:
        rows(connections[database], statement)
    yield
    for statement in drop:
        rows(connections[database], statement)


@pytest.mark.parametrize(
    ("database", "statement"),
    [
        ("postgresql", f"WITH a AS ({PAY}) DELETE FROM testapp_counter WHERE id = -1"),
        ("postgresql", "INSERT INTO redirected VALUES (1)"),
        ("default", "INSERT INTO redirected VALUES (1)"),
    ],
    indirect=["database"],
)
def test_statement_in_autocommit_that_counts_no_row_but_has_written_is_not_done_again(
    database, use_database, redirected, statement
):
    attempts = Attempts(stale())

    @retry_on_conflict(using=use_database("other"))
    def pay() -> None:
        rows(connections[database], statement)
        attempts.make()

    with pytest.raises(StaleObject):
        pay()
    assert (attempts.made, count(database)) == (1, 1)


@pytest.mark.parametrize("database", ["default", "mariadb"], indirect=True)
def test_rows_before_one_that_fails_in_autocommit_are_not_written_again(database, use_database):
    """psycopg sends many rows in one transaction."""
    attempts = Attempts(stale())

    @retry_on_conflict(using=use_database("other"))
    def pay() -> None:
        with contextlib.suppress(IntegrityError), connections[database].cursor() as cursor:
            cursor.executemany("INSERT INTO testapp_counter (id, name, value) VALUES (%s, 'log', 0)", [[1], [1]])
        attempts.make()

    with pytest.raises(StaleObject):
        pay()
    assert (attempts.made, count(database)) == (1, 1)


@pytest.mark.parametrize("database", ["default", "postgresql", "mariadb"], indirect=True)
def test_statement_that_was_refused_or_has_found_no_row_is_no_obstacle(database, use_database):
    add(database, "log")
    (taken,) = Counter.objects.using(database).values_list("id", flat=True)
    attempts = Attempts(stale())

    @retry_on_conflict(using=use_database("other"))
    def pay() -> int:
        with contextlib.suppress(IntegrityError):
            Counter.objects.using(database).create(id=taken)
        assert Counter.objects.using(database).filter(id=taken + 1).update(name="paid") == 0
        return attempts.make()

    assert pay() == 2


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    "statement", ["ANALYZE TABLE testapp_counter", "SET autocommit = 1", "ALTER TABLE testapp_counter COMMENT = ''"]
)
def test_what_mariadb_commits_inside_a_transaction_is_not_done_again(database, statement):
    @retry_on_conflict(using=database)
    def pay() -> None:
        add(database, "log")
        rows(connections[database], statement)
        raise stale()

    with pytest.raises(StaleObject) as caught:
        pay()
    assert caught.value.__notes__ == ["not tried again: work on 'mariadb' is committed"]
    assert count(database) == 1


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_what_a_ddl_that_mariadb_refuses_has_committed_is_not_done_again(database):
    """Also what dlock has not seen, such as a statement of the driver's own cursor."""
    attempts = Attempts(stale())

    @retry_on_conflict(using=database)
    def pay() -> None:
        connections[database].connection.cursor().execute(PAY)
        with contextlib.suppress(OperationalError):
            rows(connections[database], "ALTER TABLE testapp_counter ADD COLUMN name varchar(80);")
        attempts.make()

    with pytest.raises(StaleObject):
        pay()
    assert (attempts.made, count(database)) == (1, 1)


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_transaction_that_is_begun_by_hand_on_mariadb_is_done_again(database):
    attempts = Attempts(stale())

    @retry_on_conflict(using=database)
    def pay() -> None:
        rows(connections[database], "START TRANSACTION WITH CONSISTENT SNAPSHOT")
        add(database, "log")
        attempts.make()

    pay()
    assert attempts.made == 2
    assert count(database) == 1


def test_conflict_after_a_write_in_a_transaction_that_goes_on_is_raised_at_once(database, use_database):
    other = use_database("other")

    @retry_on_conflict(using=database)
    def pay() -> None:
        add(other, "log")
        raise stale()

    with atomic(other), pytest.raises(StaleObject) as caught:
        pay()
    assert caught.value.__notes__ == ["not tried again: work on 'other' is in a transaction that goes on"]
    assert count(other) == 1


def test_reads_and_work_that_was_undone_on_another_database_are_no_obstacle(database, use_database):
    other, attempts = use_database("other"), Attempts(stale())

    @retry_on_conflict(using=database)
    def pay() -> int:
        count(other)
        with contextlib.suppress(Sorry), atomic(other):
            add(other, "log")
            raise Sorry
        return attempts.make()

    assert pay() == 2
    with atomic(other):
        count(other)
        assert retry_on_conflict(using=database)(Attempts(stale()).make)() == 2


async def test_save_that_was_refused_in_a_coroutine_is_tried_again(use_database):
    await sync_to_async(use_database)("default")
    await Article.objects.acreate()
    interfering = [1]

    @sync_to_async
    def interfere() -> None:
        while interfering:
            with second_session("default") as other:
                rows(other, "UPDATE testapp_article SET reads = %s, version = version + 1", interfering.pop())

    @retry_on_conflict
    async def work() -> None:
        mine = await Article.objects.aget()
        await interfere()
        mine.reads += 10
        await mine.asave_with_version()

    await work()
    assert (await Article.objects.aget()).reads == 11


async def test_coroutine_that_has_committed_is_not_run_again(use_database):
    await sync_to_async(use_database)("default")

    @sync_to_async
    @atomic
    def pay() -> None:
        add("default", "paid")

    @retry_on_conflict
    async def work() -> None:
        await pay()
        raise stale()

    with pytest.raises(StaleObject) as caught:
        await work()
    assert caught.value.__notes__ == ["not tried again: work on 'default' is committed"]
    assert await sync_to_async(count)("default") == 1


def test_work_that_sqlite_has_committed_with_a_savepoint_is_not_done_twice(use_database):
    """Without autocommit, the RELEASE of a savepoint that comes first is a COMMIT, and the rollback undoes nothing."""
    use_database("default")
    other = use_database("other")

    @retry_on_conflict
    def pay() -> None:
        set_autocommit(False, using=other)
        try:
            with atomic(other):
                add(other, "paid")
            transaction.rollback(using=other)
        finally:
            set_autocommit(True, using=other)
        raise stale()

    with pytest.raises(StaleObject) as caught:
        pay()
    assert caught.value.__notes__ == ["not tried again: work on 'other' is committed"]
    assert count(other) == 1


def test_work_of_which_sqlite_has_committed_nothing_is_done_again(use_database):
    use_database("default")
    other, attempts = use_database("other"), Attempts(stale())

    @retry_on_conflict
    def look() -> None:
        set_autocommit(False, using=other)
        try:
            with atomic(other):
                count(other)
            transaction.rollback(using=other)
        finally:
            set_autocommit(True, using=other)
        attempts.make()

    look()
    assert attempts.made == 2


IMPORTED_LATE = """
import asyncio, contextvars, sys
from concurrent.futures import ThreadPoolExecutor
import django
from django.conf import settings

database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}
settings.configure(
    DATABASES={"default": database}, INSTALLED_APPS=["django_dlock"], DLOCK={"default": {"BACKEND": "memory://"}}
)
django.setup()
from django.db import connection, transaction

thread = ThreadPoolExecutor(1)
def execute(sql):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else None
def execute_by_hand(sql):  # to SQLite, the end of the atomic() is a COMMIT
    transaction.set_autocommit(False)
    execute(sql)
    transaction.rollback()
    transaction.set_autocommit(True)
thread.submit(execute, "CREATE TABLE paid (x int)").result()

from django_dlock import retry_on_conflict  # with the views, at the first request
from django_dlock.errors import RowLocked

def pay():
    thread.submit(contextvars.copy_context().run, globals()[sys.argv[3]], "INSERT INTO paid VALUES (1)").result()
    raise RowLocked("a")
async def apay():
    pay()
try:
    if sys.argv[2] == "function":
        retry_on_conflict(attempts=3)(pay)()
    else:
        asyncio.run(retry_on_conflict(attempts=3)(apay)())
except RowLocked as error:
    print(error.__notes__, thread.submit(execute, "SELECT count(*) FROM paid").result())
"""


@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize("execute", ["execute", "execute_by_hand"])
def test_work_that_was_committed_on_a_connection_older_than_the_import_is_not_repeated(tmp_path, kind, execute):
    command = [sys.executable, "-c", IMPORTED_LATE, str(tmp_path / "db.sqlite3"), kind, execute]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert answer == """["not tried again: work on 'default' is committed"] [(1,)]\n"""


def test_transaction_on_another_database_is_none_of_its_business(database, use_database):
    work = retry_on_conflict(using=database)(Attempts().make)
    with atomic(use_database("other")):
        assert work() == 1


@retry_on_conflict(attempts=2)
def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok")


urlpatterns = [path("", view)]


@override_settings(ROOT_URLCONF=__name__)
def test_view_under_atomic_requests_is_told_what_to_do(use_database, monkeypatch):
    use_database("default")
    assert Client().get("/").content == b"ok"
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    with pytest.raises(TransactionManagementError, match="non_atomic_requests"):
        Client().get("/")


def test_refusal_of_rest_framework_rolls_back(database):
    @retry_on_conflict(using=database)
    @api_view(["POST"])
    def view(request: Any) -> None:
        add(database, "a")
        raise ValidationError

    assert view(RequestFactory().post("/")).status_code == 400
    assert committed(database) == set()


def test_conflict_in_a_view_of_rest_framework_is_tried_again(use_database):
    use_database("default")
    attempts = Attempts(stale())

    class Counts(APIView):
        authentication_classes = ()

        @method_decorator(retry_on_conflict)
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

        def post(self, request: Any) -> Response:
            return Response(attempts.make())

    assert Counts.as_view()(RequestFactory().post("/")).data == 2


class InATestCase(TestCase):
    def test_test_case_s_own_transaction_does_not_count(self):
        attempts = Attempts(stale())

        @retry_on_conflict(attempts=2)
        def work() -> int:
            assert not Counter.objects.exists()
            add("default", "a")
            return attempts.make()

        assert work() == 2
        assert Counter.objects.count() == 1


# bad input


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": -1}, ValueError),
        ({"attempts": True}, TypeError),
        ({"attempts": 2.5}, TypeError),
        ({"attempts": "5"}, TypeError),
        ({"within": -1}, ValueError),
        ({"within": float("nan")}, ValueError),
        ({"within": "1"}, TypeError),
        ({"tries": 5}, TypeError),
        ({"using": None}, TypeError),
        ({"using": ()}, TypeError),
        ({"using": ["default", 1]}, TypeError),
    ],
)
def test_wrong_options_are_refused_when_decorating(how: dict[str, Any], error):
    (name,) = how
    with pytest.raises(error, match=name):
        retry_on_conflict(**how)


def test_decorator_without_parentheses_works_as_that_of_transaction_atomic_does(use_database):
    use_database("default")
    attempts = Attempts(stale(), stale())

    @retry_on_conflict
    def work(name: str) -> int:
        assert connections["default"].in_atomic_block
        return attempts.make()

    assert work("a") == 3
    assert work.__name__ == "work"


@pytest.mark.parametrize("what", [int, "default", 3, transaction])
def test_what_is_no_function_is_refused_when_decorating(what):
    with pytest.raises(TypeError, match="function or method"):
        retry_on_conflict(what)


def test_blocking_function_that_answers_with_work_still_to_be_done_is_refused(database):
    async def coroutine() -> None:
        pass

    for lazy in (lambda: coroutine(), lambda: (add(database, name) for name in "ab")):  # noqa: PLW0108
        with pytest.raises(TypeError, match="runs after COMMIT"):
            retry_on_conflict(using=database)(lazy)()
    assert committed(database) == set()


def test_generators_are_refused_when_decorating():
    def generator():
        yield 1

    async def asynchronous():
        yield 1

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match="cannot be taken back"):
            retry_on_conflict()(function)


def test_unknown_database_is_django_s_error():
    with pytest.raises(Exception, match="nowhere"):
        retry_on_conflict(using="nowhere")(Attempts().make)()


def test_function_keeps_its_name_text_and_signature():
    def work(a: int, *, b: str = "") -> None:
        """Say why."""

    wrapped = retry_on_conflict()(work)
    assert (wrapped.__name__, wrapped.__doc__) == ("work", "Say why.")
    assert inspect.signature(wrapped) == inspect.signature(work)


def test_methods_can_be_decorated(use_database):
    use_database("default")

    class Service:
        attempts = Attempts(stale())

        @retry_on_conflict()
        def work(self, add: int) -> int:
            return self.attempts.make() + add

    assert Service().work(10) == 12


# real conflicts


@with_row_locks
def test_conflict_of_versions_is_cured_by_reading_again(database):
    Article.objects.using(database).create()
    interfering = [1]

    @retry_on_conflict(using=database)
    def work() -> None:
        mine = Article.objects.using(database).get()
        while interfering:
            with second_session(database) as other:
                column = other.ops.quote_name("reads")
                rows(other, f"UPDATE testapp_article SET {column} = %s, version = version + 1", interfering.pop())
        mine.reads += 10
        mine.save_with_version()

    work()
    assert Article.objects.using(database).get().reads == 11


@with_row_locks
def test_row_that_the_second_attempt_locks_cannot_be_lost_again(database):
    key = Article.objects.using(database).create().pk
    runs: list[bool] = []

    @retry_on_conflict(using=database)
    def work() -> None:
        runs.append(is_retry())
        articles = Article.objects.using(database)
        mine = articles.lock_row(key) if is_retry() else articles.get(pk=key)
        with second_session(database) as other:
            wait = "SET lock_timeout = '50ms'" if other.vendor == "postgresql" else "SET innodb_lock_wait_timeout = 0"
            rows(other, wait)
            if is_retry():
                with pytest.raises(OperationalError):
                    rows(other, "UPDATE testapp_article SET version = version + 1")
            else:
                rows(other, "UPDATE testapp_article SET version = version + 1")
        mine.reads += 10
        mine.save_with_version()

    work()
    assert runs == [False, True]
    assert Article.objects.using(database).get().reads == 10


@on_postgresql
def test_serialization_failure_is_cured_by_a_new_snapshot(database):
    counter = add(database, "a")
    interfering = [1]

    @retry_on_conflict(using=database)
    def work() -> None:
        rows(connections[database], "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        mine = Counter.objects.using(database).get(pk=counter.pk)
        while interfering:
            with second_session(database) as other:
                rows(other, "UPDATE testapp_counter SET value = value + %s", interfering.pop())
        mine.value += 10
        mine.save()

    work()
    assert Counter.objects.using(database).get().value == 11


@on_postgresql
def test_serialization_failure_at_commit_is_cured_too(database):
    add(database, "a")
    add(database, "b")
    serializable = "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"
    total = "SELECT sum(value) FROM testapp_counter"
    attempts = Attempts()

    @retry_on_conflict(using=database)
    def work() -> int:
        mine = connections[database]
        rows(mine, serializable)
        ((seen,),) = rows(mine, total)
        rows(mine, "UPDATE testapp_counter SET value = %s WHERE name = 'a'", seen + 1)
        if attempts.make() == 1:
            with second_session(database) as other:
                rows(other, f"BEGIN; {serializable}")
                ((theirs,),) = rows(other, total)
                rows(other, "UPDATE testapp_counter SET value = %s WHERE name = 'b'", theirs + 10)
                rows(other, "COMMIT")
        return seen

    assert work() == 10
    assert attempts.made == 2


@with_row_locks
def test_deadlock_is_cured_by_starting_over(database):
    one, other = (Stock.objects.using(database).create() for _ in range(2))
    both_hold = threading.Barrier(2)
    met, runs = threading.local(), []

    @retry_on_conflict(using=database)
    def cross(first: models.Model, second: models.Model) -> None:
        runs.append(1)
        Stock.objects.using(database).lock_row(first.pk)
        if not hasattr(met, "once"):
            met.once = True
            both_hold.wait(30)
        row = Stock.objects.using(database).lock_row(second.pk)
        row.pieces += 1
        row.save()

    def in_thread(*pair: models.Model) -> None:
        cross(*pair)
        connections[database].close()

    threads = [threading.Thread(target=in_thread, args=pair) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) >= 3  # a victim that starts over may lock its row before the other wakes, and they meet again
    assert [row.pieces for row in Stock.objects.using(database).all()] == [1, 1]


@with_row_locks
def test_locked_row_is_tried_again(database):
    stock = Stock.objects.using(database).create()
    with second_session(database) as other:
        other.set_autocommit(False)
        rows(other, "SELECT 1 FROM testapp_stock FOR UPDATE")
        runs: list[int] = []

        @retry_on_conflict(using=database)
        def work() -> None:
            runs.append(1)
            if len(runs) == 2:
                other.rollback()
            Stock.objects.using(database).lock_row(stock.pk, nowait=True)

        work()
        assert len(runs) == 2
        other.set_autocommit(True)


@pytest.mark.parametrize("database", ["default"], indirect=True)
def test_busy_sqlite_is_tried_again(database):
    rows(connections[database], "PRAGMA busy_timeout = 0")
    with second_session(database) as other:
        rows(other, "BEGIN IMMEDIATE")
        attempts = Attempts()

        def begin(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
            if sql.startswith("BEGIN") and attempts.make() == 2:
                rows(other, "ROLLBACK")
            return execute(sql, *rest)

        with connections[database].execute_wrapper(begin):
            retry_on_conflict(using=database)(lambda: add(database, "a"))()
    assert attempts.made == 2
    assert committed(database) == {"a"}


@on_postgresql
def test_dead_connection_is_not_tried_again(database):
    attempts = Attempts()

    @retry_on_conflict(using=database)
    def work() -> None:
        attempts.make()
        rows(connections[database], "SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(OperationalError) as caught:
        work()
    assert classify(caught.value) is DatabaseFailure.DISCONNECT
    assert attempts.made == 1


# coroutines


async def test_coroutine_function_is_run_again_without_a_transaction(use_database):
    await sync_to_async(use_database)("default")
    attempts = Attempts(stale(), stale())

    @retry_on_conflict(attempts=3)
    async def work(name: str) -> int:
        assert not await sync_to_async(in_transaction)()
        assert not await Counter.objects.acount()
        return attempts.make()

    assert inspect.iscoroutinefunction(work)
    assert await work("a") == 3


async def test_coroutine_function_gives_up_as_a_function_does():
    attempts = Attempts(stale(), stale())

    @retry_on_conflict(attempts=2)
    async def work() -> None:
        attempts.make()

    with pytest.raises(StaleObject) as caught:
        await work()
    assert caught.value.__notes__ == ["gave up after 2 attempts"]


async def test_cancelled_coroutine_is_not_run_again():
    started, runs = asyncio.Event(), []

    @retry_on_conflict(attempts=5)
    async def work() -> None:
        runs.append(1)
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == [1]


async def test_function_with_a_transaction_is_called_in_a_thread(use_database):
    await sync_to_async(use_database)("default")
    attempts = Attempts(stale())

    @retry_on_conflict(attempts=2)
    def work() -> int:
        assert connections["default"].in_atomic_block
        return attempts.make()

    assert await sync_to_async(work)() == 2


# many writers


def increment(_: processes.Link, database: str, isolation: str, pk: int, times: int, kind: str) -> None:
    connection = connections[database]
    if isolation:
        prefix = "SET SESSION CHARACTERISTICS AS" if connection.vendor == "postgresql" else "SET SESSION"
        rows(connection, f"{prefix} TRANSACTION ISOLATION LEVEL {isolation}")
    for _round in range(times):
        INCREMENTS[kind](database, pk)


def by_version(database: str, pk: int) -> None:
    article = Article.objects.using(database).get(pk=pk)
    article.reads += 1
    article.save_with_version()


def by_isolation(database: str, pk: int) -> None:
    article = Article.objects.using(database).get(pk=pk)
    models.QuerySet(Article, using=database).filter(pk=pk).update(reads=article.reads + 1)


def again(function: Callable[..., None]) -> Callable[..., None]:
    return lambda database, pk: retry_on_conflict(attempts=1000, within=60, using=database)(function)(database, pk)


INCREMENTS = {"version": again(by_version), "isolation": again(by_isolation)}


@pytest.mark.parametrize(
    ("database", "isolation", "kind"),
    [
        ("default", "", "version"),
        ("default", "", "isolation"),  # SQLite, IMMEDIATE: one writer at a time
        ("postgresql", "", "version"),
        ("postgresql", "REPEATABLE READ", "version"),
        ("postgresql", "SERIALIZABLE", "isolation"),
        ("mariadb", "", "version"),
        ("mariadb", "REPEATABLE READ", "version"),
        ("mariadb", "SERIALIZABLE", "isolation"),
    ],
    indirect=["database"],
)
def test_no_update_of_several_processes_is_lost(database, isolation, kind):
    article = Article.objects.using(database).create()
    processes.run(increment, [(database, isolation, article.pk, 30, kind)] * 4)
    assert Article.objects.using(database).get().reads == 120


@with_row_locks
def test_without_versions_or_isolation_an_update_is_lost(database):
    """Another session writes between the function's read and its write."""
    article = Article.objects.using(database).create()

    @retry_on_conflict(using=database)
    def work() -> None:
        mine = Article.objects.using(database).get()
        with second_session(database) as other:
            column = other.ops.quote_name("reads")
            rows(other, f"UPDATE testapp_article SET {column} = {column} + 1")
        models.QuerySet(Article, using=database).filter(pk=article.pk).update(reads=mine.reads + 1)

    work()
    assert Article.objects.using(database).get().reads == 1
