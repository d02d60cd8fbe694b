"""Mapped classes in a lock's name: every spelling of a key is one lock, and what cannot be a key is no row."""

import uuid
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Float,
    ForeignKey,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    String,
    Text,
    Time,
    TypeDecorator,
    Uuid,
    create_engine,
    func,
    quoted_name,
    select,
)
from sqlalchemy import Enum as SqlEnum
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, registry, with_polymorphic
from sqlalchemy.types import UserDefinedType

from dlock_core.errors import NoSuchKey, NotSupported
from sqla_dlock.fencing import FencedMixin, TableFence
from sqla_dlock.handlers import locked
from sqla_dlock.locks import lock
from tests.sqla_dlock.models import ColdStock, Counter, HeavyParcel, LightParcel, Parcel, Shelf, Stock, Ticket, Tray

KEY = uuid.UUID("a1b2c3d4-0000-4000-8000-00000000abcd")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOON_TEXT = "2026-03-01%2012%3A00%3A00%2B00%3A00"


class Guid(TypeDecorator[uuid.UUID]):
    """A UUID as text, as applications write it themselves."""

    impl = CHAR(32)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else (value if isinstance(value, uuid.UUID) else uuid.UUID(value)).hex

    def process_result_value(self, value: Any, dialect: Any) -> uuid.UUID | None:
        return None if value is None else uuid.UUID(value)


class Number(TypeDecorator[int]):
    impl = Integer
    cache_ok = True


class Marked(TypeDecorator[str]):
    """A number that the application shows as "R-42"."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return value.removeprefix("R-")

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return f"R-{value}"


class PlainUuid(TypeDecorator[uuid.UUID]):
    impl = Uuid
    cache_ok = True


class Over(TypeDecorator[str]):
    """It is stored as another type."""

    impl = String
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.impl = kind


class ReadBack(Over):
    """Its text shows the type of what it gets from the type below it."""

    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return f"{type(value).__name__}-{value}"


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Tables(StrEnum):
    PARCEL = "parcel"


class Size(StrEnum):
    BIG = "b"


class Rank(IntEnum):
    FIRST = 1


class NamedColour(TypeDecorator[Colour]):
    impl = SqlEnum(Colour)
    cache_ok = True


class PlainText(Over):
    """Its method expects what a column of text returns."""

    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value.strip()


class Base(DeclarativeBase):
    pass


class Own(Base):
    __tablename__ = "own"
    id: Mapped[uuid.UUID] = mapped_column(Guid, primary_key=True)


class Written(Base):
    __tablename__ = "written"
    id: Mapped[str] = mapped_column(Uuid(as_uuid=False), primary_key=True)


class Price(Base):
    __tablename__ = "price"
    amount: Mapped[Decimal] = mapped_column(primary_key=True)


class Reading(Base):
    __tablename__ = "reading"
    at: Mapped[datetime] = mapped_column(DateTime(timezone=True), primary_key=True)


def with_key(kind: Any) -> Any:
    """Return a mapped class "keyed" whose key has this type."""
    return type(
        "Keyed",
        (registry().generate_base(),),
        {"__tablename__": "keyed", "id": Column(kind, primary_key=True, autoincrement=False)},
    )


class AsText(TypeDecorator[int]):
    """A number that its column has as text."""

    impl = String(9)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return str(int(value))

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return int(value)


class Code(Base):
    __tablename__ = "code"
    code: Mapped[str] = mapped_column(String(9), primary_key=True)


class OtherCode(Code):
    """It has its own table, whose rows are not its parent's."""

    __tablename__ = "other_code"
    __mapper_args__ = {"concrete": True}
    code: Mapped[str] = mapped_column(String(9), primary_key=True)


class FencedCode(FencedMixin, Code):
    """Its fence is in its own table, where a lock of its parent does not look."""

    __tablename__ = "fenced_code"
    code: Mapped[str] = mapped_column(ForeignKey("code.code"), primary_key=True)


def name(*parts: Any) -> str:
    return lock(Session(), *parts).name


@pytest.mark.parametrize(
    ("mapped", "spellings", "expected"),
    [
        (Counter, [42, "42", "042", "+42", " 42 ", Decimal(42)], "counter:42"),
        (Ticket, [KEY, str(KEY), str(KEY).upper(), KEY.hex, f"{{{KEY}}}"], f"ticket:{KEY}"),
        (Own, [KEY, str(KEY), str(KEY).upper(), KEY.hex], f"own:{KEY}"),
        (Written, [KEY, str(KEY), str(KEY).upper(), KEY.hex], f"written:{KEY}"),
        (Price, [Decimal("1.50"), "1.5", "01.500"], "price:1.5"),
        (
            Reading,
            [NOON, "2026-03-01T12:00:00Z", "2026-03-01 12:00+00:00"],
            f"reading:{NOON_TEXT}",
        ),
        (Shelf, [("a", 2), ["a", "02"]], "shelf:a:2"),
        (Code, ["abc"], "code:abc"),
        (Code, ["b", Size.BIG], "code:b"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_spelling_of_a_key_is_one_lock(mapped, spellings, expected):
    assert {name(mapped, spelling) for spelling in spellings} == {expected}


@pytest.mark.parametrize(
    ("kind", "spellings", "expected"),
    [
        (Number, [42, "42", "042", " +42"], "keyed:42"),
        (Marked, ["R-42", "42", "R-042"], "keyed:R-42"),
        (PlainUuid, [KEY, str(KEY), str(KEY).upper(), KEY.hex], f"keyed:{KEY}"),
        (SqlEnum(Colour), [Colour.RED, "RED"], "keyed:RED"),
        (SqlEnum(Colour, values_callable=lambda kind: [each.value for each in kind]), [Colour.RED, "r"], "keyed:r"),
        (SqlEnum(Size), [Size.BIG, "BIG", "b"], "keyed:BIG"),
        (SqlEnum("red", "blue"), ["red"], "keyed:red"),
        (NamedColour, [Colour.RED, "RED"], "keyed:RED"),
        (Float, ["1.50", "1.5", Decimal("1.500"), "15e-1"], "keyed:1.5"),
        (Numeric(10, 2, asdecimal=False), ["1.50", "1.5", Decimal("1.5")], "keyed:1.5"),
        (Float, [1.5, "1.5"], "keyed:1.5"),
        (Float, [0.1 + 0.2, "0.30000000000000004"], "keyed:0.30000000000000004"),
        (Numeric(10, 2, asdecimal=False), [1.5, "1.50"], "keyed:1.5"),
        (Boolean, [True, 1, "1", "01"], "keyed:1"),
        (Boolean, [False, 0, "0"], "keyed:0"),
        (ReadBack(Integer()), [42, "042"], "keyed:int-42"),
        (ReadBack(Boolean()), [True, 1, "1"], "keyed:bool-True"),
        (ReadBack(Float()), [1.5, "1.50", Decimal("1.5")], "keyed:float-1.5"),
        (ReadBack(Uuid()), [KEY, KEY.hex], f"keyed:UUID-{KEY}"),
        (ReadBack(Uuid(as_uuid=False)), [KEY, KEY.hex], f"keyed:str-{KEY}"),
        (ReadBack(SqlEnum(Colour)), [Colour.RED, "RED"], "keyed:Colour-Colour.RED"),
        (Date, [NOON.date(), "2026-03-01", datetime(2026, 3, 1)], "keyed:2026-03-01"),  # noqa: DTZ001
        (DateTime, [NOON.date(), "2026-03-01", datetime(2026, 3, 1)], "keyed:2026-03-01%2000%3A00%3A00"),  # noqa: DTZ001
        (CHAR(9), ["abc", "abc  ", "abc      "], "keyed:abc"),
        (Interval, [timedelta(days=1)], "keyed:1%20day%2C%200%3A00%3A00"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_spelling_is_one_lock_whatever_the_type_of_the_column(kind, spellings, expected):
    assert {name(with_key(kind), spelling) for spelling in spellings} == {expected}


class OfOneDatabase(TypeDecorator[str]):
    """As an application writes it that has one database."""

    impl = String(9)
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        if dialect.name == "mysql":
            raise NotImplementedError
        if dialect.name == "postgresql" and dialect.server_version_info < (14,):
            raise AssertionError
        return String(9)


def test_type_that_does_not_know_every_database_names_keys():
    assert name(with_key(OfOneDatabase), "a") == "keyed:a"


class Base36(TypeDecorator[int]):
    """Its instances have another value than its rows, of which the text is another row."""

    impl = String(9)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return value if isinstance(value, str) else f"{value // 36}{value % 36}"

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return int(value, 36)


def test_instance_of_a_type_that_is_read_as_another_value_has_the_name_of_its_key():
    mapped = with_key(Base36)
    assert name(mapped, mapped(id=42)) == name(mapped, 42) != name(mapped, "42")


PG = "postgresql"
VARIANTS = [
    (String(20).with_variant(CHAR(6), PG), ["ab", "ab ", "ab    "], "ab"),
    (String(36).with_variant(Uuid(as_uuid=False), PG), [KEY, str(KEY), str(KEY).upper(), KEY.hex], str(KEY)),
    (Uuid().with_variant(CHAR(36), "sqlite"), [KEY, KEY.hex, str(KEY), f"{str(KEY).upper()} "], str(KEY)),
    (CHAR(36).with_variant(Uuid(), PG), [KEY.hex, str(KEY), f"{str(KEY).upper()} "], str(KEY)),
    (String(20).with_variant(BigInteger, PG), ["42", "042"], "42"),
    (String(20).with_variant(BigInteger, PG), ["a42"], "a42"),
    (String(20).with_variant(Numeric(10, 2), PG), ["1.5", "1.50"], "1.5"),
    (String(20).with_variant(Date, PG), ["2026-03-01", "20260301"], "2026-03-01"),
    (BigInteger().with_variant(Integer, "sqlite"), [42, "42", "042"], "42"),
    (Number().with_variant(String(9), "sqlite"), ["42", "042"], "42"),
    (String(36).with_variant(Guid, PG), [str(KEY), KEY.hex, str(KEY).upper()], str(KEY)),
    (PlainText(String(20).with_variant(CHAR(6), PG)), ["ab", "ab "], "ab"),
    (PlainText(String(36).with_variant(Uuid(as_uuid=False), PG)), [KEY.hex, str(KEY).upper()], str(KEY)),
    (DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql"), [NOON, str(NOON)], NOON_TEXT),
    (DateTime().with_variant(DateTime(timezone=True), PG), [NOON, str(NOON)], NOON_TEXT),
    (Boolean().with_variant(Integer, "sqlite"), [True, 1, "1"], "1"),
    (Float().with_variant(Numeric(10, 2), PG), [1.5, "1.50"], "1.5"),
    (SqlEnum(Colour).with_variant(CHAR(9), "sqlite"), ["RED", "RED  "], "RED"),
]


@pytest.mark.parametrize(("kind", "spellings", "expected"), VARIANTS)
def test_every_spelling_is_one_lock_if_the_column_has_another_type_on_one_database(kind, spellings, expected):
    assert {name(with_key(kind), spelling) for spelling in spellings} == {f"keyed:{expected}"}


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (BigInteger().with_variant(Integer, "sqlite"), "x"),
        (String(9).with_variant(CHAR(9), PG), 42),
        (String(9).with_variant(BigInteger, PG), 42),  # MariaDB reads "042", too
        (String(9).with_variant(Date, PG), NOON.date()),
        (Integer().with_variant(String(9), PG), "42.0"),  # SQLite and MariaDB read 42
        (Date().with_variant(DateTime, PG), NOON.replace(tzinfo=None)),  # SQLite reads the date of it
        (DateTime().with_variant(DateTime(timezone=True), PG), NOON.replace(tzinfo=None)),
        (DateTime(timezone=True).with_variant(DateTime, PG), NOON),
    ],
)
def test_what_is_no_key_on_one_database_or_is_another_one_there_is_refused(kind, key):
    with pytest.raises(NoSuchKey):
        name(with_key(kind), key)


@pytest.mark.parametrize(
    ("kind", "key", "stored"),
    [
        (String(20).with_variant(BigInteger, PG), "042", "042"),
        (String(36).with_variant(Uuid(as_uuid=False), PG), KEY.hex, KEY.hex),
        (BigInteger().with_variant(Integer, "sqlite"), "042", 42),
        (Integer().with_variant(String(9), "sqlite"), "a42", "a42"),
        (String(20).with_variant(BigInteger, PG), None, 42),
    ],
)
def test_fence_is_in_the_row_that_the_key_reaches_although_the_name_unites_more(kind, key, stored):
    base = registry().generate_base()
    fenced = type("Row", (FencedMixin, base), {"__tablename__": "fenced_row", "id": Column(kind, primary_key=True)})
    for given in (key or fenced(id=stored), fenced(id=stored)):
        assert lock(Session(), fenced, given).fence.key == stored


def test_number_as_text_names_the_fenced_row_as_its_text_does():
    class Coded(FencedMixin, registry().generate_base()):
        __tablename__ = "coded"
        id: Mapped[str] = mapped_column(String(9), primary_key=True)

    for key in (42, "42", Decimal("42.0")):
        assert (found := lock(Session(), "coded", key)).name == "coded:42"
        assert found.fence.key == "42"


def test_foreign_key_to_a_class_that_is_defined_later_has_one_name_for_all_spellings():
    base = registry().generate_base()

    class Profile(base):
        __tablename__ = "profile"
        user_id: Mapped[int] = mapped_column(ForeignKey("late_user.id"), primary_key=True)

    class FencedProfile(FencedMixin, base):
        __tablename__ = "fenced_profile"
        user_id: Mapped[int] = mapped_column(ForeignKey("late_user.id"), primary_key=True)

    @locked(Profile, "user_id")
    def work(session, user_id):
        return user_id

    for parts in [(Profile, 42), (Profile, Profile(user_id=42)), (FencedProfile, 42), ("fenced_profile", 42)]:
        with pytest.raises(NotSupported, match="a foreign key to a table that is not defined yet"):
            lock(Session(), *parts)

    class LateUser(base):
        __tablename__ = "late_user"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert name(Profile, "042") == name(Profile, 42) == name(Profile, Profile(user_id=42)) == "profile:42"
    assert lock(Session(), "fenced_profile", "042").fence.key == 42


class Folded(TypeDecorator[str]):
    """The database folds it to lower case."""

    impl = String(9)
    cache_ok = True

    def bind_expression(self, bindparam):
        return func.lower(bindparam)


class FoldedText(String):
    cache_ok = True

    def bind_expression(self, bindparam):
        return func.lower(bindparam)


class Unknown(UserDefinedType[int]):
    cache_ok = True

    def get_col_spec(self, **_):
        return "INTEGER"


@pytest.mark.parametrize(
    "kind",
    [
        postgresql.INET(),
        Over(postgresql.MACADDR()),
        String(20).with_variant(postgresql.INET, PG),
        Unknown(),
        Folded(),
        FoldedText(9),
        Over(FoldedText(9)),
    ],
)
def test_key_whose_spellings_are_not_known_is_refused_when_its_class_is_named(kind):
    keyed = with_key(kind)
    for refused in (lambda: name(keyed, "10.0.0.1"), lambda: locked(keyed, "key")(lambda session, key: None)):
        with pytest.raises(NotSupported, match="by a text"):
            refused()


def test_fenced_class_whose_spellings_are_not_known_is_locked_by_a_text():
    class Host(FencedMixin, registry().generate_base()):
        __tablename__ = "host"
        address: Mapped[str] = mapped_column(postgresql.INET, primary_key=True)

    found = lock(Session(), "host", "10.0.0.1")
    assert (found.name, type(found.fence)) == ("host:10.0.0.1", TableFence)


def test_number_that_the_database_would_round_is_no_key():
    for kind in (Numeric(10, 2), Numeric(10, 2, asdecimal=False)):
        keyed = with_key(kind)
        assert name(keyed, "1.50") == name(keyed, Decimal("1.500")) == "keyed:1.5"
        for key in ("1.505", Decimal("1.505"), keyed(id=Decimal("1.505"))):
            with pytest.raises(NoSuchKey, match="2 digits after the point"):
                name(keyed, key)


def test_long_number_is_named_in_full_and_one_that_is_read_as_a_float_as_that_float():
    long = Decimal("12345678901234567.89")
    for kind in (Numeric(39, 0), Numeric(39, 10)):
        assert name(with_key(kind), str(2**127)) == name(with_key(kind), 2**127) == f"keyed:{2**127}"
    assert name(with_key(Numeric(20, 2)), long) == "keyed:12345678901234567.89"
    keyed = with_key(Numeric(20, 2, asdecimal=False))
    assert name(keyed, long) == name(keyed, str(long)) == name(keyed, keyed(id=float(long)))


@pytest.mark.parametrize("label", ["parcel", Tables.PARCEL, quoted_name("parcel", quote=True), b"parcel"], ids=repr)
def test_table_of_a_fenced_class_however_its_name_is_typed_has_the_fence_of_the_class(label):
    named, meant = lock(Session(), label, "07"), lock(Session(), Parcel, 7)
    assert named.name == meant.name
    assert (named.fence.table, named.fence.key) == (meant.fence.table, meant.fence.key)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (Number, "x"),
        (Marked, "R-x"),
        (Marked, 42),  # its own conversion raises AttributeError
        (PlainUuid, "42x"),
        (SqlEnum(Colour), "r"),
        (SqlEnum(Colour), "GREEN"),
        (SqlEnum(Colour), 42),
        (SqlEnum(Colour), Size.BIG),
        (SqlEnum("red", "blue"), "green"),
        (NamedColour, "GREEN"),
        (Float, "x"),
        (Float, "nan"),
        (Numeric, "Infinity"),
        (Boolean, "true"),
        (Date, NOON),
        (Date, NOON.replace(hour=0)),
        (Boolean, 2),
        *[(Date, key) for key in (20260301, Decimal(20260301))],  # MariaDB compares dates with numbers
        *[(Time, key) for key in (NOON.replace(tzinfo=None), NOON, "12:00:00Z", 120000)],  # it would reach 12:00
        *[
            (String(9), key)
            for key in (42, 0, Decimal(42), Rank.FIRST, Colour.RED, KEY, timedelta(1), NOON, NOON.date(), time(12))
        ],
        *[(kind, 42) for kind in (Text, CHAR(9), LargeBinary(9), ReadBack(String()))],
        (Integer, "4_2"),  # MariaDB reads it as 4
        (Integer, "٤٢"),
        (Integer, "\x1c42"),
        (Numeric, "4_2"),
        (Float, "4_2"),
        (DateTime, NOON),  # the driver drops the zone, or PostgreSQL converts it to that of the session
        (DateTime, "2026-03-01T12:00:00Z"),
        (DateTime(timezone=True), NOON.replace(tzinfo=None)),
        (DateTime(timezone=True), "2026-03-01T14:00:00+02:00"),  # MariaDB and SQLite drop it
    ],
)
def test_value_that_the_type_of_the_column_refuses_is_no_row(kind, key):
    with pytest.raises(NoSuchKey, match="cannot be a key of keyed"):
        name(with_key(kind), key)


@pytest.mark.parametrize("key", [42, Decimal(42), Rank.FIRST])
def test_number_for_a_text_key_is_refused_with_the_advice_to_give_the_text(key):
    """MariaDB compares a text with a number as numbers, so that 42 also reaches the row "042"."""
    with pytest.raises(NoSuchKey, match="give the text"):
        name(Code, key)
    assert name(with_key(AsText), 42) == name(with_key(AsText), "042") == "keyed:42"


@pytest.mark.parametrize("kind", [String(9), Integer, Numeric, DateTime, Uuid, Date, SqlEnum(Colour), AsText])
@pytest.mark.parametrize("key", [True, 1.5])
def test_bool_and_float_are_keys_only_where_the_column_has_such_values(kind, key):
    with pytest.raises(TypeError, match=r"not (bool|float)"):
        name(with_key(kind), key)
    with pytest.raises(TypeError, match=r"not (bool|float)"):
        name(with_key(Boolean if key == 1.5 else Float), key)


def test_alias_of_a_class_is_no_name():
    for part in (aliased(Stock), with_polymorphic(Stock, "*")):
        with pytest.raises(
            TypeError, match=r"an alias of Stock is for queries: use the class, lock\(session, Stock, key"
        ):
            name(part, 1)
        with pytest.raises(TypeError, match="an alias of Stock"):
            locked(part, "key")


def test_composite_key_is_a_tuple_or_as_many_parts():
    assert name(Shelf, "a", "02") == name(Shelf, ("a", 2)) == "shelf:a:2"
    assert name(Tray, "01", 2) == name(Tray, (1, "2")) == "tray:1:2"
    for key in [("a",), ("a", 1, 2), "a"]:
        with pytest.raises(NoSuchKey):
            name(Shelf, key)


def test_key_is_converted_wherever_its_class_stands():
    assert name("move", Counter, "01", Ticket, KEY.hex) == f"move:counter:1:ticket:{KEY}"
    assert name(Counter) == "counter"


def test_subclass_is_the_row_that_it_shares():
    assert name(ColdStock, "01") == name(Stock, 1) == "stock:1"
    assert name(HeavyParcel, "01") == name(LightParcel, 1) == name(Parcel, 1) == "parcel:1"
    assert lock(Session(), HeavyParcel, "01").fence.key == 1
    assert name(OtherCode, "a") == "other_code:a"
    for part in (FencedCode, "fenced_code"):
        with pytest.raises(NotSupported, match="put FencedMixin on Code, or lock Code"):
            name(part, "a")


def test_instance_as_key_is_its_primary_key_and_is_not_read_for_it():
    assert name(Counter, Counter(id=7)) == "counter:7"
    assert name(Stock, ColdStock(id=7)) == "stock:7"
    assert name(Shelf, Shelf(aisle="a", number=2)) == "shelf:a:2"
    engine = create_engine("sqlite://")
    Counter.metadata.create_all(engine, tables=[Counter.__table__])
    with Session(engine) as session:
        counter = Counter()
        session.add(counter)
        session.commit()
        assert name(Counter, counter) == "counter:1"  # expired
        assert not session.in_transaction()
    assert name(Counter, counter) == "counter:1"  # and detached
    engine.dispose()


def test_instance_that_is_no_key_is_refused():
    with pytest.raises(TypeError, match="an instance of Counter cannot be a key of Ticket"):
        name(Ticket, Counter(id=7))
    with pytest.raises(TypeError, match="not NoneType"):
        name(Counter, Counter())
    with pytest.raises(TypeError, match="an instance cannot be part of a name: use its class"):
        name("counter", Counter(id=7))


@pytest.mark.parametrize(
    ("mapped", "key"),
    [
        (Counter, "abc"),
        (Counter, ""),
        (Counter, Decimal("4.2")),
        (Counter, "9" * 5000),
        (Ticket, "42x"),
        (Own, "42x"),
        (Price, "x"),
        (Reading, "noon"),
    ],
    ids=str,
)
def test_what_cannot_be_a_key_is_no_row(mapped, key):
    with pytest.raises(NoSuchKey, match="cannot be a key of") as caught:
        name(mapped, key)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "key", [None, True, 4.2, lambda: 42, Session().commit, object(), iter("ab")], ids=lambda value: type(value).__name__
)
def test_value_that_is_no_key_of_any_class_is_a_mistake_of_the_program(key):
    for mapped in (Counter, Ticket, Code):
        with pytest.raises(TypeError):
            name(mapped, key)


@pytest.mark.parametrize(
    "part",
    [
        Counter.id,
        Counter.id == 1,
        func.max(Counter.id),
        select(Counter.id),
        Counter.__table__,
        Session().query(Counter),
    ],
    ids=lambda part: type(part).__name__,
)
def test_question_to_the_database_is_no_name(part):
    for kind in ("counter", Code):
        with pytest.raises(TypeError, match="is a database expression"):
            name(kind, part)


class ZonedUtc(TypeDecorator[datetime]):
    """Stores a time with a zone as one in UTC, without a zone except on PostgreSQL, as many applications do."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        value = value.astimezone(UTC)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value if value.tzinfo else value.replace(tzinfo=UTC)


@pytest.mark.parametrize("kind", [DateTime(timezone=True), ZonedUtc()], ids=["plain", "decorated"])
@pytest.mark.parametrize(
    ("database", "zone"),
    [("sqlite", ""), ("postgresql", ""), ("postgresql", "-ctimezone%3DAsia/Tokyo"), ("mariadb", "")],
)
def test_loaded_instance_whose_key_is_a_time_names_the_lock_of_that_time(make_engine, database, zone, kind):
    mapped = with_key(kind)
    engine = make_engine(database)
    if zone:
        engine = create_engine(engine.url.update_query_dict({"options": zone.replace("%3D", "=")}))
    mapped.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            session.add(mapped(id=NOON))
            session.commit()
            (row,) = session.scalars(select(mapped))
            row = session.get_one(mapped, row.id)
            assert lock(session, mapped, row).name == lock(session, mapped, NOON).name
    finally:
        mapped.metadata.drop_all(engine)
        engine.dispose()


class Checked(TypeDecorator[datetime]):
    """Passes on what it gets, as a type does that only validates."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return value


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (Checked(), NOON),
        (Checked(timezone=True), NOON.replace(tzinfo=None)),
        (Checked(timezone=True), NOON.astimezone(timezone(timedelta(hours=2)))),
        (ZonedUtc(), NOON.replace(tzinfo=None)),
    ],
)
def test_type_that_leaves_a_zone_as_it_is_does_not_make_it_known(kind, key):
    with pytest.raises(NoSuchKey, match=r"time zone|in UTC"):
        name(with_key(kind), key)


def test_detached_instance_with_a_time_without_its_zone_is_no_key():
    mapped = with_key(DateTime(timezone=True))
    with pytest.raises(NoSuchKey, match="in UTC"):
        name(mapped, mapped(id=NOON.replace(tzinfo=None)))


@pytest.mark.parametrize("text", ["1:00:00", "3600", "1 hour", "PT1H"])
def test_text_is_no_key_of_an_interval(text):
    with pytest.raises(NoSuchKey):
        name(with_key(Interval), text)
