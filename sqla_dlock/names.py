"""Mapped classes and their instances in a lock's name: each spelling of a key is one lock.

A key from a URL is text, a key from the session is what the column's type returns. Both must make one name, so each
column of a primary key has a converter (`_converter`) from whatever spells the key to the one form.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import TypeDecorator, Uuid, inspect
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.orm import InstanceState, Mapper

from dlock_core import names
from dlock_core.errors import NoSuchKey
from sqla_dlock.fencing import FencedMixin, class_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import ColumnElement

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
    converters = tuple(map(_converter, mapper.primary_key))
    return names.Kind(label=label, converters=converters, key_of=partial(_key_of, mapper))


def _row_mapper(mapper: Mapper[Any]) -> Mapper[Any]:
    """Return the mapper whose table names the row of a class.

    In a hierarchy that is the base class: Shop(1) and Place(1) are one row, so they are one lock. But if a subclass
    adds `FencedMixin`, it is that class, because the fence is in the row of its table.
    """
    above = mapper.inherits
    if (
        above is None
        or mapper.concrete
        or issubclass(mapper.class_, FencedMixin) > issubclass(above.class_, FencedMixin)
    ):
        return mapper
    return _row_mapper(above)


def _key_of(mapper: Mapper[Any], value: Any) -> Sequence[Any] | None:
    state = _state(value)
    if state is None:
        return None
    if not isinstance(value, mapper.class_):
        raise TypeError(f"an instance of {type(value).__name__} cannot be a key of {mapper.class_.__name__}")
    known = [state.dict.get(mapper.get_property_by_column(column).key) for column in mapper.primary_key]
    return state.identity or known  # The state knows the key of an expired instance too; an attribute would query it.


def _state(value: Any) -> InstanceState[Any] | None:
    state = inspect(value, raiseerr=False)
    return state if isinstance(state, InstanceState) else None


def _converter(column: ColumnElement[Any]) -> Callable[[Any], Any]:
    """Return the function that converts each spelling of a value of a key column to one form.

    Only types whose texts are known are converted, and each converter refuses values that it cannot parse. Other values
    are passed on unchanged, and `dlock_core.names` then decides whether they have a stable text.
    """
    kind = column.type
    if isinstance(kind, TypeDecorator):
        return partial(_there_and_back, kind)
    if isinstance(kind, Uuid):
        return _uuid
    try:
        python = kind.python_type
    except NotImplementedError:  # A type of one database, such as INET, need not have a Python type.
        return _as_given
    if python is int:
        return _integer
    if python is Decimal:
        return _decimal
    return partial(_moment, python) if python in (date, datetime, time) else _as_given


def _as_given(value: Any) -> Any:
    return value


def _integer(value: Any) -> int:
    found = int(value)
    if not isinstance(value, str) and found != value:  # int() would turn 1.5 into the key of another row
        raise ValueError(value)
    return found


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value))


def _moment(kind: Any, value: Any) -> Any:
    return kind.fromisoformat(value) if isinstance(value, str) else value


def _there_and_back(kind: TypeDecorator[Any], value: Any) -> Any:
    """Return what the application's own type would read back after writing the value."""
    write, read = kind.bind_processor(_DIALECT), kind.result_processor(_DIALECT, None)
    value = value if write is None else write(value)
    return value if read is None else read(value)
