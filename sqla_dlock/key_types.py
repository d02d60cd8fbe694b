"""Types of key columns: each spelling of a value becomes the one form that a lock's name has.

Two forms of one row's key would be two locks, while one form of two rows' keys is only a lock that waits needlessly. So
what any database takes for one key is one here, and what reaches another row than its form says is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum as PythonEnum
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import CHAR, NCHAR, DateTime, Enum, Interval, Numeric, String, TypeDecorator, Uuid
from sqlalchemy.engine.default import DefaultDialect

from dlock_core import names
from dlock_core.errors import NotSupported

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

__all__ = ["KeyColumn", "UnknownSpellings", "is_decorated"]

Converter = Callable[[Any], Any]


class UnknownSpellings(NotSupported):
    """A type whose values may have several spellings, which only the database knows."""


def _dialect(name: str) -> DefaultDialect:
    dialect = DefaultDialect()
    dialect.name = name
    return dialect


_DIALECTS: Final = [_dialect(name) for name in ("default", "sqlite", "mysql", "mariadb", "postgresql")]
"""For which a type may have a variant; as they adapt no type, a column without one has the same type on all of them."""


class KeyColumn:
    """A column of a key, with the types that it has on all databases.

    Attributes:
        is_also_text: Whether it is text on some databases, and another type on others.
        has_zone: Whether its times have a zone. Only PostgreSQL has such columns, so its type decides.
        takes: Those of float and bool that it returns.
        convert: Returns the form of a value for names.
        convert_own: Returns the form of a value for the type itself, without its variants.
    """

    def __init__(self, kind: TypeEngine[Any]) -> None:
        self.kind = kind
        forms = _forms(kind)
        zones = [stored.timezone for _, _, stored in forms if isinstance(stored, DateTime)]
        self.has_zone = bool(zones) and zones[-1]
        self.is_also_text = len({_is_text(stored) for _, _, stored in forms}) == 2
        self.takes = tuple({bool, float}.intersection(_python_type(stored) for _, _, stored in forms))
        found: dict[Any, Converter] = {}
        for dialect, form, stored in forms:
            found.setdefault((type(form), repr(stored)), self._converter(form, dialect))
        converters = list(dict.fromkeys(found.values()))
        self.convert_own = converters[0]
        self.convert = converters[0] if len(converters) == 1 else partial(_on_each, converters)

    def _converter(self, kind: Any, dialect: DefaultDialect) -> Converter:
        """Return the function for the type of one database.

        Each converter refuses values that it cannot parse. Raises UnknownSpellings for a type that it does not know.
        """
        if not all(method.__module__.startswith("sqlalchemy.") for method in _writing_methods_of(kind)):
            raise UnknownSpellings(
                f"{type(kind).__name__} has its own way to write values into SQL, so that it is not known which of "
                "them are one key: name the lock by a text instead of the class"
            )
        if is_decorated(kind):
            implementing = _implementing(kind, dialect)
            return partial(_there_and_back, kind, dialect, implementing, self._converter(implementing, dialect))
        if isinstance(kind, Enum):
            return partial(_stored_name, kind)
        if isinstance(kind, Uuid):
            return _uuid if kind.as_uuid else _uuid_text
        if _is_text(kind):
            return _unpadded if isinstance(kind, CHAR | NCHAR) else _text
        return self._converter_of_value(kind)

    def _converter_of_value(self, kind: TypeEngine[Any]) -> Converter:
        python = _python_type(kind)
        if python is datetime:
            return partial(_datetime, has_zone=self.has_zone)
        if python not in _CONVERTERS:
            raise UnknownSpellings(
                f"the spellings of a key of type {kind!r} are not known, and each would be another lock: name the lock "
                'by a text, as in lock(session, "host", str(key)), with one spelling of each key'
            )
        convert = _CONVERTERS[python]
        if isinstance(kind, Numeric) and kind.scale is not None:
            return partial(_unrounded, convert, kind.scale)
        return convert


def _forms(kind: TypeEngine[Any]) -> list[tuple[DefaultDialect, TypeEngine[Any], TypeEngine[Any]]]:
    """Return, for each database, its dialect, the type that the column has there, and the type that is stored."""
    found, errors = [], []
    for dialect in _DIALECTS:
        try:
            form = kind.dialect_impl(dialect)
            found.append((dialect, form, _stored_type(form, dialect)))
        except Exception as error:  # noqa: BLE001 - the application's own type need not know every database
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def is_decorated(kind: TypeEngine[Any]) -> bool:
    """Return whether the application may convert its values."""
    return isinstance(kind, TypeDecorator) and not isinstance(kind, Interval)


def _implementing(kind: Any, dialect: DefaultDialect) -> TypeEngine[Any]:
    """Return the type below one of the application, as a database has it."""
    return kind.load_dialect_impl(dialect).dialect_impl(dialect)  # type: ignore[no-any-return]


def _stored_type(kind: TypeEngine[Any], dialect: DefaultDialect) -> TypeEngine[Any]:
    """Return the type below all those of the application."""
    return _stored_type(_implementing(kind, dialect), dialect) if is_decorated(kind) else kind


def _is_text(kind: TypeEngine[Any]) -> bool:
    return (isinstance(kind, String) and not isinstance(kind, Enum)) or _python_type(kind) is bytes


def _writing_methods_of(kind: TypeEngine[Any]) -> list[Callable[..., Any]]:
    """Return the methods by which a type of the application can write values that we do not know."""
    return [kind.bind_expression, kind.column_expression, kind.bind_processor, kind.result_processor]


def _python_type(kind: TypeEngine[Any]) -> type | None:
    try:
        return kind.python_type
    except NotImplementedError:  # A type of one database, such as INET, need not have a Python type.
        return None


def _on_each(converters: Sequence[Converter], value: Any) -> Any:
    """Return the form on which the types of all databases agree.

    Repeated, as one may accept only what another has converted: a UUID without the blanks at the end of its text.
    """
    _check(converters, value)
    for convert in list(converters) * len(converters):
        with suppress(*names.REFUSALS):
            value = convert(value)
    return value


class _NotText(names.AmbiguousKey):
    """A UUID for a column of text, which is not ambiguous if the column has such values on another database."""


def _check(converters: Sequence[Converter], value: Any) -> None:
    """Raise AmbiguousKey if a value is ambiguous on any database, and another error if it is a key on none.

    What a column of text refuses, and another type accepts, has one form with all texts that the other type reads.
    """
    refusals: list[Exception] = []
    for convert in converters:
        try:
            convert(value)
        except _NotText as error:
            refusals.append(error)
        except names.AmbiguousKey:
            raise
        except names.REFUSALS as error:
            refusals.append(error)
    if len(refusals) == len(converters):
        raise next((each for each in refusals if isinstance(each, _NotText)), refusals[0])


def _text(value: Any) -> Any:
    """Return the key of a column of text, which is text.

    MariaDB compares a text with a number as numbers: 42 is also "042". Drivers write times in several ways, and drop
    zones. In a comparison, SQLAlchemy writes a UUID as hexadecimal digits, and psycopg a member of an Enum by its name.
    """
    advice = "give the text, as databases compare a text with other values in their own ways"
    if isinstance(value, UUID):
        raise _NotText(advice)
    if isinstance(value, Number | date | time | timedelta | PythonEnum) and not isinstance(value, str):
        raise names.AmbiguousKey(advice)
    return value


def _unpadded(value: Any) -> Any:
    """Return the text of a column of CHAR, which databases compare without the spaces at its end."""
    return value.rstrip(" ") if isinstance(value, str) else _text(value)


def _integer(value: Any) -> int:
    number = names.plain_number(value)
    try:
        found = int(number)
    except ValueError:
        Decimal(number)  # which raises an error for a text that is no number
        raise names.AmbiguousKey("give the number without a fraction, as some databases ignore .0") from None
    if not isinstance(value, str) and found != value:  # int() would turn 1.5 into the key of another row
        raise ValueError(value)
    return found


def _boolean(value: Any) -> int:
    found = _integer(value)
    if found not in (0, 1):
        raise ValueError(value)
    return found


def _decimal(value: Any) -> Decimal:
    found = value if isinstance(value, Decimal) else Decimal(names.plain_number(str(value)))
    if not found.is_finite():
        raise ValueError(value)
    return found


def _unrounded(convert: Callable[[Any], Decimal], scale: int, value: Any) -> Decimal:
    found = convert(value)
    names.refuse_rounded(found, scale)
    return found


def _float(value: Any) -> Decimal:
    """Return the shortest decimal number that the database stores as the same float."""
    return _decimal(float(names.plain_number(value)))


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def _uuid_text(value: Any) -> str:
    return str(_uuid(value))


def _stored_name(kind: Any, value: Any) -> Any:
    """Return what a column of Enum stores for a member, or for the text of what it stores."""
    stored = kind.bind_processor(_DIALECTS[0])(value)
    if stored not in kind.enums:  # SQLAlchemy passes an unknown text on to the database
        raise ValueError(value)
    return stored


def _moment(kind: Any, value: Any) -> Any:
    """Return a date or time; one of a column of the other kind is the same key at midnight only."""
    if isinstance(value, str):
        return kind.fromisoformat(value)
    if kind is date and isinstance(value, datetime):
        found = value.date() if value.timetz() == time() else None  # An aware one is another date elsewhere.
    else:
        found = datetime.combine(value, time()) if kind is datetime and type(value) is date else value
    if not isinstance(found, kind):  # PostgreSQL takes the time of a datetime, MariaDB a number for a date.
        raise names.AmbiguousKey(f"give a {kind.__name__}, as databases take parts of other values for one")
    return found


def _time(value: Any) -> Any:
    found = _moment(time, value)
    if found.tzinfo is not None:
        raise names.AmbiguousKey("give the time of day without a zone, as some databases drop it")
    return found


def _datetime(value: Any, *, has_zone: bool) -> Any:
    """Return a datetime that each database reads alike.

    A driver drops the zone that its column does not have, and PostgreSQL converts it to the zone of the session. Only
    PostgreSQL has columns with a zone, and there a time without one is in the zone of the session. No column has a
    `fold`, so that of the second 2:30 in autumn is dropped.
    """
    found = _moment(datetime, value)
    if has_zone and found.utcoffset() != timedelta(0):
        raise names.AmbiguousKey("give the time in UTC, as some databases drop, or assume, another time zone")
    if not has_zone and found.tzinfo is not None:
        raise names.AmbiguousKey("its column has no time zone, so give the time as it is stored, without one")
    return found.astimezone(UTC) if has_zone else found.replace(fold=0)


def _interval(value: Any) -> timedelta:
    if not isinstance(value, timedelta):  # A text has many spellings.
        raise TypeError(value)
    return value


_CONVERTERS: Final[Mapping[type | None, Converter]] = {
    int: _integer,
    bool: _boolean,
    Decimal: _decimal,
    float: _float,
    date: partial(_moment, date),
    time: _time,
    timedelta: _interval,
}


def _there_and_back(
    kind: TypeDecorator[Any], dialect: DefaultDialect, implementing: TypeEngine[Any], convert: Converter, value: Any
) -> Any:
    """Return what the application's own type would read back after writing the value.

    The application's methods get what the type that implements it would write and read, so that they need not be
    prepared for other spellings.
    """
    own = type(kind)
    if own.process_bind_param is not TypeDecorator.process_bind_param:
        given, value = value, kind.process_bind_param(value, dialect)
        if isinstance(implementing, DateTime) and _has_removed_zone(given, value):
            convert = partial(_datetime, has_zone=False)
    value = convert(value)
    if own.process_result_value is not TypeDecorator.process_result_value:
        value = kind.process_result_value(_as_read(implementing, value, dialect), dialect)
    return value


def _has_removed_zone(given: Any, value: Any) -> bool:
    """Return whether the application has converted a time to the zone that its rows have, and not just passed it on."""
    return getattr(given, "tzinfo", None) is not None and isinstance(value, datetime) and value.tzinfo is None


def _as_read(kind: Any, value: Any, dialect: DefaultDialect) -> Any:
    """Return a converted value as SQLAlchemy reads it from a column of this type."""
    if isinstance(kind, TypeDecorator):
        return value
    if isinstance(kind, Enum):
        return kind.result_processor(dialect, None)(value)  # type: ignore[no-untyped-call]
    python = _python_type(kind)
    return python(value) if python in (bool, float) else value
