"""The promises of versions and row locks in sessions that do more: listeners, cascades, pending parents, replicas."""

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, ForeignKey, String, Update, bindparam, create_engine, event, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, declarative_base, mapped_column, relationship

from dlock_core.errors import NotSupported, RowLocked
from sqla_dlock.rows import lock_row, lock_rows
from sqla_dlock.versions import (
    StaleObject,
    VersionedMixin,
    asave_with_version,
    delete_with_version,
    save_with_version,
    touch,
)
from tests.sqla_dlock import conftest
from tests.sqla_dlock.engines import begin_immediate
from tests.sqla_dlock.models import ColdStock, Counter, Stock
from tests.sqla_dlock.version_models import Basket, Line, Order, Shop


class Base(DeclarativeBase):
    pass


conftest.METADATA.append(Base.metadata)


class Customer(VersionedMixin, Base):
    """Its key is made by the client."""

    __tablename__ = "sessions_customer"

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=lambda: str(uuid.uuid4()))
    name: Mapped[str] = mapped_column(String(80), default="")
    visits: Mapped[list["Visit"]] = relationship(back_populates="customer", cascade="all, delete-orphan")
    cars: Mapped[list["Car"]] = relationship()


class Visit(VersionedMixin, Base):
    __tablename__ = "sessions_visit"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(String(80), default="")
    customer_id: Mapped[str | None] = mapped_column(ForeignKey("sessions_customer.id"))
    customer: Mapped[Customer | None] = relationship(back_populates="visits")


class Car(VersionedMixin, Base):
    """It stays, without an owner, when its customer is deleted."""

    __tablename__ = "sessions_car"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[str | None] = mapped_column(ForeignKey("sessions_customer.id"))


def made(session: Session, *instances: Any) -> Any:
    session.add_all(instances)
    session.commit()
    return instances if len(instances) > 1 else instances[0]


def elsewhere(session: Session, sql: str) -> None:
    assert not session.in_transaction()
    with session.get_bind().engine.begin() as connection:
        connection.execute(text(sql))


@pytest.fixture
def listen() -> Iterator[Callable[..., None]]:
    """Listen until the test is over."""
    known: list[Any] = []

    def add(*args: Any) -> None:
        event.listen(*args)
        known.append(args)

    yield add
    for args in known:
        event.remove(*args)


# statements of listeners


def _no_row(connection: Any) -> None:
    connection.execute(Order.__table__.update().where(Order.__table__.c.id == -1).values(title="x"))


def _no_row_of_that_version(connection: Any) -> None:
    orders = Order.__table__
    connection.execute(orders.update().where(orders.c.id == -1, orders.c.version == 5).values(title="x"))


def _many(connection: Any) -> None:
    orders = Order.__table__
    connection.execute(
        orders.update().where(orders.c.id == bindparam("key")).values(reads=orders.c.reads + 1), [{"key": 1}] * 2
    )


def _delete(connection: Any) -> None:
    connection.execute(Order.__table__.delete().where(Order.__table__.c.title == "nobody's"))


def _everything(connection: Any) -> None:
    connection.execute(Order.__table__.update().values(seen=3))


@pytest.mark.parametrize("statement", [_no_row, _no_row_of_that_version, _many, _delete, _everything])
def test_listener_may_send_statements_of_its_own_in_a_flush(session, listen, statement):
    order = made(session, Order(title="old"))
    listen(Order, "after_update", lambda _mapper, connection, _target: statement(connection))
    order.title = "new"
    session.flush()
    assert (order.title, order.version) == ("new", 2)


def test_instance_that_a_listener_expunges_is_not_written(session, listen):
    orders = made(session, Order(title="a"), Order(title="b"), Order(title="c"))

    def validate(session: Session, *_: Any) -> None:
        for each in list(session.dirty):
            if each.title == "invalid":
                session.expunge(each)

    listen(session, "before_flush", validate)
    for each, title in zip(orders, ("a!", "invalid", "c!"), strict=True):
        each.title = title
    session.flush()
    found = session.connection().execute(select(Order.title, Order.version).order_by(Order.id)).all()
    assert [tuple(each) for each in found] == [("a!", 2), ("b", 1), ("c!", 2)]


@pytest.mark.parametrize("change", ["add", "edit", "delete"])
def test_root_counts_up_for_what_a_listener_changes_when_the_transaction_commits(session, listen, change):
    basket = made(session, Basket(lines=[Line(amount=1), Line(amount=2)]))

    def change_a_line(session: Session, *_: Any) -> None:
        if basket.lines and basket.name and not session.info.get("is changed"):
            session.info["is changed"] = True
            if change == "add":
                session.add(Line(amount=3, basket_id=basket.id))
            elif change == "edit":
                basket.lines[0].amount += 1
            else:
                session.delete(basket.lines[1])

    listen(session, "before_flush", change_a_line)
    other = made(session, Order())
    with session.no_autoflush:
        basket.name, other.title = "new", "new"
    session.commit()
    assert session.scalars(select(Basket.version)).one() == basket.version == 3  # its name, then its line


# cascades, pending instances


def test_save_of_a_new_instance_checks_all_that_it_writes_first_and_leaves_the_transaction_usable(session):
    order = made(session, Order(title="old"))
    elsewhere(session, "UPDATE orders SET version = version + 1")
    order.title = "ours"
    shop = Shop(name="new")
    session.add(shop)
    with pytest.raises(StaleObject) as caught:
        save_with_version(session, shop)
    assert caught.value.instance is order
    session.expunge(order)
    save_with_version(session, shop)
    session.commit()


@pytest.mark.parametrize("table", ["sessions_visit", "sessions_car"])
def test_delete_checks_what_it_takes_along_first_and_leaves_the_transaction_usable(session, table):
    customer = made(session, Customer(visits=[Visit()], cars=[Car()]))
    assert customer.visits
    assert customer.cars
    session.commit()
    elsewhere(session, f"UPDATE {table} SET version = version + 1")
    with pytest.raises(StaleObject):
        delete_with_version(session, customer)
    assert customer not in session.deleted
    session.add(Counter(name="after"))
    session.commit()
    for each in (*customer.visits, *customer.cars):
        session.refresh(each)
    delete_with_version(session, customer)
    session.commit()
    assert session.scalars(select(Customer)).all() == []


def test_child_that_leaves_its_collection_is_checked_first(session):
    customer, other = made(session, Customer(cars=[Car()]), Customer())
    car = customer.cars[0]
    session.commit()
    elsewhere(session, "UPDATE sessions_car SET version = version + 1")
    customer.cars.remove(car)
    customer.name = "new"
    with pytest.raises(StaleObject) as caught:
        save_with_version(session, customer)
    assert caught.value.instance is car
    session.add(Counter(name="after"))
    session.expunge(car)
    session.refresh(customer)
    session.commit()
    assert other.version == 1


def test_save_does_not_overtake_a_parent_that_is_to_be_inserted(session):
    visit = made(session, Visit())
    session.add(parent := Customer(id="x"))
    visit.customer_id = parent.id
    save_with_version(session, visit)
    session.commit()
    assert (visit.customer_id, visit.version) == ("x", 2)


def test_save_still_leaves_others_alone_where_it_refers_to_none_of_them(session):
    order = made(session, Order(title="old"))
    session.add(new := Counter(name="new"))
    order.title = "new"
    save_with_version(session, order)
    assert new in session.new


def test_save_counts_for_a_changed_collection(session):
    customer = made(session, Customer())
    made(session, car := Car())
    customer.cars.append(car)
    save_with_version(session, customer)
    session.commit()
    assert session.scalars(select(Customer.version)).one() == customer.version == 2


def test_update_by_primary_key_names_the_stale_row_and_leaves_the_transaction_usable(session):
    orders = made(session, Order(title="a"), Order(title="b"))
    elsewhere(session, f"UPDATE orders SET version = 5 WHERE id = {orders[1].id}")
    rows = [{"id": each.id, "title": "new", "version": each.version} for each in orders]
    with pytest.raises(StaleObject) as caught:
        session.execute(update(Order), rows)
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (orders[1], 1, 5)
    assert session.connection().execute(select(Order.title).order_by(Order.id)).scalars().all() == ["a", "b"]


# order of locks


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_flush_locks_all_its_rows_in_the_order_of_their_keys_whatever_has_changed_of_each(session, engine):
    orders = made(session, *[Order(title=str(number)) for number in range(12)])
    sent: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    for number, each in enumerate(orders):
        setattr(each, ("title", "reads", "edited")[number % 3], number + 100)
    orders[0].title = Order.title + "!"  # not written together
    for each in orders[1:]:
        each.title = str(each.title)
    session.flush()
    event.remove(engine, "before_cursor_execute", note)
    locking, *writing = sent
    assert locking.startswith("SELECT")
    assert re.search(r"ORDER BY orders\.id\s+FOR (NO KEY )?UPDATE", locking)
    assert {statement.split(maxsplit=1)[0] for statement in writing} == {"UPDATE"}
    assert {each.version for each in orders} == {2}


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_two_flushes_of_the_same_rows_do_not_deadlock(session, engine):
    keys = [each.id for each in made(session, *[Order() for _ in range(20)])]
    errors: list[BaseException] = []
    both = threading.Barrier(2)

    def write(step: int) -> None:
        try:
            with Session(engine) as own:
                orders = [own.get_one(Order, key) for key in keys]
                for number, each in enumerate(orders):
                    setattr(each, "reads" if number % 2 == step else "title", "7")
                both.wait(30)
                own.commit()
        except (StaleObject, DBAPIError) as error:
            errors.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=write, args=(step,)) for step in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [type(error) for error in errors] in ([], [StaleObject])
        errors.clear()


# sessions that send queries to a replica


class Routing(Session):
    """Reads from a replica, as in SQLAlchemy's documentation."""

    leader: Engine
    follower: Engine

    def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
        return self.leader if self._flushing or isinstance(clause, (Update, Delete)) else self.follower


class OnlyFlushing(Routing):
    def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
        return self.leader if self._flushing else self.follower


@pytest.fixture(params=[Routing, OnlyFlushing])
def routing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    """A session whose replica has the row of an order at version 1, as the leader has."""
    engines = [_sqlite(tmp_path / name) for name in ("leader", "follower")]
    request.param.leader, request.param.follower = engines
    with request.param(expire_on_commit=False) as session:
        yield session
    for engine in engines:
        engine.dispose()


def _sqlite(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}")
    begin_immediate(engine)
    Order.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Order(id=1, title="old"))
        session.add(ColdStock(id=1))
    return engine


def rows(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(Order.title, Order.version))]


def _save(session: Session, order: Order) -> None:
    order.title = "new"
    save_with_version(session, order)


def _touch(session: Session, order: Order) -> None:
    touch(session, order)
    save_with_version(session, order)


def _lock_and_save(session: Session, order: Order) -> None:
    lock_row(session, order)
    lock_rows(session, select(Order))
    _save(session, order)


@pytest.mark.parametrize("write", [_save, _touch, _lock_and_save])
def test_save_is_written_where_a_flush_writes(routing, write):
    order = routing.get_one(Order, 1)
    write(routing, order)
    routing.commit()
    assert rows(routing.leader)[0][1] == 2
    assert rows(routing.follower) == [("old", 1)]


@pytest.mark.parametrize("write", [_save, _touch, delete_with_version])
def test_conflict_is_found_where_a_flush_writes(routing, write):
    order = routing.get_one(Order, 1)
    routing.commit()
    with routing.leader.begin() as connection:
        connection.execute(text("UPDATE orders SET title = 'theirs', version = 2"))
    with pytest.raises(StaleObject) as caught:
        write(routing, order)
    assert caught.value.found == 2
    routing.rollback()
    assert rows(routing.leader) == [("theirs", 2)]


def test_row_is_read_and_locked_where_a_flush_writes(routing):
    with routing.leader.begin() as connection:
        connection.execute(text("UPDATE orders SET title = 'newer', version = 2"))
    assert lock_row(routing, Order, 1).title == "newer"
    order = lock_row(routing, Order, 1)
    order.title = "newest"
    routing.commit()
    assert rows(routing.leader) == [("newest", 3)]


# rows in several tables


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_row_of_a_subclass_is_locked_in_its_own_table_too(engine):
    with Session(engine) as setup, setup.begin():
        setup.add(ColdStock(id=1, degrees=4))
    with Session(engine) as first, Session(engine) as second:
        (found,) = lock_rows(first, select(Stock))
        assert type(found) is ColdStock
        assert found.degrees == 4
        with pytest.raises(RowLocked):
            lock_row(second, ColdStock, 1, nowait=True)
        second.rollback()
        second.execute(text("SET lock_timeout = 1"))
        with pytest.raises(DBAPIError, match="lock timeout"):
            second.execute(text("UPDATE cold_stock SET degrees = 5"))


async def test_save_does_not_overtake_a_parent_in_an_async_session(async_engine: AsyncEngine):
    async with AsyncSession(async_engine, expire_on_commit=False) as session:
        session.add(visit := Visit())
        await session.commit()
        session.add(Customer(id="y"))
        visit.customer_id = "y"
        await asave_with_version(session, visit)
        await session.commit()
        assert visit.version == 2


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Callable[[], ShardedSession]]:
    """Open sessions over two databases; the first letter of a key names its shard."""
    shards = {name: create_engine(f"sqlite:///{tmp_path}/{name}") for name in "ab"}
    for each in shards.values():
        Base.metadata.create_all(each)
    yield lambda: ShardedSession(
        shards=shards,
        shard_chooser=lambda _, instance, clause=None: instance.id[0],
        identity_chooser=lambda _, key, **__: [key[0][0]],
        execute_chooser=lambda _: list(shards),
    )
    for each in shards.values():
        each.dispose()


@pytest.mark.parametrize("write", [lambda session, _: session.commit(), save_with_version], ids=["commit", "save"])
def test_rows_in_several_shards_are_each_checked_where_they_are(sharded: Callable[[], ShardedSession], write):
    with sharded() as one, sharded() as two:
        one.add_all(Customer(id=key) for key in ("a1", "a2", "b1"))
        one.commit()
        mine, theirs = ([each.get_one(Customer, key) for key in ("a1", "a2", "b1")] for each in (one, two))
        for customer in mine:
            customer.name = "mine"
        write(one, mine[0])
        one.commit()
        for customer in theirs:
            customer.name = "theirs"
        with pytest.raises(StaleObject, match=r"the row has version 2"):
            write(two, theirs[-1])


def test_update_statement_in_several_shards_leaves_stale_what_it_wrote(sharded: Callable[[], ShardedSession]):
    """Without RETURNING, nothing tells what the row of an instance was when the statement wrote it."""

    class Plain(VersionedMixin, declarative_base()):
        __tablename__, __table_args__ = "sessions_customer", {"implicit_returning": False}
        id = mapped_column(String(36), primary_key=True)
        name = mapped_column(String(80))

    with sharded() as session:
        session.add(customer := Plain(id="a1", name="new"))
        session.commit()
        assert customer.version == 1
        session.execute(update(Plain).where(Plain.name == "new").values(name="shipped"))
        customer.name = "cancelled"
        with pytest.raises(StaleObject, match=r"the row has version 2"):
            session.flush()


def test_update_by_primary_key_in_several_shards_is_refused(sharded: Callable[[], ShardedSession]):
    with sharded() as session, pytest.raises(NotSupported, match="cannot check versions in a sharded session"):
        session.execute(update(Customer), [{"id": "a1", "name": "new", "version": 1}])
