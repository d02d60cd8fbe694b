"""Aggregates: the version of a root is incremented if an object that belongs to it is added, changed or deleted.

`__version_children__` names paths from the root down to its children. The flush needs them in the other direction, from
a changed child up to its roots: `_paths_to_roots`. In a many-to-many relationship an object is added or removed without
a change of its row, so there the flush starts from the owner of the collection: `_collections`.

ORM statements that write children are refused, because only a flush knows which roots they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Delete, Insert, Join, Update, event, inspect, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Mapper, PassiveFlag, RelationshipDirection, Session
from sqlalchemy.orm.attributes import get_history

from dlock_core.errors import NotSupported
from sqla_dlock.statements import other_mappers, plain, without_alias
from sqla_dlock.versions.mapping import VersionedMixin, version_column

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping

__all__ = [
    "has_root",
    "is_of_flush",
    "may_be_counted",
    "refuse_child_writes",
    "refuse_join",
    "roots_of_changes",
    "versioned_class",
]

T = TypeVar("T")

_paths_to_roots: Final[WeakKeyDictionary[type, set[tuple[str, ...]]]] = WeakKeyDictionary()
"""The relationships that lead from an instance of a class up to its roots."""
_collections: Final[WeakKeyDictionary[type, set[tuple[str, tuple[str, ...]]]]] = WeakKeyDictionary()
"""The many-to-many relationships of a class that are part of an aggregate, each with the way up to its roots."""
_COLLECTION_CHANGES: Final = PassiveFlag.PASSIVE_NO_INITIALIZE | PassiveFlag.INCLUDE_PENDING_MUTATIONS
_LOADING: Final = PassiveFlag.PASSIVE_OFF | PassiveFlag.NO_RAISE
"""Load a relationship that needs it, also one with lazy="raise", which is meant for the application's code."""

_counted_tables: Final[WeakKeyDictionary[Any, WeakSet[Mapper[Any]]]] = WeakKeyDictionary()
"""The versioned classes and children of aggregates of each table, so that statements on others cost next to nothing."""

_unresolved_roots: Final[list[Mapper[Any]]] = []
"""Root classes whose paths are not resolved yet, because the mappers of their children may not exist so far."""


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _register_root(mapper: Mapper[Any], cls: Any) -> None:
    if cls.__version_children__:
        _unresolved_roots.append(mapper)


@event.listens_for(Mapper, "after_mapper_constructed")
def _register_tables(mapper: Mapper[Any], cls: Any) -> None:
    if issubclass(cls, VersionedMixin) or has_root(mapper):
        _register_tables_of(mapper)


def _register_tables_of(mapper: Mapper[Any]) -> None:
    for table in mapper.tables:
        _counted_tables.setdefault(table, WeakSet()).add(mapper)


@event.listens_for(Mapper, "after_configured")
def _resolve_paths() -> None:
    for root in list(_unresolved_roots):
        for path in root.class_.__version_children__:
            _resolve_path(root, path)  # This may configure mappers, and so call this function again.
        if root in _unresolved_roots:
            _unresolved_roots.remove(root)  # Only now: a path that leads nowhere must be an error at each flush.


def _resolve_path(mapper: Mapper[Any], path: str) -> None:
    way: tuple[str, ...] = ()
    for name in path.split("."):
        if name not in mapper.relationships:
            raise ArgumentError(f"__version_children__: {mapper.class_.__name__} has no relationship {name!r}")
        relationship = mapper.relationships[name]
        back = relationship.back_populates
        if back is None:
            raise ArgumentError(f"{mapper.class_.__name__}.{name} needs back_populates: a child finds its root by it")
        if relationship.secondary is not None:
            _collections.setdefault(mapper.class_, set()).add((name, way))
        mapper, way = relationship.mapper, (back, *way)
    _paths_to_roots.setdefault(mapper.class_, set()).add(way)
    for each in mapper.self_and_descendants:
        _register_tables_of(each)


def has_root(mapper: Mapper[Any]) -> bool:
    """Return whether a change to an instance of this class increments the version of another row."""
    return any(True for _ in _known_for(mapper.class_, _paths_to_roots))


def _known_for(cls: type, known: MutableMapping[type, set[T]]) -> Iterator[T]:
    return (each for base in cls.__mro__ if base in known for each in known[base])


def may_be_counted(tables: Iterable[Any]) -> bool:
    """Return whether a write of these tables may count a version: of their own rows, or of the roots of their rows."""
    return bool(_unresolved_roots) or any(table in _counted_tables for table in tables)


def is_of_flush(table: Any, cache: Any) -> bool:
    """Return whether a cache of statements is that of a flush, which has one for each hierarchy of classes."""
    return any(each.base_mapper._compiled_cache is cache for each in _counted_tables.get(table, ()))  # noqa: SLF001


def versioned_class(table: Any) -> Mapper[Any] | None:
    """Return the versioned class of a table, the topmost one of a hierarchy in it; None if it is that of a parent."""
    own = [each for each in _counted_tables.get(table, ()) if _is_versioned_class_of(table, each)]
    return min(own, key=lambda each: version_column(each).table is not table, default=None)


def _is_versioned_class_of(table: Any, mapper: Mapper[Any]) -> bool:
    """Return whether a table is that of a versioned class, or one of those it joins, and not that of its parent."""
    is_inherited = mapper.inherits is not None and table in mapper.inherits.tables
    return issubclass(mapper.class_, VersionedMixin) and not is_inherited


def refuse_child_writes(statement: Any, own: Mapper[Any] | None) -> None:
    """Raise NotSupported for a statement that writes children, its own class, of which it cannot count the roots."""
    statement = plain(statement)
    for mapper in (*([own] if own else ()), *other_mappers(statement)):
        _resolve_paths()
        written = [mapper] if isinstance(statement, Insert) else mapper.self_and_descendants
        if child := next((each.class_.__name__ for each in written if has_root(each)), None):
            verb = statement.__visit_name__
            raise NotSupported(
                f"{verb}({child}) would not count the versions of the aggregates that {child} belongs to: change "
                f"instances and flush them; or touch() the roots, and send {verb}({child}.__table__) with "
                "columns of the table only"
            )


def refuse_join(statement: Any, own: Mapper[Any] | None, tables: Iterable[Any], *, is_by_key: bool) -> None:
    """Refuse an UPDATE of a join, as MySQL can, whatever names its columns, if it may write a table with versions.

    `tables`: all that it may write. An UPDATE by primary key of a class on a join is sent to each table by itself.
    """
    write = plain(statement)
    if not isinstance(write, Update | Delete) or not isinstance(without_alias(write.table), Join):
        return
    _resolve_paths()
    is_of_class = own is not None and own.local_table == write.table
    counted = (versioned_class(each) or _child_class(each) for each in tables)
    if not (is_of_class and is_by_key) and (found := next(filter(None, counted), None)):
        name, verb = found.class_.__name__, write.__visit_name__
        raise NotSupported(
            f"{verb}({name}) cannot write the join that {name} is mapped to: change or delete instances and flush "
            "them, or update rows by primary key, each with its version"
            if is_of_class
            else f"{verb}() of a join would not count the versions of {name}: write one table, with the others in "
            "where(...)"
        )


def _child_class(table: Any) -> Mapper[Any] | None:
    return next((each for each in _counted_tables.get(table, ()) if has_root(each)), None)


def roots_of_changes(session: Session) -> list[Any]:
    """Return, once each, the roots of all instances that the session is about to write, or is writing in this flush.

    Only roots that are in the database and are not deleted count: a new one begins with its first version anyway.
    """
    _resolve_paths()
    if not _paths_to_roots:
        return []
    found: dict[int, Any] = {}
    dirty = list(session.dirty)
    changed = [each for each in dirty if session.is_modified(each, include_collections=False)]
    new = {inspect(each).mapper.identity_key_from_instance(each) for each in session.new}
    for child in [*session.new, *changed, *session.deleted]:
        for way in _known_for(type(child), _paths_to_roots):
            found |= {id(root): root for root in _follow(session, [child], way, new)}
    for owner in [*session.new, *dirty, *session.deleted] if _collections else ():
        for name, way in _known_for(type(owner), _collections):
            if owner in session.deleted or get_history(owner, name, _COLLECTION_CHANGES).has_changes():
                found |= {id(root): root for root in _follow(session, [owner], way, new)}
    return [root for root in found.values() if inspect(root).persistent and root not in session.deleted]


def _follow(session: Session, instances: Iterable[Any], way: tuple[str, ...], new: set[Any]) -> Iterable[Any]:
    for name in way:
        instances = {id(parent): parent for each in instances for parent in _parents(session, each, name, new)}.values()
    return instances


def _parents(session: Session, child: Any, name: str, new: set[Any]) -> Iterator[Any]:
    """Yield the parents of a child, former and present ones, by the relationship and by its foreign key.

    The foreign key matters where only it was assigned: the relationship then still shows the former parent. Parents
    whose key is among `new` are inserted by this flush. The session cannot find them yet, and would query for them.
    """
    yield from (parent for parent in get_history(child, name, _LOADING).sum() if parent is not None)
    relationship = inspect(child).mapper.relationships[name]
    if relationship.direction is RelationshipDirection.MANYTOONE:
        parents, keys = relationship.mapper, relationship.mapper.primary_key
        for values in _foreign_keys(child, relationship):
            if all(column in values for column in keys):
                key = tuple(values[column] for column in keys)
                is_new = parents.identity_key_from_primary_key(key) in new
                if not is_new and (parent := session.get(parents, key)):
                    yield parent
            elif len(values) == len(relationship.local_remote_pairs):  # it refers to other columns, which are unique
                yield from session.scalars(select(parents.class_).where(*(each == values[each] for each in values)))


def _foreign_keys(child: Any, relationship: Any) -> Iterator[dict[Any, Any]]:
    """Yield the values by which the present and the former parent are found, by the columns of the parent."""
    mapper = inspect(child).mapper
    histories = {
        remote: get_history(child, mapper.get_property_by_column(local).key)
        for local, remote in relationship.local_remote_pairs
    }
    present = {column: each.added or each.unchanged for column, each in histories.items()}
    is_moved = any(each.deleted for each in histories.values())
    former = {column: each.deleted or each.unchanged for column, each in histories.items() if is_moved}
    for parts in (present, former):
        yield {column: part[0] for column, part in parts.items() if part and part[0] is not None}
