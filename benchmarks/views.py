"""One view of the Django benchmarks, protected in different ways; ATOMIC_REQUESTS is on."""

import functools
from collections.abc import Callable
from typing import Any, Final

import redis
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.urls import path
from redis.lock import Lock as RedisPyLock

from benchmarks.models import BareOrder
from django_dlock import locked, pk

View = Callable[..., HttpResponse]


def ship(request: HttpRequest, pk: int) -> HttpResponse:
    order = BareOrder.objects.get(pk=pk)
    order.status = "paid" if order.status == "shipped" else "shipped"
    order.save()
    return HttpResponse(order.status)


def naive(view: View) -> View:
    """A decorator as people write it with redis-py: it releases before COMMIT, which is wrong, and fast."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, pk: int) -> HttpResponse:
        with RedisPyLock(client(), f"order:{pk}", timeout=30):
            return view(request, pk)

    return wrapper


@functools.cache
def client() -> Any:
    return redis.Redis.from_url(settings.DLOCK["default"]["BACKEND"])


VIEWS: Final[dict[str, View]] = {
    "bare": ship,
    "locked": locked("order", pk, fence=False)(ship),
    "fenced": locked("order", pk)(ship),
    "redis-py": naive(ship),
}
urlpatterns = [path(f"{name}/<int:pk>", view) for name, view in VIEWS.items()]
