"""`@locked("order", pk)` on everything that can be decorated: lease, BEGIN, work, COMMIT, release, in this order."""

import json
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial, wraps
from unittest.mock import Mock

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.generic import DetailView, UpdateView
from rest_framework import generics, routers, serializers, viewsets
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import APIException
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock import lock, locked, pk, retry_on_conflict
from django_dlock.errors import AcquireTimeout, LeaseLost
from django_dlock.models import Fence
from django_dlock.preconditions import conditional
from django_dlock.tie import current
from dlock_core.leases.lock import Lock as CoreLock
from dlock_core.runtime import BLOCKING, run
from tests.leases import is_held
from tests.testapp.models import Article, Counter
from tests.waiting import until

LEASE_FIRST = ["acquired order:7", "BEGIN", "work", "COMMIT", "released order:7"]
BEGIN_FIRST = ["BEGIN", "acquired order:7", "work", "COMMIT", "released order:7"]


class Sorry(Exception):
    """Raised by a view."""


class Refused(APIException):
    status_code = 400


said: list[str] = []
"""The views note here what they do; it is the journal of the test."""


def work(request=None, then=None):
    """Do what every view does: note it, write a row, and fail if requested."""
    said.append("work")
    Counter.objects.create(name="shipped")
    then = then or (request.GET.get("then") if request is not None else None)
    if then == "raise":
        raise Sorry
    if then == "refuse":
        raise Refused
    if then == "set_rollback":
        transaction.set_rollback(True)
    return HttpResponse("shipped")


async def awork(request):
    def in_a_transaction():
        with transaction.atomic():
            return work(request)

    return await sync_to_async(in_a_transaction)()


def hiding(view):
    """A decorator without functools.wraps."""

    def wrapper(request, *args, **kwargs):
        return view(request, *args, **kwargs)

    return wrapper


def wrapping(view):
    @wraps(view)
    def wrapper(request, *args, **kwargs):
        return view(request, *args, **kwargs)

    return wrapper


# Views whose lease is outside the transaction, with ATOMIC_REQUESTS or without


@locked("order", pk)
def function(request, pk):
    return work(request)


@locked("order", pk.as_(int))
def positional(request, pk):
    return work(request)


@locked("order", "order_id")
def by_name(request, order_id):
    return work(request)


@wrapping
@locked("order", pk)
@wrapping
def wrapped(request, pk):
    return work(request)


@locked("order", pk)
class OnClass(View):
    def get(self, request, pk):
        return work(request)


@method_decorator(locked("order", pk), name="dispatch")
class OnDispatch(View):
    def get(self, request, pk):
        return work(request)


class Plain(View):
    def get(self, request, pk):
        return work(request)


@locked("order", pk)
class OnGeneric(DetailView):
    model = Counter

    def get(self, request, *args, **kwargs):
        return work(request)


@locked("order", pk)
class OnApi(APIView):
    def get(self, request, pk):
        return Response(work(request).content.decode())


class PlainApi(APIView):
    def get(self, request, pk):
        return Response(work(request).content.decode())


@locked("order", pk)
@api_view(["GET"])
def above_api_view(request, pk):
    return Response(work(request).content.decode())


@locked("order", pk)
class OnApiGeneric(generics.GenericAPIView):
    queryset = Counter.objects.all()

    def get(self, request, *args, **kwargs):
        return Response(work(request).content.decode())


@locked("order", pk)
class OnViewSet(viewsets.ViewSet):
    def retrieve(self, request, pk=None):
        return Response(work(request).content.decode())


# Views in which Django cannot see the decorator: with ATOMIC_REQUESTS it is inside


@hiding
@locked("order", pk)
def hidden(request, pk):
    return work(request)


class OnMethod(View):
    @locked("order", pk)
    def get(self, request, pk):
        return work(request)


class OnDecoratedMethod(View):
    @method_decorator(locked("order", pk))
    def get(self, request, pk):
        return work(request)


@api_view(["GET"])
@locked("order", pk)
def below_api_view(request, pk):
    return Response(work(request).content.decode())


class OnApiMethod(APIView):
    @locked("order", pk)
    def get(self, request, pk):
        return Response(work(request).content.decode())


class Orders(viewsets.ViewSet):
    @action(detail=True)
    @locked("order", pk.as_(int))
    def ship(self, request, pk=None):
        return Response(work(request).content.decode())

    @locked("order", pk.as_(int))
    @action(detail=True)
    def cancel(self, request, pk=None):
        return Response(work(request).content.decode())


# Async views


@locked("order", pk)
async def async_function(request, pk):
    return await awork(request)


@locked("order", pk)
class AsyncOnClass(View):
    async def get(self, request, pk):
        return await awork(request)


class AsyncOnMethod(View):
    @locked("order", pk)
    async def get(self, request, pk):
        return await awork(request)


@method_decorator(locked("order", pk), name="dispatch")
class SyncMadeAsync(View):
    def get(self, request, pk):
        return work(request)


# Others


@locked("order", pk)
@locked("customer", "customer_id")
def stacked(request, pk, customer_id):
    return work(request)


@locked("order", pk)
@wrapping
@locked("customer", "customer_id")
@wrapping
@locked("shelf", pk)
def stacked_apart(request, pk, customer_id):
    return work(request)


@locked("order", pk)
@locked("customer", "customer_id", fence="lease")
def stacked_on_a_lease(request, pk, customer_id):
    return work(request)


@locked("order", pk, fence=False)
@locked("customer", "customer_id")
@locked("shelf", pk, fence="lease")
def stacked_of_all_forms(request, pk, customer_id):
    return work(request)


@locked("order", pk)
@locked("customer", "customer_id")
class StackedOnClass(View):
    def get(self, request, pk, customer_id):
        return work(request)


@method_decorator([locked("order", pk), locked("customer", "customer_id")], name="dispatch")
class StackedOnDispatch(View):
    def get(self, request, pk, customer_id):
        return work(request)


class StackedOnMethod(View):
    @method_decorator(locked("order", pk))
    @method_decorator(wrapping)
    @method_decorator(locked("customer", "customer_id"))
    def get(self, request, pk, customer_id):
        return work(request)


class StackedOnPlainMethod(View):
    @locked("order", pk)
    @locked("customer", "customer_id")
    def get(self, request, pk, customer_id):
        return work(request)


@locked("order", pk)
class StackedOnApi(APIView):
    def get(self, request, pk, customer_id):
        return Response(work(request).content.decode())


STACKED = {
    "stacked": stacked,
    "stacked_apart": stacked_apart,
    "stacked_on_a_lease": stacked_on_a_lease,
    "stacked_of_all_forms": stacked_of_all_forms,
    "stacked_on_class": StackedOnClass.as_view(),
    "stacked_on_dispatch": StackedOnDispatch.as_view(),
    "stacked_as_view": locked("customer", "customer_id")(StackedOnApi.as_view()),
}
STACKED_INSIDE = {
    "stacked_on_method": StackedOnMethod.as_view(),
    "stacked_on_plain_method": StackedOnPlainMethod.as_view(),
}


@transaction.non_atomic_requests
@locked("order", pk, fence=False)
def exempt_above(request, pk):
    return work(request)


@locked("order", pk, fence=False)
@transaction.non_atomic_requests
def exempt_below(request, pk):
    return work(request)


@transaction.non_atomic_requests
@locked("order", pk)
def exempt_and_fenced(request, pk):
    with transaction.atomic():
        return work(request)


@locked("order", pk.as_(str), wait=0)
def impatient(request, pk):
    return work(request)


held, go_on = threading.Event(), threading.Event()


@locked("order", pk)
def hold(request, pk):
    held.set()
    go_on.wait(60)
    return work(request)


@locked("order", pk, ttl=0.05, renew=False)
def too_slow(request, pk):
    work(request)
    (tie,) = current()
    until(lambda: not tie.held.remaining())
    return HttpResponse("shipped")


@locked("count", pk)
def increment(request, pk):
    counter = Counter.objects.get(pk=pk)
    counter.value += 1
    counter.save()
    return HttpResponse("counted")


def naive(view):
    """Lock as a typical decorator does: it releases before Django commits."""

    @wraps(view)
    def wrapper(request, pk):
        from django_dlock.conf import stores

        with CoreLock(stores["default"].backend, f"naive:{pk}", wait=60):
            return view(request, pk)

    return wrapper


@naive
def increment_naively(request, pk):
    return increment.__wrapped__(request, pk)


class CounterForm(UpdateView):
    model = Counter
    fields = ("value",)
    success_url = "/"


class CounterSerializer(serializers.ModelSerializer):
    class Meta:
        model = Counter
        fields = ("value",)


@locked("count", pk)
class CounterApi(generics.RetrieveUpdateAPIView):
    queryset = Counter.objects.all()
    serializer_class = CounterSerializer


router = routers.SimpleRouter()
router.register("orders", Orders, basename="order")

OUTSIDE = {
    "function": function,
    "wrapped": wrapped,
    "class": OnClass.as_view(),
    "dispatch": OnDispatch.as_view(),
    "as_view": locked("order", pk)(Plain.as_view()),
    "generic": OnGeneric.as_view(),
    "api": OnApi.as_view(),
    "api_as_view": locked("order", pk)(PlainApi.as_view()),
    "above_api_view": above_api_view,
    "api_generic": OnApiGeneric.as_view(),
    "viewset": OnViewSet.as_view({"get": "retrieve"}),
}
INSIDE = {
    "hidden": hidden,
    "method": OnMethod.as_view(),
    "decorated_method": OnDecoratedMethod.as_view(),
    "below_api_view": below_api_view,
    "api_method": OnApiMethod.as_view(),
    "actions/orders/7/ship": None,
    "actions/orders/7/cancel": None,
}
ASYNC = {
    "async_function": async_function,
    "async_class": AsyncOnClass.as_view(),
    "async_method": AsyncOnMethod.as_view(),
}

urlpatterns = [
    *(path(f"{name}/<int:pk>", view) for name, view in {**OUTSIDE, **INSIDE, **ASYNC}.items() if view),
    path("actions/", include(router.urls)),
    path("by_name/<int:order_id>", by_name),
    re_path(r"^positional/(\d+)$", positional),
    path("sync_made_async/<int:pk>", SyncMadeAsync.as_view()),
    *(path(f"{name}/<int:pk>/<int:customer_id>", view) for name, view in {**STACKED, **STACKED_INSIDE}.items()),
    path("exempt_above/<int:pk>", exempt_above),
    path("exempt_below/<int:pk>", exempt_below),
    path("exempt_and_fenced/<int:pk>", exempt_and_fenced),
    path("impatient/<path:pk>", impatient),
    path("hold/<int:pk>", hold),
    path("too_slow/<int:pk>", too_slow),
    path("increment/<int:pk>", increment),
    path("increment_naively/<int:pk>", increment_naively),
    path("form/<int:pk>", locked("count", pk)(CounterForm.as_view())),
    path("counter_api/<int:pk>", CounterApi.as_view()),
]


def url(name):
    return f"/{name}/" if name.startswith("actions") else f"/{name}/7"


@pytest.fixture(autouse=True)
def _urls(store, journal, monkeypatch):
    """The views note what they do in the journal."""
    monkeypatch.setattr(f"{__name__}.said", journal)
    held.clear()
    go_on.clear()
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=["django_dlock.middleware.LockMiddleware"]):
        yield
    assert not current()


@pytest.fixture
def make_default(use_database, monkeypatch, follow):
    """Return a function that makes "default" stand for a database, with ATOMIC_REQUESTS or without, and follows it."""

    def make(database, atomic_requests):
        use_database("default")
        if " " not in database:  # else it is made by the fixture `isolated`
            use_database(database)
        settings = {**connections.settings[database], "ATOMIC_REQUESTS": atomic_requests}
        monkeypatch.setitem(connections.settings, "default", settings)
        follow("default")
        return "default"

    yield make
    connections["default"].close()
    del connections["default"]


@pytest.fixture(params=[True, False], ids=["atomic_requests", "plain"])
def atomic_requests(request):
    return request.param


@pytest.fixture
def site(make_default, database, atomic_requests):
    """Django on a database, with ATOMIC_REQUESTS or without."""
    make_default(database, atomic_requests)
    return Client(raise_request_exception=False)


def written():
    return Counter.objects.filter(name="shipped").exists()


# The order of events


@pytest.mark.parametrize("name", OUTSIDE)
def test_lease_is_around_the_transaction(site, journal, name):
    response = site.get(url(name))
    assert (response.status_code, journal) == (200, LEASE_FIRST)
    assert written()
    assert Fence.objects.filter(name="order:7").exists()


@pytest.mark.parametrize("name", INSIDE)
def test_lease_that_django_cannot_see_ends_with_the_transaction_all_the_same(site, journal, atomic_requests, name):
    response = site.get(url(name))
    assert (response.status_code, journal) == (200, BEGIN_FIRST if atomic_requests else LEASE_FIRST)
    assert written()
    assert Fence.objects.filter(name="order:7").exists()


@pytest.mark.parametrize("name", [*OUTSIDE, *INSIDE])
def test_exception_rolls_back_then_releases(site, journal, name):
    assert site.get(url(name), {"then": "raise"}).status_code == 500
    assert sorted(journal[:2]) == ["BEGIN", "acquired order:7"]
    assert journal[2:] == ["work", "ROLLBACK", "released order:7"]
    assert not written()


@pytest.mark.parametrize("name", [*OUTSIDE, *INSIDE])
def test_set_rollback_rolls_back_then_releases(site, journal, name):
    assert site.get(url(name), {"then": "set_rollback"}).status_code == 200
    assert journal[2:] == ["work", "ROLLBACK", "released order:7"]
    assert not written()


@pytest.mark.parametrize("name", ["api", "above_api_view", "api_generic", "viewset", *list(INSIDE)[3:]])
def test_refusal_of_rest_framework_rolls_back_with_and_without_atomic_requests(site, journal, name):
    assert site.get(url(name), {"then": "refuse"}).status_code == 400
    assert journal[2:] == ["work", "ROLLBACK", "released order:7"]
    assert not written()


def test_refusal_of_rest_framework_rolls_back_every_database_that_locked_has_begun_on(make_default, use_database):
    make_default("default", atomic_requests=True)
    other = use_database("other")

    @locked("order", pk, using=other)
    @api_view(["GET"])
    def view(request, pk):
        Counter.objects.using(other).create(name="shipped")
        return work(then="refuse")

    assert view(RequestFactory().get("/"), pk=7).status_code == 400
    assert not written()
    assert not Counter.objects.using(other).exists()


def test_name_of_the_argument_may_be_given_as_text(site, journal):
    assert site.get("/by_name/7").status_code == 200
    assert journal == LEASE_FIRST


def test_argument_may_be_positional(site, journal):
    assert site.get("/positional/7").status_code == 200
    assert journal == LEASE_FIRST


def is_outside(journal):
    """Return whether every lease is taken before BEGIN, and released after COMMIT."""
    begin, commit = journal.index("BEGIN"), journal.index("COMMIT")
    return (
        all(entry.startswith("acquired ") for entry in journal[:begin])
        and journal[begin + 1 : commit] == ["work"]
        and all(entry.startswith("released ") for entry in journal[commit + 1 :])
    )


@pytest.mark.parametrize("name", STACKED)
def test_stacked_locks_are_all_taken_before_begin_and_released_after_commit(site, journal, name):
    assert site.get(f"/{name}/7/8").status_code == 200
    assert is_outside(journal), journal
    assert {"acquired order:7", "acquired customer:8", "released order:7", "released customer:8"} < set(journal)
    assert written()


@pytest.mark.parametrize("name", STACKED_INSIDE)
def test_stacked_locks_on_a_method_are_all_taken_before_begin_without_atomic_requests(make_default, journal, name):
    make_default("default", atomic_requests=False)
    assert Client().get(f"/{name}/7/8").status_code == 200
    assert is_outside(journal), journal
    assert set(Fence.objects.values_list("name", flat=True)) == {"order:7", "customer:8"}


def test_stacked_fences_are_all_in_the_transaction(site):
    assert site.get("/stacked_apart/7/8").status_code == 200
    assert set(Fence.objects.values_list("name", flat=True)) == {"order:7", "customer:8", "shelf:7"}


def test_stacked_locks_of_a_function_that_calls_itself_and_others_open_a_transaction_once(make_default, journal):
    make_default("default", atomic_requests=False)

    @locked("shelf", pk)
    def other(pk):
        said.append("work")

    def calling_another(function):
        @wraps(function)
        def wrapper(pk, **options):
            other(pk)
            return function(pk, **options)

        return wrapper

    @locked("order", pk)
    @calling_another
    @locked("customer", pk)
    def both(pk, again=True):
        said.append("work")
        if again:
            both(8, again=False)

    both(7)
    acquired = [
        "acquired order:7",
        "acquired shelf:7",
        "BEGIN",
        "work",
        "COMMIT",
        "released shelf:7",
        "acquired customer:7",
    ]
    assert journal[: len(acquired) + 2] == [*acquired, "BEGIN", "work"]
    assert (journal.count("BEGIN"), journal.count("COMMIT")) == (2, 2)
    assert len([entry for entry in journal if entry.startswith("released")]) == 6


def test_view_that_waits_for_its_second_lock_keeps_nobody_from_writing_in_sqlite(make_default, party, store, journal):
    make_default("default", atomic_requests=True)
    view, holder = party(), party()
    lease = holder.now(lock("customer", 8).acquire)
    answer = view.do(Client().get, "/stacked/7/8")
    while not is_held(store, "order:7") or not run(store.inspect(BLOCKING, "customer:8"))[0].waiters:
        assert not answer.done()

    def write_without_waiting():
        with connections["default"].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout=0")
        with transaction.atomic():
            Counter.objects.create(name="shipped by the holder")
        lease.release()

    holder.now(write_without_waiting)
    assert answer.result(60).status_code == 200


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_stacked_locks_do_not_fall_into_the_snapshot_trap(make_default, isolated, atomic_requests, server, level):
    make_default(isolated(server, level), atomic_requests)
    assert Client().get("/stacked/7/8").status_code == 200


@pytest.mark.parametrize("name", ["exempt_above", "exempt_below"])
def test_view_that_wants_no_transaction_gets_none(site, journal, name):
    assert site.get(f"/{name}/7").status_code == 200
    assert journal == ["acquired order:7", "work", "released order:7"]


def test_view_that_wants_no_transaction_may_open_its_own(site, journal):
    assert site.get("/exempt_and_fenced/7").status_code == 200
    assert journal == LEASE_FIRST


def test_decorating_leaves_the_function_itself_as_it_was():
    def view(request, pk):
        """Ship."""

    decorated = locked("order", pk)(view)
    assert decorated.__name__ == "view"
    assert decorated.__doc__ == "Ship."
    assert not hasattr(view, "_non_atomic_requests")


def test_every_database_with_atomic_requests_is_inside_the_lease(
    make_default, use_database, monkeypatch, journal, follow
):
    use_database("other")
    monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)
    make_default("default", atomic_requests=True)
    follow("other")
    assert Client().get("/function/7").status_code == 200
    assert journal == ["acquired order:7", "BEGIN", "BEGIN", "work", "COMMIT", "COMMIT", "released order:7"]


# Async


@pytest.fixture
async def async_site(make_default, database, atomic_requests):
    """Django on a database; the work is done in the thread that `sync_to_async` uses."""
    await sync_to_async(make_default)(database, atomic_requests)
    yield AsyncClient(raise_request_exception=False)
    await sync_to_async(connections.close_all)()
    await sync_to_async(connections.__delitem__)("default")


@pytest.mark.parametrize("name", ["async_function", "async_class", "sync_made_async"])
async def test_lease_of_an_async_view_is_around_the_transaction(async_site, journal, name):
    response = await async_site.get(url(name))
    assert (response.status_code, journal) == (200, LEASE_FIRST)
    assert await sync_to_async(written)()


@pytest.mark.parametrize("name", ["async_function", "async_class", "sync_made_async"])
async def test_exception_in_an_async_view_rolls_back_then_releases(async_site, journal, name):
    response = await async_site.get(url(name), {"then": "raise"})
    assert response.status_code == 500
    assert journal == ["acquired order:7", "BEGIN", "work", "ROLLBACK", "released order:7"]


async def test_sync_view_under_asgi_is_as_under_wsgi(async_site, journal):
    assert (await async_site.get("/function/7")).status_code == 200
    assert journal == LEASE_FIRST


@pytest.mark.parametrize("name", ASYNC)
def test_async_view_under_wsgi_is_as_under_asgi(make_default, journal, name):
    make_default("default", atomic_requests=False)
    assert Client().get(url(name)).status_code == 200
    assert journal == LEASE_FIRST


async def test_async_method_is_as_an_async_function(make_default, journal):
    await sync_to_async(make_default)("default", False)
    assert (await AsyncClient().get("/async_method/7")).status_code == 200
    assert journal == LEASE_FIRST


async def test_async_method_under_atomic_requests_is_refused_by_django(make_default):
    await sync_to_async(make_default)("default", True)
    with pytest.raises(RuntimeError, match="ATOMIC_REQUESTS"):
        await AsyncClient().get("/async_method/7")


# Not views


@locked("order", "order_id")
def ship(order_id, then=None):
    return work(then=then)


@pytest.mark.parametrize("call", [lambda: ship(7), lambda: ship(order_id=7), lambda: ship(7, then=None)])
def test_plain_function_has_the_lease_around_a_transaction_of_its_own(make_default, database, journal, call):
    make_default(database, atomic_requests=False)
    call()
    assert journal == LEASE_FIRST


def test_plain_function_in_a_transaction_takes_part_in_it(make_default, database, journal):
    make_default(database, atomic_requests=False)
    with transaction.atomic():
        ship(7)
    assert journal == BEGIN_FIRST


def test_plain_function_without_a_fence_opens_no_transaction(make_default, journal):
    make_default("default", atomic_requests=True)
    locked("order", "order_id", fence=False)(ship.__wrapped__)(7)
    assert journal == ["acquired order:7", "work", "released order:7"]


def test_default_of_an_argument_counts(make_default, journal):
    make_default("default", atomic_requests=False)

    @locked("order", "order_id")
    def ship_usually(order_id=7):
        work()

    ship_usually()
    assert journal == LEASE_FIRST


def test_value_that_is_no_text_is_a_part_of_the_name(make_default, journal):
    make_default("default", atomic_requests=False)
    locked("order", 7)(work)()
    assert journal == LEASE_FIRST


def test_method_of_any_class(make_default, journal):
    make_default("default", atomic_requests=False)

    class Shop:
        @locked("order", "order_id")
        def ship(self, order_id):
            work()

        @staticmethod
        @locked("order", "order_id")
        def ship_statically(order_id):
            work()

        @classmethod
        @locked("order", "order_id")
        def ship_classy(cls, order_id):
            work()

    Shop().ship(7)
    Counter.objects.all().delete()
    Shop.ship_statically(7)
    Counter.objects.all().delete()
    Shop.ship_classy(7)
    assert [entry for entry in journal if "order" in entry] == ["acquired order:7", "released order:7"] * 3


@pytest.fixture(scope="module")
def celery():
    from celery import Celery

    app = Celery("tests", set_as_current=False, fixups=[])  # Django's fixup would make it the default of the process
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield app
    app.close()


@pytest.mark.parametrize("how", ["args", "kwargs", "direct"])
@pytest.mark.parametrize("bind", [False, True])
def test_celery_task(make_default, database, journal, celery, how, bind):
    make_default(database, atomic_requests=False)
    name = f"{database} {how}"
    if bind:

        @celery.task(bind=True, name=f"bound {name}")
        @locked("order", "order_id")
        def task(self, order_id):
            assert self.request
            work()
    else:

        @celery.task(name=f"free {name}")
        @locked("order", "order_id")
        def task(order_id):
            work()

    if how == "args":
        task.delay(7)
    elif how == "kwargs":
        task.apply_async(kwargs={"order_id": 7})
    else:
        task(7)
    assert journal == LEASE_FIRST


def test_celery_task_that_raises_rolls_back_then_releases(make_default, journal, celery):
    make_default("default", atomic_requests=False)

    @celery.task(name="failing")
    @locked("order", "order_id")
    def task(order_id):
        work(then="raise")

    with pytest.raises(Sorry):
        task.delay(7)
    assert journal == ["acquired order:7", "BEGIN", "work", "ROLLBACK", "released order:7"]
    assert not written()


# Mistakes


def test_argument_that_the_function_does_not_have_is_named_at_import():
    with pytest.raises(TypeError, match=r"'order_id'.*request, pk"):
        locked("order", "order_id")(function.__wrapped__)


def test_argument_that_a_call_does_not_have_is_named(make_default):
    make_default("default", atomic_requests=False)

    @locked("order", "order_id")
    def view(request, **kwargs):
        pass

    with pytest.raises(TypeError, match="'order_id'"):
        view(None, pk=7)


@pytest.mark.parametrize("decorate", [locked("order", pk), conditional(Article)])
@pytest.mark.parametrize("apply", [lambda decorate: decorate, lambda d: method_decorator(d, name="dispatch")])
def test_route_without_the_argument_of_its_class_is_named_with_what_to_do(make_default, decorate, apply):
    make_default("default", atomic_requests=False)

    @apply(decorate)
    class Shelves(viewsets.ViewSet):
        def list(self, request):
            return Response([])

    with pytest.raises(TypeError, match=r"Shelves\.dispatch was called without an argument 'pk'.* decorate those$"):
        Shelves.as_view({"get": "list"})(RequestFactory().get("/"))


@pytest.mark.parametrize("options", [{"ttl": 0}, {"wait": -1}, {"fence": "x"}, {"colour": "red"}])
def test_wrong_option_is_refused_at_import(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        locked("order", pk, **options)


def test_decorator_above_a_task_is_refused(celery):
    @celery.task(name="above")
    def task(order_id):
        pass

    with pytest.raises(TypeError, match="below"):
        locked("order", "order_id")(task)


@pytest.mark.parametrize("decorate", [locked("order", "order_id"), retry_on_conflict])
def test_decorator_above_a_task_that_is_an_object_is_refused(decorate):
    class Task:
        def __call__(self, order_id):
            return self.enqueue(order_id)

        def enqueue(self, order_id):
            pass

    with pytest.raises(TypeError, match="below the decorator that makes a function a task"):
        decorate(Task())


@pytest.mark.parametrize("decorate", [locked("order", "order_id"), retry_on_conflict])
def test_object_whose_call_is_async_is_decorated_like_an_async_function(decorate):
    class Ship:
        async def __call__(self, order_id):
            pass

    assert iscoroutinefunction(decorate(Ship()))


@pytest.mark.parametrize("decorate", [locked("order", "order_id"), retry_on_conflict])
def test_decorator_above_classmethod_is_told_to_stand_below(decorate):
    with pytest.raises(TypeError, match="below @classmethod"):
        decorate(classmethod(ship))


def test_class_that_is_no_view_is_refused():
    with pytest.raises(TypeError, match="dispatch"):
        locked("order", pk)(type("Order", (), {}))


def test_class_in_a_partial_is_refused():
    for made in (OnDispatch, type("Order", (), {})):
        with pytest.raises(TypeError, match="only the constructor"):
            locked("order")(partial(made))


def test_coroutine_behind_a_blocking_function_is_refused(make_default):
    make_default("default", atomic_requests=False)

    async def answer():
        pass

    def view():
        return answer()

    with pytest.raises(TypeError, match="coroutine"):
        locked("order", 7)(view)()


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_generator_would_run_after_the_lease_and_is_refused(kind):
    def generator(pk):
        yield

    async def async_generator(pk):
        yield

    with pytest.raises(TypeError, match="generator"):
        locked("order", pk)(generator if kind == "generator" else async_generator)


@contextmanager
def context(*args):
    said.append("work")
    yield


@asynccontextmanager
async def async_context(*args):
    yield


@pytest.mark.parametrize("function", [context, async_context])
@pytest.mark.parametrize("decorate", [locked("order", 7), retry_on_conflict])
def test_context_manager_would_run_after_the_lease_and_is_refused(decorate, function):
    with pytest.raises(TypeError, match="generator"):
        decorate(function)


@pytest.mark.parametrize("answer", [context, async_context, lambda: (work() for _ in "a")])
def test_answer_that_would_run_after_the_lease_is_refused_and_nothing_stays_held(make_default, store, journal, answer):
    make_default("default", atomic_requests=False)
    with pytest.raises(TypeError, match="after the call"):
        locked("order", 7)(lambda: answer())()  # noqa: PLW0108 - a context manager is seen when it is decorated
    assert journal == ["acquired order:7", "BEGIN", "ROLLBACK", "released order:7"]
    with pytest.raises(TypeError, match="after COMMIT"):
        retry_on_conflict(lambda: answer())()  # noqa: PLW0108
    assert journal[4:] == ["BEGIN", "ROLLBACK"]


@pytest.mark.parametrize("answer", [context, async_context, awork])
async def test_answer_of_an_async_function_that_would_run_after_the_lease_is_refused(make_default, store, answer):
    await sync_to_async(make_default)("default", False)

    async def function():
        return answer(None)

    for decorate in (locked("order", 7), retry_on_conflict):
        with pytest.raises(TypeError, match=r"after (the call|COMMIT)"):
            await decorate(function)()
    assert not is_held(store, "order:7")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: Counter.objects.filter(pk=7),
        lambda: Counter.objects.values("name"),
        lambda: Counter.objects.raw("SELECT 1"),
        lambda: Response(Counter.objects.values("name")),
        lambda: Response(work() for _ in "a"),
        lambda: Response(map(work, "a")),
    ],
    ids=["query", "values", "raw", "response of a query", "response of a generator", "response of a map"],
)
def test_query_or_data_that_would_be_read_after_the_lease_is_refused(make_default, journal, answer):
    make_default("default", atomic_requests=False)
    with pytest.raises(TypeError, match=r"returned a .*, which runs after the call: return a list of it"):
        locked("order", 7)(lambda: answer())()  # noqa: PLW0108 - as above
    assert journal == ["acquired order:7", "BEGIN", "ROLLBACK", "released order:7"]
    with pytest.raises(TypeError, match="after COMMIT"):
        retry_on_conflict(lambda: answer())()  # noqa: PLW0108


async def test_query_that_an_async_function_returns_would_be_read_after_the_lease_and_is_refused(make_default):
    await sync_to_async(make_default)("default", False)

    @locked("order", 7)
    async def function():
        return Counter.objects.all()

    with pytest.raises(TypeError, match=r"returned a query, .*: return a list of it"):
        await function()


def test_query_that_was_read_under_the_lease_may_be_returned(make_default):
    make_default("default", atomic_requests=False)

    @locked("order", 7)
    def function():
        found = Counter.objects.all()
        assert not found
        return found

    assert list(function()) == []
    assert locked("order", 7)(lambda: Response(list(function())))().data == []


def test_query_that_is_never_sent_may_be_returned(make_default, journal):
    make_default("default", atomic_requests=False)
    for answer in (Counter.objects.none(), Counter.objects.filter(pk=7).none(), Response(Counter.objects.none())):
        assert locked("order", 7)(lambda: answer)() is answer  # noqa: B023 - it is called at once
    assert not any("SELECT" in line for line in journal)
    with pytest.raises(TypeError, match="returned a query"):
        locked("order", 7)(lambda: Counter.objects.none().union(Counter.objects.all()))()


def test_response_without_data_may_be_returned(make_default):
    make_default("default", atomic_requests=False)
    answer = Mock(spec=Response)  # as applications test their views
    assert locked("order", 7)(lambda: answer)() is answer


def test_streaming_response_may_be_returned(make_default, journal):
    make_default("default", atomic_requests=False)
    response = locked("order", 7)(lambda: StreamingHttpResponse(said.append("sent") or b"a" for _ in "a"))()
    assert response.getvalue() == b"a"
    assert journal == ["acquired order:7", "BEGIN", "COMMIT", "released order:7", "sent"]


def test_method_decorator_finds_positional_arguments(make_default, journal):
    make_default("default", atomic_requests=False)

    class Both:
        @method_decorator(locked("order", "order_id"))
        def ship(self, order_id, pk):
            work()

    Both().ship(7, 8)
    assert journal == LEASE_FIRST


# Races


def race(name, threads=8, rounds=25):
    """Increment in threads, through the real WSGI handler; return the number of successes, and the value."""
    key = Counter.objects.create(name=name).pk
    handler, start = WSGIHandler(), threading.Barrier(threads)
    counted = []

    def hit():
        start.wait(60)
        for _ in range(rounds):
            environ = RequestFactory().get(f"/{name}/{key}").environ
            response = handler(environ, lambda status, headers: counted.append(status))
            response.close()
        connections.close_all()

    hitters = [threading.Thread(target=hit) for _ in range(threads)]
    for thread in hitters:
        thread.start()
    for thread in hitters:
        thread.join()
    done, value = counted.count("200 OK"), Counter.objects.get(pk=key).value
    Counter.objects.all().delete()
    return done, value


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("which", ["store", "redis_store"])
def test_no_increment_is_lost_under_atomic_requests(request, make_default, database, which):
    request.getfixturevalue(which)
    make_default(database, atomic_requests=True)
    assert race("increment") == (200, 200)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_naive_decorator_loses_increments_under_atomic_requests(make_default, database):
    make_default(database, atomic_requests=True)
    races = (race("increment_naively") for _ in range(10))
    assert any(value < done for done, value in races)


# LockMiddleware, end to end


def test_taken_lock_is_answered_423_and_names_the_request_that_has_it(make_default, party, journal):
    make_default("default", atomic_requests=False)
    first = party()
    answer = first.do(lambda: Client().post("/hold/7?card=4711"))
    assert held.wait(60)
    response = Client().post("/impatient/7")
    go_on.set()
    assert response.status_code == 423
    assert 1 <= int(response["Retry-After"]) <= 31
    assert response["Content-Type"] == "application/problem+json"
    assert answer.result(60).status_code == 200


def test_owner_in_the_store_and_in_the_error_is_the_request(make_default, store, party):
    make_default("default", atomic_requests=False)
    first = party()
    answer = first.do(lambda: Client().post("/hold/7?card=4711"))
    assert held.wait(60)
    (holder,) = run(store.inspect(BLOCKING, "order:7"))[0].holders
    assert json.loads(holder.owner)["request"] == "POST /hold/7"
    with pytest.raises(AcquireTimeout, match="POST /hold/7") as caught:
        lock("order", 7, wait=0).acquire()
    assert "4711" not in str(caught.value)
    go_on.set()
    assert answer.result(60).status_code == 200


def test_lost_lease_is_answered_409_and_nothing_is_written(site, journal):
    response = site.post("/too_slow/7")
    assert response.status_code == 409
    assert "ROLLBACK" in journal
    assert "COMMIT" not in journal
    assert not written()


def test_store_that_is_down_is_answered_503_and_nothing_is_written(site, journal):
    from tests.servers import free_port

    with override_settings(DLOCK={"default": {"BACKEND": f"redis://:hunter2@127.0.0.1:{free_port()}/0", "WAIT": 0}}):
        response = site.post("/function/7")
    assert response.status_code == 503
    assert int(response["Retry-After"]) >= 1
    assert b"hunter2" not in response.content
    assert "work" not in journal


@pytest.mark.parametrize("hostile", ["{x}:*", "%0A", "%252A", "é😀", "a b", "..%2F", "x" * 2000])
def test_hostile_name_in_a_url_is_one_name_or_a_clear_error(make_default, journal, hostile):
    make_default("default", atomic_requests=False)
    response = Client(raise_request_exception=False).get(f"/impatient/{hostile}")
    if response.status_code == 200:
        acquired = journal[0].split(" ", 1)[1]
        assert acquired.isascii()
        assert acquired.isprintable()
        assert acquired.count(":") == 1
    else:
        assert journal == []


def test_test_that_holds_a_lock_itself_meets_its_request_as_another(make_default, store):
    """A test's client runs in the test's own thread; the request must neither join nor end what the test holds."""
    make_default("default", atomic_requests=False)
    with lock("order", 7):
        assert Client().get("/impatient/7").status_code == 423
        assert is_held(store, "order:7")


# Generic views that write


def test_update_view(site, journal):
    counter = Counter.objects.create(pk=7, name="a")
    journal.clear()
    assert site.post("/form/7", {"value": 5}).status_code == 302
    assert [entry for entry in journal if entry != "work"] == [
        "acquired count:7",
        "BEGIN",
        "COMMIT",
        "released count:7",
    ]
    counter.refresh_from_db()
    assert counter.value == 5


def test_update_api_view(site, journal):
    counter = Counter.objects.create(pk=7, name="a")
    journal.clear()
    assert site.patch("/counter_api/7", {"value": 5}, content_type="application/json").status_code == 200
    assert journal == ["acquired count:7", "BEGIN", "COMMIT", "released count:7"]
    counter.refresh_from_db()
    assert counter.value == 5


def test_lease_lost_in_the_middle_of_a_function_is_an_error_of_the_database(make_default):
    make_default("default", atomic_requests=False)

    @locked("order", 7, ttl=0.05, renew=False)
    def slow():
        work()
        until(lambda: not current()[0].held.remaining())

    with pytest.raises(LeaseLost):
        slow()
    assert not written()


def names_here():
    """Return the names of the locks that are held here."""
    return " ".join(each.held.name for each in current())


def setup(view, request, *args, **kwargs):
    """What a view may do before `dispatch()`."""
    View.setup(view, request, *args, **kwargs)
    said.append(f"setup under {names_here()!r}")


def get(view, request, pk):
    return HttpResponse(names_here())


def own_setup(base):
    return type("Ship", (base,), {"setup": setup, "get": get})


def subclass(base):
    return type("Ship", (locked("order", pk)(type("Parent", (base,), {})),), {"setup": setup, "get": get})


@pytest.mark.parametrize("base", [View, APIView, DetailView])
@pytest.mark.parametrize("make", [lambda base: locked("order", pk)(own_setup(base)), subclass])
def test_setup_of_a_locked_class_is_refused_because_it_runs_before_the_lock(make_default, base, make):
    make_default("default", atomic_requests=False)
    with pytest.raises(TypeError, match=r"Ship\.setup\(\) runs before that and may read what is locked"):
        make(base).as_view()(RequestFactory().get("/"), pk=7)


def test_setup_that_reads_nothing_of_the_kind_goes_with_a_lock_of_the_method(make_default):
    make_default("default", atomic_requests=False)
    view = method_decorator(locked("order", pk), name="dispatch")(own_setup(View))
    assert view.as_view()(RequestFactory().get("/"), pk=7).content == b"order:7"
    assert "setup under ''" in said


@pytest.mark.parametrize(
    "stack",
    [
        lambda view: locked("order", pk)(locked("customer", pk)(view)),
        lambda view: locked("order", pk)(type("Heir", (locked("customer", pk)(view),), {})),
        lambda view: locked("order", pk)(method_decorator(locked("customer", pk), name="dispatch")(view)),
        lambda view: locked("order", pk)(locked("customer", lambda view, request, pk: pk)(view)),
        lambda view: method_decorator(locked("order", pk), name="dispatch")(locked("customer", pk)(view)),
    ],
)
def test_locks_that_are_stacked_on_a_class_are_all_held(make_default, stack):
    make_default("default", atomic_requests=False)
    view = stack(type("Ship", (View,), {"get": get}))
    assert set(view.as_view()(RequestFactory().get("/"), pk=7).content.split()) == {b"order:7", b"customer:7"}
