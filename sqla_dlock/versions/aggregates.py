"""Aggregates: a root counts up when something that belongs to it is added, changed or deleted."""

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

_ways: Final[WeakKeyDictionary[type, set[tuple[str, ...]]]] = WeakKeyDictionary()
"""The attributes that lead from an instance of a class to its roots."""


_roots: Final[list[Mapper[Any]]] = []
"""Classes whose children are not known yet."""


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _note_root(mapper: Mapper[Any], cls: Any) -> None:
    if cls.__version_children__:
        _roots.append(mapper)


@event.listens_for(Mapper, "after_configured")
def _learn_ways() -> None:
    for root in list(_roots):
        for path in root.class_.__version_children__:
            child, way = _walk(root, path)  # which may configure mappers, and so come back here
            _ways.setdefault(child, set()).add(way)
        if root in _roots:
            _roots.remove(root)  # not before all went well: a mistake is told at every flush


def _walk(mapper: Mapper[Any], path: str) -> tuple[type, tuple[str, ...]]:
    way: tuple[str, ...] = ()
    for name in path.split("."):
        if name not in mapper.relationships:
            raise ArgumentError(f"__version_children__: {mapper.class_.__name__} has no relationship {name!r}")
        back = mapper.relationships[name].back_populates
        if back is None:
            raise ArgumentError(f"{mapper.class_.__name__}.{name} needs back_populates: how else to find the root?")
        mapper, way = mapper.relationships[name].mapper, (back, *way)
    return mapper.class_, way


def has_root(mapper: Mapper[Any]) -> bool:
    """Say whether a change to an instance of this class counts up another row."""
    return any(True for _ in _ways_from(mapper.class_))


def _ways_from(cls: type) -> Iterator[tuple[str, ...]]:
    return (way for base in cls.__mro__ if base in _ways for way in _ways[base])


def roots_of_changes(session: Session) -> list[Any]:
    """Return, once each, the roots of everything that the session is about to write, or writes in this flush."""
    _learn_ways()
    if not _ways:
        return []
    found: dict[int, Any] = {}
    changed = [each for each in session.dirty if session.is_modified(each, include_collections=False)]
    new = {inspect(each).mapper.identity_key_from_instance(each) for each in session.new}
    for child in [*session.new, *changed, *session.deleted]:
        for way in _ways_from(type(child)):
            found |= {id(root): root for root in _follow(session, [child], way, new)}
    return [root for root in found.values() if inspect(root).persistent and root not in session.deleted]


def _follow(session: Session, instances: Iterable[Any], way: tuple[str, ...], new: set[Any]) -> Iterable[Any]:
    for name in way:
        instances = {id(parent): parent for each in instances for parent in _parents(session, each, name, new)}.values()
    return instances


def _parents(session: Session, child: Any, name: str, new: set[Any]) -> Iterator[Any]:
    """Those it belonged to and those it belongs to, by the relationship and by its foreign key.

    `new` are the keys of instances that this flush inserts: the session does not find them yet, and must not read them.
    """
    yield from (parent for parent in get_history(child, name).sum() if parent is not None)
    relationship = inspect(child).mapper.relationships[name]
    if relationship.direction is RelationshipDirection.MANYTOONE:
        for key in _foreign_keys(child, relationship):
            is_new = relationship.mapper.identity_key_from_primary_key(key) in new
            if not is_new and (parent := session.get(relationship.mapper, key)):
                yield parent


def _foreign_keys(child: Any, relationship: Any) -> Iterator[tuple[Any, ...]]:
    """The keys of its parents, old and new; none if the relationship goes by other columns than their primary key."""
    mapper = inspect(child).mapper
    names = {remote: mapper.get_property_by_column(local).key for local, remote in relationship.local_remote_pairs}
    wanted = relationship.mapper.primary_key
    if all(column in names for column in wanted):
        histories = [get_history(child, names[column]) for column in wanted]
        for parts in ([each.added or each.unchanged for each in histories], [each.deleted for each in histories]):
            key = tuple(part[0] for part in parts if part and part[0] is not None)
            if len(key) == len(wanted):
                yield key
