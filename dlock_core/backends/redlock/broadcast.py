"""One request to several nodes at once, from a thread or a task: send to all, then read the answers as they arrive.

Once a majority has decided, the other nodes get only a short grace period: a slow node must not slow down every lock. A
thread polls the sockets of all nodes itself; only a node without an open connection gets another thread while it is
being connected to. In asyncio there is one task for each node.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.idle import IdlePool
from dlock_core.backends.redis.addresses import title
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redis.sockets import MAX_IDLE_CONNECTIONS, TRUSTED_IDLE_S, exchange_blocking, read_reply
from dlock_core.backends.redis.transport import exchange, pack_commands, unavailable
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import ASYNCIO, BLOCKING, clock, start_thread

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlock_core.backends.redis.protocol import Command, Script
    from dlock_core.backends.redis.sockets import AsyncioTransport
    from dlock_core.runtime import Runtime

__all__ = ["LATE", "Broadcast", "Enough", "RedlockNode", "broadcast_async", "broadcast_blocking", "is_late"]

LATE_REPLY_GRACE_S: Final = 0.1
"""How long to wait for slower nodes after a majority has decided."""
FAILED_NODE_PAUSE_S: Final = 2.0
"""How long a node that did not answer is skipped."""


class RedlockNode:
    """One master: its connections, and whether it answers."""

    def __init__(self, client: Any, prefix: str, timeout: float) -> None:
        self.backend = RedisBackend(client, prefix=prefix, timeout=timeout)
        self.threads = self.backend.transport(BLOCKING)
        self.tasks = cast("AsyncioTransport", self.backend.wire(ASYNCIO))
        self.title = title(client)
        self.is_healthy = True
        """Whether it answered its last request."""
        self.suspended_until = 0.0
        self.connecting_pid = 0
        """The process in which a thread is connecting to it; one thread is enough while the node is not healthy."""

    def fail(self) -> None:
        """Suspend the node, which did not answer."""
        self.is_healthy, self.suspended_until = False, clock() + FAILED_NODE_PAUSE_S


LATE: Final = object()
"""Stands for the answer of a node that did not answer in time: it may execute the request at any later time."""


def is_late(answer: Any) -> bool:
    """Return whether a node may still execute the request, or what was sent after it.

    It may do so after the end of the connection, which the network can also cause, but not if it has refused the
    connection.
    """
    failure = getattr(answer, "__cause__", None)
    if isinstance(failure, OSError | RedisConnectionError | RedisTimeoutError):
        return not isinstance(failure.__context__, ConnectionRefusedError)
    return answer is LATE


Enough = Callable[[Sequence[Any]], bool]
"""Whether the answers so far are enough; an answer that has not arrived yet is None."""


class Broadcast(NamedTuple):
    """One request to several nodes, and when their answers are enough."""

    name: str
    command: Command
    limit: float
    """Time limit in seconds for all nodes together."""
    enough: Enough
    must_arrive: bool = False
    """Also sent to suspended nodes, and executed by slow ones although their answers are no longer awaited.

    For requests that end a grant: a node that missed one would keep the lock for a ttl.
    """
    among: frozenset[int] | None = None
    """The indexes of the nodes that get the request; None for all."""
    script: Script | None = None
    """The script that the command runs by digest."""
    undo: Command | None = None
    """Sent to slow nodes after the command, over the same connection, when their answers are no longer awaited."""


def broadcast_blocking(
    nodes: Sequence[RedlockNode], pool: IdlePool[NodeConnections], asked: Iterable[int], request: Broadcast
) -> list[Any]:
    """Return an answer for each node: LATE where none came in time, None where it was not asked."""
    connections = pool.take() or NodeConnections(nodes)
    running = _BlockingBroadcast(nodes, connections, request)
    try:
        for index in asked:
            running.begin(index)
        running.collect()
    finally:
        running.end()
        pool.put(connections)
    return running.answers


class _BlockingBroadcast:
    """A thread's broadcast, from its first request to the last answer that it waits for."""

    def __init__(self, nodes: Sequence[RedlockNode], connections: NodeConnections, request: Broadcast) -> None:
        self.nodes, self.connections, self.request = nodes, connections, request
        self.answers: list[Any] = [None] * len(nodes)
        self.data = pack_commands([request.command])
        self.sent: set[int] = set()
        """Nodes whose answers are outstanding."""
        self.connecting: dict[int, bool] = {}
        """Nodes that are being connected to, and whether each was healthy: only then does it get the grace period."""
        self.wakeup: tuple[socket.socket, socket.socket] | None = None
        """Wakes the poll when a connecting thread has put an answer into `connected`."""
        self.connected: deque[tuple[int, Any]] = deque()
        self.is_over = False

    def begin(self, index: int) -> None:
        """Send to a node, over an open connection or, from another thread, a new one."""
        if not self.connections.has(index) and not self._open(index):
            return
        self.sent.add(index)
        try:
            self.connections.send(index, self.data)
        except OSError as error:
            self._fail(index, error)

    def collect(self) -> None:
        """Read answers until they are enough, and for a grace period after that; at most until the time limit."""
        until, decided = clock() + self.request.limit, False
        while self.sent or self.connecting:
            if not decided and self.request.enough(self.answers):
                decided, until = True, min(until, clock() + LATE_REPLY_GRACE_S)
            left = until - clock()
            if left <= 0 or (decided and not self.sent and not any(self.connecting.values())):
                return
            for number, _ in self.connections.poll.poll(left * 1000):
                self._receive(number)

    def end(self) -> None:
        """Stop waiting for the outstanding answers: send the undo, and close these connections."""
        self.is_over = True
        for index in (*self.sent, *self.connecting):
            self.answers[index] = LATE
        for index, was_healthy in self.connecting.items():
            if was_healthy:
                self.nodes[index].fail()
        for index in self.sent:
            self.nodes[index].fail()
            self._undo(index)
            self.connections.drop(index)
        if self.wakeup is not None:
            self.connections.poll.unregister(self.wakeup[0])
            for end in self.wakeup:
                end.close()

    def _receive(self, number: int) -> None:
        index = self.connections.indexes.get(number)
        if index is None:
            self._take_connected()
        elif index not in self.sent:  # The node got no request, so it has closed the connection.
            self.connections.drop(index)
        else:
            self._read(index)

    def _read(self, index: int) -> None:
        try:
            answer = self.connections.read(index)
        except (RedisError, OSError) as error:
            self._fail(index, error)
        else:
            if answer is not INCOMPLETE:
                self.answers[index], self.nodes[index].is_healthy = answer, True
                self.sent.discard(index)

    def _fail(self, index: int, error: RedisError | OSError) -> None:
        self.sent.discard(index)
        self.connections.drop(index)
        self.answers[index] = failure = unavailable(self.request.name, error, reused=True)
        failure.__cause__ = error
        if failure.broken:
            self.nodes[index].threads.forget()  # One idle connection was dead, so the others may be dead, too.
        else:
            self.nodes[index].fail()

    def _undo(self, index: int) -> None:
        if self.request.undo is not None:
            with suppress(OSError):
                self.connections.send(index, pack_commands([self.request.undo]))

    def _open(self, index: int) -> bool:
        """Take an open connection from the node's transport; without one, start a thread that connects and sends."""
        connection = self.nodes[index].threads.checkout()
        if connection._sock is None:
            self._connect_in_thread(index, connection)
            return False
        self.connections.add(index, connection)
        return True

    def _connect_in_thread(self, index: int, connection: Any) -> None:
        node = self.nodes[index]
        if not node.is_healthy and node.connecting_pid == os.getpid():
            return
        if self.wakeup is None:
            self.wakeup = socket.socketpair()
            self.connections.poll.register(self.wakeup[0], select.POLLIN)
        self.connecting[index], node.connecting_pid = node.is_healthy, os.getpid()
        start_thread(
            threading.Thread(target=self._connect, args=(index, connection), daemon=True, name="dlock-redlock")
        )

    def _connect(self, index: int, connection: Any) -> None:
        """Connect and send, in a thread for this node; then wake the caller's thread, if it still waits."""
        node, answer = self.nodes[index], None
        try:
            connection.connect()
            if self.request.must_arrive or not self.is_over:
                (answer,) = exchange_blocking(connection, self.data, 1, self.request.limit)
            if self.is_over and answer is not None and self.request.undo is not None:
                exchange_blocking(connection, pack_commands([self.request.undo]), 1, self.request.limit)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this node's answer
            node.threads.discard(connection)
            node.fail()
            failure = error if isinstance(error, RedisError | OSError) else OSError(type(error).__name__)
            answer = unavailable(self.request.name, failure, reused=False)
            answer.__cause__ = failure
        else:
            node.is_healthy = True
            node.threads.checkin(connection)
        node.connecting_pid = 0
        self.connected.append((index, answer))
        if self.wakeup is not None:
            with suppress(OSError):
                self.wakeup[1].send(b".")

    def _take_connected(self) -> None:
        if self.wakeup is not None:
            self.wakeup[0].recv(64)
        while self.connected:
            index, self.answers[index] = self.connected.popleft()
            del self.connecting[index]


async def broadcast_async(
    runtime: Runtime, nodes: Sequence[RedlockNode], asked: Iterable[int], request: Broadcast
) -> list[Any]:
    """Return an answer for each node: LATE where none came in time, None where it was not asked."""
    answers: list[Any] = [None] * len(nodes)
    connections: list[Any] = [None] * len(nodes)
    data = pack_commands([request.command])
    pending = {asyncio.ensure_future(_ask(runtime, nodes, index, connections, request, data)): index for index in asked}
    until, decided = runtime.now() + request.limit, False
    try:
        while pending:
            if not decided and request.enough(answers):
                decided, until = True, min(until, runtime.now() + LATE_REPLY_GRACE_S)
            left = until - runtime.now()
            if left <= 0 or (decided and not any(nodes[index].is_healthy for index in pending.values())):
                break
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answers[pending.pop(task)] = task.result()
    finally:
        for task, index in pending.items():
            if not task.done():  # If it is done, another task may already have its connection.
                answers[index] = LATE
                nodes[index].fail()
                _stop_waiting(task, nodes[index], connections[index], request)
    return answers


def _stop_waiting(task: asyncio.Task[Any], node: RedlockNode, connection: Any, request: Broadcast) -> None:
    """Stop waiting for the answer of a node that is too slow."""
    if request.must_arrive:
        node.tasks.let_finish(task)
        return
    if request.undo is not None and connection is not None and connection._writer is not None:
        connection._writer.write(pack_commands([request.undo]))
    task.cancel()  # This closes the connection, so that no later request reads the late reply.


async def _ask(  # noqa: PLR0917 - a task's arguments
    runtime: Runtime,
    nodes: Sequence[RedlockNode],
    index: int,
    connections: list[Any],
    request: Broadcast,
    data: bytes,
) -> Any:
    """Send to one node. The connection is checked out here: a task that is cancelled before it begins has none."""
    node = nodes[index]
    connection = connections[index] = node.tasks.checkout()
    try:
        (answer,) = await exchange(node.tasks, runtime, request.name, connection, data, 1, request.limit)
    except BackendUnavailable as error:
        if not error.broken:
            node.fail()
        return error
    node.is_healthy = True
    return answer


INCOMPLETE: Final = object()
"""Returned for a reply that has only partly arrived."""


class NodeConnections:
    """One connection to each node, or None where there is none; one thread uses them at a time, and no read blocks."""

    def __init__(self, nodes: Sequence[RedlockNode]) -> None:
        self._nodes = nodes
        self._connections: list[Any] = [None] * len(nodes)
        self.poll = select.poll()
        self.indexes: dict[int, int] = {}
        """The node's index for each socket's file number."""

    def has(self, index: int) -> bool:
        return self._connections[index] is not None

    def add(self, index: int, connection: Any) -> None:
        """Take an open connection."""
        connection._sock.settimeout(0)
        number = connection._sock.fileno()
        self._connections[index], self.indexes[number] = connection, index
        self.poll.register(number, select.POLLIN)

    def drop(self, index: int) -> None:
        """Close a connection, so that no later request reads its late reply."""
        connection, self._connections[index] = self._connections[index], None
        number = next((number for number, known in self.indexes.items() if known == index), None)
        if number is not None:
            del self.indexes[number]
            self.poll.unregister(number)
        if connection is not None:
            self._nodes[index].threads.discard(connection)

    def send(self, index: int, data: bytes) -> None:
        """Send to a node; raises OSError."""
        self._connections[index]._sock.sendall(data)

    def read(self, index: int) -> Any:
        """Read a reply, an error reply as an exception object, or INCOMPLETE; raises RedisError or OSError."""
        try:
            return read_reply(self._connections[index])
        except RedisConnectionError as error:
            if isinstance(error.__context__, BlockingIOError | ssl.SSLWantReadError):
                return INCOMPLETE
            raise

    def drop_dead(self) -> None:
        """Drop the connections that were closed, or have data although there was no request."""
        for number, _ in self.poll.poll(0):
            self.drop(self.indexes[number])

    def disconnect(self) -> None:
        """Drop all connections."""
        for index in range(len(self._nodes)):
            self.drop(index)


def idle_connections() -> IdlePool[NodeConnections]:
    """Return a pool for NodeConnections that no thread uses."""
    return IdlePool(methodcaller("disconnect"), MAX_IDLE_CONNECTIONS, is_usable=_drop_dead, trusted_s=TRUSTED_IDLE_S)


def _drop_dead(connections: NodeConnections) -> bool:
    """Drop the dead connections; the others are still usable."""
    connections.drop_dead()
    return True
