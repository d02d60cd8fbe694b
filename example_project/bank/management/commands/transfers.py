"""Transfer money to and fro between two databases, from many processes at once, and count what is left."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser
from django.db import connections
from django.db.models import Sum
from race import servers
from rich.console import Console
from rich.table import Table

from bank.models import Account
from bank.transfers import Address, locked, unlocked

WAYS = {"unlocked": unlocked, "locked": locked}
DATABASES = ("default", "ledger")
START = 1000


class Command(BaseCommand):
    help = "Transfer money between accounts in two throw-away databases, unlocked and locked, and count what is left."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--transfers", type=int, default=1000, help="how many, each way (default 1000)")
        parser.add_argument("--processes", type=int, default=4, help="how many processes carry them out (default 4)")
        parser.add_argument("--accounts", type=int, default=2, help="how many in each database (default 2)")
        parser.add_argument("--format", choices=("table", "json"), default="table")

    def handle(self, *, transfers: int, processes: int, accounts: int, format: str, **_: Any) -> None:
        with scratch():
            results = [carry_out(way, transfers, processes, accounts) for way in WAYS]
        if format == "json":
            self.stdout.write(json.dumps(results, indent=2))
        else:
            Console(file=self.stdout).print(table(results))


@contextmanager
def scratch() -> Iterator[None]:
    """Make two SQLite databases, and a Redis for the first; the leases of the second are in its own table."""
    with servers.scratch_folder() as directory, servers.redis(Path(directory)) as redis:
        place(directory, redis)
        for alias in DATABASES:
            call_command("migrate", database=alias, verbosity=0)
        yield
        connections.close_all()


def place(directory: str, redis: str) -> None:
    settings.DLOCK["default"]["BACKEND"] = redis
    for alias in DATABASES:
        connections[alias].settings_dict["NAME"] = f"{directory}/{alias}.sqlite3"


def carry_out(way: str, transfers: int, processes: int, accounts: int) -> dict[str, Any]:
    addresses = [Address(database, f"account {number}") for database in DATABASES for number in range(accounts)]
    for database, name in addresses:
        Account.objects.using(database).update_or_create(name=name, defaults={"balance": START})
    connections.close_all()
    chance = random.Random(1)
    pairs = [tuple(chance.sample(addresses, 2)) for _ in range(transfers)]
    begun = monotonic()
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        list(pool.map(work, [(way, pairs[number::processes]) for number in range(processes)]))
    took = monotonic() - begun
    total = sum(Account.objects.using(database).aggregate(Sum("balance"))["balance__sum"] for database in DATABASES)
    wrong = sum(balance(address) != due(address, pairs) for address in addresses)
    return {"way": way, "transfers": transfers, "money lost": START * len(addresses) - total, "wrong balances": wrong,
            "seconds": round(took, 1)}  # fmt: skip


def work(task: tuple[str, list[tuple[Address, Address]]]) -> None:
    way, pairs = task
    for source, target in pairs:
        WAYS[way](source, target, 1)
    connections.close_all()


def balance(address: Address) -> int:
    return Account.objects.using(address.database).get(name=address.name).balance


def due(address: Address, pairs: list[tuple[Address, Address]]) -> int:
    return START + sum((target == address) - (source == address) for source, target in pairs)


def table(results: list[dict[str, Any]]) -> Table:
    drawing = Table(
        *results[0], title="Transfers between two databases", title_justify="left", box=None, pad_edge=False
    )
    for result in results:
        drawing.add_row(*map(str, result.values()))
    return drawing
