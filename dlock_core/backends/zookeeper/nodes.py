"""The nodes of the locks: their paths, the requests on them, and the queue that they form.

A node's name is its mode, its holder and the number that ZooKeeper assigned: "x-<32 hex>-0000000042". A shared node
holds the lock when no exclusive one is ahead; an exclusive one must be first. A mark "f-<offset>" raises the tokens.
Each request takes one round trip. Locks are containers, which ZooKeeper removes some time after they have become empty;
so any of them may be gone.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create, Create2, Delete, Exists, GetChildren, GetData, Sync
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.zookeeper.session import checked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest
    from dlock_core.backends.zookeeper.session import EnsembleAddress, ZooKeeperSession
    from dlock_core.runtime import Runtime

__all__ = ["EXTRA_S_PER_REQUEST", "LockNodes", "Queue", "QueueNode", "component", "name_of", "parse_queue"]

CONTAINER, QUEUED = 4, 3  # flags of ZooKeeper's create: removed when empty; ephemeral and sequential
MAX_KNOWN_LOCKS: Final = 10_000
"""Locks whose node is believed to exist; being wrong costs one more round trip."""
MAX_LOCKS_PER_READ: Final = 200
"""Locks read by one inspection round trip."""
EXTRA_S_PER_REQUEST: Final = 0.002
"""Seconds that each request of a batch adds to its time limit."""


class CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """Create a node that ZooKeeper removes once it is empty again; kazoo does not support this request."""

    type = 19


class LockNodes:
    """All locks below one path."""

    def __init__(self, session: ZooKeeperSession, address: EnsembleAddress, below: str) -> None:
        self._session = session
        self._parents = tuple(accumulate(("", *address.chroot, below), lambda path, part: f"{path}/{part}"))[1:]
        self._acl = CREATOR_ALL_ACL if address.credential else OPEN_ACL_UNSAFE
        self._known: dict[str, None] = {}

    def directory(self, name: str) -> str:
        """Return the path of a lock."""
        return f"{self._parents[-1]}/{component(name)}"

    async def create(self, runtime: Runtime, request: AcquireRequest) -> tuple[str, Any, Queue]:
        """Create a node in the queue and return its path, its stat and the queue; also for a lock without a node."""
        directory, owner = self.directory(request.name), request.owner.encode()
        node = Create2(f"{directory}/{prefix(request.holder, shared=request.shared)}", owner, self._acl, QUEUED)
        container = CreateContainer(directory, b"", self._acl, CONTAINER)
        above = [Create(path, b"", self._acl, 0) for path in self._parents]
        likely = 0 if directory in self._known else 1 if self._known else 2
        created = children = None
        for parents in ([], [container], [*above, container])[likely:]:
            questions = [*parents, node, GetChildren(directory, None)]
            *_, created, children = await self._session.ask(runtime, request.name, questions)
            if not isinstance(created, NoNodeError):
                break
        path, stat = checked(request.name, created)
        self._remember(directory)
        return path, stat, parse_queue(checked(request.name, children))

    async def look(self, runtime: Runtime, name: str) -> Queue:
        """Read the queue as it is now, from any server."""
        path = self.directory(name)
        return (await self.read(runtime, name, Sync(path)))[1]

    async def read(self, runtime: Runtime, name: str, *before: Any) -> tuple[list[Any], Queue]:
        """Read the queue from the server, after some other requests, whose answers come first."""
        questions = [*before, GetChildren(self.directory(name), None)]
        *answers, children = await self._session.ask(runtime, name, questions)
        return answers, parse_queue([] if isinstance(children, NoNodeError) else checked(name, children))

    async def owned(self, runtime: Runtime, request: AcquireRequest) -> list[tuple[str, Any]]:
        """Search the queue for the nodes of one holder; return their paths and stats."""
        nodes = (await self.look(runtime, request.name)).of(request.holder)
        paths = [f"{self.directory(request.name)}/{node.name}" for node in nodes]
        stats = await self._ask(runtime, request.name, [Exists(path, None) for path in paths])
        return [
            (path, stat) for path, stat in zip(paths, stats, strict=True) if checked(request.name, stat) is not None
        ]

    async def delete(self, runtime: Runtime, name: str, *paths: str) -> bool:
        """Remove nodes; return False if one of them did not exist."""
        answers = await self._ask(runtime, name, [Delete(path, -1) for path in paths])
        were_there = [checked(name, gone) for gone in answers if not isinstance(gone, NoNodeError)]
        return len(were_there) == len(paths)

    async def owner(self, runtime: Runtime, name: str, node: QueueNode) -> str:
        """Read a holder's owner text."""
        (found,) = await self._session.ask(runtime, name, [GetData(f"{self.directory(name)}/{node.name}", None)])
        return "" if isinstance(found, NoNodeError) else text(checked(name, found)[0])

    async def raise_tokens(self, runtime: Runtime, name: str, queue: Queue, offset: int) -> None:
        """Mark the lock permanently, so that all its tokens are greater from now on."""
        directory = self.directory(name)
        older = [Delete(f"{directory}/{mark(each)}", -1) for each in queue.marks]
        raised = Create(f"{directory}/{mark(offset)}", b"", self._acl, 0)
        made, *_ = await self._session.ask(runtime, name, [raised, *older])
        if not isinstance(made, NodeExistsError):
            checked(name, made)

    async def names(self, runtime: Runtime) -> list[str]:
        """List the locks that have a node."""
        root = self._parents[-1]
        _, parts = await self._session.ask(runtime, "", [Sync(root), GetChildren(root, None)])
        return [] if isinstance(parts, NoNodeError) else sorted(map(name_of, checked("", parts)))

    async def states(self, runtime: Runtime, names: Sequence[str]) -> list[LockState]:
        """Return the holders and waiters of any number of locks."""
        states: list[LockState] = []
        for start in range(0, len(names), MAX_LOCKS_PER_READ):
            states += await self._states(runtime, names[start : start + MAX_LOCKS_PER_READ])
        return states

    async def _states(self, runtime: Runtime, names: Sequence[str]) -> list[LockState]:
        directories = [self.directory(name) for name in names]
        looks = [GetChildren(path, None) for path in directories]
        _, *children = await self._ask(runtime, "", [Sync(self._parents[-1]), *looks])
        queues = [parse_queue([] if isinstance(each, NoNodeError) else checked("", each)) for each in children]
        pairs = [(path, queue) for path, queue in zip(directories, queues, strict=True)]
        reads = [GetData(f"{path}/{node.name}", None) for path, queue in pairs for node in queue.nodes]
        found = iter(await self._ask(runtime, "", reads))
        return [
            _state(name, queue, [next(found) for _ in queue.nodes]) for name, queue in zip(names, queues, strict=True)
        ]

    async def _ask(self, runtime: Runtime, name: str, questions: Sequence[Any]) -> list[Any]:
        """Send any number of requests, or none."""
        return (
            await self._session.ask(runtime, name, questions, more=EXTRA_S_PER_REQUEST * len(questions))
            if questions
            else []
        )

    def _remember(self, directory: str) -> None:
        if len(self._known) >= MAX_KNOWN_LOCKS:
            self._known.pop(next(iter(self._known)), None)
        self._known[directory] = None


def _state(name: str, queue: Queue, found: Sequence[Any]) -> LockState:
    read = {
        node: checked(name, one)
        for node, one in zip(queue.nodes, found, strict=True)
        if not isinstance(one, NoNodeError)
    }
    holders = [
        Holder(node.holder, read[node][1].czxid + queue.offset, node.shared, text(read[node][0]), None)
        for node in queue.holders()
        if node in read
    ]
    waiters = [
        Waiter(node.holder, node.shared, text(read[node][0]), max(0.0, time.time() - read[node][1].ctime / 1000))
        for node in queue.waiters()
        if node in read
    ]
    return LockState(name, tuple(holders), tuple(waiters))


def text(data: bytes) -> str:
    """Read the owner's text from a node."""
    return data.decode(errors="replace")


_NODE: Final = re.compile(r"([xs])-([0-9a-f]{32})-(-?\d{9,10})")
_MARK: Final = "f-"
_MARKED: Final = re.compile(rf"{_MARK}([0-9]{{1,19}})")
MAX_OFFSET: Final = 1 << 62
"""With a czxid added, it fits into 63 bits; a mark that is greater, or not a number, is not ours."""
_WRAP: Final = 1 << 32


class QueueNode(NamedTuple):
    """One node in the queue, a holder's or a waiter's."""

    order: int
    shared: bool
    holder: str
    name: str


@dataclass(frozen=True, slots=True)
class Queue:
    """All nodes in order, and the offset that is added to a node's czxid to get its token."""

    nodes: tuple[QueueNode, ...]
    marks: tuple[int, ...]

    @property
    def offset(self) -> int:
        return self.marks[-1] if self.marks else 0

    def holders(self) -> tuple[QueueNode, ...]:
        """Return the holders: the first node, and if it is shared, all shared ones up to the first exclusive one."""
        stop = next((index for index, node in enumerate(self.nodes) if not node.shared), len(self.nodes))
        return self.nodes[: stop or 1]

    def waiters(self) -> tuple[QueueNode, ...]:
        """Return the waiters."""
        return self.nodes[len(self.holders()) :]

    def ahead(self, node: QueueNode | None, *, shared: bool) -> QueueNode | None:
        """Return the nearest node for whose end this one (None: a newcomer) must wait; None if it holds the lock."""
        before = self.nodes if node is None else self.nodes[: self.nodes.index(node)]
        return next((other for other in reversed(before) if not (shared and other.shared)), None)

    def find(self, name: str) -> QueueNode | None:
        """Return the node with this name."""
        return next((node for node in self.nodes if node.name == name), None)

    def of(self, holder: str) -> list[QueueNode]:
        """Return the nodes of a holder: one, or two when an attempt of unknown outcome was repeated."""
        return [node for node in self.nodes if node.holder == holder]


def parse_queue(children: Sequence[str]) -> Queue:
    """Parse the children of a lock's node; foreign nodes are ignored."""
    nodes = [_node(found) for found in map(_NODE.fullmatch, children) if found]
    if len(nodes) > 1:
        nodes.sort()
        if nodes[-1].order - nodes[0].order > _WRAP // 2:  # the numbers have 32 bits, and wrap around
            nodes.sort(key=lambda node: node.order % _WRAP)
    marks = sorted(int(found[1]) for found in map(_MARKED.fullmatch, children) if found)
    return Queue(tuple(nodes), tuple(each for each in marks if each <= MAX_OFFSET))


def _node(found: re.Match[str]) -> QueueNode:
    return QueueNode(int(found[3]), found[1] == "s", found[2], found[0])


def prefix(holder: str, *, shared: bool) -> str:
    """Return the beginning of a node's name; ZooKeeper adds the number."""
    return f"{'s' if shared else 'x'}-{holder}-"


def mark(offset: int) -> str:
    """Return the name of the mark for an offset."""
    return f"{_MARK}{offset}"


def component(name: str) -> str:
    """Return a path component for a lock's name, which has no slash; "." and ".." have a special meaning in paths."""
    return name if name.strip(".") else name.replace(".", "%2E")


def name_of(component: str) -> str:
    """Return the lock's name of a path component."""
    return component if component.replace("%2E", "") else component.replace("%2E", ".")
