"""The promises of versions for flushes of many rows, ORM statements that write many, and aggregates."""

from contextlib import nullcontext
from typing import Any, ClassVar, Final
from uuid import uuid4

import pytest
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
    Update,
    and_,
    bindparam,
    cast,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    inspect,
    lambda_stmt,
    literal,
    literal_column,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    column_property,
    declarative_base,
    join,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import LRUCache

from dlock_core.errors import NotSupported
from sqla_dlock.statements import places
from sqla_dlock.versions import (
    StaleObject,
    VersionedMixin,
    aggregates,
    conflicts,
    delete_with_version,
    save_with_version,
)
from tests.mysql_server import DIALECT
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.version_models import (
    Account,
    Basket,
    Code,
    Keyless,
    Letter,
    Line,
    LineNote,
    Member,
    Note,
    Office,
    Order,
    Park,
    Person,
    Place,
    Revised,
    Sensor,
    Shop,
)


def made(session: Session, *instances: Any) -> list[Any]:
    session.add_all(instances)
    session.commit()
    for each in instances:
        session.refresh(each)
    session.commit()
    return list(instances)


@pytest.fixture
def orders(session: Session) -> list[Order]:
    return made(session, *[Order(title=title) for title in "abcdef"])


def rows(session: Session, *columns: Any) -> list[tuple[Any, ...]]:
    """Return what the database has, bypassing the identity map."""
    return [tuple(row) for row in session.connection().execute(select(*columns).order_by(columns[0]))]


def sent(statements: list[str]) -> list[str]:
    return [word for word in statements if word != "BEGIN"]


# a flush of many rows


def test_flush_of_many_rows_is_two_statements(session, orders, statements):
    for each in orders:
        each.reads = 9
    session.flush()
    assert sent(statements) == ["SELECT", "UPDATE"]
    assert rows(session, Order.title, Order.reads, Order.version) == [(title, 9, 2) for title in "abcdef"]
    assert [(each.reads, each.edited, each.seen, each.version) for each in orders] == [(9, 7, 2, 2)] * 6


def test_flush_of_rows_that_changed_differently_counts_each_once(session, orders):
    for each in orders[:3]:
        each.reads = 9
    for each in orders[3:5]:
        each.reads = Order.reads + 1
    orders[5].title = "z"
    session.add(Order(title="new"))
    session.commit()
    found = rows(session, Order.title, Order.reads, Order.version)
    assert found == [("a", 9, 2), ("b", 9, 2), ("c", 9, 2), ("d", 1, 2), ("e", 1, 2), ("new", 0, 1), ("z", 0, 2)]
    assert [each.version for each in orders] == [2] * 6


def test_next_flush_of_the_same_rows_finds_their_versions(session, orders):
    for number in (2, 3, 4):
        for each in orders:
            each.reads += 1
        session.flush()
        assert {version for _, version in rows(session, Order.title, Order.version)} == {number}
        assert {each.version for each in orders} == {number}


def test_flush_that_is_rolled_back_to_a_savepoint_takes_its_versions_back(session, orders):
    savepoint = session.begin_nested()
    for each in orders:
        each.reads = 9
    session.flush()
    savepoint.rollback()
    assert {(each.reads, each.version) for each in orders} == {(0, 1)}


@pytest.mark.parametrize("harm", ["UPDATE orders SET version = 2 WHERE id = {}", "DELETE FROM orders WHERE id = {}"])
def test_conflict_of_one_of_many_rows_names_it_and_writes_none(session, orders, harm):
    with session.get_bind().begin() as connection:
        connection.execute(text(harm.format(orders[4].id)))
    for each in orders:
        each.reads = 9
    with pytest.raises(StaleObject) as caught:
        session.flush()
    found = 2 if "UPDATE" in harm else None
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (orders[4], 1, found)
    session.rollback()
    assert {reads for _, reads in rows(session, Order.title, Order.reads)} == {0}


def test_conflict_of_one_of_two_rows_that_changed_differently_comes_before_any_update(session, orders, statements):
    elsewhere(session, "UPDATE orders SET version = 7 WHERE title = 'b'")
    orders[0].reads, orders[1].title = 9, "new"
    statements.clear()
    with pytest.raises(StaleObject):
        session.flush()
    assert "UPDATE" not in statements


def test_keys_that_python_and_the_database_compare_differently_are_no_conflict(session):
    """On MariaDB, 'A' and 'a' are one key: a row found under the other spelling is that row."""
    codes = made(session, Code(kind="a", code="x"), Code(kind="a", code="y"))
    with session.get_bind().begin() as connection:
        connection.execute(text("UPDATE code SET code = upper(code)"))
    for each in codes:
        each.title = "new"
    if session.get_bind().dialect.name == DIALECT:
        session.flush()
        assert rows(session, Code.code, Code.version) == [("X", 2), ("Y", 2)]
    else:
        with pytest.raises(StaleObject, match="gone"):
            session.flush()


def delete_both(session: Session, letters: list[Letter]) -> None:
    for each in letters:
        session.delete(each)
    session.flush()


def delete_first(session: Session, letters: list[Letter]) -> None:
    delete_with_version(session, letters[0])


def write_both(session: Session, letters: list[Letter]) -> None:
    for each in letters:
        each.title = "new"
    session.flush()


@pytest.mark.parametrize("write", [write_both, delete_both, delete_first])
@pytest.mark.parametrize("is_stale", [False, True])
def test_versions_that_python_and_the_database_compare_differently_are_no_conflict(session, write, is_stale):
    """They are in memory as the class made them, and in the row as the database keeps them."""
    session.add_all(letters := [Letter(), Letter()])
    session.commit()
    if is_stale:
        with session.get_bind().begin() as connection:
            connection.execute(update(Letter.__table__).values(revision=uuid4().hex))
    with pytest.raises(StaleObject) if is_stale else nullcontext():
        write(session, letters)


def test_versions_that_differ_in_python_only_are_compared_in_one_query(session, statements):
    session.add_all(letters := [Letter() for _ in range(20)])
    session.commit()
    for each in letters:
        each.title = "new"
    statements.clear()
    session.flush()
    assert statements.count("SELECT") == 2


def test_listener_after_flush_still_sees_what_changed(session, orders):
    seen = []

    @event.listens_for(session, "after_flush")
    def note(session: Session, context: Any) -> None:
        seen.extend(inspect(each).attrs.reads.history.added for each in session.dirty)

    for each in orders:
        each.reads = 9
    session.flush()
    assert seen == [[9]] * 6
    assert {version for _, version in rows(session, Order.title, Order.version)} == {2}


def test_listener_before_flush_may_change_rows_that_are_written_together(session, orders):
    @event.listens_for(session, "before_flush")
    def stamp(session: Session, context: Any, instances: Any) -> None:
        for each in session.dirty:
            each.title += "!"

    for each in orders:
        each.reads = 9
    session.flush()
    assert rows(session, Order.title, Order.reads, Order.version) == [(f"{title}!", 9, 2) for title in "abcdef"]
    orders[0].reads = 10
    save_with_version(session, orders[0])
    assert orders[0].title == "a!!"


def test_listener_of_the_class_sees_each_row_written(session, orders):
    seen = []

    def note(mapper: Any, connection: Any, target: Order) -> None:
        seen.append((target.title, connection.execute(select(Order.reads).where(Order.id == target.id)).scalar()))

    event.listen(Order, "after_update", note)
    try:
        for each in orders:
            each.reads = 9
        session.flush()
    finally:
        event.remove(Order, "after_update", note)
    assert sorted(seen) == [(title, 9) for title in "abcdef"]


def test_rows_of_several_classes_and_tables_are_written_once_each(session):
    places = made(session, Place(name="a"), Park(name="b"), Park(name="c"), Shop(name="d"), Shop(name="e"))
    counter = made(session, Counter(name="x"))[0]
    for each in places:
        each.name = each.name.upper()
    counter.value = 5
    session.commit()
    assert rows(session, Place.name, Place.version) == [(name, 2) for name in "ABCDE"]
    assert rows(session, Counter.value) == [(5,)]


def test_more_rows_than_one_statement_takes(session):
    orders = made(session, *[Order() for _ in range(1100)])
    for each in orders:
        each.reads = 1
    session.flush()
    assert set(rows(session, Order.reads, Order.version)) == {(1, 2)}


def test_error_of_the_database_in_a_flush_of_many_needs_a_rollback(session, orders):
    for each in orders:
        each.title = "x" * 100 if session.get_bind().dialect.name != "sqlite" else None
    with pytest.raises(Exception, match=r"(?i)too long|not null"):
        session.flush()
    session.rollback()
    assert {(each.reads, each.version) for each in orders} == {(0, 1)}


async def test_async_flush_of_many_rows_is_two_statements(async_engine: AsyncEngine):
    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        orders = [Order(title=title) for title in "abc"]
        session.add_all(orders)
        await session.commit()
        words = []

        def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            words.append(statement.split(maxsplit=1)[0])

        event.listen(async_engine.sync_engine, "before_cursor_execute", note)
        for each in orders:
            each.title += "!"
        await session.commit()
        event.remove(async_engine.sync_engine, "before_cursor_execute", note)
        assert sent(words) == ["SELECT", "UPDATE"]
        found = await session.execute(select(Order.title, Order.version).order_by(Order.title))
        assert [tuple(row) for row in found] == [("a!", 2), ("b!", 2), ("c!", 2)]


@pytest.mark.parametrize("name", ["asyncpg", "aiomysql"])
async def test_flush_of_many_rows_in_autocommit_finds_the_stale_one(make_async_engine, make_engine, name):
    """No lock outlives its statement there, and asyncpg does not count the rows of many UPDATEs."""
    other = make_engine({"asyncpg": "postgresql"}.get(name, "mariadb"))
    async_engine = make_async_engine(name, isolation_level="AUTOCOMMIT")
    changed = []

    @event.listens_for(async_engine.sync_engine, "before_cursor_execute")
    def change(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE") and not changed:
            changed.append(statement)
            with other.begin() as their:
                their.execute(text("UPDATE orders SET title = 'theirs', version = version + 1 WHERE title = 'b'"))

    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        session.add_all(orders := [Order(title=title) for title in "abc"])
        await session.commit()
        for each in orders:
            each.reads = 9
        with pytest.raises(StaleObject):
            await session.commit()


# ORM statements


def test_update_statement_counts(session, orders):
    session.execute(update(Order).where(Order.title < "c").values(reads=5))
    assert rows(session, Order.title, Order.version)[:3] == [("a", 2), ("b", 2), ("c", 1)]
    session.query(Order).filter(Order.title == "c").update({"reads": 5})
    assert rows(session, Order.title, Order.version)[:3] == [("a", 2), ("b", 2), ("c", 2)]


@pytest.mark.parametrize("synchronize", ["evaluate", "fetch"])
def test_instance_that_was_stale_before_an_update_statement_is_stale_after_it(session, orders, synchronize):
    with session.get_bind().begin() as connection:
        connection.execute(text("UPDATE orders SET version = 5"))
    session.execute(update(Order).values(reads=5).execution_options(synchronize_session=synchronize))
    orders[0].title = "ours"
    with pytest.raises(StaleObject):
        session.flush()


def test_instance_that_an_update_statement_wrote_can_be_saved(session, orders):
    session.execute(update(Order).values(reads=5))
    orders[0].title = "new"
    save_with_version(session, orders[0])
    assert (orders[0].reads, orders[0].version) == (5, 3)
    assert ("new", 3) in rows(session, Order.title, Order.version)


def elsewhere(session: Session, statement: str) -> None:
    """Commit a statement of another user."""
    with session.get_bind().begin() as connection:
        connection.execute(text(statement))


UPDATES = {
    "auto": lambda session, statement: session.execute(statement),
    "evaluate": lambda session, statement: session.execute(
        statement, execution_options={"synchronize_session": "evaluate"}
    ),
    "fetch": lambda session, statement: session.execute(statement.execution_options(synchronize_session="fetch")),
    "query": lambda session, _: session.query(Order).filter(Order.title == "a").update({"reads": 5}),
}
"""The ways to send an UPDATE of the orders with the title a."""


@pytest.mark.parametrize("how", UPDATES)
def test_update_statement_moves_no_version_of_an_instance_whose_row_it_did_not_match(session, orders, how):
    elsewhere(session, "UPDATE orders SET title = 'shipped', version = version + 1 WHERE title = 'a'")
    UPDATES[how](session, update(Order).where(Order.title == "a").values(reads=5))
    assert orders[0].version == 1
    orders[0].title = "cancelled"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize("engine", ["postgresql", "mariadb", "pymysql"], indirect=True)
@pytest.mark.parametrize("how", UPDATES)
def test_update_statement_matches_rows_as_they_are_now_and_not_as_a_snapshot_shows_them(session, orders, how):
    rows(session, Order.id)  # MariaDB at REPEATABLE READ takes the snapshot
    elsewhere(session, "UPDATE orders SET title = 'shipped', version = version + 1 WHERE title = 'a'")
    UPDATES[how](session, update(Order).where(Order.title == "a").values(reads=5))
    orders[0].title = "cancelled"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_update_statement_in_autocommit_leaves_stale_what_it_cannot_lock(session, orders):
    """MariaDB has no UPDATE ... RETURNING, and in AUTOCOMMIT no lock outlives the SELECT of the keys."""
    bind = session.get_bind().execution_options(isolation_level="AUTOCOMMIT")
    sent = []

    @event.listens_for(bind, "before_cursor_execute")
    def ship(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE") and not sent:
            sent.append(statement)
            elsewhere(session, "UPDATE orders SET title = 'shipped', version = version + 1 WHERE title = 'a'")

    with Session(bind, expire_on_commit=False) as other:
        order = other.scalars(select(Order).where(Order.title == "a")).one()
        other.execute(update(Order).where(Order.title == "a").values(reads=5))
        order.title = "cancelled"
        with pytest.raises(StaleObject):
            other.commit()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_update_statement_locks_its_rows_where_it_writes_them_and_not_on_a_replica(session, orders):
    leader, follower = session.get_bind(), create_engine(session.get_bind().url)
    read: list[str] = []

    @event.listens_for(follower, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        read.append(statement)

    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
            return leader if self._flushing or isinstance(clause, Update) else follower

    with Routing() as other:
        order = other.scalars(select(Order).where(Order.title == "a")).one()
        other.execute(update(Order).where(Order.title == "a").values(reads=5))
        assert (order.reads, order.version, len(read)) == (5, 2, 1)
    follower.dispose()


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_update_statement_of_a_table_that_is_not_to_use_returning_locks_its_rows_first(session, orders):
    class Plain(VersionedMixin, declarative_base()):
        __tablename__, __table_args__ = "orders", {"implicit_returning": False}
        id = mapped_column(Integer, primary_key=True)
        reads = mapped_column(Integer)

    sent: list[str] = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *execution: sent.append(execution[2]))
    each = session.get_one(Plain, orders[0].id)
    session.execute(update(Plain).where(Plain.id == each.id).values(reads=5))
    assert (each.reads, each.version) == (5, 2)
    assert [text.partition(" ")[0] for text in sent[-3:]] == ["SELECT", "UPDATE", "SELECT"]
    assert sent[-3].endswith("FOR UPDATE")


@pytest.mark.parametrize("returning", [False, True])
def test_schemas_that_a_statement_translates_are_translated_for_its_checks_too(session, orders, returning):
    class Rented(VersionedMixin, declarative_base()):
        __tablename__, __table_args__ = "orders", {"schema": "tenant", "implicit_returning": returning}
        id = mapped_column(Integer, primary_key=True)
        reads = mapped_column(Integer)

    options: Any = {"schema_translate_map": {"tenant": None}}
    each = session.get_one(Rented, orders[0].id, execution_options=options)
    session.execute(update(Rented).where(Rented.id == each.id).values(reads=5), execution_options=options)
    assert (each.reads, each.version) == (5, 2)
    by_key = update(Rented).execution_options(**options)  # SQLAlchemy passes only the statement's own options on.
    session.execute(by_key, [{"id": each.id, "reads": 6, "version": 2}])
    assert (each.reads, each.version) == (6, 3)
    with pytest.raises(StaleObject):
        session.execute(by_key, [{"id": each.id, "reads": 7, "version": 2}])


@pytest.mark.parametrize("kind", [Member, Code, Park, Basket])
def test_update_statement_synchronizes_every_shape_of_class(session, kind):
    given = {Code: {"kind": "a", "code": "x"}}
    each = made(session, kind(**given.get(kind, {})))[0]
    column = {Member: "grade", Code: "title", Park: "trees", Basket: "name"}[kind]
    session.execute(update(kind).values({column: "5"}))
    assert (str(getattr(each, column)), each.version) == ("5", 2)
    setattr(each, column, "6")
    session.commit()
    assert each.version == 3


TENANTS: Final = {
    Sensor: Sensor.sensor_tenant,
    Office: Office.office_tenant,
    Keyless: Keyless.tenant,
}
"""Classes whose key is not that of the table, and a column of it."""


@pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
@pytest.mark.parametrize("kind", [Sensor, Keyless])
def test_update_statement_synchronizes_what_it_wrote_of_a_class_whose_key_is_not_that_of_its_table(
    session, kind, synchronize
):
    written, other = made(session, kind(tenant=1, number=2), kind(tenant=2, number=1))
    statement = update(kind).where(TENANTS[kind] == 1).execution_options(synchronize_session=synchronize)
    session.execute(statement.values(title="new"))
    assert [(each.title, each.version) for each in (written, other)] == [("new", 2), ("", 1)]
    if session.get_bind().dialect.update_returning:
        assert session.scalars(statement.values(title="newer").returning(kind.title)).all() == ["newer"]
        assert [(each.title, each.version) for each in (written, other)] == [("newer", 3), ("", 1)]
    written.title = "mine"
    session.commit()
    elsewhere(session, f"UPDATE {kind.__table__.name} SET version = 9")
    other.title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
@pytest.mark.parametrize("kind", TENANTS)
def test_delete_statement_deletes_no_other_instance_of_a_class_whose_key_is_not_that_of_its_table(
    session, kind, synchronize
):
    gone, kept = made(session, kind(tenant=1, number=2), kind(tenant=2, number=1))
    session.execute(delete(kind).where(TENANTS[kind] == 1).execution_options(synchronize_session=synchronize))
    assert (gone in session, kept in session) == (False, True)
    kept.title = "mine"
    session.commit()
    assert rows(session, kind.__table__.c.title) == [("mine",)]


@pytest.mark.parametrize("kind", [Sensor, Keyless])
@pytest.mark.parametrize("name", ["sqlite", "postgresql", "mariadb"])
def test_statement_without_a_transaction_leaves_stale_what_it_wrote_of_a_class_whose_key_is_not_that_of_its_table(
    make_engine, kind, name
):
    """No lock lasts from the SELECT of the keys to the UPDATE. A row that is gone after a DELETE needs none."""
    options = {"begin": "SELECT 1"} if name == "sqlite" else {"isolation_level": "AUTOCOMMIT"}
    with Session(make_engine(name, **options), expire_on_commit=False) as session:
        written, other = made(session, kind(tenant=1, number=2), kind(tenant=2, number=1))
        session.execute(update(kind).where(TENANTS[kind] == 1).values(title="new"))
        assert (written.version, other.version) == (1, 1)
        written.title = "mine"
        with pytest.raises(StaleObject):
            session.flush()
        session.rollback()
        session.refresh(written)
        session.execute(delete(kind).where(TENANTS[kind] == 1))
        assert (written in session, other in session) == (False, True)


def test_update_statement_fetches_no_keys_if_no_instance_is_loaded(session, orders):
    session.expunge_all()
    sent: list[str] = []

    @event.listens_for(session.get_bind(), "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *_: object) -> None:
        sent.append(statement)

    session.execute(update(Order).values(reads=5))
    assert [each.partition(" ")[0] for each in sent if "orders" in each] == ["UPDATE"]
    assert "RETURNING" not in sent[-1]


def test_instance_that_the_update_statement_s_own_flush_inserts_can_be_saved(session):
    session.add(order := Order(title="a"))
    session.execute(update(Order).values(reads=5))
    order.title = "new"
    session.commit()
    assert rows(session, Order.title, Order.reads, Order.version) == [("new", 5, 3)]


def test_instance_that_an_update_by_primary_key_wrote_can_be_saved(session, orders):
    session.execute(update(Order), [{"id": orders[0].id, "reads": 5, "version": 1}])
    assert (orders[0].reads, orders[0].version) == (5, 2)
    orders[0].title = "new"
    save_with_version(session, orders[0])
    assert ("new", 3) in rows(session, Order.title, Order.version)


def write_note(session: Session, note: Note) -> None:
    session.execute(update(Note), [{"id": note.id, "title": "new", "revision": note.revision}])


def set_revision(session: Session, note: Note) -> None:
    session.execute(update(Note).where(Note.id == note.id).values(title="new", revision=uuid4().hex))


def set_assigned_revision(session: Session, note: Note) -> None:
    with session.no_autoflush:
        note.revision = str(note.revision)
        flag_modified(note, "revision")
        write_note(session, note)


def test_instance_of_a_class_with_its_own_generator_can_be_saved_after_an_update_by_primary_key(session):
    note = made(session, Note(title="old"))[0]
    savepoint = session.begin_nested()
    write_note(session, note)
    assert [(vars(note)["title"], vars(note)["revision"])] == rows(session, Note.title, Note.revision)
    savepoint.rollback()
    write_note(session, note)
    note.title = "newer"
    save_with_version(session, note)
    session.commit()
    assert [("newer", note.revision)] == rows(session, Note.title, Note.revision)


@pytest.mark.parametrize("write", [write_note, set_revision, set_assigned_revision])
def test_instance_that_a_statement_wrote_is_compared_when_it_is_detached_and_merged(session, write):
    note = made(session, Note(title="old"))[0]
    write(session, note)
    session.expunge(note)
    session.commit()
    elsewhere(session, "UPDATE text_versioned_note SET title = 'theirs', revision = 'anew'")
    note.title = "mine"
    with pytest.raises(StaleDataError):
        session.merge(note)


def test_new_instance_whose_version_an_update_statement_sets_keeps_one_that_merge_compares(session):
    session.add(note := Note(title="old"))
    session.execute(update(Note).values(revision=uuid4().hex))  # It flushes the instance.
    session.commit()
    session.expunge(note)
    elsewhere(session, "UPDATE text_versioned_note SET title = 'theirs', revision = 'anew'")
    note.title = "mine"
    with pytest.raises(StaleDataError):
        session.merge(note)


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_update_by_primary_key_in_autocommit_leaves_the_instance_stale_whose_next_version_another_may_have_replaced(
    engine,
):
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT"), expire_on_commit=False) as session:
        note = made(session, Note(title="old"))[0]
        write_note(session, note)
        note.title = "mine"
        with pytest.raises(ValueError, match="read it together"):
            save_with_version(session, note)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "statement", [update(Order), update(Order).values(reads=5), update(Order).where(Order.id == 1)]
)
def test_update_by_primary_key_of_no_row_writes_nothing_and_is_refused_if_it_sets_values(session, orders, statement):
    is_refused = bool(statement._values)
    with pytest.raises(ValueError, match="leave the list out") if is_refused else nullcontext():
        session.execute(statement, [])
    assert [each.version for each in orders] == [1] * 6


def test_update_by_primary_key_that_is_rolled_back_to_a_savepoint_takes_its_versions_back(session, orders):
    savepoint = session.begin_nested()
    session.execute(update(Order), [{"id": orders[0].id, "reads": 5, "version": 1}])
    savepoint.rollback()
    assert (orders[0].reads, orders[0].version) == (0, 1)


@pytest.mark.parametrize(
    ("values", "given"),
    [
        ({"reads": Order.reads + bindparam("n")}, {"n": 5}),
        ({"reads": bindparam("n", 1)}, {"n": 5}),
        ({"title": "new"}, {"reads": 5}),
    ],
)
@pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
def test_instance_is_not_taken_for_current_if_parameters_tell_what_was_written(
    session, orders, values, given, synchronize
):
    statement = update(Order).where(Order.id == orders[0].id).values(values)
    session.execute(statement, given, execution_options={"synchronize_session": synchronize})
    written = session.connection().execute(select(Order.reads, Order.version).where(Order.id == orders[0].id))
    assert written.one() == (5, 2)
    assert (orders[0].reads, orders[0].version) == (0, 1)
    orders[0].title = "mine"
    with pytest.raises(StaleObject):
        session.flush()


def test_instance_is_written_along_if_parameters_only_tell_which_row(session, orders):
    session.execute(update(Order).where(Order.id == bindparam("key")).values(reads=5), {"key": orders[0].id})
    assert (orders[0].reads, orders[0].version) == (5, 2)


def test_update_by_primary_key_reads_what_the_database_and_defaults_have_set(session, orders):
    rows = [{"id": orders[0].id, "version": 1, "title": "new"}]
    session.execute(update(Order), rows)
    assert (orders[0].title, orders[0].version, orders[0].edited, orders[0].seen) == ("new", 2, 7, 2)


@pytest.mark.parametrize("is_read", [False, True])
def test_update_by_primary_key_makes_no_stale_instance_current(session, orders, is_read):
    elsewhere(session, "UPDATE orders SET title = 'shipped', version = 7 WHERE title = 'a'")
    savepoint = session.begin_nested()
    session.execute(update(Order), [{"id": orders[0].id, "reads": 5, "version": 7}])
    savepoint.rollback()
    if is_read:  # By a program that has decided by the title before.
        assert orders[0].edited == 0
    orders[0].title = "cancelled"
    with pytest.raises((StaleObject, ValueError)):
        session.commit()


@pytest.mark.parametrize(
    "version",
    [
        *(7, Order.version, Order.version - 1, cast(Order.edited, Integer) + 1),
        *(Order.version + 0, Order.version + -1, Order.version + Order.reads, Order.version + bindparam("given", 1)),
    ],
)
@pytest.mark.parametrize("form", ["by_name", "by_attribute", "ordered"])
def test_update_statement_that_sets_the_version_without_counting_is_refused(session, orders, version, form):
    statement = {
        "by_name": update(Order).values(version=version),
        "by_attribute": update(Order).values({Order.version: version}),
        "ordered": update(Order).ordered_values((Order.version, version)),
    }[form]
    with pytest.raises(NotSupported, match=r"leave it out, or set it to Order\.version \+ 1"):
        session.execute(statement)
    assert {version for _, version in rows(session, Order.title, Order.version)} == {1}


def test_update_statement_may_count_the_version_itself(session, orders):
    session.execute(update(Order).where(Order.title == "a").values({Order.version: Order.version + 2}))
    session.execute(update(Order).where(Order.title == "b").ordered_values((Order.version, 3 + Order.version)))
    assert [version for _, version in rows(session, Order.title, Order.version)][:3] == [3, 4, 1]


OTHER = aliased(Order)
JOINED = select(literal("b").label("title")).where(Order.id == 1, Order.version == 3)
SEEN = select(Order.id).where(Order.version == 3)
WHOLE = select(Order).subquery()
ALIAS_OF_WHOLE = aliased(Order, select(Order).cte())
COMPARED_ELSEWHERE = {
    "update, subquery": update(Order).where(Order.id.in_(SEEN)).values(title="b", version=Order.version + 1),
    "update, nested": update(Order).where(exists().where(Line.id.in_(SEEN))).values(version=Order.version + 1),
    "update, alias": update(Order).where(Order.id == OTHER.id, OTHER.version == 3).values(version=Order.version + 1),
    "delete, subquery": delete(Order).where(Order.id.in_(SEEN)),
    "delete, from a subquery": delete(Order).where(Order.id == SEEN.subquery().c.id),
    "delete, alias": delete(Order).where(Order.id == OTHER.id, OTHER.version == 3),
    "delete, other name": delete(Code).where(exists(select(Code.kind).where(Code.version == 3))),
    "delete, whole rows": delete(Order).where(Order.id == WHOLE.c.id, WHOLE.c.version == 3),
    "delete, whole rows in a subquery": delete(Order).where(
        Order.id.in_(select(WHOLE.c.id).where(WHOLE.c.version == 3))
    ),
    "delete, whole rows of an alias": delete(Order).where(Order.id == ALIAS_OF_WHOLE.id, ALIAS_OF_WHOLE.version == 3),
    "delete, whole rows of the table": delete(Order).where(
        exists().where((of_table := select(Order.__table__).subquery()).c.id == Order.id, of_table.c.version == 3)
    ),
    "delete, whole rows twice": delete(Order).where(
        exists(select(twice := select(WHOLE).cte()).where(twice.c.version == 3))
    ),
    "delete, whole rows, other name": delete(Code).where(
        exists((codes := select(Code).subquery()).select().where(codes.c.row_version == 3))
    ),
    "update, whole rows": update(Order)
    .where(Order.id == WHOLE.c.id, WHOLE.c.version == 3)
    .values(version=Order.version + 1),
    "update, joined by SET": update(Order).values(title=JOINED.subquery().c.title, version=Order.version + 1),
    "update, joined by SET in order": update(Order).ordered_values(
        (Order.title, "b" + JOINED.cte().c.title), (Order.version, Order.version + 1)
    ),
    "update, joined by SET as an alias": update(Order).values(
        title=aliased(Order, select(Order).where(Order.version == 3).subquery()).title, version=Order.version + 1
    ),
    "delete, table of the parent": delete(Shop).where(Shop.id == 1, Shop.version == 3),
}


@pytest.mark.parametrize("where", COMPARED_ELSEWHERE)
@pytest.mark.parametrize("on", ["session", "lambda", "connection"])
def test_version_that_would_not_be_compared_again_after_a_wait_is_refused_before_any_i_o(session, on, where):
    statement: Any = COMPARED_ELSEWHERE[where]
    executor = session.connection() if on == "connection" else session
    sent: list[str] = []
    event.listen(session.connection(), "before_cursor_execute", lambda *each: sent.append(each[2]))
    with pytest.raises(NotSupported, match="would not be compared again"):
        executor.execute(lambda_stmt(lambda: statement) if on == "lambda" else statement)
    assert not sent


def test_version_is_compared_beside_subqueries_that_do_not_name_it(session, orders):
    if session.get_bind().dialect.name == "mysql":
        pytest.skip("MySQL reads no table in a subquery that the statement writes")
    first, second, *_ = orders
    others = select(Order.id).where(Order.title == "a")
    unread = exists(select(Order).where(Order.reads == 0)), exists(select(WHOLE.c.id).where(WHOLE.c.reads == 0))
    is_seen = (Order.id.in_(others), *unread, Order.version == first.version)
    assert session.execute(update(Order).where(*is_seen).values(title="a")).rowcount == 1
    assert session.execute(update(Order).where(*is_seen).values(title="b")).rowcount == 0
    assert session.execute(delete(Order).where(*is_seen)).rowcount == 0
    assert session.execute(delete(Order).where(Order.id == second.id, Order.version == second.version)).rowcount == 1


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_value_that_names_a_version_elsewhere_compares_nothing(session, orders):
    latest = select(func.max(OTHER.version)).scalar_subquery()
    of_one = update(Order).where(Order.id == orders[0].id)
    session.execute(of_one.values(reads=latest + 4))
    for whole in (OTHER, WHOLE.c):
        session.execute(of_one.where(whole.id == Order.id + 1).values(reads=Order.reads + whole.version))
    assert rows(session, Order.title, Order.reads, Order.version)[0] == ("a", 7, 4)


@pytest.mark.parametrize(
    "write",
    [
        lambda connection: connection.execute(update(Order).values(reads=5)),
        lambda connection: connection.execute(
            update(Order).where(Order.id == bindparam("key")).values(reads=5), [{"key": 1}, {"key": 2}]
        ),
        lambda connection: connection.execute(update(Order).values(version=7)),
        lambda connection: connection.execute(select(Order).from_statement(update(Order).values(reads=5))),
        lambda connection: connection.execute(lambda_stmt(lambda: update(Order).values(reads=5))),
        lambda connection: connection.execute(lambda_stmt(lambda: update(Order)) + (lambda s: s.values(reads=5))),
        lambda connection: connection.execute(lambda_stmt(lambda: update(Order).values(reads=5)).spoil()),
    ],
    ids=["one", "many", "number", "from_statement", "lambda", "lambda_added", "lambda_spoiled"],
)
def test_update_of_a_class_on_a_connection_has_to_count(session, orders, write):
    with pytest.raises(NotSupported, match="on a Connection has to count its version up itself"):
        write(session.connection())
    session.connection().execute(update(Order).values(reads=5, version=Order.version + 1))
    assert {row[1:] for row in rows(session, Order.title, Order.reads, Order.version)} == {(5, 2)}


@pytest.mark.parametrize(("many", "options"), [(tuple, {}), (list, {"dml_strategy": "orm"})], ids=["tuple", "orm"])
def test_update_by_condition_takes_many_parameters_too(session, orders, many, options):
    statement = update(Order).where(Order.title == bindparam("of")).values(reads=bindparam("new"))
    session.execute(statement, many([{"of": "a", "new": 5}, {"of": "b", "new": 6}]), execution_options=options)
    found = rows(session, Order.title, Order.reads, Order.version)
    assert found[:3] == [("a", 5, 2), ("b", 6, 2), ("c", 0, 1)]
    session.commit()
    orders[0].title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


def test_version_that_is_compared_by_a_parameter_needs_another_name_than_the_column(session, orders):
    statement = update(Order).where(Order.version == bindparam("version")).values(reads=5)
    with pytest.raises(NotSupported, match=r"compare it in where\(\.\.\.\) by a parameter of another name"):
        session.execute(statement, {"version": 1})
    session.execute(update(Order).where(Order.version == bindparam("known")).values(reads=5), {"known": 1})
    assert {version for _, version in rows(session, Order.title, Order.version)} == {2}


@pytest.mark.parametrize("version", ["1", None])
def test_update_by_primary_key_with_a_version_that_is_no_number_is_a_mistake(session, orders, version, statements):
    with pytest.raises(TypeError, match=f"the expected version is a number, as versions of Order are, not {version!r}"):
        session.execute(update(Order), [{"id": orders[0].id, "reads": 5, "version": version}])
    assert sent(statements) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda session, given: session.execute(update(Order).where(Order.id == 1), given),
        lambda session, given: session.execute(update(Order).where(Order.id == 1), (given, given)),
        lambda session, given: session.connection().execute(update(Order).values(version=Order.version + 1), given),
        lambda session, given: session.connection().execute(update(Order).values(version=Order.version + 1), [given]),
    ],
    ids=["session", "tuple", "connection", "many"],
)
def test_version_among_the_parameters_of_an_update_is_refused_because_nothing_would_check_it(session, orders, write):
    with pytest.raises(NotSupported, match="among the parameters"):
        write(session, {"title": "old page", "version": 1})


def test_insert_or_replace_is_refused_because_it_sets_the_version_back(session):
    with pytest.raises(NotSupported, match="REPLACE"):
        session.execute(insert(Order).prefix_with("OR REPLACE").values(id=1, title="a", version=1))


def test_version_of_a_decorated_number_has_to_count_as_well(session):
    class BigNumber(TypeDecorator):
        impl, cache_ok = BigInteger, True

    class Decorated(VersionedMixin, declarative_base()):
        __tablename__ = "decorated"
        id = mapped_column(Integer, primary_key=True)
        version = mapped_column(BigNumber, nullable=False)
        __mapper_args__: ClassVar[Any] = {"version_id_col": version}

    with pytest.raises(NotSupported, match="leave it out"):
        session.execute(update(Decorated).values(version=7))
    assert Decorated.__mapper__.version_id_generator(None) == 1, "the time, as in a BigInteger; it is stopped here"


@pytest.mark.parametrize("version", ["1", None])
def test_update_by_primary_key_with_a_version_that_is_no_decorated_number_is_a_mistake(session, version, statements):
    class BigNumber(TypeDecorator):
        impl, cache_ok = BigInteger, True

    class Decorated(VersionedMixin, declarative_base()):
        __tablename__ = "decorated"
        id = mapped_column(Integer, primary_key=True)
        version = mapped_column(BigNumber, nullable=False)

    with pytest.raises(TypeError, match=f"the expected version is a number, .* not {version!r}"):
        session.execute(update(Decorated), [{"id": 1, "version": version}])
    assert sent(statements) == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_update_by_primary_key_takes_a_number_that_its_own_type_decorator_shows_as_a_text(session):
    class Hexadecimal(TypeDecorator):
        impl, cache_ok = BigInteger, True

        def process_bind_param(self, value: Any, dialect: Any) -> Any:
            return None if value is None else int(value, 16)

        def process_result_value(self, value: Any, dialect: Any) -> Any:
            return None if value is None else f"{value:x}"

    class Decorated(VersionedMixin, declarative_base()):
        __tablename__ = "decorated"
        id = mapped_column(Integer, primary_key=True)
        note = mapped_column(String(20))
        version = mapped_column(Hexadecimal, nullable=False)
        __mapper_args__: ClassVar[Any] = {"version_id_generator": lambda former: f"{int(former or '9', 16) + 1:x}"}

    Decorated.__table__.create(session.connection())
    session.add(Decorated(id=1))
    session.flush()
    session.execute(update(Decorated), [{"id": 1, "note": "new", "version": "a"}])
    assert rows(session, Decorated.note, Decorated.version) == [("new", "b")]


NOT_COUNTED: Final = {
    "session": lambda session: session.execute(update(Note).values(title="new")),
    "itself": lambda session: session.execute(update(Note).values(title="new", revision=Note.revision)),
    "many": lambda session: session.execute(
        update(Note).where(Note.id == bindparam("key")).values(title="new"),
        [{"key": 1}],
        execution_options={"dml_strategy": "core_only"},
    ),
    "connection": lambda session: session.connection().execute(update(Note).values(title="new")),
    "upsert": lambda session: session.execute(upsert_note(session, title="new")),
}


def upsert_note(session: Session, **values: Any) -> Any:
    """Return an upsert of a note in the words of the database."""
    name = session.get_bind().dialect.name
    if name in {"sqlite", "postgresql"}:
        statement = {"sqlite": sqlite, "postgresql": postgresql}[name].insert(Note).values(id=1, revision="a")
        return statement.on_conflict_do_update(index_elements=["id"], set_=values)
    return mysql.insert(Note).values(id=1, revision="a").on_duplicate_key_update(**values)


@pytest.mark.parametrize("write", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_version_that_is_no_number_has_to_be_set_anew_by_the_statement(session, write):
    """One more is no next version of a text, and SQLite and MySQL would make a number of it."""
    note = made(session, Note(id=1))[0]
    with pytest.raises(NotSupported, match=r"cannot count 'revision' up.*set it to a value that no row has had"):
        write(session)
    assert rows(session, Note.title, Note.revision) == [("", note.revision)]


@pytest.mark.parametrize("write", ["session", "connection", "upsert"])
def test_statement_may_set_a_version_that_is_no_number(session, write):
    note = made(session, Note(id=1))[0]
    on = session.connection() if write == "connection" else session
    values = {"title": "new", "revision": "anew"}
    on.execute(upsert_note(session, **values) if write == "upsert" else update(Note).values(values))
    assert rows(session, Note.title, Note.revision) == [("new", "anew")]
    session.commit()
    note.title = "mine"
    with pytest.raises((StaleObject, ValueError)):
        session.commit()


def test_upsert_on_a_connection_has_to_count(session):
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        session.connection().execute(upsert(session, title="new"))


CHILD_WRITES: Final = pytest.mark.parametrize(
    "write",
    [
        update(Line).values(amount=5),
        delete(Line),
        insert(Line).values(amount=1),
        lambda_stmt(lambda: update(Line).values(amount=5)),
        lambda_stmt(lambda: delete(Line)),
        update(Line.__table__).where(and_(Line.__table__.c.id == 1, Line.amount == 1)).values(amount=5),
        delete(Line.__table__).where(or_(Line.__table__.c.id == 1, Line.amount == 1)),
        insert(Line.__table__).values({Line.amount: 1}),
    ],
    ids=[
        *("update", "delete", "insert", "lambda_update", "lambda_delete"),
        *("table_update", "table_delete", "table_insert"),
    ],
)


@CHILD_WRITES
def test_write_of_children_on_a_connection_is_refused(session, basket, write):
    with pytest.raises(NotSupported, match=r"touch\(\) the roots"):
        session.connection().execute(write)


@CHILD_WRITES
def test_write_of_children_by_a_statement_is_refused(session, basket, write):
    with pytest.raises(NotSupported, match=r"touch\(\) the roots"):
        session.execute(write)


def set_reads(title: str, reads: int) -> Any:
    return lambda_stmt(lambda: update(Order).where(Order.title == title).values(reads=reads))


def test_lambda_statement_counts(session, orders):
    for title, reads in (("a", 5), ("b", 6)):
        session.execute(set_reads(title, reads))
    assert rows(session, Order.title, Order.reads, Order.version)[:3] == [("a", 5, 2), ("b", 6, 2), ("c", 0, 1)]
    assert [(each.reads, each.version) for each in orders[:3]] == [(5, 2), (6, 2), (0, 1)]
    keyed = [{"id": orders[2].id, "reads": 7, "version": 1}]
    session.execute(lambda_stmt(lambda: update(Order)), keyed)
    with pytest.raises(StaleObject):
        session.execute(lambda_stmt(lambda: update(Order)), keyed)


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_select_from_an_update_in_a_lambda_statement_counts(session, orders):
    session.expunge_all()
    statement = lambda_stmt(
        lambda: select(Order).from_statement(update(Order).where(Order.title == "a").values(reads=5).returning(Order))
    )
    order = session.scalars(statement).one()
    assert (order.reads, order.version) == (5, 2)


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_select_from_an_update_statement_counts(session, orders):
    statement = update(Order).where(Order.title == "a").values(reads=5).returning(Order)
    session.expunge_all()
    order = session.scalars(select(Order).from_statement(statement)).one()
    assert (order.reads, order.version) == (5, 2)
    order.title = "new"
    session.commit()
    assert ("new", 3) in rows(session, Order.title, Order.version)


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_select_from_an_update_statement_leaves_a_stale_instance_stale(session, orders):
    statement = update(Order).where(Order.title == "a").values(reads=5).returning(Order)
    session.scalars(select(Order).from_statement(statement)).all()
    orders[0].title = "new"
    with pytest.raises(StaleObject):
        session.commit()


CHANGED: Final = update(Order).where(Order.title == "a").values(reads=5).returning(Order.id)
IN_CTES: Final = {
    "select": lambda changed: select(changed.cte()),
    "subquery": lambda changed: select(Order).where(Order.id.in_(select(changed.cte()))),
    "added": lambda changed: select(literal(1)).add_cte(changed.cte()),
    "alias": lambda changed: select(aliased(Order, changed.cte()).id),
    "join": lambda changed: select(Order).join(joined := changed.cte(), joined.c.id == Order.id),
    "lambda": lambda changed: lambda_stmt(lambda: select(changed.cte())),
    "lambda_where": lambda changed: select(Order).where(lambda: Order.id.in_(select(changed.cte()))),
    "update": lambda changed: update(Person).where(Person.id.in_(select(changed.cte()))).values(name="b"),
    "update_joined": lambda changed: update(Person).where(Person.id == changed.cte().c.id).values(name="b"),
    "delete_joined": lambda changed: delete(Person).where(Person.id == changed.cte().c.id),
    "insert_rows": lambda changed: insert(Person).values(
        [{"name": select(cast(changed.cte().c.id, String)).scalar_subquery()}]
    ),
    "delete": lambda changed: delete(Person).where(Person.id.in_(select(changed.cte()))),
    "insert": lambda changed: insert(Person).from_select(["name"], select(cast(changed.cte().c.id, String))),
    "from_statement": lambda changed: select(Order).from_statement(
        select(Order).where(Order.id.in_(select(changed.cte())))
    ),
}


@pytest.mark.parametrize("engine", ["postgresql", "psycopg2"], indirect=True)
@pytest.mark.parametrize("within", IN_CTES)
def test_update_in_a_cte_has_to_count(session, orders, within):
    for _ in range(2):  # the second is compiled already
        with pytest.raises(NotSupported, match="in a CTE has to count its version up itself"):
            session.execute(IN_CTES[within](CHANGED))
    assert {version for _, version in rows(session, Order.title, Order.version)} == {1}
    counted = CHANGED.values(version=Order.version + 1)
    session.execute(IN_CTES[within](counted), execution_options={"synchronize_session": False})
    orders[0].title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
@pytest.mark.parametrize("within", IN_CTES)
def test_update_in_a_cte_is_judged_by_its_own_number_and_not_by_that_of_a_statement_compiled_before(
    session, orders, within
):
    def count(number: int) -> None:
        statement = IN_CTES[within](CHANGED.values(version=Order.version + number))
        session.execute(statement, execution_options={"synchronize_session": False})

    count(1)
    with pytest.raises(NotSupported, match="in a CTE has to count its version up itself"):
        count(0)
    with pytest.raises(NotSupported, match="in a CTE has to count its version up itself"):
        session.execute(lambda_stmt(lambda: select(CHANGED.values(version=Order.version + 0).cte())))
    count(1)
    assert rows(session, Order.title, Order.version)[0] == ("a", 3)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_upsert_in_a_cte_has_to_count(session):
    made(session, Code(kind="a", code="x"))
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        session.execute(select(upsert(session, title="new").returning(Code.code).cte()))
    counted = upsert(session, title="new", row_version=Code.__table__.c.row_version + 1).returning(Code.code)
    session.execute(select(counted.cte()))
    session.execute(select(insert(Code).values(kind="a", code="y").returning(Code.code).cte()))
    assert rows(session, Code.code, Code.title, Code.version) == [("x", "new", 2), ("y", "", 1)]


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_statements_on_the_table_pass_by_in_a_cte_too(session, orders):
    table = Order.__table__
    session.execute(select(update(table).where(table.c.title == "a").values(reads=5).returning(table.c.id).cte()))
    assert rows(session, Order.title, Order.reads, Order.version)[0] == ("a", 5, 1)


ON_TABLE: Final = {
    "and": lambda table: update(table).where(and_(table.c.title == "a", Order.reads < 9)).values(reads=5),
    "or": lambda table: update(table).where(or_(table.c.title == "a", Order.title == "a")).values(reads=5),
    "exists": lambda table: update(table).where(~exists().where(Person.id == Order.id)).values(reads=5),
    "other_first": lambda table: update(table).where(Person.id != 0, Order.id == Person.id).values(reads=5),
    "key": lambda table: update(table).where(table.c.title == "a").values({Order.reads: 5}),
    "value": lambda table: update(table).where(table.c.title == "a").values(reads=Order.reads + 5),
    "top": lambda table: update(table).where(Order.title == "a").values(reads=5),
    "joined": lambda table: update(table).where(table.c.id == WHOLE.c.id).values(reads=5),
}


@pytest.mark.parametrize("make", ON_TABLE.values(), ids=ON_TABLE)
def test_update_of_a_table_that_names_an_attribute_anywhere_counts(session, orders, make):
    made(session, Person(id=orders[0].id))
    session.execute(delete(Order).where(Order.title != "a"))
    if make is ON_TABLE["exists"]:
        session.execute(delete(Person))
    session.execute(make(Order.__table__))
    assert rows(session, Order.title, Order.reads, Order.version) == [("a", 5, 2)]
    session.commit()
    orders[0].title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize(
    "make", [*ON_TABLE.values(), lambda table: update(table).values(reads=WHOLE.c.reads + 5)], ids=[*ON_TABLE, "set"]
)
def test_update_of_a_table_that_names_an_attribute_anywhere_has_to_count_on_a_connection(session, orders, make):
    with pytest.raises(NotSupported, match="on a Connection has to count its version up itself"):
        session.connection().execute(make(Order.__table__))


def test_update_of_a_table_for_several_sets_of_parameters_counts_if_it_names_an_attribute(session, orders):
    statement = update(Order.__table__).where(Order.title == bindparam("of")).values(reads=5)
    session.execute(statement, [{"of": "a"}, {"of": "b"}])
    assert rows(session, Order.title, Order.version)[:3] == [("a", 2), ("b", 2), ("c", 1)]


def test_statements_on_the_table_with_its_columns_only_pass_by(session, orders):
    table = Order.__table__
    for on in (session, session.connection()):
        on.execute(update(table).where(and_(table.c.title == "a", table.c.reads == 0)).values(reads=5))
        on.execute(
            update(table).where(table.c.reads == select(func.count(Person.id)).scalar_subquery()).values(reads=6)
        )
    assert {version for _, version in rows(session, Order.title, Order.version)} == {1}


def test_update_statement_counts_a_column_of_another_name(session):
    made(session, Code(kind="a", code="x"))
    session.execute(update(Code).values(title="new"))
    assert rows(session, Code.title, Code.version) == [("new", 2)]


def test_update_statement_that_cannot_count_is_refused(session):
    with pytest.raises(NotSupported, match="which is in the table place"):
        session.execute(update(Shop).values(owner="b"))
    with pytest.raises(NotSupported, match="use values"):
        session.execute(update(Order).ordered_values((Order.reads, 5)))


def upsert_shop(session: Session, values: dict[str, Any]) -> Any:
    name = session.get_bind().dialect.name
    if name == DIALECT:
        return mysql.insert(Shop).values(id=1).on_duplicate_key_update(values)
    statement = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(Shop).values(id=1)
    return statement.on_conflict_do_update(index_elements=["id"], set_=values)


@pytest.mark.parametrize("counted", [{}, {"version": Shop.version + 1}], ids=["uncounted", "counted"])
@pytest.mark.parametrize("form", ["connection", "upsert", "upsert_on_a_connection"])
def test_statement_cannot_count_a_version_in_the_table_of_its_parent(session, counted, form):
    made(session, Shop(owner="a"), Shop(owner="b"))
    refused = pytest.raises(NotSupported, match="which is in the table place: update the rows one by one")
    if form == "connection":
        with refused:
            session.connection().execute(update(Shop).where(Shop.owner == "a").values(owner="c", **counted))
    else:
        target = session if form == "upsert" else session.connection()
        with refused:
            target.execute(upsert_shop(session, {"owner": "c", **counted}))
    assert rows(session, Shop.owner, Shop.version) == [("a", 1), ("b", 1)]


@pytest.mark.parametrize("on", ["session", "connection"])
def test_update_of_the_parents_table_that_names_a_joined_subclass_counts_the_version(session, on):
    made(session, Shop(owner="a"), Shop(owner="b"))
    table = Place.__table__
    renamed = update(table).where(table.c.id == Shop.__table__.c.id, Shop.owner == "a")
    if on == "session":
        session.execute(renamed.values({table.c.name: "new"}), execution_options={"synchronize_session": False})
    else:
        with pytest.raises(NotSupported, match=r"on a Connection has to count its version up itself"):
            session.connection().execute(renamed.values({table.c.name: "new"}))
        session.connection().execute(renamed.values({table.c.name: "new", table.c.version: table.c.version + 1}))
    assert rows(session, Shop.owner, Shop.name, Shop.version) == [("a", "new", 2), ("b", "", 1)]


@pytest.mark.parametrize("cache", [None, {}, LRUCache(100)], ids=["none", "own", "like_a_flush"])
def test_cache_of_statements_that_the_program_sets_switches_no_check_off(session, orders, cache):
    connection = session.connection(execution_options={"compiled_cache": cache})
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        connection.execute(update(Order).values(reads=5))
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        connection.execute(update(Order.__table__).where(Order.reads == 0).values(reads=5))


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_statement_on_a_connection_has_to_count_from_the_moment_that_a_class_is_mapped(engine):
    metadata = MetaData()
    ledger = Table("ledger", metadata, Column("id", Integer, primary_key=True), Column("version", Integer))
    entry = Table(
        "entry", metadata, Column("id", Integer, primary_key=True), Column("ledger_id", ForeignKey("ledger.id"))
    )
    mapping = registry()

    class Ledger(VersionedMixin):
        __version_children__ = ("entries",)

    class Entry:
        pass

    with engine.connect() as connection:
        metadata.create_all(connection)
        for table in (ledger, entry):
            connection.execute(table.update().values(id=1))
        mapping.map_imperatively(Entry, entry, properties={"ledger": relationship(Ledger, back_populates="entries")})
        mapping.map_imperatively(
            Ledger,
            ledger,
            version_id_col=ledger.c.version,
            properties={"entries": relationship(Entry, back_populates="ledger")},
        )
        mapping.configure()
        with pytest.raises(NotSupported, match="has to count its version up itself"):
            connection.execute(update(Ledger).values(id=1))
        with pytest.raises(NotSupported, match="would not count the versions of the aggregates"):
            connection.execute(update(Entry).values(id=1))


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_element_of_an_array_in_a_table_without_versions_can_be_set(engine):
    series = Table("series", MetaData(), Column("numbers", ARRAY(Integer)))
    with engine.connect() as connection:
        series.create(connection)
        connection.execute(series.insert().values(numbers=[1, 2]))
        connection.execute(series.update().values({series.c.numbers[1]: 7}))
        assert connection.scalar(select(series.c.numbers)) == [7, 2]


def test_condition_of_many_layers_is_looked_into_once():
    columns = [each.key for each in Order.__table__.c]
    rows = select(*Order.__table__.c).where(Order.version == 7).cte()
    for _ in range(6):
        rows = select(*[rows.c[key] for key in columns]).where(rows.c.reads == 0).cte()
    found = list(places(Order.id.in_(select(rows.c.id)), Order.__table__.c.version))
    assert 0 < len(found) < 10


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_update_in_a_cte_cannot_count_a_version_in_the_table_of_its_parent(session):
    with pytest.raises(NotSupported, match="which is in the table place: update the rows one by one"):
        session.execute(select(update(Shop).values(owner="c").returning(Shop.owner).cte()))


@pytest.mark.parametrize(
    "write",
    [
        lambda session, alias: session.execute(update(alias).where(alias.title == "b").values(reads=5)),
        lambda session, alias: session.query(alias).filter(alias.title == "b").update({alias.reads: 5}),
    ],
    ids=["update", "query"],
)
def test_update_of_an_alias_is_refused_before_it_counts_another_row(session, orders, write):
    with pytest.raises(NotSupported, match=r"send update\(Order\), and use the alias in its subqueries"):
        write(session, aliased(Order))
    assert {row[1:] for row in rows(session, Order.title, Order.reads, Order.version)} == {(0, 1)}


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_update_of_an_alias_in_a_cte_is_refused(session, orders):
    alias = aliased(Order)
    counted = update(alias).values(version=alias.version + 1).returning(alias.id)
    with pytest.raises(NotSupported, match="use the alias in its subqueries"):
        session.execute(select(counted.cte()))


def test_alias_in_a_subquery_of_an_update_is_no_alias_that_is_written(session, orders):
    newest = aliased(Order)
    if session.get_bind().dialect.name != DIALECT:  # MySQL cannot read the table that it writes.
        session.execute(update(Order).where(~exists().where(newest.title > Order.title)).values(reads=5))
        assert rows(session, Order.title, Order.version)[-2:] == [("e", 1), ("f", 2)]


def test_update_of_a_table_whose_condition_names_a_versioned_class_counts_nothing(session, orders):
    made(session, Person(id=orders[0].id))
    person = Person.__table__
    condition = select(Order.id).where(Order.id == person.c.id).exists()
    session.execute(update(person).where(condition).values(name="b"))
    assert rows(session, Person.name) == [("b",)]


MULTI_TABLE = {
    "attributes": lambda: {Person.name: "b", Order.reads: 5},
    "counted": lambda: {Person.name: "b", Order.reads: 5, Order.version: Order.version + 1},
    "alias": lambda: {Person.name: "b", aliased(Order).reads: 5},
    "alias alone": lambda: {aliased(Order).reads: 5},
}


@pytest.mark.parametrize("values", MULTI_TABLE.values(), ids=MULTI_TABLE)
@pytest.mark.parametrize("kind", [Person, Code, Counter])
@pytest.mark.parametrize("on", ["session", "connection"])
def test_update_that_sets_columns_of_another_versioned_class_is_refused(session, orders, values, kind, on):
    where = session if on == "session" else session.connection()
    with pytest.raises(NotSupported, match=r"would not count the versions of Order: send update\(Order\) by itself"):
        where.execute(update(kind).where(kind.__table__.c[0] == Order.id).values(values()))
    assert {row[1:] for row in rows(session, Order.title, Order.reads, Order.version)} == {(0, 1)}


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
@pytest.mark.parametrize("on", ["session", "connection"])
@pytest.mark.parametrize("written", [Person, Order.__table__.join(Person.__table__, Order.id == Person.id)])
def test_update_of_a_join_that_sets_columns_of_a_table_whose_class_it_names_is_refused(session, orders, on, written):
    write = update(written).where(Person.id == Order.id).values({Order.__table__.c.title: "new"})
    with pytest.raises(NotSupported, match="would not count the versions of Order"):
        (session if on == "session" else session.connection()).execute(write)


ORDER, PERSON, CODE = Order.__table__, Person.__table__, Code.__table__
JOINED: Final = {
    "attributes": lambda: update(join(Order, Person, Order.id == Person.id)).values({Order.title: "new"}),
    "texts": lambda: update(join(Person, Order, Order.id == Person.id)).values(title="new"),
    "condition": lambda: update(join(Order, Person, Order.id == Person.id)).where(Order.id > 0).values(title="new"),
    "tables": lambda: update(ORDER.join(PERSON, ORDER.c.id == PERSON.c.id)).where(Order.id > 0).values(title="new"),
    "columns only": lambda: update(ORDER.join(PERSON, ORDER.c.id == PERSON.c.id)).values(title="new"),
    "alias": lambda: update((a := ORDER.alias()).join(PERSON, a.c.id == PERSON.c.id)).values(title="new"),
    "three": lambda: update(PERSON.join(ORDER.join(CODE, true()), true())).values(reads=5),
    "child": lambda: update(PERSON.join(LineNote.__table__, true())).values(text="new"),
}


@pytest.mark.parametrize("make", JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("on", ["session", "connection"])
def test_update_of_a_join_in_which_a_table_has_versions_is_refused_whatever_names_its_columns(
    session, orders, on, make
):
    where = session if on == "session" else session.connection()
    with pytest.raises(NotSupported, match=r"of a join would not count the versions of \w+: write one table"):
        where.execute(make())
    with pytest.raises(NotSupported, match=r"of a join would not count the versions"):
        where.execute(update(ORDER.join(PERSON, true())), {"title": "new"})


ON_A_JOIN: Final = {
    "values": lambda where: where.execute(update(Account).values(note="theirs")),
    "attribute": lambda where: where.execute(update(Account).values({Account.note: "theirs"})),
    "parameters": lambda where: where.execute(update(Account).where(Account.id == 1), {"note": "theirs"}),
    "tuple": lambda where: where.execute(update(Account).where(Account.id == 1), ({"note": "theirs"},)),
    "many": lambda where: where.execute(
        update(Account).where(Account.id == bindparam("key")),
        [{"key": 1, "note": "theirs"}],
        execution_options={"dml_strategy": "core_only"},
    ),
    "delete": lambda where: where.execute(delete(Account)),
}


@pytest.mark.parametrize("write", ON_A_JOIN.values(), ids=ON_A_JOIN)
@pytest.mark.parametrize("on", ["session", "connection"])
def test_statement_of_a_class_on_a_join_is_refused_whatever_names_its_columns(session, on, write):
    (account,) = made(session, Account(id=1))
    with pytest.raises(NotSupported, match="cannot write the join that Account is mapped to"):
        write(session if on == "session" else session.connection())
    session.delete(account)
    session.commit()


@pytest.mark.parametrize("values", [{"note": "new"}, {"motto": "new"}], ids=["own", "other"])
def test_update_by_primary_key_of_a_class_on_a_join_checks_and_counts(session, values):
    (account,) = made(session, Account(id=1))
    session.execute(update(Account), [{"id": 1, "version": 1, **values}])
    assert (account.version, *rows(session, Account.version)) == (2, (2,))
    with pytest.raises(StaleObject):
        session.execute(update(Account), [{"id": 1, "version": 1, **values}])
    with pytest.raises(ValueError, match="checks versions"):
        session.execute(update(Account), [{"id": 1, **values}])
    session.delete(account)
    session.commit()


@pytest.mark.parametrize("on", ["session", "connection"])
def test_update_that_sets_columns_of_an_alias_of_the_table_of_another_versioned_class_is_refused(session, orders, on):
    alias = ORDER.alias()
    write = update(Person).where(Person.id == alias.c.id, alias.c.id == Order.id).values({alias.c.title: "new"})
    with pytest.raises(NotSupported, match="would not count the versions of Order"):
        (session if on == "session" else session.connection()).execute(write)


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_update_counts_its_own_version_and_not_that_of_another_table(session, orders):
    """A column of the same name in another table that MariaDB writes along is no count."""
    made(session, Revised(id=orders[0].id))
    session.execute(
        update(Order).where(Order.id == Revised.id).values({Order.reads: 5, Revised.version: Revised.version + 10}),
        execution_options={"synchronize_session": False},
    )
    assert rows(session, Order.title, Order.version)[:2] == [("a", 2), ("b", 1)]
    assert rows(session, Revised.version) == [(10,)]


def test_update_by_primary_key_checks_and_counts(session, orders):
    session.execute(update(Order), [{"id": each.id, "reads": 5, "version": 1} for each in orders[:3]])
    assert [version for _, version in rows(session, Order.title, Order.version)] == [2, 2, 2, 1, 1, 1]
    with pytest.raises(StaleDataError):
        session.execute(update(Order), [{"id": each.id, "reads": 6, "version": 1} for each in orders])


def test_update_by_primary_key_flushes_first_what_was_changed_in_memory(session, orders):
    write = update(Order), [{"id": orders[0].id, "version": 1, "reads": 5}]
    orders[0].title = "mine"
    with pytest.raises(StaleObject) as caught:
        session.execute(*write)
    assert (caught.value.instance, caught.value.found) == (orders[0], 2)
    session.rollback()
    orders[0].title = "mine"
    session.execute(*write, execution_options={"autoflush": False})
    session.commit()
    assert ("mine", 5, 3) in rows(session, Order.title, Order.reads, Order.version)


def test_list_of_parameters_by_condition_writes_no_version(session, orders):
    statement = update(Order).where(Order.id == bindparam("key")).values(reads=5)
    with pytest.raises(ValueError, match="leave dml_strategy out, and it is checked"):
        session.execute(statement, [{"key": 1, "version": 1}], execution_options={"dml_strategy": "orm"})


def test_conflict_of_a_row_that_is_not_loaded_names_its_class(session, orders):
    key = orders[0].id
    session.expunge_all()
    with pytest.raises(StaleObject, match=rf"cannot save Order\({key}\) at version 7: the row has version 1") as caught:
        session.execute(update(Order), [{"id": key, "reads": 6, "version": 7}])
    assert caught.value.instance is None


def test_rows_of_several_queries_are_locked_in_the_order_of_their_keys(session, orders, engine, monkeypatch):
    """Two sessions that write the same rows in different orders could deadlock."""
    monkeypatch.setattr(conflicts, "MAX_ROWS_PER_QUERY", 2)
    queried: list[Any] = []

    def note(connection: Any, clause: Any, many: Any, params: Any, options: Any) -> None:
        if "dlock_keys" in params:
            queried.append(params["dlock_keys"])

    event.listen(engine, "before_execute", note)
    try:
        session.execute(update(Order), [{"id": each.id, "version": 1, "reads": 9} for each in reversed(orders)])
    finally:
        event.remove(engine, "before_execute", note)
    keys = sorted(each.id for each in orders)
    assert queried == [keys[:2], keys[2:4], keys[4:]]


def test_update_by_primary_key_without_versions_is_refused(session, orders):
    with pytest.raises(ValueError, match="give 'version' as it was read in every row"):
        session.execute(update(Order), [{"id": each.id, "reads": 5} for each in orders])
    with pytest.raises(KeyError, match="version"):
        session.bulk_update_mappings(Order, [{"id": orders[0].id, "reads": 5}])


def test_update_of_many_parameter_sets_by_condition_is_sqlalchemy_s_core(session, orders):
    """Through the connection it is Core, which bypasses versions."""
    statement = update(Order.__table__).where(Order.__table__.c.id == bindparam("key")).values(reads=5)
    session.connection().execute(statement, [{"key": each.id} for each in orders])
    assert {version for _, version in rows(session, Order.title, Order.version)} == {1}


def test_delete_statement_makes_instances_stale(session, orders):
    session.execute(delete(Order).where(Order.title == "a").execution_options(synchronize_session=False))
    orders[0].title = "ours"
    with pytest.raises(StaleObject, match="gone"):
        save_with_version(session, orders[0])


@pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("condition", [Order.version == 1, Order.title == "a"])
def test_delete_statement_deletes_no_instance_of_which_the_row_is_still_there(
    session, orders, synchronize, is_stale, condition
):
    if is_stale:
        elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1 WHERE title = 'a'")
    is_first = (Order.id == orders[0].id, condition)
    deleted = session.execute(delete(Order).where(*is_first).execution_options(synchronize_session=synchronize))
    assert (deleted.rowcount, orders[0] in session) == ((0, True) if is_stale else (1, False))
    if is_stale:
        orders[0].title = "ours"
        with pytest.raises(StaleObject):
            session.commit()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_delete_statement_without_returning_leaves_instances_whose_rows_it_did_not_delete(session, orders):
    class Plain(VersionedMixin, declarative_base()):
        __tablename__, __table_args__ = "orders", {"implicit_returning": False}
        id = mapped_column(Integer, primary_key=True)

    instances = session.scalars(select(Plain)).all()
    session.execute(delete(Plain).where(func.rand() < 0.5))
    left = {key for (key,) in rows(session, Order.id)}
    assert [each for each in instances if each not in session and each.id in left] == []
    session.execute(delete(Plain).where(Plain.id.in_(left)))
    assert [each for each in instances if each.id in left and each in session] == []


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_delete_statement_whose_condition_needs_another_table_synchronizes(session, orders):
    made(session, Person(id=orders[0].id))
    using = {"is_delete_using": True}  # MariaDB has no RETURNING for it, which SQLAlchemy has to be told.
    session.execute(delete(Order).where(Order.id == Person.id), execution_options=using)
    assert [each in session for each in orders] == [False] + [True] * 5


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
def test_delete_statement_of_a_joined_subclass_without_returning_deletes_its_instances(session):
    kept, gone = made(session, Shop(name="kept"), Shop(name="gone"))
    made(session, Person(id=gone.id))
    using = {"is_delete_using": True}
    session.execute(delete(Shop).where(Shop.id == Person.id), execution_options=using)
    assert (kept in session, gone in session) == (True, False)


def test_insert_statements_start_at_1(session):
    session.execute(insert(Order), [{"title": "a"}, {"title": "b"}])
    session.execute(insert(Order).values(title="c"))
    session.connection().execute(insert(Order.__table__).values(title="d"))
    assert rows(session, Order.title, Order.version) == [(title, 1) for title in "abcd"]


NEW: Final = {"kind": "a", "code": "x", "title": "new"}
GIVEN: Final = {**NEW, "row_version": 5}
INSERTS: Final = {
    "values": insert(Code).values(**NEW, version=5),
    "column": insert(Code).values({**NEW, Code.__table__.c.row_version: 5}),
    "tuple": insert(Code).values(("a", "x", "new", 5)),
    "dicts": insert(Code).values([{**NEW, "version": 5}]),
    "tuples": insert(Code).values([("a", "x", "new", 5)]),
    "select": insert(Code).from_select([*NEW, "row_version"], select(*map(literal, NEW.values()), literal(5))),
    "returning": select(Code).from_statement(insert(Code).values(**NEW, version=5).returning(Code)),
    "lambda": lambda_stmt(lambda: insert(Code).values(kind="a", code="x", title="new", version=5)),
}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("name", INSERTS)
def test_insert_that_gives_a_row_a_version_is_refused_because_an_older_row_may_have_had_it(session, name):
    for execute in (session.execute, session.connection().execute):
        with pytest.raises(NotSupported, match=r"insert\(Code\) cannot set 'version'.*: leave it out"):
            execute(INSERTS[name])


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("rows", [GIVEN, [GIVEN], (GIVEN,)], ids=["one", "many", "tuple"])
def test_version_among_the_parameters_of_an_insert_that_writes_them_as_they_are_is_refused(session, rows):
    code = insert(Code)
    for statement in (code.execution_options(dml_strategy="raw"), select(Code).from_statement(code.returning(Code))):
        with pytest.raises(NotSupported, match=r"insert\(Code\) cannot set 'version'"):
            session.execute(statement, rows)
    with pytest.raises(NotSupported, match=r"insert\(Code\) cannot set 'version'"):
        session.connection().execute(code, rows)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_insert_in_a_cte_that_gives_a_row_a_version_is_refused(session):
    with pytest.raises(NotSupported, match=r"insert\(Code\) cannot set 'version'"):
        session.execute(select(INSERTS["values"].returning(Code.code).cte()))


INSERTS_OF_ROWS: Final = {
    "one": lambda session, row: session.execute(insert(Order), row),
    "many": lambda session, row: session.execute(insert(Order), [row]),
    "upsert": lambda session, row: session.execute(sqlite.insert(Order).on_conflict_do_nothing(), [row]),
    "returning": lambda session, row: session.scalars(insert(Order).returning(Order), [row]).all(),
    "mappings": lambda session, row: session.bulk_insert_mappings(Order, [row]),
    "add": lambda session, row: session.add(Order(**row)),
    "expression": lambda session, row: session.add(Order(**{**row, "version": literal(row["version"]) + 0})),
    "objects": lambda session, row: session.bulk_save_objects([Order(**row)]),
}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("form", INSERTS_OF_ROWS)
def test_rows_that_a_session_inserts_begin_at_versions_of_their_own_whatever_they_are_given(session, form):
    INSERTS_OF_ROWS[form](session, {"title": "a", "version": 5})
    session.flush()
    assert rows(session, Order.title, Order.version) == [("a", 1)]


GIVEN_ROW: Final = {"kind": "a", "code": "x", "title": "new"}


def upsert(session: Session, named: Any = (), *, target: Any = Code, row: Any = GIVEN_ROW, **values: Any) -> Any:
    """Return an INSERT that writes these over the row of the same key, in the database's dialect."""
    values = {**dict(named), **values}
    name = session.get_bind().dialect.name
    if name == DIALECT:
        return mysql.insert(target).values(row).on_duplicate_key_update(values)
    statement = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(target).values(row)
    if not values:
        return statement.on_conflict_do_nothing()
    return statement.on_conflict_do_update(index_elements=[Code.kind, Code.code], set_=values)


def given_to(session: Session) -> Any:
    """Return the columns of the row that an upsert was given."""
    is_mysql = session.get_bind().dialect.name == DIALECT
    return mysql.insert(Code).inserted if is_mysql else postgresql.insert(Code).excluded


def test_insert_that_turns_into_an_update_has_to_count(session):
    made(session, Code(kind="a", code="x"))
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        session.execute(upsert(session, title="new"))
    session.execute(upsert(session, title="new", row_version=Code.__table__.c.row_version + 1))
    assert rows(session, Code.title, Code.version) == [("new", 2)]
    for version in (7, given_to(session).row_version, given_to(session).row_version + 1, Code.version):
        with pytest.raises(NotSupported, match="has to count its version up itself"):
            session.execute(upsert(session, title="old", row_version=version))


def test_upsert_of_many_parameter_sets_may_count_by_a_number_in_its_text(session):
    """Some drivers of MariaDB send many rows as one VALUES, after which they take no parameter."""
    made(session, Code(kind="a", code="x"), Code(kind="a", code="y"))
    many = [{"kind": "a", "code": code, "title": "new"} for code in "xyz"]
    values = {"title": literal_column("'new'"), "row_version": Code.version + literal_column("1")}
    for executor in (session, session.connection()):
        for target in (Code, Code.__table__):
            executor.execute(upsert(session, values, target=target, row={}), many)
    assert rows(session, Code.code, Code.title, Code.version) == [("x", "new", 5), ("y", "new", 5), ("z", "new", 4)]


@pytest.mark.parametrize("version", ["0", "-1", "1 - 1", "version", "x"])
def test_text_that_is_no_number_counts_nothing(session, orders, version):
    with pytest.raises(NotSupported, match="cannot set 'version' to a value of its own"):
        session.execute(update(Order).values(version=Order.version + literal_column(version)))
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        session.execute(upsert(session, row_version=Code.version + literal_column(version)))
    assert {version for _, version in rows(session, Order.title, Order.version)} == {1}


def test_update_statement_that_counts_by_a_number_in_its_text_leaves_a_stale_instance_stale(session, orders):
    session.connection().execute(update(Order).values(version=Order.version + literal_column("1")))
    session.execute(update(Order).values(version=Order.version + literal_column("1"), reads=5))
    assert {row[1:] for row in rows(session, Order.title, Order.reads, Order.version)} == {(5, 3)}
    orders[0].title = "mine"
    with pytest.raises((StaleObject, ValueError)):
        session.commit()


@pytest.mark.parametrize("key", [Code.version, Code.__table__.c.row_version, "row_version"], ids=str)
def test_upsert_may_name_the_version_by_its_attribute_or_its_column(session, key):
    made(session, Code(kind="a", code="x"))
    session.execute(upsert(session, {Code.title: "new", key: Code.version + 1}))
    assert rows(session, Code.title, Code.version) == [("new", 2)]
    with pytest.raises(NotSupported, match="has to count its version up itself"):
        session.execute(upsert(session, {key: 7}))


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("on", ["session", "connection"])
def test_upsert_compares_the_version_of_its_own_row_but_not_in_a_subquery(session, on):
    made(session, Code(kind="a", code="x"))
    executor = session.connection() if on == "connection" else session

    def write(where: Any) -> None:
        values = {"title": "new", "row_version": Code.version + 1}
        dialect = {"postgresql": postgresql, "sqlite": sqlite}[session.get_bind().dialect.name]
        insertion = dialect.insert(Code).values(kind="a", code="x")
        executor.execute(insertion.on_conflict_do_update(index_elements=["kind", "code"], set_=values, where=where))

    codes = select(Code).subquery()
    with pytest.raises(NotSupported, match="would not be compared again"):
        write(exists(select(codes.c.kind).where(codes.c.row_version == 1)))
    write(Code.version == 7)
    assert rows(session, Code.title, Code.version) == [("", 1)]
    write(Code.version == 1)
    assert rows(session, Code.title, Code.version) == [("new", 2)]


@pytest.mark.parametrize("on", ["session", "connection"])
def test_upsert_of_the_table_of_a_class_has_to_count_too(session, on):
    made(session, Code(kind="a", code="x"))
    executor = session.connection() if on == "connection" else session
    given, table = given_to(session), Code.__table__
    for values in ({"title": "new"}, {"title": given.title, "row_version": given.row_version}):
        for row in (GIVEN_ROW, [{"kind": "a", "code": "x"}]):
            with pytest.raises(
                NotSupported, match=r"an upsert of Code has to count .*Code\.__table__\.c\.row_version \+ 1"
            ):
                executor.execute(upsert(session, values, target=table, row=row))
    counted = upsert(session, title="new", row_version=table.c.row_version + 1, target=table)
    with pytest.raises(NotSupported, match="cannot set 'version'"):
        executor.execute(counted.values(row_version=5))
    executor.execute(counted)
    assert rows(session, Code.title, Code.version) == [("new", 2)]


@pytest.mark.parametrize("on", ["session", "connection"])
def test_version_among_the_parameters_of_an_upsert_of_the_table_is_refused(session, on):
    executor = session.connection() if on == "connection" else session
    counted = upsert(session, row_version=Code.__table__.c.row_version + 1, target=Code.__table__, row={})
    with pytest.raises(NotSupported, match="cannot set 'version'"):
        executor.execute(counted, [{"kind": "a", "code": "x", "row_version": 5}])


def test_upsert_of_the_table_of_a_joined_subclass_is_refused_and_one_of_a_parent_without_versions_is_not(session):
    name = session.get_bind().dialect.name

    def upsert_row(table: Any, **values: Any) -> Any:
        if name == DIALECT:
            return mysql.insert(table).values(id=1).on_duplicate_key_update(values)
        statement = {"postgresql": postgresql, "sqlite": sqlite}[name].insert(table).values(id=1)
        return statement.on_conflict_do_update(index_elements=["id"], set_=values)

    with pytest.raises(NotSupported, match="which is in the table place: update the rows one by one"):
        session.execute(upsert_row(Shop.__table__, owner="b"))
    session.execute(upsert_row(Person.__table__, name="b"))
    assert session.scalar(select(func.count(Person.id))) == 1


@pytest.mark.parametrize("on", ["session", "connection"])
@pytest.mark.parametrize(("name", "refusal"), [("account", r"Mailed\.version \+ 1"), ("mail", "in the table account")])
def test_upsert_or_replace_of_a_table_of_a_class_on_a_join_is_refused(session, on, name, refusal):
    class Separate(DeclarativeBase):
        pass

    columns = Column("version", BigInteger, nullable=False), Column("name", String(20))
    account = Table("account", Separate.metadata, Column("id", Integer, primary_key=True), *columns)
    mail = Table(
        "mail", Separate.metadata, Column("id", ForeignKey("account.id"), primary_key=True), Column("name", String(20))
    )

    class Mailed(VersionedMixin, Separate):
        __table__ = account.join(mail)
        id = column_property(account.c.id, mail.c.id)
        name = column_property(account.c.name, mail.c.name)
        __mapper_args__: ClassVar[Any] = {"version_id_col": account.c.version}

    executor, table = session.connection() if on == "connection" else session, Separate.metadata.tables[name]
    if session.get_bind().dialect.name == DIALECT:
        upsert_row = mysql.insert(table).values(id=1).on_duplicate_key_update(name="theirs")
    else:
        dialect = {"postgresql": postgresql, "sqlite": sqlite}[session.get_bind().dialect.name]
        upsert_row = (
            dialect.insert(table).values(id=1).on_conflict_do_update(index_elements=["id"], set_={"name": "theirs"})
        )
    with pytest.raises(NotSupported, match=refusal):
        executor.execute(upsert_row)
    with pytest.raises(NotSupported, match="REPLACE of Mailed"):
        executor.execute(insert(table).prefix_with("OR REPLACE").values(id=1))


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_upsert_of_the_table_of_a_child_counts_the_version_of_the_child(session, basket):
    table, key = Line.__table__, basket.lines[0].id
    dialect = {"postgresql": postgresql, "sqlite": sqlite}[session.get_bind().dialect.name]
    statement = dialect.insert(table).values(id=key)
    with pytest.raises(NotSupported, match=r"Line\.__table__\.c\.version \+ 1"):
        session.execute(statement.on_conflict_do_update(index_elements=["id"], set_={"amount": 5}))
    counted = {"amount": 5, "version": table.c.version + 1}
    session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=counted))
    assert rows(session, Line.id, Line.amount, Line.version)[0] == (key, 5, 2)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("on", ["session", "connection"])
def test_insert_or_replace_of_the_table_is_refused_too(session, on):
    executor = session.connection() if on == "connection" else session
    with pytest.raises(NotSupported, match="REPLACE of Code"):
        executor.execute(insert(Code.__table__).prefix_with("OR REPLACE").values(kind="a", code="x"))


@pytest.mark.parametrize("on", ["session", "connection"])
def test_attribute_among_the_rows_of_an_insert_of_a_table_names_the_class(session, on):
    executor = session.connection() if on == "connection" else session
    with pytest.raises(NotSupported, match=r"insert\(Order\) cannot set 'version'"):
        executor.execute(insert(Order.__table__).values([{Order.id: 90, Order.version: 5}]))
    executor.execute(insert(Order.__table__).values([{"id": 90, "version": 5}]))
    assert rows(session, Order.id, Order.version) == [(90, 5)]


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)
def test_insert_that_does_nothing_on_a_conflict_is_let_through(session):
    made(session, Code(kind="a", code="x"))
    session.execute(upsert(session))
    assert rows(session, Code.title, Code.version) == [("", 1)]


# aggregates


@pytest.fixture
def basket(session: Session) -> Basket:
    return made(session, Basket(lines=[Line(amount=1), Line(amount=2)]), Basket(name="other"))[0]


def version(session: Session, basket: Basket) -> int:
    return dict(rows(session, Basket.id, Basket.version))[basket.id]


def test_root_counts_up_once_when_children_are_added_changed_and_deleted(session, basket):
    with session.no_autoflush:
        basket.lines[0].amount = 5
        session.delete(basket.lines[1])
        basket.lines.append(Line(amount=7))
        session.add(Line(amount=8, basket_id=basket.id))
    session.flush()
    assert basket.version == version(session, basket) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda basket: setattr(basket.lines[0], "amount", 5),
        lambda basket: basket.lines.append(Line()),
        lambda basket: basket.lines.pop(),
        lambda basket: inspect(basket).session.delete(basket.lines[0]),
        lambda basket: inspect(basket).session.add(Line(basket=basket)),
        lambda basket: inspect(basket).session.add(Line(basket_id=basket.id)),
        lambda basket: setattr(basket.lines[0], "basket_id", None),
        lambda basket: basket.lines[0].notes.append(LineNote(text="x")),
    ],
)
def test_every_change_of_a_child_counts_the_root_up(session, basket, change):
    change(basket)
    session.flush()
    assert basket.version == version(session, basket) == 2


def test_child_that_moves_counts_both_roots_up(session, basket):
    other = session.scalars(select(Basket).where(Basket.name == "other")).one()
    one, two = basket.lines
    one.basket = other
    session.flush()
    assert (version(session, basket), version(session, other)) == (2, 2)
    two.basket_id = other.id
    session.flush()
    assert (version(session, basket), version(session, other)) == (3, 3)


def test_child_that_is_saved_by_itself_counts_the_root_up(session, basket):
    basket.lines[0].amount = 5
    save_with_version(session, basket.lines[0])
    assert version(session, basket) == 2
    assert basket.lines[0].version == 2


def test_root_that_is_not_loaded_is_counted_up_and_checked_by_its_row(session, basket):
    key = basket.id
    session.expunge_all()
    session.scalars(select(Line)).first().amount = 5
    session.flush()
    assert dict(rows(session, Basket.id, Basket.version))[key] == 2


def test_stale_root_refuses_the_change_of_its_child(session, basket):
    assert basket.lines
    session.commit()
    with session.get_bind().begin() as connection:
        connection.execute(text("UPDATE basket SET version = 9"))
    basket.lines[0].amount = 5
    with pytest.raises(StaleObject) as caught:
        session.flush()
    assert (caught.value.instance, caught.value.found) == (basket, 9)


def test_deleted_root_takes_its_children_along(session, basket):
    session.delete(basket)
    session.commit()
    assert rows(session, Line.id) == []


class Apart(DeclarativeBase):
    """The base of classes that are refused: what is left of them must not affect the others."""


def test_child_without_a_way_back_is_refused():
    class Plank(Apart):
        __tablename__ = "plank"
        id: Mapped[int] = mapped_column(primary_key=True)
        crate_id: Mapped[int] = mapped_column(ForeignKey("crate.id"))

    class Crate(VersionedMixin, Apart):
        __tablename__ = "crate"
        __version_children__ = ("boards",)
        id: Mapped[int] = mapped_column(primary_key=True)
        planks: Mapped[list[Plank]] = relationship()

    try:
        with pytest.raises(ArgumentError, match="Crate has no relationship 'boards'"):
            Apart.registry.configure()
        Crate.__version_children__ = ("planks",)
        with Session() as session, pytest.raises(ArgumentError, match="needs back_populates"):
            session.add(Crate())
            session.flush()
    finally:
        aggregates._unresolved_roots.clear()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
@pytest.mark.parametrize("where", [func.rand() < 0.5, func.mod(func.crc32(func.uuid()), 2) == 0], ids=["rand", "uuid"])
def test_update_whose_condition_changes_its_answer_counts_no_instance_of_which_the_row_was_not_written(session, where):
    """MariaDB has no UPDATE ... RETURNING, and finds other rows with the SELECT before it than with the UPDATE."""
    orders = made(session, *[Order(title=str(number)) for number in range(40)])
    session.execute(update(Order).where(where).values(reads=5))
    session.commit()
    written = dict(rows(session, Order.id, Order.version))
    session.commit()
    assert [each.id for each in orders if each.version > written[each.id]] == []
    assert {each.reads for each in orders if each.version == written[each.id] == 2} <= {5}
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1 WHERE version = 1")
    for each in orders:
        if written[each.id] == 1:
            each.title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_update_whose_subquery_reads_a_snapshot_in_select_only_counts_what_it_wrote(session, orders):
    """A subquery of SELECT ... FOR UPDATE reads the snapshot of the transaction, and one of an UPDATE what is there now."""
    made(session, Person(id=orders[0].id, name="vip"))
    rows(session, Person.name)  # At REPEATABLE READ this takes the snapshot.
    with session.get_bind().begin() as other:
        other.execute(text("UPDATE person SET name = 'gone'"))
    session.execute(update(Order).where(Order.id.in_(select(Person.id).where(Person.name == "vip"))).values(reads=5))
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1 WHERE title = 'a'")
    orders[0].title = "mine"
    with pytest.raises(StaleObject):
        session.commit()


def with_extension(statement: Any) -> Any:
    """Add the LIMIT as SQLAlchemy 2.1 spells it."""
    if not hasattr(mysql, "limit"):
        pytest.skip("before SQLAlchemy 2.1")
    return statement.ext(mysql.limit(1))


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    "fewer",
    [
        lambda statement: statement.with_dialect_options(mysql_limit=1, mariadb_limit=1),
        with_extension,
        lambda statement: statement.prefix_with("IGNORE"),
    ],
    ids=["limit", "extension", "ignore"],
)
def test_update_that_may_write_fewer_rows_than_it_matches_leaves_instances_stale(session, orders, fewer):
    session.execute(fewer(update(Order).values(reads=5)))
    session.commit()
    elsewhere(session, "UPDATE orders SET version = version + 1 WHERE version = 1")
    for each in orders:
        each.title = "mine"
    with pytest.raises(StaleObject):
        session.commit()
