"""Which rows were meant: by class and primary key, by an instance of the session, or by a select."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Select, and_, inspect, select, tuple_
from sqlalchemy.orm import Mapper

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from sqlalchemy.orm import InstanceState, InstrumentedAttribute, Session

    IsMeant: TypeAlias = Callable[[InstanceState[Any]], bool]

__all__ = ["NOT_GIVEN", "many_rows", "one_row", "refuse_unsaved", "row_name"]

NOT_GIVEN: Final[Any] = object()


def row_name(mapper: Mapper[Any], key: Iterable[object]) -> str:
    """Name a row in an error."""
    return f"{mapper.class_.__name__}({', '.join(map(repr, key))})"


def one_row(session: Session, entity: Any, ident: Any) -> tuple[str, Mapper[Any], Select[Any], IsMeant]:
    """Find out how to name one row, how to select it, and which instance of the session has been read from it."""
    mapper, key = _identity(session, entity, ident)
    identity = mapper.identity_key_from_primary_key(key)
    found = select(mapper.class_).where(
        and_(*(column == value for column, value in zip(_keys(mapper), key, strict=True)))
    )
    return row_name(mapper, key), mapper, found, lambda state: state.key == identity


def many_rows(entity: Any, idents: Any, *, skip_locked: bool) -> tuple[Mapper[Any], Select[Any], IsMeant]:
    """Find out how to select many rows in the order of their keys, and which instances have been read from them."""
    if isinstance(entity, Select):
        return _selected(entity, idents, skip_locked=skip_locked)
    mapper = _mapper(entity)
    if idents is NOT_GIVEN or isinstance(idents, str | bytes | Mapping) or not isinstance(idents, Iterable):
        raise TypeError(f"give the primary keys of {mapper.class_.__name__} in a list")
    keys = [_key(mapper, ident) for ident in idents]
    identities = {mapper.identity_key_from_primary_key(key) for key in keys}
    columns = _keys(mapper)
    is_one = tuple_(*columns).in_(keys) if len(columns) > 1 else columns[0].in_([value for (value,) in keys])
    return mapper, select(mapper.class_).where(is_one).order_by(*columns), lambda state: state.key in identities


def _selected(statement: Select[Any], idents: Any, *, skip_locked: bool) -> tuple[Mapper[Any], Select[Any], IsMeant]:
    (column, *others) = statement.column_descriptions
    entity = column.get("entity")
    if others or idents is not NOT_GIVEN or column["expr"] is not entity:
        raise TypeError("give a select of one mapped class, as select(Order).where(...), and nothing else")
    mapper = _mapper(entity)
    if not skip_locked:
        if statement._has_row_limiting_clause:
            raise ValueError("a limit picks rows in the order of the query, not of their keys: give skip_locked=True")
        statement = statement.order_by(None).order_by(*_keys(mapper))
    return mapper, statement, lambda state: state.mapper.isa(mapper)


def refuse_unsaved(session: Session, is_meant: IsMeant) -> None:
    """Raise ValueError when what is read under the lock would overwrite a change that the session has not written.

    Without autoflush that may be any change: rows of other classes can be loaded along.
    """
    for instance in session.dirty:
        state: InstanceState[Any] = inspect(instance)
        changed = [attribute.key for attribute in state.attrs if attribute.history.has_changes()]
        if changed and (is_meant(state) or not session.autoflush):
            raise ValueError(
                f"{row_name(state.mapper, state.identity or ())} has changes that are not saved, "
                f"in {', '.join(changed)}: flush() or refresh() it before the lock, which would overwrite them"
            )


def _identity(session: Session, entity: Any, ident: Any) -> tuple[Mapper[Any], tuple[Any, ...]]:
    if isinstance(entity, type):
        mapper = _mapper(entity)
        if ident is NOT_GIVEN:
            raise TypeError(f"give the primary key of {entity.__name__}, too, or an instance")
        return mapper, _key(mapper, ident)
    if ident is not NOT_GIVEN:
        raise TypeError("give a mapped class and a primary key, or an instance alone")
    mapper = _mapper(type(entity))
    state: InstanceState[Any] = inspect(entity)
    if state.identity is None or not state.persistent or state.session is not session:
        words = ("transient", "pending", "deleted", "detached")
        condition = next((word for word in words if getattr(state, word)), "of another session")
        raise ValueError(
            f"this {mapper.class_.__name__} is {condition}, and only a row that this session has read or written can "
            "be locked: flush() or merge() it first, or give the class and the primary key"
        )
    return mapper, state.identity


def _mapper(entity: Any) -> Mapper[Any]:
    found: Any = inspect(entity, raiseerr=False) if isinstance(entity, type) else None
    if not isinstance(found, Mapper):
        raise TypeError(f"{entity!r:.80} is no mapped class")
    return found


def _key(mapper: Mapper[Any], ident: Any) -> tuple[Any, ...]:
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    if isinstance(ident, Mapping) and set(ident) == set(names):
        return tuple(ident[name] for name in names)
    key = tuple(ident) if isinstance(ident, tuple | list) else (ident,)
    if len(key) != len(names) or isinstance(ident, Mapping):
        raise ValueError(f"{ident!r:.80} is no primary key of {mapper.class_.__name__}: give ({', '.join(names)})")
    return key


def _keys(mapper: Mapper[Any]) -> list[InstrumentedAttribute[Any]]:
    return [mapper.get_property_by_column(column).class_attribute for column in mapper.primary_key]
