"""Where a race takes place: the database and the Redis of the environment, or throw-away ones."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from django.core.management import call_command
from django.db import Error, connection, transaction

from shop.actions import pay
from shop.models import Order, Product
from shop.race import RaceFailed, servers


@contextmanager
def place(*, with_redis: bool) -> Iterator[Path]:
    """Make a database ready, and a Redis if wanted, and name them in the environment; gives a directory for logs."""
    with TemporaryDirectory(prefix="race-") as directory, ExitStack() as stack:
        home = Path(directory)
        if "DATABASE_URL" not in os.environ:
            use_sqlite(home / "race.sqlite3")
        reach_database()
        call_command("migrate", verbosity=0)
        if with_redis and "REDIS_URL" not in os.environ:
            os.environ["REDIS_URL"] = stack.enter_context(servers.redis(home))
        elif with_redis:
            reach_redis(os.environ["REDIS_URL"])
        stack.callback(connection.close)
        yield home


def use_sqlite(path: Path) -> None:
    connection.settings_dict["NAME"] = str(path)
    os.environ["DATABASE_URL"] = f"sqlite:///{quote(str(path))}"


def reach_database() -> None:
    try:
        connection.ensure_connection()
    except Error as error:
        raise RaceFailed(f"the database of DATABASE_URL cannot be reached: {first_line(error)}") from None


def reach_redis(url: str) -> None:
    from redis import Redis, RedisError

    try:
        Redis.from_url(url, socket_connect_timeout=5).ping()
    except ValueError:
        raise RaceFailed("REDIS_URL must be like redis://host:port/0, rediss://… or unix://path") from None
    except RedisError as error:
        raise RaceFailed(f"the Redis of REDIS_URL cannot be reached: {first_line(error)}") from None


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
