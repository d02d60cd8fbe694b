"""Keep the fence table small: old rows give way to one floor."""

from __future__ import annotations

import time

from django.db import models, transaction
from django.db.models.functions import Greatest

from django_dlock.models import Fence

__all__ = ["purge"]


def purge(using: str, days: int) -> int:
    """Replace fence rows whose token is older than so many days by a floor that refuses all such tokens; tell how many.

    Only tokens that are times in microseconds (10**15 and more) have an age; others stay. Rows that a transaction is
    at work on stay, too.
    """
    rows = Fence.objects.using(using).exclude(name="")
    before = int((time.time() - days * 86400) * 1_000_000)
    old = rows.annotate(newest=Greatest("token", "s_token")).filter(newest__gte=10**15, newest__lt=before)
    highest = old.aggregate(models.Max("newest"))["newest__max"]
    if highest is None:
        return 0
    _raise_floor(using, highest)  # committed before the first row goes: a missing row is never without a floor
    deleted = 0
    while True:
        with transaction.atomic(using=using):
            names = list(old.select_for_update(skip_locked=True).values_list("name", flat=True)[:1000])
            deleted += rows.filter(name__in=names).delete()[0]
        if not names:
            return deleted


def _raise_floor(using: str, token: int) -> None:
    floor, _ = Fence.objects.using(using).get_or_create(name="", defaults={"token": token, "holder": ""})
    Fence.objects.using(using).filter(name=floor.name, token__lt=token).update(token=token)
