"""This module is only type-checked, never run: it uses the public names as a user would."""

from __future__ import annotations

from typing import assert_type

from django.db import models
from django.http import HttpRequest, HttpResponse

from django_dlock import lock, locked, pk, retry_on_conflict
from django_dlock.locks import Lease as DjangoLease
from django_dlock.models import FencedMixin, RowLockMixin, VersionedMixin
from dlock_core import (
    AcquireTimeout,
    AsyncLease,
    AsyncLock,
    Lease,
    Lock,
    MultiLock,
    Released,
    StaleObject,
    connect,
)


class Order(VersionedMixin, RowLockMixin, models.Model):  # type: ignore[misc]  # django-stubs: a manager per mixin
    state = models.CharField(max_length=9)

    class Meta:
        app_label = "typing"


class Stock(FencedMixin, models.Model):
    class Meta:
        app_label = "typing"


def core() -> None:
    backend = connect("redis://localhost:6379/0", timeout=1.0)
    with Lock(backend, "order:42", ttl=30, wait=10, shared=False) as lease:
        assert_type(lease, Lease)
        assert_type(lease.token, int)
        assert_type(lease.remaining(), float)
        assert_type(lease.lost, bool)
    assert_type(Lock(backend, "order:42").try_acquire(), Lease | None)
    assert_type(lease.release(), Released)
    with MultiLock(backend, ["a", "b"]) as both:
        both.ensure_held()
    try:
        Lock(backend, "order:42", wait=None).acquire()
    except AcquireTimeout as error:
        assert_type(error.waited, float)


async def core_async() -> None:
    async with AsyncLock(connect("memory://"), "order:42") as lease:
        assert_type(lease, AsyncLease)
        assert_type(await lease.release(), Released)


@locked("order", pk)
def ship(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse()


@locked("order", "order_id", shared=True, wait=0)
async def show(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse()


@retry_on_conflict(attempts=5)
def cancel(key: int) -> str:
    order = Order.objects.get(pk=key)
    try:
        order.save_with_version()
        order.save_with_version(expected=None)  # type: ignore[arg-type]
    except StaleObject as error:
        raise LookupError(error.found) from error
    return order.state


def django(order: Order) -> None:
    with lock("order", order.pk, ttl=30, wait=10, shared=False, fence=True, using="default", store="default") as lease:
        assert_type(lease, DjangoLease)
    assert_type(ship(HttpRequest(), pk=1), HttpResponse)
    assert_type(cancel(1), str)
    with Order.locked_row(order.pk) as fresh:
        assert_type(fresh, Order)
    assert_type(Order.objects.lock_row(order.pk, wait=2.0), Order)
