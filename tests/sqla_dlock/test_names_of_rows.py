"""Whatever reaches a row by its key on a real database names one lock, or is refused, and so does the row itself."""

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import (
    CHAR,
    BigInteger,
    Boolean,
    Date,
    DateTime,
    Double,
    Engine,
    Enum,
    Interval,
    Numeric,
    String,
    Time,
    TypeDecorator,
    Uuid,
    create_engine,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Mapped, Session, mapped_column, registry

from dlock_core.errors import NoSuchKey
from sqla_dlock.fencing import FencedMixin
from sqla_dlock.locks import lock
from tests.sqla_dlock.test_names import Colour, NamedColour, with_key

KEY = uuid.UUID("a1b2c3d4-0000-4000-8000-00000000abcd")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
AUTUMN = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
"""It is 2:30 in Berlin then, and again an hour later."""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Iterable[Engine]:
    """Yield an engine of every database; the sessions on PostgreSQL are not in UTC."""
    engine = make_engine(request.param)
    if request.param == "postgresql":
        engine = create_engine(engine.url.update_query_dict({"options": "-ctimezone=Asia/Tokyo"}))
    yield engine
    engine.dispose()


def names_of_rows(engine: Engine, kind: Any, keys: Iterable[Any], spellings: Iterable[Any]) -> list[set[str]]:
    """Insert rows with these keys; return, for each, the names of what reaches it, and its own, without the refused.

    A row whose key is MariaDB's date zero is None.
    """
    mapped = with_key(kind)
    mapped.metadata.drop_all(engine)
    mapped.metadata.create_all(engine)
    try:
        for key in keys:
            with Session(engine) as session, suppress(DBAPIError, StatementError):
                session.add(mapped(id=key))
                session.commit()
        with Session(engine) as session:
            found = {row.id: names_of(session, mapped, row) for row in session.scalars(select(mapped)) if row}
        for spelling in spellings:
            with Session(engine) as session, suppress(DBAPIError, StatementError):
                for row in filter(None, session.scalars(select(mapped).where(mapped.id == spelling))):
                    found[row.id] |= names_of(session, mapped, spelling)
    finally:
        mapped.metadata.drop_all(engine)
    return list(found.values())


def names_of(session: Session, mapped: Any, key: Any) -> set[str]:
    try:
        return {lock(session, mapped, key).name}
    except (NoSuchKey, TypeError):
        return set()


@dataclass(frozen=True)
class Moment:
    """A type of the application: what its two methods do with a time, or None where it has none."""

    kind: Any
    write: Callable[[datetime], datetime] | None
    read: Callable[[datetime], datetime] | None

    def type(self) -> Any:
        methods: dict[str, Any] = {"impl": self.kind, "cache_ok": True}
        if self.write is not None:
            methods["process_bind_param"] = lambda _, value, _dialect: self.write(value)  # type: ignore[misc]
        if self.read is not None:
            methods["process_result_value"] = lambda _, value, _dialect: self.read(value)  # type: ignore[misc]
        return type("OwnTime", (TypeDecorator,), methods)()


def strip(value: datetime) -> datetime:
    return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value


def strip_aware(value: datetime) -> datetime:
    """Refuse a time without a zone, as the recipe of SQLAlchemy's documentation does."""
    if not value.tzinfo or value.tzinfo.utcoffset(value) is None:
        raise TypeError("tzinfo is required")
    return strip(value)


def strip_local(value: datetime) -> datetime:
    return value.astimezone(BERLIN).replace(tzinfo=None) if value.tzinfo else value


def in_utc(value: datetime) -> datetime:
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)


def naive_in_utc(value: datetime) -> datetime:
    return in_utc(value).replace(tzinfo=None)


def add_utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC)


def add_berlin(value: datetime) -> datetime:
    return value.replace(tzinfo=BERLIN)


ZONED = DateTime(timezone=True)
ZONED_ON_POSTGRESQL = DateTime().with_variant(ZONED, "postgresql")
MOMENTS = {
    f"{label}, {kind}": Moment(impl, write, read)
    for kind, impl in {"plain": DateTime(), "zoned": ZONED, "variant": ZONED_ON_POSTGRESQL}.items()
    for label, (write, read) in {
        "both": (strip, add_utc),
        "recipe": (strip_aware, add_utc),
        "naive is UTC": (naive_in_utc, add_utc),
        "local": (strip_local, add_berlin),
        "in UTC": (in_utc, in_utc),
        "result only": (None, in_utc),
        "nothing": (None, None),
    }.items()
} | {
    # Not with a zone on PostgreSQL, where they would read another time than they have written.
    "only bind": Moment(DateTime(), strip, None),
    "only bind, recipe": Moment(DateTime(), strip_aware, None),
    "only bind, in UTC": Moment(ZONED, in_utc, None),
}


@pytest.mark.parametrize("shape", MOMENTS)
def test_row_whose_type_converts_times_has_one_name(database, shape):
    keys = [NOON, AUTUMN, AUTUMN + timedelta(hours=1)]
    aware = [key.astimezone(zone) for key in keys for zone in (UTC, timezone(timedelta(hours=2)), BERLIN)]
    naive = [key.replace(tzinfo=None) for key in aware]
    naive += [key.replace(fold=1) for key in naive]
    spellings = [*aware, *naive, *map(str, aware), *map(str, naive)]
    for names in names_of_rows(database, MOMENTS[shape].type(), [*keys, *naive], spellings):
        assert len(names) <= 1


@pytest.mark.parametrize("kind", ["plain", "zoned", "variant"])
@pytest.mark.parametrize("label", ["both", "recipe", "naive is UTC", "local"])
def test_row_whose_type_adds_the_zone_that_it_removes_is_a_key(make_engine, label, kind):
    (names,) = names_of_rows(make_engine("sqlite"), MOMENTS[f"{label}, {kind}"].type(), [NOON], [])
    assert names == {"keyed:2026-03-01%2012%3A00%3A00%2B00%3A00"}


class Upper(TypeDecorator[str]):
    """A text of the application, which has another type on one database."""

    impl = String(36).with_variant(Uuid(as_uuid=False), "postgresql")
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value.upper()


UUIDS = [KEY, str(KEY), str(KEY).upper(), KEY.hex]
TEXTS = ["ab", "ab ", "ab    ", "b"]
NUMBERS = [42, "42", "042", "42.0", " 42", Decimal(42), "1.5", "1.50", Decimal("1.5")]
DAY = NOON.replace(hour=0, tzinfo=None)
DAYS = [DAY, DAY.date(), str(DAY.date()), "20260301", 20260301, DAY.replace(hour=12), DAY.time(), time(12), "12:00"]
KINDS = {
    "text": (String(36), [*NUMBERS, *DAYS, KEY, str(KEY), KEY.hex]),
    "text, padded": (String(20).with_variant(CHAR(6), "postgresql"), TEXTS),
    "text, padded here": (CHAR(6).with_variant(String(6), "postgresql"), TEXTS),
    "text, UUID": (String(36).with_variant(Uuid(as_uuid=False), "postgresql"), UUIDS),
    "text, UUID of Python": (String(36).with_variant(Uuid(), "postgresql"), UUIDS),
    "UUID, text": (Uuid().with_variant(CHAR(36), "sqlite", "mysql", "mariadb"), UUIDS),
    "own text, UUID": (Upper(), UUIDS),
    "text, integer": (String(20).with_variant(BigInteger, "postgresql"), NUMBERS),
    "integer, text": (BigInteger().with_variant(String(20), "postgresql"), NUMBERS),
    "text, decimal": (String(20).with_variant(Numeric(10, 2), "postgresql"), NUMBERS),
    "text, date": (String(20).with_variant(Date, "postgresql"), DAYS),
    "date": (Date(), DAYS),
    "date, datetime": (Date().with_variant(DateTime, "postgresql"), DAYS),
    "time": (Time(), DAYS),
    "boolean": (Boolean(), [True, False, 1, 0, "1", "0", "true"]),
    "double": (Double(), [0.5, "0.5", 1, 0.1, "0.10", Decimal("0.1"), 0.1 + 0.2, 0.3, "0.3"]),
}


@pytest.mark.parametrize("shape", KINDS)
def test_row_has_one_name_whatever_its_column_has_on_this_database(database, shape):
    kind, spellings = KINDS[shape]
    found = names_of_rows(database, kind, spellings, spellings)
    assert any(found)
    for names in found:
        assert len(names) <= 1


KEYS = {
    "UUID": (Uuid(), KEY),
    "UUID as text": (Uuid(as_uuid=False), str(KEY)),
    "bool": (Boolean(), True),
    "number": (Numeric(10, 2), Decimal("1.50")),
    "float": (Double(), 0.1),
    "date": (Date(), NOON.date()),
    "time": (Time(), NOON.time()),
    "time with a zone": (DateTime(timezone=True), NOON),
    "interval": (Interval(), timedelta(hours=36)),
    "values of an Enum": (Enum(Colour, values_callable=lambda kind: [each.value for each in kind]), Colour.RED),
    "own": (NamedColour(), Colour.RED),
}


@pytest.mark.parametrize(("kind", "key"), KEYS.values(), ids=KEYS)
def test_row_with_a_key_of_any_type_holds_its_fence(database, store, kind, key):
    class Guarded(FencedMixin, registry().generate_base()):
        __tablename__ = "guarded"
        id: Mapped[Any] = mapped_column(kind, primary_key=True, autoincrement=False)
        value: Mapped[int] = mapped_column(default=0)

    Guarded.metadata.create_all(database)
    try:
        with Session(database) as session:
            session.add(Guarded(id=key))
            session.commit()
            with lock(session, Guarded, key, store=store) as lease:
                session.execute(update(Guarded).values(value=5))
                session.commit()
            assert session.execute(select(Guarded.value, Guarded.dlock_token)).one() == (5, lease.token)
    finally:
        Guarded.metadata.drop_all(database)
