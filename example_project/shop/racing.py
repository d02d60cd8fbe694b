"""What the race must know about this shop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.conf import settings
from django.core.management import call_command
from django.db import Error, connection, transaction
from django.db.models import Sum
from race import RaceFailed, Sale, Tally
from race.scratch import first_line
from shopsite.database import database

from shop.actions import pay
from shop.models import Event, Order, Payment, Product
from shop.strategies import STRATEGIES


class DjangoShop:
    strategies = list(STRATEGIES)
    server = "gunicorn"
    announcement = "Booting worker"
    folder = settings.BASE_DIR
    order_path = "/orders/{order}/"
    action_path = "/orders/{order}/{action}/"

    @contextmanager
    def database(self, url: str) -> Iterator[str]:
        connection.settings_dict["NAME"] = database(url)["NAME"]  # a throw-away one is newer than our settings
        try:
            call_command("migrate", verbosity=0)
        except Error as error:
            raise RaceFailed(f"DATABASE_URL: {first_line(error)}") from None
        try:
            yield connection.display_name
        finally:
            connection.close()

    def command(self, fd: int, processes: int) -> list[str]:
        command = ["gunicorn", "shopsite.wsgi", "--preload", f"--bind=fd://{fd}", f"--workers={processes}"]
        return [*command, "--timeout=30", "--graceful-timeout=2"]

    @contextmanager
    def paid_orders(self, number: int) -> Iterator[Sale]:
        with transaction.atomic():
            product = Product.objects.create(name="Teapot", price=48, stock=number)
            orders = [pay(product, 1).pk for _ in range(number)]
        try:
            yield orders, tally_of(product)
        finally:
            Order.objects.filter(product=product).delete()
            product.delete()


def tally_of(product: Product) -> Callable[[], Tally]:
    orders = Order.objects.filter(product=product)
    history = Event.objects.filter(order__product=product)
    shipped = orders.filter(history__kind=Event.Kind.SHIPPED)
    refunds = Payment.objects.filter(kind=Payment.Kind.REFUND, order__in=orders.filter(shipments__isnull=False))

    def count() -> Tally:
        return Tally(
            orders=orders.count(),
            both_shipped_and_cancelled=shipped.filter(history__kind=Event.Kind.CANCELLED).distinct().count(),
            refunds_of_shipped=refunds.count(),
            lost_updates=history.count() - orders.aggregate(counted=Sum("events"))["counted"],
            changed=history.filter(kind__in=[Event.Kind.SHIPPED, Event.Kind.CANCELLED]).count(),
        )

    return count
