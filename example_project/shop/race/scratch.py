"""Where a race takes place: the database and the Redis of the environment, or throw-away ones."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import Error, connection, transaction

from django_dlock import lock
from dlock_core.errors import DLockError
from shop.actions import pay
from shop.models import Order, Product
from shop.race import RaceFailed, servers


@contextmanager
def place(*, with_redis: bool) -> Iterator[Path]:
    """Make a database ready, and a Redis if wanted, and name them in the environment; gives a directory for logs."""
    with TemporaryDirectory(prefix="race-") as directory, ExitStack() as stack:
        home = Path(directory)
        if not os.environ.get("DATABASE_URL"):
            use_sqlite(home / "race.sqlite3")
        prepare_database()
        stack.callback(connection.close)
        if with_redis and not os.environ.get("REDIS_URL"):
            os.environ["REDIS_URL"] = stack.enter_context(servers.redis(home))
        elif with_redis:
            prepare_redis()
        yield home


def use_sqlite(path: Path) -> None:
    connection.settings_dict["NAME"] = str(path)
    os.environ["DATABASE_URL"] = f"sqlite:///{quote(str(path))}"


def prepare_database() -> None:
    try:
        call_command("migrate", verbosity=0)
    except Error as error:
        raise RaceFailed(f"DATABASE_URL: {first_line(error)}") from None


def prepare_redis() -> None:
    try:
        lock("race", os.getpid(), wait=0, fence=False).acquire().release()
    except (ImproperlyConfigured, DLockError) as error:
        raise RaceFailed(f"REDIS_URL: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def paid_orders(number: int) -> Iterator[tuple[Product, list[int]]]:
    """Sell a product `number` times, and remove it all afterwards: the database may be somebody's own."""
    with transaction.atomic():
        product = Product.objects.create(name="Teapot", price=48, stock=number)
        orders = [pay(product, 1).pk for _ in range(number)]
    try:
        yield product, orders
    finally:
        Order.objects.filter(product=product).delete()
        product.delete()
