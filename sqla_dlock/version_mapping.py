"""What makes a mapped class versioned: it gets a `version_id_col`, and what would silently not work is refused."""

from __future__ import annotations

from functools import lru_cache
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import BigInteger, event, inspect
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Mapped, Mapper, declared_attr, mapped_column, synonym

__all__ = ["VersionedMixin", "key_columns", "version_column", "version_key"]


class VersionedMixin:
    """A mapped class whose rows are never written over a change that the instance has not seen.

    `version` is 1 after the INSERT and one more after every UPDATE. The mixin stands before the declarative base. To
    call the column something else, name yours in `__mapper_args__ = {"version_id_col": revision}`: `version` is then a
    synonym of it. Not covered: Core statements on the table, and raw SQL.
    """

    if TYPE_CHECKING:
        version: Mapped[int]

    __version_children__: ClassVar[tuple[str, ...]] = ()
    """Relationships of an aggregate root, as "lines" or "lines.parts": a change at the end counts the root up."""

    def __init_subclass__(cls, **options: Any) -> None:
        if _begins_a_hierarchy(cls):
            _add_version(cls)
        super().__init_subclass__(**options)


def version_column(mapper: Mapper[Any]) -> Any:
    """The column that holds the version; of this class, or of one that it inherits from."""
    return mapper.version_id_col


@lru_cache(maxsize=1024)
def version_key(mapper: Mapper[Any]) -> str:
    """The attribute that holds the version."""
    return mapper.get_property_by_column(version_column(mapper)).key


@lru_cache(maxsize=1024)
def key_columns(mapper: Mapper[Any]) -> tuple[Any, ...]:
    """The primary key in the table of the version."""
    table = version_column(mapper).table
    return tuple(column for column in mapper.primary_key if column.table is table) or tuple(table.primary_key)


def _begins_a_hierarchy(cls: type) -> bool:
    """Is it to be mapped, and not below a class that has a version already?"""
    if cls.__dict__.get("__abstract__") or not (hasattr(cls, "registry") or _static(cls, "__tablename__", "__table__")):
        return False
    parents = (base for base in cls.__mro__[1:] if issubclass(base, VersionedMixin))
    return all(inspect(base, raiseerr=False) is None for base in parents)


def _static(cls: type, *names: str) -> Any:
    return next((found for name in names if (found := getattr_static(cls, name, None)) is not None), None)


def _add_version(cls: Any) -> None:
    own = _static(cls, "__mapper_args__") or {}
    named = own.get("version_id_col") if isinstance(own, dict) else None
    if named is not None and named is not vars(cls).get("version"):
        cls.version = synonym(next(name for name, value in vars(cls).items() if value is named))
        return
    if vars(cls).get("version") is None:
        # The server has a default, too: without it other software could not insert.
        cls.version = mapped_column(BigInteger, nullable=False, server_default="1")
    version = vars(cls)["version"]
    cls.__mapper_args__ = declared_attr.directive(lambda cls: {"version_id_col": version, **_arguments(cls, own)})


def _arguments(cls: Any, own: Any) -> Any:
    return own if isinstance(own, dict) else own.fget(cls)


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _refuse_without_version(mapper: Mapper[Any], cls: type) -> None:
    version = version_column(mapper)
    if version is None:
        raise ArgumentError(
            f"{cls.__name__} has no version: VersionedMixin comes before the declarative base in its bases, and a "
            'mapping of another kind names the column itself: version_id_col=table.c["version"]'
        )
    if mapper.get_property_by_column(version).deferred:
        raise ArgumentError(f"the version of {cls.__name__} is deferred: read later than its row it checks nothing")
