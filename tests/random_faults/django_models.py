"""The row that has a version, as Django knows it; imported when Django is configured."""

from typing import ClassVar

from django.db import models

from django_dlock.versions import VersionedMixin, VersionField
from tests.random_faults.attempt import Attempt
from tests.random_faults.django_clients import execute
from tests.random_faults.sections import remake


class Item(VersionedMixin, models.Model):
    name = models.CharField(max_length=40, primary_key=True)
    value = models.IntegerField()
    current = models.IntegerField(default=0)
    version = VersionField()

    class Meta:
        app_label: ClassVar[str] = "faults"
        db_table: ClassVar[str] = "item"


def read(attempt: Attempt) -> Item:
    attempt.read()
    [item] = attempt.wish.items
    row: Item = Item.objects.using(item.database).get(name=item.key)
    attempt.stage("read")
    return row


def write(attempt: Attempt, row: Item) -> None:
    [item], alias, seen = attempt.wish.items, attempt.wish.database, row.value
    if attempt.wish.act is remake:
        row.delete_with_version(using=alias)
        row = Item(name=item.key, value=seen + 1)
        row.save(using=alias, force_insert=True)
    else:
        row.value = seen + 1
        row.save_with_version()
    execute(alias, attempt.wrote(seen, row.version))
    attempt.commits()
