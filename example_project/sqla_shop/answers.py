"""The answer to a request: done, or too late (409); a browser gets pages, any other client gets JSON."""

from pathlib import Path

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from fastapi.templating import Jinja2Templates

from example_project.sqla_shop.actions import euros
from example_project.sqla_shop.database import sessions
from example_project.sqla_shop.models import Event, Kind, Order

HERE = Path(__file__).parent
pages = Jinja2Templates([HERE / "templates", HERE.parent / "look"])
pages.env.filters["euros"] = euros


def answer(request: Request, event: Event) -> Response:
    is_refused = event.kind == Kind.REFUSED
    if "text/html" not in request.headers.get("accept", ""):
        data = {"order": event.order_id, "event": event.kind, "text": event.text}
        response: Response = JSONResponse(data, status_code=409 if is_refused else 200)
    elif is_refused:
        response = order_page(request, event.order_id, refused=event.text)
    else:
        response = RedirectResponse(f"/orders/{event.order_id}", status_code=303)
    response.headers["Shop-Retries"] = str(request.state.runs - 1)
    return response


def order_page(request: Request, order_id: int, refused: str = "") -> Response:
    """Read an order in a separate session, which is under no lock, and show it."""
    with sessions() as session:
        context = {"order": session.get_one(Order, order_id), "refused": refused}
        return pages.TemplateResponse(request, "order.html", context, status_code=409 if refused else 200)
