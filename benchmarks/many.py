"""Acquire ten locks together, all or none, against one script each way on a bare socket, and peers that go one by one.

python -m benchmarks.many --rounds 15 --count 100 --sizes 10
"""

import secrets
from collections.abc import Callable
from typing import Any, Final

import redis
import redis_lock
from redis.lock import Lock as RedisPyLock

from benchmarks import measure
from benchmarks.floors import RawRedis
from benchmarks.uncontended import traffic
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.leases.multilock import MultiLock
from tests.servers import Server

FLOOR: Final = "floor: one script each way on a bare socket"
TAKE: Final = (
    "for _, key in ipairs(KEYS) do if redis.call('exists', key) == 1 then return 0 end end"
    " for _, key in ipairs(KEYS) do redis.call('set', key, ARGV[1], 'PX', ARGV[2]) end return 1"
)
GIVE: Final = (
    "local n = 0 for _, key in ipairs(KEYS) do"
    " if redis.call('get', key) == ARGV[1] then n = n + redis.call('del', key) end end return n"
)


def contestants(server: Server, size: int) -> dict[str, measure.Operation]:
    client = redis.Redis(port=server.port)
    return {
        FLOOR: floor(RawRedis(server.port), size),
        "dlock MultiLock": ours(server, size),
        "redis-py Lock, one by one": one_by_one(size, lambda name: RedisPyLock(client, name, timeout=30)),
        "python-redis-lock, one by one": one_by_one(size, lambda name: redis_lock.Lock(client, name, expire=30)),
    }


def floor(raw: RawRedis, size: int) -> measure.Operation:
    take, give = raw.call("SCRIPT", "LOAD", TAKE), raw.call("SCRIPT", "LOAD", GIVE)
    names, holder = [f"floor:{number}" for number in range(size)], secrets.token_hex(16)

    def operation() -> None:
        assert raw.call("EVALSHA", take, size, *names, holder, 30_000) == 1
        assert raw.call("EVALSHA", give, size, *names, holder) == size

    return operation


def ours(server: Server, size: int) -> measure.Operation:
    backend, names = RedisBackend.from_url(server.url), [f"ours:{number}" for number in range(size)]
    return lambda: MultiLock(backend, names, ttl=30).acquire().release()


def one_by_one(size: int, make: Callable[[str], Any]) -> measure.Operation:
    names = [f"peer:{number}" for number in range(size)]

    def operation() -> None:
        locks = [make(name) for name in names]
        for lock in locks:
            lock.acquire()
        for lock in reversed(locks):
            lock.release()

    return operation


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100, sizes="10")
    report = measure.Report(options.format)
    with measure.redis_server() as server:
        raw = RawRedis(server.port)
        for size in map(int, options.sizes.split(",")):
            every = measure.chosen(contestants(server, size), options.only, FLOOR)
            seen = {name: traffic(operation, raw, count=3) for name, operation in every.items()}
            for layout in measure.LAYOUTS:
                measure.pin(layout, server.process.pid)
                count = max(2, min(options.count, options.count * 10 // size))
                runs = measure.interleave(every, FLOOR, options.rounds, count, [server.process.pid])
                rows = [{"contestant": name, **runs[name].row(), "requests": seen[name]["requests"]} for name in every]
                report.add(f"{size} locks together, {layout} CPU", rows)
    report.end()


if __name__ == "__main__":
    main()
