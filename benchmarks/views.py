"""One view of the Django benchmarks, protected in different ways; ATOMIC_REQUESTS is on."""

import functools
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import pglock
import redis
from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.urls import path
from redis.lock import Lock as RedisPyLock

from benchmarks.floors import RawRedis
from benchmarks.models import BareOrder
from django_dlock import locked, pk

View = Callable[..., HttpResponse]

UPSERT: Final = (
    "INSERT INTO dlock_fence (name, token, s_token, holder) VALUES (%s, %s, 0, %s) ON CONFLICT (name) DO UPDATE"
    " SET token = excluded.token, holder = excluded.holder WHERE dlock_fence.token < excluded.token"
)


def ship(request: HttpRequest, pk: int) -> HttpResponse:
    order = BareOrder.objects.get(pk=pk)
    order.status = "paid" if order.status == "shipped" else "shipped"
    order.save()
    return HttpResponse(order.status)


def naive(view: View) -> View:
    """Decorate a view as people do with redis-py: the lock is released before COMMIT, which is fast, but wrong."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, pk: int) -> HttpResponse:
        with RedisPyLock(client(), f"order:{pk}", timeout=30):
            return view(request, pk)

    return wrapper


def on_a_bare_socket(view: View) -> View:
    """Add only what the wire costs: a lease without any promise."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, pk: int) -> HttpResponse:
        key, raw = f"bare:{pk}", raw_redis()
        assert raw.acquire(key, "holder", 30_000)
        try:
            return view(request, pk)
        finally:
            raw.release(key, "holder")

    return wrapper


def fenced_by_hand(view: View) -> View:
    """Add only what the database costs: one upsert of a fence row, written by hand."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, pk: int) -> HttpResponse:
        with connection.cursor() as cursor:
            cursor.execute(UPSERT, [f"by-hand:{pk}", time.time_ns(), "holder"])
        return view(request, pk)

    return wrapper


def advisory(view: View) -> View:
    """Decorate a view as people do with django-pglock: an advisory lock of the transaction, on PostgreSQL only."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, pk: int) -> HttpResponse:
        pglock.advisory(f"order:{pk}", xact=True).acquire()
        return view(request, pk)

    return wrapper


@functools.cache
def raw_redis() -> RawRedis:
    return RawRedis(urlsplit(settings.DLOCK["default"]["BACKEND"]).port or 6379)


@functools.cache
def client() -> Any:
    return redis.Redis.from_url(settings.DLOCK["default"]["BACKEND"])


VIEWS: Final[dict[str, View]] = {
    "bare request": ship,
    "floor: SET and EVALSHA on a bare socket, no promise": on_a_bare_socket(ship),
    "floor: one upsert by hand, no lease": fenced_by_hand(ship),
    "@locked, fence=False": locked("order", pk, fence=False)(ship),
    "@locked": locked("order", pk)(ship),
    '@locked, fence="lease"': locked("order", pk, fence="lease")(ship),
    "redis-py Lock, released before COMMIT": naive(ship),
    "django-pglock, advisory lock of the transaction": advisory(ship),
}
PATHS: Final = {name: f"{number}/" for number, name in enumerate(VIEWS)}
urlpatterns = [path(f"{PATHS[name]}<int:pk>", view) for name, view in VIEWS.items()]
