"""Mapped classes and their instances in a lock's name: each spelling of a key is one lock.

A key from a URL is text, a key from the session is what the column's type returns. Both must make one name, so
`sqla_dlock.key_types` converts whatever spells a column's value to the one form.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache, partial
from numbers import Number
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import unquote
from uuid import UUID

from sqlalchemy import inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import InstanceState, Mapper
from sqlalchemy.orm.util import AliasedClass
from sqlalchemy.types import NullType

from dlock_core import names
from dlock_core.errors import NoSuchKey, NotSupported
from sqla_dlock.fence_columns import FENCE_COLUMNS
from sqla_dlock.fencing import FencedMixin, class_of
from sqla_dlock.key_types import KeyColumn, UnknownSpellings, is_decorated

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["has_row_fence", "is_mapped", "kind_of", "plain", "row_key", "with_class"]

_PLAIN_TYPES: Final = frozenset({str, int, UUID})
"""Types of parts that are never a class, instance or expression: a name of only these needs no conversion."""


def with_class(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts with a `FencedMixin` class in place of a text that names the same locks.

    One lock must have one fence, whether it is named by the class or by the name of its table.
    """
    mapped = None if len(parts) != 2 or isinstance(parts[0], type) else class_of(names.label_text(parts[0]))
    if mapped is None:
        return parts
    with suppress(NoSuchKey, TypeError, UnknownSpellings):
        _kind(mapped).read_key(parts[1:])
        return mapped, parts[1]
    with suppress(ValueError, TypeError, UnknownSpellings):
        text = unquote(names.join(*parts).rpartition(":")[2])  # 42 names the row whose key is the text "42".
        _kind(mapped).read_key([text])
        return mapped, text
    return parts


def has_row_fence(mapped: type) -> bool:
    """Return whether the fence of a class's locks is in its rows, if it is no `FencedMixin` class itself.

    So it is if its table has the name of the table of such a class, and its locks therefore have the same names. Raises
    NotSupported if the table has not the two columns, as far as the class knows: only the database could tell.
    """
    fenced = class_of(_kind(mapped).label)
    if fenced is None:
        return False
    ours: Mapper[Any] = _row_mapper(inspect(mapped))
    others: Mapper[Any] = inspect(fenced)
    if [column.name for column in ours.primary_key] != [column.name for column in others.primary_key]:
        return False
    if FENCE_COLUMNS[0] not in ours.local_table.c:
        raise NotSupported(
            f"{mapped.__name__} and {fenced.__name__} have tables of one name, so their locks are the same, but their "
            f"fences need not be: give {mapped.__name__} the FencedMixin, too, lock {fenced.__name__} instead, or, if "
            "the tables are in two databases, name the lock by another text; or pass fence=False"
        )
    return True


def row_key(mapped: type, key: Any) -> Any:
    """Return a key for statements about its row: a name unites all keys that any database takes for one."""
    kind = _kind(mapped, is_own=True)
    with suppress(NoSuchKey):
        return kind.read_key([key])[0][0]
    return (kind.key_of(key) or [key])[0]  # Only the type of another database accepts it.


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


def _kind(mapped: type, *, is_own: bool = False) -> names.Kind:
    """Return what a mapped class is in a name; `is_own`: with keys as the types have them without their variants."""
    try:
        return _known_kind(mapped, is_own=is_own)
    except _IncompleteMapping as incomplete:
        refuse = partial(_refuse, incomplete)
        return names.Kind(label=incomplete.name, converters=(refuse,) * incomplete.width, key_of=refuse)


class _IncompleteMapping(NotSupported):
    """A foreign key whose type is not known yet, because the table that it refers to is not defined."""

    def __init__(self, label: str, width: int) -> None:
        super().__init__(
            f"the key of {label} is a foreign key to a table that is not defined yet: import its module before the "
            "lock is used",
            name=label,
        )
        self.width = width


def _refuse(error: _IncompleteMapping, _key: Any) -> NoReturn:
    raise error


@lru_cache(maxsize=1024)
def _known_kind(mapped: type, *, is_own: bool) -> names.Kind:
    """Raises an error, which is not cached, as long as the mapping is incomplete: a decorator may come early."""
    mapper = _row_mapper(inspect(mapped))
    label = getattr(mapper.local_table, "fullname", None)
    if label is None:
        raise TypeError(f"{mapped.__name__} is not mapped to a table: name its locks by a text instead")
    if any(isinstance(column.type, NullType) and column.foreign_keys for column in mapper.primary_key):
        raise _IncompleteMapping(label, len(mapper.primary_key))
    columns = [KeyColumn(column.type) for column in mapper.primary_key]
    return names.Kind(
        label=label,
        converters=tuple(column.convert_own if is_own else column.convert for column in columns),
        key_of=partial(_key_of, mapper, columns, as_texts=not is_own),
        takes=tuple(column.takes for column in columns),
    )


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
            f"{kind} is a row of {base}, whose own lock has not the fence of {kind}: put FencedMixin on {base}, or "
            f"lock {base}"
        )
    return _row_mapper(above)


def _key_of(mapper: Mapper[Any], columns: Sequence[KeyColumn], value: Any, *, as_texts: bool) -> Sequence[Any] | None:
    state = _state(value)
    if state is None:
        return None
    if not isinstance(value, mapper.class_):
        raise TypeError(f"an instance of {type(value).__name__} cannot be a key of {mapper.class_.__name__}")
    known = [state.dict.get(mapper.get_property_by_column(column).key) for column in mapper.primary_key]
    key = state.identity or known  # The state knows the key of an expired instance too; an attribute would query it.
    found = [_in_utc(column, each, state) for column, each in zip(columns, key, strict=True)]
    return [*map(_as_text, columns, found)] if as_texts else found


def _as_text(column: KeyColumn, value: Any) -> Any:
    """Return the text of what was read from a column that is text on other databases, where a key has to be text."""
    is_other = isinstance(value, Number | date | time | timedelta | UUID) and not isinstance(value, bool)
    return str(value) if is_other and column.is_also_text else value


def _in_utc(column: KeyColumn, value: Any, state: InstanceState[Any]) -> Any:
    """Return a time of an instance as its row has it: only PostgreSQL keeps, or converts, the zone of a time."""
    if not column.has_zone or not isinstance(value, datetime):
        return value
    bind = None
    with suppress(UnboundExecutionError):
        bind = state.session.get_bind(state.mapper) if state.session is not None else None
    if bind is None or is_decorated(column.kind.dialect_impl(bind.dialect)):
        return value  # It is not known where it comes from, or what the application makes of it.
    if bind.dialect.name == "postgresql":
        return value if value.tzinfo is None else value.astimezone(UTC)
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


def _state(value: Any) -> InstanceState[Any] | None:
    state = inspect(value, raiseerr=False)
    return state if isinstance(state, InstanceState) else None
