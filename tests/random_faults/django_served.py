"""Sections as requests to Django behind uvicorn; when a client disconnects, Django cancels the view during its work."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import path

from tests.random_faults.attempt import Attempt
from tests.random_faults.django_clients import AsyncDjangoClient


@dataclass
class Underway:
    """A request, from the moment it is sent until the server is done with it."""

    attempt: Attempt
    error: BaseException | None = None
    """The error that the view raised."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


_underway: dict[str, Underway] = {}
"""The requests under way, by section."""
_in_view = AsyncDjangoClient()


async def view(_request: HttpRequest, section: str) -> HttpResponse:
    underway = _underway[section]
    try:
        await _in_view.aplay(underway.attempt)
    except BaseException as error:
        underway.error = error
        raise
    return HttpResponse(status=204)


urlpatterns = [path("<section>", view)]


class ServedDjangoClient(AsyncDjangoClient):
    """A server in the worker's event loop, and its clients: a cancelled task is a client that disconnects."""

    def __init__(self) -> None:
        self._handler = ASGIHandler()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(self._serve, interface="asgi3", lifespan="off", log_config=None))
        self._serving: asyncio.Task[None] | None = None

    async def aplay(self, attempt: Attempt) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        reader, writer = await asyncio.open_connection(*self._socket.getsockname())
        underway = _underway[attempt.section] = Underway(attempt)
        writer.write(f"GET /{attempt.section} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n".encode())
        try:
            await reader.read()
        finally:
            writer.close()
            await underway.is_over.wait()
            del _underway[attempt.section]
        if underway.error is not None:
            raise underway.error

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(Exception):  # Django has replied with 500, and `view` has kept the error
                await self._handler(scope, receive, send)
        finally:
            _underway[scope["path"][1:]].is_over.set()

    async def aclose(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        await super().aclose()
