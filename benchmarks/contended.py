"""Many processes contend for one lock: throughput, waiting times, fairness, against token passing and four peers.

    python -m benchmarks.contended --processes 8 --think 5 --seconds 2

The floor passes a token with BLPOP and LPUSH over a bare socket. `benchmarks.sections` says what is recorded.
"""

import itertools
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import pottery
import redis
import redis_lock
from redis.lock import Lock as RedisPyLock
from tooz import coordination

from benchmarks import measure
from benchmarks.floors import RawRedis
from benchmarks.sections import Figures, Make, Pair, figures, row, run
from dlock_core import Lock
from dlock_core.backends.redis.backend import RedisBackend

FLOOR: Final = "floor: BLPOP token on a bare socket"


def floor(port: int) -> Pair:
    raw = RawRedis(port)
    return lambda: raw.call("BLPOP", "token", 0), lambda _: raw.call("LPUSH", "token", 1)


def ours(port: int) -> Pair:
    backend = RedisBackend.from_url(f"redis://127.0.0.1:{port}/0")
    return lambda: Lock(backend, "ours", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def redis_py(port: int) -> Pair:
    client = redis.Redis(port=port)

    def acquire() -> RedisPyLock:
        lock = RedisPyLock(client, "redis-py", timeout=30)
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def python_redis_lock(port: int) -> Pair:
    client = redis.Redis(port=port)

    def acquire() -> redis_lock.Lock:
        lock = redis_lock.Lock(client, "python-redis-lock", expire=30)
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def pottery_redlock(port: int) -> Pair:
    client = redis.Redis(port=port)

    def acquire() -> pottery.Redlock:
        lock = pottery.Redlock(key="pottery", masters={client}, auto_release_time=30)
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def tooz(port: int) -> Pair:
    coordinator = coordination.get_coordinator(f"redis://127.0.0.1:{port}/0", secrets.token_hex(8).encode())
    coordinator.start()

    def acquire() -> Any:
        lock = coordinator.get_lock(b"tooz")
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


CONTESTANTS: Final[dict[str, Callable[[int], Pair]]] = {
    FLOOR: floor,
    "dlock": ours,
    "redis-py Lock": redis_py,
    "python-redis-lock": python_redis_lock,
    "pottery Redlock, 1 master": pottery_redlock,
    "tooz": tooz,
}


def cell(
    contestants: Mapping[str, Make], processes: int, think: float, options: Any, servers: Collection[int]
) -> list[measure.Row]:
    """Run all contestants with one number of processes and one pause, each between two runs of the floor."""

    def once(name: str) -> Figures:
        return figures(run(contestants[name], processes, think, options.seconds, servers))

    runs: dict[str, list[Figures]] = {name: [] for name in contestants}
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        before = once(FLOOR)
        for name in measure.shuffled(name for name in contestants if name != FLOOR):
            one, after = once(name), once(FLOOR)
            runs[name].append(one)
            ratios[name].append(2 * one.rate / (before.rate + after.rate))
            runs[FLOOR].append(after)
            ratios[FLOOR].append(2 * after.rate / (before.rate + after.rate))
            before = after
    return [row(name, runs[name], ratios[name]) for name in contestants if runs[name]]


def main() -> None:
    options = measure.arguments(__doc__, rounds=3, seconds=1.5, processes="2,8,32", think="0,5")
    report = measure.Report(options.format)
    with measure.redis_server() as server:
        assert server.process is not None
        chosen = measure.chosen(CONTESTANTS, options.only, FLOOR)
        contestants = {name: partial(make, server.port) for name, make in chosen.items()}
        RawRedis(server.port).call("LPUSH", "token", 1)
        for think, processes in itertools.product(options.think.split(","), options.processes.split(",")):
            rows = cell(contestants, int(processes), float(think) / 1000, options, [server.process.pid])
            report.add(f"Contended: {processes} processes, sections of 1 ms, think {think} ms", rows)
    report.end()


if __name__ == "__main__":
    main()
