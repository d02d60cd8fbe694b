"""The way to the keys of one slot, wherever they are: redirections are followed, and never told."""

from __future__ import annotations

from binascii import crc_hqx
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import TimeoutError as RedisTimeoutError

from dlock_core.backends.redis.cluster.routes import SLOTS
from dlock_core.backoff import CHANCE

if TYPE_CHECKING:
    from dlock_core.backends.redis.cluster.node import Node
    from dlock_core.backends.redis.cluster.routes import Routes
    from dlock_core.runtime import Runtime

__all__ = ["Slot", "slot_of"]

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

    async def exchange(self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float) -> list[Any]:
        """Send to the master of the slot; a single command, refused because the slot moves, is sent where it goes."""
        now = runtime.now()
        until, patience = now + limit, now + min(PATIENCE, limit / 4)
        node, asking = await self._routes.owner(runtime, self.number, until), False
        for turn in count():
            answers = await self._put(runtime, node, data, replies, until, asking=asking)
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

    async def _put(
        self, runtime: Runtime, node: Node, data: bytes, replies: int, until: float, *, asking: bool
    ) -> list[Any]:
        left = until - runtime.now()
        if left <= 0:
            raise RedisTimeoutError(f"slot {self.number} moves: none of the nodes that were asked had it in time")
        try:
            if not asking:
                return await node.exchange(runtime, data, replies, left)
            return (await node.exchange(runtime, ASKING + data, replies + 1, left))[1:]
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
