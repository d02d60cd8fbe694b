"""Measure what protection costs in Django: version saves and row locks.

    python -m benchmarks.django_orm --rounds 15 --count 100

Each table shows ratios to the unprotected operation, or to the one written by hand. The servers share our CPU.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, reset_queries, transaction

from benchmarks import measure, project


def statements(alias: str, operation: measure.Operation) -> int:
    """Return how many statements one operation sends, without BEGIN and COMMIT."""
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


@contextmanager
def open_transaction(alias: str) -> Iterator[None]:
    with transaction.atomic(using=alias):
        yield


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100)
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
    report.end()


if __name__ == "__main__":
    main()
