"""What protection costs in Django: version saves, row locks, and a counter that everybody wants.

    python -m benchmarks.django_orm --rounds 15 --count 100

Each table is told as ratios to the unprotected operation, or to the one written by hand. The servers are on our CPU.
"""

import functools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections, reset_queries, transaction
from django.db.models import F
from redis.lock import Lock as RedisPyLock

from benchmarks import measure, project

FORK: Final = multiprocessing.get_context("fork")


def statements(alias: str, operation: measure.Operation) -> int:
    """How many statements one operation sends; BEGIN and COMMIT are not counted by Django."""
    connection = connections[alias]
    connection.force_debug_cursor = True
    reset_queries()
    operation()
    connection.force_debug_cursor = False
    return sum(query["sql"] not in {"BEGIN", "COMMIT"} for query in connection.queries)


def table(alias: str, contestants: dict[str, measure.Operation], options: Any, servers: list[int]) -> list[measure.Row]:
    floor = next(iter(contestants))
    runs = measure.interleave(contestants, floor, options.rounds, options.count, servers)
    return [
        {"contestant": name, **runs[name].row(), "statements": statements(alias, operation)}
        for name, operation in contestants.items()
    ]


def saves(alias: str) -> dict[str, measure.Operation]:
    from benchmarks.models import BareOrder, OptimisticOrder, Order

    bare, order = BareOrder.objects.using(alias).create(), Order.objects.using(alias).create()
    optimistic = OptimisticOrder.objects.using(alias).create()
    return {
        "Model.save()": functools.partial(touch, bare, bare.save),
        "Model.save(update_fields)": functools.partial(
            touch, bare, functools.partial(bare.save, update_fields=["cents"])
        ),
        "save_with_version()": functools.partial(touch, order, order.save_with_version),
        "save_with_version(update_fields)": functools.partial(
            touch, order, functools.partial(order.save_with_version, update_fields=["cents"])
        ),
        "django-optimistic-lock save()": functools.partial(touch, optimistic, optimistic.save),
    }


def touch(order: Any, save: Callable[[], object]) -> None:
    order.cents += 1
    save()


def row_locks(alias: str) -> dict[str, measure.Operation]:
    from benchmarks.models import Order

    order = Order.objects.using(alias).create()
    rows, key = Order.objects.using(alias), order.pk
    return {
        "select_for_update(no_key=True).get(pk)": lambda: rows.select_for_update(no_key=True).get(pk=key),
        "lock_row(pk)": lambda: rows.lock_row(key),
        "lock_row(pk, nowait=True)": lambda: rows.lock_row(key, nowait=True),
        "lock_row(pk, wait=2)": lambda: rows.lock_row(key, wait=2),
        "get(pk), no lock": lambda: rows.get(pk=key),
    }


def count_up(counter: Any) -> None:
    """Not safe: somebody else may have saved between the get and the save."""
    counter.value += 1
    counter.save()


def counters(key: int) -> dict[str, Callable[[], object]]:
    """Ways to add one to the same row; each opens its own transaction."""
    from benchmarks.models import Counter
    from benchmarks.views import client
    from django_dlock import lock, retry_on_conflict

    rows = Counter._base_manager

    @transaction.atomic
    def select_for_update() -> None:
        counter = rows.select_for_update(no_key=True).get(pk=key)
        rows.filter(pk=key).update(value=counter.value + 1)

    @retry_on_conflict(attempts=1000)
    def versions() -> None:
        counter = Counter.objects.get(pk=key)
        counter.value += 1
        counter.save_with_version()

    def lease(*, fence: bool) -> None:
        with lock("counter", key, fence=fence, wait=60), transaction.atomic():
            unsafe()

    def unsafe() -> None:
        counter = rows.get(pk=key)
        rows.filter(pk=key).update(value=counter.value + 1)

    def redis_py() -> None:
        with RedisPyLock(client(), "counter", timeout=60), transaction.atomic():
            unsafe()

    return {
        "select_for_update": select_for_update,
        "save_with_version + retry_on_conflict": versions,
        "lock(...), fenced": functools.partial(lease, fence=True),
        "lock(..., fence=False)": functools.partial(lease, fence=False),
        "redis-py Lock, outside of the transaction": redis_py,
        "F() in one UPDATE": lambda: rows.filter(pk=key).update(value=F("value") + 1),
        "NO PROTECTION": transaction.atomic(unsafe),
    }


def work(name: str, key: int, times: tuple[float, float], out: Any) -> None:
    add = counters(key)[name]
    random.seed()
    connections["default"].ensure_connection()
    waits = []
    time.sleep(max(0.0, times[0] - time.monotonic()))
    while (began := time.monotonic()) < times[1]:
        add()
        waits.append(time.monotonic() - began)
    out.send(waits)
    connections.close_all()


def contend(name: str, processes: int, seconds: float) -> measure.Row:
    from benchmarks.models import Counter

    key = Counter.objects.create().pk
    connections.close_all()
    start = time.monotonic() + 0.5
    pipes, workers = [], []
    for _ in range(processes):
        ours, theirs = FORK.Pipe(duplex=False)
        workers.append(FORK.Process(target=work, args=(name, key, (start, start + seconds), theirs), daemon=True))
        pipes.append(ours)
        workers[-1].start()
        theirs.close()
    done = [pipe.recv() for pipe in pipes]
    for one in workers:
        one.join()
    waits = sorted(wait for waits in done for wait in waits)
    shares = [len(waits) for waits in done]
    return {
        "per s": len(waits) / seconds,
        "p50 ms": round(waits[len(waits) // 2] * 1000, 1),
        "p99 ms": round(waits[len(waits) * 99 // 100] * 1000, 1),
        "max ms": round(waits[-1] * 1000),
        "Jain": round(sum(shares) ** 2 / (processes * sum(share**2 for share in shares)), 2),
        "lost updates": len(waits) - Counter.objects.get(pk=key).value,
    }


def contended(options: Any) -> list[measure.Row]:
    names = list(counters(0))
    found: dict[str, list[measure.Row]] = {name: [] for name in names}
    for _ in range(options.repeat):
        base = contend(names[0], options.processes, options.seconds)
        for name in measure.shuffled(names[1:]):
            one = contend(name, options.processes, options.seconds)
            after = contend(names[0], options.processes, options.seconds)
            found[name].append({**one, "ratio": 2 * one["per s"] / (base["per s"] + after["per s"])})
            found[names[0]].append({**after, "ratio": 2 * after["per s"] / (base["per s"] + after["per s"])})
            base = after
    return [{"contestant": name, **middle(found[name])} for name in names]


def middle(rows: list[measure.Row]) -> measure.Row:
    """The run with the median ratio, and every update that was lost in any run."""
    one = sorted(rows, key=lambda row: row["ratio"])[len(rows) // 2]
    lost = sum(row["lost updates"] for row in rows)
    return {"per s": round(one.pop("per s")), "ratio": round(one.pop("ratio"), 2), **one, "lost updates": lost}


@contextmanager
def open_transaction(alias: str) -> Iterator[None]:
    with transaction.atomic(using=alias):
        yield


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100, processes=8, seconds=2.0, repeat=3)
    report = measure.Report(options.format)
    with project.running() as servers:
        for alias in sorted(connections.databases):
            vendor = connections[alias].vendor
            pids = project.backends([alias], servers)
            measure.pin("same", *pids)
            report.add(f"Saves in autocommit, {vendor}", table(alias, saves(alias), options, pids))
            with transaction.atomic(using=alias):
                report.add(f"Saves in a transaction, {vendor}", table(alias, saves(alias), options, pids))
            if vendor != "sqlite":
                with transaction.atomic(using=alias):
                    report.add(f"Row locks in a transaction, {vendor}", table(alias, row_locks(alias), options, pids))
        measure.unpin(*project.backends(["default"], servers))
        report.add(f"{options.processes} processes count up one row", contended(options))
    report.end()


if __name__ == "__main__":
    main()
