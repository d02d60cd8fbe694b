"""The row itself as the fence: `FencedMixin`."""

import uuid
from typing import Any, ClassVar

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    event,
    insert,
    lambda_stmt,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient_to_detached, mapped_column, registry

from dlock_core.errors import NotSupported, RowLocked, StaleToken
from dlock_core.transactions.retry import DatabaseFailure, classify
from sqla_dlock import FencedMixin, fencing, lock
from sqla_dlock.fencing import RowFence, TableFence
from tests.chaos import EverybodyIn
from tests.mysql_server import DIALECT
from tests.outcomes import give_up_waiting, outcome
from tests.sqla_dlock.adders import (
    Adder,
    add_counter,
    fences,
    isolated,
    set_timeout,
    timeout,
    value,
)
from tests.sqla_dlock.models import Counter, HeavyParcel, Letter, LightParcel, Parcel, Stamp, Ticket, Tray
from tests.sqla_dlock.parties import until_blocked
from tests.sqla_dlock.test_fencing import EVERY, FORMS, ONCE, SERVERS, levels


@pytest.fixture
def another(request, make_engine):
    return lambda **options: isolated(make_engine, *request.node.callspec.params["engine"], **options)


@pytest.fixture
def engine(another):
    return another()


@pytest.fixture
def broken():
    return EverybodyIn()


@pytest.fixture
def parcel(engine):
    """The key of a parcel."""
    return make(engine, Parcel(id=7))


def make(engine: Engine, instance):
    with Session(engine) as session:
        session.add(instance)
        session.commit()
        return instance.id


def set_to(session, number, cls=Parcel):
    session.execute(update(cls).values(value=number))


def read(engine, cls=Parcel):
    """Return the value of the one row, and its fence."""
    with Session(engine) as session:
        return session.execute(select(cls.value, cls.dlock_token, cls.dlock_holder)).one()


def fence_of(lease):
    return lease.token, lease.holder


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_row_is_its_own_fence(engine, store, parcel, form):
    with Session(engine) as session, lock(session, Parcel, parcel, fence=form) as lease:
        row = session.get(Parcel, parcel)
        assert (row.dlock_token, row.dlock_holder) == fence_of(lease)
        row.value = 5
        session.commit()
    assert read(engine) == (5, *fence_of(lease))


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_table_is_asked_only_until_the_row_has_its_first_token(engine, store, parcel, form):
    with Session(engine) as session, lock(session, Parcel, parcel, fence=form) as first:
        set_to(session, 1)
        session.commit()
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with Session(engine) as session, lock(session, Parcel, parcel, fence=form) as lease:
        set_to(session, 2)
        session.commit()
    assert not [sql for sql in sent if "dlock_fence" in sql]
    assert fences(engine) == [("parcel:7", first.token)]
    assert read(engine) == (2, *fence_of(lease))


@levels(ONCE)
@pytest.mark.parametrize(
    ("cls", "key"), [(Letter, "é: 'x'%d"), (Ticket, uuid.UUID(int=4711)), (Stamp, 5), (LightParcel, 5)]
)
@pytest.mark.parametrize("form", FORMS)
def test_key_of_every_type_and_table_of_every_name(engine, store, cls, key, form):
    make(engine, cls(id=key))
    with Session(engine) as session, lock(session, cls, key, fence=form) as lease:
        set_to(session, 5, cls)
        session.commit()
    assert read(engine, cls) == (5, *fence_of(lease))


@levels(ONCE)
@pytest.mark.parametrize("cls", [Ticket, Parcel])
def test_key_may_be_given_as_text(engine, store, cls):
    key = make(engine, cls(id=uuid.UUID(int=4711) if cls is Ticket else 7))
    with Session(engine) as session, lock(session, cls, str(key)) as lease:
        set_to(session, 5, cls)
        session.commit()
    assert read(engine, cls) == (5, *fence_of(lease))


def test_key_that_the_class_cannot_have_is_refused_at_once():
    for cls in (Parcel, Ticket):
        with pytest.raises(ValueError, match="abc"):
            lock(Session(), cls, "abc")


def test_row_with_a_composite_key_is_fenced_in_the_table():
    assert type(lock(Session(), Tray, 1, 2).fence) is type(lock(Session(), Tray, (1, 2)).fence) is TableFence


def test_row_as_the_fence_of_a_shared_lock_is_refused_at_once():
    for parts in ((Parcel, 1), ("parcel", 1)):
        with pytest.raises(NotSupported, match=r"'parcel:1' is the row itself.*shared.*another name"):
            lock(Session(), *parts, shared=True)
    lock(Session(), Parcel, 1, shared=True, fence=False)


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_instance_that_was_read_before_does_not_lower_its_fence(engine, store, form):
    key = make(engine, Stamp(id=7))
    with Session(engine, expire_on_commit=False) as session:
        old = session.get(Stamp, key)
        session.commit()
        with lock(session, Stamp, key, fence=form) as lease:
            old.value = 5
            session.commit()
    assert read(engine, Stamp) == (5, *fence_of(lease))
    with Session(engine) as session:
        copy = session.merge(old)  # which was detached, and knows the token that it was made with
        copy.value = 6
        session.commit()
        assert (copy.dlock_token, copy.dlock_holder) == fence_of(lease)
    assert read(engine, Stamp) == (6, *fence_of(lease))


@levels(ONCE)
def test_fence_columns_that_were_set_are_not_written(engine, store, parcel):
    with Session(engine) as session, lock(session, Parcel, parcel) as lease:
        row = session.get(Parcel, parcel)
        row.value, row.dlock_token = 5, 1
        session.flush()
        session.expire(row)
        row.dlock_holder = "not even read"
        session.commit()
    blind = Parcel(id=parcel, kind="parcel")
    make_transient_to_detached(blind)
    with Session(engine) as session:
        session.add(blind)
        blind.dlock_token = 1
        session.commit()
    assert read(engine) == (5, *fence_of(lease))


def upsert(session, set_):
    """Upsert a stamp, and set what the function chooses of the values that were given."""
    name = session.get_bind().dialect.name
    if name in ("mysql", "mariadb"):
        mysql_insert = mysql.insert(Stamp).values(id=7, value=5)
        session.execute(mysql_insert.on_duplicate_key_update(set_(mysql_insert.inserted)))
    else:
        given = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(Stamp).values(id=7, value=5)
        session.execute(given.on_conflict_do_update(index_elements=["id"], set_=set_(given.excluded)))


RESET = update(Stamp).values(dlock_token=0).returning(Stamp)
WRITES = {
    "upsert_all": lambda session: upsert(session, lambda given: given),
    "upsert_each": lambda session: upsert(session, lambda given: {column.name: column for column in given}),
    "update": lambda session: session.execute(update(Stamp).values(value=5, dlock_token=0)),
    "update_ordered": lambda session: session.execute(update(Stamp).ordered_values((Stamp.dlock_token, 0))),
    "update_table": lambda session: session.execute(update(Stamp.__table__).values(dlock_holder="")),
    "update_alias": lambda session: session.execute(update(Stamp.__table__.alias("old")).values(dlock_token=0)),
    "update_with_another_table": lambda session: session.execute(
        update(Letter).where(Letter.id == "x").values({Letter.id: "y", Stamp.dlock_token: 0})
    ),
    "update_by_key": lambda session: session.execute(update(Stamp), [{"id": 7, "dlock_token": 0}]),
    "lambda": lambda session: session.execute(lambda_stmt(lambda: RESET)),
    "lambda_on_a_connection": lambda session: session.connection().execute(
        lambda_stmt(lambda: update(Stamp).values(dlock_token=0))
    ),
    "from_statement": lambda session: session.scalars(select(Stamp).from_statement(RESET)),
    "bulk_update_mappings": lambda session: session.bulk_update_mappings(Stamp, [{"id": 7, "dlock_token": 0}]),
    "bulk_save_objects": lambda session: session.bulk_save_objects([detached_stamp()], update_changed_only=False),
}


def detached_stamp():
    made = Stamp(id=7)
    made.dlock_token, made.dlock_holder = 0, ""
    make_transient_to_detached(made)
    return made


@levels(ONCE)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_statement_that_would_set_the_fence_back_is_refused_before_it_is_sent(engine, store, write):
    key = make(engine, Stamp(id=7))
    with Session(engine) as session, lock(session, Stamp, key) as lease:
        set_to(session, 1, Stamp)
        session.commit()
        with pytest.raises(NotSupported, match=r"only the fence of a lock writes dlock_\w+.* of stamp.*leave"):
            write(session)
        session.rollback()
    assert read(engine, Stamp) == (1, *fence_of(lease))


@levels([("postgresql", "read committed")])
@pytest.mark.parametrize(
    "within",
    [
        lambda reset: select(reset.cte()),
        lambda reset: update(Counter).where(Counter.id == reset.cte().c.id).values(value=5),
    ],
    ids=["select", "update_joined"],
)
def test_statement_in_a_cte_that_would_set_the_fence_back_is_refused_too(engine, store, within):
    key = make(engine, Stamp(id=7))
    with Session(engine) as session, lock(session, Stamp, key) as lease:
        set_to(session, 1, Stamp)
        session.commit()
        with pytest.raises(NotSupported, match="only the fence of a lock writes dlock_token of stamp"):
            session.execute(within(RESET))
        session.rollback()
    assert read(engine, Stamp) == (1, *fence_of(lease))


@levels([("sqlite", "IMMEDIATE")])
@pytest.mark.parametrize("table", [Stamp, Stamp.__table__], ids=["class", "table"])
def test_replace_that_would_set_the_fence_back_is_refused_before_it_is_sent(engine, store, table):
    key = make(engine, Stamp(id=7))
    with Session(engine) as session, lock(session, Stamp, key) as lease:
        set_to(session, 1, Stamp)
        session.commit()
        with pytest.raises(NotSupported, match=r"REPLACE of stamp would set dlock_token back.*update the row"):
            session.execute(insert(table).prefix_with("OR REPLACE").values(id=7, value=5))
        session.rollback()
    assert read(engine, Stamp) == (1, *fence_of(lease))


@levels(ONCE)
def test_upsert_that_leaves_the_fence_alone_keeps_it(engine, store):
    key = make(engine, Stamp(id=7))
    with Session(engine) as session, lock(session, Stamp, key) as lease:
        upsert(session, lambda given: {"value": given.value})
        session.commit()
    assert read(engine, Stamp) == (5, *fence_of(lease))


def test_concrete_class_without_a_fence_of_its_own_is_refused():
    class ConcreteBase(DeclarativeBase):
        pass

    class Box(FencedMixin, ConcreteBase):
        __tablename__ = "box"
        id: Mapped[int] = mapped_column(primary_key=True)

    class OtherBox(Box):
        __tablename__ = "other_box"
        id: Mapped[int] = mapped_column(primary_key=True)
        dlock_token: Mapped[int] = mapped_column()
        dlock_holder: Mapped[str] = mapped_column()
        __mapper_args__: ClassVar[Any] = {"concrete": True}

    for part in (OtherBox, "other_box"):
        assert lock(Session(), part, 1).fence.table is OtherBox.__table__

    with pytest.raises(ArgumentError, match="Crate is concrete, with a separate table, and has no fence there"):

        class Crate(Box):
            __tablename__ = "crate"
            id: Mapped[int] = mapped_column(primary_key=True)
            __mapper_args__: ClassVar[Any] = {"concrete": True}


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_stale_token_is_refused_by_the_row(engine, broken, parcel, form):
    broken.tokens, broken.forgetful = iter([10]), True
    with Session(engine) as session:
        session.execute(text("UPDATE parcel SET dlock_token = 99, dlock_holder = 'x'"))
        session.commit()
        with pytest.raises(StaleToken) as caught, lock(session, Parcel, parcel, store=broken, fence=form):
            set_to(session, 1)
    assert caught.value.highest == 99
    assert read(engine).value == 0


def overtake(engine, broken, key):
    """Announce a newer holder, which does nothing."""
    with Session(engine) as other, lock(other, Parcel, key, store=broken, fence="lease"):
        pass


@levels(EVERY)
def test_row_that_was_overtaken_refuses_the_commit(engine, broken, parcel):
    broken.tokens = iter([10, 11])
    with Session(engine) as session, lock(session, Parcel, parcel, store=broken, fence="lease"):
        overtake(engine, broken, parcel)
        set_to(session, 1)
        with pytest.raises(StaleToken):
            session.commit()
    assert read(engine).value == 0


@levels(EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_row_that_does_not_exist_yet_is_guarded_in_the_table(engine, store, form):
    with Session(engine) as session, lock(session, Parcel, 4711, fence=form) as lease:
        session.add(Parcel(id=4711))
        session.commit()
    assert fences(engine) == [("parcel:4711", lease.token)]
    with Session(engine) as session, lock(session, Parcel, 4711, fence=form) as lease:
        set_to(session, 1)
        session.commit()
    assert read(engine) == (1, *fence_of(lease))


@levels(SERVERS)
def test_newer_holder_of_a_row_that_does_not_exist_yet_reads_what_the_older_one_wrote(engine, broken):
    """The search for the row must not take MariaDB's snapshot: the wait is still to come."""
    broken.tokens = iter([10, 11])
    add_counter(engine)
    holders = [Adder(engine, Parcel, 4711, store=broken) for _ in range(2)]
    with holders[0] as a, holders[1] as b:
        a.take(), b.take()
        assert a.start().result() == 0
        reading = b.start()
        until_blocked(engine)
        a.finish()
        seen = outcome(reading)
        assert seen == 1 or classify(seen) is DatabaseFailure.SERIALIZATION


@levels([pair for pair in SERVERS if pair[0] == "postgresql" or pair[1] == "read committed"])
def test_row_that_appears_while_a_holder_waits_in_the_table_guards_that_holder_too(engine, broken):
    broken.tokens = iter([10, 11, 12])
    add_counter(engine)
    a, b = (Adder(engine, Parcel, 4711, store=broken) for _ in range(2))
    c = Adder(engine, Parcel, 4711, store=broken, wait=0.6)
    with a, b, c:
        a.take(), b.take()
        assert a.start().result() == 0
        reading = b.start()
        until_blocked(engine)
        a.now(a.session.add, Parcel(id=4711))
        a.finish()
        if isinstance(seen := outcome(reading), Exception):
            assert classify(seen) is DatabaseFailure.SERIALIZATION
            b.rollback()
            seen = b.start().result()
        assert seen == 1
        c.take()
        assert isinstance(outcome(c.start()), RowLocked)
        c.rollback()
        b.finish()
    assert value(engine) == 2


@levels([("postgresql", "read committed"), ("mariadb", "read committed"), ("sqlite", "DEFERRED")])
@pytest.mark.parametrize("second", [("parcel", 7), ("parcel", "7"), (Parcel, "7")])
@pytest.mark.parametrize("form", FORMS)
def test_one_lock_has_one_fence_however_it_was_named(engine, broken, parcel, form, second):
    broken.tokens, broken.forgetful = iter([10, 11]), True
    with Session(engine) as a, Session(engine) as b:
        older, newer = lock(a, Parcel, 7, store=broken, fence="lease"), lock(b, *second, store=broken, fence=form)
        assert older.name == newer.name
        with older, newer:
            set_to(b, 11)
            b.commit()
            set_to(a, 10)
            with pytest.raises(StaleToken):
                a.commit()
    assert read(engine)[:2] == (11, 11)


def test_class_on_the_table_of_a_fenced_one_has_its_fence():
    base = registry().generate_base()

    class Sheet(FencedMixin, base):
        __tablename__ = "sheet"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Title(base):
        __table__ = Sheet.__table__
        __mapper_args__: ClassVar[Any] = {"include_properties": ["id"]}

    for key in (7, "07", Title(id=7)):
        named = lock(Session(), Title, key)
        assert named.name == "sheet:7"
        assert (named.fence.table, named.fence.key) == (Sheet.__table__, 7)


def test_class_that_replaces_the_columns_of_a_fenced_table_or_reflects_it_has_its_fence():
    base, elsewhere = registry().generate_base(), registry().generate_base()

    class Leaf(FencedMixin, base):
        __tablename__ = "leaf"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Again(base):
        __tablename__ = "leaf"
        __table_args__: ClassVar[Any] = {"extend_existing": True}
        id: Mapped[int] = mapped_column(primary_key=True)

    class Reflected(elsewhere):
        __table__ = Leaf.__table__.to_metadata(elsewhere.metadata)

    for cls in (Again, Reflected):
        named = lock(Session(), cls, "07")
        assert named.name == "leaf:7"
        assert type(named.fence) is RowFence
        assert (named.fence.table, named.fence.key) == (cls.__table__, 7)


def test_class_whose_table_has_no_fence_is_refused_when_it_is_mapped():
    class Leaf(FencedMixin):
        pass

    base = registry()
    with pytest.raises(ArgumentError, match="the table of Leaf has no columns dlock_token and dlock_holder"):
        base.map_imperatively(Leaf, Table("leaf_of_paper", base.metadata, Column("id", Integer, primary_key=True)))


def test_class_with_another_key_of_a_fenced_table_has_not_its_fence():
    class Folder(FencedMixin, registry().generate_base()):
        __tablename__ = "folder"
        id: Mapped[int] = mapped_column(primary_key=True)
        mail: Mapped[str] = mapped_column(String(20), unique=True)

    class ByMail(registry().generate_base()):
        __table__ = Folder.__table__
        __mapper_args__: ClassVar[Any] = {"primary_key": [Folder.__table__.c.mail]}

    found = lock(Session(), ByMail, "a@x", shared=True)
    assert (found.name, type(found.fence)) == ("folder:a%40x", TableFence)


def test_class_that_may_be_of_the_same_table_as_a_fenced_one_is_refused():
    """Their locks have one name. Which database is meant, and so which fence, neither class tells."""

    class Folder(FencedMixin, registry().generate_base()):
        __tablename__ = "folder"
        id: Mapped[int] = mapped_column(primary_key=True)

    class OtherFolder(registry().generate_base()):
        __tablename__ = "folder"
        id: Mapped[int] = mapped_column(primary_key=True)

    class FencedFolder(FencedMixin, registry().generate_base()):
        __tablename__ = "folder"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(NotSupported, match="give OtherFolder the FencedMixin, too"):
        lock(Session(), OtherFolder, 1)
    assert lock(Session(), OtherFolder, 1, fence=False).name == "folder:1"
    for cls in (Folder, FencedFolder):
        assert lock(Session(), cls, 1).fence.table is cls.__table__


@levels([("sqlite", "IMMEDIATE")])
def test_class_that_reflects_a_fenced_table_of_another_database_is_fenced_in_its_own(engine, store):
    base, elsewhere = registry().generate_base(), registry().generate_base()

    class Note(FencedMixin, base):
        __tablename__ = "note"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Reflected(elsewhere):
        __table__ = Note.__table__.to_metadata(elsewhere.metadata)

    elsewhere.metadata.create_all(engine)
    with Session(binds={elsewhere: engine}) as session:
        session.add(Reflected(id=1))
        session.commit()
        for _ in range(2):
            with lock(session, Reflected, 1, store=store) as held:
                session.get_one(Reflected, 1)
                session.commit()
        assert session.get_one(Reflected, 1).dlock_token == held.token
    elsewhere.metadata.drop_all(engine)


@levels([("sqlite", "IMMEDIATE")])
@pytest.mark.parametrize("form", FORMS)
def test_row_is_found_by_the_key_of_its_class_which_need_not_be_that_of_its_table(engine, store, form):
    class Labelled(FencedMixin, registry().generate_base()):
        __tablename__ = "labelled"
        id: Mapped[int] = mapped_column(primary_key=True)
        label: Mapped[int] = mapped_column(unique=True)
        __mapper_args__: ClassVar[Any] = {"primary_key": [label]}

    Labelled.metadata.drop_all(engine)
    Labelled.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Labelled(id=1, label=2), Labelled(id=2, label=1)])
        session.commit()
        with lock(session, Labelled, 2, store=store, fence=form) as lease:
            session.execute(update(Labelled).values(label=Labelled.label))
            session.commit()
        tokens = session.execute(select(Labelled.label, Labelled.dlock_token)).all()
    assert sorted(tokens) == [(1, 0), (2, lease.token)]


def test_text_that_is_no_key_of_a_fenced_class_names_a_lock_of_its_own():
    for parts in (("parcel", "all"), ("counter", 7), ("parcel", 7, "x")):
        assert not isinstance(lock(Session(), *parts).fence, fencing.RowFence)
        lock(Session(), *parts, shared=True)


@levels(EVERY)
def test_row_may_be_deleted_under_its_lock(engine, store, parcel):
    with Session(engine) as session, lock(session, Parcel, parcel):
        session.delete(session.get(Parcel, parcel))
        session.commit()
        assert session.scalars(select(Parcel)).all() == []


@levels(EVERY)
def test_row_that_is_gone_at_commit_cannot_confirm(engine, store, parcel):
    """A newer holder may have deleted it."""
    with Session(engine) as session, lock(session, Parcel, parcel, fence="lease"):
        session.delete(session.get(Parcel, parcel))
        with pytest.raises(StaleToken):
            session.commit()
    assert read(engine).value == 0


@levels(EVERY)
def test_row_made_by_somebody_else_under_a_lease_is_confirmed_in_both_places(engine, broken):
    broken.tokens = iter([10, 11])
    with Session(engine) as session, lock(session, Parcel, 4711, store=broken, fence="lease") as lease:
        make(engine, Parcel(id=4711))
        set_to(session, 1)
        session.commit()
        assert read(engine) == (1, *fence_of(lease))
        overtake(engine, broken, 4711)
        set_to(session, 2)
        with pytest.raises(StaleToken):
            session.commit()
    assert read(engine).value == 1


@levels(EVERY)
def test_row_made_after_a_newer_holder_was_announced_in_the_table_does_not_let_the_older_one_commit(engine, broken):
    broken.tokens = iter([10, 11])
    with Session(engine) as session, lock(session, Parcel, 4711, store=broken, fence="lease"):
        overtake(engine, broken, 4711)
        make(engine, Parcel(id=4711, value=1))  # without a lock
        set_to(session, 2)
        with pytest.raises(StaleToken):
            session.commit()
    assert read(engine).value == 1


@levels(SERVERS)
@pytest.mark.parametrize("wait", [0, 0.6])
@pytest.mark.parametrize("form", FORMS)
def test_wait_for_the_row_is_limited_by_wait(another, engine, broken, parcel, form, wait):
    broken.tokens = iter([10, 11])
    timed = another(pool_size=1, max_overflow=0)
    set_timeout(timed)
    with Session(engine) as blocker, Adder(timed, Parcel, parcel, wait=wait, store=broken, fence=form) as late:
        set_to(blocker, 1)
        give_up_waiting(late, form, RowLocked)
        with timed.connect() as connection:
            assert timeout(connection) == 77


@levels([pair for pair in SERVERS if pair[0] == "mariadb"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [("order", 42), (Parcel, 7)], ids=["table", "row"])
def test_wait_on_mysql_is_limited_by_wait_and_its_session_has_its_own_limit_back(
    monkeypatch, another, engine, broken, form, parts
):
    monkeypatch.setattr(fencing, "_vendor", lambda _: "mysql")
    broken.tokens = iter([10, 11])
    make(engine, Parcel(id=7))
    add_counter(engine)
    timed = another(pool_size=1, max_overflow=0)
    set_timeout(timed)
    late = Adder(timed, *parts, wait=0.6, store=broken, fence=form)
    with Adder(engine, *parts, store=broken) as blocker, late:
        blocker.take()
        blocker.start().result()
        give_up_waiting(late, form, RowLocked)
        with timed.connect() as connection:
            assert timeout(connection) == 77
        blocker.rollback()


@levels(ONCE)
@pytest.mark.parametrize("form", FORMS)
def test_inherited_row_is_guarded_in_one_update_of_its_parent(engine, store, form):
    key = make(engine, HeavyParcel(id=8))
    with Session(engine) as session, lock(session, HeavyParcel, key):
        set_to(session, 4)
        session.commit()
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    with Session(engine) as session, lock(session, HeavyParcel, key, fence=form) as lease:
        session.execute(update(HeavyParcel.__table__).values(kilos=5))
        session.commit()
    assert len([sql for sql in sent if "dlock_token" in sql]) == (1 if form == "transaction" else 2)
    assert read(engine)[1:] == fence_of(lease)
    with Session(engine) as session, lock(session, Parcel, key, fence=form) as lease:
        session.get(HeavyParcel, key).kilos = 6
        session.commit()
    assert read(engine)[1:] == fence_of(lease)


# Schemas


def fenced_class(schema):
    class Base(DeclarativeBase):
        metadata = MetaData(schema=schema)

    class Box(FencedMixin, Base):
        __tablename__ = "box"

        id: Mapped[int] = mapped_column(Integer, primary_key=True)
        value: Mapped[int] = mapped_column(default=0)
        note: Mapped[str] = mapped_column(String(20), default="")

    return Box


@pytest.fixture
def other_schema(engine):
    """A separate schema (MariaDB: a database)."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA `other-one`" if is_mariadb(engine) else 'CREATE SCHEMA "other-one"')
    yield "other-one"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "DROP SCHEMA `other-one`" if is_mariadb(engine) else 'DROP SCHEMA "other-one" CASCADE'
        )


def is_mariadb(engine):
    return engine.dialect.name == DIALECT


@levels([("postgresql", "read committed"), ("mariadb", "repeatable read")])
@pytest.mark.parametrize("translated", [False, True])
def test_row_of_another_schema_is_found_there(engine, store, other_schema, translated):
    box = fenced_class(None if translated else other_schema)
    if translated:
        engine = engine.execution_options(schema_translate_map={None: other_schema})
    box.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(box).values(id=1))
    with Session(engine) as session, lock(session, box, 1) as lease:
        set_to(session, 5, box)
        session.commit()
    assert read(engine, box) == (5, *fence_of(lease))


@levels([("postgresql", "read committed"), ("postgresql", "repeatable read")])
def test_row_of_the_schema_that_the_program_chooses_as_the_transaction_begins_is_the_fence(engine, store):
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
        connection.exec_driver_sql("CREATE TABLE tenant.parcel (LIKE public.parcel INCLUDING ALL)")
    try:
        make(engine, Parcel(id=7))
        with Session(engine) as session:
            event.listen(
                session, "after_begin", lambda *args: args[2].exec_driver_sql("SET LOCAL search_path = tenant, public")
            )
            session.add(Parcel(id=7))
            session.commit()
            with lock(session, Parcel, 7) as lease:
                set_to(session, 5)
                session.commit()
            assert session.execute(select(Parcel.value, Parcel.dlock_token)).one() == (5, lease.token)
        assert read(engine)[:2] == (0, 0)
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA tenant CASCADE")
