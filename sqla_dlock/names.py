"""Mapped classes and their instances in a lock's name: every spelling of a key is one lock."""

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

_PLAIN: Final = frozenset({str, int, UUID})
"""Types of parts that SQLAlchemy need not be asked about."""
_DIALECT: Final = DefaultDialect()


def with_class(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put a `FencedMixin` class in the place of a text that names the same locks: one lock has one fence."""
    mapped = class_of(parts[0]) if len(parts) == 2 else None
    if mapped is not None:
        with suppress(NoSuchKey, TypeError):
            _kind(mapped).take(parts[1:])
            return mapped, parts[1]
    return parts


def plain(parts: Sequence[Any]) -> Sequence[Any]:
    """Turn mapped classes, and the keys that follow them, into values for `dlock_core.names.join`.

    Raises NoSuchKey for what cannot be a key of the class, TypeError for an instance where no key is expected and for
    SQL expressions.
    """
    if all(type(part) in _PLAIN for part in parts):
        return parts
    found = names.with_keys(parts, kind_of)
    for part in found:
        if _state(part) is not None:  # its text may differ in every process
            kind = type(part).__name__
            raise TypeError(f"an instance is no name: lock its class and primary key, lock(session, {kind}, key)")
    return found


def is_mapped(part: Any) -> bool:
    """Tell whether it is a mapped class."""
    return isinstance(part, type) and isinstance(inspect(part, raiseerr=False), Mapper)


def kind_of(part: Any) -> names.Kind | None:
    """Tell what a mapped class is in a name; None for any other part; raises TypeError for what can be none."""
    if is_mapped(part):
        return _kind(part)
    if hasattr(part, "__clause_element__") or hasattr(part, "_compiler_dispatch"):
        raise TypeError(f"{type(part).__name__} is a question to the database: give a mapped class, or the value")
    return None


@lru_cache(maxsize=1024)
def _kind(mapped: type) -> names.Kind:
    mapper = _with_the_row(inspect(mapped))
    label = getattr(mapper.local_table, "fullname", None)
    if label is None:
        raise TypeError(f"{mapped.__name__} is mapped to no table of its own: name its lock by a text")
    converters = tuple(map(_converter, mapper.primary_key))
    return names.Kind(label=label, converters=converters, key_of=partial(_key_of, mapper))


def _with_the_row(mapper: Mapper[Any]) -> Mapper[Any]:
    """Find the mapper of the table that all classes of this row share; of the fence's, for a row that is its own."""
    above = mapper.inherits
    if (
        above is None
        or mapper.concrete
        or issubclass(mapper.class_, FencedMixin) > issubclass(above.class_, FencedMixin)
    ):
        return mapper
    return _with_the_row(above)


def _key_of(mapper: Mapper[Any], value: Any) -> Sequence[Any] | None:
    state = _state(value)
    if state is None:
        return None
    if not isinstance(value, mapper.class_):
        raise TypeError(f"an instance of {type(value).__name__} is no key of {mapper.class_.__name__}")
    known = [state.dict.get(mapper.get_property_by_column(column).key) for column in mapper.primary_key]
    return state.identity or known  # without asking the database for what has expired


def _state(value: Any) -> InstanceState[Any] | None:
    state = inspect(value, raiseerr=False)
    return state if isinstance(state, InstanceState) else None


def _converter(column: ColumnElement[Any]) -> Callable[[Any], Any]:
    kind = column.type
    if isinstance(kind, TypeDecorator):
        return partial(_there_and_back, kind)
    if isinstance(kind, Uuid):
        return _uuid
    try:
        python = kind.python_type
    except NotImplementedError:  # a type of a database, or of nobody
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
    if not isinstance(value, str) and found != value:
        raise ValueError(value)
    return found


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value))


def _moment(kind: Any, value: Any) -> Any:
    return kind.fromisoformat(value) if isinstance(value, str) else value


def _there_and_back(kind: TypeDecorator[Any], value: Any) -> Any:
    """Do what a type of the application's own does on the way to the database, and on the way back."""
    write, read = kind.bind_processor(_DIALECT), kind.result_processor(_DIALECT, None)
    value = value if write is None else write(value)
    return value if read is None else read(value)
