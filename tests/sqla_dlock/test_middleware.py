"""LockMiddleware in real frameworks and behind real servers, ASGI and WSGI."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import socket
import sys
import threading
from contextlib import contextmanager
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from flask import Flask
from sqlalchemy.orm.exc import StaleDataError
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from werkzeug.test import Client as WerkzeugClient

from dlock_core import errors
from dlock_core.owner import request_line
from sqla_dlock.middleware import LockMiddleware, WSGILockMiddleware, answer_asgi, answer_flask
from tests.processes import worker

ERRORS = {
    "timeout": errors.AcquireTimeout("order:42", waited=1, retry_after=3),
    "row": errors.RowLocked("order:42"),
    "object": errors.StaleObject(object(), expected=1),
    "token": errors.StaleToken("order:42", token=1),
    "lost": errors.LeaseLost("order:42"),
    "down": errors.BackendUnavailable("order:42", reason="refused"),
    "merge": StaleDataError("Version id '1' on merged state does not match existing version '2'"),
    "mistake": errors.NotSupported("no row locks here"),
    "value": ValueError("not ours"),
}
EVERY_STATUS = [
    ("timeout", 423),
    ("row", 423),
    ("object", 409),
    ("token", 409),
    ("lost", 409),
    ("merge", 409),
    ("down", 503),
]
MISTAKES = [("mistake", errors.NotSupported), ("value", ValueError)]


def fail(kind):
    raise ERRORS[kind]


async def afail(kind):
    raise ERRORS[kind]


def who():
    return request_line.get()


async def awho():
    return request_line.get()


def fastapi_app():
    app = FastAPI()
    app.get("/fail/{kind}")(fail)
    app.get("/afail/{kind}")(afail)
    app.post("/who/{rest:path}", response_class=PlainTextResponse)(who)
    app.post("/awho/{rest:path}", response_class=PlainTextResponse)(awho)

    async def late():
        yield b"begun"
        raise ERRORS["lost"]

    app.get("/late")(lambda: StreamingResponse(late()))

    @app.websocket("/socket/{kind}")
    async def talk(websocket: WebSocket, kind: str):
        await websocket.accept()
        await websocket.send_text(request_line.get() or "nobody")
        raise ERRORS[kind]

    return app


def starlette_app():
    def starlette_fail(request):
        fail(request.path_params["kind"])

    async def starlette_afail(request):
        fail(request.path_params["kind"])

    def starlette_who(request):
        return PlainTextResponse(who())

    async def starlette_awho(request):
        return PlainTextResponse(await awho())

    return Starlette(
        routes=[
            Route("/fail/{kind}", starlette_fail),
            Route("/afail/{kind}", starlette_afail),
            Route("/who/{rest:path}", starlette_who, methods=["POST"]),
            Route("/awho/{rest:path}", starlette_awho, methods=["POST"]),
        ]
    )


def flask_app():
    app = Flask(__name__)
    app.get("/fail/<kind>")(fail)
    app.post("/who/<path:rest>")(lambda rest: who())
    return app


def with_middleware(app):
    app.add_middleware(LockMiddleware)
    return app


def with_handler(app):
    app.add_exception_handler(errors.DLockError, answer_asgi)
    app.add_exception_handler(StaleDataError, answer_asgi)
    return app


def with_both(app):
    return with_handler(with_middleware(app))


@pytest.fixture
def dlock_log(caplog):
    caplog.set_level(logging.INFO, logger="dlock")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "dlock"]


# ASGI


async def request(app, method, path, **options):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        return await client.request(method, path, **options)


@pytest.fixture(params=[fastapi_app, starlette_app])
def asgi(request):
    return request.param()


@pytest.fixture(params=[with_middleware, with_handler, with_both])
def answering(request, asgi):
    return request.param(asgi)


@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
@pytest.mark.parametrize("view", ["fail", "afail"])
async def test_a_lock_error_of_a_handler_is_an_answer(answering, view, kind, status):
    response = await request(answering, "GET", f"/{view}/{kind}")

    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json()["status"] == status


async def test_the_answer_says_when_to_come_back(answering):
    assert (await request(answering, "GET", "/fail/timeout")).headers["Retry-After"] == "3"


async def test_a_browser_gets_a_page(answering):
    response = await request(answering, "GET", "/fail/timeout", headers={"Accept": "text/html,*/*;q=0.8"})

    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<h1>In use by someone else</h1>" in response.text


@pytest.mark.parametrize(("kind", "error"), MISTAKES)
async def test_a_mistake_of_the_program_stays_an_error(answering, kind, error):
    with pytest.raises(error):
        await request(answering, "GET", f"/fail/{kind}")


async def test_a_missing_page_is_still_a_404(answering):
    assert (await request(answering, "GET", "/nowhere")).status_code == 404


@pytest.mark.parametrize("view", ["who", "awho"])
async def test_the_request_is_the_owner_while_it_runs_and_not_after(asgi, view):
    response = await request(with_middleware(asgi), "POST", f"/{view}/42/ship?card=4711")

    assert response.text == f"POST /{view}/42/ship"
    assert request_line.get() == ""


@pytest.mark.parametrize(("kind", "level"), [("timeout", "INFO"), ("down", "ERROR")])
async def test_a_conflict_is_everyday_and_a_missing_store_an_error_in_the_log(answering, caplog, kind, level):
    caplog.set_level(logging.INFO, logger="dlock")
    await request(answering, "GET", f"/fail/{kind}?card=4711")

    (record,) = [record for record in caplog.records if record.name == "dlock"]
    assert record.levelname == level
    assert record.getMessage() == f"GET /fail/{kind}: {ERRORS[kind]}"


async def test_requests_at_the_same_time_keep_their_names():
    app, reached, named = fastapi_app(), asyncio.Barrier(3), []

    @app.get("/meet/{number}")
    async def meet(number: int):
        await reached.wait()
        named.append((number, request_line.get()))

    with_middleware(app)
    await asyncio.gather(*(request(app, "GET", f"/meet/{number}") for number in range(3)))
    assert sorted(named) == [(number, f"GET /meet/{number}") for number in range(3)]


async def test_a_broader_handler_takes_the_error_before_the_middleware_unless_ours_stands_beside_it():
    app = with_middleware(fastapi_app())

    @app.exception_handler(OSError)
    async def broken(request, error):
        return PlainTextResponse("disk broken?", 500)

    assert (await request(app, "GET", "/fail/timeout")).status_code == 500
    with_handler(app)
    app.middleware_stack = app.build_middleware_stack()
    assert (await request(app, "GET", "/fail/timeout")).status_code == 423


async def test_an_error_after_the_response_has_begun_propagates(dlock_log):
    with pytest.raises(errors.LeaseLost):
        await request(with_middleware(fastapi_app()), "GET", "/late")

    assert dlock_log() == []


@pytest.mark.parametrize("install", [with_middleware, with_handler])
async def test_a_websocket_is_left_alone(install):
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/socket/row", "headers": [], "query_string": b"", "subprotocols": []}
    with pytest.raises(errors.RowLocked):
        await install(fastapi_app())(scope, receive, send)
    assert [message.get("text") for message in sent] == [None, "nobody"]


@pytest.mark.parametrize("kind", ["lifespan", "websocket", "something new"])
async def test_what_is_no_request_passes_untouched(kind):
    seen = []

    async def app(*arguments):
        seen.extend(arguments)

    scope, receive, send = {"type": kind}, object(), object()
    await LockMiddleware(app)(scope, receive, send)
    assert [id(each) for each in seen] == [id(scope), id(receive), id(send)]


async def raw(app, method="GET"):
    """Return everything that an application sends."""
    sent = []

    async def send(message):
        sent.append(message)

    await LockMiddleware(app)({"type": "http", "method": method, "path": "/", "headers": []}, None, send)
    return sent


async def test_an_answer_to_head_has_no_body():
    async def app(scope, receive, send):
        fail("row")

    start, body = await raw(app, "HEAD")
    assert (start["status"], body["body"]) == (423, b"")
    assert int(dict(start["headers"])[b"content-length"]) > 0


async def test_a_message_before_the_response_is_not_its_beginning():
    async def app(scope, receive, send):
        await send({"type": "http.response.push"})
        fail("row")

    assert [message.get("status") for message in await raw(app)] == [None, 423, None]


async def test_every_accept_header_counts():
    response = await request(
        with_middleware(fastapi_app()),
        "GET",
        "/fail/row",
        headers=[("Accept", "application/json;q=0.1"), ("Accept", "text/html")],
    )

    assert response.headers["Content-Type"] == "text/html; charset=utf-8"


async def test_cancelling_a_request_is_no_answer():
    reached, sent = asyncio.Event(), []

    async def app(scope, receive, send):
        reached.set()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    task = asyncio.create_task(LockMiddleware(app)(scope, None, send))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sent


def serve(link):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link.say(listener.getsockname()[1])
        uvicorn.Server(uvicorn.Config(with_middleware(fastapi_app()), log_level="critical")).run(sockets=[listener])


@contextmanager
def connecting(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def ask(connection, method, path):
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


def test_uvicorn_sends_the_answers_and_the_connection_stays_usable():
    with worker(serve) as server, connecting(server.hear()) as connection:
        for kind, status in EVERY_STATUS:
            code, body = ask(connection, "GET", f"/fail/{kind}")
            assert code == json.loads(body)["status"] == status
        assert ask(connection, "POST", "/who/42") == (200, b"POST /who/42")
        assert ask(connection, "GET", "/fail/mistake")[0] == 500


def test_uvicorn_breaks_off_a_response_that_had_begun():
    with worker(serve) as server, connecting(server.hear()) as connection, pytest.raises(http.client.IncompleteRead):
        ask(connection, "GET", "/late")


# WSGI


def flask_middleware(app):
    app.wsgi_app = WSGILockMiddleware(app.wsgi_app)
    return app


def flask_handler(app):
    app.register_error_handler(errors.DLockError, answer_flask)
    app.register_error_handler(StaleDataError, answer_flask)
    return app


@pytest.fixture(params=[flask_handler, lambda app: flask_handler(flask_middleware(app))])
def flask(request):
    return request.param(flask_app())


@pytest.mark.parametrize("testing", [False, True])
@pytest.mark.parametrize(("kind", "status"), EVERY_STATUS)
def test_a_lock_error_of_a_flask_view_is_an_answer(flask, kind, status, testing):
    flask.testing = testing
    response = flask.test_client().get(f"/fail/{kind}", headers={"Accept": "text/html"})

    assert response.status_code == status
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"<h1>" in response.data


def test_the_answer_says_when_to_come_back_in_flask(flask):
    response = flask.test_client().get("/fail/timeout")

    assert response.headers["Retry-After"] == "3"
    assert json.loads(response.data)["lock"] == "order:42"


@pytest.mark.parametrize(("kind", "error"), MISTAKES)
def test_a_mistake_of_the_program_stays_an_error_in_flask(flask, kind, error):
    assert flask.test_client().get(f"/fail/{kind}").status_code == 500
    flask.testing = True
    with pytest.raises(error):
        flask.test_client().get(f"/fail/{kind}")


def test_flask_makes_a_500_of_what_only_the_middleware_would_answer():
    assert flask_middleware(flask_app()).test_client().get("/fail/row").status_code == 500


def test_the_request_is_the_owner_in_flask(flask):
    middleware = isinstance(flask.wsgi_app, WSGILockMiddleware)
    response = flask.test_client().post("/who/42/ship?card=4711")

    assert response.text == ("POST /who/42/ship" if middleware else "")
    assert request_line.get() == ""


def test_a_conflict_in_flask_is_logged_once(flask, dlock_log):
    flask.test_client().get("/fail/row?card=4711")

    assert dlock_log() == [f"GET /fail/row: {ERRORS['row']}"]


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def served(app):
    """Yield a connection to a real WSGI server, with a validator of PEP 3333 on both sides of the middleware."""
    with make_server("127.0.0.1", 0, validator(WSGILockMiddleware(validator(app))), handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with connecting(server.server_port) as connection:
                yield connection
        finally:
            server.shutdown()
            thread.join()


HEADERS = [("Content-Type", "text/plain")]


class Recording:
    """A body that notes when it is closed, and may fail after its last piece."""

    def __init__(self, pieces, error=None):
        self.pieces, self.error, self.lines, self.is_closed = iter(pieces), error, [], False

    def __iter__(self):
        return self

    def __next__(self):
        self.lines.append(request_line.get())
        piece = next(self.pieces, None)
        if piece is None:
            raise self.error or StopIteration
        return piece

    def close(self):
        self.lines.append(request_line.get())
        self.is_closed = True


def test_an_error_before_the_first_byte_of_a_stream_is_answered():
    body = Recording([], ERRORS["row"])

    def app(environ, start_response):
        start_response("200 OK", HEADERS)
        return body

    with served(app) as connection:
        assert ask(connection, "GET", "/")[0] == 423
    assert body.is_closed


def test_empty_pieces_are_no_bytes():
    def app(environ, start_response):
        start_response("200 OK", HEADERS)
        return Recording([b"", b""], ERRORS["row"])

    heads = []
    pieces = list(WSGILockMiddleware(app)(environ(), lambda *head: heads.append(head)))
    assert [head[0] for head in heads] == ["200 OK", "423 Locked"]
    assert heads[1][2][1] is ERRORS["row"]
    assert json.loads(b"".join(pieces))["status"] == 423


def test_an_error_after_the_first_byte_propagates(dlock_log):
    body, seen = Recording([b"begun"], ERRORS["row"]), []

    def app(environ, start_response):
        start_response("200 OK", HEADERS)
        return body

    response = WSGILockMiddleware(app)(environ(), lambda *head: seen.append(head))
    assert next(response) == b"begun"
    with pytest.raises(errors.RowLocked):
        next(response)
    response.close()
    assert (len(seen), body.is_closed, dlock_log()) == (1, True, [])


@pytest.mark.parametrize("begin", [False, True])
def test_an_error_of_the_application_itself_is_answered_even_if_it_had_begun(begin):
    def app(environ, start_response):
        if begin:
            start_response("200 OK", HEADERS)
        fail("lost")

    with served(app) as connection:
        code, body = ask(connection, "GET", "/")
    assert code == json.loads(body)["status"] == 409


def test_a_commit_in_flasks_teardown_that_fails_is_answered():
    """Flask tears down after it has begun the response and before the server has sent it."""
    app = flask_app()
    app.teardown_appcontext(lambda error: fail("lost"))

    with served(app) as connection:
        assert ask(connection, "POST", "/who/42")[0] == 409


def test_an_application_that_is_a_generator_is_answered():
    def app(environ, start_response):
        fail("timeout")
        yield b"never"

    with served(app) as connection:
        assert ask(connection, "GET", "/")[0] == 423


def test_a_server_that_has_sent_the_headers_has_the_last_word():
    def app(environ, start_response):
        start_response("200 OK", HEADERS)(b"written at once")
        fail("row")

    def start_response(status, headers, exc_info=None):
        if exc_info is not None:
            raise exc_info[1]
        return io.BytesIO().write

    with pytest.raises(errors.RowLocked):
        WSGILockMiddleware(app)(environ(), start_response)


def test_an_application_may_replace_its_own_response():
    def app(environ, start_response):
        start_response("200 OK", HEADERS)
        try:
            fail("value")
        except ValueError:
            start_response("500 Sorry", HEADERS, sys.exc_info())
        return [b"sorry"]

    with served(app) as connection:
        assert ask(connection, "GET", "/") == (500, b"sorry")


def environ(path="/", **more):
    made = {"PATH_INFO": path, **more}
    setup_testing_defaults(made)
    return made


def test_the_request_is_the_owner_of_its_whole_stream_and_of_its_close():
    body = Recording([b"a", b"b"])

    def app(environ, start_response):
        start_response("200 OK", HEADERS)
        return body

    response = WSGILockMiddleware(app)(environ("/ship", SCRIPT_NAME="/shop", QUERY_STRING="card=4711"), lambda *_: None)
    for _ in response:
        assert request_line.get() == ""
    response.close()
    assert body.lines == ["GET /shop/ship"] * 4


def test_a_path_in_any_language_is_readable():
    lines = []

    def app(environ, start_response):
        lines.append(request_line.get())
        return []

    for path in ["/bücher", "/\udce9"]:
        raw = path.encode(errors="surrogateescape").decode("latin-1")
        WSGILockMiddleware(app)(environ(raw), lambda *_: None)
    assert lines == ["GET /bücher", "GET /\ufffd"]


def test_an_answer_to_head_has_no_body_in_wsgi():
    def app(environ, start_response):
        fail("row")

    heads = []
    assert list(WSGILockMiddleware(app)(environ(REQUEST_METHOD="HEAD"), lambda *head: heads.append(head))) == [b""]
    assert heads[0][0] == "423 Locked"


def test_an_application_that_had_not_begun_has_nothing_to_be_replaced():
    """Werkzeug's test client cannot replace a response."""

    def app(environ, start_response):
        fail("row")

    assert WerkzeugClient(WSGILockMiddleware(app)).get("/").status_code == 423


def test_other_errors_pass_through_wsgi():
    def app(environ, start_response):
        fail("value")

    with pytest.raises(ValueError, match="not ours"):
        WSGILockMiddleware(app)(environ(), lambda *_: None)
    assert request_line.get() == ""
