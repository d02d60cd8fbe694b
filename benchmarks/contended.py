"""Many processes want one lock: throughput, waiting times, fairness, against token passing and three peers.

    python -m benchmarks.contended --processes 8 --think 5 --seconds 2

The floor passes a token with BLPOP and LPUSH over a bare socket. Every process records when it asked, got and gave
back the lock, on a clock they share: from the merged records come all figures, and the proof that no two sections
overlapped. `gap` is the time from one section's end to the next one's begin.
"""

import itertools
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pottery
import redis
import redis_lock
from redis.lock import Lock as RedisPyLock

from benchmarks import measure
from benchmarks.floors import RawRedis
from dlock_core import Lock
from dlock_core.backends.redis import RedisBackend

FLOOR: Final = "floor: BLPOP token on a bare socket"
SECTION: Final = 0.001
FORK: Final = multiprocessing.get_context("fork")

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]


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


CONTESTANTS: Final[dict[str, Callable[[int], Pair]]] = {
    FLOOR: floor,
    "dlock": ours,
    "redis-py Lock": redis_py,
    "python-redis-lock": python_redis_lock,
    "pottery Redlock, 1 master": pottery_redlock,
}


@dataclass(frozen=True)
class Section:
    worker: int
    asked: int
    got: int
    left: int


@dataclass(frozen=True)
class Work:
    sections: list[Section]
    requests: int
    cpu: float


def worker(
    number: int, make: Callable[[int], Pair], port: int, think: float, times: tuple[float, float], out: Any
) -> None:
    """Take the lock again and again from the first to the second time, and hand over what happened."""
    start, end = times
    acquire, release = make(port)
    release(acquire())  # connections and scripts are there before the start
    sections = []
    with measure.counted_sends() as sent:
        time.sleep(max(0.0, start - time.monotonic()))
        cpu = time.process_time()
        while time.monotonic() < end:
            asked = time.monotonic_ns()
            grant = acquire()
            got = time.monotonic_ns()
            time.sleep(SECTION)
            left = time.monotonic_ns()
            release(grant)
            sections.append(Section(number, asked, got, left))
            if think:
                time.sleep(think)
        out.send(Work(sections, sent[0], time.process_time() - cpu))


def run(
    make: Callable[[int], Pair], port: int, processes: int, think: float, seconds: float
) -> tuple[list[Work], float]:
    """One run of all processes; what they did, and when the time was over."""
    start = time.monotonic() + 0.3 + processes / 40
    end = start + seconds
    pipes, workers = [], []
    for number in range(processes):
        ours, theirs = FORK.Pipe(duplex=False)
        workers.append(FORK.Process(target=worker, args=(number, make, port, think, (start, end), theirs), daemon=True))
        pipes.append(ours)
        workers[-1].start()
        theirs.close()
    done = [pipe.recv() for pipe in pipes if pipe.poll(seconds + 60)]
    for one in workers:
        one.join(10)
        one.kill()
    if len(done) < processes:
        print(f"{processes - len(done)} of {processes} processes did not end", file=sys.stderr)
    return done, end


@dataclass(frozen=True)
class Figures:
    rate: float
    waits: list[float]
    jain: float
    starved: int
    requests: float
    gap: float
    cpu: float
    overlaps: int


def figures(done: Sequence[Work], end: float, processes: int, seconds: float) -> Figures:
    every = sorted((one for work in done for one in work.sections), key=lambda one: one.got)
    inside = [one for one in every if one.got / 1e9 < end]
    shares = Counter(one.worker for one in inside)
    counts = [shares[number] for number in range(processes)]
    gaps = [(after.got - before.left) / 1e6 for before, after in itertools.pairwise(inside)]
    return Figures(
        rate=len(inside) / seconds,
        waits=sorted((one.got - one.asked) / 1e6 for one in every),
        jain=sum(counts) ** 2 / (processes * sum(count**2 for count in counts) or 1),
        starved=counts.count(0),
        requests=sum(work.requests for work in done) / max(1, len(every)),
        gap=statistics.median(gaps) if gaps else 0.0,
        cpu=sum(work.cpu for work in done) / max(1, len(every)) * 1e6,
        overlaps=sum(after.got < before.left for before, after in itertools.pairwise(every)),
    )


def row(name: str, runs: Sequence[Figures], ratios: Sequence[float]) -> measure.Row:
    waits = sorted(itertools.chain.from_iterable(one.waits for one in runs))
    return {
        "contestant": name,
        "sections/s": round(statistics.median(one.rate for one in runs)),
        "ratio": round(statistics.median(ratios), 2),
        "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "p50 ms": round(waits[len(waits) // 2], 1),
        "p99 ms": round(waits[len(waits) * 99 // 100], 1),
        "max ms": round(waits[-1]),
        "Jain": round(statistics.median(one.jain for one in runs), 3),
        "starved": max(one.starved for one in runs),
        "gap ms": round(statistics.median(one.gap for one in runs), 2),
        "requests": round(statistics.median(one.requests for one in runs), 1),
        "CPU µs": round(statistics.median(one.cpu for one in runs)),
        "overlaps": sum(one.overlaps for one in runs),
    }


def cell(port: int, contestants: dict[str, Any], processes: int, think: float, options: Any) -> list[measure.Row]:
    """All contestants for one number of processes and one pause, each between two runs of the floor."""

    def once(name: str) -> Figures:
        done, end = run(contestants[name], port, processes, think, options.seconds)
        return figures(done, end, processes, options.seconds)

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
    contestants = measure.chosen(CONTESTANTS, options.only, FLOOR)
    report = measure.Report(options.format)
    with measure.redis_server() as server:
        RawRedis(server.port).call("LPUSH", "token", 1)
        for think, processes in itertools.product(options.think.split(","), options.processes.split(",")):
            rows = cell(server.port, contestants, int(processes), float(think) / 1000, options)
            report.add(f"Contended: {processes} processes, sections of 1 ms, think {think} ms", rows)
    report.end()


if __name__ == "__main__":
    main()
