"""The shop's application: `uvicorn example_project.sqla_shop.app:app`."""

from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from sqlalchemy import select
from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import joinedload

from example_project.sqla_shop import settings
from example_project.sqla_shop.answers import answer, order_page, pages
from example_project.sqla_shop.database import SessionDep, open_database
from example_project.sqla_shop.models import Event, Order
from example_project.sqla_shop.strategies import STRATEGIES
from sqla_dlock import configure
from sqla_dlock.middleware import LockMiddleware

open_database(settings.DATABASE_URL)
configure(default=settings.REDIS_URL or "redis://localhost:6379/0")

protect = STRATEGIES[settings.STRATEGY]
first_words = (protect.__doc__ or "").partition(":")[0]
pages.env.globals |= {"strategy": settings.STRATEGY, "protection": first_words[:1].lower() + first_words[1:]}

app = FastAPI(title="dlock shop")
app.add_middleware(LockMiddleware)


@app.get("/")
def orders(request: Request, session: SessionDep) -> Response:
    """List the latest orders."""
    latest = select(Order).options(joinedload(Order.product)).order_by(Order.id.desc()).limit(50)
    return pages.TemplateResponse(request, "orders.html", {"orders": session.scalars(latest).all()})


@app.get("/orders/{order_id}")
def order(request: Request, order_id: int) -> Response:
    """Show an order, its history, and what can be done with it."""
    return order_page(request, order_id)


@app.post("/orders/{order_id}/{action}")
def change(request: Request, event: Annotated[Event, Depends(protect)]) -> Response:
    """Ship or cancel an order under the strategy of the settings."""
    return answer(request, event)


@app.exception_handler(NoResultFound)
def not_found(request: Request, error: NoResultFound) -> Response:
    return Response("There is no such order.", 404)
