"""Arguments that name a lock: found in every way to call, refused when they cannot be there."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from dlock_core.arguments import Argument, fill, finder, placeholders, refuse_coroutine, refuse_late


def ship(customer, /, order_id, *rest, by="post", **more):
    pass


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        (("c", 7), {}, ("c", 7, "post")),
        (("c",), {"order_id": 7, "by": "air"}, ("c", 7, "air")),
        (("c", 7, 8, 9), {}, ("c", 7, "post")),
    ],
)
def test_argument_is_found_by_place_name_or_default(args, kwargs, found):
    find = finder(ship, ["customer", "order_id", "by"])
    assert tuple(find(name, args, kwargs) for name in ("customer", "order_id", "by")) == found


def test_parts_that_are_texts_stand_for_arguments():
    find = finder(ship, ["order_id"])
    assert list(fill(("order", *placeholders(["order_id", 8])), find, ("c", 7), {})) == ["order", 7, 8]


@pytest.mark.parametrize("order", [SimpleNamespace(customer={"key": 9}), {"customer": SimpleNamespace(key=9)}])
def test_attribute_or_item_of_an_argument(order):
    find = finder(lambda order: None, ["order.customer.key"])
    assert find("order.customer.key", (order,), {}) == 9


@pytest.mark.parametrize("name", ["pk", "pk.id", "rest"])
def test_argument_that_the_function_does_not_have_is_refused_at_once(name):
    def pay(order_id, *rest):
        pass

    with pytest.raises(TypeError, match=rf"pay has no argument '{name}', only: order_id"):
        finder(pay, [name])


def test_argument_that_may_come_is_refused_when_it_does_not():
    find = finder(ship, ["pk"])
    assert find("pk", ("c", 7), {"pk": 8}) == 8
    with pytest.raises(TypeError, match="'pk'; its named arguments: by"):
        find("pk", ("c", 7), {"by": "air"})


def test_partial_of_a_bound_method_has_no_self():
    class Shop:
        def ship(self, order_id):
            pass

    method = functools.update_wrapper(functools.partial(Shop().ship), Shop.ship)
    assert finder(method, ["order_id"])("order_id", (7,), {}) == 7


def test_argument_shows_its_name():
    assert (repr(Argument("order.pk")), Argument("order.pk").root) == ("order.pk", "order")


def test_generator_is_refused():
    def late():
        yield

    async def too_late():
        yield

    for function in (late, too_late):
        with pytest.raises(TypeError, match="generator"):
            refuse_late(function)


def test_coroutine_of_a_blocking_function_is_closed_and_refused():
    async def answer():
        pass

    with pytest.raises(TypeError, match=r"coroutine: await it"):
        refuse_coroutine(ship, answer(), "await it")
    assert refuse_coroutine(ship, 42, "") == 42
