"""Aggregates: the version of a root is incremented if an object that belongs to it is added, changed or deleted.

`__version_children__` names paths from the root down to its children. The flush needs them in the other direction, from
a changed child up to its roots: `_paths_to_roots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import event, inspect
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Mapper, RelationshipDirection, Session
from sqlalchemy.orm.attributes import get_history

from sqla_dlock.versions.mapping import VersionedMixin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["has_root", "roots_of_changes"]

_paths_to_roots: Final[WeakKeyDictionary[type, set[tuple[str, ...]]]] = WeakKeyDictionary()
"""The relationships that lead from an instance of a class up to its roots."""


_unresolved_roots: Final[list[Mapper[Any]]] = []
"""Root classes whose paths are not resolved yet, because the mappers of their children may not exist so far."""


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _register_root(mapper: Mapper[Any], cls: Any) -> None:
    if cls.__version_children__:
        _unresolved_roots.append(mapper)


@event.listens_for(Mapper, "after_configured")
def _resolve_paths() -> None:
    for root in list(_unresolved_roots):
        for path in root.class_.__version_children__:
            child, way = _resolve_path(root, path)  # This may configure mappers, and so call this function again.
            _paths_to_roots.setdefault(child, set()).add(way)
        if root in _unresolved_roots:
            _unresolved_roots.remove(root)  # Only now: a path that leads nowhere must be an error at each flush.


def _resolve_path(mapper: Mapper[Any], path: str) -> tuple[type, tuple[str, ...]]:
    way: tuple[str, ...] = ()
    for name in path.split("."):
        if name not in mapper.relationships:
            raise ArgumentError(f"__version_children__: {mapper.class_.__name__} has no relationship {name!r}")
        back = mapper.relationships[name].back_populates
        if back is None:
            raise ArgumentError(f"{mapper.class_.__name__}.{name} needs back_populates: a child finds its root by it")
        mapper, way = mapper.relationships[name].mapper, (back, *way)
    return mapper.class_, way


def has_root(mapper: Mapper[Any]) -> bool:
    """Return whether a change to an instance of this class increments the version of another row."""
    return any(True for _ in _paths_from(mapper.class_))


def _paths_from(cls: type) -> Iterator[tuple[str, ...]]:
    return (way for base in cls.__mro__ if base in _paths_to_roots for way in _paths_to_roots[base])


def roots_of_changes(session: Session) -> list[Any]:
    """Return, once each, the roots of all instances that the session is about to write, or is writing in this flush.

    Only roots that are in the database and are not deleted count: a new one begins with its first version anyway.
    """
    _resolve_paths()
    if not _paths_to_roots:
        return []
    found: dict[int, Any] = {}
    changed = [each for each in session.dirty if session.is_modified(each, include_collections=False)]
    new = {inspect(each).mapper.identity_key_from_instance(each) for each in session.new}
    for child in [*session.new, *changed, *session.deleted]:
        for way in _paths_from(type(child)):
            found |= {id(root): root for root in _follow(session, [child], way, new)}
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
    yield from (parent for parent in get_history(child, name).sum() if parent is not None)
    relationship = inspect(child).mapper.relationships[name]
    if relationship.direction is RelationshipDirection.MANYTOONE:
        for key in _foreign_keys(child, relationship):
            is_new = relationship.mapper.identity_key_from_primary_key(key) in new
            if not is_new and (parent := session.get(relationship.mapper, key)):
                yield parent


def _foreign_keys(child: Any, relationship: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of the parents, present and former; none unless the relationship refers to their primary key."""
    mapper = inspect(child).mapper
    names = {remote: mapper.get_property_by_column(local).key for local, remote in relationship.local_remote_pairs}
    wanted = relationship.mapper.primary_key
    if all(column in names for column in wanted):
        histories = [get_history(child, names[column]) for column in wanted]
        for parts in ([each.added or each.unchanged for each in histories], [each.deleted for each in histories]):
            key = tuple(part[0] for part in parts if part and part[0] is not None)
            if len(key) == len(wanted):
                yield key
