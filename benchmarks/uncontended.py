"""Acquire and release a free lock, with a new lock object each time, against the wire itself and three peers.

    python -m benchmarks.uncontended --rounds 15 --count 400 [--latency 0.5]

With --latency, Redis is a round trip of that many milliseconds away, and every process may use all CPUs.
"""

import secrets
from typing import Final

import pottery
import redis
import redis_lock
from redis.lock import Lock as RedisPyLock

from benchmarks import distance, measure
from benchmarks.floors import Names, RawRedis
from dlock_core import Lock
from dlock_core.backends.redis.backend import RedisBackend

FLOOR: Final = "floor: SET NX PX + EVALSHA on a bare socket"


def contestants(port: int) -> dict[str, measure.Operation]:
    client = redis.Redis(port=port)
    return {
        FLOOR: floor(RawRedis(port)),
        "dlock": ours(port, renew=False),
        "dlock, renewed by the watchdog": ours(port, renew=True),
        "dlock, with block": block(port),
        "redis-py Lock": redis_py(client),
        "python-redis-lock": python_redis_lock(client),
        "pottery Redlock, 1 master": pottery_redlock(client),
    }


def floor(raw: RawRedis) -> measure.Operation:
    name, holder = Names("floor").next, secrets.token_hex(16)

    def operation() -> None:
        key = name()
        assert raw.acquire(key, holder, 30_000)
        assert raw.release(key, holder)

    return operation


def ours(port: int, *, renew: bool) -> measure.Operation:
    backend, name = RedisBackend.from_url(f"redis://127.0.0.1:{port}/0"), Names("dlock").next

    def operation() -> None:
        Lock(backend, name(), ttl=30, renew=renew).acquire().release()

    return operation


def block(port: int) -> measure.Operation:
    backend, name = RedisBackend.from_url(f"redis://127.0.0.1:{port}/0"), Names("dlock").next

    def operation() -> None:
        with Lock(backend, name(), ttl=30):
            pass

    return operation


def redis_py(client: redis.Redis) -> measure.Operation:
    name = Names("redis-py").next

    def operation() -> None:
        lock = RedisPyLock(client, name(), timeout=30)
        lock.acquire()
        lock.release()

    return operation


def python_redis_lock(client: redis.Redis) -> measure.Operation:
    name = Names("python-redis-lock").next

    def operation() -> None:
        lock = redis_lock.Lock(client, name(), expire=30)
        lock.acquire()
        lock.release()

    return operation


def pottery_redlock(client: redis.Redis) -> measure.Operation:
    name = Names("pottery").next

    def operation() -> None:
        lock = pottery.Redlock(key=name(), masters={client}, auto_release_time=30)
        lock.acquire()
        lock.release()

    return operation


def traffic(operation: measure.Operation, raw: RawRedis, count: int = 100) -> measure.Row:
    """Return the requests and commands of one operation."""
    operation()
    raw.call("CONFIG", "RESETSTAT")
    with measure.counted_sends() as sent:
        for _ in range(count):
            operation()
        requests = sent[0] / count
    commands = {name: calls / count for name, calls in raw.commands().items()}
    text = " ".join(f"{name}:{calls:g}" for name, calls in sorted(commands.items()) if calls >= 0.5)
    return {"requests": round(requests, 2), "commands": round(sum(commands.values()), 1), "which": text}


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=300, latency=0.0)
    report = measure.Report(options.format)
    with measure.redis_server() as server, distance.away(server.port, options.latency) as port:
        every = measure.chosen(contestants(port), options.only, FLOOR)
        raw = RawRedis(server.port)
        seen = {name: traffic(operation, raw) for name, operation in every.items()}
        title = "Uncontended acquire and release"
        if options.latency:
            runs = measure.interleave(every, FLOOR, options.rounds, options.count)
            rows = [{"contestant": name, **runs[name].row(), **seen[name]} for name in every]
            report.add(f"{title}, {options.latency} ms away", [*rows, distance.ping(port)])
        for layout in () if options.latency else measure.LAYOUTS:
            measure.pin(layout, server.process.pid)
            runs = measure.interleave(every, FLOOR, options.rounds, options.count, [server.process.pid])
            rows = [{"contestant": name, **runs[name].row(), **seen[name]} for name in every]
            report.add(f"{title}, {layout} CPU", rows)
    report.end()


if __name__ == "__main__":
    main()
