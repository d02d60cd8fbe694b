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
from django_dlock.operations import purge
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
    """Run a verb; raises CommandError with click's exit code. `options` are those of `call_command`, by name."""
    given = CliContext(SettingsSources(), console_for(out, colors=colors))
    try:
        app.main([*arguments, *_written(arguments, options)], "manage.py dlock", standalone_mode=False, obj=given)
    except click.ClickException as error:
        raise CommandError(error.format_message(), returncode=error.exit_code) from None
    except click.Abort:
        raise CommandError("nothing was done", returncode=1) from None


def help_text(program: str) -> str:
    """Give the help of all verbs."""
    return click.Context(app, info_name=program).get_help() + "\n"


def option_names() -> set[str]:
    """Give the names under which options may be passed in."""
    return {str(each.name) for verb in app.commands.values() for each in verb.params} | {"interactive"}


def _written(arguments: Sequence[str], options: Mapping[str, Any]) -> Iterator[str]:
    """Write options as they stand on a command line."""
    verb = app.commands.get(next(iter(arguments), ""))
    given = {**options, "no_input": options.get("no_input") or options.get("interactive") is False}
    for each in verb.params if verb else ():
        value = given.get(str(each.name))
        if isinstance(each, click.Option) and each.is_flag:
            yield from each.opts[:1] if value else ()
        elif value is not None:
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from (each.opts[0], str(one)) if isinstance(each, click.Option) else (str(one),)


class SettingsSources:
    """`--store` and `--database` as aliases of the settings; without them all there are. Stores stay open."""

    @contextmanager
    def opened(self, given: Sequence[str]) -> Iterator[list[tuple[str, Backend]]]:
        """Give the stores; raises click.UsageError for one that is unknown or wrong."""
        try:
            aliases = given or (list(stores) if is_declared() else [])
            found = [(alias, stores[alias].backend) for alias in dict.fromkeys(aliases)]
        except InvalidStore as error:
            raise click.UsageError(str(error)) from None
        yield found

    def databases(self, given: Sequence[str]) -> list[Database]:
        """Give the databases; raises click.UsageError for one that is unknown."""
        return list(databases(_known(given)))

    def findings(self, given: Sequence[str]) -> list[Finding]:
        """Say what Django knows of itself."""
        return operations.findings(_known(given))

    def purge(self, database: str | None, days: int) -> tuple[str, int]:
        """Tidy the fence table of one database."""
        (alias,) = _known([database or DEFAULT_DB_ALIAS])
        try:
            return alias, purge(alias, days)
        except DatabaseError as error:
            raise CommandFailed(plain(f"{alias}: {error}")) from None


def _known(given: Sequence[str]) -> list[str]:
    for alias in given:
        if alias not in connections.settings:
            known = ", ".join(map(repr, connections))
            raise click.UsageError(f"there is no database {alias!r}, only: {known}")
    return list(dict.fromkeys(given or connections))
