"""Many tasks of one process wait for locks that others hold: connections, requests while they wait, time to hand over.

    python -m benchmarks.crowd --tasks 1,10,100,1000 --seconds 3

First each task waits for a lock of its own, then all wait for the same one; the holder has its own connection. While
all wait, connections and commands are counted at the server. Then the holder lets go: of all locks in turn, or of the
one that the tasks then pass on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import pottery
import redis
import redis.asyncio

from benchmarks import measure
from dlock_core import AsyncLock
from dlock_core.backends.redis.backend import RedisBackend
from tests.servers import Server

Lock = Callable[[str], AbstractAsyncContextManager[Any]]
TTL_S: Final = 600


def ours(server: Server) -> tuple[Lock, Callable[[], Awaitable[None]]]:
    backend = RedisBackend.from_url(server.url, timeout=30.0)  # a thousand connections at once take a while

    async def close() -> None:
        backend.close()

    return lambda name: AsyncLock(backend, name, ttl=TTL_S, wait=None, renew=False), close


def redis_py(server: Server) -> tuple[Lock, Callable[[], Awaitable[None]]]:
    client = redis.asyncio.Redis(port=server.port, max_connections=10_000)
    return lambda name: client.lock(name, timeout=TTL_S), client.aclose


def pottery_redlock(server: Server) -> tuple[Lock, Callable[[], Awaitable[None]]]:
    client = redis.asyncio.Redis(port=server.port, max_connections=10_000)

    def lock(name: str) -> pottery.AIORedlock:
        return pottery.AIORedlock(key=name, masters={client}, auto_release_time=TTL_S)

    return lock, client.aclose


CONTESTANTS: Final = {"dlock": ours, "redis-py Lock": redis_py, "pottery AIORedlock, 1 master": pottery_redlock}


class Crowd:
    """The tasks of one run, and when each of them was handed its lock."""

    def __init__(self, server: Server, names: list[str]) -> None:
        self.server, self.names = server, names
        self.entered: dict[int, float] = {}

    async def wait(self, number: int, lock: Lock) -> None:
        async with lock(self.names[number]):
            self.entered[number] = time.perf_counter()

    async def run(self, contestant: str, seconds: float) -> measure.Row:
        (lock, close), (theirs, close_theirs) = (CONTESTANTS[contestant](self.server) for _ in range(2))
        admin = redis.Redis(port=self.server.port)
        holders = {name: theirs(name) for name in dict.fromkeys(self.names)}
        for holder in holders.values():
            await holder.__aenter__()
        others = len(admin.client_list())
        tasks = [asyncio.create_task(self.wait(number, lock)) for number in range(len(self.names))]
        await asyncio.sleep(seconds)  # all have asked, and wait
        connections = len(admin.client_list()) - others
        before = admin.info("stats")["total_commands_processed"]
        await asyncio.sleep(seconds)
        commands = admin.info("stats")["total_commands_processed"] - before
        released: dict[str, float] = {}
        for name, holder in holders.items():
            released[name] = time.perf_counter()
            await holder.__aexit__(None, None, None)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        waits = sorted(self._hand_overs(released))
        await close()
        await close_theirs()
        return {
            "contestant": contestant,
            "connections": connections,
            "commands per s": round(commands / seconds, 1),
            "hand-over p50 ms": round(waits[len(waits) // 2] * 1000, 2),
            "p99 ms": round(waits[len(waits) * 99 // 100] * 1000, 2),
        }

    def _hand_overs(self, released: dict[str, float]) -> list[float]:
        """From the release of a lock until the next task was inside, for each task."""
        if len(released) > 1:
            return [at - released[self.names[number]] for number, at in self.entered.items()]
        inside = sorted(self.entered.values())
        return [after - before for before, after in zip([*released.values(), *inside], inside, strict=False)]


def main() -> None:
    options = measure.arguments(__doc__, tasks="1000", seconds=3.0)
    report = measure.Report(options.format)
    with measure.redis_server() as server:
        ways = measure.chosen(CONTESTANTS, options.only, "dlock")
        for tasks in map(int, options.tasks.split(",")):
            crowds = {
                f"{tasks} tasks wait for as many locks": [f"own:{number}" for number in range(tasks)],
                f"{tasks} tasks wait for one lock": ["one"] * tasks,
            }
            for title, names in crowds.items():
                report.add(title, [asyncio.run(Crowd(server, names).run(way, options.seconds)) for way in ways])
    report.end()


if __name__ == "__main__":
    main()
