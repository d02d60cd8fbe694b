"""Redis is sent the same commands with and without hiredis; requests that are left alone end with their loop."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis._parsers import _RESP2Parser

from dlock_core.backends.redis import sockets, transport
from dlock_core.backends.redis.sockets import AsyncioTransport
from dlock_core.backends.redis.waiting import _Waiter
from dlock_core.leases.acquisition import new_request


@pytest.mark.parametrize("command", [("PING",), ("SET", "clé:1", "30000", b"\x00\r\n", "", "0.5")])
def test_commands_are_packed_alike_with_and_without_hiredis(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hiredis")
    fast = transport.pack_commands([command, command])
    monkeypatch.setattr(transport, "_pack", transport._in_python)
    assert transport.pack_commands([command, command]) == fast


def test_time_limit_of_a_request_holds_on_a_connection_that_was_idle() -> None:
    """A first request with a short limit, such as a renewal's, must not shorten that of all later ones."""
    ours, servers = socket.socketpair()
    kind: Any = redis.Connection
    connection = kind(socket_timeout=0.05, parser_class=_RESP2Parser)  # It checks for data as redis-py 6 and 7 do.
    connection._sock, connection.dlock_limit, connection.dlock_reader = ours, None, None
    connection._parser.on_connect(connection)
    limits = []
    with ours, servers:
        for _ in range(2):
            servers.sendall(b":1\r\n")
            assert sockets.exchange_blocking(connection, b"", 1, 2.0) == [1]
            limits.append(ours.gettimeout())
            assert sockets._is_silent(connection)
    assert limits == [2.0, 2.0]


def test_new_connection_and_its_first_request_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py sends several requests when it connects, such as HELLO, and would grant the whole limit to each."""
    now, limits, replies = [100.0], list[float](), iter([b"+OK", b"+OK", b"+OK", b":1"])

    class Slow(redis.Connection):
        """Each reply takes 0.4 s."""

        def connect(self) -> None:
            self._sock, self._parser = SimpleNamespace(settimeout=limits.append, sendall=lambda _: None), self  # type: ignore[assignment]
            assert [self.read_response() for _ in range(3)] == [b"+OK"] * 3

        def read_response(self, *_: Any, **__: Any) -> Any:
            now[0] += 0.4
            return next(replies)

    monkeypatch.setattr(sockets, "clock", lambda: now[0])
    connection: Any = sockets._new(lambda: Slow(socket_connect_timeout=5))
    assert sockets.exchange_blocking(connection, b"", 1, 2.0) == [b":1"]
    assert limits == pytest.approx([2.0, 1.6, 1.2, 0.8])
    connection._sock = None


def test_request_that_was_left_alone_while_its_loop_ended_is_ended_with_it() -> None:
    tasks = AsyncioTransport(object)
    left_alone: list[asyncio.Task[Any]] = []
    left: list[asyncio.Task[Any]] = []

    async def start_one_when_cancelled(begun: asyncio.Event) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            left.append(asyncio.ensure_future(asyncio.Event().wait()))
            tasks.let_finish(left[0])

    async def main() -> None:
        begun = asyncio.Event()
        left_alone.append(asyncio.ensure_future(start_one_when_cancelled(begun)))
        await begun.wait()

    asyncio.run(main())
    assert left[0].cancelled()


def test_connection_that_comes_back_when_its_loop_is_shut_down_is_closed() -> None:
    closed: list[bool] = []
    tasks = AsyncioTransport(lambda: SimpleNamespace(_writer=None, _close=lambda: closed.append(True)))

    async def main() -> None:
        connection = tasks.checkout()
        await asyncio.get_running_loop().shutdown_asyncgens()
        tasks.checkin(connection)

    asyncio.run(main())
    assert closed == [True]


def test_lock_that_is_held_by_a_generator_is_released_when_its_loop_is_shut_down() -> None:
    """The loop closes all generators at once, so ours may already have closed the idle connections."""
    closed: list[bool] = []
    tasks = AsyncioTransport(lambda: SimpleNamespace(_writer=None, _close=lambda: closed.append(True)))
    left: list[asyncio.Task[Any]] = []

    async def hold() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            tasks.checkin(tasks.checkout())
            left.append(asyncio.ensure_future(asyncio.Event().wait()))
            tasks.let_finish(left[0])

    async def main() -> None:
        tasks.checkin(tasks.checkout())
        await anext(holding)

    holding = hold()
    asyncio.run(main())
    assert closed == [True, True]
    assert left[0].cancelled()


def test_waiter_whose_timer_was_interrupted_is_woken_by_the_next_one() -> None:
    async def main() -> None:
        called, waiter = asyncio.Event(), _Waiter(new_request("a"))
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        def interrupted() -> None:
            called.set()
            raise TimeoutError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(waiter, "_ask", interrupted)
            waiter.ask_within(0.0)
            await called.wait()
        waiter.ask_within(0.001)
        assert await asyncio.wait_for(waiter.handed, 10) is None

    asyncio.run(main())
