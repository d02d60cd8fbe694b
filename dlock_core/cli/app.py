"""The commands, shared by `dlock` and `manage.py dlock`: what they read comes in as click's context object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from dlock_core import doctor as doctors
from dlock_core.cli.layout import plain, seconds
from dlock_core.cli.listing import (
    Details,
    Listing,
    Report,
    matching,
    parse_name,
    possible_names,
    repeat,
    report_dict,
    watch,
)
from dlock_core.cli.release import choose_grant, confirm, end
from dlock_core.cli.sources import CliContext, CommandFailed, OpenSources, WrongUrl
from dlock_core.extras import version
from dlock_core.inspect import Snapshot, take_snapshot
from dlock_core.options import masked

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["app"]

MAX_NAME_LENGTH: Final = 2048
"""Characters of a lock's name on the command line; 512 bytes can be written with four characters each."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600

store: Final = click.option(
    "--store",
    multiple=True,
    metavar="STORE",
    help="Limit to this store: an alias of DLOCK, or a URL (may be repeated).",
)
database: Final = click.option(
    "--database",
    multiple=True,
    metavar="DATABASE",
    help="Limit to this database: an alias of DATABASES, or a URL (may be repeated).",
)
form: Final = click.option(
    "--format", type=click.Choice(["table", "json"]), default="table", help="table for people, json for programs."
)
no_input: Final = click.option("--no-input", "--noinput", "no_input", is_flag=True, help="Do not ask for confirmation.")


def _check_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value or len(value) > MAX_NAME_LENGTH:
        raise click.BadParameter("expected a lock's name of 1 to 512 bytes")
    return value


name: Final[Callable[[Any], Any]] = click.argument("name", callback=_check_name)


def _check_interval(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise click.BadParameter(f"expected {MIN_INTERVAL_S} to {MAX_INTERVAL_S} seconds")
    return value


interval: Final = click.option(
    "--interval", type=float, default=2.0, callback=_check_interval, show_default=True, help="Seconds between listings."
)


class _Commands(click.Group):
    """The group of commands; it masks passwords in click's own error messages."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except WrongUrl:
            raise
        except click.ClickException as error:
            text = error.format_message()
            masked_text = masked(text)
            if masked_text == text:
                raise
            if isinstance(error, click.UsageError):
                wrong: click.ClickException = click.UsageError(masked_text, error.ctx)
            else:
                wrong = CommandFailed(masked_text)
        # Click has quoted a URL that was given in the wrong position. Raised here, outside the handler, the new error
        # does not carry the old one with its password as context.
        raise wrong


def _version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001 - click's form
    if is_asked:
        click.echo(f"dlock {version()}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def app() -> None:
    """Show the holders and waiters of locks, release a lease, and check stores and databases.

    Exit codes: 0 success; 1 refused, not found or not readable; 2 wrong usage.
    """


@app.command("list")
@store
@database
@form
@click.pass_obj
def list_(context: CliContext, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Show all holders and waiters."""
    with context.opened(store, database) as opened:
        found = take_snapshot(*opened)
    context.print_json(found.as_dict()) if format == "json" else context.print(Listing(found))
    _fail_if_unreadable(found, opened)


@app.command()
@name
@store
@database
@form
@click.pass_obj
def show(context: CliContext, name: str, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Show one lock in detail."""
    with context.opened(store, database) as opened:
        names, whole = possible_names(name), take_snapshot(*opened)
        found = matching(whole, names)
        if not found.entries:  # The lock of another program is in no listing: it is found only by its name.
            found = matching(take_snapshot(opened.stores, (), parse_name(name)), names)
    if format == "json":
        context.print_json(found.as_dict())
    elif found.entries:
        context.print(Details(found, whole.entries))
    _fail_if_unreadable(whole, opened)
    if not found.entries:
        raise CommandFailed(plain(f"{name!r} has no holder and no waiters"))


@app.command("watch")
@store
@database
@interval
@form
@click.pass_obj
def watch_(
    context: CliContext, store: tuple[str, ...], database: tuple[str, ...], interval: float, format: str
) -> None:
    """Show all holders and waiters repeatedly, until Ctrl-C.

    With --format json, each snapshot is one line.
    """
    with context.opened(store, database) as opened:

        def look() -> Snapshot:
            return take_snapshot(*opened)

        if format == "json":
            repeat(look, interval, lambda found: context.print_json(found.as_dict(), indent=None))
        else:
            watch(context, look, interval)


@app.command()
@name
@store
@click.option("--token", type=click.IntRange(min=1), help="Release only the grant with this token.")
@no_input
@form
@click.pass_obj
def release(
    context: CliContext, name: str, *, store: tuple[str, ...], token: int | None, no_input: bool, format: str
) -> None:
    """Release a lease, and never a newer one than is shown.

    Its holder learns of this at its next renewal, and cannot commit after that.
    """
    with context.opened(store, None) as opened:
        found = take_snapshot(opened.stores, (), parse_name(name))
        entry = choose_grant(found, name, token, may_ask=not no_input)
        if not no_input:
            confirm(entry, sum(each.role == "waiter" for each in found.entries))
        done = end(dict(opened.stores)[entry.source], entry, entry.token or 0)
    if format == "json":
        context.print_json(done.as_dict())
    else:
        held = f"held by {plain(entry.described)} for {seconds(entry.seconds)}"
        context.print_line(f"released {plain(entry.name)} in {plain(entry.source)}, token {entry.token}, {held}")


@app.command()
@store
@database
@form
@click.pass_obj
def doctor(context: CliContext, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Measure stores and databases, and explain what is unsafe."""
    with context.opened(store, database) as opened:
        findings = [*doctors.examine(*opened), *context.sources.findings(database)]
    context.print_json(report_dict(findings)) if format == "json" else context.print(Report(findings))
    if unsafe := sum(one.level == "unsafe" for one in findings):
        raise CommandFailed(f"{unsafe} of {len(findings)} findings are unsafe")


@app.command()
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="Remove rows older than this.")
@click.option("--database", metavar="DATABASE", help="The database with the fence table: an alias, or a URL.")
@form
@click.pass_obj
def purge(context: CliContext, days: int, database: str | None, format: str) -> None:
    """Keep the fence table small.

    Old rows are replaced by a floor, which refuses their tokens.
    """
    alias, removed = context.sources.purge(database, days)
    if format == "json":
        context.print_json({"schema": 1, "database": alias, "days": days, "removed": removed})
    else:
        context.print_line(f"{removed} fence rows older than {days} days removed from {plain(alias)}")


def _fail_if_unreadable(found: Snapshot, opened: OpenSources) -> None:
    if found.unreadable:
        total = len(opened.stores) + len(opened.databases)
        raise CommandFailed(f"{len(found.unreadable)} of {total} stores and databases could not be read")
