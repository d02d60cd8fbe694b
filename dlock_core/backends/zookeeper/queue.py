"""The queue of one lock, read from the names of its nodes: pure, no I/O.

A node's name is its mode, its holder and the number that ZooKeeper gave it: "x-<32 hex>-0000000042". A shared node
holds the lock when no exclusive one is ahead; an exclusive one must be first. A mark "f-<offset>" raises the tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Queue", "QueueNode", "component", "mark", "name_of", "parse_queue", "prefix"]

_NODE: Final = re.compile(r"([xs])-([0-9a-f]{32})-(-?\d{9,10})")
_MARK: Final = "f-"
_MARKED: Final = re.compile(rf"{_MARK}([0-9]{{1,19}})")
MAX_OFFSET: Final = 1 << 62
"""With a czxid added, it fits into 63 bits; a mark of more, or of what is no number, is not ours."""
_WRAP: Final = 1 << 32


class QueueNode(NamedTuple):
    """One node in the queue, a holder's or a waiter's."""

    order: int
    shared: bool
    holder: str
    name: str


@dataclass(frozen=True, slots=True)
class Queue:
    """All nodes in order, and what is added to a node's czxid to make its token."""

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
        """Return the nearest one whose end this one (None: a newcomer) must wait for; None when it is in."""
        before = self.nodes if node is None else self.nodes[: self.nodes.index(node)]
        return next((other for other in reversed(before) if not (shared and other.shared)), None)

    def find(self, name: str) -> QueueNode | None:
        """Return the node with this name."""
        return next((node for node in self.nodes if node.name == name), None)

    def of(self, holder: str) -> list[QueueNode]:
        """Return the nodes of a holder: one, or two when an attempt of unknown outcome was repeated."""
        return [node for node in self.nodes if node.holder == holder]


def parse_queue(children: Sequence[str]) -> Queue:
    """Read the children of a lock's node; what is not ours is ignored."""
    nodes = [_node(found) for found in map(_NODE.fullmatch, children) if found]
    if len(nodes) > 1:
        nodes.sort()
        if nodes[-1].order - nodes[0].order > _WRAP // 2:  # the numbers have 32 bits, and begin again after the last
            nodes.sort(key=lambda node: node.order % _WRAP)
    marks = sorted(int(found[1]) for found in map(_MARKED.fullmatch, children) if found)
    return Queue(tuple(nodes), tuple(each for each in marks if each <= MAX_OFFSET))


def _node(found: re.Match[str]) -> QueueNode:
    return QueueNode(int(found[3]), found[1] == "s", found[2], found[0])


def prefix(holder: str, *, shared: bool) -> str:
    """Begin a node's name; ZooKeeper adds the number."""
    return f"{'s' if shared else 'x'}-{holder}-"


def mark(offset: int) -> str:
    """Name the mark of an offset."""
    return f"{_MARK}{offset}"


def component(name: str) -> str:
    """Make one component of a path out of a lock's name, which has no slash; "." and ".." mean something there."""
    return name if name.strip(".") else name.replace(".", "%2E")


def name_of(component: str) -> str:
    """Return the lock's name back."""
    return component if component.replace("%2E", "") else component.replace("%2E", ".")
