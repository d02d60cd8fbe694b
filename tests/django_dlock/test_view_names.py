"""In a view, a key is one lock however a client spells it, and what is no key is a 404."""

import threading
import time
import warnings
from urllib.parse import quote, unquote_to_bytes
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.http import Http404, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import include, path, re_path, resolve
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework import routers, viewsets
from rest_framework.decorators import action
from rest_framework.response import Response

from django_dlock import arg, locked, pk
from django_dlock.errors import NoSuchKey
from django_dlock.tie import current
from tests.testapp.models import Counter, Parcel, Passport

KEY = UUID("a1b2c3d4-0000-4000-8000-00000000abcd")


def names(request=None):
    """Answer with the names of the locks that are held."""
    return HttpResponse(" ".join(tie.held.name for tie in current()))


def spend(model, key):
    """Read, think, and write: work that needs a lock."""
    row = model.objects.get(pk=key)
    time.sleep(0.05)  # long enough for another to get in, if it could
    row.value -= 1
    row.save()
    return Response(row.value)


class Counters(viewsets.ViewSet):
    """DRF takes anything between two slashes as the key, as text."""

    @action(detail=True, methods=["post"])
    @locked(Counter, pk)
    def model(self, request, pk):
        return spend(Counter, pk)

    @action(detail=True, methods=["post"])
    @locked("counter", pk.as_(int))
    def typed(self, request, pk):
        return spend(Counter, pk)

    @action(detail=True)
    @locked("customer", lambda view, request, **kwargs: view.basename + request.query_params["customer"])
    def function(self, request, pk):
        return names()


class Passports(viewsets.ViewSet):
    @action(detail=True, methods=["post"])
    @locked(Passport, pk)
    def model(self, request, pk):
        return spend(Passport, pk)

    @action(detail=True, methods=["post"])
    @locked("passport", pk.as_(UUID))
    def typed(self, request, pk):
        return spend(Passport, pk)


class Parcels(viewsets.ViewSet):
    @action(detail=True, methods=["post"])
    @locked(Parcel, pk)
    def model(self, request, pk):
        return spend(Parcel, pk)


def customer(request, **kwargs):
    return request.GET["customer"]


by_model = locked(Counter, pk)(lambda request, pk: names())
by_type = locked("counter", pk.as_(int))(lambda request, pk: names())
by_function = locked("customer", customer)(lambda request, pk: names())
by_instance = locked(Counter, lambda request, pk: Counter(pk=7))(lambda request, pk: names())
by_attribute = locked("customer", "request.headers.Customer")(lambda request, pk: names())


@locked("customer", lambda view, request, **kwargs: customer(request))
class OnClass(View):
    def get(self, request, pk):
        return names()


class OnMethod(View):
    @locked("customer", lambda view, request, **kwargs: customer(request))
    def get(self, request, pk):
        return names()


@method_decorator(locked("customer", customer), name="dispatch")
class OnDispatch(View):
    def get(self, request, pk):
        return names()


@locked("customer", customer)
async def in_a_task(request, pk):
    return await sync_to_async(names)()


@locked(Counter, pk)
async def model_in_a_task(request, pk):
    return await sync_to_async(names)()


@locked("counter", pk)
def careless(request, pk):
    return names()


router = routers.SimpleRouter()
router.register("counters", Counters, basename="counter")
router.register("passports", Passports, basename="passport")
router.register("parcels", Parcels, basename="parcel")

VIEWS = {
    "by_model": by_model,
    "by_type": by_type,
    "by_function": by_function,
    "by_instance": by_instance,
    "on_class": OnClass.as_view(),
    "on_method": OnMethod.as_view(),
    "on_dispatch": OnDispatch.as_view(),
    "model_in_a_task": model_in_a_task,
    "in_a_task": in_a_task,
    "careless": careless,
}
urlpatterns = [
    path("", include(router.urls)),
    re_path(r"^digits/(?P<pk>\d+)$", by_model),
    *(path(f"{name}/<pk>", view) for name, view in VIEWS.items()),
    path("converted/<int:pk>", careless),
]


@pytest.fixture(autouse=True)
def _urls(store):
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]):
        yield


def together(urls):
    """Send POST requests at once through the real WSGI handler; return their statuses."""
    handler, start, said = WSGIHandler(), threading.Barrier(len(urls)), []

    def post(url):
        start.wait(60)
        environ = RequestFactory().post(url).environ
        environ["PATH_INFO"] = unquote_to_bytes(url).decode("latin-1")  # as a server passes it
        response = handler(environ, lambda status, headers: said.append(status))
        response.close()
        connections.close_all()

    threads = [threading.Thread(target=post, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.fixture
def on_default(use_database, monkeypatch):
    """Return a function that makes "default" stand for a server."""

    def make(database):
        use_database("default")
        use_database(database)
        monkeypatch.setitem(connections.settings, "default", connections.settings[database])
        connections["default"].close()
        del connections["default"]

    yield make
    connections["default"].close()
    del connections["default"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize(
    ("model", "route", "spell"),
    [
        (Counter, "counters/{}/model/", ["{}", "0{}", "+{}", "{} ", "arabic"]),
        (Counter, "counters/{}/typed/", ["{}", "0{}", "+{}", "{} "]),
        (Parcel, "parcels/{}/model/", ["{}", "0{}", "+{}"]),
        (Passport, "passports/{}/model/", ["{}", "upper", "hex"]),
        (Passport, "passports/{}/typed/", ["{}", "upper", "hex"]),
    ],
    ids=str,
)
def test_no_client_gets_past_a_lock_by_another_spelling(on_default, database, model, route, spell):
    on_default(database)
    row = model.objects.create(value=10)
    key = str(row.pk)
    arabic = key.translate({ord("0") + digit: 0x660 + digit for digit in range(10)})
    others = {"upper": key.upper(), "hex": key.replace("-", ""), "arabic": arabic}
    spellings = [others.get(each) or each.format(key) for each in spell]
    assert together([f"/{route.format(quote(spelling))}" for spelling in spellings]) == ["200 OK"] * len(spellings)
    row.refresh_from_db()
    assert row.value == 10 - len(spellings)


@pytest.mark.parametrize("view", ["by_model", "by_type"])
def test_spellings_are_one_lock_in_a_view(db, view):
    answers = {Client().get(f"/{view}/{spelling}").content for spelling in ("42", "042", "+42")}
    assert len(answers) == 1
    assert answers.pop().endswith(b"counter:42")


@pytest.mark.parametrize("spelling", ["4_2", "٤٢"])
def test_spelling_of_python_is_the_same_key_for_a_model_and_none_for_a_type(db, spelling):
    assert Client().get(f"/by_model/{spelling}").content.endswith(b"counter:42")  # Django's queries read it alike
    assert Client().get(f"/by_type/{spelling}").status_code == 404  # what the view does with the text is not known


def test_digits_of_another_script_are_the_same_lock(db):
    assert Client().get("/digits/٤٢").content == Client().get("/digits/42").content == b"testapp.counter:42"


@pytest.mark.parametrize(
    "url", ["/by_model/x42", "/by_type/x42", "/model_in_a_task/x42", "/counters/x42/model/", "/passports/x42/typed/"]
)
@pytest.mark.parametrize("middleware", [[], ["django_dlock.middleware.LockMiddleware"]])
def test_what_is_no_key_is_not_found(url, middleware):
    with override_settings(MIDDLEWARE=middleware):
        answer = Client().post(url)
    assert answer.status_code == 404


def test_what_is_no_key_is_a_clear_error_elsewhere():
    with pytest.raises(
        NoSuchKey, match=r"'x42' cannot be a key of testapp\.counter: there is nothing to lock"
    ) as caught:
        by_model(None, pk="x42")
    assert isinstance(caught.value, Http404)


@pytest.mark.parametrize("view", ["by_function", "on_class", "on_method", "on_dispatch"])
def test_function_names_the_lock_with_what_the_view_is_called_with(db, view):
    assert Client().get(f"/{view}/7?customer=ann").content == b"customer:ann"


async def test_function_names_the_lock_of_an_async_view(transactional_db):
    assert (await AsyncClient().get("/in_a_task/7?customer=ann")).content == b"customer:ann"


def test_function_names_the_lock_of_a_drf_action(db):
    assert Client().get("/counters/7/function/?customer=ann").content == b"customer:counterann"


def test_function_may_return_an_instance_as_key(db):
    assert Client().get("/by_instance/1").content == b"testapp.counter:7"


def test_function_names_the_lock_of_a_task(db):
    @locked("customer", lambda order_id, **more: order_id % 10)
    def task(order_id, *, retries=0):
        return names().content

    assert task(42, retries=1) == b"customer:2"


def test_text_from_the_url_is_warned_of_once(db):
    view = locked("counter", pk)(lambda request, pk: names())
    request = RequestFactory().get("/careless/42")
    request.resolver_match = match = resolve("/careless/42")
    with pytest.warns(RuntimeWarning, match=r"'pk' is a text from the URL.*pk\.as_\(int\)"):
        view(request, **match.kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view(request, **match.kwargs)


def test_key_that_the_route_converts_is_not_warned_of(db):
    assert Client().get("/converted/42").content == b"counter:42"


def test_decorator_without_parentheses_is_refused_where_it_stands():
    with pytest.raises(TypeError, match=r"@locked does not say what to lock.*above ship"):

        @locked
        def ship(request, pk):
            pass

    with pytest.raises(TypeError, match="above Ship"):

        @locked
        class Ship(View):
            pass


@pytest.mark.parametrize("part", [Counter.objects, object(), Counter.save_base, "order:42", View])
def test_part_that_can_name_nothing_is_refused_at_import(part):
    if part is Counter.save_base:
        part = part.__get__(Counter())
        with pytest.raises((TypeError, ValueError), match="does not say what to lock"):
            locked(part)
        return
    with pytest.raises((TypeError, ValueError), match=r"does not say what to lock|name|no"):
        locked(part)


def test_argument_at_fault_is_named_with_its_function(db):
    with pytest.raises(TypeError, match=r"@locked on .*: the argument 'order_id': .*not NoneType"):
        locked("order", arg("order_id", int))(lambda order_id: None)(None)
    with pytest.raises(TypeError, match=r"@locked on .*: the argument 'order\.full_clean': .*call it, full_clean\(\)"):
        locked("order", "order.full_clean")(lambda order: None)(Counter())
