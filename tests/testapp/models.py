"""Models for tests; add yours at the end."""

from django.db import models

from django_dlock.fencing import FencedMixin
from django_dlock.rows import RowLockMixin
from django_dlock.versions import VersionedMixin, VersionField


class Counter(models.Model):
    name = models.CharField(max_length=100, unique=True)
    value = models.IntegerField(default=0)


class Note(models.Model):
    """Its foreign key is checked at COMMIT on PostgreSQL and SQLite."""

    counter = models.ForeignKey(Counter, on_delete=models.CASCADE)


class Article(VersionedMixin):
    title = models.CharField(max_length=100, default="")
    reads = models.IntegerField(default=0)
    edited = models.DateTimeField(auto_now=True)
    counter = models.ForeignKey(Counter, on_delete=models.SET_NULL, null=True)


class ArticleProxy(Article):
    class Meta:
        proxy = True


class Draft(VersionedMixin):
    """Has a version by another name."""

    version = None
    revision = VersionField()
    title = models.CharField(max_length=100, default="")


class Careful(VersionedMixin):
    title = models.CharField(max_length=100, default="")

    class Meta:
        select_on_save = True


class Code(VersionedMixin):
    """Has a primary key that its author chooses."""

    code = models.CharField(max_length=10, primary_key=True)
    title = models.CharField(max_length=100, default="")


class Place(VersionedMixin):
    name = models.CharField(max_length=100, default="")


class Shop(Place):
    """Inherits its version from another table."""

    owner = models.CharField(max_length=100, default="")


class Person(models.Model):
    name = models.CharField(max_length=100, default="")


class Member(VersionedMixin, Person):
    """Has a version of its own, and a parent table without."""

    grade = models.IntegerField(default=0)


class Stock(RowLockMixin):
    pieces = models.IntegerField(default=0)
    counter = models.ForeignKey(Counter, on_delete=models.CASCADE, null=True)


class ColdStock(Stock):
    degrees = models.IntegerField(default=0)


class Delivery(models.Model):
    stock = models.ForeignKey(Stock, on_delete=models.CASCADE)


class Account(RowLockMixin, VersionedMixin):
    balance = models.IntegerField(default=0)


class Wallet(VersionedMixin, RowLockMixin):
    balance = models.IntegerField(default=0)


class Parcel(FencedMixin):
    """Carries its fence in its own row."""

    value = models.IntegerField(default=0)


class HeavyParcel(Parcel):
    """Inherits its fence from another table."""

    kilos = models.IntegerField(default=0)


class Crate(FencedMixin, VersionedMixin):
    """Has a fence and a version."""

    value = models.IntegerField(default=0)
