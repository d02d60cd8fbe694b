"""Arguments that name a lock are found however the function is called, and refused when they cannot exist."""

from __future__ import annotations

import enum
import functools
from decimal import Decimal
from types import SimpleNamespace
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync

from dlock_core.errors import NoSuchKey
from dlock_core.names import Kind, join
from dlock_core.web.decorators import (
    Argument,
    NameTemplate,
    arg,
    finder,
    placeholders,
    refuse_bare,
)


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
    assert tuple(finder(ship, name)(args, kwargs) for name in ("customer", "order_id", "by")) == found


def name_of(function, *parts, from_url=(), model=None):
    """Return a function that names the lock of a call, as a decorator would."""

    def kind_of(part):
        return None if part is not model else Kind("model", (int,), lambda value: None)

    name = NameTemplate(function, (parts[0], *placeholders(parts[1:])), kind_of, lambda args, kwargs: from_url)
    return lambda *args, **kwargs: name(join, args, kwargs)


def test_parts_that_are_texts_stand_for_arguments():
    assert name_of(ship, "order", "order_id", 8)("c", 7) == "order:7:8"


@pytest.mark.parametrize("spelling", ["42", "042", "+42", 42])
def test_argument_with_a_type_has_one_name(spelling):
    assert name_of(ship, "order", arg("order_id", int))("c", spelling) == "order:42"
    assert name_of(ship, "order", Argument("order_id").as_(int))("c", spelling) == "order:42"


def test_argument_that_is_of_its_type_already_is_not_converted():
    key = UUID(int=7)
    assert name_of(ship, "order", arg("order_id", UUID))("c", key) == f"order:{key}"
    assert name_of(ship, "order", arg("order_id", UUID))("c", key.hex) == f"order:{key}"


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, "abc"), (UUID, "42"), (Decimal, "x"), (int, "4_2"), (int, "٤٢"), (Decimal, "4_2"), (float, "4_2")],
)
def test_value_that_its_type_refuses_is_no_key(kind, value):
    with pytest.raises(NoSuchKey, match=f"'{value}' cannot be a key of order"):
        name_of(ship, "order", arg("order_id", kind))("c", value)


def test_function_as_a_part_is_called_with_the_arguments_of_the_call():
    name = name_of(ship, "order", lambda customer, order_id, **more: f"{customer}-{order_id}-{more}")
    assert name("c", 7, by="air") == "order:c-7-%7B%27by%27%3A%20%27air%27%7D"


def test_function_that_gives_a_coroutine_is_refused_at_once_or_when_it_does():
    async def key(*args):
        return 42

    with pytest.raises(TypeError, match="plain function"):
        name_of(ship, "order", key)
    with pytest.raises(TypeError, match="plain function"):
        name_of(ship, "order", lambda *args: key())("c", 7)
    with pytest.raises(TypeError, match="plain function"):
        name_of(ship, "order", lambda *args: (yield))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("order_id", None, r"@locked on ship: the argument 'order_id': .*NoneType"),
        ("order_id", "", r"@locked on ship: the argument 'order_id': .*empty"),
        ("order_id", "x".strip, r"@locked on ship: the argument 'order_id': .*'strip': call it, strip\(\)"),
        (arg("order_id", int), None, r"@locked on ship: the argument 'order_id': .*NoneType"),
        (arg("order_id", float), "1", r"@locked on ship: the argument 'order_id': .*float"),
        (lambda *args: [42], 7, r"@locked on ship: what <function .* returned: .*list"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_that_cannot_name_a_lock_is_told_with_its_function_and_argument(part, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        name_of(ship, "order", part)("c", value)


def test_text_out_of_a_url_is_warned_of_once_for_each_function():
    text = "".join(["4", "2"])
    names = [name_of(ship, "order", "order_id", from_url=[text]) for _ in range(2)]
    for name in names:
        with pytest.warns(RuntimeWarning, match=r"ship: 'order_id' is a text from the URL.*arg\('order_id', int\)"):
            assert name("c", text) == "order:42"
        assert name("c", text) == "order:42"


def test_text_that_is_converted_or_from_elsewhere_is_not_warned_of():
    text = "".join(["4", "2"])
    for part in (arg("order_id", int), arg("order_id", str)):
        assert name_of(ship, "order", part, from_url=[text])("c", text) == "order:42"
    model = type("Model", (), {})
    assert name_of(ship, model, "order_id", from_url=[text], model=model)
    assert name_of(ship, "order", "order_id", from_url=["43"])("c", text) == "order:42"


def test_decorator_without_parentheses_is_refused():
    for bare in (ship, lambda: None, SimpleNamespace, functools.partial(ship)):
        with pytest.raises(TypeError, match=r"does not say what to lock: write @locked\("):
            refuse_bare(bare, is_model=False)
    refuse_bare("order", is_model=False)
    refuse_bare(SimpleNamespace, is_model=True)


@pytest.mark.parametrize("wrong", [42, "int", arg])
def test_type_of_an_argument_that_is_none_is_refused(wrong):
    if wrong is not arg:
        with pytest.raises(TypeError, match="is a type or a function"):
            arg("pk", wrong)
    with pytest.raises(TypeError, match="name of an argument is text"):
        arg(wrong if wrong != "int" else 1)


@pytest.mark.parametrize("order", [SimpleNamespace(customer={"key": 9}), {"customer": SimpleNamespace(key=9)}])
def test_attribute_or_item_of_an_argument(order):
    find = finder(lambda order: None, "order.customer.key")
    assert find((order,), {}) == 9


@pytest.mark.parametrize("name", ["pk", "pk.id", "rest"])
def test_argument_that_the_function_does_not_have_is_refused_at_once(name):
    def pay(order_id, *rest):
        pass

    with pytest.raises(TypeError, match=rf"pay has no argument '{name}', only: order_id"):
        finder(pay, name)


def test_argument_that_may_come_is_refused_when_it_does_not():
    find = finder(ship, "pk")
    assert find(("c", 7), {"pk": 8}) == 8
    with pytest.raises(TypeError, match="'pk'; its named arguments: by"):
        find(("c", 7), {"by": "air"})


def test_partial_of_a_bound_method_has_no_self():
    class Shop:
        def ship(self, order_id):
            pass

    method = functools.update_wrapper(functools.partial(Shop().ship), Shop.ship)
    assert finder(method, "order_id")((7,), {}) == 7


def test_argument_shows_its_name():
    assert (repr(Argument("order.pk")), Argument("order.pk").root) == ("order.pk", "order")


@pytest.mark.parametrize(
    "data", [{}, {"order": None}, {"order": 7}, {"order": {}}, {"order": {"id": None}}, [7], "order", 7, None]
)
def test_data_of_a_client_without_the_key_is_no_key(data):
    def view(request):
        pass

    name = name_of(view, "order", "request.data.order.id")
    assert name(SimpleNamespace(data={"order": {"id": 7}})) == "order:7"
    with pytest.raises(NoSuchKey, match=r"the request has no data\.order\.id"):
        name(SimpleNamespace(data=data))


def test_attribute_of_a_value_that_is_a_text_too_is_found():
    class Queue(enum.StrEnum):
        MAILS = "mails"

    def send(queue):
        pass

    assert name_of(send, "queue", "queue.value")(Queue.MAILS) == "queue:mails"


def test_function_that_does_not_show_its_arguments_is_named_with_what_to_do():
    async def view(order_id):
        pass

    with pytest.raises(TypeError, match="put the decorator below the one that returned it"):
        name_of(async_to_sync(view), "order", "order_id")
