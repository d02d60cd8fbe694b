"""`@locked("order", "order_id")` in real frameworks: wherever the COMMIT happens, the lease ends after it."""

import asyncio
import contextlib
import functools
import inspect
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Annotated, Any

import anyio
import anyio.to_thread
import httpx
import pytest
import uvicorn
from celery import Celery
from celery import Task as CeleryTask
from fastapi import Depends, FastAPI
from flask import Flask
from sqlalchemy import event, literal, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from dlock_core.errors import AcquireTimeout, DLockError
from dlock_core.leases.lock import AsyncLock
from dlock_core.leases.lock import Lock as CoreLock
from dlock_core.runtime import BLOCKING, run
from dlock_core.stores import Store
from sqla_dlock import stores
from sqla_dlock.handlers import Locked, _in_threads, locked
from sqla_dlock.locks import lock
from sqla_dlock.middleware import LockMiddleware, WSGILockMiddleware, answer_flask
from sqla_dlock.retry import retry_on_conflict
from sqla_dlock.tie import SessionAcquire, current
from tests import leases
from tests.garbage import collect_garbage
from tests.processes import worker
from tests.sqla_dlock.engines import new_async_engine, new_engine
from tests.sqla_dlock.models import Counter
from tests.waiting import auntil, until

WORK = ["acquired order:42", "BEGIN", "work"]
COMMIT_FIRST = [*WORK, "COMMIT", "released order:42", "response 200"]
COMMIT_LAST = [*WORK, "response 200", "COMMIT", "released order:42"]


class Sorry(Exception):
    """Raised by a handler."""


@pytest.fixture(autouse=True)
def _store(store):
    """Every test has a store."""


@pytest.fixture
def noted(journal):
    """A class of sessions that note their transactions; COMMIT is noted when the database has committed."""

    class Noted(Session):
        pass

    event.listen(Noted, "after_begin", lambda *_: journal.append("BEGIN"))
    event.listen(Noted, "after_commit", lambda *_: journal.append("COMMIT"))
    event.listen(Noted, "after_rollback", lambda *_: journal.append("ROLLBACK"))
    return Noted


@pytest.fixture
def work(journal):
    """What every handler does with its (blocking) session."""

    def do(session, then=None):
        session.add(Counter(name="shipped"))
        session.flush()
        journal.append("work")
        if then is not None:
            raise then
        return "shipped"

    return do


@pytest.fixture(params=["sqlite", "postgresql"])
def maker(request, make_engine, noted):
    return sessionmaker(make_engine(request.param), class_=noted)


@pytest.fixture(params=["aiosqlite", "asyncpg"])
def async_maker(request, make_async_engine, noted):
    return async_sessionmaker(make_async_engine(request.param), sync_session_class=noted)


@pytest.fixture
def is_held(store):
    return lambda: leases.is_held(store)


def answering(app, journal):
    """Note when a response has been sent."""

    async def noting(scope, receive, send):
        status = []

        async def sending(message):
            status.extend([message["status"]] if "status" in message else [])
            await send(message)
            if not message.get("more_body") and message["type"] == "http.response.body":
                journal.append(f"response {status[0]}")

        await app(scope, receive, sending)

    return noting


async def post(app, path="/orders/42/ship"):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        return await client.post(path)


SessionInFile = Annotated[Session, Depends(lambda: Session())]  # noqa: PLW0108 - FastAPI would ask for the parameters of Session


@locked("order", "order_id", fence=False)
def annotated_with_texts(order_id: "int", db: "SessionInFile"):
    return order_id


# FastAPI: four wirings, each with the session's COMMIT before the response and after it


def by_decorator(app, session, work):
    @app.post("/orders/{order_id}/ship")
    @locked("order", "order_id")
    def ship(order_id: int, db: Annotated[Session, session], then: str = ""):
        return work(db, Sorry() if then else None)


def by_dependency(app, session, work):
    once = locked("order", "order_id").dependency(session, order_id=int)

    @app.post("/orders/{order_id}/ship", dependencies=[Depends(once, scope=session.scope)])
    def ship(order_id: int, db: Annotated[Session, session], then: str = ""):
        return work(db, Sorry() if then else None)


def by_async_decorator(app, session, work):
    @app.post("/orders/{order_id}/ship")
    @locked("order", "order_id")
    async def ship(order_id: int, db: Annotated[AsyncSession, session], then: str = ""):
        return await db.run_sync(work, Sorry() if then else None)


def by_async_dependency(app, session, work):
    once = locked("order", "order_id").dependency(session, order_id=int)

    @app.post("/orders/{order_id}/ship", dependencies=[Depends(once, scope=session.scope)])
    async def ship(order_id: int, db: Annotated[AsyncSession, session], then: str = ""):
        return await db.run_sync(work, Sorry() if then else None)


def naively(app, session, work):
    @app.post("/orders/{order_id}/ship")
    def ship(order_id: int, db: Annotated[Session, session]):
        with CoreLock(stores.store_of("default").backend, f"order:{order_id}"):
            return work(db)


def site(maker, wire, scope, work, journal):
    def beginning():
        with maker.begin() as session:
            yield session

    async def async_beginning():
        async with maker.begin() as session:
            yield session

    app = FastAPI()
    app.add_middleware(LockMiddleware)
    get_session = async_beginning if isinstance(maker, async_sessionmaker) else beginning
    wire(app, Depends(get_session, scope=scope), work)
    return answering(app, journal)


@pytest.fixture(params=[("function", COMMIT_FIRST), ("request", COMMIT_LAST)], ids=["function", "request"])
def scope(request):
    """FastAPI's scope of the session dependency, and what happens then."""
    return request.param


@pytest.mark.parametrize("wire", [by_decorator, by_dependency])
async def test_lease_ends_after_the_commit_wherever_fastapi_commits(maker, wire, scope, work, journal):
    response = await post(site(maker, wire, scope[0], work, journal))

    assert (response.status_code, journal) == (200, scope[1])


@pytest.mark.parametrize("wire", [by_async_decorator, by_async_dependency])
async def test_lease_of_an_async_handler_ends_after_the_commit(async_maker, wire, scope, work, journal):
    response = await post(site(async_maker, wire, scope[0], work, journal))

    assert (response.status_code, journal) == (200, scope[1])


async def test_naive_lock_around_a_handler_is_released_before_the_commit(maker, scope, work, journal):
    await post(site(maker, naively, scope[0], work, journal))

    assert journal.index("released order:42") < journal.index("COMMIT")


@pytest.mark.parametrize("wire", [by_decorator, by_dependency])
async def test_exception_in_a_handler_rolls_back_then_releases(maker, wire, scope, work, journal):
    with pytest.raises(Sorry):
        await post(site(maker, wire, scope[0], work, journal), "/orders/42/ship?then=raise")

    assert [entry for entry in journal if "500" not in entry] == [*WORK, "ROLLBACK", "released order:42"]


@pytest.mark.parametrize("wire", [by_async_decorator, by_async_dependency])
async def test_exception_in_an_async_handler_rolls_back_then_releases(async_maker, wire, scope, work, journal):
    with pytest.raises(Sorry):
        await post(site(async_maker, wire, scope[0], work, journal), "/orders/42/ship?then=raise")

    assert [entry for entry in journal if "500" not in entry] == [*WORK, "ROLLBACK", "released order:42"]


@pytest.mark.parametrize("wire", [by_decorator, by_dependency])
async def test_fastapi_still_sees_the_parameters_and_validates_them_first(maker, wire, work, journal):
    app = site(maker, wire, "function", work, journal)

    assert (await post(app, "/orders/many/ship")).status_code == 422
    assert [entry for entry in journal if "order" in entry] == []


@pytest.mark.parametrize("wire", [by_decorator, by_dependency])
async def test_one_order_has_one_name_however_its_number_is_written(maker, wire, work, journal):
    assert (await post(site(maker, wire, "function", work, journal), "/orders/042/ship")).status_code == 200

    assert journal[0] == "acquired order:42"


async def test_annotations_may_be_texts(journal):
    app = FastAPI()
    app.post("/{order_id}")(annotated_with_texts)

    assert (await post(app, "/042")).json() == 42
    assert (await post(app, "/many")).status_code == 422


async def test_dependency_gives_the_lease_and_is_held_before_the_next_one_reads(make_engine, is_held):
    maker = sessionmaker(make_engine("postgresql"))

    def get_session():
        with maker.begin() as session:
            yield session

    once = locked("order", "order_id").dependency(get_session, order_id=int)

    def get_order(lease: Annotated[Any, Depends(once)], db: Annotated[Session, Depends(get_session)]):
        assert is_held()
        assert lease._tied._session() is db
        return db.scalars(select(Counter)).all()

    app = FastAPI()

    @app.post("/{order_id}")
    def ship(lease: Annotated[Any, Depends(once)], order: Annotated[Any, Depends(get_order)]):
        return lease.name

    assert (await post(app, "/42")).json() == "order:42"
    assert not is_held()


@pytest.mark.parametrize("form", ["function", "Depends", "Annotated"])
async def test_dependency_takes_the_session_dependency_in_every_form(make_engine, form):
    maker = sessionmaker(make_engine("sqlite"))
    seen = []

    def get_session():
        with maker.begin() as session:
            seen.append(session)
            yield session

    given = {
        "function": get_session,
        "Depends": Depends(get_session),
        "Annotated": Annotated[Session, Depends(get_session)],
    }
    once = locked("order", "order_id").dependency(given[form], order_id=int)
    app = FastAPI()

    @app.post("/{order_id}", dependencies=[Depends(once)])
    def ship(db: Annotated[Session, Depends(get_session)]):
        return db is seen[0]

    assert (await post(app, "/42")).json() is True
    assert len(seen) == 1


def test_decorator_as_a_dependency_is_refused_at_import():
    def show(order_id: int, lease: Annotated[Any, Depends(locked("order", "order_id"))]):
        pass

    app = FastAPI()
    with pytest.raises(TypeError, match=r"write Depends\(locked\(...\)\.dependency\("):
        app.get("/{order_id}")(show)
    with pytest.raises(TypeError, match=r"write Depends\(locked\(...\)\.dependency\("):
        app.get("/{order_id}", dependencies=[Depends(locked("order", "order_id"))])(lambda order_id: None)
    assert [*inspect.signature(Locked).parameters] == ["parts", "session", "options"]


async def test_dependency_refuses_a_registry_that_has_another_session_in_the_thread_of_the_endpoint(make_engine):
    registry = scoped_session(sessionmaker(make_engine("sqlite")))
    app = FastAPI()

    @app.post(
        "/{order_id}", dependencies=[Depends(locked("order", "order_id").dependency(lambda: registry, order_id=int))]
    )
    def ship(order_id: int):
        raise AssertionError("it would work without the fence")

    with pytest.raises(TypeError, match=r"session for each thread.*yield session"):
        await post(app, "/42")
    assert not registry.registry.has()


_request = ContextVar("_request", default=None)


async def test_dependency_takes_a_registry_of_requests(make_engine, make_async_engine):
    blocking = scoped_session(sessionmaker(make_engine("sqlite")), scopefunc=_request.get)
    awaiting = async_scoped_session(async_sessionmaker(make_async_engine("aiosqlite")), scopefunc=asyncio.current_task)
    once, once_async = (
        locked("order", "order_id").dependency(get, order_id=int) for get in (lambda: blocking, lambda: awaiting)
    )
    app = FastAPI()

    @app.post("/blocking/{order_id}")
    def ship(lease: Annotated[Any, Depends(once)]):
        return lease._tied._session() is blocking()

    @app.post("/awaiting/{order_id}")
    async def aship(lease: Annotated[Any, Depends(once_async)]):
        return lease._tied._session() is awaiting().sync_session

    assert (await post(app, "/blocking/42")).json() is True
    assert (await post(app, "/awaiting/42")).json() is True
    blocking.remove()


async def test_waiting_requests_do_not_take_the_threads_that_the_holder_needs(make_engine, store):
    """FastAPI's pool has 40 threads; here it has one."""
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    maker, threads = sessionmaker(make_engine("postgresql")), set()

    def get_session():
        with maker.begin() as session:
            yield session

    once = locked("order", "order_id").dependency(get_session, order_id=int)
    app = FastAPI()

    @app.post("/{order_id}", dependencies=[Depends(once)])
    def ship(db: Annotated[Session, Depends(get_session)]):
        threads.add(threading.current_thread())
        counter = db.get(Counter, 42)
        counter.value += 1

    with maker.begin() as session:
        session.add(Counter(id=42))
    answers = await asyncio.gather(*(post(app, "/42") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    with maker() as session:
        assert session.get(Counter, 42).value == 8


async def test_blocking_dependency_may_be_set_up_and_torn_down_in_different_threads(make_engine, monkeypatch, is_held):
    maker, threads = sessionmaker(make_engine("postgresql")), []
    kind = type(lock(Session(), "order"))
    enter, leave = SessionAcquire.hold_in_thread, kind.__exit__

    def noting(step):
        def noted(self, *args):
            threads.append(threading.current_thread())
            return step(self, *args)

        return noted

    monkeypatch.setattr(SessionAcquire, "hold_in_thread", noting(enter))
    monkeypatch.setattr(kind, "__exit__", noting(leave))
    occupied, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def get_session():
        with maker.begin() as session:
            yield session

    once = locked("order", "order_id").dependency(get_session, order_id=int)
    app = FastAPI()

    @app.post("/{order_id}", dependencies=[Depends(once)])
    async def ship(db: Annotated[Session, Depends(get_session)]):
        def occupy():
            loop.call_soon_threadsafe(occupied.set)
            go_on.wait(60)

        app.state.task = asyncio.create_task(anyio.to_thread.run_sync(occupy))
        await occupied.wait()  # the thread that took the lease is busy now

    assert (await post(app, "/42")).status_code == 200
    go_on.set()
    await app.state.task
    assert len(set(threads)) == 2
    assert not is_held()


async def test_taken_lock_is_answered_423(make_engine, store, work, journal, noted):
    maker = sessionmaker(make_engine("sqlite"), class_=noted)
    stores.configure(default=Store("default", store, 30.0, 0.0))
    async with AsyncLock(store, "order:42"):
        response = await post(site(maker, by_decorator, "function", work, journal))
    assert (response.status_code, "work" in journal) == (423, False)
    assert int(response.headers["Retry-After"]) >= 1


async def test_lost_lease_is_answered_409_and_nothing_is_written(make_engine, journal, noted):
    maker = sessionmaker(make_engine("sqlite"), class_=noted)

    def wire(app, session, work):
        @app.post("/orders/{order_id}/ship")
        @locked("order", "order_id", ttl=0.05, renew=False)
        def ship(order_id: int, db: Annotated[Session, session]):
            db.add(Counter(name="late"))
            db.flush()
            until(lambda: not current(db)[0].held.remaining())

    response = await post(site(maker, wire, "function", None, journal))
    assert response.status_code == 409
    assert "COMMIT" not in journal
    with maker() as session:
        assert session.scalars(select(Counter)).all() == []


def serve(link, which):
    """Serve a shop in a worker process, whose sessions commit after the response."""
    stores.configure(default="memory://")
    maker = sessionmaker(new_engine("postgresql", pool_size=20))
    async_maker = async_sessionmaker(new_async_engine("asyncpg", pool_size=20))

    def get_session():
        with maker.begin() as session:
            yield session

    async def get_async_session():
        async with async_maker.begin() as session:
            yield session

    def count(session, then):
        session.get(Counter, 42).value += 1

    app = FastAPI()
    wire = WIRES[which]
    wire(app, Depends(get_async_session if "async" in wire.__name__ else get_session, scope="request"), count)

    @app.post("/orders/{order_id}")
    @locked("order", "order_id")
    def counted(order_id: int, db: Annotated[Session, Depends(get_session)]):
        return db.get(Counter, order_id).value

    with socket.create_server(("127.0.0.1", 0)) as listener:
        link.say(listener.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


def ask(port, path):
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="POST")) as response:
        return response.read()


WIRES = [by_decorator, by_dependency, by_async_decorator, by_async_dependency]


@pytest.mark.parametrize("wire", WIRES)
def test_no_increment_is_lost_behind_uvicorn_that_commits_after_the_response(make_engine, wire):
    with sessionmaker(make_engine("postgresql")).begin() as session:
        session.add(Counter(id=42))
    with worker(serve, WIRES.index(wire)) as server, ThreadPoolExecutor(8) as pool:
        port = server.hear()
        list(pool.map(lambda _: [ask(port, "/orders/42/ship") for _ in range(10)], range(8)))
        assert ask(port, "/orders/42") == b"80"


# Starlette


def starlette(maker, journal, *routes):
    class Sessions:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            async with maker.begin() as session:
                scope.setdefault("state", {})["db"] = session
                await self.app(scope, receive, send)

    return answering(Starlette(routes=routes, middleware=[Middleware(Sessions)]), journal)


async def test_handler_of_starlette_names_its_lock_and_session_by_the_request(async_maker, work, journal):
    @locked("order", "request.path_params.order_id", session="request.state.db")
    async def ship(request):
        return PlainTextResponse(await request.state.db.run_sync(work))

    app = starlette(async_maker, journal, Route("/orders/{order_id:int}/ship", ship, methods=["POST"]))
    assert (await post(app)).status_code == 200
    assert journal == COMMIT_LAST


# Flask


@pytest.fixture
def flask(maker, journal):
    """A Flask application with sessions like Flask-SQLAlchemy's: one per application context."""
    from flask import g

    app = Flask(__name__)
    app.db = scoped_session(maker, scopefunc=lambda: id(g._get_current_object()))

    @app.teardown_appcontext
    def remove(error):
        app.db.remove()

    wsgi = app.wsgi_app

    def noting(environ, start_response):
        pieces = list(wsgi(environ, lambda *head: (journal.append(head[0]), start_response(*head))[1]))
        journal.append(f"response {journal.pop(next(i for i, e in enumerate(journal) if e[:3].isdigit()))[:3]}")
        return pieces

    app.wsgi_app = noting
    app.register_error_handler(DLockError, answer_flask)
    return app


def test_flask_view_that_commits_is_under_the_lease(flask, work, journal):
    @flask.post("/orders/<int:order_id>/ship")
    @locked("order", "order_id", session=flask.db)
    def ship(order_id):
        answer = work(flask.db())
        flask.db.commit()
        return answer

    assert flask.test_client().post("/orders/42/ship").status_code == 200
    assert journal == COMMIT_FIRST


def test_flask_application_that_commits_after_the_view_is_still_under_the_lease(flask, work, journal):
    @flask.post("/orders/<int:order_id>/ship")
    @locked("order", "order_id", session=flask.db)
    def ship(order_id):
        return work(flask.db())

    @flask.after_request
    def commit(response):
        flask.db.commit()
        return response

    assert flask.test_client().post("/orders/42/ship").status_code == 200
    assert journal == COMMIT_FIRST


def test_flask_view_that_fails_is_rolled_back_at_teardown_and_then_released(flask, work, journal):
    @flask.post("/orders/<int:order_id>/ship")
    @locked("order", "order_id", session=flask.db)
    def ship(order_id):
        work(flask.db(), Sorry())

    assert flask.test_client().post("/orders/42/ship").status_code == 500
    assert journal == [*WORK, "released order:42", "response 500"]  # close() rolls back without an event


def test_taken_lock_is_answered_423_in_flask(flask, store):
    flask.wsgi_app = WSGILockMiddleware(flask.wsgi_app)

    @flask.post("/orders/<int:order_id>/ship")
    @locked("order", "order_id", session=flask.db, wait=0)
    def ship(order_id):
        pytest.fail("not reached")

    with CoreLock(store, "order:42"):
        assert flask.test_client().post("/orders/42/ship").status_code == 423


# Celery


@pytest.fixture(scope="module")
def celery():
    app = Celery("tests", set_as_current=False, fixups=[])  # Django's fixup would make it the default of the process
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield app
    app.close()


@pytest.mark.parametrize("how", ["args", "kwargs", "direct"])
def test_celery_task_commits_under_the_lease(make_engine, noted, work, journal, celery, how):
    db = scoped_session(sessionmaker(make_engine("sqlite"), class_=noted))

    @celery.task(name=how)
    @locked("order", "order_id", session=db)
    def ship(order_id):
        with db() as session, session.begin():
            work(session)

    if how == "args":
        ship.delay(42)
    elif how == "kwargs":
        ship.apply_async(kwargs={"order_id": 42})
    else:
        ship(42)
    db.remove()
    assert journal == [*WORK, "COMMIT", "released order:42"]


def test_decorator_above_a_task_is_refused(celery):
    @celery.task(name="above")
    def task(db, order_id):
        pass

    with pytest.raises(TypeError, match="below"):
        locked("order", "order_id")(task)


@pytest.mark.parametrize("decorate", [locked("order", "order_id"), retry_on_conflict(sessionmaker())])
def test_decorator_above_a_task_that_is_an_object_is_refused(decorate):
    class Task:
        def __call__(self, db, order_id):
            return self.enqueue(order_id)

        def enqueue(self, order_id):
            pass

    with pytest.raises(TypeError, match="below the decorator that makes a function a task"):
        decorate(Task())


async def test_object_whose_call_is_async_is_decorated_like_an_async_function(async_maker):
    class Ship:
        async def __call__(self, db: AsyncSession, order_id: int) -> int:
            await db.execute(select(Counter))
            return order_id

    async with async_maker.begin() as db:
        assert await locked("order", "order_id")(Ship())(db, 42) == 42
    assert await retry_on_conflict(async_maker)(Ship())(order_id=42) == 42


# A request that is cancelled


@pytest.fixture
def shipping(make_engine):
    """Post to a handler that waits for "order:42" by `.dependency`; the ttl is longer than any test."""
    maker = sessionmaker(make_engine("sqlite"))

    def get_session():
        with maker.begin() as session:
            yield session

    once = locked("order", "order_id", ttl=300, wait=50).dependency(get_session, order_id=int)
    app = FastAPI()

    @app.post("/{order_id}", dependencies=[Depends(once)])
    async def ship(db: Annotated[Session, Depends(get_session)]):
        return "shipped"

    return lambda: post(app, "/42")


async def cancel(task):
    """Cancel a task again and again until it has ended, as a server does that shuts down in a hurry."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def by_timeout(waiting):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await waiting()


async def by_anyio(waiting):
    with anyio.move_on_after(0.05) as scope:
        await waiting()
    assert scope.cancelled_caught


async def by_server(waiting):
    task = asyncio.create_task(waiting())
    await asyncio.sleep(0.05)
    await cancel(task)


@pytest.mark.parametrize("cancelled", [by_timeout, by_anyio, by_server])
async def test_request_cancelled_while_it_waits_ends_at_once_and_leaves_no_lease(shipping, store, cancelled):
    async with AsyncLock(store, "order:42"):
        await cancelled(shipping)  # ends although the lock is still held
    async with AsyncLock(store, "order:42", wait=20):
        pass
    assert (await shipping()).json() == "shipped"


async def test_request_cancelled_at_the_moment_of_the_grant_leaves_no_lease(make_engine, store, is_held):
    with Session(make_engine("sqlite")) as session:

        async def hold():
            async with _in_threads(lock(session, "order", 42)):
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        while not is_held():
            await asyncio.sleep(0)
        time.sleep(0.05)  # the thread returns the lease while the loop cannot take it
        await cancel(task)
        await auntil(lambda: not is_held())


async def test_request_cancelled_before_its_thread_begins_ends_at_once(make_engine, is_held):
    """anyio delivers a cancellation that came earlier just before the thread would begin."""

    async def hold():
        with anyio.move_on_after(0) as scope:
            async with _in_threads(lock(session, "order", 42)):
                pass
        return scope.cancelled_caught

    with Session(make_engine("sqlite")) as session:
        assert await asyncio.wait_for(hold(), 20)
    assert not is_held()


async def test_request_cancelled_while_its_thread_uses_the_session_ends_after_that(make_engine, is_held):
    engine = make_engine("sqlite")
    sent, go_on = threading.Event(), threading.Event()
    with Session(engine) as session:
        session.connection()

        @event.listens_for(engine, "before_cursor_execute")
        def stop(*_):
            sent.set()
            go_on.wait(20)

        async def hold():
            async with _in_threads(lock(session, "order", 42)):
                pass

        task = asyncio.create_task(hold())
        await asyncio.to_thread(sent.wait, 20)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not is_held()


async def test_block_is_left_although_its_request_is_cancelled_again_and_again(make_engine, is_held):
    entered = asyncio.Event()
    with Session(make_engine("sqlite")) as session:

        async def hold():
            async with _in_threads(lock(session, "order", 42)):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await entered.wait()
        await cancel(task)
        assert not is_held()


def test_request_cancelled_by_the_end_of_the_event_loop_leaves_no_lease(make_engine, store, is_held):
    engine = make_engine("sqlite")

    async def serve():
        async def wait():
            with Session(engine) as session:
                async with _in_threads(lock(session, "order", 42, ttl=300)):
                    pass

        task = asyncio.create_task(wait())
        await asyncio.to_thread(leases.until_waited_for, store)
        assert not task.done()  # asyncio.run() cancels it

    with CoreLock(store, "order:42"):
        asyncio.run(serve())
    until(lambda: not is_held())


async def test_error_of_a_waiter_whose_request_was_cancelled_is_not_reported(make_engine, store):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def wait():
        async with _in_threads(lock(Session(make_engine("sqlite")), "order", 42, wait=0.3)):
            pass

    async with AsyncLock(store, "order:42"):
        await by_timeout(wait)
        threads = [each for each in threading.enumerate() if each.name.startswith("AnyIO")]
        await auntil(lambda: not run(store.inspect(BLOCKING, "order:42"))[0].waiters)
        await asyncio.gather(*(anyio.to_thread.run_sync(threading.active_count) for _ in threads))
    collect_garbage()
    assert reported == []


# Plain functions, methods


@pytest.fixture
def session(make_engine, noted):
    with noted(make_engine("sqlite")) as session:
        yield session


@pytest.fixture
async def async_session(make_async_engine, noted):
    async with AsyncSession(make_async_engine("aiosqlite"), sync_session_class=noted) as session:
        yield session


@locked("order", "order_id")
def ship(db, order_id, work):
    return work(db)


@pytest.mark.parametrize(
    "call",
    [
        lambda db, work: ship(db, 42, work),
        lambda db, work: ship(db=db, order_id=42, work=work),
        lambda db, work: ship(scoped_session(lambda: db), 42, work),
    ],
)
def test_function_finds_its_session_among_its_arguments(session, work, journal, is_held, call):
    assert call(session, work) == "shipped"
    assert is_held()
    session.commit()
    assert journal[-3:] == ["work", "COMMIT", "released order:42"]


def test_function_that_begins_no_transaction_releases_when_it_returns(session, is_held):
    ship(session, 42, lambda db: None)
    assert not is_held()


@pytest.mark.parametrize("scoped", [False, True])
async def test_async_function_finds_its_session_among_its_arguments(async_session, work, journal, is_held, scoped):
    @locked("order", "order_id")
    async def ship(db, order_id):
        return await (await db.connection()).run_sync(lambda _: 1) and await async_session.run_sync(work)

    given = async_scoped_session(lambda: async_session, asyncio.current_task) if scoped else async_session
    assert await ship(given, 42) == "shipped"
    assert is_held()
    await async_session.commit()
    assert journal[-3:] == ["work", "COMMIT", "released order:42"]


def test_method_names_the_session_of_its_object(session, work, journal):
    class Orders:
        def __init__(self, db):
            self.db = db

        @locked("order", "order.number", session="self.db")
        def ship(self, order):
            work(self.db)
            self.db.commit()

    Orders(session).ship(SimpleNamespace(number=42))
    assert journal == [*WORK, "COMMIT", "released order:42"]


@pytest.mark.parametrize("how", ["name", "function", "registry"])
def test_session_may_be_told(session, work, is_held, how):
    other = Session()

    def ship(order_id, db, audit):
        work(db)
        assert is_held()

    told = {"name": "db", "function": lambda: session, "registry": scoped_session(lambda: session)}[how]
    locked("order", "order_id", session=told)(ship)(42, session, other)
    assert is_held()
    session.rollback()
    assert not is_held()


def test_mapped_class_and_values_that_are_no_text_are_parts_of_the_name(session, journal):
    @locked(Counter, 42, "line")
    def ship(db, line):
        pass

    ship(session, 7)
    assert journal[0] == "acquired counter:42:7"


def test_options_are_those_of_lock(session, store):
    @locked("order", "order_id", shared=True, wait=0)
    def show(db, order_id):
        pass

    with CoreLock(store, "order:42", shared=True):
        show(session, 42)
    with CoreLock(store, "order:42"), pytest.raises(AcquireTimeout):
        show(session, 42)


def test_decorated_function_looks_like_itself():
    @locked("order", "order_id")
    def ship(db: Session, order_id: int = 7) -> str:
        """Ship."""
        return ""

    @locked("order", "order_id")
    async def aship(db: AsyncSession, order_id: int) -> str:
        return ""

    assert (ship.__name__, ship.__doc__) == ("ship", "Ship.")
    assert list(inspect.signature(ship).parameters) == ["db", "order_id"]
    assert inspect.iscoroutinefunction(aship)
    assert not inspect.iscoroutinefunction(ship)


# Mistakes


def test_call_without_a_session_is_refused_before_the_lock_is_asked_for(journal):
    with pytest.raises(TypeError, match="ship was called with no session"):
        ship(None, 42, None)
    assert journal == []


def test_function_that_cannot_have_a_session_is_refused_at_import():
    with pytest.raises(TypeError, match="no argument for a session"):
        locked("order", "order_id")(lambda order_id: None)
    locked("order", "order_id")(lambda order_id, **more: None)
    locked("order", "order_id", session=lambda: None)(lambda order_id: None)


def test_call_with_two_sessions_has_to_tell_which(journal):
    @locked("order", "order_id")
    def ship(db, audit, order_id):
        pytest.fail("not reached")

    with pytest.raises(TypeError, match="2 sessions"):
        ship(Session(), Session(), 42)
    assert journal == []


async def test_session_of_the_other_kind_is_refused_before_the_lock_is_asked_for(journal):
    @locked("order", "order_id")
    async def aship(db, order_id):
        pytest.fail("not reached")

    with pytest.raises(TypeError, match="AsyncSession"):
        await aship(Session(), 42)
    with pytest.raises(TypeError, match="AsyncSession"):
        ship(AsyncSession(), 42, None)
    assert journal == []


def test_argument_that_the_function_does_not_have_is_named_at_import():
    with pytest.raises(TypeError, match=r"'pk'.*db, order_id"):
        locked("order", "pk")(ship.__wrapped__)
    with pytest.raises(TypeError, match=r"'database.session'.*db, order_id"):
        locked("order", "order_id", session="database.session")(ship.__wrapped__)


@pytest.mark.parametrize(
    "options", [{"ttl": 0}, {"wait": -1}, {"fence": "x"}, {"colour": "red"}, {"snapshot": "x"}, {"bind": "x"}]
)
def test_wrong_option_is_refused_at_import(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        locked("order", "order_id", **options)


def test_value_that_cannot_name_a_lock_is_refused_at_import():
    with pytest.raises(TypeError, match="NoneType"):
        locked("order", None)


@pytest.mark.parametrize("made", [sessionmaker(), async_sessionmaker(), Session, Session()])
def test_what_would_make_another_session_is_refused_at_import(made):
    with pytest.raises(TypeError, match="scoped_session"):
        locked("order", "order_id", session=made)(ship.__wrapped__)


def test_generator_would_run_after_the_lease_and_is_refused():
    def generator(db, order_id):
        yield

    with pytest.raises(TypeError, match="generator"):
        locked("order", "order_id")(generator)


@pytest.mark.parametrize("wrap", [lambda made: made, functools.partial])
@pytest.mark.parametrize(
    "decorate", [locked("order", 42, session=Session.object_session), retry_on_conflict(sessionmaker())]
)
def test_class_is_refused_because_its_methods_would_run_without_the_lease(decorate, wrap):
    class Report(CeleryTask):
        def run(self):
            pass

    with pytest.raises(TypeError, match="only the constructor"):
        decorate(wrap(Report))


@contextlib.contextmanager
def context(*args):
    yield


@contextlib.asynccontextmanager
async def async_context(*args):
    yield


@pytest.mark.parametrize("function", [context, async_context])
@pytest.mark.parametrize("decorate", [locked("order", 42), retry_on_conflict(sessionmaker())])
def test_context_manager_would_run_after_the_lease_and_is_refused(decorate, function):
    with pytest.raises(TypeError, match="generator"):
        decorate(function)


@pytest.mark.parametrize("answer", [context, async_context, lambda db: (db for _ in "a")])
def test_answer_that_would_run_after_the_lease_is_refused_and_nothing_stays_held(session, make_engine, is_held, answer):
    with pytest.raises(TypeError, match="after the call"):
        locked("order", 42)(lambda db: answer(db))(session)  # noqa: PLW0108 - a context manager is seen when decorated
    assert not is_held()
    with pytest.raises(TypeError, match="after COMMIT"):
        retry_on_conflict(sessionmaker(make_engine("sqlite")))(lambda db: answer(db))()  # noqa: PLW0108


@pytest.mark.parametrize("answer", [context, async_context])
async def test_answer_of_an_async_function_that_would_run_after_the_lease_is_refused(async_session, is_held, answer):
    async def function(db):
        return answer(db)

    with pytest.raises(TypeError, match="after the call"):
        await locked("order", 42)(function)(async_session)
    assert not is_held()


def test_query_that_would_run_after_the_lease_is_refused(session, is_held):
    with pytest.raises(TypeError, match="returned a query, which runs after the call: return a list of it"):
        locked("order", 42)(lambda db: db.query(literal(1)))(session)
    assert not is_held()
    assert locked("order", 42)(lambda db: db.query(literal(1)).all())(session) == [(1,)]


def test_coroutine_behind_a_blocking_function_is_refused(session):
    async def answer(db, order_id):
        pass

    hidden = functools.wraps(ship)(lambda db, order_id, work: answer(db, order_id))
    with pytest.raises(TypeError, match="coroutine"):
        locked("order", "order_id")(hidden)(session, 42, None)


@pytest.mark.parametrize("types", [{}, {"pk": int}, {"order_id": int, "pk": int}])
def test_dependency_wants_the_type_of_every_argument(types):
    with pytest.raises(TypeError, match="order_id"):
        locked("order", "order_id").dependency(lambda: None, **types)


# Stacked

FORMS = [(True, True), (True, "lease"), ("lease", True), (False, True), (True, False)]


def is_outside(journal, leases=2):
    """Return whether every lease is acquired before BEGIN, and released after COMMIT."""
    assert all(entry.startswith("acquired ") for entry in journal[:leases]), journal
    assert journal[leases : leases + 3] == ["BEGIN", "work", "COMMIT"]
    return all(entry.startswith("released ") for entry in journal[leases + 3 :]) and len(journal) == 2 * leases + 3


@pytest.mark.parametrize(("outer", "inner"), FORMS)
def test_stacked_locks_are_all_taken_before_begin(maker, journal, work, outer, inner):
    @locked("order", "order_id", fence=outer)
    @locked("customer", "customer_id", fence=inner)
    def ship(session, order_id, customer_id):
        work(session)
        session.commit()

    with maker() as session:
        ship(session, 42, 8)
        assert is_outside(journal)


@pytest.mark.parametrize(("outer", "inner"), FORMS)
async def test_stacked_locks_of_an_async_function_are_all_taken_before_begin(async_maker, journal, work, outer, inner):
    @locked("order", "order_id", fence=outer)
    @locked("customer", "customer_id", fence=inner)
    async def ship(session, order_id, customer_id):
        await session.run_sync(work)
        await session.commit()

    async with async_maker() as session:
        await ship(session, 42, 8)
        assert is_outside(journal)
