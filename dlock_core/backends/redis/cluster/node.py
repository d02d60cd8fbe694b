"""A server of the cluster, and connections to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from dlock_core.backends.redis.clients import title, wires
from dlock_core.backends.redis.wire import converse, twice
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.cluster.address import Address
    from dlock_core.backends.redis.wire import Command, Wire
    from dlock_core.runtime import Runtime

__all__ = ["Node"]


class Node:
    """One server; that of threads and tasks alike."""

    def __init__(self, pool: Any, address: Address, limit: float) -> None:
        self.host, self.title = address[0], title(pool)
        self._threads, self._tasks = wires(pool, limit)
        self.failed_at = 0.0
        """When it did not answer; 0.0 when it answered last."""

    def wire(self, runtime: Runtime) -> Wire:
        return self._tasks if isinstance(runtime, Asyncio) else self._threads

    async def exchange(self, runtime: Runtime, data: bytes, replies: int, limit: float) -> list[Any]:
        """Send and read so many replies; raises RedisError, which names this node."""
        wire = self.wire(runtime)
        connection = wire.checkout()
        try:
            answers = await wire.exchange(runtime, connection, data, replies, limit)
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
