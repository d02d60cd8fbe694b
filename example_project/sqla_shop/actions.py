"""What can be done with an order. Nothing here protects it: strategies.py does, in four ways.

`ship` and `cancel` look at the order, do their work, and change it; the caller saves it and commits. Both return a line
of history.
"""

from collections.abc import Callable
from time import sleep

from sqlalchemy.orm import Session

from example_project.sqla_shop.models import Event, Kind, Order, Payment, Product, Shipment, State

Act = Callable[[Session, Order], Event]


def pay(session: Session, product: Product, quantity: int) -> Order:
    """Sell pieces of a product: they are set aside for the order."""
    order = Order(product=product, quantity=quantity, amount=product.price * quantity, events=1)
    session.add(order)
    session.flush()
    put_on_shelf(order, -quantity)
    session.add(Payment(order_id=order.id, kind=Kind.CHARGE, amount=order.amount))
    text = f"{euros(order.amount)} paid for {quantity} of {product.name}"
    session.add(Event(order_id=order.id, kind=Kind.PAID, text=text))
    return order


def ship(session: Session, order: Order) -> Event:
    """Hand the pieces set aside to the carrier."""
    if order.state != State.PAID:
        return note(session, order, Kind.REFUSED, f"Not shipped: already {order.state}")
    wait_for_answer()
    order.state = State.SHIPPED
    session.add(Shipment(order_id=order.id, quantity=order.quantity))
    return note(session, order, Kind.SHIPPED, f"Shipped: {order.quantity} of {order.product.name}")


def cancel(session: Session, order: Order) -> Event:
    """Give the money back, and put the pieces back on the shelf."""
    if order.state != State.PAID:
        return note(session, order, Kind.REFUSED, f"Not cancelled: already {order.state}")
    wait_for_answer()
    order.state = State.CANCELLED
    session.add(Payment(order_id=order.id, kind=Kind.REFUND, amount=order.amount))
    put_on_shelf(order, order.quantity)
    return note(session, order, Kind.CANCELLED, f"Cancelled, {euros(order.amount)} refunded")


def note(session: Session, order: Order, kind: str, text: str) -> Event:
    """Write a line into the history and count it, as everyday code counts: read, add one, write."""
    order.events += 1
    event = Event(order_id=order.id, kind=kind, text=text)
    session.add(event)
    return event


def put_on_shelf(order: Order, pieces: int) -> None:
    # The database itself adds: this column needs no lock, and orders of one product do not wait for each other.
    order.product.stock = Product.stock + pieces


def wait_for_answer() -> None:
    # Stands for the call to the carrier or to the payment provider: a real one takes longer.
    sleep(0.005)


def euros(cents: int) -> str:
    return f"{cents / 100:.2f} €"
