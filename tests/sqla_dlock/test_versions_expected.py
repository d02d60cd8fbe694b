"""The promises of a version that the caller assigns, of one that was read late, and of rows that are made anew."""

from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, ClassVar, Final
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    DateTime,
    LargeBinary,
    Numeric,
    StaticPool,
    String,
    Uuid,
    create_engine,
    delete,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, defer, load_only, mapped_column
from sqlalchemy.orm.attributes import flag_modified
from sqlalchemy.orm.exc import StaleDataError

from sqla_dlock.preconditions import etag_of
from sqla_dlock.rows import lock_row
from sqla_dlock.versions import (
    StaleObject,
    VersionedMixin,
    adelete_with_version,
    asave_with_version,
    delete_with_version,
    mapping,
    save_with_version,
    touch,
)
from tests.sqla_dlock.version_models import Code, Counted, Document, Draft, Member, Numbered, Order, Shop


def elsewhere(session: Session, sql: str) -> None:
    """Let another session run a statement, and commit."""
    assert not session.in_transaction()
    with session.get_bind().engine.begin() as connection:
        connection.execute(text(sql))


def row(session: Session) -> tuple[Any, ...] | None:
    found = session.connection().execute(select(Order.title, Order.version)).first()
    return found and tuple(found)


def flush(session: Session, instance: Any) -> None:
    session.flush()


def mark_and_flush(session: Session, instance: Any) -> None:
    session.delete(instance)
    session.flush()


def touch_and_flush(session: Session, instance: Any) -> None:
    touch(session, instance)
    session.flush()


WRITES = pytest.mark.parametrize("write", [save_with_version, flush])
ALL_WRITES = pytest.mark.parametrize(
    "write", [save_with_version, delete_with_version, flush, mark_and_flush, touch_and_flush]
)

# a version that is assigned


@ALL_WRITES
def test_assigned_version_is_the_one_that_the_caller_expects(session, order, write):
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = 4")
    session.refresh(order)
    for name, value in {"title": "from a page that showed version 1", "version": 1}.items():
        setattr(order, name, value)
    with pytest.raises(StaleObject) as caught:
        write(session, order)
    assert (caught.value.expected, caught.value.found) == (1, 4)
    session.rollback()
    assert row(session) == ("theirs", 4)


@WRITES
def test_assigned_version_that_is_right_is_checked_and_counted_as_ever(session, order, write):
    for number in (2, 3):
        order.version, order.title = number - 1, f"new {number}"
        write(session, order)
        assert (order.title, order.version) == row(session) == (f"new {number}", number)
    order.version = 3
    write(session, order)
    assert row(session) == ("new 3", 3)  # there was nothing to write


@WRITES
def test_assigned_version_is_never_written(session, order, write):
    for version in (2, 7, 0, -1):
        order.version, order.title = version, "new"
        with pytest.raises(StaleObject) as caught:
            write(session, order)
        assert (caught.value.expected, caught.value.found) == (version, 1)
        session.rollback()
        assert row(session) == ("old", 1)
        session.commit()


def test_save_refused_for_its_assigned_version_leaves_the_transaction_usable_and_is_refused_again(session, order):
    order.version, order.title = 7, "new"
    for _ in range(2):
        with pytest.raises(StaleObject):
            save_with_version(session, order)
    assert (order.version, order.title) == (7, "new")
    order.version = 1
    save_with_version(session, order)
    assert row(session) == ("new", 2)


def test_version_assigned_to_one_of_many_rows_is_expected_too(session):
    orders = [Order(title=title) for title in "abc"]
    session.add_all(orders)
    session.commit()
    for each in orders:
        each.title += "!"
    orders[1].version = 7
    with pytest.raises(StaleObject) as caught:
        session.flush()
    assert (caught.value.instance, caught.value.expected) == (orders[1], 7)


@WRITES
@pytest.mark.parametrize("version", ["1", None, 1.5, Order.version + 1], ids=str)
def test_assigned_version_that_is_no_number_is_a_mistake(session, order, write, version):
    order.title, order.version = "new", version
    with pytest.raises(TypeError, match="the expected version is a number"):
        write(session, order)
    session.rollback()
    assert row(session) == ("old", 1)


OWN_VERSIONS: Final[dict[str, Any]] = {
    "uuid": (Uuid(), lambda _: uuid4(), str, "UUID"),
    "uuid as text": (Uuid(as_uuid=False), lambda _: str(uuid4()), UUID, "str"),
    "text": (String(32), lambda _: uuid4().hex, lambda version: version.encode(), "str"),
    "time": (DateTime(), lambda _: datetime.now(UTC).replace(tzinfo=None), datetime.isoformat, "datetime"),
    "bytes": (LargeBinary(16), lambda _: uuid4().bytes, bytearray, "bytes"),
    "decimal": (Numeric(20, 0, asdecimal=False), lambda version: (version or 0) + 1, str, "number"),
}
"""The type of a column, what makes its versions, another spelling of one, and the type that is named."""


@pytest.mark.filterwarnings("ignore:Dialect sqlite")
@pytest.mark.parametrize(("column", "make", "spell", "kind"), OWN_VERSIONS.values(), ids=OWN_VERSIONS)
def test_expected_version_of_another_type_than_the_column_has_is_a_mistake_before_any_i_o(column, make, spell, kind):
    class Separate(DeclarativeBase):
        pass

    class Paper(VersionedMixin, Separate):
        __tablename__ = "paper"

        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")
        version: Mapped[Any] = mapped_column(column)
        __mapper_args__: ClassVar[Any] = {"version_id_col": version, "version_id_generator": make}

    engine = create_engine("sqlite://", poolclass=StaticPool)
    Separate.metadata.create_all(engine)
    sent: list[str] = []
    with Session(engine, expire_on_commit=False) as session:
        session.add(paper := Paper(id=1))
        session.commit()
        seen, wrong = paper.version, spell(paper.version)
        event.listen(engine, "before_cursor_execute", lambda *each: sent.append(each[2]))
        mistake = pytest.raises(TypeError, match=rf"the expected version is .*{kind}, as versions of Paper are, .*not ")
        with mistake:
            session.execute(update(Paper), [{"id": 1, "version": wrong, "title": "new"}])
        session.expire(paper)
        for write in (save_with_version, delete_with_version):
            with mistake:
                write(session, paper, expected=wrong)
        assert not sent
        session.refresh(paper)
        paper.title, paper.version = "new", wrong
        with mistake:
            save_with_version(session, paper)
        with mistake:
            session.flush()
        session.rollback()
        session.execute(update(Paper), [{"id": 1, "version": seen, "title": "new"}])
        paper.title = "newer"
        save_with_version(session, paper, expected=paper.version)
    engine.dispose()


@WRITES
@pytest.mark.parametrize("make", [lambda: Code(kind="a", code="b"), Draft, Shop, Member])
def test_version_is_expected_in_every_shape_of_class(session, make, write):
    instance = make()
    session.add(instance)
    session.commit()
    instance.version = 7
    with pytest.raises(StaleObject) as caught:
        write(session, instance)
    assert (caught.value.expected, caught.value.found) == (7, 1)


def test_version_assigned_to_an_expired_instance_is_compared_with_the_row(session, order):
    session.expire(order)
    elsewhere(session, "UPDATE orders SET version = 4")
    order.version, order.title = 1, "ours"
    with pytest.raises(StaleObject) as caught:
        session.flush()
    assert (caught.value.expected, caught.value.found) == (1, 4)


def test_version_given_to_a_new_instance_is_not_written(session):
    session.add(order := Order(title="new", version=7))
    session.flush()
    assert order.version == row(session)[1] == 1


def test_row_that_replaces_a_deleted_one_in_the_same_flush_counts_on(session, order):
    session.delete(order)
    session.add(new := Order(id=order.id, title="new", version=7))
    session.flush()
    assert (new.version, row(session)) == (2, ("new", 2))


def test_touch_after_a_rollback_is_forgotten(session, order):
    touch(session, order)
    session.rollback()
    order.title = order.title + ""
    session.flush()
    assert row(session)[1] == 1


async def test_expected_version_that_a_payload_did_not_bring_is_refused_before_any_i_o():
    payload: dict[str, Any] = {"title": "new"}
    session = AsyncSession()
    session.add(order := Order())
    for write in (asave_with_version, adelete_with_version):
        with pytest.raises(TypeError, match="refuse a request that brings no version"):
            await write(session, order, expected=payload.get("version"))


async def test_assigned_version_is_expected_in_an_async_session(async_engine: AsyncEngine):
    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        session.add(order := Order(title="old"))
        await session.commit()
        order.version, order.title = 7, "new"
        with pytest.raises(StaleObject):
            await asave_with_version(session, order)
        with pytest.raises(StaleObject):
            await session.flush()


# a version that is read later than the rest


@ALL_WRITES
def test_version_that_is_read_later_than_the_row_is_no_check(session, order, write):
    session.expunge_all()
    part = session.scalars(select(Order).options(load_only(Order.title))).one()
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'important', version = version + 1")
    assert part.version == 2  # a template shows it
    part.title += " + mine"
    with pytest.raises(ValueError, match="'version' of Order was deferred"):
        write(session, part)
    session.rollback()
    assert row(session) == ("important", 2)


def test_version_that_a_later_query_adds_is_no_check_either(session, order):
    session.expunge_all()
    part = session.scalars(select(Order).options(load_only(Order.title))).one()
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'important', version = version + 1")
    session.scalars(select(Order)).all()
    part.title += " + mine"
    with pytest.raises(ValueError, match="was deferred"):
        session.flush()


@pytest.mark.parametrize("columns", [(Order.title,), (Order.reads,), (Order.reads, Order.version)])
@pytest.mark.parametrize("is_anew", [False, True])
def test_queries_of_some_columns_may_meet_the_same_row(session, order, columns, is_anew):
    session.expunge_all()
    part = session.scalars(select(Order).options(load_only(Order.title))).one()
    query = select(Order).options(load_only(*columns)).execution_options(populate_existing=is_anew)
    assert session.scalars(query).one() is part
    session.refresh(part, ["title", "reads"])
    assert (part.title, part.reads) == ("old", 0)
    session.expire(part)
    part.title = "new"
    session.commit()
    assert row(session) == ("new", 2)


def test_version_that_is_refreshed_alone_is_no_check_either(session, order):
    elsewhere(session, "UPDATE orders SET title = 'important', version = version + 1")
    session.refresh(order, ["version"])
    order.title += " + mine"
    with pytest.raises(ValueError, match="was deferred"):
        save_with_version(session, order)


@pytest.mark.parametrize("option", [defer(Order.title), load_only(Order.reads, Order.version)])
def test_version_that_a_query_refreshes_without_another_column_is_no_check_either(session, order, option):
    session.refresh(order)
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'important', version = version + 1")
    session.get(Order, order.id, populate_existing=True, options=[option])
    order.title += " + mine"
    with pytest.raises(ValueError, match="read later"):
        session.flush()
    session.rollback()
    assert row(session) == ("important", 2)


@pytest.mark.parametrize("is_whole", [False, True])
def test_version_that_was_left_out_twice_is_a_check_only_if_it_is_read_with_all_columns(session, order, is_whole):
    session.expunge_all()
    part = session.scalars(select(Order).options(load_only(Order.title))).one()
    session.refresh(part)  # load_only() holds for it, too
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1")
    query = select(Order).execution_options(populate_existing=True)
    session.scalars(query if is_whole else query.options(load_only(Order.reads, Order.version))).one()
    part.title += " + mine"
    with nullcontext() if is_whole else pytest.raises(ValueError, match="read later"):
        session.flush()
    session.commit() if is_whole else session.rollback()
    assert row(session) == (("theirs + mine", 3) if is_whole else ("theirs", 2))


def read_again(session, *options):
    session.scalars(select(Order).options(*options).execution_options(populate_existing=True)).one()


@pytest.mark.parametrize("option", [defer(Order.title), load_only(Order.reads), load_only(Order.reads, Order.version)])
@pytest.mark.parametrize("is_shown", [False, True])
def test_row_that_was_read_in_part_and_then_as_a_whole_can_be_saved(session, order, option, is_shown):
    session.expunge_all()
    part = session.scalars(select(Order).options(option)).one()
    if is_shown:
        assert part.title == "old"
    lock_row(session, Order, part.id)
    part.title = "new"
    session.commit()
    assert row(session) == ("new", 2)


def test_version_that_a_second_query_of_some_columns_brings_is_no_check(session, order):
    session.expunge_all()
    part = session.scalars(select(Order).options(load_only(Order.title))).one()
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1")
    read_again(session, load_only(Order.reads, Order.version))
    part.title += " + mine"
    with pytest.raises(ValueError, match="was deferred"):
        session.flush()
    session.rollback()
    assert row(session) == ("theirs", 2)


def test_version_that_a_list_brings_twice_is_no_check_of_what_was_read_between(session, order):
    some = load_only(Order.reads, Order.version)
    session.expire(order)
    read_again(session, some)
    session.expire(order)
    assert order.title == "old"
    session.commit()
    elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1")
    read_again(session, some)
    order.title += " + mine"
    with pytest.raises(ValueError, match="was deferred"):
        session.flush()
    session.rollback()
    assert row(session) == ("theirs", 2)


@pytest.mark.parametrize("write", [save_with_version, flush])
def test_column_that_was_left_out_at_first_and_loaded_or_written_since_is_read_along(session, order, write):
    whole = select(Order).execution_options(populate_existing=True)
    for use in (lambda part: part.title, lambda part: setattr(part, "title", "mine")):
        session.expunge_all()
        part = session.scalars(select(Order).options(defer(Order.title))).one()
        use(part)
        write(session, part)
        session.commit()
        elsewhere(session, "UPDATE orders SET title = 'theirs', version = version + 1")
        session.scalars(whole).one()
        part.title += " + mine"
        write(session, part)
        session.commit()
        assert row(session)[0] == "theirs + mine"
        session.commit()


def test_reading_all_again_makes_it_a_check_again(session, order):
    session.refresh(order, ["version"])
    session.refresh(order)
    order.title = "new"
    save_with_version(session, order)
    session.expire(order)
    order.title = "newer"  # before it is read
    save_with_version(session, order)
    assert row(session) == ("newer", 3)


def test_refresh_without_the_version_is_refused_also_after_a_write(session, order):
    session.expunge(order)
    order = session.scalars(select(Order).options(load_only(Order.title))).one()
    session.scalars(select(Order).execution_options(populate_existing=True)).one()
    order.title = "new"
    session.flush()
    session.refresh(order)  # load_only() holds for it, too: the title may be older than the version
    order.title = "newer"
    with pytest.raises(ValueError, match="was deferred"):
        session.flush()


@pytest.mark.parametrize("act", [save_with_version, delete_with_version, lambda _, numbered: etag_of(numbered)])
def test_version_that_is_read_late_is_no_check_without_the_mixin_either(session, act):
    session.add(numbered := Numbered(title="old"))
    session.commit()
    elsewhere(session, "UPDATE numbered SET title = 'theirs', version = 2")
    session.refresh(numbered, ["version"])
    numbered.title = "mine"
    with pytest.raises(ValueError, match="read later"):
        act(session, numbered)
    session.rollback()
    session.refresh(numbered)
    numbered.title = "mine"
    save_with_version(session, numbered)
    session.refresh(numbered, ["version"])  # the one that was just written
    numbered.title = "mine again"
    save_with_version(session, numbered)
    assert (numbered.title, numbered.version) == ("mine again", 4)


@WRITES
def test_touch_counts_up_without_the_mixin_too(session, write):
    session.add(numbered := Numbered(title="old"))
    session.commit()
    for _ in range(2):
        touch(session, numbered)
        write(session, numbered)
    session.commit()
    touch(session, numbered)
    session.rollback()
    session.refresh(numbered)
    write(session, numbered)
    assert session.scalars(select(Numbered.version)).one() == numbered.version == 3
    touch(session, numbered)
    session.commit()
    elsewhere(session, "UPDATE numbered SET version = 7")
    touch(session, numbered)
    with pytest.raises(StaleDataError):
        write(session, numbered)


def test_touch_of_a_version_that_the_database_counts_is_refused(session):
    session.add(counted := Counted(title="old"))
    session.commit()
    with pytest.raises(TypeError, match=r"the database counts the version of Counted.*change a column"):
        touch(session, counted)
    save_with_version(session, counted)


@WRITES
@pytest.mark.parametrize("is_new", [False, True])
def test_version_that_the_database_counts_is_not_late_after_a_write(session, write, is_new):
    session.add(counted := Counted(title="old"))
    if is_new:
        session.flush()
    else:
        session.commit()
    for number in (2, 3):
        counted.title = f"new {number}"
        write(session, counted)
    counted.title = "new 4"
    save_with_version(session, counted)
    session.refresh(counted, ["version"])  # the one that was just written
    counted.title = "new 5"
    save_with_version(session, counted)
    assert (counted.title, counted.version) == ("new 5", 5)


def test_version_that_the_database_counts_is_no_check_if_it_is_read_late(session):
    session.add(counted := Counted(title="old"))
    session.commit()
    counted.title = "ours"
    session.commit()
    elsewhere(session, "UPDATE counted SET title = 'theirs', version = version + 1")
    session.refresh(counted, ["version"])
    counted.title = "mine"
    with pytest.raises(ValueError, match="read later"):
        save_with_version(session, counted)


@pytest.mark.parametrize("kind", [Counted, Numbered])
def test_version_that_has_expired_alone_is_not_read_by_a_flush_of_the_instance_it_is_to_check(session, kind):
    session.add(instance := kind(title="old"))
    session.commit()
    assert instance.title == "old"
    elsewhere(session, f"UPDATE {kind.__tablename__} SET title = 'theirs', version = version + 1")
    session.expire(instance, ["version"])
    instance.title = "mine"
    with pytest.raises(ValueError, match="read later"):
        save_with_version(session, instance)


def test_version_that_a_listener_refreshes_before_the_flush_of_another_instance_is_late(session):
    session.add(counted := Counted(title="old"))
    session.commit()
    assert counted.title == "old"
    elsewhere(session, "UPDATE counted SET title = 'theirs', version = version + 1")
    listener = lambda *_: session.refresh(counted, ["version"])  # noqa: E731 - to be removed
    event.listen(session, "before_flush", listener)
    session.add(Counted(title="another"))
    session.flush()
    event.remove(session, "before_flush", listener)
    counted.title = "mine"
    with pytest.raises(ValueError, match="read later"):
        save_with_version(session, counted)


@pytest.mark.parametrize("write", [save_with_version, flush])
def test_column_that_is_changed_in_place_was_read_before_a_late_version(session, write):
    session.add(document := Document(data={"a": 1}))
    session.commit()
    elsewhere(session, f"UPDATE document SET data = '{{\"theirs\": 2}}', version = {document.version + 1}")
    document.data["mine"] = 3
    flag_modified(document, "data")
    with session.no_autoflush:
        session.refresh(document, ["version"])
    with pytest.raises(ValueError, match="read later"):
        write(session, document)


def test_column_that_is_assigned_to_an_expired_instance_was_not_read(session):
    session.add(document := Document())
    session.commit()
    for number in range(2):
        session.expire(document)
        document.data = {"mine": number}
        assert document.version
        save_with_version(session, document)
        session.commit()
    assert session.scalars(select(Document.data)).one() == {"mine": 1}


def test_etag_of_a_version_that_was_read_late_is_refused(session, order):
    session.refresh(order, ["version"])
    with pytest.raises(ValueError, match="was deferred"):
        etag_of(order)


# a row that is made anew


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let versions begin as they do outside of tests."""
    monkeypatch.undo()
    assert mapping.first_version.__module__ == "dlock_core.sql.versions"


def again(session: Session, how: str) -> None:
    order = {"id": 1, "title": "new"}
    if how == "add":
        session.add(Order(**order))
    elif how == "Core":
        session.connection().execute(insert(Order.__table__).values(order))
    elif how == "raw SQL":
        reads = session.get_bind().dialect.identifier_preparer.quote_identifier("reads")  # a reserved word in MariaDB
        session.execute(text(f"INSERT INTO orders (id, title, {reads}, edited, seen) VALUES (1, 'new', 0, 0, 0)"))
    elif how == "bulk":
        session.bulk_insert_mappings(Order, [order])
    else:
        session.execute(insert(Order), [order])


@ALL_WRITES
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("how", ["add", "Core", "raw SQL", "bulk", "insert"])
def test_row_made_anew_under_its_old_key_is_not_taken_for_the_old_one(engine, how, write):
    with Session(engine, expire_on_commit=False) as first, Session(engine) as second:
        first.add(old := Order(id=1, title="old"))
        first.commit()
        old_tag = etag_of(old)
        second.execute(delete(Order))
        again(second, how)
        second.commit()
        assert etag_of(second.get_one(Order, 1)) != old_tag
        second.commit()
        old.title = "ours"
        with pytest.raises(StaleObject):
            write(first, old)
        first.rollback()
        assert first.scalars(select(Order.title)).one() == "new"


@pytest.mark.usefixtures("clock")
def test_first_version_is_exact_in_javascript_and_fits_an_integer_column(session):
    session.add_all([order := Order(), draft := Draft()])
    session.flush()
    assert 2**50 < order.version < 2**53
    assert 0 < draft.version <= 2**30
