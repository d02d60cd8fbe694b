"""One connection for each event loop, on which the requests of all its tasks are pipelined.

A request that finds the connection idle uses it at once, as a thread does. Requests that arrive while it is busy are
sent together, in one write, when the replies before theirs were read. So a request is executed after every earlier one
of its loop: the undo of a request whose task was cancelled never overtakes it, and need not close the connection.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.idle import inherited
from dlock_core.errors import format_seconds
from dlock_core.runtime import ASYNCIO, begin_task, within
from dlock_core.scheduler import after_fork_in_child

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dlock_core.backends.redis.transport import Transport
    from dlock_core.runtime import Runtime

__all__ = ["PipelinedTransport"]

MAX_REQUESTS: Final = 64
"""Largest number of requests in one write: the first of them waits for the reply to the last."""
MIN_LIMIT_S: Final = 0.001
"""The time limit of requests whose callers have just stopped waiting."""


class PipelinedTransport:
    """A transport for tasks that uses one connection of `wire` for each event loop."""

    def __init__(self, wire: Transport) -> None:
        self.wire = wire
        self.forget, self.close = wire.forget, wire.close
        self._pipelines: dict[asyncio.AbstractEventLoop, _Pipeline] = {}
        after_fork_in_child(self._after_fork)

    def checkout(self) -> Any:
        """Return the loop's connection if it is idle, otherwise a request that is queued for it."""
        loop = asyncio.get_running_loop()
        pipeline = self._pipelines.get(loop)
        if pipeline is None:
            pipeline = self._begin(loop)
        return pipeline.enter()

    def checkin(self, connection: Any) -> None:
        if connection.__class__ is not QueuedRequest:
            try:
                self.wire.checkin(connection)
            finally:
                self._leave(connection)

    def discard(self, connection: Any) -> None:
        if connection.__class__ is not QueuedRequest:
            try:
                self.wire.discard(connection)
            finally:
                self._leave(connection)

    def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> Awaitable[list[Any]]:
        if connection.__class__ is QueuedRequest:
            answers: Awaitable[list[Any]] = connection.exchange(data, replies, limit)
            return answers
        connection.dlock_exchange = exchanging = self.wire.exchange(
            runtime, connection, data, replies, limit, nudge_after
        )
        return exchanging

    def _leave(self, connection: Any) -> None:
        loop = asyncio._get_running_loop()  # noqa: SLF001 - None at its end
        pipeline = self._pipelines.get(loop)  # type: ignore[arg-type]
        if pipeline is not None:
            pipeline.leave(connection)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> _Pipeline:
        for ended in [known for known in list(self._pipelines) if known.is_closed()]:
            self._pipelines.pop(ended, None)
        pipeline = self._pipelines[loop] = _Pipeline(self.wire)
        return pipeline

    def _after_fork(self) -> None:
        inherited.append(self._pipelines)
        self._pipelines = {}


class _Pipeline:
    """The connection of one event loop, and the requests that wait for it."""

    def __init__(self, wire: Transport) -> None:
        self.wire = wire
        self.queued: list[QueuedRequest] = []
        """Requests that are to be sent."""
        self.in_use: weakref.ref[Any] | None = None
        """The connection of a request that did not have to wait; a dead reference if an interrupt has lost it.

        It is busy only while that request's coroutine runs: an interrupt may have prevented its caller from returning
        it, and the traceback keeps it alive for as long as that caller waits for the undo of the request.
        """
        self.sender: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def enter(self) -> Any:
        if self.queued or self.is_busy():
            return QueuedRequest(self)
        connection = self.wire.checkout()
        self.in_use = weakref.ref(connection, self._lost)
        return connection

    def is_busy(self) -> bool:
        connection = None if self.in_use is None else self.in_use()
        exchanging = None if connection is None else connection.dlock_exchange
        if exchanging is not None and (exchanging.cr_suspended or exchanging.cr_running):
            return True
        return self.sender is not None and not self.sender.done()

    def leave(self, connection: Any) -> None:
        if self.in_use is not None and self.in_use() is connection:
            self.in_use = None
            self.advance()

    def advance(self) -> None:
        """Send the queued requests, unless the connection is in use."""
        if self.queued and not self.is_busy():
            self.in_use = None
            self.sender = begin_task(self._send(), name="dlock-pipeline")
            self.sender.add_done_callback(self._sent)

    def withdraw(self, request: QueuedRequest) -> None:
        """Use another connection if a request was never sent: the caller that has this one does not return it."""
        if request in self.queued:
            self.queued.remove(request)
            self.in_use = None
            self.advance()

    def _lost(self, gone: weakref.ref[Any]) -> None:
        if self.in_use is gone:
            self.in_use = None
            if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - garbage is collected in any thread
                self.advance()

    async def _send(self) -> None:
        """Send the queued requests until there are none."""
        requests: list[QueuedRequest] = []
        try:
            while self.queued:
                requests, self.queued = self.queued[:MAX_REQUESTS], self.queued[MAX_REQUESTS:]
                requests = [request for request in requests if not request.answers.done()]
                if requests:
                    await self._exchange(requests)
        except BaseException as error:
            _fail(requests, error)
            if not isinstance(error, Exception):
                raise

    def _sent(self, sender: asyncio.Task[None]) -> None:
        if self.sender is sender:
            self.sender = None
        if not sender.cancelled():
            sender.exception()  # It was raised in a caller's task, or ends the loop.
        self.advance()

    async def _exchange(self, requests: list[QueuedRequest]) -> None:
        """Send these requests over one connection, and pass each its replies."""
        limit = max(request.until for request in requests) - ASYNCIO.now()
        data, count = b"".join([request.data for request in requests]), sum(request.replies for request in requests)
        connection = self.wire.checkout()
        try:
            answers = iter(await self.wire.exchange(ASYNCIO, connection, data, count, max(limit, MIN_LIMIT_S)))
        except BaseException:
            for request in requests:
                request.dlock_is_reused = connection.dlock_is_reused
            self.wire.discard(connection)
            raise
        self.wire.checkin(connection)
        for request in requests:
            own = [next(answers) for _ in range(request.replies)]
            if not request.answers.done():
                request.answers.set_result(own)


def _fail(requests: list[QueuedRequest], error: BaseException) -> None:
    """Raise a connection error in each request; any other error, such as a signal handler's, in one of them."""
    waiting = [request for request in requests if not request.answers.done()]
    if not isinstance(error, RedisError | OSError):
        if waiting and isinstance(error, Exception):
            waiting.pop(0).answers.set_exception(error)
        error = RedisConnectionError("the task that read the replies was interrupted")
        for request in waiting:
            request.dlock_is_reused = True  # The server may be fine, so the request is repeated once.
    for request in waiting:
        request.answers.set_exception(error)


class QueuedRequest:
    """A request that waits for the loop's connection, used in place of a connection that was checked out."""

    __slots__ = ("answers", "data", "dlock_is_reused", "pipeline", "replies", "until")

    def __init__(self, pipeline: _Pipeline) -> None:
        self.pipeline, self.data, self.replies, self.until = pipeline, b"", 0, 0.0
        self.answers: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.dlock_is_reused = False

    async def exchange(self, data: bytes, replies: int, limit: float) -> list[Any]:
        """Wait until it is sent, and for the replies: for `limit` seconds in total."""
        self.data, self.replies, self.until = data, replies, ASYNCIO.now() + limit
        self.pipeline.queued.append(self)
        self.pipeline.advance()
        try:
            return await within(limit, self.answers)
        except TimeoutError as error:
            self.pipeline.withdraw(self)
            raise RedisTimeoutError(f"no answer within {format_seconds(limit)}") from error
