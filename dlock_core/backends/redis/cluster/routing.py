"""The way to the master of a slot: the map of slots, its corrections (MOVED, ASK), and the connections to each node."""

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

from dlock_core.backends.redis.addresses import title, wires
from dlock_core.backends.redis.transport import Refused, answered, converse, twice, unavailable
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import CHANCE, Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.addresses import Address, Seeds
    from dlock_core.backends.redis.scripts import Script
    from dlock_core.backends.redis.transport import Command, Wire
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


class Node:
    """One server; that of threads and tasks alike."""

    def __init__(self, pool: Any, address: Address, limit: float) -> None:
        self.host, self.title = address[0], title(pool)
        self._threads, self._tasks = wires(pool, limit)
        self.failed_at = 0.0
        """When it did not answer; 0.0 when it answered last."""

    def wire(self, runtime: Runtime) -> Wire:
        return self._tasks if isinstance(runtime, Asyncio) else self._threads

    async def exchange(
        self, runtime: Runtime, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        """Send and read so many replies; raises RedisError, which names this node."""
        wire = self.wire(runtime)
        connection = wire.checkout()
        try:
            answers = await wire.exchange(runtime, connection, data, replies, limit, nudge_after)
        except BaseException as error:
            wire.discard(connection)
            if isinstance(error, RedisError | OSError):
                self.failed_at = clock()
                wire.forget()
                error.args = (f"{self.title}: {error}",)
            raise
        wire.checkin(connection)
        self.failed_at = 0.0
        return answers

    async def converse(self, runtime: Runtime, name: str, commands: Sequence[Command], limit: float) -> list[Any]:
        """Ask what does no harm when it is asked twice; raises BackendUnavailable."""
        wire = self.wire(runtime)
        try:
            answers = await twice(lambda: converse(wire, runtime, name, list(commands), limit))
        except BackendUnavailable as error:
            self.failed_at = clock()
            wire.forget()
            raise BackendUnavailable(
                name, reason=f"{self.title}: {error.reason}", refused=error.refused
            ) from error.__cause__
        self.failed_at = 0.0
        return answers

    def close(self) -> None:
        self._threads.close()
        self._tasks.close()


PATIENCE: Final = 0.25
"""Seconds in which a slot that moves is asked again before that is told; most have moved by then."""
JITTER: Final = (0.005, 0.03)
ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"


def slot_of(tag: str) -> int:
    """Give the slot of a hash tag: CRC16 in the XMODEM form (source: the Redis Cluster specification)."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class Slot:
    """A wire to whoever has the slot. It stands for its connections: which one it is turns out when it is used."""

    dlock_used = 1.0
    """Like an idle connection, the map may be old: after a connection error it is worth to ask again at once."""

    def __init__(self, number: int, routes: Routes) -> None:
        self.number, self._routes = number, routes

    def checkout(self) -> Slot:
        return self

    def checkin(self, connection: Any) -> None:
        """Nothing to take back."""

    discard = checkin

    def forget(self) -> None:
        """The node has done so."""

    close = forget

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        """Send to the master of the slot; a single command, refused because the slot moves, is sent where it goes."""
        now = runtime.now()
        until, patience = now + limit, now + min(PATIENCE, limit / 4)
        node, asking = await self._routes.owner(runtime, self.number, until), False
        for turn in count():
            answers = await self._put(runtime, node, data, replies, until, nudge_after, asking=asking)
            if not isinstance(answers[0], RedisError):
                break
            following = await self._follow(runtime, answers[0], node, until)
            if following is None or replies > 1:
                break
            if isinstance(answers[0], TryAgainError) and runtime.now() >= patience:
                break
            if turn > 1:  # a redirection leads on at once, but two nodes may point at each other for a while
                await runtime.sleep(CHANCE.uniform(*JITTER))
            node, asking = following
        return answers

    async def _put(  # noqa: PLR0917
        self, runtime: Runtime, node: Node, data: bytes, replies: int, until: float, nudge_after: float, *, asking: bool
    ) -> list[Any]:
        left = until - runtime.now()
        if left <= 0:
            raise RedisTimeoutError(f"slot {self.number} moves: none of the nodes that were asked had it in time")
        try:
            if not asking:
                return await node.exchange(runtime, data, replies, left, nudge_after)
            return (await node.exchange(runtime, ASKING + data, replies + 1, left, nudge_after))[1:]
        except (RedisError, OSError):
            self._routes.doubt()
            raise

    async def _follow(self, runtime: Runtime, answer: Any, node: Node, until: float) -> tuple[Node, bool] | None:
        """Tell who is to be asked after a refusal, and whether as one to whom the slot is still on its way."""
        if isinstance(answer, MovedError):
            return self._routes.moved(self.number, answer, node), False
        if isinstance(answer, AskError):
            return self._routes.named(answer, node), True
        if isinstance(answer, ClusterDownError):
            self._routes.doubt()
        if isinstance(answer, TryAgainError):
            return await self._routes.owner(runtime, self.number, until), False
        return None


class Question(NamedTuple):
    """A command that does no harm when it is asked twice; if it runs a script by its digest, also the script."""

    slot: Slot
    command: Command
    script: Script | None = None


async def put(routes: Routes, runtime: Runtime, name: str, questions: Sequence[Question], limit: float) -> list[Any]:
    """Give an answer for each, in order: BackendUnavailable where there is none. Raises it when nobody has the map."""
    answers: list[Any] = [None] * len(questions)
    for node, places in (await _by_node(routes, runtime, name, questions, limit)).items():
        try:
            told = await node.converse(runtime, name, [questions[place].command for place in places], limit)
        except BackendUnavailable as error:
            routes.doubt()
            told = [error] * len(places)
        for place, answer in zip(places, told, strict=True):
            answers[place] = answer
    return [
        await _proper(runtime, name, question, answer, limit)
        for question, answer in zip(questions, answers, strict=True)
    ]


async def _by_node(
    routes: Routes, runtime: Runtime, name: str, questions: Sequence[Question], limit: float
) -> dict[Node, list[int]]:
    until = runtime.now() + limit
    found: dict[Node, list[int]] = {}
    for place, question in enumerate(questions):
        try:
            node = await routes.owner(runtime, question.slot.number, until)
        except RedisError as error:
            raise unavailable(name, error, reused=False) from error
        found.setdefault(node, []).append(place)
    return dict(sorted(found.items(), key=lambda item: item[0].failed_at))


async def _proper(runtime: Runtime, name: str, question: Question, answer: Any, limit: float) -> Any:
    """Follow a refusal of one, alone; it also learns its script."""
    try:
        if isinstance(answer, AskError | TryAgainError | NoScriptError):
            command = question.command
            if question.script is not None:
                command = ("EVAL", question.script.text, *command[2:])
            (answer,) = await converse(question.slot, runtime, name, [command], limit)
        return answered(name, answer)
    except BackendUnavailable as error:
        return error
