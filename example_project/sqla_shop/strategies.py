"""Ship and cancel, protected in four ways: read them side by side.

`act` is `ship` or `cancel` of actions.py. All four do the same; they differ in how the order is read and saved. Each is
written as a handler of FastAPI; app.py runs one of them as a dependency, to answer with a page or with JSON.
"""

from typing import Annotated, Literal

from fastapi import Depends, Request
from sqlalchemy.orm import Session

from example_project.sqla_shop import actions
from example_project.sqla_shop.database import SessionDep, sessions
from example_project.sqla_shop.models import Event, Order, save_unchecked
from sqla_dlock import lock_row, locked, retry_on_conflict, save_with_version


def chosen(request: Request, action: Literal["ship", "cancel"]) -> actions.Act:
    """Return the action that the path names; it counts its runs, so that the answer can say how often it ran."""
    request.state.runs = 0

    def act(session: Session, order: Order) -> Event:
        request.state.runs += 1
        return getattr(actions, action)(session, order)

    return act


Act = Annotated[actions.Act, Depends(chosen)]


def none(order_id: int, act: Act, session: SessionDep) -> Event:
    """No protection: between our read and our write the order may change, and nothing checks it again."""
    order = session.get_one(Order, order_id)
    session.commit()  # on SQLite, where transactions take turns, an open one would be a lock
    event = act(session, order)
    save_unchecked(session, order)
    session.commit()
    return event


def row(order_id: int, act: Act, session: SessionDep) -> Event:
    """A row lock: the second request waits in the database, before it reads, until the first has committed."""
    order = lock_row(session, Order, order_id)
    event = act(session, order)
    save_unchecked(session, order)
    session.commit()
    return event


@retry_on_conflict(sessions, attempts=5)
def version(session: Session, order_id: int, act: Act) -> Event:
    """A version column: no request waits; the second to save is rolled back, and starts again from a fresh read."""
    order = session.get_one(Order, order_id)
    event = act(session, order)
    save_with_version(session, order)
    return event


@locked("order", "order_id")
def lease(order_id: int, act: Act, session: SessionDep) -> Event:
    """A lease on Redis: taken before the transaction begins, held until its COMMIT is known, and fenced in between."""
    order = session.get_one(Order, order_id)
    event = act(session, order)
    save_unchecked(session, order)
    session.commit()
    return event


STRATEGIES = {"none": none, "row": row, "version": version, "lease": lease}
