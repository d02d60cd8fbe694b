"""Tables of the tests of versions."""

from typing import Any, ClassVar
from uuid import uuid4

from sqlalchemy import JSON, BigInteger, Column, ForeignKey, ForeignKeyConstraint, Integer, String, Table, Uuid, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    column_property,
    mapped_column,
    relationship,
)

from sqla_dlock.versions import VersionedMixin
from tests.sqla_dlock.models import Base


class Order(VersionedMixin, Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    reads: Mapped[int] = mapped_column(default=0)
    edited: Mapped[int] = mapped_column(default=0, onupdate=7)
    seen: Mapped[int] = mapped_column(default=0, onupdate=text("1 + 1"))


class Code(VersionedMixin, Base):
    """Its key has two columns, which the program chooses; its version has another name in the table."""

    __tablename__ = "code"

    kind: Mapped[str] = mapped_column(String(20), primary_key=True)
    code: Mapped[str] = mapped_column(String(20), primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    version: Mapped[int] = mapped_column("row_version", server_default="1")


class Draft(VersionedMixin, Base):
    __tablename__ = "draft"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    revision: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[Any] = {"version_id_col": revision}


class Place(VersionedMixin, Base):
    __tablename__ = "place"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(80), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "place"}


class Shop(Place):
    """It is joined: its version is in the table of Place."""

    __tablename__ = "shop"

    id: Mapped[int] = mapped_column(ForeignKey("place.id"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(80), default="")
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "shop"}


class Park(Place):
    """It is in the same table as Place."""

    trees: Mapped[int | None]
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "park"}


class Person(Base):
    __tablename__ = "person"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(80), default="")


class Member(VersionedMixin, Person):
    """It has a version, and its parent has none."""

    __tablename__ = "member"

    id: Mapped[int] = mapped_column(ForeignKey("person.id"), primary_key=True)
    grade: Mapped[int] = mapped_column(default=0)


_account = Table(
    "account_of_join",
    Base.metadata,
    Column("id", Integer, primary_key=True),
    Column("note", String(80), default=""),
    Column("version", BigInteger, nullable=False),
)
_profile = Table(
    "profile_of_join",
    Base.metadata,
    Column("account_id", ForeignKey(_account.c.id), primary_key=True),
    Column("motto", String(80), default=""),
)


class Account(VersionedMixin, Base):
    """It is mapped to a join."""

    __table__ = _account.join(_profile)
    id = column_property(_account.c.id, _profile.c.account_id)
    __mapper_args__: ClassVar[Any] = {"version_id_col": _account.c.version}


class Device(Base):
    __tablename__ = "device"

    tenant: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Sensor(VersionedMixin, Device):
    """The key of its table has another order than that of the class."""

    __tablename__ = "sensor"

    sensor_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sensor_tenant: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(String(80), default="")
    __table_args__ = (ForeignKeyConstraint(["sensor_tenant", "sensor_number"], ["device.tenant", "device.number"]),)


class Room(VersionedMixin, Base):
    __tablename__ = "room"

    tenant: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "room"}


class Office(Room):
    """The key of its table has another order, too, and its version is in the table of its parent."""

    __tablename__ = "office"

    office_number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    office_tenant: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    title: Mapped[str] = mapped_column(String(80), default="")
    __table_args__ = (ForeignKeyConstraint(["office_tenant", "office_number"], ["room.tenant", "room.number"]),)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "office"}


class Keyless(VersionedMixin, Base):
    """Its table has no PRIMARY KEY."""

    __table__ = Table(
        "keyless",
        Base.metadata,
        Column("tenant", Integer, nullable=False),
        Column("number", Integer, nullable=False),
        Column("title", String(80), default=""),
        Column("version", BigInteger, nullable=False),
    )
    __mapper_args__: ClassVar[Any] = {
        "primary_key": [__table__.c.tenant, __table__.c.number],
        "version_id_col": __table__.c.version,
    }


class Revised(Base):
    """Its version is a number like others, which the application writes."""

    __tablename__ = "revised"

    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)


class Numbered(Base):
    """It has a version without the mixin."""

    __tablename__ = "numbered"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    version: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[Any] = {"version_id_col": version}


class Counted(Base):
    """The database increments its version, which has no mixin either."""

    __tablename__ = "counted"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    version: Mapped[int] = mapped_column(server_default="1", onupdate=text("version + 1"))
    __mapper_args__: ClassVar[Any] = {"version_id_col": version, "version_id_generator": False}


class Document(VersionedMixin, Base):
    __tablename__ = "document"

    id: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)


class Note(VersionedMixin, Base):
    """Its version is a text, which the class makes."""

    __tablename__ = "text_versioned_note"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    revision: Mapped[str] = mapped_column(String(32))
    __mapper_args__: ClassVar[Any] = {"version_id_col": revision, "version_id_generator": lambda _: uuid4().hex}


class Letter(VersionedMixin, Base):
    """The database keeps its version, and compares it, in another spelling than the class makes."""

    __tablename__ = "letter"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(String(80), default="")
    revision: Mapped[str] = mapped_column(Uuid(as_uuid=False))
    __mapper_args__: ClassVar[Any] = {"version_id_col": revision, "version_id_generator": lambda _: uuid4().hex.upper()}


class Named(VersionedMixin, Base):
    """Its columns are named as the parameters of a statement might be, and one of them is set after another."""

    __tablename__ = "named"

    id: Mapped[int] = mapped_column(primary_key=True)
    expected: Mapped[int] = mapped_column(default=0)
    key0: Mapped[int] = mapped_column(default=0)
    dlock_expected: Mapped[int] = mapped_column(default=0)
    dlock0: Mapped[int] = mapped_column(default=0)
    first: Mapped[int] = mapped_column("dlock1", default=0)
    double: Mapped[int] = mapped_column(default=0, onupdate=lambda made: 2 * made.get_current_parameters()["dlock1"])


class DataBase(MappedAsDataclass, DeclarativeBase):
    metadata = Base.metadata


class Card(VersionedMixin, DataBase):
    __tablename__ = "card"

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    title: Mapped[str] = mapped_column(String(80))


class Basket(VersionedMixin, Base):
    """The root of an aggregate."""

    __tablename__ = "basket"
    __version_children__ = ("lines", "lines.notes")

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(80), default="")
    lines: Mapped[list["Line"]] = relationship(back_populates="basket", cascade="all, delete-orphan")


class Line(VersionedMixin, Base):
    __tablename__ = "line"

    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    basket_id: Mapped[int | None] = mapped_column(ForeignKey("basket.id"))
    basket: Mapped[Basket | None] = relationship(back_populates="lines")
    notes: Mapped[list["LineNote"]] = relationship(back_populates="line", cascade="all, delete-orphan")


class LineNote(Base):
    __tablename__ = "line_note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(String(80), default="")
    line_id: Mapped[int] = mapped_column(ForeignKey("line.id"))
    line: Mapped[Line] = relationship(back_populates="notes")
