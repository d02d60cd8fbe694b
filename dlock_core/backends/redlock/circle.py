"""Connections to all nodes that are used together, by one thread at a time, and polled as one.

They are kept as a whole between questions, so that a question to five nodes costs one look at what is idle, not five.
"""

from __future__ import annotations

import select
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError

from dlock_core.backends.redis.connections import BlockingIdle, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redlock.node import Node

__all__ = ["MORE", "Circle", "Circles"]

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
