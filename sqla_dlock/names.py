"""Mapped classes and their instances in a lock's name: each spelling of a key is one lock.

A key from a URL is text, a key from the session is what the column's type returns. Both must make one name, so each
column of a primary key has a converter (`_converter`) from whatever spells the key to the one form.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import CHAR, NCHAR, Enum, Interval, TypeDecorator, Uuid, inspect
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import InstanceState, Mapper
from sqlalchemy.orm.util import AliasedClass

from dlock_core import names
from dlock_core.errors import NoSuchKey, NotSupported
from sqla_dlock.fencing import FencedMixin, class_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy.types import TypeEngine

__all__ = ["is_mapped", "kind_of", "plain", "with_class"]

_PLAIN_TYPES: Final = frozenset({str, int, UUID})
"""Types of parts that are never a class, instance or expression: a name of only these needs no conversion."""
_DIALECT: Final = DefaultDialect()


def with_class(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts with a `FencedMixin` class in place of a text that names the same locks.

    One lock must have one fence, whether it is named by the class or by the name of its table.
    """
    mapped = class_of(parts[0]) if len(parts) == 2 else None
    if mapped is not None:
        with suppress(NoSuchKey, TypeError):
            _kind(mapped).read_key(parts[1:])
            return mapped, parts[1]
    return parts


def plain(parts: Sequence[Any]) -> Sequence[Any]:
    """Convert mapped classes, and the keys that follow them, to values for `dlock_core.names.join`.

    Raises NoSuchKey for a value that cannot be a key of its class. Raises TypeError for an instance where no key is
    expected, and for SQL expressions.
    """
    if _PLAIN_TYPES.issuperset(map(type, parts)):
        return parts
    found = names.with_keys(parts, kind_of)
    for part in found:
        if _state(part) is not None:
            kind = type(part).__name__
            raise TypeError(
                f"an instance cannot be part of a name: use its class and primary key, lock(session, {kind}, key)"
            )
    return found


def is_mapped(part: Any) -> bool:
    """Return whether a part is a mapped class."""
    return isinstance(part, type) and isinstance(inspect(part, raiseerr=False), Mapper)


def kind_of(part: Any) -> names.Kind | None:
    """Return what a mapped class is in a name, and None for any other part; raises TypeError for an SQL expression."""
    if is_mapped(part):
        return _kind(part)
    if isinstance(part, AliasedClass):
        kind = inspect(part).mapper.class_.__name__
        raise TypeError(f"an alias of {kind} is for queries: use the class, lock(session, {kind}, key)")
    if hasattr(part, "__clause_element__") or hasattr(part, "_compiler_dispatch"):
        raise TypeError(
            f"{type(part).__name__} is a database expression: use a mapped class, or a value such as a primary key"
        )
    return None


@lru_cache(maxsize=1024)
def _kind(mapped: type) -> names.Kind:
    mapper = _row_mapper(inspect(mapped))
    label = getattr(mapper.local_table, "fullname", None)
    if label is None:
        raise TypeError(f"{mapped.__name__} is not mapped to a table: name its locks by a text instead")
    converters = tuple(_converter(column.type) for column in mapper.primary_key)
    return names.Kind(label=label, converters=converters, key_of=partial(_key_of, mapper))


def _row_mapper(mapper: Mapper[Any]) -> Mapper[Any]:
    """Return the mapper whose table names the row of a class.

    In a hierarchy that is the base class: Shop(1) and Place(1) are one row, so they are one lock. A fence has to be in
    the base class: its own lock would otherwise be another one, or have another fence.
    """
    above = mapper.inherits
    if above is None or mapper.concrete:
        return mapper
    if issubclass(mapper.class_, FencedMixin) > issubclass(above.class_, FencedMixin):
        kind, base = mapper.class_.__name__, above.class_.__name__
        raise NotSupported(
            f"{kind} is a row of {base}, whose own lock has not the fence of {kind}: put FencedMixin on {base}, or name "
            "the lock by a text instead of its class"
        )
    return _row_mapper(above)


def _key_of(mapper: Mapper[Any], value: Any) -> Sequence[Any] | None:
    state = _state(value)
    if state is None:
        return None
    if not isinstance(value, mapper.class_):
        raise TypeError(f"an instance of {type(value).__name__} cannot be a key of {mapper.class_.__name__}")
    known = [state.dict.get(mapper.get_property_by_column(column).key) for column in mapper.primary_key]
    key = state.identity or known  # The state knows the key of an expired instance too; an attribute would query it.
    return [_in_utc(column.type, each, state) for column, each in zip(mapper.primary_key, key, strict=True)]


def _in_utc(kind: TypeEngine[Any], value: Any, state: InstanceState[Any]) -> Any:
    """Return a time of an instance as its row has it: only PostgreSQL keeps, or converts, the zone of a time."""
    if isinstance(kind, TypeDecorator) or not isinstance(value, datetime) or not getattr(kind, "timezone", False):
        return value
    bind = None
    with suppress(UnboundExecutionError):
        bind = state.session.get_bind(state.mapper) if state.session is not None else None
    if bind is None:
        return value  # It is not known where it comes from.
    if bind.dialect.name == "postgresql":
        return value if value.tzinfo is None else value.astimezone(UTC)
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def _state(value: Any) -> InstanceState[Any] | None:
    state = inspect(value, raiseerr=False)
    return state if isinstance(state, InstanceState) else None


def _converter(kind: TypeEngine[Any]) -> Callable[[Any], Any]:
    """Return the function that converts each spelling of a value of a key column to one form.

    Only types whose texts are known are converted, and each converter refuses values that it cannot parse. Other values
    are passed on unchanged, and `dlock_core.names` then decides whether they have a stable text.
    """
    if isinstance(kind, TypeDecorator) and not isinstance(kind, Interval):
        return partial(_there_and_back, kind)
    if isinstance(kind, Enum):
        return partial(_stored_name, kind)
    if isinstance(kind, Uuid):
        return _uuid
    python = _python_type(kind)
    if python is datetime:
        return partial(_datetime, getattr(kind, "timezone", False))
    if isinstance(kind, CHAR | NCHAR):
        return _unpadded
    return _CONVERTERS.get(python, _as_given)


def _python_type(kind: TypeEngine[Any]) -> type | None:
    try:
        return kind.python_type
    except NotImplementedError:  # A type of one database, such as INET, need not have a Python type.
        return None


def _as_given(value: Any) -> Any:
    return value


def _integer(value: Any) -> int:
    found = int(names.plain_number(value))
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


def _float(value: Any) -> Decimal:
    """Return the shortest decimal number that the database stores as the same float."""
    return _decimal(float(names.plain_number(value)))


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def _stored_name(kind: Any, value: Any) -> Any:
    """Return what a column of Enum stores for a member, or for the text of what it stores."""
    stored = kind.bind_processor(_DIALECT)(value)
    if stored not in kind.enums:  # SQLAlchemy passes an unknown text on to the database
        raise ValueError(value)
    return stored


def _moment(kind: Any, value: Any) -> Any:
    """Return a date or time; one of a column of the other kind is the same key at midnight only."""
    if isinstance(value, str):
        return kind.fromisoformat(value)
    if kind is date and isinstance(value, datetime):
        if value.timetz() != time():  # An aware one is another date elsewhere, and never equal.
            raise ValueError(value)
        return value.date()
    return datetime.combine(value, time()) if kind is datetime and type(value) is date else value


def _datetime(has_zone: bool, value: Any) -> Any:  # noqa: FBT001 - a converter's own argument
    """Return a datetime that each database reads alike.

    A driver drops the zone that its column does not have, and PostgreSQL converts it to the zone of the session. Only
    PostgreSQL has columns with a zone, and there a time without one is in the zone of the session.
    """
    found = _moment(datetime, value)
    if has_zone and found.utcoffset() != timedelta(0):
        raise names.AmbiguousKey("give the time in UTC, as some databases drop, or assume, another time zone")
    if not has_zone and found.tzinfo is not None:
        raise names.AmbiguousKey("its column has no time zone, so give the time as it is stored, without one")
    return found


def _interval(value: Any) -> timedelta:
    if not isinstance(value, timedelta):  # A text has many spellings.
        raise TypeError(value)
    return value


def _unpadded(value: Any) -> Any:
    """Return the text of a column of CHAR, which databases compare without the spaces at its end."""
    return value.rstrip(" ") if isinstance(value, str) else value


_CONVERTERS: Final[Mapping[type | None, Callable[[Any], Any]]] = {
    int: _integer,
    bool: _boolean,
    Decimal: _decimal,
    float: _float,
    date: partial(_moment, date),
    time: partial(_moment, time),
    timedelta: _interval,
}


def _there_and_back(kind: TypeDecorator[Any], value: Any) -> Any:
    """Return what the application's own type would read back after writing the value.

    The application's methods get what the type that implements it would write and read, so that they need not be
    prepared for other spellings.
    """
    own, implementing = type(kind), kind.load_dialect_impl(_DIALECT)
    if own.process_bind_param is not TypeDecorator.process_bind_param:
        given, value = value, kind.process_bind_param(value, _DIALECT)
        if isinstance(value, datetime) and value.tzinfo is None and getattr(given, "tzinfo", None) is not None:
            return value  # The application has converted it.
    value = _converter(implementing)(value)
    if own.process_result_value is not TypeDecorator.process_result_value:
        value = kind.process_result_value(_as_read(implementing, value), _DIALECT)
    return value


def _as_read(kind: Any, value: Any) -> Any:
    """Return a converted value as SQLAlchemy reads it from a column of this type."""
    if isinstance(kind, Enum):
        return kind.result_processor(_DIALECT, None)(value)  # type: ignore[no-untyped-call]
    if isinstance(kind, Uuid):
        return value if kind.as_uuid else str(value)
    python = _python_type(kind)
    return python(value) if python in (bool, float) else value
