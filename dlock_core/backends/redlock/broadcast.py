"""One request to several nodes at once, from a thread or a task: send to all, then read the answers as they come.

Only a node to which there is no open connection gets a thread for the time of connecting.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from dlock_core.backends.redis.transport import BlockingIdle, exchange, packed, read, talk, unavailable
from dlock_core.backends.redlock.node import GRACE
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlock_core.backends.redlock.node import Node, Question
    from dlock_core.runtime import Runtime

__all__ = ["put_from_threads"]


def put_from_threads(nodes: Sequence[Node], circles: Circles, asked: Iterable[int], question: Question) -> list[Any]:
    """Give an answer for each node, None where none came."""
    circle = circles.pop()
    hearing = _Hearing(nodes, circle, question)
    try:
        for place in asked:
            hearing.begin(place)
        hearing.listen()
    finally:
        hearing.end()
        circles.push(circle)
    return hearing.answers


class _Hearing:
    """One question from its first request to the last answer that is waited for."""

    def __init__(self, nodes: Sequence[Node], circle: Circle, question: Question) -> None:
        self.nodes, self.circle, self.question = nodes, circle, question
        self.answers: list[Any] = [None] * len(nodes)
        self.data = packed([question.command])
        self.sent: set[int] = set()
        """Whom we listen to."""
        self.called: dict[int, bool] = {}
        """Nodes that are being connected to, and whether we expect an answer although others have decided."""
        self.bell: tuple[socket.socket, socket.socket] | None = None
        self.rung: deque[tuple[int, Any]] = deque()
        self.is_over = False

    def begin(self, place: int) -> None:
        if not self.circle.has(place) and not self._reach(place):
            return
        self.sent.add(place)
        try:
            self.circle.send(place, self.data)
        except OSError as error:
            self._fail(place, error)

    def listen(self) -> None:
        until, decided = clock() + self.question.limit, False
        while self.sent or self.called:
            if not decided and self.question.enough(self.answers):
                decided, until = True, min(until, clock() + GRACE)
            left = until - clock()
            if left <= 0 or (decided and not self.sent and not any(self.called.values())):
                return
            for number, _ in self.circle.poll.poll(left * 1000):
                self._hear(number)

    def end(self) -> None:
        self.is_over = True
        for place in self.sent:
            self.nodes[place].fail()
            self._undo(place)
            self.circle.drop(place)
        if self.bell is not None:
            self.circle.poll.unregister(self.bell[0])
            for end in self.bell:
                end.close()

    def _hear(self, number: int) -> None:
        place = self.circle.places.get(number)
        if place is None:
            self._answer_bell()
        elif place not in self.sent:  # it was not asked: it hung up
            self.circle.drop(place)
        else:
            self._read(place)

    def _read(self, place: int) -> None:
        try:
            answer = self.circle.read(place)
        except (RedisError, OSError) as error:
            self._fail(place, error)
        else:
            if answer is not MORE:
                self.answers[place], self.nodes[place].is_well = answer, True
                self.sent.discard(place)

    def _fail(self, place: int, error: RedisError | OSError) -> None:
        self.sent.discard(place)
        self.circle.drop(place)
        self.answers[place] = failure = unavailable(self.question.name, error, reused=True)
        if failure.broken:
            self.nodes[place].threads.forget()  # one idle connection was dead, so the others may be
        else:
            self.nodes[place].fail()

    def _undo(self, place: int) -> None:
        if self.question.undo is not None:
            with suppress(OSError):
                self.circle.send(place, packed([self.question.undo]))

    def _reach(self, place: int) -> bool:
        """Tell whether there is an open connection after all; if not, have a thread ask over a new one."""
        connection = self.nodes[place].threads.checkout()
        if connection._sock is None:
            self._call(place, connection)
            return False
        self.circle.add(place, connection)
        return True

    def _call(self, place: int, connection: Any) -> None:
        node = self.nodes[place]
        if not node.is_well and node.caller == os.getpid():
            return
        if self.bell is None:
            self.bell = socket.socketpair()
            self.circle.poll.register(self.bell[0], select.POLLIN)
        self.called[place], node.caller = node.is_well, os.getpid()
        threading.Thread(target=self._connect, args=(place, connection), daemon=True, name="dlock-redlock").start()

    def _connect(self, place: int, connection: Any) -> None:
        """Connect and ask, in a thread of its own, and tell the one who waits, if it still does."""
        node, answer = self.nodes[place], None
        try:
            connection.connect()
            if self.question.insists or not self.is_over:
                (answer,) = talk(connection, self.data, 1, self.question.limit)
            if self.is_over and answer is not None and self.question.undo is not None:
                talk(connection, packed([self.question.undo]), 1, self.question.limit)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this node's answer
            node.threads.discard(connection)
            node.fail()
            failure = error if isinstance(error, RedisError | OSError) else OSError(type(error).__name__)
            answer = unavailable(self.question.name, failure, reused=False)
        else:
            node.is_well = True
            node.threads.checkin(connection)
        node.caller = 0
        self.rung.append((place, answer))
        if self.bell is not None:
            with suppress(OSError):
                self.bell[1].send(b".")

    def _answer_bell(self) -> None:
        if self.bell is not None:
            self.bell[0].recv(64)
        while self.rung:
            place, self.answers[place] = self.rung.popleft()
            del self.called[place]


async def put_from_tasks(
    runtime: Runtime, nodes: Sequence[Node], asked: Iterable[int], question: Question
) -> list[Any]:
    """Give an answer for each node, None where none came."""
    answers: list[Any] = [None] * len(nodes)
    carriers: list[Any] = [None] * len(nodes)
    data = packed([question.command])
    pending = {asyncio.ensure_future(_ask(runtime, nodes, place, carriers, question, data)): place for place in asked}
    until, decided = runtime.now() + question.limit, False
    try:
        while pending:
            if not decided and question.enough(answers):
                decided, until = True, min(until, runtime.now() + GRACE)
            left = until - runtime.now()
            if left <= 0 or (decided and not any(nodes[place].is_well for place in pending.values())):
                break
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answers[pending.pop(task)] = task.result()
    finally:
        for task, place in pending.items():
            if not task.done():  # else its connection is somebody else's by now
                nodes[place].fail()
                _leave(task, nodes[place], carriers[place], question)
    return answers


def _leave(task: asyncio.Task[Any], node: Node, carrier: Any, question: Question) -> None:
    """Stop to listen to a node that is too slow."""
    if question.insists:
        node.tasks.leave(task)
        return
    if question.undo is not None and carrier is not None and carrier._writer is not None:
        carrier._writer.write(packed([question.undo]))
    task.cancel()  # its connection is closed: what it carries shall not linger


async def _ask(  # noqa: PLR0917 - a task's arguments
    runtime: Runtime, nodes: Sequence[Node], place: int, carriers: list[Any], question: Question, data: bytes
) -> Any:
    """Ask one node, on a connection that is taken here: a task that is cancelled before it begins has none to lose."""
    node = nodes[place]
    carrier = carriers[place] = node.tasks.checkout()
    try:
        (answer,) = await exchange(node.tasks, runtime, question.name, carrier, data, 1, question.limit)
    except BackendUnavailable as error:
        if not error.broken:
            node.fail()
        return error
    node.is_well = True
    return answer


MORE: Final = object()
"""Not all of the reply is here yet."""


class Circle:
    """A connection to each node, or None where there is none; they never block."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._connections: list[Any] = [None] * len(nodes)
        self.poll = select.poll()
        self.places: dict[int, int] = {}
        """Whose socket has which number."""

    def has(self, place: int) -> bool:
        return self._connections[place] is not None

    def add(self, place: int, connection: Any) -> None:
        """Take in an open connection."""
        connection._sock.settimeout(0)
        number = connection._sock.fileno()
        self._connections[place], self.places[number] = connection, place
        self.poll.register(number, select.POLLIN)

    def drop(self, place: int) -> None:
        """Close a connection: what it carries shall not linger."""
        connection, self._connections[place] = self._connections[place], None
        number = next((number for number, known in self.places.items() if known == place), None)
        if number is not None:
            del self.places[number]
            self.poll.unregister(number)
        if connection is not None:
            self._nodes[place].threads.discard(connection)

    def send(self, place: int, data: bytes) -> None:
        """Send to a node; raises OSError."""
        self._connections[place]._sock.sendall(data)

    def read(self, place: int) -> Any:
        """Read a reply, an error reply as an exception object, or MORE; raises RedisError or OSError."""
        try:
            return read(self._connections[place])
        except RedisConnectionError as error:
            if isinstance(error.__context__, BlockingIOError | ssl.SSLWantReadError):
                return MORE
            raise

    def look(self) -> None:
        """Drop what was closed, or said something that nobody asked for."""
        for number, _ in self.poll.poll(0):
            self.drop(self.places[number])

    def disconnect(self) -> None:
        """Drop them all."""
        for place in range(len(self._nodes)):
            self.drop(place)


class Circles(BlockingIdle):
    """Circles that nobody uses."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__(partial(Circle, nodes))

    def _is_alive(self, connection: Circle) -> bool:
        connection.look()
        return True
