"""The promises of `__version_children__` in every shape of a relationship, and for statements that write children."""

from collections.abc import Iterator

import pytest
from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    String,
    Table,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, WriteOnlyMapped, aliased, mapped_column, relationship

from dlock_core.errors import NotSupported
from sqla_dlock.versions import VersionedMixin, save_with_version, touch


class Base(DeclarativeBase):
    pass


book_subject = Table(
    "agg_book_subject",
    Base.metadata,
    Column("book", ForeignKey("agg_book.id"), primary_key=True),
    Column("subject", ForeignKey("agg_subject.id"), primary_key=True),
)
page_word = Table(
    "agg_page_word",
    Base.metadata,
    Column("page", ForeignKey("agg_page.id"), primary_key=True),
    Column("word", ForeignKey("agg_word.id"), primary_key=True),
)


class Book(VersionedMixin, Base):
    __tablename__ = "agg_book"
    __version_children__ = ("subjects", "pages", "pages.words", "prints")
    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str] = mapped_column(String(9), unique=True)
    subjects: Mapped[list["Subject"]] = relationship(secondary=book_subject, back_populates="books")
    pages: Mapped[list["Page"]] = relationship(back_populates="book", lazy="raise", passive_deletes="all")
    prints: WriteOnlyMapped["Print"] = relationship(back_populates="book")


class Subject(Base):
    __tablename__ = "agg_subject"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(9), default="")
    books: Mapped[list[Book]] = relationship(secondary=book_subject, back_populates="subjects")


class Page(Base):
    """It cannot load its book by itself."""

    __tablename__ = "agg_page"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(default=0)
    book_id: Mapped[int | None] = mapped_column(ForeignKey("agg_book.id"))
    book: Mapped[Book | None] = relationship(back_populates="pages", lazy="raise")
    words: Mapped[list["Word"]] = relationship(secondary=page_word, back_populates="pages")


class Word(Base):
    __tablename__ = "agg_word"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(String(9), default="")
    pages: Mapped[list[Page]] = relationship(secondary=page_word, back_populates="words", lazy="raise_on_sql")


class Print(Base):
    """It refers to a unique column that is not the key."""

    __tablename__ = "agg_print"
    id: Mapped[int] = mapped_column(primary_key=True)
    copies: Mapped[int] = mapped_column(default=0)
    code: Mapped[str | None] = mapped_column(ForeignKey("agg_book.code"))
    book: Mapped[Book | None] = relationship(back_populates="prints")


class LatePrint(Print):
    """It is in its parent's table."""


class Loose(Base):
    """It belongs to nothing."""

    __tablename__ = "agg_loose"
    id: Mapped[int] = mapped_column(primary_key=True)


class Floor(VersionedMixin, Base):
    """Its key has two columns."""

    __tablename__ = "agg_floor"
    __version_children__ = ("rooms",)
    house: Mapped[int] = mapped_column(primary_key=True)
    floor: Mapped[int] = mapped_column(primary_key=True)
    rooms: Mapped[list["Room"]] = relationship(back_populates="on")


class Room(Base):
    __tablename__ = "agg_room"
    id: Mapped[int] = mapped_column(primary_key=True)
    house: Mapped[int]
    floor: Mapped[int]
    on: Mapped[Floor] = relationship(back_populates="rooms")
    __table_args__ = (ForeignKeyConstraint(["house", "floor"], ["agg_floor.house", "agg_floor.floor"]),)


@pytest.fixture(params=["sqlite", "postgresql"])
def session(request: pytest.FixtureRequest, make_engine) -> Iterator[Session]:
    engine: Engine = make_engine(request.param)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Book(id=1, code="a"), Book(id=2, code="b"), Subject(id=1), Subject(id=2), Word(id=1)])
        session.add_all([Floor(house=1, floor=1), Floor(house=1, floor=2)])
        session.flush()
        session.add_all([Page(id=1, book_id=1), Print(id=1, code="a"), Room(id=1, house=1, floor=1)])
        session.get_one(Book, 1).subjects.append(session.get_one(Subject, 1))
        session.flush()
        session.add(Page(id=2, book_id=1, words=[Word(id=2)]))
        session.commit()
    with Session(engine) as session:
        yield session
        session.rollback()
    Base.metadata.drop_all(engine)


def counts(session, change, cls=Book, keys=(1, 2)):
    """Make a change, commit, and return by how much it has counted the versions of the roots up."""

    def versions():
        found = [
            session.connection().execute(select(cls.version).where(*key_is(cls, key))).scalar_one() for key in keys
        ]
        session.rollback()
        return found

    before = versions()
    kept = [each for cls in (Book, Subject, Page, Word) for each in session.scalars(select(cls))]
    change(session)
    session.commit()
    assert kept
    return [now - then for now, then in zip(versions(), before, strict=True)]


def key_is(cls, key):
    columns = cls.__table__.primary_key.columns
    return [column == part for column, part in zip(columns, key if isinstance(key, tuple) else (key,), strict=True)]


def book(session):
    return session.get_one(Book, 1)


def other(session):
    return session.get_one(Book, 2)


def save_with_another_subject(session):
    with session.no_autoflush:
        found = book(session)
        found.subjects.append(session.get_one(Subject, 2))
        save_with_version(session, found)


CHANGES = {
    "append": lambda session: book(session).subjects.append(session.get_one(Subject, 2)),
    "append_new": lambda session: book(session).subjects.append(Subject(id=9)),
    "remove": lambda session: book(session).subjects.remove(session.get_one(Subject, 1)),
    "replace": lambda session: setattr(book(session), "subjects", []),
    "append_at_the_other_end": lambda session: session.get_one(Subject, 2).books.append(book(session)),
    "remove_at_the_other_end": lambda session: session.get_one(Subject, 1).books.remove(book(session)),
    "add_with_the_root": lambda session: session.add(Subject(id=9, books=[book(session)])),
    "change_what_is_shared": lambda session: setattr(session.get_one(Subject, 1), "name", "x"),
    "delete_what_is_shared": lambda session: session.delete(session.get_one(Subject, 1)),
    "save_with_version": save_with_another_subject,
    "append_below": lambda session: session.get_one(Page, 1).words.append(session.get_one(Word, 1)),
    "remove_below": lambda session: session.get_one(Page, 2).words.clear(),
    "change_below": lambda session: setattr(session.get_one(Word, 2), "text", "x"),
    "change_without_lazy_loading": lambda session: setattr(session.get_one(Page, 1), "number", 1),
    "leave_without_lazy_loading": lambda session: setattr(session.get_one(Page, 1), "book_id", None),
    "add_without_lazy_loading": lambda session: session.add(Page(id=9, book_id=1)),
    "delete_without_lazy_loading": lambda session: session.delete(session.get_one(Page, 1)),
    "change_by_unique_column": lambda session: setattr(session.get_one(Print, 1), "copies", 1),
    "add_by_unique_column": lambda session: session.add(Print(id=9, code="a")),
    "leave_by_unique_column": lambda session: setattr(session.get_one(Print, 1), "code", None),
    "delete_by_unique_column": lambda session: session.delete(session.get_one(Print, 1)),
    "write_only": lambda session: book(session).prints.add(Print(id=9)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_of_an_aggregate_counts_its_root_once(session, change):
    assert counts(session, change) == [1, 0]


MOVES = {
    "by_unique_column": lambda session: setattr(session.get_one(Print, 1), "code", "b"),
    "by_relationship": lambda session: setattr(session.get_one(Print, 1), "book", other(session)),
    "by_foreign_key": lambda session: setattr(session.get_one(Page, 1), "book_id", 2),
    "many_to_many": lambda session: setattr(session.get_one(Subject, 1), "books", [other(session)]),
}


def expired(session, move):
    """Move a child that the session knows, but whose columns it has to read again."""
    prints = session.scalars(select(Print)).all()
    session.expire_all()
    move(session)
    assert prints


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("after", [lambda session, move: move(session), expired], ids=["read", "expired"])
def test_child_that_moves_counts_both_roots(session, move, after):
    assert counts(session, lambda session: after(session, move)) == [1, 1]


def test_child_that_moves_by_a_part_of_its_foreign_key_counts_both_roots(session):
    def move(session):
        session.get_one(Room, 1).floor = 2

    assert counts(session, move, Floor, [(1, 1), (1, 2)]) == [1, 1]


def test_collection_that_is_only_looked_at_counts_nothing(session):
    assert counts(session, lambda session: list(book(session).subjects)) == [0, 0]


STATEMENTS = {
    "update": lambda session: session.execute(update(Page).values(number=1)),
    "update_by_key": lambda session: session.execute(update(Page), [{"id": 1, "number": 1}]),
    "insert": lambda session: session.execute(insert(Page), [{"book_id": 1}]),
    "insert_returning": lambda session: session.scalars(insert(Page).returning(Page), [{"book_id": 1}]),
    "from_statement": lambda session: session.scalars(
        select(Page).from_statement(insert(Page).values(book_id=1).returning(Page))
    ),
    "delete": lambda session: session.execute(delete(Page)),
    "query_update": lambda session: session.query(Page).update({"number": 1}),
    "query_delete": lambda session: session.query(Page).delete(),
    "write_only_update": lambda session: session.execute(book(session).prints.update().values(copies=1)),
    "write_only_insert": lambda session: session.execute(book(session).prints.insert(), [{"copies": 1}]),
    "write_only_delete": lambda session: session.execute(book(session).prints.delete()),
    "many_to_many": lambda session: session.execute(update(Subject).values(name="x")),
    "subclass": lambda session: session.execute(update(LatePrint).values(copies=1)),
    "alias": lambda session: session.execute(update(aliased(Page)).values(number=1)),
    "with_another_table": lambda session: session.execute(
        update(Loose).where(Loose.id == Page.id).values({Loose.id: 5, Page.number: 1})
    ),
}


@pytest.mark.parametrize("write", STATEMENTS.values(), ids=STATEMENTS)
def test_statement_that_writes_children_is_refused_before_it_is_sent(session, write):
    sent = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *args: sent.append(args[2]))
    with pytest.raises(NotSupported, match=r"would not count .* touch\(\) the roots"):
        write(session)
    assert not [sql for sql in sent if not sql.startswith(("SELECT", "BEGIN"))]


CTES = {
    "update": update(Page).values(number=1),
    "delete": delete(Page),
    "insert": insert(Page).values(book_id=1),
}


@pytest.mark.parametrize("session", ["postgresql"], indirect=True)
@pytest.mark.parametrize("place", ["select", "add_cte"])
@pytest.mark.parametrize("write", CTES.values(), ids=CTES)
def test_statement_that_writes_children_in_a_cte_is_refused(session, write, place):
    cte = write.returning(Page.id).cte()
    statement = select(cte) if place == "select" else update(Loose).values(id=5).add_cte(cte)
    for _ in range(2):  # the second is compiled already
        with pytest.raises(NotSupported, match=r"would not count .* touch\(\) the roots"):
            session.execute(statement)


def test_statement_to_the_table_with_a_touch_of_the_root_counts_it(session):
    def change(session):
        touch(session, book(session))
        session.execute(update(Page.__table__).values(number=1))

    assert counts(session, change) == [1, 0]


def test_statement_that_reads_children_or_writes_roots_is_not_refused(session):
    assert session.scalars(select(Page)).all()
    session.execute(update(Book).values(code=Book.code))
