"""Finds the master of a slot: the map of slots, its corrections (MOVED, ASK), and the connections to each node."""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from redis.exceptions import (
    AskError,
    ClusterDownError,
    ClusterError,
    MovedError,
    NoScriptError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.redis.addresses import title, transports
from dlock_core.backends.redis.pipeline import PipelinedTransport
from dlock_core.backends.redis.transport import Refused, raise_for_error, retry_once, send_commands, unavailable
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import RNG, Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.addresses import NodeAddress, Seeds
    from dlock_core.backends.redis.protocol import Command, Script
    from dlock_core.backends.redis.transport import Transport
    from dlock_core.runtime import Runtime

__all__ = ["SLOTS", "ClusterCommand", "ClusterNode", "SlotMap", "SlotTransport", "pipeline", "slot_of"]


SLOTS: Final = 16384
MIN_MAP_AGE_S: Final = 0.1
"""The map is not read again before this age: a cluster without a master for a slot has no better map."""


class SlotMap:
    """The map of slots, shared by all threads and tasks."""

    def __init__(self, seeds: Seeds, limit: float) -> None:
        self._seeds, self._limit = seeds, limit
        self._nodes: dict[NodeAddress, ClusterNode] = {}
        self._masters: list[ClusterNode | None] = [None] * SLOTS
        self._read_at, self._is_outdated = -MIN_MAP_AGE_S, True
        self._best_informed: ClusterNode | None = None
        """The node that the last correction named: it certainly knows about the move."""
        self._node(seeds.addresses[0])  # bad options are refused now

    async def master_of(self, runtime: Runtime, slot: int, until: float) -> ClusterNode:
        """Return the master of a slot; raises RedisError when no node knows it."""
        if self._masters[slot] is None or (self._is_outdated and runtime.now() >= self._read_at + MIN_MAP_AGE_S):
            await self._read(runtime, until)
        node = self._masters[slot]
        if node is None:
            raise ClusterError(f"no node of the cluster serves slot {slot}")
        return node

    def masters(self) -> list[ClusterNode]:
        """Return the nodes that serve slots, sorted by name."""
        return sorted({node for node in self._masters if node is not None}, key=lambda node: node.title)

    def invalidate(self) -> None:
        """Read the map again before it is used the next time."""
        self._is_outdated = True

    def record_move(self, slot: int, where: AskError, informant: ClusterNode) -> ClusterNode:
        """Record and return the new master of a slot (MOVED); other slots may have moved with it."""
        node = self._masters[slot] = self._best_informed = self.node_at(where, informant)
        self._is_outdated = True
        return node

    def node_at(self, where: AskError, informant: ClusterNode) -> ClusterNode:
        """Return the node that another one named; without a host, it is on that node's host."""
        return self._node(self._remapped(where.host or informant.host, where.port))

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    async def _read(self, runtime: Runtime, until: float) -> None:
        """Request the map from one node after the other; each may take half of the remaining time."""
        self._read_at, self._is_outdated = runtime.now(), False
        failures: list[BackendUnavailable] = []
        for node in self._candidates():
            left = max((until - runtime.now()) / 2, self._limit / 100)
            try:
                self._update(await _slots(runtime, node, left), node)
            except BackendUnavailable as error:
                failures.append(error)
            else:
                return
        self._is_outdated = True
        raise _no_map(failures)

    def _candidates(self) -> list[ClusterNode]:
        """Return the nodes in the order of the requests: those that answered their last request come first."""
        known = {*self._nodes.values(), *[self._node(seed) for seed in self._seeds.addresses]}
        return sorted(known, key=lambda node: (node.failed_at, node is not self._best_informed, RNG.random()))

    def _update(self, ranges: Sequence[Any], informant: ClusterNode) -> None:
        masters: list[ClusterNode | None] = [None] * SLOTS
        named = set(self._seeds.addresses)
        for first, last, *servers in ranges:
            addresses = [self._remapped(_text(host) or informant.host, port) for host, port, *_ in servers]
            masters[first : last + 1] = [self._node(addresses[0])] * (last + 1 - first)
            named.update(addresses)
            for address in addresses:  # replicas are only used to read the map
                self._node(address)
        self._masters = masters
        for address in set(self._nodes) - named:
            if gone := self._nodes.pop(address, None):
                gone.close()

    def _node(self, address: NodeAddress) -> ClusterNode:
        known = self._nodes.get(address)
        return known or self._nodes.setdefault(address, ClusterNode(self._seeds.pool(address), address, self._limit))

    def _remapped(self, host: str, port: int) -> NodeAddress:
        return self._seeds.remap((host, port)) if self._seeds.remap else (host, port)


def _text(host: Any) -> str:
    return host.decode() if isinstance(host, bytes) else host or ""


async def _slots(runtime: Runtime, node: ClusterNode, limit: float) -> Any:
    (reply,) = await node.send_commands(runtime, "", [("CLUSTER", "SLOTS")], limit)
    if isinstance(reply, RedisError):
        failure = unavailable("", reply, reused=False)
        refused = failure.refused or "cluster support disabled" in failure.reason
        raise BackendUnavailable("", reason=f"{node.title}: {failure.reason}", refused=refused)
    if not reply:
        raise BackendUnavailable("", reason=f"{node.title}: it knows no slots")
    return reply


def _no_map(failures: Sequence[BackendUnavailable]) -> RedisError:
    text = "no node of the cluster knows which node serves which slot: " + "; ".join(error.reason for error in failures)
    return Refused(text) if all(error.refused for error in failures) else ClusterError(text)


class ClusterNode:
    """One server of the cluster, for threads and for tasks."""

    def __init__(self, pool: Any, address: NodeAddress, limit: float) -> None:
        self.host, self.title = address[0], title(pool)
        self._threads, self._tasks = transports(pool, limit)
        self._pipelined = PipelinedTransport(self._tasks)
        self.failed_at = 0.0
        """When its last request failed; 0.0 if that was answered."""

    def transport(self, runtime: Runtime) -> Transport:
        return self._pipelined if isinstance(runtime, Asyncio) else self._threads

    async def exchange(
        self, runtime: Runtime, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        """Send, and read this many replies; raises RedisError, whose text names this node."""
        transport = self.transport(runtime)
        if nudge_after and isinstance(runtime, Asyncio):
            transport = self._tasks  # It sleeps, and must not delay the others.
        connection = transport.checkout()
        try:
            answers = await transport.exchange(runtime, connection, data, replies, limit, nudge_after)
        except BaseException as error:
            transport.discard(connection)
            if isinstance(error, RedisError | OSError):
                self.failed_at = clock()
                transport.forget()
                error.args = (f"{self.title}: {error}",)
            raise
        transport.checkin(connection)
        self.failed_at = 0.0
        return answers

    async def send_commands(self, runtime: Runtime, name: str, commands: Sequence[Command], limit: float) -> list[Any]:
        """Send commands that may be sent twice; raises BackendUnavailable, whose text names this node."""
        transport = self.transport(runtime)
        try:
            answers = await retry_once(lambda: send_commands(transport, runtime, name, list(commands), limit))
        except BackendUnavailable as error:
            self.failed_at = clock()
            transport.forget()
            raise BackendUnavailable(
                name, reason=f"{self.title}: {error.reason}", refused=error.refused
            ) from error.__cause__
        self.failed_at = 0.0
        return answers

    def close(self) -> None:
        self._threads.close()
        self._tasks.close()


MAX_MOVE_WAIT_S: Final = 0.25
"""How long a command is repeated while its slot moves, before the refusal is reported; most moves take less."""
REDIRECT_PAUSE_S: Final = (0.005, 0.03)
ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"


def slot_of(tag: str) -> int:
    """Return the slot of a hash tag: CRC16 in the XMODEM variant (source: the Redis Cluster specification)."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class SlotTransport:
    """The transport to the current master of one slot.

    The node is chosen for each exchange, since a redirection may lead to another one. So there is no connection to
    check out: `checkout` returns the transport itself.
    """

    dlock_is_reused = True
    """Like an idle connection, the map may be outdated: after a connection error it is worth retrying at once."""

    def __init__(self, number: int, slots: SlotMap) -> None:
        self.number, self._slots = number, slots

    def checkout(self) -> SlotTransport:
        return self

    def checkin(self, connection: Any) -> None:
        """Do nothing: the node already has its connection back."""

    discard = checkin

    def forget(self) -> None:
        """Do nothing: the node has already closed its idle connections."""

    close = forget

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        """Send to the master of the slot; a single command that is refused follows the redirection.

        MOVED: the slot has another master for good, and the map is corrected. ASK: the slot is moving, and this key has
        arrived at the other node, which answers for it after ASKING. TRYAGAIN: the keys of the command are on both
        nodes, so it is repeated for up to MAX_MOVE_WAIT_S. Two commands (BLPOP and an acquire) are not repeated,
        because the first may have been executed: the caller tries again.
        """
        now = runtime.now()
        until, move_wait_ends = now + limit, now + min(MAX_MOVE_WAIT_S, limit / 4)
        node, asking = await self._slots.master_of(runtime, self.number, until), False
        for redirections in count():
            answers = await self._send(runtime, node, data, replies, until, nudge_after, asking=asking)
            if not isinstance(answers[0], RedisError):
                break
            following = await self._follow(runtime, answers[0], node, until)
            if following is None or replies > 1:
                break
            if isinstance(answers[0], TryAgainError) and runtime.now() >= move_wait_ends:
                break
            if (
                redirections > 1
            ):  # The first redirection is followed at once, but two nodes may point at each other for a while.
                await runtime.sleep(RNG.uniform(*REDIRECT_PAUSE_S))
            node, asking = following
        return answers

    async def _send(  # noqa: PLR0917
        self,
        runtime: Runtime,
        node: ClusterNode,
        data: bytes,
        replies: int,
        until: float,
        nudge_after: float,
        *,
        asking: bool,
    ) -> list[Any]:
        left = until - runtime.now()
        if left <= 0:
            raise RedisTimeoutError(f"slot {self.number} is moving, and no node that was asked had it in time")
        try:
            if not asking:
                return await node.exchange(runtime, data, replies, left, nudge_after)
            return (await node.exchange(runtime, ASKING + data, replies + 1, left, nudge_after))[1:]
        except (RedisError, OSError):
            self._slots.invalidate()
            raise

    async def _follow(
        self, runtime: Runtime, answer: Any, node: ClusterNode, until: float
    ) -> tuple[ClusterNode, bool] | None:
        """Return the next node after a refusal, and whether to send ASKING; None if the refusal is final."""
        if isinstance(answer, MovedError):
            return self._slots.record_move(self.number, answer, node), False
        if isinstance(answer, AskError):
            return self._slots.node_at(answer, node), True
        if isinstance(answer, ClusterDownError):
            self._slots.invalidate()
        if isinstance(answer, TryAgainError):
            return await self._slots.master_of(runtime, self.number, until), False
        return None


class ClusterCommand(NamedTuple):
    """A command for one slot that may be sent twice; with its script, if it runs one by digest."""

    slot: SlotTransport
    words: Command
    script: Script | None = None


async def pipeline(
    slots: SlotMap, runtime: Runtime, name: str, commands: Sequence[ClusterCommand], limit: float
) -> list[Any]:
    """Send each command to its master, all commands for one node in one write; return their replies in order.

    A reply that is missing is a BackendUnavailable object. Raises BackendUnavailable when no node knows the map.
    """
    answers: list[Any] = [None] * len(commands)
    for node, indexes in (await _by_node(slots, runtime, name, commands, limit)).items():
        try:
            replies = await node.send_commands(runtime, name, [commands[index].words for index in indexes], limit)
        except BackendUnavailable as error:
            slots.invalidate()
            replies = [error] * len(indexes)
        for index, answer in zip(indexes, replies, strict=True):
            answers[index] = answer
    return [
        await _resolved(runtime, name, command, answer, limit)
        for command, answer in zip(commands, answers, strict=True)
    ]


async def _by_node(
    slots: SlotMap, runtime: Runtime, name: str, commands: Sequence[ClusterCommand], limit: float
) -> dict[ClusterNode, list[int]]:
    until = runtime.now() + limit
    found: dict[ClusterNode, list[int]] = {}
    for index, command in enumerate(commands):
        try:
            node = await slots.master_of(runtime, command.slot.number, until)
        except RedisError as error:
            raise unavailable(name, error, reused=False) from error
        found.setdefault(node, []).append(index)
    return dict(sorted(found.items(), key=lambda item: item[0].failed_at))


async def _resolved(runtime: Runtime, name: str, command: ClusterCommand, answer: Any, limit: float) -> Any:
    """Return a reply, or repeat a refused command alone: it follows its slot, and loads its script on the node."""
    try:
        if isinstance(answer, AskError | TryAgainError | NoScriptError):
            words = command.words
            if command.script is not None:
                words = ("EVAL", command.script.text, *words[2:])
            (answer,) = await send_commands(command.slot, runtime, name, [words], limit)
        return raise_for_error(name, answer)
    except BackendUnavailable as error:
        return error
