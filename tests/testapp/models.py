"""Models for tests; add yours at the end."""

import uuid

from django.core.files.storage import InMemoryStorage
from django.db import models

from django_dlock.fencing import FencedMixin
from django_dlock.rows import RowLockMixin
from django_dlock.versions import LockManager, VersionedMixin, VersionField


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
    """A model whose version field has another name."""

    version = None
    revision = VersionField()
    title = models.CharField(max_length=100, default="")


class Careful(VersionedMixin):
    title = models.CharField(max_length=100, default="")

    class Meta:
        select_on_save = True


class Code(VersionedMixin):
    """A model whose primary key its author chooses."""

    code = models.CharField(max_length=10, primary_key=True)
    title = models.CharField(max_length=100, default="")


class Place(VersionedMixin):
    name = models.CharField(max_length=100, default="")


class Shop(Place):
    """A model that inherits its version from another table."""

    owner = models.CharField(max_length=100, default="")


class Person(models.Model):
    name = models.CharField(max_length=100, default="")


class Member(VersionedMixin, Person):
    """A model with its own version, and a parent table without one."""

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
    """A model that carries its fence in its own row."""

    value = models.IntegerField(default=0)


class HeavyParcel(Parcel):
    """A model that inherits its fence from another table."""

    kilos = models.IntegerField(default=0)


class Crate(FencedMixin, VersionedMixin):
    """A model with a fence and a version."""

    value = models.IntegerField(default=0)


class Tag(models.Model):
    name = models.CharField(max_length=100)

    def __str__(self):
        return self.name


class Ticket(VersionedMixin):
    """A model with a field of every kind that forms treat specially."""

    class State(models.TextChoices):
        OPEN = "open", "Still open"
        CLOSED = "closed", "Closed for good"

    title = models.CharField(max_length=100)
    state = models.CharField(max_length=10, choices=State, default=State.OPEN)
    notes = models.TextField(blank=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=10)
    due = models.DateTimeField(null=True, blank=True)
    is_urgent = models.BooleanField(default=False)
    owner = models.ForeignKey(Tag, models.SET_NULL, null=True, blank=True, related_name="owned")
    tags = models.ManyToManyField(Tag, blank=True)
    paper = models.FileField(blank=True)
    extra = models.JSONField(default=dict, blank=True)

    def __str__(self):
        return self.title


class Step(VersionedMixin):
    """A row that belongs to a ticket."""

    ticket = models.ForeignKey(Ticket, models.CASCADE)
    text = models.CharField(max_length=100)
    is_done = models.BooleanField(default=False)

    def __str__(self):
        return self.text


class Team(models.Model):
    name = models.CharField(max_length=100, default="")
    is_active = models.BooleanField(default=True)


class ActiveJobs(LockManager):
    """A manager whose rows are found through another table."""

    def get_queryset(self):
        return super().get_queryset().filter(team__is_active=True)


class Job(RowLockMixin, VersionedMixin):
    """A model with a generated key, an order and a manager through another table, and a value that changes in place."""

    key = models.UUIDField(primary_key=True, default=uuid.uuid4)
    team = models.ForeignKey(Team, on_delete=models.CASCADE, null=True)
    title = models.CharField(max_length=100, default="")
    reads = models.IntegerField(default=0)
    data = models.JSONField(default=dict)

    objects = LockManager()
    active = ActiveJobs()

    class Meta:
        ordering = ["team__name"]


class Passport(models.Model):
    """A model whose key is a UUID."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    value = models.IntegerField(default=0)


class Photo(models.Model):
    """A model whose key is the key of another row."""

    passport = models.OneToOneField(Passport, on_delete=models.CASCADE, primary_key=True)


class Cell(models.Model):
    """A model with a composite key."""

    pk = models.CompositePrimaryKey("row", "column")
    row = models.IntegerField()
    column = models.IntegerField()


class Price(models.Model):
    """A model whose key is a decimal number."""

    amount = models.DecimalField(max_digits=8, decimal_places=2, primary_key=True)


class Reading(models.Model):
    """A model whose key is a point in time."""

    at = models.DateTimeField(primary_key=True)


class Scan(RowLockMixin):
    """A model with values that change in place, and one that the database computes."""

    paper = models.FileField(storage=InMemoryStorage(), blank=True)
    raw = models.BinaryField(default=bytes)
    pages = models.IntegerField(default=0)
    sheets = models.GeneratedField(
        expression=models.F("pages") / 2, output_field=models.IntegerField(), db_persist=True
    )


class Track(VersionedMixin):
    """A model whose rows have an order that Django keeps."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE)
    title = models.CharField(max_length=100, default="")

    class Meta:
        order_with_respect_to = "team"
