"""Hooks are called for what versions refuse, wherever the conflict is found."""

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from dlock_core.errors import StaleObject
from dlock_core.observability import hooks
from sqla_dlock.versions import delete_with_version, save_with_version
from tests.sqla_dlock.version_models import Order


@pytest.fixture
def heard():
    seen: list[hooks.Event] = []
    hooks.subscribe(seen.append)
    yield seen
    hooks.unsubscribe(seen.append)


def flush(session, order):
    session.flush()


def commit(session, order):
    session.commit()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("write", [flush, commit, save_with_version, delete_with_version])
def test_refused_write_is_told_once(engine, write, heard):
    with Session(engine) as session, session.begin():
        session.add(Order(id=42))
    with Session(engine, expire_on_commit=False) as session:
        order = session.get_one(Order, 42)
        session.commit()
        with Session(engine) as other, other.begin():
            other.execute(update(Order).values(title="theirs"))
        order.title = "mine"
        with pytest.raises(StaleObject):
            write(session, order)
    assert [(event.kind, event.name, event.reason) for event in heard] == [("conflict", "Order(42)", "StaleObject")]
