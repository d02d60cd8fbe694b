"""Django's models of the rows that have a version or their own fence; import this after Django is configured."""

from typing import ClassVar

from django.db import models

from django_dlock.fencing import FencedMixin
from django_dlock.versions import VersionedMixin, VersionField
from tests.random_faults.attempt import Attempt
from tests.random_faults.django_clients import execute
from tests.random_faults.sections import Save, remake


class Versioned(VersionedMixin, models.Model):
    name = models.CharField(max_length=40, primary_key=True)
    value = models.IntegerField()
    current = models.IntegerField(default=0)
    version = VersionField()

    class Meta:
        app_label: ClassVar[str] = "faults"
        db_table: ClassVar[str] = "item"


class Item(FencedMixin, models.Model):
    name = models.CharField(max_length=40, primary_key=True)
    value = models.IntegerField()
    current = models.IntegerField(default=0)

    class Meta:
        app_label: ClassVar[str] = "fenced"
        db_table: ClassVar[str] = "item"


def save(alias: str, step: Save) -> None:
    """Save a row from an instance that has not read the fence's columns."""
    row = Item(name=step.key, value=step.value, current=step.current)
    row.save(using=alias, force_update=True)


def read(attempt: Attempt) -> Versioned:
    attempt.read()
    [item] = attempt.wish.items
    row: Versioned = Versioned.objects.using(item.database).get(name=item.key)
    attempt.stage("read")
    return row


def write(attempt: Attempt, row: Versioned) -> None:
    [item], alias, seen = attempt.wish.items, attempt.wish.database, row.value
    if attempt.wish.act is remake:
        row.delete_with_version(using=alias)
        row = Versioned(name=item.key, value=seen + 1)
        row.save(using=alias, force_insert=True)
    else:
        row.value = seen + 1
        row.save_with_version()
    execute(alias, attempt.wrote(seen, row.version))
    attempt.commits()
