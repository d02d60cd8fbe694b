"""The nodes of this process in the queues of ZooKeeper: how long each may stay, and who waits for which.

ZooKeeper ends a node with its session, never by time. So a lease that nobody renews, a waiter that asks no more and a
node whose creation was never confirmed are removed from here, by a thread of their own; when the process dies, all of
it ends with the session.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import GetChildren, GetData, SetData
from kazoo.protocol.states import EventType

from dlock_core.backend import Busy
from dlock_core.backends.zookeeper.nodes import text
from dlock_core.backends.zookeeper.session import NotSent, good
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import Scheduler, call_in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.backend import Request
    from dlock_core.backends.zookeeper.nodes import Nodes
    from dlock_core.backends.zookeeper.queue import Line, Node
    from dlock_core.backends.zookeeper.session import Reply, Session
    from dlock_core.runtime import Runtime, Signal

__all__ = ["Place", "Places"]

if TYPE_CHECKING:
    Remove = Callable[[Runtime, "Place"], Coroutine[Any, Any, None]]


logger = logging.getLogger("dlock")

AGAIN: Final = 0.5
"""Seconds after which a removal that failed is tried again."""


@dataclass(slots=True, eq=False)
class Place:
    """Our node in a lock's queue, or what became of an attempt to make one."""

    request: Request
    path: str = ""
    """Empty as long as the node's number is not known."""
    zxid: int = 0
    session: int = 0
    doubtful: bool = False
    """An attempt to make the node has an unknown outcome."""
    due: float = math.inf
    ended: bool = False
    watched: str = ""
    wakes: int = 0
    seen: int = 0
    """As many wake-ups had come when the watch was set."""
    first: tuple[str, str] = ("", "")
    """The node that was first when we last looked, and its owner."""
    signal: Signal | None = None
    look: Callable[[Signal], Reply] | None = None
    """Sends the next look at the queue, which will set the signal."""
    reply: Reply | None = None

    @property
    def node(self) -> str:
        """The node's name."""
        return self.path.rpartition("/")[2]

    def settle(self, path: str, stat: Any) -> None:
        """Note which node is ours."""
        self.path, self.zxid, self.session, self.doubtful = path, stat.czxid, stat.ephemeralOwner, False

    def listen(self, signal: Signal) -> Signal:
        """Have wake-ups set this signal from now on."""
        self.reply, self.signal = None, signal
        return signal

    def answer(self) -> Any:
        """Listen no more; give the answer that came along with the wake-up."""
        self.signal = None
        return self.reply.answer if self.reply is not None else None

    def wake(self, event: Any = None) -> None:
        """Note that who was before us has gone, or (event NONE) that nobody watches any more.

        The queue is looked at again from here, in kazoo's thread: whoever waits is woken once, with the answer.
        """
        self.wakes += 1
        signal, look = self.signal, self.look
        if signal is not None and look is not None and event is not None and event.type == EventType.DELETED:
            self.reply = look(signal)
        elif signal is not None:
            signal.set()


class Places:
    """All places of one store; `remove` takes a node out of a queue."""

    def __init__(self, remove: Remove) -> None:
        self._remove = remove
        self._guard = threading.RLock()  # A signal handler may ask for a lock, too, in the middle of a method of ours.
        self._of: dict[str, Place] = {}
        self._ending: set[Place] = set()
        self._scheduler = Scheduler(
            "dlock-zookeeper", "to remove what nobody renews", self._next_due, self._remove_overdue
        )

    def __len__(self) -> int:
        return len(self._of)

    def get(self, holder: str) -> Place | None:
        """Give the place of a holder."""
        return self._of.get(holder)

    def keep(self, place: Place, seconds: float) -> bool:
        """Let it stay for so long from now; False when it has ended: it is never granted any more."""
        with self._guard:
            if place.ended:
                return False
            self._of[place.request.holder] = place
            self._plan(place, seconds)
            return True

    def end(self, place: Place, seconds: float) -> None:
        """Have it removed in so many seconds, unless `forget` comes first."""
        with self._guard:
            self._end(place)
            self._plan(place, seconds)

    def forget(self, place: Place) -> None:
        """Note that nothing is left of it."""
        with self._guard:
            self._end(place)
            self._ending.discard(place)

    def clear(self) -> None:
        """Forget all: their session has ended."""
        with self._guard:
            self._of.clear()
            self._ending.clear()

    def _end(self, place: Place) -> None:
        place.ended = True
        if self._of.get(place.request.holder) is place:
            del self._of[place.request.holder]
        self._ending.add(place)

    def _plan(self, place: Place, seconds: float) -> None:
        place.due = clock() + seconds
        self._scheduler.plan(place.due)

    def _next_due(self) -> float | None:
        with self._guard:
            return min([place.due for place in (*self._of.values(), *self._ending)], default=None)

    def _remove_overdue(self) -> None:
        for place in self._overdue():
            self._take_out(place)

    def _overdue(self) -> list[Place]:
        with self._guard:
            now = clock()
            for place in [place for place in self._of.values() if place.due <= now]:
                self._end(place)
            return [place for place in self._ending if place.due <= now]

    def _take_out(self, place: Place) -> None:
        self.end(place, AGAIN)
        try:
            run(self._remove(BLOCKING, place))
        except BackendUnavailable:
            pass  # it is tried again, until it is done or the session is over
        except BaseException as error:  # noqa: BLE001 - every other place depends on this thread
            call_in_background(logger.error, "dlock: a node could not be removed", exc_info=error)


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
        was_doubtful, place.path, place.doubtful = place.doubtful or bool(place.path), "", True
        self._keep(place)
        try:
            path, stat, queue = await self._nodes.create(runtime, request)
        except NotSent:
            if not was_doubtful:
                self.places.forget(place)  # nothing has to be removed once there is a connection
            raise
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
