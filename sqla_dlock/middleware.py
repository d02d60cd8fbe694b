"""Errors of locks as HTTP responses, and the request as owner, in any ASGI or WSGI application.

Place it inside the middleware that each response needs (security and CORS headers), and around all code that takes
locks or opens sessions.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.orm.exc import StaleDataError

from dlock_core.errors import DLockError, StaleObject, rebuild
from dlock_core.owner import serving
from dlock_core.web.http import Answer, respond

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

__all__ = ["LockMiddleware", "WSGILockMiddleware", "answer_asgi", "answer_flask"]


_ANSWERED: Final = (DLockError, StaleDataError)


def _as_ours(error: DLockError | StaleDataError) -> DLockError:
    """Return the error to answer: StaleDataError, which `Session.merge` and bulk updates raise, is one as well."""
    if isinstance(error, DLockError):
        return error
    data = {"name": "the object", "instance": None, "expected": None, "found": None, "action": "save"}
    return rebuild(StaleObject, error.args, data)


class LockMiddleware:
    """Answer lock errors of an ASGI application with 404, 409, 412, 423, 428 or 503.

    It also names the request, such as "POST /orders/42/ship", as owner of the locks that it takes. Add it with
    `app.add_middleware(LockMiddleware)` in FastAPI and Starlette: around the whole application it would come after
    their own 500.

    Errors of the program, such as NotSupported, propagate. So does each error once the response has begun, for example
    that of a FastAPI session which commits after the response; `Depends(get_session, scope="function")` commits before.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun |= message["type"] == "http.response.start"
            await send(message)

        with serving(scope["method"], scope["path"]):
            try:
                await self.app(scope, receive, sending)
            except _ANSWERED as error:
                found = None if has_begun else respond(_as_ours(error), _accept(scope))
                if found is None:
                    raise
                await _send(found, scope, receive, send)


async def answer_asgi(request: Any, error: Exception) -> Any:
    """Answer a lock error in FastAPI or Starlette: `app.add_exception_handler(DLockError, answer_asgi)`.

    It is needed only if a handler for Exception, OSError or TimeoutError would intercept the error before it reaches
    the middleware. An error that the middleware would not answer is raised again.
    """
    scope = request.scope
    if scope["type"] == "http" and isinstance(error, _ANSWERED):
        with serving(scope["method"], scope["path"]):
            found = respond(_as_ours(error), _accept(scope))
        if found is not None:
            return partial(_send, found)
    raise error


def _accept(scope: Message) -> str:
    return ",".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"accept")


async def _send(answer: Answer, scope: Message, receive: Receive, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})


class WSGILockMiddleware:
    """Answer lock errors of a WSGI application, as `LockMiddleware` does for ASGI.

    In Flask it is `app.wsgi_app = WSGILockMiddleware(app.wsgi_app)`, together with `answer_flask`. It also answers
    errors that are raised after the view, as long as the server has sent nothing: by a session that commits in a
    teardown function, or by the first piece of a stream.
    """

    def __init__(self, app: WSGIApplication) -> None:
        self.app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return _Body(self.app, environ, start_response)


class _Body:
    """The body of a response, or of the answer that takes its place."""

    def __init__(self, app: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse) -> None:
        self._environ, self._start = environ, start_response
        self._has_begun = self._is_sent = False
        self._body: Iterable[bytes] = ()
        self._chunks: Iterator[bytes] = iter(())
        with self._serving():
            try:
                self._body = app(environ, self._begin)
                self._chunks = iter(self._body)
            except _ANSWERED as error:
                self._answer(error)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._serving():
            try:
                chunk = next(self._chunks)
            except _ANSWERED as error:
                self._answer(error)
                chunk = next(self._chunks)
        self._is_sent |= bool(chunk)
        return chunk

    def close(self) -> None:
        """Close the iterable of the application, as PEP 3333 asks of the server."""
        close = getattr(self._body, "close", None)
        if close is not None:
            with self._serving():
                close()

    def _serving(self) -> Any:
        return serving(self._environ["REQUEST_METHOD"], _path(self._environ))

    def _begin(self, status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Callable[[bytes], object]:
        self._has_begun = True
        return self._start(status, headers, *exc_info)

    def _answer(self, error: DLockError | StaleDataError) -> None:
        """Answer in place of the application; a server that has sent the headers raises the error again (PEP 3333)."""
        found = None if self._is_sent else respond(_as_ours(error), self._environ.get("HTTP_ACCEPT", ""))
        if found is None:
            raise error
        status = f"{found.status:d} {found.status.phrase}"
        self._start(status, list(found.headers.items()), *((sys.exc_info(),) if self._has_begun else ()))
        self._chunks = iter([b"" if self._environ["REQUEST_METHOD"] == "HEAD" else found.body])


def _path(environ: WSGIEnvironment) -> str:
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return path.encode("latin-1").decode(errors="replace")  # WSGI carries bytes in text


def answer_flask(error: DLockError | StaleDataError) -> tuple[bytes, int, dict[str, str]]:
    """Answer a lock error before Flask turns it into a 500: `app.register_error_handler(DLockError, answer_flask)`.

    Register it for StaleDataError as well, which is SQLAlchemy's own error of `Session.merge`.
    """
    from flask import request

    with serving(request.method, _path(request.environ)):
        found = respond(_as_ours(error), request.headers.get("Accept", ""))
    if found is None:
        raise error
    return found.body, found.status, found.headers
