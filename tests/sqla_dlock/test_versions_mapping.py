"""The promises of VersionedMixin when a class is mapped: what could not be guarded is refused, the rest is left as it is."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    SmallInteger,
    String,
    Table,
    Uuid,
    create_engine,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.declarative import AbstractConcreteBase, ConcreteBase
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    declared_attr,
    mapped_column,
    relationship,
    synonym,
)
from sqlalchemy.orm.exc import StaleDataError

from sqla_dlock.versions import StaleObject, VersionedMixin, delete_with_version, save_with_version, touch


@pytest.fixture
def base() -> Any:
    """A separate base: what is left of classes that are refused must not affect others."""

    class Base(DeclarativeBase):
        pass

    return Base


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    yield engine
    engine.dispose()


def stored(base: Any, engine: Engine, instance: Any) -> Session:
    base.metadata.create_all(engine)
    session = Session(engine, expire_on_commit=False)
    session.add(instance)
    session.commit()
    return session


def test_version_on_a_subclass_in_the_table_of_an_unversioned_class_is_refused(base):
    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}

    with pytest.raises(ArgumentError, match="add VersionedMixin to the bases of Doc instead"):

        class Contract(VersionedMixin, Doc):
            __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "contract"}


def test_another_version_in_the_table_of_a_versioned_class_is_refused(base):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}

    with pytest.warns(match="does not match"), pytest.raises(ArgumentError, match="which has another"):

        class Contract(Doc):
            revision: Mapped[int] = mapped_column(default=1)
            __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "contract", "version_id_col": revision}


def test_version_that_the_database_is_to_count_is_refused(base):
    with pytest.raises(ArgumentError, match="version_id_generator=False"):

        class Doc(VersionedMixin, base):
            __tablename__ = "doc"
            id: Mapped[int] = mapped_column(primary_key=True)
            __mapper_args__: ClassVar[Any] = {"version_id_generator": False}


def test_mapping_that_does_not_count_deleted_rows_is_refused(base):
    with pytest.raises(ArgumentError, match="a DELETE of a stale Safe would pass unnoticed: leave out confirm_deleted"):

        class Safe(VersionedMixin, base):
            __tablename__ = "safe"
            __mapper_args__: ClassVar[Any] = {"confirm_deleted_rows": False}
            id: Mapped[int] = mapped_column(primary_key=True)


def test_subclass_of_a_mapping_that_does_not_count_deleted_rows_is_refused(base):
    class Room(base):
        __tablename__ = "room"
        __mapper_args__: ClassVar[Any] = {"confirm_deleted_rows": False}
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ArgumentError, match="leave out confirm_deleted_rows=False of Room"):

        class Vault(VersionedMixin, Room):
            __tablename__ = "vault"
            id: Mapped[int] = mapped_column(ForeignKey("room.id"), primary_key=True)


def test_concrete_class_without_a_version_of_its_own_is_refused(base):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ArgumentError, match="Contract is concrete, with a separate table, and has no version there"):

        class Contract(Doc):
            __tablename__ = "contract"
            id: Mapped[int] = mapped_column(primary_key=True)
            __mapper_args__: ClassVar[Any] = {"concrete": True}


@pytest.mark.filterwarnings("ignore:Inheriting version_id_col")
def test_concrete_class_with_a_version_of_its_own_is_checked(base, engine):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Contract(Doc):
        __tablename__ = "contract"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str] = mapped_column(default="")
        version: Mapped[int] = mapped_column()
        __mapper_args__: ClassVar[Any] = {"concrete": True, "version_id_col": version}

    session = stored(base, engine, contract := Contract(id=1))
    session.execute(text("UPDATE contract SET version = 9"))
    contract.text = "ours"
    with pytest.raises(StaleObject):
        session.flush()


def test_subclass_does_not_inherit_the_arguments_of_its_parent_s_mapper(base, engine):
    class Employee(VersionedMixin, base):
        __tablename__ = "employee"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}

    class Contractor(Employee):
        __mapper_args__: ClassVar[Any] = {"polymorphic_abstract": True}

    class Painter(Contractor):
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "painter"}

    assert Employee.__mapper__.polymorphic_map["employee"].class_ is Employee
    session = stored(base, engine, Employee(id=1))
    session.expunge_all()
    assert type(session.get(Employee, 1)) is Employee


@pytest.mark.filterwarnings("ignore:.*does not indicate a 'polymorphic_identity'")
def test_subclass_without_arguments_does_not_take_its_parent_s_identity(base, engine):
    class Employee(VersionedMixin, base):
        __tablename__ = "employee"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}

    class Contractor(Employee):
        pass

    session = stored(base, engine, Employee(id=1))
    session.expunge_all()
    assert type(session.get(Employee, 1)) is Employee


def test_arguments_that_are_computed_may_name_the_version(base, engine):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str] = mapped_column(default="")
        revision: Mapped[int] = mapped_column()

        @declared_attr.directive
        def __mapper_args__(cls) -> dict[str, Any]:
            return {"version_id_col": cls.revision}

    assert Doc.__table__.columns.keys() == ["id", "text", "revision"]
    session = stored(base, engine, doc := Doc(id=1))
    assert doc.version == doc.revision
    session.execute(text("UPDATE doc SET revision = 9"))
    doc.text = "ours"
    with pytest.raises(StaleObject):
        session.flush()


def revised_table(base: Any) -> Table:
    columns = [Column("id", Integer, primary_key=True), Column("text", String), Column("revision", BigInteger)]
    return Table("doc", base.metadata, *columns)


def doc_of_a_declared_attribute(base: Any) -> Any:
    class Revised:
        @declared_attr
        def revision(cls) -> Mapped[int]:
            return mapped_column(BigInteger)

        @declared_attr.directive
        def __mapper_args__(cls) -> dict[str, Any]:
            return {"version_id_col": cls.revision}

    class Doc(VersionedMixin, Revised, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str | None]

    return Doc


def doc_of_a_mixin(base: Any) -> Any:
    class Revised:
        revision: Mapped[int] = mapped_column(BigInteger)
        __mapper_args__: ClassVar[Any] = {"version_id_col": revision}

    class Doc(VersionedMixin, Revised, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str | None]

    return Doc


def doc_of_a_table(base: Any) -> Any:
    class Doc(VersionedMixin, base):
        __table__ = revised_table(base)
        __mapper_args__: ClassVar[Any] = {"version_id_col": __table__.c.revision}

    return Doc


def doc_of_an_imperative_mapping(base: Any) -> Any:
    class Doc(VersionedMixin):
        pass

    table = revised_table(base)
    base.registry.map_imperatively(Doc, table, version_id_col=table.c.revision)
    return Doc


DOCS = [doc_of_a_declared_attribute, doc_of_a_mixin, doc_of_a_table, doc_of_an_imperative_mapping]


@pytest.mark.parametrize("make", DOCS)
def test_version_that_a_payload_assigns_is_expected_whatever_declares_its_column(base, engine, make):
    doc_class = make(base)
    doc = doc_class()
    doc.id = 1
    session = stored(base, engine, doc)
    seen = doc.version
    assert seen == doc.revision
    session.execute(update(doc_class).values(text="theirs"))
    session.commit()
    session.refresh(doc)
    doc.text, doc.version = "mine", seen
    with pytest.raises(StaleObject):
        session.flush()


def test_attribute_of_the_name_version_that_is_not_the_version_is_refused(base):
    with pytest.raises(
        ArgumentError, match=r"Doc\.version is not the version that a flush checks, which is 'revision'"
    ):

        class Doc(VersionedMixin, base):
            __tablename__ = "doc"
            id: Mapped[int] = mapped_column(primary_key=True)
            version: Mapped[str]
            revision: Mapped[int] = mapped_column(BigInteger)
            __mapper_args__: ClassVar[Any] = {"version_id_col": revision}


def test_table_of_a_class_has_to_name_its_version(base):
    with pytest.raises(ArgumentError, match=r'Doc has a __table__.*"version_id_col": __table__\.c\.version'):

        class Doc(VersionedMixin, base):
            __table__ = revised_table(base)


def joined(base: Any, mixins: tuple[type, ...]) -> Any:
    """Map a class to a join, of which a row of the table with the version may be in several instances."""
    user = Table(
        "user", base.metadata, Column("id", Integer, primary_key=True), Column("version", BigInteger, nullable=False)
    )
    mail = Table(
        "mail",
        base.metadata,
        Column("id", Integer, primary_key=True),
        Column("user_id", ForeignKey("user.id")),
        Column("text", String(20)),
    )
    mapping = {
        "__table__": user.join(mail),
        "id": column_property(user.c.id, mail.c.user_id),
        "mail_id": mail.c.id,
        "__mapper_args__": {"version_id_col": user.c.version},
    }
    return type("Mailed", (*mixins, base), mapping)


def test_class_whose_key_is_not_that_of_the_row_with_its_version_is_refused(base):
    with pytest.raises(ArgumentError, match="a row of user, which has the version, is not one instance"):
        joined(base, (VersionedMixin,))


@pytest.mark.parametrize("write", [save_with_version, delete_with_version])
def test_save_of_a_class_whose_key_is_not_that_of_the_row_with_its_version_is_refused(base, engine, write):
    """It has no mixin, so that it is not refused when it is mapped."""
    mailed = joined(base, ())(text="old")
    with stored(base, engine, mailed) as session:
        mailed.text = "new"
        with pytest.raises(ArgumentError, match="a row of user, which has the version, is not one instance"):
            write(session, mailed)


def test_class_on_a_join_with_a_key_that_does_not_determine_the_row_with_its_version_is_refused(base):
    """The key has as many columns as that of the table with the version, but its numbers are others."""
    user = Table("user", base.metadata, Column("id", Integer, primary_key=True), Column("version", BigInteger))
    mail = Table(
        "mail", base.metadata, Column("id", Integer, primary_key=True), Column("user_id", ForeignKey("user.id"))
    )
    with pytest.raises(ArgumentError, match="a row of user, which has the version, is not one instance of Mailed"):

        class Mailed(VersionedMixin, base):
            __table__ = user.join(mail)
            user_id = column_property(user.c.id, mail.c.user_id)
            id = mail.c.id
            __mapper_args__: ClassVar[Any] = {"version_id_col": user.c.version, "primary_key": [mail.c.id]}


def parent_of_tenants(base: Any) -> Any:
    class Doc(base):
        __tablename__ = "doc"
        tenant: Mapped[int] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    return Doc


def parent_with_a_number(base: Any) -> Any:
    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

    return Doc


def contract_with_the_key_in_another_order(base: Any) -> Any:
    class Contract(VersionedMixin, parent_of_tenants(base)):
        __tablename__ = "contract"
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        __table_args__ = (ForeignKeyConstraint(["tenant", "id"], ["doc.tenant", "doc.id"]),)

    return [Contract(tenant=1, id=2), Contract(tenant=2, id=1), Contract(tenant=3, id=4)]


def contract_with_a_key_of_its_own(base: Any) -> Any:
    class Contract(VersionedMixin, parent_with_a_number(base)):
        __tablename__ = "contract"
        number: Mapped[int] = mapped_column(primary_key=True)
        doc_id: Mapped[int] = mapped_column(ForeignKey("doc.id"), unique=True)
        title: Mapped[str] = mapped_column(default="")

    return [Contract(id=1, number=3), Contract(id=2, number=2), Contract(id=3, number=1)]


def contract_with_a_longer_key(base: Any) -> Any:
    class Contract(VersionedMixin, parent_with_a_number(base)):
        __tablename__ = "contract"
        tenant: Mapped[int] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    return [Contract(tenant=1, id=2), Contract(tenant=2, id=1), Contract(tenant=3, id=4)]


def contract_below_two_parents(base: Any) -> Any:
    class Paper(parent_with_a_number(base)):
        __tablename__ = "paper"
        paper_id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)

    class Contract(VersionedMixin, Paper):
        __tablename__ = "contract"
        contract_id: Mapped[int] = mapped_column(ForeignKey("paper.paper_id"), primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    return [Contract(), Contract(), Contract()]


CONTRACTS = [
    contract_with_the_key_in_another_order,
    contract_with_a_key_of_its_own,
    contract_with_a_longer_key,
    contract_below_two_parents,
]


@pytest.mark.parametrize("make", CONTRACTS)
def test_version_is_that_of_the_row_whatever_the_key_of_the_table_with_it(base, engine, make):
    contracts = make(base)
    session = stored(base, engine, contracts[0])
    session.add_all(contracts[1:])
    session.commit()
    for each in contracts:
        each.title = "new"
    session.flush()
    contracts[0].title = "saved"
    save_with_version(session, contracts[0])
    delete_with_version(session, contracts[1])
    titles = session.scalars(text("SELECT title FROM contract ORDER BY title DESC")).all()
    assert titles == ["saved", "new"]


@pytest.mark.parametrize("make", CONTRACTS)
def test_stale_row_is_found_whatever_the_key_of_the_table_with_its_version(base, engine, make):
    first, *others = make(base)
    session = stored(base, engine, first)
    session.execute(text("UPDATE contract SET version = version + 1"))
    session.commit()
    session.add_all(others)
    session.commit()
    for each in (first, *others):
        each.title = "mine"
    with pytest.raises(StaleObject) as conflict:
        save_with_version(session, first)
    assert conflict.value.instance is first
    with pytest.raises(StaleObject) as conflict:
        session.flush()
    assert conflict.value.instance is first


@pytest.mark.parametrize("make", CONTRACTS)
@pytest.mark.parametrize("write", ["flush", "delete"])
def test_one_stale_row_is_not_written_whatever_the_key_of_the_table_with_its_version(base, engine, make, write):
    first = make(base)[0]
    session = stored(base, engine, first)
    session.execute(text("UPDATE contract SET version = version + 1"))
    if write == "flush":
        first.title = "mine"
    else:
        session.delete(first)
    has_own_key = make is contract_with_a_key_of_its_own
    with pytest.raises(StaleDataError if has_own_key else StaleObject):
        session.flush()


@pytest.mark.parametrize("kind", [String(40), Uuid, DateTime])
def test_version_that_is_no_number_needs_a_generator(base, kind):
    with pytest.raises(ArgumentError, match="version_id_generator"):

        class Doc(VersionedMixin, base):
            __tablename__ = "doc"
            id: Mapped[int] = mapped_column(primary_key=True)
            version: Mapped[Any] = mapped_column(kind, nullable=False)


def test_abstract_concrete_base_is_refused(base):
    with pytest.raises(ArgumentError, match=r"Staff is an AbstractConcreteBase, .*ConcreteBase.*__abstract__ = True"):

        class Staff(VersionedMixin, AbstractConcreteBase, base):
            pass


class OfFactory(DeclarativeBase):
    pass


class Worker(AbstractConcreteBase, OfFactory):
    """Not of a test: at each configuration of mappers, SQLAlchemy 2.0 calls such a class, and fails if it is gone."""


class Welder(Worker):
    __tablename__ = "welder"
    id: Mapped[int] = mapped_column(primary_key=True)
    __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "welder", "concrete": True}


def test_class_below_an_abstract_concrete_base_is_refused_although_its_parent_may_not_be_mapped_yet():
    with pytest.raises(ArgumentError, match="a flush would not check the version of Manager"):

        class Manager(VersionedMixin, Worker):
            __tablename__ = "manager"
            id: Mapped[int] = mapped_column(primary_key=True)
            __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "manager", "concrete": True}


KEPT: list[Any] = []
"""Classes that SQLAlchemy 2.0 calls at each configuration of mappers, and that must not be gone then."""


def below_a_concrete_base(base: Any) -> Any:
    class Staff(ConcreteBase, base):
        __tablename__ = "staff"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(default="")
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "staff", "concrete": True}

    KEPT.append(Staff)
    return Staff


def below_an_abstract_class(base: Any) -> Any:
    class Staff(base):
        __abstract__ = True

    return Staff


@pytest.mark.parametrize("make", [below_a_concrete_base, below_an_abstract_class])
@pytest.mark.parametrize("write", ["flush", "delete"])
def test_class_with_a_table_of_its_own_below_a_parent_without_versions_is_checked(base, engine, make, write):
    staff = make(base)

    class Manager(VersionedMixin, staff):
        __tablename__ = "manager"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(default="")
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "manager", "concrete": hasattr(staff, "__mapper__")}

    with stored(base, engine, manager := Manager(id=1)) as session:
        session.execute(text("UPDATE manager SET name = 'theirs', version = version + 1"))
        if write == "flush":
            manager.name = "mine"
        else:
            session.delete(manager)
        with pytest.raises(StaleObject):
            session.flush()


def test_constant_of_the_name_version_that_is_not_the_version_is_refused(base):
    with pytest.raises(ArgumentError, match="give that attribute another name"):

        class Doc(VersionedMixin, base):
            __tablename__ = "doc"
            version = "1.0"
            id: Mapped[int] = mapped_column(primary_key=True)
            revision: Mapped[int] = mapped_column()
            __mapper_args__: ClassVar[Any] = {"version_id_col": revision}


@pytest.mark.parametrize("name", ["revision", "nothing"])
def test_version_that_is_named_by_a_text_is_refused(base, name):
    with pytest.raises(ArgumentError, match=f"version_id_col of Doc is a column, not the text '{name}'"):

        class Doc(VersionedMixin, base):
            __tablename__ = "doc"
            id: Mapped[int] = mapped_column(primary_key=True)
            revision: Mapped[int] = mapped_column(BigInteger)
            __mapper_args__: ClassVar[Any] = {"version_id_col": name}


def test_synonym_of_the_program_s_own_is_kept(base):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        revision: Mapped[int] = mapped_column(BigInteger)
        version: Mapped[int] = synonym("revision")
        __mapper_args__: ClassVar[Any] = {"version_id_col": revision}

    class Contract(Doc):
        __tablename__ = "contract"
        id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)

    assert Contract(version=5).revision == 5


def test_arguments_that_are_computed_may_leave_the_version_to_the_mixin(base):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)

        @declared_attr.directive
        def __mapper_args__(cls) -> dict[str, Any]:
            return {"eager_defaults": True}

    assert Doc.__mapper__.version_id_col is Doc.__table__.c.version
    assert Doc.__mapper__.eager_defaults is True


def test_generator_of_the_program_s_own_is_kept(base, engine):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str] = mapped_column(default="")
        version: Mapped[str] = mapped_column()
        __mapper_args__: ClassVar[Any] = {"version_id_generator": lambda former: f"{former or ''}x"}

    session = stored(base, engine, doc := Doc(id=1))
    touch(session, doc)
    session.flush()
    assert doc.version == "xx"


def test_save_with_version_refreshes_a_property_that_the_database_computes(base, engine):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="old")
        heading: Mapped[str] = column_property(func.upper(title.column))

    session = stored(base, engine, doc := Doc(id=1))
    assert doc.heading == "OLD"
    doc.title = "new"
    save_with_version(session, doc)
    assert doc.heading == "NEW"


def test_save_counts_for_a_changed_collection_of_a_class_without_the_mixin_too(base, engine):
    class Page(base):
        __tablename__ = "page"
        id: Mapped[int] = mapped_column(primary_key=True)
        doc_id: Mapped[int | None] = mapped_column(ForeignKey("doc.id"))

    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        pages: Mapped[list[Page]] = relationship()
        version: Mapped[int] = mapped_column()
        __mapper_args__: ClassVar[Any] = {"version_id_col": version}

    session = stored(base, engine, doc := Doc(id=1))
    doc.pages.append(Page(id=1))
    save_with_version(session, doc)
    assert session.scalars(select(Doc.version)).one() == doc.version == 2


def test_joined_subclass_of_an_unversioned_class_is_checked(base, engine):
    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    class Contract(VersionedMixin, Doc):
        __tablename__ = "contract"
        id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)

    session = stored(base, engine, contract := Contract(id=1))
    session.execute(text("UPDATE contract SET version = 9"))
    contract.title = "ours"
    with pytest.raises(StaleObject):
        session.flush()


def test_version_in_a_subclass_s_table_that_is_read_later_than_its_parent_s_is_no_check(base, engine):
    class Doc(base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        title: Mapped[str] = mapped_column(default="old")
        __mapper_args__: ClassVar[Any] = {"polymorphic_on": "kind", "polymorphic_identity": "doc"}

    class Contract(VersionedMixin, Doc):
        __tablename__ = "contract"
        id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)
        __mapper_args__: ClassVar[Any] = {"polymorphic_identity": "contract"}

    session = stored(base, engine, Contract(id=1))
    session.expunge_all()
    contract = session.scalars(select(Doc)).one()
    session.execute(text("UPDATE doc SET title = 'theirs'"))
    session.execute(text("UPDATE contract SET version = 2"))
    contract.title += " + mine"
    with pytest.raises(ValueError, match="was deferred"):
        session.flush()


@pytest.mark.parametrize(("kind", "highest"), [(SmallInteger, 2**14), (Integer, 2**30)])
def test_small_version_begins_in_the_lower_half_of_its_column(base, engine, monkeypatch, kind, highest):
    monkeypatch.undo()

    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        version: Mapped[int] = mapped_column(kind)

    session = stored(base, engine, Doc(id=0))
    session.add_all([Doc() for _ in range(100)])
    session.flush()
    assert all(0 < each.version <= highest for each in session.query(Doc))


def test_list_of_updates_that_is_core_only_counts_and_writes_no_version(base, engine):
    class Doc(VersionedMixin, base):
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str] = mapped_column(default="")

    session = stored(base, engine, doc := Doc(id=1))
    session.execute(insert(Doc), [{"id": 2}])
    options = {"dml_strategy": "core_only", "synchronize_session": False}
    with pytest.raises(ValueError, match="would be written as it is given"):
        session.execute(update(Doc), [{"text": "a", "version": 99}], execution_options=options)
    session.execute(update(Doc), [{"text": "a"}], execution_options=options)
    assert session.scalar(text("SELECT version FROM doc WHERE id = 1")) == doc.version + 1
