"""ETag, If-Match and If-None-Match in FastAPI, Starlette and Flask: of two clients with the same tag one is refused."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from flask import Flask, request
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, defer, scoped_session, sessionmaker

from dlock_core.errors import DLockError, PreconditionFailed, PreconditionRequired
from dlock_core.web.preconditions import entity_tag
from sqla_dlock.middleware import LockMiddleware, WSGILockMiddleware, answer_flask
from sqla_dlock.preconditions import check_preconditions, conditional, etag_of
from sqla_dlock.versions import asave_with_version
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.version_models import Code, Order, Park, Place, Shop

ONE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


def new_order(engine):
    with Session(engine) as session, session.begin():
        session.add(order := Order(title="first"))
        session.flush()
        return order.id


@pytest.fixture
def key(engine):
    return new_order(engine)


def fastapi_site(sessions, together=None):
    """The COMMIT, and so the flush, is in the dependency: after the endpoint, and after the check."""

    def get_session():
        with sessions.begin() as session:
            yield session

    SessionDep = Annotated[Session, Depends(get_session, scope="function")]

    def get_order(order_id: int, session: SessionDep) -> Order:
        return session.get_one(Order, order_id)

    Checked = Annotated[Order, Depends(conditional(get_order), scope="function")]
    app = FastAPI()
    app.add_middleware(LockMiddleware)

    @app.get("/orders/{order_id}")
    def show(order: Checked) -> str:
        return order.title

    @app.put("/orders/{order_id}")
    def rename(order: Checked, title: str, session: SessionDep, response: Response) -> str:
        if together is not None:
            together.wait(60)
        order.title = title
        if together is None:
            session.flush()
            response.headers["ETag"] = etag_of(order)
        return order.title

    return app


class Client:
    """Asks an application, as one of many clients."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, method: str, path: str, **headers: str) -> httpx.Response:
        return asyncio.run(self.ask(method, path, **headers))

    async def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://shop") as client:
            return await client.request(method, path, headers=given)


@ONE
def test_dependency_of_fastapi_checks_what_another_one_gives(engine, key):
    ask, path = Client(fastapi_site(sessionmaker(engine))), f"/orders/{key}"
    shown = ask("GET", path)
    tag = shown.headers["ETag"]
    known = ask("GET", path, If_None_Match=f'"other", W/{tag}')
    assert (shown.status_code, shown.json()) == (200, "first")
    assert (known.status_code, known.content, known.headers["ETag"]) == (304, b"", tag)
    change = f"{path}?title=second"
    assert [ask("PUT", change).status_code, ask("PUT", change, If_Match="abc").status_code] == [428, 400]
    changed = ask("PUT", change, If_Match=tag)
    assert (changed.status_code, changed.json()) == (200, "second")
    refused = ask("PUT", change, If_Match=tag)
    assert (refused.status_code, refused.json()["object"]) == (412, f"Order({key})")
    assert ask("PUT", f"{path}?title=third", If_Match=changed.headers["ETag"]).status_code == 200


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_of_two_clients_with_the_same_tag_exactly_one_changes_the_object(engine, key):
    """Both have passed the check when the first one commits: it is the flush that refuses, and the answer is still 412."""
    ask = Client(fastapi_site(sessionmaker(engine), together=threading.Barrier(2)))
    for titles in ("ab", "cd", "ef"):
        tag = ask("GET", f"/orders/{key}").headers["ETag"]
        changes = [f"/orders/{key}?title={title}" for title in titles]
        with ThreadPoolExecutor(2) as clients:
            answers = list(clients.map(partial(ask, "PUT", If_Match=tag), changes))
        assert sorted(answer.status_code for answer in answers) == [200, 412]
        assert ask("GET", f"/orders/{key}").headers["ETag"] != tag


@pytest.mark.parametrize("async_engine", ["asyncpg"], indirect=True)
async def test_of_two_async_clients_with_the_same_tag_exactly_one_changes_the_object(async_engine):
    sessions, together, app = async_sessionmaker(async_engine), asyncio.Barrier(2), FastAPI()
    app.add_middleware(LockMiddleware)

    @app.put("/orders/{order_id}")
    async def rename(order_id: int, request: Request) -> str:
        async with sessions.begin() as session:
            order = await session.get_one(Order, order_id)
            check_preconditions(request, order)
            await together.wait()
            order.title = "second"
            await asave_with_version(session, order)
            return etag_of(order)

    async with AsyncSession(async_engine) as session, session.begin():
        session.add(order := Order(title="first"))
        await session.flush()
        path, tag = f"/orders/{order.id}", etag_of(order)
    ask = Client(app).ask
    answers = await asyncio.gather(*(ask("PUT", path, If_Match=tag) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 412]


@ONE
def test_flask_asks_with_its_own_request(engine, key):
    db, app = scoped_session(sessionmaker(engine)), Flask("shop")
    app.wsgi_app = WSGILockMiddleware(app.wsgi_app)  # type: ignore[method-assign]
    app.register_error_handler(DLockError, answer_flask)
    app.teardown_appcontext(lambda _: db.remove())

    @app.route("/orders/<int:key>", methods=["GET", "PUT"])
    def order(key):
        order = db.get_one(Order, key)
        if check_preconditions(request, order):
            return "", 304, {"ETag": etag_of(order)}
        if request.method == "PUT":
            order.title = "second"
            db.commit()
        return order.title, {"ETag": etag_of(order)}

    client, path = app.test_client(), f"/orders/{key}"
    tag = client.get(path).headers["ETag"]
    assert client.get(path, headers={"If-None-Match": tag}).status_code == 304
    assert client.put(path).status_code == 428
    assert client.put(path, headers={"If-Match": tag}).text == "second"
    assert client.put(path, headers={"If-Match": tag}).status_code == 412


@ONE
def test_tag_belongs_to_one_row_and_is_that_of_other_programs(engine):
    rows = [Order(id=7), Code(kind="7", code="1"), Code(kind="71", code=""), Place(id=7), Shop(id=8), Park(id=9)]
    with Session(engine) as session, session.begin():
        session.add_all(rows)
        session.flush()
        assert len({etag_of(row) for row in rows}) == len(rows)
        assert etag_of(rows[0]) == entity_tag("orders", 7, 1)
        rows[0].title = "second"
        assert etag_of(rows[0]) == entity_tag("orders", 7, 1)  # not written yet
        session.flush()
        assert etag_of(rows[0], variant="html") == entity_tag("orders", 7, 2, "html")


@ONE
def test_what_has_no_version_to_check_is_refused(engine, key):
    with Session(engine) as session:
        with pytest.raises(TypeError, match="Counter has no version"):
            etag_of(Counter())
        with pytest.raises(TypeError, match="int has no version"):
            etag_of(42)
        with pytest.raises(ValueError, match="not in the database yet"):
            etag_of(Order())
        with pytest.raises(ValueError, match="was deferred"):
            etag_of(session.get_one(Order, key, options=[defer(Order.version)]))


@ONE
def test_error_names_the_object(engine, key):
    with Session(engine) as session, Flask("shop").test_request_context(method="PUT"):
        order = session.get_one(Order, key)
        with pytest.raises(PreconditionRequired, match=f"Order\\({key}\\)"):
            check_preconditions(request, order)
        assert check_preconditions(request, order, required=False) is False
    context = Flask("shop").test_request_context(method="PUT", headers={"If-Match": '"x"'})
    with Session(engine) as session, context, pytest.raises(PreconditionFailed, match=f"Order\\({key}\\)"):
        check_preconditions(request, session.get_one(Order, key))
