"""Which master has a slot: read from any node, corrected by what the nodes say when asked for what they do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import ClusterError, RedisError

from dlock_core.backends.redis.cluster.node import Node
from dlock_core.backends.redis.wire import Refused, unavailable
from dlock_core.backoff import CHANCE
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.exceptions import AskError

    from dlock_core.backends.redis.cluster.address import Address, Seeds
    from dlock_core.runtime import Runtime

__all__ = ["SLOTS", "Routes"]

SLOTS: Final = 16384
REST: Final = 0.1
"""Seconds between two readings of the map: a cluster without a master for a slot has no better one to show."""


class Routes:
    """The map of slots, shared by all threads and tasks."""

    def __init__(self, seeds: Seeds, limit: float) -> None:
        self._seeds, self._limit = seeds, limit
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Node | None] = [None] * SLOTS
        self._read_at, self._is_doubtful = -REST, True
        self._witness: Node | None = None
        """Whom the last correction pointed at: it surely knows of it."""
        self._node(seeds.addresses[0])  # bad options are refused now

    async def owner(self, runtime: Runtime, slot: int, until: float) -> Node:
        """Give the master of a slot; raises RedisError when nobody can tell."""
        if self._owners[slot] is None or (self._is_doubtful and runtime.now() >= self._read_at + REST):
            await self._read(runtime, until)
        node = self._owners[slot]
        if node is None:
            raise ClusterError(f"no node of the cluster serves slot {slot}")
        return node

    def masters(self) -> list[Node]:
        """Give those who serve slots, by their names."""
        return sorted({node for node in self._owners if node is not None}, key=lambda node: node.title)

    def doubt(self) -> None:
        """Have the map read again before it is used."""
        self._is_doubtful = True

    def moved(self, slot: int, where: AskError, told_by: Node) -> Node:
        """Note another master of a slot, and that more may have changed."""
        node = self._owners[slot] = self._witness = self.named(where, told_by)
        self._is_doubtful = True
        return node

    def named(self, where: AskError, told_by: Node) -> Node:
        """Give the node that another one named; without a host it is on the other's."""
        return self._node(self._reachable(where.host or told_by.host, where.port))

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    async def _read(self, runtime: Runtime, until: float) -> None:
        """Ask one node after the other; each may take half of the time that is left."""
        self._read_at, self._is_doubtful = runtime.now(), False
        failures: list[BackendUnavailable] = []
        for node in self._candidates():
            left = max((until - runtime.now()) / 2, self._limit / 100)
            try:
                self._learn(await _slots(runtime, node, left), node)
            except BackendUnavailable as error:
                failures.append(error)
            else:
                return
        self._is_doubtful = True
        raise _nowhere(failures)

    def _candidates(self) -> list[Node]:
        """Sort those that answered last to the front, the others by how long ago they did not."""
        known = {*self._nodes.values(), *[self._node(seed) for seed in self._seeds.addresses]}
        return sorted(known, key=lambda node: (node.failed_at, node is not self._witness, CHANCE.random()))

    def _learn(self, ranges: Sequence[Any], told_by: Node) -> None:
        owners: list[Node | None] = [None] * SLOTS
        named = set(self._seeds.addresses)
        for first, last, *servers in ranges:
            addresses = [self._reachable(_text(host) or told_by.host, port) for host, port, *_ in servers]
            owners[first : last + 1] = [self._node(addresses[0])] * (last + 1 - first)
            named.update(addresses)
            for address in addresses:  # replicas are only asked for the map
                self._node(address)
        self._owners = owners
        for address in set(self._nodes) - named:
            if gone := self._nodes.pop(address, None):
                gone.close()

    def _node(self, address: Address) -> Node:
        known = self._nodes.get(address)
        return known or self._nodes.setdefault(address, Node(self._seeds.pool(address), address, self._limit))

    def _reachable(self, host: str, port: int) -> Address:
        return self._seeds.remap((host, port)) if self._seeds.remap else (host, port)


def _text(host: Any) -> str:
    return host.decode() if isinstance(host, bytes) else host or ""


async def _slots(runtime: Runtime, node: Node, limit: float) -> Any:
    (reply,) = await node.converse(runtime, "", [("CLUSTER", "SLOTS")], limit)
    if isinstance(reply, RedisError):
        failure = unavailable("", reply, reused=False)
        refused = failure.refused or "cluster support disabled" in failure.reason
        raise BackendUnavailable("", reason=f"{node.title}: {failure.reason}", refused=refused)
    if not reply:
        raise BackendUnavailable("", reason=f"{node.title}: it knows of no slots")
    return reply


def _nowhere(failures: Sequence[BackendUnavailable]) -> RedisError:
    text = "no node of the cluster tells which serves what: " + "; ".join(error.reason for error in failures)
    return Refused(text) if all(error.refused for error in failures) else ClusterError(text)
