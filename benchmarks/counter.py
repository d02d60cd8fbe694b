"""Eight processes increment one row of PostgreSQL, under each kind of protection.

    python -m benchmarks.counter --processes 8 --seconds 2 --repeat 3

Each increment is one transaction that reads and writes the row; the next one follows without a pause. The ratio
compares increments per second with `select_for_update`, which runs before and after each of the others. A latency is
that of one increment, retries included. `lost` counts increments that the row does not show.
"""

import functools
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis_lock
from django.db import connections, transaction
from django.db.models import F
from redis.lock import Lock as RedisPyLock

from benchmarks import measure, project

FORK: Final = multiprocessing.get_context("fork")
BASE: Final = "select_for_update by hand"

Increment = Callable[[], object]


def unsafe(rows: Any, key: int) -> None:
    """Read the value, and write it back plus one: this is correct only under a lock."""
    counter = rows.get(pk=key)
    rows.filter(pk=key).update(value=counter.value + 1)


def increments(key: int) -> dict[str, Increment]:
    """Return the ways to add one to the same row."""
    from benchmarks.models import Counter
    from benchmarks.views import client
    from django_dlock import is_retry, lock, retry_on_conflict

    rows = Counter._base_manager

    @transaction.atomic
    def select_for_update() -> None:
        counter = rows.select_for_update(no_key=True).get(pk=key)
        rows.filter(pk=key).update(value=counter.value + 1)

    @retry_on_conflict(attempts=1000, within=None)
    def versions() -> None:
        counter = Counter.objects.get(pk=key)
        counter.value += 1
        counter.save_with_version()

    @retry_on_conflict(attempts=1000, within=None)
    def versions_with_queue() -> None:
        counter = Counter.objects.lock_row(key) if is_retry() else Counter.objects.get(pk=key)
        counter.value += 1
        counter.save_with_version()

    def versions_by_hand() -> None:
        for attempt in range(1000):
            with transaction.atomic():
                counter = rows.get(pk=key)
                seen = rows.filter(pk=key, version=counter.version)
                if seen.update(value=counter.value + 1):
                    return
            time.sleep(random.uniform(0, min(1.0, 0.01 * 2**attempt)))

    def under(taken: Any) -> None:
        with taken, transaction.atomic():
            unsafe(rows, key)

    return {
        BASE: select_for_update,
        "retry_on_conflict, save_with_version": versions,
        "the same, lock_row() if is_retry()": versions_with_queue,
        "versions and exponential backoff by hand": versions_by_hand,
        "lock(fence=False)": lambda: under(lock("counter", key, fence=False, wait=60)),
        "lock()": lambda: under(lock("counter", key, wait=60)),
        "redis-py Lock": lambda: under(RedisPyLock(client(), "redis-py", timeout=60)),
        "python-redis-lock": lambda: under(redis_lock.Lock(client(), "python-redis-lock", expire=60)),
        "F() in one UPDATE": lambda: rows.filter(pk=key).update(value=F("value") + 1),
        "NO PROTECTION": transaction.atomic(functools.partial(unsafe, rows, key)),
    }


@dataclass(frozen=True)
class Done:
    """What one process did: seconds that each increment took, and seconds of CPU."""

    latencies: list[float]
    cpu: float


def work(name: str, key: int, seconds: float, ready: Any, out: Any) -> None:
    """Increment once, to import and connect; when all processes are ready, keep incrementing for the given time."""
    random.seed()
    add = increments(key)[name]
    add()
    latencies = []
    ready.wait()
    cpu, end = time.process_time(), time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        add()
        latencies.append(time.monotonic() - began)
    out.send(Done(latencies, time.process_time() - cpu))
    connections.close_all()


def contend(name: str, processes: int, seconds: float) -> measure.Row:
    """Let processes increment a new row in one of the ways."""
    from benchmarks.models import Counter

    key = Counter.objects.create().pk
    connections.close_all()
    ready = FORK.Barrier(processes)
    pipes, workers = [], []
    for _ in range(processes):
        ours, theirs = FORK.Pipe(duplex=False)
        workers.append(FORK.Process(target=work, args=(name, key, seconds, ready, theirs), daemon=True))
        pipes.append(ours)
        workers[-1].start()
        theirs.close()
    done: list[Done] = [pipe.recv() for pipe in pipes]
    for one in workers:
        one.join()
    latencies = sorted(latency for one in done for latency in one.latencies)
    shares = [len(one.latencies) for one in done]
    return {
        "per s": len(latencies) / seconds,
        "p50 ms": round(latencies[len(latencies) // 2] * 1000, 1),
        "p99 ms": round(latencies[len(latencies) * 99 // 100] * 1000, 1),
        "max ms": round(latencies[-1] * 1000),
        "Jain": round(sum(shares) ** 2 / (processes * sum(share**2 for share in shares)), 2),
        "client CPU µs": round(sum(one.cpu for one in done) / len(latencies) * 1e6),
        "lost": processes + len(latencies) - Counter.objects.get(pk=key).value,
    }


def contended(options: Any) -> list[measure.Row]:
    """Return a row for each way."""
    names = list(measure.chosen(increments(0), options.only, BASE))
    found: dict[str, list[measure.Row]] = {name: [] for name in names}
    for _ in range(options.repeat):
        before = contend(BASE, options.processes, options.seconds)
        for name in measure.shuffled(names[1:]):
            one, after = (contend(each, options.processes, options.seconds) for each in (name, BASE))
            found[name].append({**one, "ratio": 2 * one["per s"] / (before["per s"] + after["per s"])})
            found[BASE].append({**after, "ratio": 2 * after["per s"] / (before["per s"] + after["per s"])})
            before = after
    return [{"contestant": name, **middle(found[name])} for name in names]


def middle(rows: list[measure.Row]) -> measure.Row:
    """Return the run with the median ratio, and the number of increments lost in all runs."""
    one = sorted(rows, key=lambda row: row["ratio"])[len(rows) // 2]
    lost = sum(row["lost"] for row in rows)
    return {"per s": round(one.pop("per s")), "ratio": round(one.pop("ratio"), 2), **one, "lost": lost}


def main() -> None:
    options = measure.arguments(__doc__, processes=8, seconds=2.0, repeat=3)
    report = measure.Report(options.format)
    with project.running():
        if connections["default"].vendor == "sqlite":
            raise SystemExit("PostgreSQL is missing, and SQLite has no row locks to compare with")
        report.add(f"{options.processes} processes count up one row", contended(options))
    report.end()


if __name__ == "__main__":
    main()
