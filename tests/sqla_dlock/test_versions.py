"""The promises of VersionedMixin, save_with_version, delete_with_version and touch."""

import pickle
import weakref
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, inspect, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    defer,
    load_only,
    mapped_column,
    scoped_session,
    sessionmaker,
)
from sqlalchemy.orm.exc import StaleDataError

from dlock_core import errors as core
from dlock_core.transactions.retry import is_conflict
from sqla_dlock.versions import (
    StaleObject,
    VersionedMixin,
    adelete_with_version,
    asave_with_version,
    atouch,
    delete_with_version,
    save_with_version,
    touch,
)
from tests import processes
from tests.garbage import collect_garbage
from tests.sqla_dlock.engines import new_engine
from tests.sqla_dlock.models import Counter
from tests.sqla_dlock.version_models import Card, Code, Draft, Member, Named, Order, Park, Person, Place, Shop

ONE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


@pytest.fixture
def order(session: Session) -> Order:
    return made(session, Order(title="old"))


def made(session: Session, instance: Any) -> Any:
    """Commit an instance, and return it as it was read in a transaction that is over."""
    session.add(instance)
    session.commit()
    session.refresh(instance)
    session.commit()
    return instance


def elsewhere(session: Session, sql: str) -> int:
    """Let another session run a statement, and commit."""
    assert not session.in_transaction()
    with session.get_bind().engine.begin() as connection:
        return connection.execute(text(sql)).rowcount


def move(session: Session) -> None:
    """Let another session write all orders."""
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1")


def row(session: Session, what: Any = (Order.title, Order.version)) -> tuple[Any, ...] | None:
    """Return what the database has, bypassing the identity map."""
    found = session.connection().execute(select(*what)).first()
    return found and tuple(found)


# one UPDATE


def test_new_row_has_version_1(session, order):
    assert order.version == row(session)[1] == 1


def test_each_save_counts_one_up(session, order):
    for number in (2, 3, 4):
        order.reads += 1
        save_with_version(session, order)
        assert order.version == row(session)[1] == number


def test_each_flush_counts_one_up(session, order):
    for number in (2, 3):
        order.reads += 1
        session.flush()
        assert order.version == row(session)[1] == number


def test_flushes_of_one_row_share_a_statement_that_is_built_once(session, engine, order):
    sent: list[Any] = []

    @event.listens_for(engine, "before_execute")
    def note(connection: Any, statement: Any, *_: object) -> None:
        sent.append(statement)

    for _ in range(2):
        order.reads += 1
        session.flush()
    event.remove(engine, "before_execute", note)
    first, second = (statement for statement in sent if statement.is_dml)
    assert first is second


def test_success_is_one_statement(session, order, statements):
    order.title = "new"
    save_with_version(session, order)
    assert [word for word in statements if word != "BEGIN"] == ["UPDATE"]
    assert row(session) == ("new", 2)


def test_conflict_is_two_statements(session, order, statements):
    move(session)
    del statements[:]
    order.title = "ours"
    with pytest.raises(StaleObject):
        save_with_version(session, order)
    assert [word for word in statements if word != "BEGIN"] == ["UPDATE", "SELECT"]


def test_save_writes_only_its_instance(session, order):
    other = made(session, Order(title="other"))
    order.title, other.title = "new", "new, too"
    save_with_version(session, order)
    assert session.connection().execute(select(Order.title).order_by(Order.id)).scalars().all() == ["new", "other"]
    session.commit()
    assert session.connection().execute(select(Order.title).order_by(Order.id)).scalars().all() == ["new", "new, too"]
    assert (order.version, other.version) == (2, 2)


def test_save_commits_nothing_and_gives_nothing(session, order):
    order.title = "new"
    assert save_with_version(session, order) is None
    session.rollback()
    assert row(session) == ("old", 1)


def test_save_without_changes_sends_nothing(session, order, statements):
    save_with_version(session, order)
    order.title = order.title + ""
    save_with_version(session, order)
    assert statements == []


def test_second_of_two_savers_is_refused_and_told_what_was_found(session, order):
    move(session)
    order.title = "ours"
    with pytest.raises(StaleObject, match="read it again and retry") as caught:
        save_with_version(session, order)
    error = caught.value
    assert (error.instance, error.expected, error.found, error.action) == (order, 1, 2, "save")
    assert error.name == f"Order({order.id})"
    assert row(session) == ("theirs", 2)


@pytest.mark.parametrize("how", [Session.flush, Session.commit])
def test_flush_and_commit_check_and_count_too(session, order, how):
    move(session)
    order.title = "ours"
    with pytest.raises(StaleObject) as caught:
        how(session)
    error = caught.value
    assert (error.instance, error.expected, error.found, error.action) == (order, 1, 2, "save")
    session.rollback()
    assert row(session) == ("theirs", 2)


def test_error_is_the_core_s_and_sqlalchemy_s_and_pickles(session, order):
    move(session)
    order.title = "ours"
    with pytest.raises(StaleDataError) as caught:
        session.flush()
    assert isinstance(caught.value, core.StaleObject)
    assert is_conflict(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.expected, copy.found) == (str(caught.value), 1, 2)
    assert "Order(" in str(copy)


def test_failed_flush_has_to_be_rolled_back_as_ever(session, order):
    move(session)
    order.title = "ours"
    with pytest.raises(StaleObject):
        session.flush()
    with pytest.raises(PendingRollbackError):
        session.execute(select(Order))
    session.rollback()
    assert order.title == "theirs"


def test_refused_save_leaves_the_transaction_usable_and_the_changes_in_place(session, order):
    move(session)
    session.connection().execute(insert(Counter).values(name="before"))
    order.title = "ours"
    with pytest.raises(StaleObject):
        save_with_version(session, order)
    assert (order.title, order.version) == ("ours", 1)
    assert order in session.dirty
    assert inspect(order).attrs.title.history.deleted == ["old"]
    session.expunge(order)
    session.add(Counter(name="after"))
    session.commit()
    assert session.scalars(select(Counter.name).order_by(Counter.name)).all() == ["after", "before"]


def test_second_save_after_a_conflict_conflicts_again(session, order):
    move(session)
    order.title = "ours"
    for _ in range(3):
        with pytest.raises(StaleObject):
            save_with_version(session, order)
    assert order.version == 1


def test_reading_again_cures_a_conflict(session, order):
    move(session)
    order.title = "ours"
    with pytest.raises(StaleObject):
        save_with_version(session, order)
    session.refresh(order)
    order.title = "ours"
    save_with_version(session, order)
    assert row(session) == ("ours", 3)
    assert order.version == 3


@pytest.mark.parametrize("write", [save_with_version, Session.flush])
def test_every_one_of_many_rows_may_be_the_stale_one(session, write):
    orders = [made(session, Order(title=title)) for title in "abcde"]
    elsewhere(session, f"UPDATE orders SET version = version + 1 WHERE id = {orders[3].id}")
    for each in orders:
        each.reads = 9
    with pytest.raises(StaleObject) as caught:
        session.flush() if write is Session.flush else [write(session, each) for each in orders]
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (orders[3], 1, 2)


# columns that the database or the class sets with every UPDATE


@pytest.mark.parametrize("write", [save_with_version, lambda session, _: session.flush()])
def test_what_an_update_sets_by_itself_shows_in_the_instance(session, order, write):
    order.title = "new"
    write(session, order)
    assert (order.edited, order.seen) == (7, 2)
    assert row(session, (Order.edited, Order.seen)) == (7, 2)


@pytest.mark.parametrize("write", [save_with_version, lambda session, _: session.flush()])
def test_column_of_any_name_gets_its_own_value_and_a_default_sees_it(session, write):
    rows = [made(session, Named()) for _ in range(2)]
    names = ["expected", "key0", "dlock_expected", "dlock0", "first"]
    for number, each in enumerate(rows):
        for value, name in enumerate(names, start=10 * (number + 1)):
            setattr(each, name, value)
    for each in rows:
        write(session, each)
    columns = [getattr(Named, name) for name in (*names, "double", "version")]
    found = session.connection().execute(select(*columns).order_by(Named.id))
    assert [tuple(each) for each in found] == [(10, 11, 12, 13, 14, 28, 2), (20, 21, 22, 23, 24, 48, 2)]
    assert [(each.double, each.version) for each in rows] == [(28, 2), (48, 2)]


def test_expression_is_computed_by_the_database_and_counted(session, order):
    order.reads = Order.reads + 10
    save_with_version(session, order)
    assert (order.reads, order.version) == (10, 2)
    assert row(session, (Order.reads, Order.version)) == (10, 2)


# an expected version


def test_expected_version_is_compared_before_anything_is_sent(session, order, statements):
    order.title = "new"
    with pytest.raises(StaleObject) as caught:
        save_with_version(session, order, expected=7)
    assert (caught.value.expected, caught.value.found) == (7, 1)
    with pytest.raises(StaleObject):
        delete_with_version(session, order, expected=7)
    assert statements == []
    save_with_version(session, order, expected=1)
    assert row(session) == ("new", 2)


@pytest.mark.parametrize("write", [save_with_version, delete_with_version])
def test_expected_version_that_is_text_is_no_conflict_but_a_mistake(session, order, write, statements):
    with pytest.raises(TypeError, match="the expected version is a number, as versions of Order are, not '1'"):
        write(session, order, expected="1")
    assert statements == []


# rows that are gone, rows that are new


@pytest.mark.parametrize("write", [save_with_version, lambda session, _: session.flush()])
def test_row_deleted_meanwhile_is_never_inserted_again(session, order, write):
    elsewhere(session, "DELETE FROM orders")
    order.title = "ours"
    with pytest.raises(StaleObject, match="the row is gone") as caught:
        write(session, order)
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (order, 1, None)
    session.rollback()
    assert row(session) is None


def test_row_of_an_expired_instance_that_is_gone_is_a_conflict(session, order):
    session.expire(order)
    elsewhere(session, "DELETE FROM orders")
    with pytest.raises(StaleObject, match="gone"):
        save_with_version(session, order)


def test_new_instance_is_inserted(session):
    order = Order(title="new")
    session.add(order)
    save_with_version(session, order)
    assert order.version == row(session)[1] == 1


# delete


@pytest.mark.parametrize("how", ["delete_with_version", "flush"])
def test_stale_delete_is_refused(session, order, how):
    move(session)
    with pytest.raises(StaleObject) as caught:
        delete(session, order, how)
    assert (caught.value.instance, caught.value.action) == (order, "delete")
    assert (caught.value.expected, caught.value.found) == (1, 2)
    session.rollback()
    assert row(session) == ("theirs", 2)


def delete(session: Session, instance: Any, how: str) -> None:
    if how == "flush":
        session.delete(instance)
        session.flush()
    else:
        delete_with_version(session, instance)


def test_fresh_delete_deletes(session, order):
    delete_with_version(session, order)
    session.commit()
    assert row(session) is None


@pytest.mark.parametrize("how", ["delete_with_version", "flush"])
def test_second_delete_of_a_row_is_refused(session, order, how):
    elsewhere(session, "DELETE FROM orders")
    with pytest.raises(StaleObject, match="gone"):
        delete(session, order, how)


def test_refused_delete_leaves_the_transaction_usable_and_the_instance_alive(session, order):
    move(session)
    with pytest.raises(StaleObject):
        delete_with_version(session, order)
    assert order not in session.deleted
    session.add(Counter(name="after"))
    session.commit()
    assert row(session) == ("theirs", 2)


@pytest.mark.parametrize(
    "harm", ["UPDATE orders SET version = version + 1 WHERE id = {}", "DELETE FROM orders WHERE id = {}"]
)
def test_stale_one_of_several_deletes_is_found(session, harm):
    orders = [made(session, Order(title=title)) for title in "abc"]
    elsewhere(session, harm.format(orders[1].id))
    for each in orders:
        session.delete(each)
    with pytest.raises(StaleObject) as caught:
        session.flush()
    assert caught.value.instance is orders[1]


# rollback


def test_version_in_memory_is_the_database_s_after_a_rollback(session, order):
    for title in ("new", "newer"):
        order.title = title
        save_with_version(session, order)
    assert order.version == 3
    session.rollback()
    assert (order.title, order.version) == row(session) == ("old", 1)
    order.title = "new"
    save_with_version(session, order)
    assert order.version == row(session)[1] == 2


@pytest.mark.parametrize("write", [save_with_version, lambda session, _: session.flush()])
def test_version_in_memory_is_the_database_s_after_a_savepoint_is_rolled_back(session, order, write):
    order.title = "outer"
    write(session, order)
    savepoint = session.begin_nested()
    order.title = "inner"
    write(session, order)
    with session.begin_nested():
        order.title = "innermost"
        write(session, order)
    assert order.version == 4
    savepoint.rollback()
    assert (order.title, order.version) == row(session) == ("outer", 2)
    order.title = "next"
    write(session, order)
    session.commit()
    assert (order.title, order.version) == row(session) == ("next", 3)


def test_savepoint_that_is_released_keeps_the_version(session, order):
    with session.begin_nested():
        order.title = "inner"
        save_with_version(session, order)
    session.commit()
    assert (order.title, order.version) == row(session) == ("inner", 2)


# force


def test_touch_counts_up_once_per_flush_although_nothing_changes(session, order):
    touch(session, order)
    touch(session, order)
    session.flush()
    assert order.version == row(session)[1] == 2
    touch(session, order)
    order.title = "new"
    save_with_version(session, order)
    assert (order.title, order.version) == row(session) == ("new", 3)


def test_touch_is_checked(session, order):
    move(session)
    touch(session, order)
    with pytest.raises(StaleObject) as caught:
        session.flush()
    assert (caught.value.expected, caught.value.found) == (1, 2)


def test_touch_of_an_instance_that_was_expired(session, order):
    move(session)
    session.expire(order)
    touch(session, order)
    session.commit()
    assert order.version == row(session)[1] == 3


# kinds of classes


def test_key_of_two_columns_and_column_of_another_name(session):
    codes = [made(session, Code(kind="a", code=code)) for code in "xyz"]
    elsewhere(session, "UPDATE code SET row_version = 5 WHERE code = 'y'")
    codes[0].title = "new"
    save_with_version(session, codes[0])
    assert codes[0].version == 2
    for each in codes:
        each.title = "newer"
    with pytest.raises(StaleObject, match=r"Code\(\('a', 'y'\)\) at version 1: the row has version 5") as caught:
        session.flush()
    assert caught.value.instance is codes[1]


def test_version_may_have_another_name(session):
    draft = made(session, Draft(title="a"))
    draft.title = "b"
    save_with_version(session, draft)
    assert draft.revision == draft.version == 2
    session.commit()
    elsewhere(session, "UPDATE draft SET revision = 7")
    draft.title = "c"
    with pytest.raises(StaleObject):
        save_with_version(session, draft)
    assert "version" not in inspect(Draft).columns


@pytest.mark.parametrize("values", [{"owner": "b"}, {"name": "b"}])
@pytest.mark.parametrize("write", [save_with_version, lambda session, _: session.flush()])
def test_version_inherited_from_another_table_counts_when_only_one_of_them_is_written(session, values, write):
    shop = made(session, Shop(name="corner", owner="a"))
    for name, value in values.items():
        setattr(shop, name, value)
    write(session, shop)
    assert shop.version == row(session, [Place.version])[0] == 2
    session.commit()
    elsewhere(session, "UPDATE place SET version = 5")
    for name in values:
        setattr(shop, name, "c")
    with pytest.raises(StaleObject) as caught:
        write(session, shop)
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (shop, 2, 5)


def test_class_in_the_table_of_its_parent_is_checked(session):
    park = made(session, Park(name="green", trees=3))
    park.trees = 4
    save_with_version(session, park)
    assert park.version == 2
    session.commit()
    elsewhere(session, "UPDATE place SET version = 5")
    with pytest.raises(StaleObject):
        delete_with_version(session, park)


@pytest.mark.parametrize("name", ["name", "grade"])
def test_version_next_to_a_parent_without_one(session, name):
    member = made(session, Member(name="a", grade=1))
    setattr(member, name, 5)
    save_with_version(session, member)
    assert member.version == row(session, [Member.__table__.c.version])[0] == 2
    session.commit()
    elsewhere(session, "UPDATE member SET version = 5")
    setattr(member, name, 6)
    with pytest.raises(StaleObject):
        save_with_version(session, member)
    session.rollback()
    delete_with_version(session, member)
    assert row(session, [Person.id]) is None


def test_dataclass_has_a_version_but_not_among_its_arguments(session):
    card = made(session, Card("a"))
    card.title = "b"
    save_with_version(session, card)
    assert card.version == 2
    with pytest.raises(TypeError):
        Card("a", version=3)


def test_listeners_of_a_class_see_its_saves(session, order):
    seen = []

    def note(mapper: Any, connection: Any, target: Order) -> None:
        seen.append((target.title, target.version))

    event.listen(Order, "after_update", note)
    try:
        order.title = "new"
        save_with_version(session, order)
    finally:
        event.remove(Order, "after_update", note)
    assert seen == [("new", 2)]


@pytest.mark.parametrize("name", ["before_flush", "after_flush", "after_flush_postexec"])
def test_listeners_of_a_session_see_its_saves(session, order, name):
    seen = []
    event.listen(session, name, lambda *_: seen.append(name))
    order.title = "new"
    save_with_version(session, order)
    assert seen == [name]


def test_save_that_needs_a_flush_checks_everything_first(session, order):
    shop = made(session, Shop(name="corner"))
    move(session)
    shop.owner, order.title = "new", "ours"
    with pytest.raises(StaleObject) as caught:
        save_with_version(session, shop)
    assert caught.value.instance is order
    assert (shop.owner, order.title) == ("new", "ours")
    session.refresh(order)
    save_with_version(session, shop)
    session.commit()
    assert row(session, [Shop.__table__.c.owner]) == ("new",)


# mappings that would silently not work


class Apart(DeclarativeBase):
    """The base of classes that are refused: what is left of them must not affect the others."""


def test_mixin_behind_the_base_is_refused():
    with pytest.raises(ArgumentError, match="VersionedMixin comes before the declarative base"):

        class Behind(Apart, VersionedMixin):
            __tablename__ = "behind"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_imperative_mapping_names_its_column():
    from sqlalchemy import Column, Integer, Table
    from sqlalchemy.orm import registry

    class Bare(VersionedMixin):
        pass

    mappings = registry()
    table = Table("bare", mappings.metadata, Column("id", Integer, primary_key=True), Column("version", Integer))
    with pytest.raises(ArgumentError, match="version_id_col=table"):
        mappings.map_imperatively(Bare, table)
    mappings.dispose()


def test_deferred_column_of_the_version_is_refused():
    with pytest.raises(ArgumentError, match="deferred"):

        class Deferred(VersionedMixin, Apart):
            __tablename__ = "deferred"
            id: Mapped[int] = mapped_column(primary_key=True)
            version: Mapped[int] = mapped_column(deferred=True)


# bad input


@pytest.mark.parametrize("options", [defer(Order.version), load_only(Order.title)])
@pytest.mark.parametrize("write", [save_with_version, delete_with_version, lambda session, _: session.flush()])
def test_deferred_version_is_refused_because_reading_it_now_would_make_the_check_void(session, order, options, write):
    session.expunge_all()
    part = session.scalars(select(Order).options(options)).one()
    session.commit()
    move(session)
    part.title = "ours"
    with pytest.raises(ValueError, match="'version' of Order was deferred"):
        write(session, part)
    session.rollback()
    assert row(session) == ("theirs", 2)


FUNCTIONS = [save_with_version, delete_with_version, touch]
ATWINS = [asave_with_version, adelete_with_version, atouch]


@ONE
@pytest.mark.parametrize("function", FUNCTIONS)
def test_instance_has_to_be_in_the_session(session, order, function):
    with pytest.raises(ValueError, match="is in no session"):
        function(session, Order())
    with Session(session.get_bind()) as other, pytest.raises(ValueError, match="belongs to another session"):
        function(other, order)
    session.close()
    with pytest.raises(ValueError, match="is in no session"):
        function(session, order)


@ONE
@pytest.mark.parametrize("function", FUNCTIONS)
def test_instance_marked_as_deleted_is_refused(session, order, function):
    session.delete(order)
    with pytest.raises(ValueError, match="marked as deleted"):
        function(session, order)


@ONE
@pytest.mark.parametrize("function", FUNCTIONS)
def test_class_has_to_be_mapped_and_versioned(session, function):
    with pytest.raises(TypeError, match="Counter has no version: add VersionedMixin"):
        function(session, made(session, Counter()))
    for what in (None, 42, Order):
        with pytest.raises(TypeError, match="an instance of a mapped class is needed"):
            function(session, what)


@ONE
@pytest.mark.parametrize("function", FUNCTIONS)
def test_async_session_in_a_sync_function_is_a_type_error(session, order, function):
    with pytest.raises(TypeError, match=f"use a{function.__name__}"):
        function(AsyncSession(), order)
    with pytest.raises(TypeError, match="a Session is needed"):
        function(order, session)


@ONE
@pytest.mark.parametrize("function", ATWINS)
async def test_sync_session_in_an_async_function_is_a_type_error(session, order, function):
    with pytest.raises(TypeError, match=f"use {function.__name__[1:]}"):
        await function(session, order)


@ONE
def test_closed_session_of_2_1_s_kind_says_so(engine, order):
    session = Session(engine, close_resets_only=False)
    again = session.get_one(Order, order.id)
    session.close()
    with pytest.raises(ValueError, match="is in no session"):
        save_with_version(session, again)


@ONE
def test_scoped_session_is_a_session(engine, order):
    scoped = scoped_session(sessionmaker(engine))
    again = scoped.get_one(Order, order.id)
    again.title = "new"
    save_with_version(scoped, again)
    assert row(scoped())[1] == 2
    scoped.remove()


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_error_of_a_read_only_database_passes(session, order):
    session.execute(text("SET TRANSACTION READ ONLY"))
    order.title = "new"
    with pytest.raises(DBAPIError, match="read-only"):
        save_with_version(session, order)
    assert order.title == "new"


@ONE
def test_core_statements_pass_by(session, order):
    orders = Order.__table__
    guarded = orders.update().where(orders.c.id == order.id, orders.c.version == 99).values(title="new")
    assert session.execute(guarded).rowcount == 0
    order.title = "newer"
    session.flush()
    assert session.execute(guarded).rowcount == 0


# snapshots


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("write", [save_with_version, delete_with_version, lambda session, _: session.flush()])
def test_conflict_under_a_snapshot_of_postgresql_is_its_own_error_and_nothing_is_lost(engine, order, level, write):
    with Session(engine.execution_options(isolation_level=level)) as session:
        mine = session.get_one(Order, order.id)
        with engine.begin() as connection:
            connection.execute(text("UPDATE orders SET title = 'theirs', version = 2"))
        mine.title = "ours"
        with pytest.raises(DBAPIError) as caught:
            write(session, mine)
        assert is_conflict(caught.value)
        session.rollback()
        assert row(session) == ("theirs", 2)


@pytest.mark.parametrize("engine", ["mariadb", "pymysql"], indirect=True)
def test_conflict_under_a_snapshot_of_mariadb_tells_the_committed_version(engine, order):
    """At REPEATABLE READ, a plain SELECT would return the version that the UPDATE did not find."""
    with Session(engine) as session:
        mine = session.get_one(Order, order.id)
        with engine.begin() as connection:
            connection.execute(text("UPDATE orders SET title = 'theirs', version = 2"))
        mine.title = "ours"
        with pytest.raises(StaleObject) as caught:
            save_with_version(session, mine)
        assert caught.value.found == 2


# asyncio


async def test_async_twins_save_touch_and_delete(async_engine: AsyncEngine):
    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        orders = [Order(title=title) for title in "abc"]
        session.add_all(orders)
        await session.commit()
        for each in orders:
            await session.refresh(each)
        order = orders[0]
        order.title = "new"
        await asave_with_version(session, order)
        await atouch(session, order)
        await session.commit()
        assert order.version == 3
        async with async_engine.begin() as other:
            await other.execute(text("UPDATE orders SET version = version + 1 WHERE title != 'c'"))
        order.title = "ours"
        with pytest.raises(StaleObject) as caught:
            await asave_with_version(session, order)
        assert (caught.value.instance, caught.value.expected, caught.value.found) == (order, 3, 4)
        with pytest.raises(StaleObject):
            await adelete_with_version(session, order)
        assert order.title == "ours"
        await session.refresh(order)
        await adelete_with_version(session, order)
        await session.commit()
        assert (await session.scalars(select(Order.title).order_by(Order.title))).all() == ["b", "c"]


@pytest.mark.parametrize("action", ["save", "delete"])
async def test_async_flush_of_many_finds_the_stale_one(async_engine: AsyncEngine, action):
    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        orders = [Order(title=title) for title in "abcde"]
        session.add_all(orders)
        await session.commit()
        async with async_engine.begin() as other:
            await other.execute(text("UPDATE orders SET version = 2 WHERE title = 'd'"))
        for each in orders:
            if action == "save":
                each.reads = 3
            else:
                await session.delete(each)
        with pytest.raises(StaleObject) as caught:
            await session.flush()
        error = caught.value
        assert (error.instance, error.expected, error.found, error.action) == (orders[3], 1, 2, action)
        await session.rollback()
        await session.refresh(orders[3])


# many writers


def by_hand(session: Session, order: Order) -> None:
    orders = Order.__table__
    reads = order.reads
    session.expunge(order)
    session.execute(orders.update().where(orders.c.id == order.id).values(reads=reads))


WRITES = {"with version": save_with_version, "flush": lambda session, _: session.flush(), "without": by_hand}


def increment(link: processes.Link, name: str, key: int, times: int, write: str, meet: bool) -> None:
    """Increment `times` times, starting over after a conflict; `meet`: wait for the test after the first read."""
    engine = new_engine(name)
    for _ in range(times):
        while True:
            with Session(engine, expire_on_commit=False, autoflush=False) as session:
                order = session.get_one(Order, key)
                session.commit()
                if meet:
                    link.say("read")
                    link.hear()
                    meet = False
                order.reads += 1
                try:
                    WRITES[write](session, order)
                    session.commit()
                    break
                except StaleObject:
                    continue
    engine.dispose()


NAMES = pytest.mark.parametrize(
    ("engine", "name"), [(name, name) for name in ("sqlite", "postgresql", "mariadb")], indirect=["engine"]
)


@NAMES
@pytest.mark.parametrize("write", ["with version", "flush"])
def test_no_update_of_several_processes_is_lost(session, order, name, write):
    processes.run(increment, [(name, order.id, 25, write, False)] * 4)
    assert row(session, (Order.reads, Order.version)) == (100, 101)


@NAMES
@pytest.mark.parametrize(("write", "expected"), [("with version", 2), ("flush", 2), ("without", 1)])
def test_two_who_read_before_either_wrote_lose_an_update_only_without_a_version(session, order, name, write, expected):
    call = (increment, name, order.id, 1, write, True)
    with processes.worker(*call) as one, processes.worker(*call) as other:
        for each in (one, other):
            assert each.hear() == "read"
        for each in (one, other):
            each.say("write")
        for each in (one, other):
            each.result()
    assert row(session, [Order.reads]) == (expected,)


@ONE
def test_session_whose_flush_was_refused_by_a_listener_is_not_kept_alive(engine: Engine) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not like this")

    session = Session(engine)
    event.listen(session, "before_flush", refuse)
    session.add(Order(title="new"))
    with pytest.raises(ValueError, match="not like this"):
        session.flush()
    session.close()
    known = weakref.ref(session)
    del session
    collect_garbage()
    assert known() is None
