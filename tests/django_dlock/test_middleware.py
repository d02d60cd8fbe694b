"""LockMiddleware behind Django's real handlers, sync and async."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import connections, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path

from django_dlock import errors as django_errors
from django_dlock.conf import stores
from django_dlock.locks import lock
from django_dlock.middleware import LockMiddleware
from dlock_core import errors
from dlock_core.owner import request_line
from tests.testapp.models import Counter

ERRORS = {
    "timeout": errors.AcquireTimeout("order:42", waited=1, retry_after=3),
    "row": django_errors.RowLocked("order:42"),
    "lost": django_errors.LeaseLost("order:42"),
    "down": errors.BackendUnavailable("order:42", reason="refused"),
    "mistake": errors.NotSupported("no row locks here"),
    "value": ValueError("not ours"),
}


def fail(request, kind):
    raise ERRORS[kind]


async def afail(request, kind):
    raise ERRORS[kind]


def who(request):
    return HttpResponse(request_line.get())


async def awho(request):
    return HttpResponse(request_line.get())


def write_and_fail(request):
    Counter.objects.create(name="half done")
    raise ERRORS["lost"]


def fail_late(request):
    class Failing(SimpleTemplateResponse):
        @property
        def rendered_content(self):
            raise ERRORS["row"]

    return Failing("no template")


def forget(request, *parts):
    for part in parts or ("a",):
        lock("order", part).acquire()
    return HttpResponse("done")


def forget_two(request):
    return forget(request, "a", "b")


async def aforget(request):
    await lock("order", "a").aacquire()
    return HttpResponse("done")


def forget_and_fail(request):
    lock("order", "a").acquire()
    raise ERRORS["timeout"]


def take(request):
    with lock("order", "a", wait=0):
        return HttpResponse("done")


def stream_late(request):
    lease = lock("order", "a").acquire()
    return StreamingHttpResponse(str(lease.remaining() > 0) for _ in range(1))


urlpatterns = [
    path("fail/<kind>", fail),
    path("afail/<kind>", afail),
    path("who/<path:rest>", lambda request, rest: who(request)),
    path("awho", awho),
    path("write-and-fail", write_and_fail),
    path("fail-late", fail_late),
    path("forget", forget),
    path("forget-two", forget_two),
    path("aforget", aforget),
    path("forget-and-fail", forget_and_fail),
    path("take", take),
    path("stream-late", stream_late),
]


class Failing:
    """An inner middleware that raises the error named by the header X-Fail."""

    sync_capable = async_capable = True

    def __init__(self, get_response):
        self.get_response, self.is_async = get_response, iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request):
        return self.afail(request) if self.is_async else self.fail(self.get_response(request), request)

    async def afail(self, request):
        return self.fail(await self.get_response(request), request)

    def fail(self, response, request):
        raise ERRORS[request.headers["X-Fail"]]


class Stamp:
    """An outer middleware that marks every response."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        response = self.get_response(request)
        response["X-Stamp"] = "1"
        return response


OURS = "django_dlock.middleware.LockMiddleware"


@pytest.fixture(autouse=True)
def _settings():
    stores = {"default": {"BACKEND": "memory://", "TTL": 30, "WAIT": 0}}
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.Stamp", OURS], DLOCK=stores):
        yield


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def aclient():
    return AsyncClient()


@pytest.fixture
def dlock_log(caplog):
    caplog.set_level(logging.INFO, logger="dlock")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "dlock"]


EVERY_STATUS = [("timeout", 423), ("row", 423), ("lost", 409), ("down", 503)]


@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
def test_a_lock_error_of_a_view_is_an_answer(client, kind, status):
    response = client.get(f"/fail/{kind}")

    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    assert json.loads(response.content)["status"] == status
    assert response["X-Stamp"] == "1"


@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
@pytest.mark.parametrize("view", ["fail", "afail"])
async def test_a_lock_error_is_an_answer_under_asgi(aclient, view, kind, status):
    assert (await aclient.get(f"/{view}/{kind}")).status_code == status


def test_an_async_view_under_wsgi_is_answered_alike(client):
    assert client.get("/afail/timeout").status_code == 423


def test_the_answer_says_when_to_come_back(client):
    assert client.get("/fail/timeout")["Retry-After"] == "3"


def test_a_browser_gets_a_page(client):
    response = client.get("/fail/timeout", headers={"Accept": "text/html,*/*;q=0.8"})

    assert response["Content-Type"] == "text/html; charset=utf-8"
    assert b"<h1>In use by someone else</h1>" in response.content


@pytest.mark.parametrize(("kind", "error"), [("mistake", errors.NotSupported), ("value", ValueError)])
def test_a_mistake_of_the_program_stays_an_error(client, kind, error):
    with pytest.raises(error):
        client.get(f"/fail/{kind}")

    client.raise_request_exception = False
    assert client.get(f"/fail/{kind}").status_code == 500


def test_an_error_while_a_template_renders_is_answered(client):
    assert client.get("/fail-late").status_code == 423


INNER = override_settings(MIDDLEWARE=[f"{__name__}.Stamp", OURS, f"{__name__}.Failing"])


@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
def test_a_lock_error_of_an_inner_middleware_is_answered_too(client, kind, status):
    with INNER:
        response = client.get("/who/x", headers={"X-Fail": kind})

    assert (response.status_code, response["X-Stamp"]) == (status, "1")


@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
async def test_a_lock_error_of_an_inner_middleware_is_answered_under_asgi(aclient, kind, status):
    with INNER:
        assert (await aclient.get("/awho", headers={"X-Fail": kind})).status_code == status


@pytest.mark.parametrize(("kind", "error"), [("mistake", errors.NotSupported), ("value", ValueError)])
def test_other_errors_of_an_inner_middleware_stay_with_django(client, kind, error):
    with INNER, pytest.raises(error):
        client.get("/who/x", headers={"X-Fail": kind})


def test_a_missing_page_is_still_a_404(client):
    assert client.get("/nowhere").status_code == 404


def test_the_answer_is_made_after_the_rollback_of_atomic_requests(client, database, monkeypatch):
    seen = []
    answered = LockMiddleware.process_exception

    def look(self, request, exception):
        seen.append((transaction.get_connection(database).in_atomic_block, Counter.objects.using(database).count()))
        return answered(self, request, exception)

    monkeypatch.setattr(LockMiddleware, "process_exception", look)
    monkeypatch.setitem(connections[database].settings_dict, "ATOMIC_REQUESTS", True)
    monkeypatch.setattr("django.db.router.db_for_write", lambda *_, **__: database)

    assert client.post("/write-and-fail").status_code == 409
    assert seen == [(False, 0)]


def test_the_request_is_the_owner_while_it_runs_and_not_after(client):
    assert client.post("/who/42/ship?card=4711").content == b"POST /who/42/ship"
    assert request_line.get() == ""


async def test_the_request_is_the_owner_under_asgi(aclient):
    assert (await aclient.get("/awho?card=4711")).content == b"GET /awho"
    assert request_line.get() == ""


def test_a_hostile_path_is_one_short_line():
    request = RequestFactory().get("/who/%0A%1B%5B31m%E2%80%AE" + "x" * 500)
    line = LockMiddleware(who)(request).content.decode()

    assert line.startswith("GET /who/??[31m?xxx")
    assert len(line) == 200


def test_a_forgotten_lease_is_released_with_a_warning(client, dlock_log):
    assert client.post("/forget?card=4711").status_code == 200

    assert dlock_log() == ["POST /forget ended without releasing order:a: use `with lock(...)` or @locked"]
    assert client.get("/take").status_code == 200


def test_all_forgotten_leases_are_named(client, dlock_log):
    client.post("/forget-two")

    (line,) = dlock_log()
    assert "order:a" in line
    assert "order:b" in line


async def test_a_forgotten_lease_is_released_under_asgi(aclient, dlock_log):
    assert (await aclient.post("/aforget")).status_code == 200

    assert dlock_log() == ["POST /aforget ended without releasing order:a: use `with lock(...)` or @locked"]
    assert (await aclient.get("/take")).status_code == 200


async def test_a_sync_view_under_asgi_forgets_no_lease_either(aclient, dlock_log):
    assert (await aclient.post("/forget")).status_code == 200

    assert dlock_log() == ["POST /forget ended without releasing order:a: use `with lock(...)` or @locked"]


def test_a_lease_forgotten_by_a_failing_view_is_released(client):
    assert client.get("/forget-and-fail").status_code == 423
    assert client.get("/take").status_code == 200


async def test_a_cancelled_request_leaves_no_lease():
    reached = asyncio.Event()

    async def get_response(request):
        await lock("order", "a").aacquire()
        reached.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(LockMiddleware(get_response)(RequestFactory().get("/")))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await (await lock("order", "a").aacquire()).arelease()


def test_an_orderly_request_warns_of_nothing(client, dlock_log):
    client.get("/take")

    assert dlock_log() == []


def test_a_stream_is_sent_without_the_lease_that_its_view_forgot(client):
    assert client.get("/stream-late").getvalue() == b"False"


def test_a_store_that_fails_while_releasing_does_not_spoil_the_answer(client, monkeypatch, dlock_log):
    def fail():
        raise ERRORS["down"]

    monkeypatch.setattr("django_dlock.locks.release_forgotten", fail)

    assert client.get("/who/x").status_code == 200
    assert "could not be released" in dlock_log()[0]


async def test_a_store_that_fails_while_releasing_does_not_spoil_the_answer_under_asgi(aclient, monkeypatch, dlock_log):
    async def fail():
        raise ERRORS["down"]

    monkeypatch.setattr("django_dlock.locks.release_forgotten_async", fail)

    assert (await aclient.get("/awho")).status_code == 200
    assert "could not be released" in dlock_log()[0]


@pytest.mark.parametrize(("kind", "level"), [("timeout", "INFO"), ("down", "ERROR")])
def test_a_conflict_is_everyday_and_a_missing_store_an_error_in_the_log(client, caplog, kind, level):
    caplog.set_level(logging.INFO, logger="dlock")
    client.get(f"/fail/{kind}?card=4711")

    (record,) = [record for record in caplog.records if record.name == "dlock"]
    assert record.levelname == level
    assert record.getMessage().startswith(f"GET /fail/{kind}: ")
    assert "4711" not in record.getMessage()


def test_the_middleware_works_around_any_callable():
    def get_response(request):
        raise ERRORS["row"]

    assert LockMiddleware(get_response)(RequestFactory().get("/")).status_code == 423


def test_a_decorated_callable_keeps_its_decorator():
    from functools import wraps

    @wraps(fail)
    def get_response(request):
        return HttpResponse("decorated")

    assert LockMiddleware(get_response)(RequestFactory().get("/")).content == b"decorated"


def test_stores_are_made_when_the_server_starts_and_one_that_is_wrong_does_not_stop_it():
    with override_settings(DLOCK={"wrong": {"BACKEND": "nowhere://"}, "right": {"BACKEND": "memory://"}}):
        LockMiddleware(lambda _: HttpResponse())
        assert list(vars(stores._connections)) == ["right"]
    with override_settings(DLOCK="nonsense"):
        LockMiddleware(lambda _: HttpResponse())
