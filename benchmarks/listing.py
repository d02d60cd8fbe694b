"""Measure what a listing costs: some leases among many other keys, listed with owners, queues and cycles.

    python -m benchmarks.listing --held 10000 --others 1000000

Other keys in the same server must not matter. The target is 10,000 leases among 1,000,000 keys in half a second.
"""

import time

from benchmarks import measure
from benchmarks.floors import RawRedis
from dlock_core import Lock
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.inspect import take_snapshot
from dlock_core.runtime import BLOCKING, run

BATCH = 1000


def fill(raw: RawRedis, others: int) -> None:
    script = "for i = ARGV[1], ARGV[2] do redis.call('set', 'other:' .. i, 'x') end"
    for start in range(0, others, 10_000):
        raw.call("EVAL", script, 0, start, min(others, start + 10_000) - 1)


def seconds(work, rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(min(times), 3), round(max(times), 3)


def main() -> None:
    options = measure.arguments(__doc__, held=10_000, others=1_000_000, rounds=5)
    report = measure.Report(options.format)
    with measure.redis_server() as server:
        raw, backend = RawRedis(server.port), RedisBackend.from_url(server.url, timeout=30.0)
        leases = [Lock(backend, f"order:{number}", ttl=600, wait=0).acquire() for number in range(options.held)]
        fill(raw, options.others)
        found = take_snapshot([("default", backend)])
        assert len(found.entries) == len(leases)
        assert not found.unreadable
        rows = []
        for name, work in {
            "store.inspect()": lambda: run(backend.inspect(BLOCKING)),
            "take_snapshot()": lambda: take_snapshot([("default", backend)]),
            "take_snapshot().as_dict()": lambda: take_snapshot([("default", backend)]).as_dict(),
            "take_snapshot(name=...)": lambda: take_snapshot([("default", backend)], name="order:1"),
        }.items():
            least, most = seconds(work, options.rounds)
            each = round(least / options.held * 1e6, 1)
            cpu = min(measure.timed(work, 1, [server.process.pid]).work for _ in range(options.rounds))
            found = {"listing": name, "seconds": least, "at worst": most, "µs each": each}
            rows.append({**found, "CPU s": round(cpu / 1e6, 3)})
        report.add(f"{options.held} leases held, {raw.call('DBSIZE')} keys in all", rows)
        for lease in leases:
            lease.release()
        backend.close()
    report.end()


if __name__ == "__main__":
    main()
