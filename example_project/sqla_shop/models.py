"""The tables of the shop. An order is paid, then either shipped or cancelled: never both."""

from datetime import UTC, datetime
from enum import StrEnum

from sqlalchemy import DateTime, ForeignKey, String, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from sqla_dlock import VersionedMixin


class Base(DeclarativeBase):
    id: Mapped[int] = mapped_column(primary_key=True, sort_order=-1)


class Product(Base):
    __tablename__ = "product"

    name: Mapped[str] = mapped_column(String(100))
    price: Mapped[int]  # cents, as every amount here
    stock: Mapped[int]  # pieces on the shelf that are still for sale


class State(StrEnum):
    PAID = "paid"
    SHIPPED = "shipped"
    CANCELLED = "cancelled"


class Order(VersionedMixin, Base):
    __tablename__ = "customer_order"

    product_id: Mapped[int] = mapped_column(ForeignKey("product.id"))
    quantity: Mapped[int]
    amount: Mapped[int]
    state: Mapped[str] = mapped_column(String(9), default=State.PAID)
    events: Mapped[int] = mapped_column(default=0)  # how many lines the history has: shows lost updates

    product: Mapped[Product] = relationship()
    history: Mapped[list["Event"]] = relationship(back_populates="order", order_by="Event.id.desc()")


class Kind(StrEnum):
    PAID = "paid"
    SHIPPED = "shipped"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    CHARGE = "charge"
    REFUND = "refund"


class Event(Base):
    __tablename__ = "event"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id, ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(9))
    text: Mapped[str] = mapped_column(String(200))
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), default=lambda: datetime.now(UTC))

    order: Mapped[Order] = relationship(back_populates="history")


class Payment(Base):
    __tablename__ = "payment"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id, ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(6))
    amount: Mapped[int]


class Shipment(Base):
    __tablename__ = "shipment"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id, ondelete="CASCADE"))
    quantity: Mapped[int]  # pieces that left the shop


def save_unchecked(session: Session, order: Order) -> None:
    """Overwrite the row, whatever it says by now: a flush would check the version, as only one strategy does."""
    session.execute(update(Order).where(Order.id == order.id).values(state=order.state, events=order.events))
