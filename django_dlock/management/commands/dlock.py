"""`manage.py dlock`: show who holds and who waits; tidy the fence table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, connections

from django_dlock.conf import UnknownStore, stores
from django_dlock.purge import purge
from dlock_core.inspect import Entry, Unreadable, picture

if TYPE_CHECKING:
    from django.core.management.base import CommandParser
    from rich.table import Table

__all__ = ["Command"]

COLUMNS: Final = ("store", "name", "mode", "owner", "for", "ttl left", "token")


class Command(BaseCommand):
    help = "Show the locks of this project, and tidy up after them."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | purge")
        listing = verbs.add_parser("list", help="show the holders and waiters of every store")
        listing.add_argument("--store", action="append", help="only this store of DLOCK (may be repeated)")
        listing.add_argument("--format", choices=("table", "json"), default="table")
        tidy = verbs.add_parser("purge", help="replace old fence rows by a floor that refuses their tokens")
        tidy.add_argument("--days", type=int, default=30, help="rows whose token is older than this (default 30)")
        tidy.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            choices=tuple(connections),
            help="the database with the fence table (default: default)",
        )

    def handle(self, *args: Any, verb: str, **options: Any) -> None:
        """Do what the verb says; exit code 1 when a store cannot be read."""
        if verb == "list":
            self._list(options["store"] or list(stores), options["format"])
        else:
            self._purge(options["days"], options["database"])

    def _list(self, aliases: list[str], form: str) -> None:
        try:
            backends = [(alias, stores[alias].backend) for alias in aliases]
        except UnknownStore as error:
            raise CommandError(str(error)) from None
        found = picture(backends)
        if form == "json":
            self.stdout.write(json.dumps(found.as_dict(), indent=2))
        else:
            self._show(found.entries, found.unreadable)
        if found.unreadable:
            raise CommandError(f"{len(found.unreadable)} of {len(aliases)} stores could not be read", returncode=1)

    def _show(self, found: list[Entry], failed: list[Unreadable]) -> None:
        try:
            from rich.console import Console
        except ImportError:
            raise CommandError("the table needs rich: pip install 'dlock-orm[cli]', or use --format json") from None
        console = Console(file=self.stdout, highlight=False)  # type: ignore[arg-type]
        if found:
            console.print(_table(found))
        console.print(f"{_count(found, 'holder')}, {_count(found, 'waiter')}", markup=False)
        for store in failed:
            console.print(f"{store.source}: {store.reason}", markup=False, style="red")

    def _purge(self, days: int, database: str) -> None:
        if days < 1:
            raise CommandError(f"--days must be at least 1, not {days}: a token of today may still be at work")
        self.stdout.write(f"{purge(database, days)} fence rows older than {days} days removed from {database}")


def _table(found: list[Entry]) -> Table:
    from rich.table import Table

    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for entry in found:
        who = entry.described if entry.role == "holder" else f"  waits ({entry.place}): {entry.described}"
        token = "" if entry.token is None else str(entry.token)
        cells = (entry.source, entry.name, entry.mode, who, _seconds(entry.seconds), _left(entry), token)
        table.add_row(*(_plain(cell) for cell in cells), style="dim" if entry.role == "waiter" else "")
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would take it for markup


def _left(entry: Entry) -> str:
    if entry.role == "waiter":
        return ""
    return "no expiry" if entry.expires_in is None else _seconds(entry.expires_in)


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f} s"


def _count(found: list[Entry], role: str) -> str:
    number = sum(entry.role == role for entry in found)
    return f"{number} {role}" + ("" if number == 1 else "s")
