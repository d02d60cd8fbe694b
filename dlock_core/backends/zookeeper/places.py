"""What this process has in the queues of the store, and how long each may stay there.

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

from kazoo.protocol.states import EventType

from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.backend import Request
    from dlock_core.backends.zookeeper.wire import Reply
    from dlock_core.runtime import Runtime, Signal

    Remove = Callable[[Runtime, "Place"], Coroutine[Any, Any, None]]

__all__ = ["Place", "Places"]

logger = logging.getLogger("dlock")

AGAIN: Final = 0.5
"""Seconds after which a removal that failed is tried again."""
IDLE: Final = 10.0
"""Seconds without a place after which the thread ends."""


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
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._of: dict[str, Place] = {}
        self._ending: set[Place] = set()
        self._next = self._ends = 0.0
        self._thread: threading.Thread | None = None

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
        now = clock()
        place.due, self._ends = now + seconds, max(self._ends, now + IDLE)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dlock-zookeeper", daemon=True)
            self._thread.start()
        elif place.due < self._next:
            self._next = place.due
            self._wake.set()

    def _run(self) -> None:
        while (pause := self._pause()) is not None:
            self._wake.wait(pause)
            self._wake.clear()
            for place in self._overdue():
                self._take_out(place)

    def _pause(self) -> float | None:
        with self._guard:
            now = clock()
            every = [*self._of.values(), *self._ending]
            if not every and now >= self._ends:
                self._thread = None
                return None
            self._next = min([place.due for place in every] or [self._ends])
            return max(0.0, min(self._next - now, threading.TIMEOUT_MAX))

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
        except Exception:  # this thread must outlive any surprise: every place depends on it
            logger.exception("dlock: a node could not be removed")
