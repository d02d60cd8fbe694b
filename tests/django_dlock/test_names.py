"""In a lock's name, all spellings of a model's key are one lock, and what cannot be a key is no row."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import pytest
from django.db import models
from django.db.models import F, Q, Value
from django.http import Http404
from django.test.utils import isolate_apps, override_settings
from django.utils.functional import SimpleLazyObject, lazystr
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from django_dlock import lock
from django_dlock.errors import NoSuchKey, NotSupported
from django_dlock.fencing import FencedMixin
from django_dlock.names import identify
from django_dlock.versions import VersionedMixin
from tests.testapp.models import (
    Article,
    ArticleProxy,
    Cell,
    Code,
    Counter,
    HeavyParcel,
    Parcel,
    Passport,
    Photo,
    Place,
    Price,
    Reading,
    Shop,
)

KEY = UUID("a1b2c3d4-0000-4000-8000-00000000abcd")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Labels(StrEnum):
    COUNTER = "testapp.Counter"
    PARCEL = "testapp.parcel"


@pytest.mark.parametrize(
    ("model", "spellings", "name"),
    [
        (Counter, [42, "42", "042", "+42", " 42 ", "4_2", "٤٢", Decimal(42)], "testapp.counter:42"),
        (Passport, [KEY, str(KEY), str(KEY).upper(), KEY.hex, f"{{{KEY}}}", KEY.int], f"testapp.passport:{KEY}"),
        (Photo, [KEY, KEY.hex, str(KEY).upper()], f"testapp.photo:{KEY}"),
        (Price, [Decimal("1.50"), "1.5", "01.500", Decimal("15E-1")], "testapp.price:1.5"),
        (
            Reading,
            [NOON, NOON.astimezone(timezone(timedelta(hours=2))), "2026-03-01T14:00:00+02:00"],
            "testapp.reading:2026-03-01%2012%3A00%3A00%2B00%3A00",
        ),
        (Cell, [(1, 2), ["01", "+2"]], "testapp.cell:1:2"),
        (Code, ["abc"], "testapp.code:abc"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_spelling_of_a_key_is_one_lock(model, spellings, name):
    assert {lock(model, spelling).name for spelling in spellings} == {name}


class CodeField(models.CharField):
    """As many applications write it: what is stored is in lower case."""

    def get_prep_value(self, value):
        return super().get_prep_value(value).lower()


@isolate_apps("tests.testapp")
def test_key_of_an_own_field_is_what_it_stores():
    class Coupon(models.Model):
        code = CodeField(primary_key=True, max_length=9)

        class Meta:
            app_label = "testapp"

    assert {lock(Coupon, code).name for code in ("ABC", "abc", Coupon(code="Abc"))} == {"testapp.coupon:abc"}


def test_composite_key_is_a_tuple_or_as_many_parts():
    assert lock(Cell, 1, "02").name == lock(Cell, (1, 2)).name == "testapp.cell:1:2"
    assert lock(Cell, 1, 2, "tax").name == lock(Cell, (1, 2), "tax").name == "testapp.cell:1:2:tax"
    for key in [(1,), (1, 2, 3), 1]:
        with pytest.raises(NoSuchKey):
            lock(Cell, key)


@isolate_apps("tests.testapp")
def test_composite_key_with_a_fence_in_its_row_is_refused():
    class FencedCell(FencedMixin, models.Model):
        pk = models.CompositePrimaryKey("row", "column")
        row = models.IntegerField()
        column = models.IntegerField()

        class Meta:
            app_label = "testapp"

    with pytest.raises(NotSupported, match="FencedCell has a composite key: name its lock by a text"):
        lock(FencedCell, 1, 2)


@isolate_apps("tests.testapp")
def test_child_whose_fence_is_not_in_the_row_that_it_shares_is_refused():
    class Named(models.Model):
        named = models.AutoField(primary_key=True)

        class Meta:
            app_label = "testapp"

    class Stock(FencedMixin, models.Model):
        class Meta:
            app_label = "testapp"

    class FencedNamed(FencedMixin, Named):
        class Meta:
            app_label = "testapp"

    class NamedStock(Named, Stock):
        class Meta:
            app_label = "testapp"

    class StockWithItsKey(Stock, Named):
        class Meta:
            app_label = "testapp"

    for child in (FencedNamed, NamedStock):
        with pytest.raises(NotSupported, match="put FencedMixin on Named, or lock Named"):
            lock(child, 1)
    assert lock(StockWithItsKey, 1).name == lock(Stock, 1).name


def test_key_is_converted_wherever_its_model_stands():
    assert lock("move", Counter, "01", Passport, KEY.hex).name == f"move:testapp.counter:1:testapp.passport:{KEY}"
    assert lock(Counter, "01", "tax").name == "testapp.counter:1:tax"
    assert lock(Counter).name == "testapp.counter"


def test_proxy_and_child_are_the_row_that_they_share():
    assert lock(ArticleProxy, 1).name == lock(Article, 1).name == "testapp.article:1"
    assert lock(Shop, 1).name == lock(Place, 1).name == "testapp.place:1"
    assert lock(HeavyParcel, "01").name == lock(Parcel, 1).name == "testapp.parcel:1"
    assert (lock(HeavyParcel, "01").fence.model, lock(HeavyParcel, "01").fence.key) == (Parcel, 1)


@pytest.mark.parametrize(
    ("label", "model", "key"),
    [
        ("testapp.Counter", Counter, "07"),
        ("testapp.counter", Counter, "07"),
        (mark_safe("testapp.Counter"), Counter, "07"),
        (Labels.COUNTER, Counter, "07"),
        (Labels.PARCEL, Parcel, "07"),
        (b"testapp.Parcel", Parcel, "07"),
        ("testapp.PASSPORT", Passport, KEY.hex),
        ("testapp.Parcel", Parcel, "07"),
        ("testapp.HeavyParcel", Parcel, 7),
        ("testapp.articleproxy", Article, 7),
        ("testapp.Cell", Cell, ("1", "02")),
    ],
)
def test_label_of_a_model_however_it_is_spelled_names_its_locks(label, model, key):
    named, meant = lock(label, key), lock(model, key)
    assert named.name == meant.name
    assert (type(named.fence), vars(named.fence)) == (type(meant.fence), vars(meant.fence))
    assert lock(label, key, "tax").name == lock(model, key, "tax").name


def test_label_of_a_model_before_a_text_that_is_no_key_is_one_name_too():
    assert lock("testapp.Counter", "all").name == lock("testapp.counter", "all").name == "testapp.counter:all"
    assert lock("testapp.Counter").name == lock(Counter).name
    assert lock("other.Counter", "07").name == "other.Counter:07"


def test_router_is_given_the_instance_inside_a_lazy_one():
    class ByType:
        def db_for_write(self, model, instance=None, **_):
            return "other" if type(instance) in {type(None), Counter} else "default"

    with override_settings(DATABASE_ROUTERS=[ByType()]):
        assert identify((Counter, SimpleLazyObject(lambda: Counter(pk=7))), None)[2] == "other"


def test_number_that_the_database_would_round_is_no_key():
    for key in ("1.505", Decimal("1.505"), Price(pk=Decimal("1.505"))):
        with pytest.raises(NoSuchKey, match="2 digits after the point"):
            lock(Price, key)


@isolate_apps("tests.testapp")
def test_long_number_is_named_in_full():
    class Account(models.Model):
        number = models.DecimalField(primary_key=True, max_digits=40, decimal_places=10)

        class Meta:
            app_label = "testapp"

    assert lock(Account, 2**127).name == f"testapp.account:{2**127}"


def test_lazy_instance_that_is_no_key_is_named_by_its_class():
    with pytest.raises(TypeError, match=r"lock\(Counter, key\)"):
        lock(SimpleLazyObject(lambda: Counter(pk=7)))
    with pytest.raises(TypeError, match="an instance of Counter cannot be a key of Article"):
        lock(Article, SimpleLazyObject(lambda: Counter(pk=7)))


def test_instance_as_key_is_its_primary_key():
    passport = Passport(pk=KEY)
    assert lock(Counter, Counter(pk=7)).name == "testapp.counter:7"
    assert lock(Counter, SimpleLazyObject(lambda: Counter(pk=7))).name == "testapp.counter:7"
    assert lock(Photo, passport).name == lock(Photo, Photo(passport=passport)).name == f"testapp.photo:{KEY}"
    assert lock(Place, Shop(pk=3)).name == "testapp.place:3"
    assert lock(Cell, Cell(row=1, column=2)).name == "testapp.cell:1:2"


def test_instance_that_is_no_key_is_refused():
    with pytest.raises(TypeError, match="an instance of Counter cannot be a key of Passport"):
        lock(Passport, Counter(pk=7))
    with pytest.raises(TypeError, match="not NoneType"):
        lock(Counter, Counter())
    with pytest.raises(TypeError, match="an instance cannot be part of a name: use its class"):
        lock("counter", Counter(pk=7))


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (Counter, "abc"),
        (Counter, "4 2"),
        (Counter, ""),
        (Counter, "9" * 5000),
        (Passport, "42x"),
        (Price, "x"),
        (Reading, "noon"),
    ],
    ids=str,
)
def test_what_cannot_be_a_key_is_no_row(model, key):
    with pytest.raises(NoSuchKey, match="cannot be a key of testapp") as caught:
        lock(model, key)
    assert isinstance(caught.value, Http404)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "key",
    [None, True, 4.2, lambda: 42, Counter.full_clean, object(), iter("ab")],
    ids=lambda value: type(value).__name__,
)
def test_value_that_is_no_key_of_any_model_is_a_mistake_of_the_program(key):
    for model in (Passport, Code):  # a text field would turn anything into text
        with pytest.raises(TypeError):
            lock(model, key)


@pytest.mark.parametrize("make", [lambda: F("id"), lambda: F("id") + 1, lambda: Q(pk=1), lambda: Value(1)])
def test_question_to_the_database_is_no_name(make):
    for kind in ("counter", Code):
        with pytest.raises(TypeError, match="is a database expression"):
            lock(kind, make())


def test_query_is_no_name_and_is_not_sent():  # this test has no access to the database
    with pytest.raises(TypeError, match="QuerySet is a database expression"):
        lock("counter", Counter.objects.filter(pk=1))
    with pytest.raises(TypeError, match=r"a manager cannot be part of a name: use its model, lock\(Counter, key\)"):
        lock(Counter.objects, 1)


def test_text_that_depends_on_the_language_is_no_name():
    for text in (gettext_lazy("order"), lazystr("order")):
        with pytest.raises(TypeError, match="it changes with the language"):
            lock(text, 42)


def test_abstract_model_is_no_name():
    with pytest.raises(TypeError, match="VersionedMixin is abstract"):
        lock(VersionedMixin, 1)
