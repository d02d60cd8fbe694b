"""The answer to a request: done (302, back to the order), or too late (409, the order's page says why)."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from shop.models import Event


def answer(request: HttpRequest, event: Event) -> HttpResponse:
    if event.kind == Event.Kind.REFUSED:
        return render(request, "shop/order.html", {"order": event.order, "refused": event}, status=409)
    return redirect("order", pk=event.order_id)
