"""Many tasks of one process wait for locks that others hold: connections, requests while they wait, time to hand over.

    python -m benchmarks.crowd --tasks 1,10,100,1000 --seconds 3

First each task waits for its own lock, then all wait for the same one; the holder has its own connection. While all
wait, connections and requests are counted at the server. Then the holder releases all locks in turn, or the one that
the tasks then pass on.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final

import redis
import redis.asyncio

from benchmarks import measure
from dlock_core import AsyncLock
from dlock_core.backends.redis.backend import RedisBackend
from tests.servers import Server

Lock = Callable[[str], AbstractAsyncContextManager[Any]]
TTL_S: Final = 600
MAX_HAND_OVER_S: Final = 10.0
"""After that the rest are cancelled: it takes minutes until each of a thousand polling tasks has had the lock."""


def ours(server: Server) -> tuple[Lock, Callable[[], Awaitable[None]]]:
    backend = RedisBackend.from_url(server.url, timeout=30.0)  # a thousand connections at once take a while

    async def close() -> None:
        backend.close()

    return lambda name: AsyncLock(backend, name, ttl=TTL_S, wait=None, renew=False), close


def redis_py(server: Server) -> tuple[Lock, Callable[[], Awaitable[None]]]:
    client = redis.asyncio.Redis(port=server.port, max_connections=10_000)
    return lambda name: client.lock(name, timeout=TTL_S), client.aclose


REQUEST: Final = "request"
IN_SCRIPT: Final = "command of a script"
COUNTED: Final = "counted"
CONTESTANTS: Final = {"dlock": ours, "redis-py Lock": redis_py}


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
        admin.flushall()  # what an earlier crowd has not released
        holders = {name: theirs(name) for name in dict.fromkeys(self.names)}
        for holder in holders.values():
            await holder.__aenter__()
        others = len(admin.client_list())
        tasks = [asyncio.create_task(self.wait(number, lock)) for number in range(len(self.names))]
        await asyncio.sleep(seconds + len(tasks) / 500)  # by now all have sent their request, and wait
        connections = len(admin.client_list()) - others
        with admin.monitor() as monitor:
            await asyncio.sleep(seconds)
            admin.echo(COUNTED)
            seen = list(iter(lambda: asked(monitor), COUNTED))
        released: dict[str, float] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_HAND_OVER_S):
                for name, holder in holders.items():
                    released[name] = time.perf_counter()
                    await holder.__aexit__(None, None, None)
                    await asyncio.sleep(0)
                await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waits = sorted(self._hand_overs(released))
        await close()
        await close_theirs()
        return {
            "contestant": contestant,
            "connections": connections,
            "requests per s": round(seen.count(REQUEST) / seconds, 1),
            "hand-over p50 ms": round(waits[len(waits) // 2] * 1000, 2) if waits else None,
            "p99 ms": round(waits[len(waits) * 99 // 100] * 1000, 2) if waits else None,
            "served": len(self.entered),
        }

    def _hand_overs(self, released: dict[str, float]) -> list[float]:
        """Return the times from the release of a lock until the next task held it."""
        if len(released) > 1:
            return [at - released[self.names[number]] for number, at in self.entered.items()]
        inside = sorted(self.entered.values())
        return [after - before for before, after in zip([*released.values(), *inside], inside, strict=False)]


def asked(monitor: Any) -> str:
    """Return REQUEST for the next command that a client sent, IN_SCRIPT for one of a script, and COUNTED at the end."""
    command = monitor.next_command()
    if command["client_type"] == "lua":
        return IN_SCRIPT
    return COUNTED if command["command"].endswith(COUNTED) else REQUEST


def main() -> None:
    options = measure.arguments(__doc__, tasks="1000", seconds=5.0)
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
