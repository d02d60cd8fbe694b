"""The shop's pages."""

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_POST

from shop.actions import Act
from shop.models import Event, Order
from shop.strategies import STRATEGIES


def orders(request: HttpRequest) -> HttpResponse:
    """List the latest orders."""
    return render(request, "shop/orders.html", {"orders": Order.objects.select_related("product").order_by("-pk")[:50]})


def order(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an order, its history, and what can be done with it."""
    return render(request, "shop/order.html", {"order": get_object_or_404(Order, pk=pk)})


@require_POST
def change(request: HttpRequest, pk: int, act: Act) -> HttpResponse:
    """Ship or cancel an order under the strategy of the settings; a header says how often that was retried."""
    runs = 0

    def counted(order: Order) -> Event:
        nonlocal runs
        runs += 1
        return act(order)

    try:
        response = STRATEGIES[settings.SHOP_STRATEGY](request, pk=pk, act=counted)
    except Order.DoesNotExist:
        raise Http404 from None
    response.headers["Shop-Retries"] = str(runs - 1)
    return response


def strategy(request: HttpRequest) -> dict[str, str]:
    """Add to each page how orders are protected."""
    first_words, _, _ = (STRATEGIES[settings.SHOP_STRATEGY].__doc__ or "").partition(":")
    return {"strategy": settings.SHOP_STRATEGY, "protection": first_words[:1].lower() + first_words[1:]}
