"""`LockMiddleware`: errors as HTTP responses, the request as owner, and no lease that outlives its request.

Place it after the middleware that every response needs (security and CORS headers) and before middleware that takes
locks or opens transactions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.handlers.exception import convert_exception_to_response
from django.http import Http404, HttpResponse

from django_dlock.conf import stores
from django_dlock.ownership import apart
from dlock_core.errors import DLockError
from dlock_core.owner import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

__all__ = ["LockMiddleware"]

logger = logging.getLogger("dlock")


class LockMiddleware:
    """Answers lock errors with 409, 412, 423, 428, 503; names "POST /orders/42/ship" as owner of a request's locks.

    The answer is created after the ROLLBACK of ATOMIC_REQUESTS. Errors of the program, such as NotSupported, propagate.
    A lease that the view did not release is released, with a warning, once the response has been returned; the body of
    a streaming response is sent after that, without the lease.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        stores.prepare()
        self.get_response = _raising(get_response)
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self.is_async:
            return self._acall(request)
        # A test may hold locks while it makes a request in its own thread.
        with serving(request.method, request.path) as request_line, apart():
            try:
                return self.get_response(request)
            except DLockError as error:
                return self._answer(request, error)
            finally:
                _release_forgotten(request_line)

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        with serving(request.method, request.path) as request_line, apart():
            try:
                return await self.get_response(request)  # type: ignore[no-any-return]
            except DLockError as error:
                return self._answer(request, error)
            finally:
                await _release_forgotten_async(request_line)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer a lock error of the view; Django calls this outside the view's transaction."""
        if not isinstance(exception, DLockError) or isinstance(exception, Http404):  # which has the project's own page
            return None
        from dlock_core.web.http import respond  # a process without errors does not need it

        found = respond(exception, request.headers.get("Accept", ""))
        return None if found is None else HttpResponse(found.body, status=found.status, headers=found.headers)

    def _answer(self, request: HttpRequest, error: DLockError) -> HttpResponse:
        response = self.process_exception(request, error)
        if response is None:
            raise error
        return response


def _raising(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Return the callable inside Django's wrapper of a middleware, which turns lock errors into a 500."""
    wrapped = getattr(get_response, "__globals__", {}).get("__name__") == convert_exception_to_response.__module__
    return get_response.__wrapped__ if wrapped else get_response  # type: ignore[attr-defined]


def _release_forgotten(request_line: str) -> None:
    from django_dlock.locks import release_forgotten

    try:
        _warn(request_line, release_forgotten())
    except DLockError:
        logger.exception("%s: a forgotten lease could not be released and runs out by itself", request_line)


async def _release_forgotten_async(request_line: str) -> None:
    from django_dlock.locks import release_forgotten_async

    try:
        _warn(request_line, await release_forgotten_async())
    except DLockError:
        logger.exception("%s: a forgotten lease could not be released and runs out by itself", request_line)


def _warn(request_line: str, names: list[str]) -> None:
    if names:
        logger.warning("%s ended without releasing %s: use `with lock(...)` or @locked", request_line, ", ".join(names))
