"""`dlock` without Django: its stores and databases are named by URLs."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import closing, contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

import click

from dlock_core import stores as registry
from dlock_core.cli.app import app
from dlock_core.cli.layout import plain
from dlock_core.cli.sources import CliContext, CommandFailed, WrongUrl, console_for
from dlock_core.extras import needed_by
from dlock_core.options import tells_secret
from dlock_core.transactions.fence_sql import purge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlock_core.backend import Backend
    from dlock_core.doctor import Finding
    from dlock_core.sql.database import Database

__all__ = ["main"]


def main() -> None:
    """Run `dlock` with the arguments of this process, and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A character that the terminal lacks must not raise.
    app.main(prog_name="dlock", obj=CliContext(UrlSources(), console_for(sys.stdout)))


_NAMED: Final = re.compile(r"(?:([\w.-]+)=)?(\w[\w+.-]*)://.*", re.S)
STORE: Final = "--store"
DATABASE: Final = "--database"


class UrlSources:
    """`--store` and `--database` as URL or alias=URL; without them DLOCK_URL and DLOCK_DATABASE_URL of the environment.

    Other users of the machine can see a password on the command line, but not in the environment.
    """

    @contextmanager
    def opened(self, stores: Sequence[str]) -> Iterator[list[tuple[str, Backend]]]:
        """Open the stores for the block; raises click.UsageError for a wrong URL."""
        found = [(alias, _made(registry.connect, url, STORE)) for alias, url in _named(stores, STORE, "DLOCK_URL")]
        try:
            yield found
        finally:
            for _, backend in found:
                backend.close()

    def databases(self, databases: Sequence[str]) -> list[Database]:
        """Open the databases with the functions that the entry points `dlock.databases` name for their schemes."""
        named = _named(databases, DATABASE, "DLOCK_DATABASE_URL")
        return [_made(_database, url, DATABASE, alias=alias) for alias, url in named]

    def findings(self, databases: Sequence[str]) -> list[Finding]:
        """Return no findings: there is no framework to examine."""
        return []

    def purge(self, database: str | None, days: int) -> tuple[str, int]:
        """Purge the fence table of one database; return its alias and the number of removed rows."""
        named = self.databases([database] if database else [])
        if not named:
            raise click.UsageError("no database to purge: pass --database, or set DLOCK_DATABASE_URL")
        with closing(named[0]) as found:
            return found.alias, _purged(found, days)


def _purged(database: Any, days: int) -> int:
    try:
        vendor = database.vendor
        with closing(database.session()) as session:
            return purge(session.execute, vendor, days)
    except Exception as error:  # noqa: BLE001 - of any driver
        reason = " ".join(str(getattr(error, "orig", None) or error).split())
    raise CommandFailed(plain(f"{database.alias}: {reason}"))


def _named(given: Sequence[str], option: str, variable: str) -> list[tuple[str, str]]:
    """Return each URL with its alias: the given one, or its scheme, with a number if that is taken."""
    found: dict[str, str] = {}
    for text in given or filter(None, [os.environ.get(variable)]):
        match = _NAMED.fullmatch(text)
        if match is None:
            raise click.UsageError(f"{option}: expected a URL such as redis://localhost:6379/0, or alias=URL")
        alias = match[1] or _free(match[2].partition("+")[0], found)
        if alias in found:
            raise click.UsageError(f"{option}: the alias {alias!r} is given twice; aliases must differ")
        found[alias] = text[len(match[1]) + 1 :] if match[1] else text
    return list(found.items())


def _free(scheme: str, taken: dict[str, str]) -> str:
    number = 1
    while (alias := scheme if number == 1 else f"{scheme}{number}") in taken:
        number += 1
    return alias


def _made(factory: Callable[..., Any], url: str, option: str, **options: Any) -> Any:
    try:
        return factory(url, **options)
    except WrongUrl:
        raise
    except Exception as error:  # noqa: BLE001 - drivers and third-party stores raise what they like
        reason = str(error)
        if tells_secret(reason, url):
            reason = f"the URL cannot be used ({type(error).__name__})"
    raise WrongUrl(f"{option}: {reason}")


def _database(url: str, alias: str) -> Database:
    scheme = url.partition(":")[0].partition("+")[0]
    factories = {point.name: point for point in entry_points(group="dlock.databases")}
    if scheme not in factories:
        known = ", ".join(f"{name}://" for name in sorted(factories))
        hint = known or "none, install dlock-orm[sqlalchemy]"
        raise WrongUrl(f"{DATABASE}: no database for the URL scheme {scheme!r}: {hint}")
    with needed_by("this database"):
        found: Database = factories[scheme].load()(url, alias)
    return found
