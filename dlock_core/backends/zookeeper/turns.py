"""Our turns in the queues: enter, stay, watch the one before, leave; every step may be repeated after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import GetChildren, GetData, SetData

from dlock_core.backend import Busy
from dlock_core.backends.zookeeper.nodes import text
from dlock_core.backends.zookeeper.places import Place, Places
from dlock_core.backends.zookeeper.session import good

if TYPE_CHECKING:
    from dlock_core.backend import Request
    from dlock_core.backends.zookeeper.line import Line, Node
    from dlock_core.backends.zookeeper.nodes import Nodes
    from dlock_core.backends.zookeeper.session import Session
    from dlock_core.runtime import Runtime

__all__ = ["ALIVE", "SLICE", "Turns"]

SLICE: Final = 5.0
"""The longest wait in seconds before a waiter looks again: a server that fell silent is noticed by it."""
ALIVE: Final = 3.0
"""Seconds after its last question in which a waiter keeps its place."""


class Turns:
    """The places of this process, and what is done with each."""

    def __init__(self, session: Session, nodes: Nodes, timeout: float) -> None:
        self._session, self._nodes, self._timeout = session, nodes, timeout
        self.places = Places(self.remove)

    async def stay(self, runtime: Runtime, place: Place) -> Line | None:
        """Read the queue again; None when our node is not in it, or may be another session's.

        What a server that is cut off tells is old, so a session that has not written for long proves that it lives.
        """
        if not place.path or place.session != self._session.id or not self._keep(place):
            return None
        doubtful = self._session.is_doubtful(runtime.now())
        proof = [SetData(place.path, place.request.owner.encode(), -1)] if doubtful else []
        _, queue = await self._nodes.read(runtime, place.request.name, *proof)
        return queue if queue.find(place.node) else None

    async def enter(self, runtime: Runtime, request: Request, old: Place | None) -> tuple[Place, Line]:
        """Make our node, or find the one that an attempt of unknown outcome has made."""
        place = old if old is not None and self._keep(old) else Place(request)
        if place is old and (queue := await self._find(runtime, place)):
            return place, queue
        place.path, place.doubtful = "", True
        self._keep(place)
        path, stat, queue = await self._nodes.create(runtime, request)
        place.settle(path, stat)
        return place, queue

    async def _find(self, runtime: Runtime, place: Place) -> Line | None:
        """Search the queue for our own nodes: keep one that is this session's, remove the others.

        No request of ours can still be on its way: a session that connects again is closed to what it sent before.
        """
        ours = await self._nodes.owned(runtime, place.request)
        kept = next((path for path, stat in ours if stat.ephemeralOwner == self._session.id), None)
        await self._nodes.delete(runtime, place.request.name, *[path for path, _ in ours if path != kept])
        for path, stat in ours:
            if path == kept:
                place.settle(path, stat)
                return await self.stay(runtime, place)
        return None

    def _keep(self, place: Place) -> bool:
        """Have it stay while a question about it is asked."""
        return self.places.keep(place, self._timeout + ALIVE)

    async def watch(self, runtime: Runtime, place: Place, queue: Line, ahead: Node) -> Busy:
        """Have the end of the one before us wake us, and learn who holds the lock."""
        first = queue.nodes[0]
        if (place.watched, place.seen) != (ahead.name, place.wakes):
            await self._set_watch(runtime, place, ahead)
        elif place.first[0] != first.name:
            place.first = first.name, await self._nodes.owner(runtime, place.request.name, first)
        self.places.keep(place, ALIVE)
        return Busy(SLICE, place.first[1])

    async def _set_watch(self, runtime: Runtime, place: Place, ahead: Node) -> None:
        """Who is before us may be the holder: a look at the end of the wait finds one who is not."""
        name, directory = place.request.name, self._nodes.directory(place.request.name)
        place.seen, place.watched = place.wakes, ""
        place.look = lambda signal: self._session.post(GetChildren(directory, None), signal)
        (found,) = await self._session.ask(runtime, name, [GetData(f"{directory}/{ahead.name}", place.wake)])
        if isinstance(found, NoNodeError):
            place.wake()
            found = (b"", None)
        place.watched, place.first = ahead.name, (ahead.name, text(good(name, found)[0]))

    async def remove(self, runtime: Runtime, place: Place) -> None:
        """Take a place that is at its end out of the queue."""
        paths = [place.path] if place.path else []
        if place.doubtful:
            paths = [path for path, _ in await self._nodes.owned(runtime, place.request)]
        await self._nodes.delete(runtime, place.request.name, *paths)
        self.places.forget(place)
