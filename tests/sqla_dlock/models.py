"""Tables of the tests."""

import uuid

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column, relationship

from sqla_dlock.fencing import FencedMixin


class Base(DeclarativeBase):
    pass


class Counter(Base):
    __tablename__ = "counter"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(80), default="")
    value: Mapped[int] = mapped_column(default=0)


class Stock(Base):
    __tablename__ = "stock"

    id: Mapped[int] = mapped_column(primary_key=True)
    pieces: Mapped[int] = mapped_column(default=0)
    kind: Mapped[str] = mapped_column(String(20), default="stock")
    counter_id: Mapped[int | None] = mapped_column(ForeignKey("counter.id"))
    counter: Mapped[Counter | None] = relationship(lazy="joined")

    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "stock"}


class ColdStock(Stock):
    __tablename__ = "cold_stock"

    id: Mapped[int] = mapped_column(ForeignKey("stock.id"), primary_key=True)
    degrees: Mapped[int] = mapped_column(default=0)

    __mapper_args__ = {"polymorphic_identity": "cold"}


class Delivery(Base):
    __tablename__ = "delivery"

    id: Mapped[int] = mapped_column(primary_key=True)
    stock_id: Mapped[int] = mapped_column(ForeignKey("stock.id"))


class Shelf(Base):
    """Its key has two columns."""

    __tablename__ = "shelf"

    aisle: Mapped[str] = mapped_column(String(20), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    pieces: Mapped[int] = mapped_column(default=0)


class Article(Base):
    """SQLAlchemy itself versions it."""

    __tablename__ = "article"

    id: Mapped[int] = mapped_column(primary_key=True)
    reads: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": version}


class Parcel(FencedMixin, Base):
    __tablename__ = "parcel"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    value: Mapped[int] = mapped_column(default=0)

    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "parcel"}


class HeavyParcel(Parcel):
    """It has a table below its parent's."""

    __tablename__ = "heavy_parcel"

    id: Mapped[int] = mapped_column(ForeignKey("parcel.id"), primary_key=True)
    kilos: Mapped[int] = mapped_column(default=0)

    __mapper_args__ = {"polymorphic_identity": "heavy"}


class LightParcel(Parcel):
    """It is in its parent's table."""

    __mapper_args__ = {"polymorphic_identity": "light"}


class Letter(FencedMixin, Base):
    """Its table and key have to be quoted."""

    __tablename__ = "group"

    id: Mapped[str] = mapped_column("Key", String(40), primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Ticket(FencedMixin, Base):
    __tablename__ = "ticket"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Tray(FencedMixin, Base):
    """Its key has two columns."""

    __tablename__ = "tray"

    aisle: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)


class DataBase(MappedAsDataclass, DeclarativeBase):
    metadata = Base.metadata


class Stamp(FencedMixin, DataBase):
    __tablename__ = "stamp"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)
