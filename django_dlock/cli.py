"""The commands of `dlock_core.cli` for Django: their stores and databases are those of the settings."""

from __future__ import annotations

from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections

from django_dlock import operations
from django_dlock.conf import InvalidStore, is_declared, stores
from django_dlock.inspect import databases
from dlock_core.cli.app import app
from dlock_core.cli.layout import plain
from dlock_core.cli.sources import CliContext, CommandFailed, console_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dlock_core.backend import Backend
    from dlock_core.doctor import Finding
    from dlock_core.inspect import Database

__all__ = ["SettingsSources", "help_text", "option_names", "run"]


def run(arguments: Sequence[str], options: Mapping[str, Any], out: IO[str], *, colors: bool | None = None) -> None:
    """Run a command; raises CommandError with click's exit code. `options` are those of `call_command`, by name."""
    context = CliContext(SettingsSources(), console_for(out, colors=colors))
    try:
        app.main([*arguments, *_written(arguments, options)], "manage.py dlock", standalone_mode=False, obj=context)
    except click.ClickException as error:
        raise CommandError(error.format_message(), returncode=error.exit_code) from None
    except click.Abort:
        raise CommandError("nothing was done", returncode=1) from None


def help_text(program: str) -> str:
    """Return the help of the whole program."""
    return click.Context(app, info_name=program).get_help() + "\n"


def option_names() -> set[str]:
    """Return the names of the options that `call_command` may pass."""
    return {str(each.name) for command in app.commands.values() for each in command.params} | {"interactive"}


def _written(arguments: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as they would be written on a command line."""
    command = app.commands.get(next(iter(arguments), ""))
    given = {**options, "no_input": options.get("no_input") or options.get("interactive") is False}
    for each in command.params if command else ():
        value = given.get(str(each.name))
        if isinstance(each, click.Option) and each.is_flag:
            yield from each.opts[:1] if value else ()
        elif value is not None:
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from (each.opts[0], str(one)) if isinstance(each, click.Option) else (str(one),)


class SettingsSources:
    """`--store` and `--database` as aliases of the settings; without them all aliases. Stores stay open."""

    @contextmanager
    def opened(self, stores: Sequence[str]) -> Iterator[list[tuple[str, Backend]]]:
        """Yield the stores; raises click.UsageError for an unknown alias or a wrong setting."""
        try:
            found = _opened_stores(stores)
        except InvalidStore as error:
            raise click.UsageError(str(error)) from None
        yield found

    def databases(self, databases: Sequence[str]) -> list[Database]:
        """Return the databases; raises click.UsageError for an unknown alias."""
        return _databases(databases)

    def findings(self, databases: Sequence[str]) -> list[Finding]:
        """Return what the doctor finds in Django's settings."""
        return operations.findings(_known(databases))

    def purge(self, database: str | None, days: int) -> tuple[str, int]:
        """Purge the fence table of one database; return its alias and the number of removed rows."""
        (alias,) = _known([database or DEFAULT_DB_ALIAS])
        try:
            return alias, operations.purge(alias, days)
        except DatabaseError as error:
            raise CommandFailed(plain(f"{alias}: {error}")) from None


def _opened_stores(given: Sequence[str]) -> list[tuple[str, Backend]]:
    aliases = given or (list(stores) if is_declared() else [])
    return [(alias, stores[alias].backend) for alias in dict.fromkeys(aliases)]


def _databases(given: Sequence[str]) -> list[Database]:
    return list(databases(_known(given)))


def _known(given: Sequence[str]) -> list[str]:
    for alias in given:
        if alias not in connections.settings:
            known = ", ".join(map(repr, connections))
            raise click.UsageError(f"there is no database {alias!r}, only: {known}")
    return list(dict.fromkeys(given or connections))
