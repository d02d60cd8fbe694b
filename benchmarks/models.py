"""The models of the Django benchmarks: bare, with our version and row locks, with a peer's version; and a counter."""

import ool
from django.db import models

from django_dlock.models import RowLockMixin, VersionedMixin


class Fields(models.Model):
    number = models.CharField(max_length=40, default="")
    status = models.CharField(max_length=20, default="paid")
    address = models.TextField(default="")
    cents = models.IntegerField(default=0)
    placed = models.DateTimeField(auto_now_add=True)
    changed = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


class BareOrder(Fields):
    version = models.PositiveBigIntegerField(default=1)


class Order(RowLockMixin, VersionedMixin, Fields):
    pass


class OptimisticOrder(ool.VersionedMixin, Fields):
    """An order with the version of django-optimistic-lock."""

    version = ool.VersionField()


class Counter(VersionedMixin):
    value = models.IntegerField(default=0)
