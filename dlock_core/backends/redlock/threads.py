"""Ask several nodes at once from one thread: send to all, then read whatever comes first.

Only a node to which there is no open connection gets a thread for the time of connecting.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from dlock_core.backends.redis.connections import talk
from dlock_core.backends.redis.wire import packed, unavailable
from dlock_core.backends.redlock.circle import MORE
from dlock_core.backends.redlock.node import GRACE
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlock_core.backends.redlock.circle import Circle, Circles
    from dlock_core.backends.redlock.node import Node, Question

__all__ = ["put"]


def put(nodes: Sequence[Node], circles: Circles, asked: Iterable[int], question: Question) -> list[Any]:
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
