"""What can be done with an order. Nothing here protects it: shop.strategies does, in four ways.

`ship` and `cancel` look at the order, do their work, and change it; the caller saves it. Both return a line of history.
"""

from collections.abc import Callable
from time import sleep

from django.db.models import F

from shop.models import Event, Order, Payment, Product, Shipment

Act = Callable[[Order], Event]


def pay(product: Product, quantity: int) -> Order:
    """Sell pieces of a product: they are set aside for the order."""
    order = Order.objects.create(product=product, quantity=quantity, amount=product.price * quantity, events=1)
    put_on_shelf(order, -quantity)
    Payment.objects.create(order=order, kind=Payment.Kind.CHARGE, amount=order.amount)
    Event.objects.create(order=order, kind=Event.Kind.PAID, text=f"{order.amount} paid for {quantity} of {product}")
    return order


def ship(order: Order) -> Event:
    """Hand the pieces set aside to the carrier."""
    if order.state != Order.State.PAID:
        return order.note(Event.Kind.REFUSED, f"Not shipped: already {order.state}")
    wait_for_answer()
    order.state = Order.State.SHIPPED
    Shipment.objects.create(order=order, quantity=order.quantity)
    return order.note(Event.Kind.SHIPPED, f"Shipped: {order.quantity} of {order.product}")


def cancel(order: Order) -> Event:
    """Give the money back, and put the pieces back on the shelf."""
    if order.state != Order.State.PAID:
        return order.note(Event.Kind.REFUSED, f"Not cancelled: already {order.state}")
    wait_for_answer()
    order.state = Order.State.CANCELLED
    Payment.objects.create(order=order, kind=Payment.Kind.REFUND, amount=order.amount)
    put_on_shelf(order, order.quantity)
    return order.note(Event.Kind.CANCELLED, f"Cancelled, {order.amount} refunded")


def put_on_shelf(order: Order, pieces: int) -> None:
    # The database itself adds: this column needs no lock, and orders of one product do not wait for each other.
    Product.objects.filter(pk=order.product_id).update(stock=F("stock") + pieces)


def wait_for_answer() -> None:
    # Stands for the call to the carrier or to the payment provider: a real one takes longer.
    sleep(0.005)
