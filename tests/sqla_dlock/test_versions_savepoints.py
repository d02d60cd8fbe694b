"""What a rollback takes back: versions that were written in it are read again, and prove nothing later."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import bindparam, select, text, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from sqla_dlock.versions import save_with_version
from tests.sqla_dlock.version_models import Order


def flush(session: Session, order: Order) -> None:
    order.title = "undone"
    session.flush()


def save(session: Session, order: Order) -> None:
    order.title = "undone"
    save_with_version(session, order)


def by_key(session: Session, order: Order) -> None:
    session.execute(update(Order), [{"id": order.id, "version": order.version, "title": "undone"}])


def by_condition(session: Session, order: Order) -> None:
    session.execute(update(Order).where(Order.id == order.id).values(title="undone"))


def by_key_expired(session: Session, order: Order) -> None:
    row = {"id": order.id, "version": order.version, "title": "undone"}
    session.expire(order)
    session.execute(update(Order), [row])


def expire(session: Session, order: Order) -> None:
    session.expire(order)
    assert order.title == "undone"


def refresh(session: Session, order: Order) -> None:
    session.refresh(order)


def query(session: Session, order: Order) -> None:
    session.scalars(select(Order).execution_options(populate_existing=True)).one()


@pytest.mark.parametrize("read", [refresh, expire, query])
@pytest.mark.parametrize("write", [flush, save, by_key, by_condition, by_key_expired])
def test_instance_that_is_read_after_a_write_in_a_savepoint_is_read_again_after_its_rollback(
    session: Session, order: Order, write: Callable[..., None], read: Callable[..., None]
) -> None:
    with session.begin_nested() as savepoint:
        write(session, order)
        read(session, order)
        savepoint.rollback()
    assert (order.title, order.version) == ("old", 1)
    order.title = "new"
    session.commit()
    assert session.execute(select(Order.title, Order.version)).one() == ("new", 2)


def commit(session: Session, order: Order) -> None:
    session.commit()


def merge(session: Session, order: Order) -> None:
    session.expunge(order)
    session.merge(order)
    session.commit()


@pytest.mark.parametrize("act", [commit, merge])
@pytest.mark.parametrize("is_undone", [False, True])
def test_instance_older_than_an_update_by_primary_key_is_never_written(
    session: Session, order: Order, act: Callable[..., None], is_undone: bool
) -> None:
    with session.get_bind().connect() as other, other.begin():
        other.execute(text("UPDATE orders SET title = 'theirs', version = 2"))
    with session.begin_nested() as savepoint:
        session.execute(update(Order), [{"id": order.id, "version": 2, "reads": 5}])
        if is_undone:
            savepoint.rollback()
    session.commit()
    order.title += " + mine"
    with pytest.raises((StaleDataError, ValueError)):
        act(session, order)


@pytest.mark.parametrize("write", [flush, save])
@pytest.mark.parametrize("is_nested", [False, True])
def test_version_that_is_read_late_is_no_check_although_an_undone_write_had_the_same(
    session: Session, order: Order, write: Callable[..., None], is_nested: bool
) -> None:
    savepoint = session.begin_nested() if is_nested else None
    write(session, order)
    (savepoint or session).rollback()
    assert order.title == "old"
    session.commit()
    with session.get_bind().connect() as other, other.begin():
        other.execute(text("UPDATE orders SET title = 'theirs', version = version + 1"))
    session.refresh(order, ["version"])
    order.title += " + mine"
    with pytest.raises(ValueError, match="read later"):
        session.commit()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("synchronize", [False, "auto"])
def test_update_of_one_row_does_not_look_at_all_instances_of_the_session(
    session: Session, order: Order, synchronize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = update(Order).execution_options(synchronize_session=synchronize)
    rows = [{"id": order.id, "version": order.version, "title": "by key"}]
    others = [Order(title="another") for _ in range(9)]
    session.add_all(others)
    session.commit()
    seen: list[Any] = []
    values = type(session.identity_map).values
    monkeypatch.setattr(type(session.identity_map), "values", lambda self: seen.extend(values(self)) or values(self))
    session.execute(statement, rows)
    session.execute(
        statement.where(Order.id == bindparam("key")).values(title="by condition"),
        {"key": order.id},
        execution_options={"synchronize_session": False},
    )
    assert not seen
