"""The nodes of this process in the queues of ZooKeeper: how long each may stay, and which one each waits for.

ZooKeeper ends a node with its session, never by time. So a separate thread here removes a lease that is not renewed, a
waiter that has stopped asking, and a node whose creation was never confirmed; when the process dies, all of them end
with the session.
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
from dlock_core.backends.zookeeper.session import NotSent, checked
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import Scheduler, call_in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.zookeeper.connection import KazooReply
    from dlock_core.backends.zookeeper.nodes import LockNodes, Queue, QueueNode
    from dlock_core.backends.zookeeper.session import ZooKeeperSession
    from dlock_core.runtime import Runtime, Signal

__all__ = ["OwnNode", "OwnNodes"]

if TYPE_CHECKING:
    Remove = Callable[[Runtime, "OwnNode"], Coroutine[Any, Any, None]]


logger = logging.getLogger("dlock")

REMOVAL_RETRY_DELAY_S: Final = 0.5
"""Seconds after which a failed removal is retried."""


@dataclass(slots=True, eq=False)
class OwnNode:
    """Our node in a lock's queue, or an attempt to create one."""

    request: AcquireRequest
    path: str = ""
    """Empty until the node's number is known."""
    zxid: int = 0
    session: int = 0
    doubtful: bool = False
    """Whether an attempt to create the node has an unknown outcome."""
    due: float = math.inf
    ended: bool = False
    watched: str = ""
    wakes: int = 0
    seen: int = 0
    """The number of wake-ups when the watch was set."""
    first: tuple[str, str] = ("", "")
    """The node that was first at the last check, and its owner."""
    signal: Signal | None = None
    look: Callable[[Signal], KazooReply] | None = None
    """Sends the next read of the queue, which will set the signal."""
    reply: KazooReply | None = None

    @property
    def node(self) -> str:
        """The node's name."""
        return self.path.rpartition("/")[2]

    def settle(self, path: str, stat: Any) -> None:
        """Record which node is ours."""
        self.path, self.zxid, self.session, self.doubtful = path, stat.czxid, stat.ephemeralOwner, False

    def listen(self, signal: Signal) -> Signal:
        """Set this signal at every wake-up from now on."""
        self.reply, self.signal = None, signal
        return signal

    def answer(self) -> Any:
        """Stop listening, and return the answer that came with the wake-up."""
        self.signal = None
        return self.reply.answer if self.reply is not None else None

    def wake(self, event: Any = None) -> None:
        """Record that the node ahead of ours has gone, or (event NONE) that the watch has ended.

        The queue is read again from here, in kazoo's thread, so that the waiter is woken only once, with the answer.
        """
        self.wakes += 1
        signal, look = self.signal, self.look
        if signal is not None and look is not None and event is not None and event.type == EventType.DELETED:
            self.reply = look(signal)
        elif signal is not None:
            signal.set()


class OwnNodes:
    """All nodes of one store; `remove` takes a node out of a queue."""

    def __init__(self, remove: Remove) -> None:
        self._remove = remove
        self._guard = threading.RLock()  # A signal handler may also request a lock, in one of these methods.
        self._of: dict[str, OwnNode] = {}
        self._ending: set[OwnNode] = set()
        self._scheduler = Scheduler(
            "dlock-zookeeper", "to remove what is not renewed", self._next_due, self._remove_overdue
        )

    def __len__(self) -> int:
        return len(self._of)

    def get(self, holder: str) -> OwnNode | None:
        """Return the node of a holder."""
        return self._of.get(holder)

    def keep(self, own_node: OwnNode, seconds: float) -> bool:
        """Extend the time that it may stay; return False if it has ended, and can no longer be granted."""
        with self._guard:
            if own_node.ended:
                return False
            self._of[own_node.request.holder] = own_node
            self._plan(own_node, seconds)
            return True

    def end(self, own_node: OwnNode, seconds: float) -> None:
        """End it: it is removed in this many seconds, unless `forget` is called first."""
        with self._guard:
            self._end(own_node)
            self._plan(own_node, seconds)

    def forget(self, own_node: OwnNode) -> None:
        """Forget it, because nothing is left of it in the queue."""
        with self._guard:
            self._end(own_node)
            self._ending.discard(own_node)

    def clear(self) -> None:
        """Forget all: their session has ended."""
        with self._guard:
            self._of.clear()
            self._ending.clear()

    def _end(self, own_node: OwnNode) -> None:
        own_node.ended = True
        if self._of.get(own_node.request.holder) is own_node:
            del self._of[own_node.request.holder]
        self._ending.add(own_node)

    def _plan(self, own_node: OwnNode, seconds: float) -> None:
        own_node.due = clock() + seconds
        self._scheduler.plan(own_node.due)

    def _next_due(self) -> float | None:
        with self._guard:
            return min([own_node.due for own_node in (*self._of.values(), *self._ending)], default=None)

    def _remove_overdue(self) -> None:
        for own_node in self._overdue():
            self._take_out(own_node)

    def _overdue(self) -> list[OwnNode]:
        with self._guard:
            now = clock()
            for own_node in [own_node for own_node in self._of.values() if own_node.due <= now]:
                self._end(own_node)
            return [own_node for own_node in self._ending if own_node.due <= now]

    def _take_out(self, own_node: OwnNode) -> None:
        # The next attempt is planned before this one is made. So a node whose removal fails in any way stays planned
        # until it is gone or its session has ended; a success calls `forget`.
        self.end(own_node, REMOVAL_RETRY_DELAY_S)
        try:
            run(self._remove(BLOCKING, own_node))
        except BackendUnavailable:
            pass  # The attempt that is already planned repeats it.
        except BaseException as error:  # noqa: BLE001 - every other node depends on this thread
            call_in_background(logger.error, "dlock: a node could not be removed", exc_info=error)


MAX_WAIT_S: Final = 5.0
"""The longest wait in seconds before a waiter checks again, to detect a server that fell silent."""
WAITER_GRACE_S: Final = 3.0
"""Seconds after its last request for which a waiter keeps its node."""


class QueueClient:
    """The nodes of this process, and the operations on them."""

    def __init__(self, session: ZooKeeperSession, nodes: LockNodes, timeout: float) -> None:
        self._session, self._nodes, self._timeout = session, nodes, timeout
        self.own_nodes = OwnNodes(self.remove)

    async def stay(self, runtime: Runtime, own_node: OwnNode) -> Queue | None:
        """Read the queue again; return None if our node is not in it, or may belong to another session.

        A server that is cut off returns outdated data, so a session without a recent write first proves that it is
        alive.
        """
        if not own_node.path or own_node.session != self._session.id or not self._keep(own_node):
            return None
        doubtful = self._session.is_doubtful(runtime.now())
        proof = [SetData(own_node.path, own_node.request.owner.encode(), -1)] if doubtful else []
        _, queue = await self._nodes.read(runtime, own_node.request.name, *proof)
        return queue if queue.find(own_node.node) else None

    async def enter(self, runtime: Runtime, request: AcquireRequest, old: OwnNode | None) -> tuple[OwnNode, Queue]:
        """Create our node, or find the one that an attempt of unknown outcome has created."""
        own_node = old if old is not None and self._keep(old) else OwnNode(request)
        if own_node is old and (queue := await self._find(runtime, own_node)):
            return own_node, queue
        # From here until the reply, the servers may have created a node whose name is unknown. The attempt is recorded
        # before it is made, so that after an interrupt or a lost reply the node is found by its holder and removed.
        was_doubtful, own_node.path, own_node.doubtful = own_node.doubtful or bool(own_node.path), "", True
        self._keep(own_node)
        try:
            path, stat, queue = await self._nodes.create(runtime, request)
        except NotSent:
            if not was_doubtful:
                # No request was sent, so there is no node to remove once there is a connection again.
                self.own_nodes.forget(own_node)
            raise
        own_node.settle(path, stat)
        return own_node, queue

    async def _find(self, runtime: Runtime, own_node: OwnNode) -> Queue | None:
        """Search the queue for our own nodes: keep one that belongs to this session, remove the others.

        No request of ours can still be in flight: after a reconnect, a session ignores what it sent before.
        """
        ours = await self._nodes.owned(runtime, own_node.request)
        kept = next((path for path, stat in ours if stat.ephemeralOwner == self._session.id), None)
        await self._nodes.delete(runtime, own_node.request.name, *[path for path, _ in ours if path != kept])
        for path, stat in ours:
            if path == kept:
                own_node.settle(path, stat)
                return await self.stay(runtime, own_node)
        return None

    def _keep(self, own_node: OwnNode) -> bool:
        """Extend its stay by the time that a request may take."""
        return self.own_nodes.keep(own_node, self._timeout + WAITER_GRACE_S)

    async def watch(self, runtime: Runtime, own_node: OwnNode, queue: Queue, ahead: QueueNode) -> Busy:
        """Watch the node ahead of ours, and read the owner of the lock."""
        first = queue.nodes[0]
        if (own_node.watched, own_node.seen) != (ahead.name, own_node.wakes):
            await self._set_watch(runtime, own_node, ahead)
        elif own_node.first[0] != first.name:
            own_node.first = first.name, await self._nodes.owner(runtime, own_node.request.name, first)
        self.own_nodes.keep(own_node, WAITER_GRACE_S)
        return Busy(MAX_WAIT_S, own_node.first[1])

    async def _set_watch(self, runtime: Runtime, own_node: OwnNode, ahead: QueueNode) -> None:
        """Watch the node ahead and read its owner; if that is a waiter, the end of the wait reports the holder's."""
        name, directory = own_node.request.name, self._nodes.directory(own_node.request.name)
        own_node.seen, own_node.watched = own_node.wakes, ""
        own_node.look = lambda signal: self._session.post(GetChildren(directory, None), signal)
        (found,) = await self._session.ask(runtime, name, [GetData(f"{directory}/{ahead.name}", own_node.wake)])
        if isinstance(found, NoNodeError):
            own_node.wake()
            found = (b"", None)
        own_node.watched, own_node.first = ahead.name, (ahead.name, text(checked(name, found)[0]))

    async def remove(self, runtime: Runtime, own_node: OwnNode) -> None:
        """Remove an expired node from the queue."""
        paths = [own_node.path] if own_node.path else []
        if own_node.doubtful:
            paths = [path for path, _ in await self._nodes.owned(runtime, own_node.request)]
        await self._nodes.delete(runtime, own_node.request.name, *paths)
        self.own_nodes.forget(own_node)
