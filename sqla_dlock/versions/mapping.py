"""How a mapped class gets its version, a `version_id_col`; mappings that would silently check nothing are refused."""

from __future__ import annotations

from functools import lru_cache
from inspect import getattr_static
from numbers import Integral, Number
from operator import eq
from typing import TYPE_CHECKING, Any, ClassVar, Final
from warnings import catch_warnings, simplefilter

from sqlalchemy import BigInteger, Integer, Numeric, SmallInteger, event, inspect
from sqlalchemy.exc import ArgumentError, SAWarning
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import ColumnProperty, Mapped, Mapper, declared_attr, mapped_column, synonym
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BinaryExpression
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import UserDefinedType

from dlock_core.sql.versions import FIRST_VERSION_SQL, first_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.sql.compiler import SQLCompiler

__all__ = [
    "VersionedMixin",
    "counts_by_one",
    "is_key_of_table",
    "is_number",
    "key_columns",
    "require_kind",
    "version_column",
    "version_key",
]

_BITS: Final = {BigInteger: 63, SmallInteger: 15}
"""The bits of the largest number of a column type; other types have 31."""


class VersionedMixin:
    """A mapped class whose rows are never written over a change that the instance has not seen.

    Put the mixin before the declarative base. Each UPDATE increments `version`. It begins at the time in microseconds,
    so that a row that is deleted and created again under its old key is not taken for the old one; in a column of fewer
    than 64 bits it begins at a random number.

    A version that you assign is the one that you expect: the next flush raises StaleObject if the instance was read
    with another, and the assigned value itself is never written. To use another column name, declare the column and
    name it in `__mapper_args__ = {"version_id_col": revision}`; `version` is then a synonym of it, and no other column
    may be an attribute of this name.

    Core statements on the table, except upserts, and raw SQL are not covered.
    """

    if TYPE_CHECKING:
        version: Mapped[int]

    __version_children__: ClassVar[tuple[str, ...]] = ()
    """The relationships of an aggregate root, such as "lines.parts": a change at their end increments its version."""

    def __init_subclass__(cls, **options: Any) -> None:
        if issubclass(cls, AbstractConcreteBase):
            # Not left to `_check_mapping`: SQLAlchemy maps this parent, to a union of the tables, after its subclasses.
            above = next(base.__name__ for base in cls.__mro__ if AbstractConcreteBase in base.__bases__)
            raise ArgumentError(
                f"a flush would not check the version of {cls.__name__}: {above} is an AbstractConcreteBase, to which "
                f"SQLAlchemy assigns the tables of its classes; make {above} a ConcreteBase with a table, or let it "
                "have __abstract__ = True, and put VersionedMixin on each class that has a table"
            )
        if _is_root_of_hierarchy(cls):
            _add_version(cls)
        super().__init_subclass__(**options)


def version_column(mapper: Mapper[Any]) -> Any:
    """The column that holds the version; of this class, or of one that it inherits from."""
    return mapper.version_id_col


@lru_cache(maxsize=1024)
def version_key(mapper: Mapper[Any]) -> str:
    """Return the name of the attribute that holds the version."""
    return mapper.get_property_by_column(version_column(mapper)).key


@lru_cache(maxsize=1024)
def key_columns(mapper: Mapper[Any]) -> tuple[Any, ...]:
    """Return, for each column of the primary key, the one that equals it in the table of the version.

    In joined inheritance that may be a parent's or a subclass's table, whose key may differ in its order and names.
    Raises ArgumentError for a class on a join, of which several instances may share the row that has the version.
    """
    table = version_column(mapper).table
    found = _key_in(mapper, table)
    if len(found) != len(mapper.primary_key):
        raise ArgumentError(
            f"a row of {table.name}, which has the version, is not one instance of {mapper.class_.__name__}, whose key "
            "has columns of other tables: map each table by a class of its own, with a relationship between them"
        )
    return tuple(found)


@lru_cache(maxsize=1024)
def is_key_of_table(mapper: Mapper[Any]) -> bool:
    """Return whether SQLAlchemy finds the key of a class among what RETURNING gives, the PRIMARY KEY of its table.

    Of a subclass with a table of its own it takes that for the key as it is, whose columns may be in another order.
    """
    table = mapper.local_table
    returned = [id(column) for column in table.primary_key]
    if table is mapper.base_mapper.local_table:
        return {id(column) for column in mapper.primary_key}.issubset(returned)
    return [id(column) for column in _key_in(mapper, table)] == returned


def _key_in(mapper: Mapper[Any], table: Any) -> list[Any]:
    """Return, for each column of the primary key, the one that equals it in a table, if there is one."""
    found: list[Any] = []
    for column in mapper.primary_key:
        equal = _joined_with(mapper, column)
        found += [column] if column.table is table else [each for each in table.c if each in equal][:1]
    return found


def _joined_with(mapper: Mapper[Any], column: Any) -> set[Any]:
    """Return a column, and all that the joins of the tables of a class set equal to it."""
    parts = visitors.iterate(mapper.persist_selectable)
    pairs = [{each.left, each.right} for each in parts if isinstance(each, BinaryExpression) and each.operator is eq]
    equal = {column}
    while more := {each for pair in pairs if pair & equal for each in pair - equal}:
        equal |= more
    return equal


@lru_cache(maxsize=1024)
def set_by_update(mapper: Mapper[Any]) -> tuple[Any, ...]:
    """Return the attributes that each UPDATE sets by itself: by `onupdate`, or computed by the database."""
    return tuple(each for each in mapper.column_attrs if _is_set_by_update(each.columns[0]))


def _is_set_by_update(column: Any) -> bool:
    return any(getattr(column, name, None) is not None for name in ("onupdate", "server_onupdate"))


def is_number(version: Any) -> bool:
    """Return whether a version is a number, also by a TypeDecorator."""
    return issubclass(version.type._type_affinity, Integer | Numeric)  # noqa: SLF001


def counts_by_one(mapper: Mapper[Any]) -> bool:
    """Return whether the mixin counts the version, and no generator of the program's own makes it."""
    return getattr(mapper.version_id_generator, "__module__", None) == __name__


def require_kind(mapper: Mapper[Any], expected: Any, known: Any = None) -> None:
    """Raise TypeError if an expected version has plainly another type than the versions of a class have. No I/O.

    `known`: a version of the class, which tells what the column does not.
    """
    kind = _kind(mapper)
    if kind is object and isinstance(known, int):
        kind = Number
    if isinstance(expected, kind):
        return
    name, given = mapper.class_.__name__, f"{expected!r:.80}"
    if issubclass(kind, Number):
        raise TypeError(f"the expected version is a number, as versions of {name} are, not {given}")
    raise TypeError(
        f"the expected version is of the type {kind.__name__}, as versions of {name} are, and not of the type "
        f"{type(expected).__name__}: {given}"
    )


@lru_cache(maxsize=1024)
def _kind(mapper: Mapper[Any]) -> type:
    """Return the type that versions of a class have in Python; object if only the program knows, by a TypeDecorator."""
    version = version_column(mapper)
    try:
        kind: type = version.type.python_type
    except NotImplementedError:  # before SQLAlchemy 2.1
        kind = object
    if kind is object and is_number(version) and counts_by_one(mapper):
        return Number
    return Integral if kind is int else Number if issubclass(kind, Number) else kind


def _is_root_of_hierarchy(cls: type) -> bool:
    """Return whether a class will be mapped, and no class above it is: it has the version of the hierarchy."""
    if cls.__dict__.get("__abstract__") or not (
        hasattr(cls, "registry") or _static_attribute(cls, "__tablename__", "__table__")
    ):
        return False
    parents = (base for base in cls.__mro__[1:] if issubclass(base, VersionedMixin))
    return all(inspect(base, raiseerr=False) is None for base in parents)


def _static_attribute(cls: type, *names: str) -> Any:
    """Return the first of these attributes as defined in the class: only SQLAlchemy may call a declared_attr."""
    return next((found for name in names if (found := getattr_static(cls, name, None)) is not None), None)


def _add_version(cls: Any) -> None:
    own = _static_attribute(cls, "__mapper_args__") or {}
    named = _arguments(cls, own).get("version_id_col")
    if named is not None and named is not vars(cls).get("version"):
        return
    if vars(cls).get("version") is None:
        if "__table__" in vars(cls):
            raise ArgumentError(
                f"{cls.__name__} has a __table__, to which no column can be added: name its version, "
                '__mapper_args__ = {"version_id_col": __table__.c.version}'
            )
        # The server has a default as well: without it, other software could not insert rows.
        cls.version = mapped_column(
            BigInteger, nullable=False, insert_default=_first_version, server_default=_FirstVersion()
        )
    version = vars(cls)["version"]
    if isinstance(own, dict):  # Subclasses do not inherit the arguments from a dict, but they do from a declared_attr.
        cls.__mapper_args__ = {"version_id_col": version, **own}
    else:
        cls.__mapper_args__ = declared_attr.directive(lambda cls: {"version_id_col": version, **own.fget(cls)})


def _arguments(cls: Any, own: Any) -> Any:
    if isinstance(own, dict):
        return own
    with catch_warnings():  # SQLAlchemy warns of a declared_attr that is read before its class is mapped.
        simplefilter("ignore", SAWarning)
        return own.fget(cls)


def _first_version() -> int:
    return first_version()


class _FirstVersion(FunctionElement[int]):
    """The first version as a default of the database, for rows that other software inserts."""

    inherit_cache = True
    type = BigInteger()


@compiles(_FirstVersion)
def _in_sql(element: _FirstVersion, compiler: SQLCompiler, **_: Any) -> str:
    name = compiler.dialect.name
    return f"({FIRST_VERSION_SQL.get('mysql' if name == 'mariadb' else name, '1')})"


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _refuse_text(mapper: Mapper[Any], cls: type) -> None:
    version = version_column(mapper)
    if isinstance(version, str):
        raise ArgumentError(
            f"version_id_col of {cls.__name__} is a column, not the text {version!r}: give the column itself"
        )


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _check_mapping(mapper: Mapper[Any], cls: type) -> None:
    version = version_column(mapper)
    if version is None:
        raise ArgumentError(
            f"{cls.__name__} has no version: in its bases VersionedMixin comes before the declarative base; an "
            'imperative mapping names the column itself, with version_id_col=table.c["version"]'
        )
    if version.table not in mapper.tables:
        raise ArgumentError(
            f"{cls.__name__} is concrete, with a separate table, and has no version there: give it one, "
            '__mapper_args__ = {"concrete": True, "version_id_col": version}, or share an __abstract__ class'
        )
    key_columns(mapper)
    for parent in mapper.iterate_to_root():
        if version.table in parent.tables and parent.version_id_col is not version:
            raise ArgumentError(
                f"a flush would not check the version of {cls.__name__}: its table {version.table.name} is that of "
                f"{parent.class_.__name__}, which has {'another' if parent.version_id_col is not None else 'none'}: "
                f"add VersionedMixin to the bases of {parent.class_.__name__} instead"
            )
    if mapper.get_property_by_column(version).deferred:
        raise ArgumentError(
            f"the version of {cls.__name__} is deferred: a version that is read after its row proves nothing"
        )
    if not mapper.base_mapper.confirm_deleted_rows:
        raise ArgumentError(
            f"a DELETE of a stale {cls.__name__} would pass unnoticed: leave out confirm_deleted_rows=False of "
            f"{mapper.base_mapper.class_.__name__}"
        )


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _set_generator(mapper: Mapper[Any], cls: type) -> None:
    version = version_column(mapper)
    if not callable(mapper.version_id_generator):
        raise ArgumentError(
            f"VersionedMixin counts the version of {cls.__name__} itself, and version_id_generator=False would leave "
            "that to the database: leave it out, or map the class without VersionedMixin"
        )
    if mapper.version_id_generator.__module__ == Mapper.__module__:  # the default, which begins at 1
        if not is_number(version) and not isinstance(version.type, UserDefinedType):
            raise ArgumentError(
                f"the version of {cls.__name__} is no number, and nothing makes its next value: add a "
                f'version_id_generator to __mapper_args__, such as "version_id_generator": lambda _: uuid4()'
            )
        mapper.version_id_generator = _version_generator(version.type)
    if version.server_onupdate is None:
        # The server default is for rows that other software inserts. SQLAlchemy takes it as a sign that the server
        # counts the version, and would build every UPDATE anew, to ask for the value: a fifth of the flush's time.
        mapper._version_id_has_server_side_value = False  # noqa: SLF001


@event.listens_for(VersionedMixin, "after_mapper_constructed", propagate=True)
def _name_version(mapper: Mapper[Any], cls: type) -> None:
    """Let `version` be a synonym of a version of another name, whatever declares its column."""
    name = version_key(mapper)
    if name == "version":
        return
    own = _static_attribute(cls, "version")
    is_constant = own is not None and not hasattr(own, "__get__")
    if not mapper.has_property("version") and not is_constant:
        mapper.add_property("version", synonym(name))
    elif is_constant or isinstance(mapper.get_property("version"), ColumnProperty):
        raise ArgumentError(
            f"{cls.__name__}.version is not the version that a flush checks, which is {name!r}: give that attribute "
            "another name, as an assigned version would not be compared"
        )


def _version_generator(kind: Any) -> Callable[[Any], Any]:
    kind = getattr(kind, "impl_instance", kind)  # of a TypeDecorator
    bits = next((bits for known, bits in _BITS.items() if isinstance(kind, known)), 31)
    return lambda version: first_version(bits) if version is None else version + 1
