"""What Django and its tools do for the application's statements, they also do for ours on Django's connections."""

from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_dlock import lock
from tests.testapp.models import Counter

pytestmark = [
    pytest.mark.usefixtures("store"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.parametrize("fence", ["transaction", "lease"]),
]

Form = Literal["transaction", "lease"]


def work(database: str, fence: Form) -> None:
    with lock("order", 42, using=database, fence=fence), transaction.atomic(using=database):
        Counter.objects.using(database).count()


def of_the_fence(statements: list[str]) -> int:
    return sum("dlock_" in sql for sql in statements)


EXPECTED = {"transaction": 1, "lease": 2}


def test_they_are_logged_as_soon_as_queries_are_and_no_longer(database: str, fence: Form) -> None:
    work(database, fence)
    with CaptureQueriesContext(connections[database]) as logged:
        work(database, fence)
    assert of_the_fence([query["sql"] for query in logged.captured_queries]) == EXPECTED[fence]
    before = len(connections[database].queries_log)
    work(database, fence)
    assert len(connections[database].queries_log) == before


def test_an_execute_wrapper_is_called_for_them(database: str, fence: Form) -> None:
    heard: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        heard.append(sql)
        return execute(sql, *rest)

    work(database, fence)
    with connections[database].execute_wrapper(wrapper):
        work(database, fence)
    assert of_the_fence(heard) == EXPECTED[fence]


def test_a_tool_that_takes_the_place_of_cursor_makes_theirs_too(
    database: str, fence: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections[database]
    make, made = connection.cursor, []
    work(database, fence)
    with monkeypatch.context() as tool:
        tool.setattr(connection, "cursor", lambda *args, **more: made.append(make(*args, **more)) or made[-1])
        work(database, fence)
    assert len(made) == EXPECTED[fence] + 1
    for each in made:
        each.close()
    work(database, fence)
    assert len(made) == EXPECTED[fence] + 1


def test_a_connection_that_was_closed_or_has_died_is_replaced_where_django_replaces_it(
    database: str, fence: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections[database]
    work(database, fence)
    connection.close()
    work(database, fence)
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    connection.close()
    work(database, fence)
    with closing(connection.copy()) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid])
    connection.close_if_unusable_or_obsolete()  # a new request
    work(database, fence)


def test_each_connection_of_a_pool_is_asked_for_the_functions_once(database: str, fence: Form) -> None:
    connection = connections[database]
    work(database, fence)
    first, connection.connection = connection.connection, None
    work(database, fence)
    second, connection.connection = connection.connection, first
    with closing(second), CaptureQueriesContext(connection) as logged:
        work(database, fence)
        connection.connection = second
        work(database, fence)
        connection.connection = first
    assert not [query for query in logged.captured_queries if "to_regprocedure" in query["sql"]]
