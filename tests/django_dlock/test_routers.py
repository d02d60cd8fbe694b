"""A lock whose name has a model protects the database to which the router writes that model."""

from typing import Any

import pytest
from django.db import connections
from django.db.transaction import atomic
from django.test import override_settings

from django_dlock import lock, locked, pk
from django_dlock.errors import StaleToken
from django_dlock.models import Fence
from tests.chaos import EverybodyIn
from tests.testapp.models import Counter, Crate, HeavyParcel, Parcel, Stock


class OtherParcels:
    """Keeps parcels in "other", leaves crates to their instances, and everything else in "default"."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        if issubclass(model, Crate):
            return None
        return "other" if issubclass(model, Parcel) else "default"

    db_for_read = db_for_write


@pytest.fixture(autouse=True)
def _routed():
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.OtherParcels"]):
        yield


@pytest.fixture
def parcel(use_database):
    use_database("default")
    use_database("other")
    return Parcel.objects.create()


@pytest.fixture
def broken():
    """A store that grants every request; `broken.tokens` are the tokens of its next grants."""
    backend = EverybodyIn()
    with override_settings(DLOCK={"default": {"BACKEND": backend, "TTL": 60, "WAIT": 20}}):
        yield backend


@pytest.mark.parametrize("form", ["transaction", "lease"])
@pytest.mark.parametrize("kind", [Parcel, "testapp.Parcel"])
def test_overtaken_holder_is_refused_in_the_database_of_its_model(broken, parcel, kind, form):
    broken.tokens, broken.forgetful = iter([10]), True
    Parcel.objects.update(dlock_token=99, dlock_holder="x")
    with pytest.raises(StaleToken), lock(kind, parcel.pk, fence=form), atomic("other"):
        Parcel.objects.update(value=1)
    assert Parcel.objects.get().value == 0


def test_decorator_opens_its_transaction_in_the_database_of_the_model_of_each_call(store, parcel):
    @locked(Parcel, pk)
    def ship(request, pk):
        Parcel.objects.update(value=1)
        return [alias for alias in ("default", "other") if connections[alias].in_atomic_block]

    assert ship(None, pk=parcel.pk) == ship(None, pk=parcel) == ["other"]
    assert Parcel.objects.get().dlock_token > 0
    assert not Fence.objects.using("default").exists()


@pytest.mark.parametrize("parts", [(Parcel,), (Parcel, 1), ("testapp.parcel", 1), (HeavyParcel, 1), ("x", Parcel, 1)])
def test_model_in_a_name_is_asked_for_its_database(parts):
    assert lock(*parts).using == "other"
    assert lock(*parts, fence=False).using == "other"


@pytest.mark.parametrize("parts", [("order", 42), ("testapp.parcel", "no key"), (Counter, 1), (Crate, 1)])
def test_any_other_name_is_for_the_default_database(parts):
    assert lock(*parts).using == "default"


def test_instance_that_its_save_writes_elsewhere_than_its_manager_needs_to_be_told_which_one_is_protected():
    read_there = Crate.from_db("other", ["id"], [1])
    with pytest.raises(ValueError, match="'default' and 'other': pass using="):
        lock(Crate, read_there)
    assert lock(Crate, read_there, using="other").using == "other"
    assert lock(Crate, Crate(pk=1)).using == "default"


def test_given_database_comes_before_that_of_the_model(store, parcel):
    assert lock(Parcel, 1, using="default").using == "default"

    @locked(Parcel, pk, using="default")
    def ship(request, pk):
        return connections["default"].in_atomic_block

    assert ship(None, pk=parcel.pk)


def test_models_of_several_databases_need_to_be_told_which_one_is_protected(store):
    with pytest.raises(ValueError, match=r"'default' and 'other'.*using="):
        lock(Counter, 1, Parcel, 2)
    with pytest.raises(ValueError, match=r"@locked on .*'default' and 'other'.*using="):
        locked(Counter, 1, Parcel, pk)(lambda pk: None)(pk=1)
    assert lock(Counter, 1, Parcel, 2, using="other").using == "other"
    assert lock(Counter, 1, Stock, 2).using == "default"


def test_router_is_asked_once_for_each_lock_and_not_while_views_are_imported(store, parcel, monkeypatch):
    asked = []
    monkeypatch.setattr(OtherParcels, "db_for_write", lambda _, model, **__: asked.append(model) or "other")
    decorated = locked(Parcel, pk)(lambda pk: None)
    assert asked == []
    decorated(pk=1)
    block = lock(Parcel, 1)
    with block:
        pass
    with block:
        pass
    assert asked == [Parcel, Parcel]
