"""Measure what each of many leases of one process costs to acquire, renew, list and keep, here and in the server.

    python -m benchmarks.held --sizes 100,10000,100000

The floor renews on a bare socket, in one script for a thousand keys; the peers renew one lock at a time. Ours renews
all in one thread; a second table shows that it does, and that nothing is lost.
"""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import redis
import redis_lock
from redis.lock import Lock as RedisPyLock

from benchmarks import measure
from benchmarks.floors import RawRedis
from dlock_core import Lock
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.leases import watchdog
from dlock_core.runtime import BLOCKING, run
from tests.servers import Server

FORK: Final = multiprocessing.get_context("fork")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
BATCH: Final = 1000
SLOW_US: Final = 5e6
"""Leases that take longer than this to acquire, all together, are renewed once instead of three times."""
RENEW: Final = (
    "local n = 0 for i = 1, #KEYS do if redis.call('get', KEYS[i]) == ARGV[1] then"
    " n = n + redis.call('pexpire', KEYS[i], ARGV[2]) end end return n"
)


class Floor:
    """SET NX PX on a bare socket, and one script for a thousand renewals."""

    def __init__(self, server: Server) -> None:
        self.raw = RawRedis(server.port)
        self.renewal = self.raw.call("SCRIPT", "LOAD", RENEW)

    def acquire(self, number: int) -> str:
        key = f"floor:{number}"
        assert self.raw.acquire(key, "floor", 600_000)
        return key

    def renew(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), BATCH):
            part = keys[start : start + BATCH]
            assert self.raw.call("EVALSHA", self.renewal, len(part), *part, "floor", 600_000) == len(part)

    def names(self) -> int:
        cursor, found = b"0", 0
        while True:
            cursor, keys = self.raw.call("SCAN", cursor, "MATCH", "floor:*", "COUNT", BATCH)
            found += len(keys)
            if cursor == b"0":
                return found

    def release(self, key: str) -> None:
        self.raw.release(key, "floor")


class Ours:
    """Our Lock; `renew` does what the watchdog does when a batch is due."""

    def __init__(self, server: Server) -> None:
        self.backend = RedisBackend.from_url(server.url, timeout=10.0)

    def acquire(self, number: int) -> Any:
        return Lock(self.backend, f"ours:{number}", ttl=600, wait=0).acquire()

    def renew(self, leases: Sequence[Any]) -> None:
        dog = watchdog._watchdogs[self.backend]
        for start in range(0, len(leases), watchdog.MAX_BATCH):
            held = [lease._held for lease in leases[start : start + watchdog.MAX_BATCH]]
            for one in held:
                one.bucket.pop(one.request.holder, None)
            dog._renew(held)

    def names(self) -> int:
        return len(run(self.backend.inspect(BLOCKING)))

    def release(self, lease: Any) -> None:
        lease.release()


class RedisPy:
    def __init__(self, server: Server) -> None:
        self.client = redis.Redis(port=server.port)

    def acquire(self, number: int) -> RedisPyLock:
        lock = RedisPyLock(self.client, f"redis-py:{number}", timeout=600)
        assert lock.acquire(blocking=False)
        return lock

    def renew(self, locks: Sequence[RedisPyLock]) -> None:
        for lock in locks:
            lock.reacquire()

    def release(self, lock: RedisPyLock) -> None:
        lock.release()


class PythonRedisLock:
    def __init__(self, server: Server) -> None:
        self.client = redis.Redis(port=server.port)

    def acquire(self, number: int) -> redis_lock.Lock:
        lock = redis_lock.Lock(self.client, f"prl:{number}", expire=600)
        assert lock.acquire(blocking=False)
        return lock

    def renew(self, locks: Sequence[redis_lock.Lock]) -> None:
        for lock in locks:
            lock.extend(600)

    def release(self, lock: redis_lock.Lock) -> None:
        lock.release()


CONTESTANTS: Final = {
    "floor: bare socket, 1000 in a script": Floor,
    "dlock": Ours,
    "redis-py Lock": RedisPy,
    "python-redis-lock": PythonRedisLock,
}


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def used(raw: RawRedis) -> int:
    text = raw.call("INFO", "memory").decode()
    return int(text.split("used_memory:")[1].split()[0])


def in_a_process(function: Callable[..., measure.Row], *args: Any) -> measure.Row:
    """Measure in a fresh process, whose memory has not been used before."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: theirs.send(function(*args)))
    process.start()
    theirs.close()
    found: measure.Row = ours.recv()
    process.join()
    return found


def row(name: str, make: Callable[[Server], Any], server: Server, size: int) -> measure.Row:
    """Return what one lease costs when this contestant holds `size`; microseconds are CPU, ours and the server's."""

    def micros(work: Callable[[], object]) -> float:
        return round(measure.timed(work, 1, [server.process.pid]).work / size, 2)

    one, raw = make(server), RawRedis(server.port)
    one.release(one.acquire(-1))
    memory, server_memory = resident(), used(raw)
    held: list[Any] = []
    acquire = micros(lambda: held.extend(one.acquire(number) for number in range(size)))
    memory, server_memory = resident() - memory, used(raw) - server_memory
    with measure.counted_sends() as sent:
        renewals = [micros(lambda: one.renew(held)) for _ in range(3 if size * acquire < SLOW_US else 1)]
        requests = sent[0] / size / len(renewals)
    assert not any(getattr(lease, "lost", False) for lease in held)  # not timed: each reads the clock
    listing = [micros(one.names) for _ in range(3)] if hasattr(one, "names") else []
    found = {
        "contestant": name,
        "leases": size,
        "acquire µs": acquire,
        "renew µs": min(renewals),
        "renew requests": round(requests, 4),
        "list µs": min(listing, default=""),
        "client B": round(memory / size),
        "server B": round(server_memory / size),
        "threads": threading.active_count(),
    }
    found["release µs"] = micros(lambda: [one.release(lease) for lease in held])
    return found


def watched(server: Server, size: int, ttl: float, seconds: float) -> measure.Row:
    """Let the watchdog renew leases of a few seconds, held for several times their ttl."""
    raw = RawRedis(server.port)
    backend = RedisBackend.from_url(server.url)
    leases = [Lock(backend, f"watched:{number}", ttl=ttl, wait=0).acquire() for number in range(size)]
    raw.call("CONFIG", "RESETSTAT")
    cpu, server_cpu = time.process_time(), measure.cpu_of([server.process.pid])
    with measure.counted_sends() as sent:
        time.sleep(seconds)
        requests = sent[0]
    cpu, server_cpu = time.process_time() - cpu, measure.cpu_of([server.process.pid]) - server_cpu
    renewed = raw.commands().get("pexpire", 0)
    lost = sum(lease.lost for lease in leases)
    dogs = sum(thread.name == "dlock-watchdog" for thread in threading.enumerate())
    for lease in leases:
        lease.release()
    return {
        "leases": size,
        "ttl s": ttl,
        "watched s": seconds,
        "renewals": renewed,
        "requests per renewal": round(requests / max(1, renewed), 4),
        "client CPU µs per renewal": round(cpu / max(1, renewed) * 1e6, 2),
        "server CPU µs per renewal": round(server_cpu / max(1, renewed) * 1e6, 2),
        "lost": lost,
        "threads": dogs,
    }


def main() -> None:
    options = measure.arguments(__doc__, sizes="100,10000,100000", ttl=3.0, seconds=8.0)
    report = measure.Report(options.format)
    sizes = [int(size) for size in options.sizes.split(",")]
    with measure.redis_server() as server:
        measure.pin("same", server.process.pid)
        contestants = measure.chosen(CONTESTANTS, options.only, next(iter(CONTESTANTS)))
        rows = [in_a_process(row, name, make, server, size) for size in sizes for name, make in contestants.items()]
        report.add("Many leases held by one process, same CPU", rows)
        measure.unpin(server.process.pid)
        rows = [in_a_process(watched, server, size, options.ttl, options.seconds) for size in (100, 2000, 10_000)]
        report.add("Renewal by the watchdog", rows)
    report.end()


if __name__ == "__main__":
    main()
