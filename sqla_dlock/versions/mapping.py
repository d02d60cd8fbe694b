"""What makes a mapped class versioned: it gets a `version_id_col`, and what would silently not work is refused."""

from __future__ import annotations

from functools import lru_cache
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BigInteger, SmallInteger, event, inspect
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapped, Mapper, declared_attr, mapped_column, synonym
from sqlalchemy.sql.functions import FunctionElement

from dlock_core.sql.versions import FIRST_VERSION_SQL, first_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.sql.compiler import SQLCompiler

__all__ = ["VersionedMixin", "key_columns", "version_column", "version_key"]

_BITS: Final = {BigInteger: 63, SmallInteger: 15}
"""Bits of the largest number of a column; 31 of any other."""


class VersionedMixin:
    """A mapped class whose rows are never written over a change that the instance has not seen.

    `version` is one more after every UPDATE. It begins at the time in microseconds, so that a row that is deleted and
    made anew under its old key is another one; in a column of fewer than 64 bits, at random. To assign it says which
    version the caller expects: the next flush raises StaleObject if the instance was read with another. The value is
    never written. The mixin stands before the declarative base. To call the column something else, name yours in
    `__mapper_args__ = {"version_id_col": revision}`: `version` is then a synonym of it. Not covered: Core statements on
    the table, and raw SQL.
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
    named = _arguments(cls, own).get("version_id_col")
    if named is not None and named is not vars(cls).get("version"):
        if (name := _name_of(cls, named)) not in (None, "version"):
            cls.version = synonym(name)
        return
    if vars(cls).get("version") is None:
        # The server has a default, too: without it other software could not insert.
        cls.version = mapped_column(
            BigInteger, nullable=False, insert_default=_first_version, server_default=_FirstVersion()
        )
    version = vars(cls)["version"]
    if isinstance(own, dict):  # which subclasses do not inherit, unlike a declared_attr
        cls.__mapper_args__ = {"version_id_col": version, **own}
    else:
        cls.__mapper_args__ = declared_attr.directive(lambda cls: {"version_id_col": version, **own.fget(cls)})


def _arguments(cls: Any, own: Any) -> Any:
    return own if isinstance(own, dict) else own.fget(cls)


def _name_of(cls: type, column: Any) -> str | None:
    """Find the attribute of the class, or of a mixin, that a column is assigned to."""
    return next((name for base in cls.__mro__ for name, value in vars(base).items() if value is column), None)


def _first_version() -> int:
    return first_version()


class _FirstVersion(FunctionElement[int]):
    """The same as a default in the database, for rows that other software inserts."""

    inherit_cache = True
    type = BigInteger()


@compiles(_FirstVersion)
def _in_sql(element: _FirstVersion, compiler: SQLCompiler, **_: Any) -> str:
    name = compiler.dialect.name
    return f"({FIRST_VERSION_SQL.get('mysql' if name == 'mariadb' else name, '1')})"


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _refuse_unguarded(mapper: Mapper[Any], cls: type) -> None:
    version = version_column(mapper)
    if version is None:
        raise ArgumentError(
            f"{cls.__name__} has no version: VersionedMixin comes before the declarative base in its bases, and a "
            'mapping of another kind names the column itself: version_id_col=table.c["version"]'
        )
    if version.table not in mapper.tables:
        raise ArgumentError(
            f"{cls.__name__} is concrete, with a table of its own, and has no version there: give it one, "
            '__mapper_args__ = {"concrete": True, "version_id_col": version}, or share an __abstract__ class'
        )
    for parent in mapper.iterate_to_root():
        if version.table in parent.tables and parent.version_id_col is not version:
            raise ArgumentError(
                f"a flush would not check the version of {cls.__name__}: its table {version.table.name} is that of "
                f"{parent.class_.__name__}, which has {'another' if parent.version_id_col is not None else 'none'}: "
                f"add VersionedMixin to the bases of {parent.class_.__name__} instead"
            )
    if mapper.get_property_by_column(version).deferred:
        raise ArgumentError(f"the version of {cls.__name__} is deferred: read later than its row it checks nothing")
    if not callable(mapper.version_id_generator):
        raise ArgumentError(
            f"the version of {cls.__name__} is to be counted here: with version_id_generator=False the database, or "
            "whoever forgets it, does; leave that out, or map the class without VersionedMixin"
        )
    if mapper.version_id_generator.__module__ == Mapper.__module__:  # SQLAlchemy's own begins at 1
        mapper.version_id_generator = _counter(version.type)
    if version.server_onupdate is None:
        # The server default is for rows that other software inserts. SQLAlchemy takes it as a sign that the server
        # counts the version, and would build every UPDATE anew, to ask for the value: a fifth of the flush's time.
        mapper._version_id_has_server_side_value = False  # noqa: SLF001


def _counter(kind: Any) -> Callable[[Any], Any]:
    bits = next((bits for known, bits in _BITS.items() if isinstance(kind, known)), 31)
    return lambda version: first_version(bits) if version is None else version + 1
