"""What the race must know about this shop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import ColumnElement, delete, exists, func, select
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.orm import Session

from example_project.race import RaceFailed, Sale, Tally
from example_project.race.scratch import first_line
from example_project.sqla_shop.actions import pay
from example_project.sqla_shop.database import DRIVERS, make_tables, open_database, sessions
from example_project.sqla_shop.models import Event, Kind, Order, Payment, Product, Shipment
from example_project.sqla_shop.strategies import STRATEGIES

NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mysql": "MySQL"}


class SqlaShop:
    strategies = list(STRATEGIES)
    server = "uvicorn"
    announcement = "Application startup complete"
    folder = Path(__file__).parents[2]
    order_path = "/orders/{order}"
    action_path = "/orders/{order}/{action}"

    @contextmanager
    def database(self, url: str) -> Iterator[str]:
        try:
            engine = open_database(url)
            make_tables(engine)
        except ArgumentError:
            raise RaceFailed(
                f"DATABASE_URL must begin with one of {', '.join(f'{name}://' for name in DRIVERS)}"
            ) from None
        except DBAPIError as error:
            raise RaceFailed(f"DATABASE_URL: {first_line(error.orig or error)}") from None
        try:
            yield "MariaDB" if getattr(engine.dialect, "is_mariadb", False) else NAMES[engine.dialect.name]
        finally:
            engine.dispose()

    def command(self, fd: int, processes: int) -> list[str]:
        command = ["uvicorn", "example_project.sqla_shop.app:app", f"--fd={fd}", f"--workers={processes}"]
        # A process that has not answered after 5 s is killed, by default also while it still imports.
        return [*command, "--no-access-log", "--timeout-worker-healthcheck=60"]

    @contextmanager
    def paid_orders(self, number: int) -> Iterator[Sale]:
        with sessions.begin() as session:
            product = Product(name="Teapot", price=4800, stock=number)
            orders = [pay(session, product, 1).id for _ in range(number)]
        try:
            yield orders, tally_of(product.id)
        finally:
            with sessions.begin() as session:
                session.execute(delete(Order).where(Order.product_id == product.id))
                session.execute(delete(Product).where(Product.id == product.id))


def tally_of(product: int) -> Callable[[], Tally]:
    def count() -> Tally:
        with sessions() as session:
            return tally(session, product)

    return count


def tally(session: Session, product: int) -> Tally:
    ours = Order.product_id == product

    def orders(*where: ColumnElement[bool]) -> int:
        return session.scalar(select(func.count(Order.id)).where(ours, *where)) or 0

    def lines(entity: type[Event | Payment], *where: ColumnElement[bool]) -> int:
        return session.scalar(select(func.count(entity.id)).join(Order).where(ours, *where)) or 0

    def has(kind: Kind) -> ColumnElement[bool]:
        return Order.history.any(Event.kind == kind)

    is_shipped = exists().where(Shipment.order_id == Order.id)
    counted = session.scalar(select(func.sum(Order.events)).where(ours)) or 0
    return Tally(
        orders=orders(),
        both_shipped_and_cancelled=orders(has(Kind.SHIPPED), has(Kind.CANCELLED)),
        refunds_of_shipped=lines(Payment, Payment.kind == Kind.REFUND, is_shipped),
        lost_updates=lines(Event) - int(counted),
        changed=lines(Event, Event.kind.in_([Kind.SHIPPED, Kind.CANCELLED])),
    )
