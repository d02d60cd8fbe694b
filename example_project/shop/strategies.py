"""Ship and cancel, protected in four ways: read them side by side.

`act` is `ship` or `cancel` of shop.actions. All four views do the same; they differ in how the order is read and saved.
"""

from django.http import HttpRequest, HttpResponse

from django_dlock import locked, pk, retry_on_conflict
from shop.actions import Act
from shop.answers import answer
from shop.models import Order


def none(request: HttpRequest, pk: int, act: Act) -> HttpResponse:
    """No protection: between our read and our write the order may change, and nothing checks it again."""
    order = Order.objects.get(pk=pk)
    event = act(order)
    order.save_unchecked()
    return answer(request, event)


def row(request: HttpRequest, pk: int, act: Act) -> HttpResponse:
    """A row lock: the second request waits in the database, before it reads, until the first has committed."""
    with Order.locked_row(pk) as order:
        event = act(order)
        order.save_unchecked()
    return answer(request, event)


@retry_on_conflict(attempts=5)
def version(request: HttpRequest, pk: int, act: Act) -> HttpResponse:
    """A version column: no request waits; the second to save is rolled back, and starts again from a fresh read."""
    order = Order.objects.get(pk=pk)
    event = act(order)
    order.save_with_version()
    return answer(request, event)


@locked("order", pk)
def lease(request: HttpRequest, pk: int, act: Act) -> HttpResponse:
    """A lease on Redis: taken before the transaction begins, held until its COMMIT is known, and fenced in between."""
    order = Order.objects.get(pk=pk)
    event = act(order)
    order.save_unchecked()
    return answer(request, event)


STRATEGIES = {"none": none, "row": row, "version": version, "lease": lease}
