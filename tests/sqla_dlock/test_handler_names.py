"""The lock of a handler: a key names one lock however a client spells it, and what is no key is not found."""

import threading
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI
from flask import Flask
from flask import request as flask_request
from sqlalchemy import create_engine, delete, select, update
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from dlock_core.errors import DLockError, NoSuchKey
from sqla_dlock import arg, lock, locked
from sqla_dlock.middleware import LockMiddleware, answer_flask
from sqla_dlock.tie import current
from tests.sqla_dlock.models import Counter, Parcel, Ticket

KEY = uuid.UUID("a1b2c3d4-0000-4000-8000-00000000abcd")


@pytest.fixture(autouse=True)
def _store(store):
    """Every test has a store."""


@pytest.fixture
def maker():
    engine = create_engine("sqlite://")
    yield sessionmaker(engine)
    engine.dispose()


def names(session):
    return " ".join(tie.held.name for tie in current(session))


async def get(app, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        return await client.get(path)


@pytest.fixture
def fastapi(maker):
    app = FastAPI()
    app.add_middleware(LockMiddleware)
    own = Annotated[Session, Depends(lambda: maker())]  # noqa: PLW0108 - FastAPI would ask for its parameters

    @app.get("/class/{order_id}")
    @locked(Counter, "order_id", fence=False)
    def by_class(order_id: str, db: own):
        return names(db)

    @app.get("/type/{order_id}")
    @locked("counter", arg("order_id", int), fence=False)
    def by_type(order_id: str, db: own):
        return names(db)

    once = locked("counter", arg("order_id", int), fence=False).dependency(Depends(own.__metadata__[0].dependency))

    @app.get("/dependency/{order_id}")
    def by_dependency(lease: Annotated[object, Depends(once)]):
        return lease.name

    @app.get("/function/{order_id}")
    @locked("customer", lambda order_id, db, customer: customer, fence=False)
    def by_function(order_id: int, db: own, customer: str):
        return names(db)

    return app


@pytest.mark.parametrize("route", ["class", "type", "dependency"])
async def test_spellings_are_one_lock_in_fastapi(fastapi, route):
    answers = {(await get(fastapi, f"/{route}/{spelling}")).text for spelling in ("42", "042", "+42")}
    assert answers == {'"counter:42"'}


@pytest.mark.parametrize("route", ["class", "type"])
async def test_what_is_no_key_is_not_found_in_fastapi(fastapi, route):
    answer = await get(fastapi, f"/{route}/x42")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:dlock:no-such-key")


async def test_function_names_the_lock_in_fastapi(fastapi):
    assert (await get(fastapi, "/function/7?customer=ann")).json() == "customer:ann"


def test_function_needs_the_call_that_a_dependency_does_not_see():
    with pytest.raises(TypeError, match="decorate it"):
        locked("counter", lambda order_id: order_id).dependency(Session)


@pytest.fixture
def flask(maker):
    app = Flask(__name__)
    app.db = scoped_session(maker)
    app.teardown_appcontext(lambda error: app.db.remove())
    app.register_error_handler(DLockError, answer_flask)
    parts = {
        "class": (Counter, "order_id"),
        "type": ("counter", arg("order_id", int)),
        "ticket": (Ticket, "order_id"),
        "text": ("counter", "order_id"),
        "function": ("customer", lambda order_id: flask_request.args["customer"]),
    }
    for route, each in parts.items():
        view = locked(*each, session=app.db, fence=False)(lambda order_id: names(app.db()))
        app.add_url_rule(f"/{route}/<order_id>", route, view)
    return app.test_client()


@pytest.mark.parametrize("route", ["class", "type"])
def test_spellings_are_one_lock_in_flask(flask, route):
    assert {flask.get(f"/{route}/{spelling}").text for spelling in ("42", "042", "+42")} == {"counter:42"}
    assert {flask.get(f"/{route}/{spelling}").status_code for spelling in ("4_2", "٤٢", "x")} == {404}


def test_spellings_of_a_uuid_are_one_lock_in_flask(flask):
    spellings = (str(KEY), str(KEY).upper(), KEY.hex)
    assert {flask.get(f"/ticket/{spelling}").text for spelling in spellings} == {f"ticket:{KEY}"}


@pytest.mark.parametrize("route", ["class", "type", "ticket"])
def test_what_is_no_key_is_not_found_in_flask(flask, route):
    assert flask.get(f"/{route}/x42").status_code == 404


def test_function_names_the_lock_in_flask(flask):
    assert flask.get("/function/7?customer=ann").text == "customer:ann"


def test_text_from_the_url_is_warned_of_once_in_flask(flask):
    with pytest.warns(RuntimeWarning, match=r"'order_id' is a text from the URL.*arg\('order_id', int\)"):
        assert flask.get("/text/42").text == "counter:42"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flask.get("/text/42")


async def test_text_from_the_url_is_warned_of_in_starlette(maker):
    @locked("counter", "request.path_params.order_id", session=scoped_session(maker), fence=False)
    def look(request):
        return PlainTextResponse("")

    typed = locked("counter", arg("request.path_params.order_id", int), session=scoped_session(maker), fence=False)(
        look.__wrapped__
    )
    app = Starlette(routes=[Route("/text/{order_id}", look), Route("/type/{order_id}", typed)])
    with pytest.warns(RuntimeWarning, match=r"'request\.path_params\.order_id' is a text from the URL"):
        await get(app, "/text/42")
    assert (await get(app, "/type/042")).status_code == 200


@pytest.mark.parametrize("cls", [Counter, Parcel])
def test_no_client_gets_past_a_lock_by_another_spelling(make_engine, cls):
    engine = make_engine("postgresql")
    sessions, start = sessionmaker(engine), threading.Barrier(4)
    with sessions.begin() as session:
        session.add(row := cls(value=10))
        session.flush()
        key = row.id

    @locked(cls, "key")
    def spend(key, session):
        row = session.get_one(cls, int(key))
        session.execute(update(cls).where(cls.id == row.id).values(value=row.value - 1))
        session.commit()

    def once(spelling):
        with sessions() as session:
            start.wait(60)
            spend(spelling, session)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(once, [str(key), f"0{key}", f"+{key}", f" {key}"]))
    with sessions() as session:
        assert session.get_one(cls, key).value == 6


def test_text_that_names_a_lock_finds_no_other_row_on_mariadb(make_engine):
    with Session(make_engine("mariadb")) as session:
        session.execute(delete(Counter))
        session.add_all([Counter(id=number, value=0) for number in range(1, 20)])
        session.flush()
        for spelling in (
            "1",
            "01",
            "+1",
            " 1",
            "1 ",
            "1\n",
            "1_0",
            "1_",
            "1.0",
            "1.5",
            "1e0",
            "1e1",
            "1x",
            "\u0661",
            "\uff11",
            "1\xa0",
        ):
            with suppress(NoSuchKey):
                name = lock(session, Counter, spelling).name
                assert name == f"counter:{session.scalar(select(Counter.id).where(Counter.id == spelling))}", spelling


def test_decorator_without_parentheses_is_refused_where_it_stands():
    with pytest.raises(TypeError, match=r"@locked does not say what to lock.*above ship"):

        @locked
        def ship(order_id, session):
            pass


def test_argument_at_fault_is_named_with_its_function():
    @locked("order", "order.key", fence=False)
    def ship(order, session):
        pass

    class Order:
        def key(self):
            return 42

    with pytest.raises(TypeError, match=r"@locked on .*ship: the argument 'order\.key': .*'key': call it, key\(\)"):
        ship(Order(), Session())
