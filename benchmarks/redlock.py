"""Compare Redlock on five masters with a lock on one, ours and pottery's, with a new lock object each time.

    python -m benchmarks.redlock --rounds 9 --count 200

Each library is compared with its own lock on a single node, to show what asking five at once costs. On one CPU that is
the work of five servers; with a CPU for each side they answer while we still ask the others.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import pottery
import redis

from benchmarks import measure
from benchmarks.floors import Names
from dlock_core import AsyncLock, Lock, connect
from tests.redlock_nodes import masters, url_of
from tests.servers import Server

SINGLE: Final = "dlock, one node"
TASKS: Final = "dlock, one node, asyncio"
POTTERY: Final = "pottery Redlock, one node"
BESIDE: Final = {
    "dlock, five nodes": SINGLE,
    "dlock, five nodes, asyncio": TASKS,
    "pottery Redlock, five nodes": POTTERY,
}
"""The single-node contestant that each is compared with."""


def contestants(nodes: list[Server]) -> dict[str, measure.Operation]:
    clients = [redis.Redis(port=node.port) for node in nodes]
    return {
        SINGLE: ours(nodes[0].url),
        "dlock, five nodes": ours(url_of(nodes)),
        TASKS: ours_for_tasks(nodes[0].url),
        "dlock, five nodes, asyncio": ours_for_tasks(url_of(nodes)),
        POTTERY: pottery_redlock(clients[:1]),
        "pottery Redlock, five nodes": pottery_redlock(clients),
    }


def ours(url: str) -> measure.Operation:
    backend, name = connect(url), Names("dlock").next
    return lambda: Lock(backend, name(), ttl=30).acquire().release()


def ours_for_tasks(url: str) -> measure.Operation:
    backend, name, loop = connect(url), Names("dlock-async").next, asyncio.new_event_loop()

    async def once() -> None:
        await (await AsyncLock(backend, name(), ttl=30).acquire()).release()

    return lambda: loop.run_until_complete(once())


def pottery_redlock(clients: Sequence[redis.Redis]) -> measure.Operation:
    name = Names("pottery").next

    def operation() -> None:
        lock = pottery.Redlock(key=name(), masters=frozenset(clients), auto_release_time=30)
        lock.acquire()
        lock.release()

    return operation


def main() -> None:
    logging.disable()  # pottery's
    options = measure.arguments(__doc__, rounds=9, count=200)
    report = measure.Report(options.format)
    with measure.scratch() as directory, masters(directory / "node", 5, "--appendonly", "no") as nodes:
        every = measure.chosen(contestants(nodes), options.only, SINGLE)
        pids = [node.process.pid for node in nodes if node.process is not None]
        for layout in measure.LAYOUTS:
            measure.pin(layout, *pids)
            runs = measure.interleave(every, SINGLE, options.rounds, options.count, pids)
            rows = {name: runs[name].row() for name in every}
            report.add(
                f"Redlock, uncontended acquire and release, {layout} CPU",
                [
                    {"contestant": name, **row, "times its single node": multiple(name, rows)}
                    for name, row in rows.items()
                ],
            )
        measure.unpin(*pids)
    report.end()


def multiple(name: str, rows: dict[str, measure.Row]) -> float | str:
    single = rows.get(BESIDE.get(name, ""))
    return round(rows[name]["ratio"] / single["ratio"], 2) if single else ""


if __name__ == "__main__":
    main()
