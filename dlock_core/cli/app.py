"""The commands, for `dlock` and for `manage.py dlock` alike: what they look at comes in as click's object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from dlock_core import doctor as doctors
from dlock_core.backends.options import masked
from dlock_core.cli.layout import plain, seconds
from dlock_core.cli.listing import Details, Listing, Report, parse_name, part, possible_names, report_dict
from dlock_core.cli.release import choose_grant, confirm, end
from dlock_core.cli.sources import CliContext, CommandFailed, OpenSources, WrongUrl
from dlock_core.cli.watch import snapshots, watch
from dlock_core.extras import version
from dlock_core.inspect import Snapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["app"]

store: Final = click.option(
    "--store", multiple=True, metavar="STORE", help="Look at this store only (may be repeated)."
)
database: Final = click.option(
    "--database", multiple=True, metavar="DATABASE", help="Look at this database only (may be repeated)."
)
form: Final = click.option(
    "--format", type=click.Choice(["table", "json"]), default="table", help="For people, or for programs."
)
no_input: Final = click.option("--no-input", "--noinput", "no_input", is_flag=True, help="Ask nothing.")


def _named(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value or len(value) > 2048:
        raise click.BadParameter("a lock's name has 1 to 512 bytes")
    return value


name: Final[Callable[[Any], Any]] = click.argument("name", callback=_named)


def _between(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0.1 <= value <= 3600:
        raise click.BadParameter("expected 0.1 to 3600 seconds")
    return value


interval: Final = click.option(
    "--interval", type=float, default=2.0, callback=_between, show_default=True, help="Seconds between two looks."
)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except WrongUrl:
            raise
        except click.ClickException as error:
            words = masked(said := error.format_message())
            if words == said:
                raise
            wrong = click.UsageError(words, error.ctx) if isinstance(error, click.UsageError) else CommandFailed(words)
        raise wrong  # it had quoted a URL that stands where none belongs


def _version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:  # noqa: FBT001 - click's form
    if is_asked:
        click.echo(f"dlock {version()}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def app() -> None:
    """Show who holds and who waits for locks, end a lease, look after the stores.

    Exit codes: 0 fine, 1 refused, not found or not readable, 2 wrong usage.
    """


@app.command("list")
@store
@database
@form
@click.pass_obj
def list_(given: CliContext, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Show all holders and waiters."""
    with given.opened(store, database) as opened:
        found = take_snapshot(*opened)
    given.json(found.as_dict()) if format == "json" else given.show(Listing(found))
    _complain(found, opened)


@app.command()
@name
@store
@database
@form
@click.pass_obj
def show(given: CliContext, name: str, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Show one lock in full."""
    with given.opened(store, database) as opened:
        names, whole = possible_names(name), take_snapshot(*opened)
        found = part(whole, names)
        if not found.entries:  # another program's lock is in no list: it is found by its name alone
            found = part(take_snapshot(opened.stores, (), parse_name(name)), names)
    if format == "json":
        given.json(found.as_dict())
    elif found.entries:
        given.show(Details(found, whole.entries))
    _complain(whole, opened)
    if not found.entries:
        raise CommandFailed(plain(f"nobody holds {name!r}, and nobody waits for it"))


@app.command("watch")
@store
@database
@interval
@form
@click.pass_obj
def watch_(given: CliContext, store: tuple[str, ...], database: tuple[str, ...], interval: float, format: str) -> None:
    """Show all again and again, until Ctrl-C.

    As JSON it is one line each time.
    """
    with given.opened(store, database) as opened:

        def look() -> Snapshot:
            return take_snapshot(*opened)

        if format == "json":
            snapshots(look, interval, lambda found: given.json(found.as_dict(), indent=None))
        else:
            watch(given, look, interval)


@app.command()
@name
@store
@click.option("--token", type=click.IntRange(min=1), help="The grant that is meant; no other is touched.")
@no_input
@form
@click.pass_obj
def release(
    given: CliContext, name: str, *, store: tuple[str, ...], token: int | None, no_input: bool, format: str
) -> None:
    """End a lease, and no newer one than is shown.

    Its holder learns of it at its next renewal, and cannot commit after that.
    """
    with given.opened(store, None) as opened:
        found = take_snapshot(opened.stores, (), parse_name(name))
        entry = choose_grant(found, name, token, asks=not no_input)
        if not no_input:
            confirm(entry, sum(each.role == "waiter" for each in found.entries))
        done = end(dict(opened.stores)[entry.source], entry, entry.token or 0)
    if format == "json":
        given.json(done.as_dict())
    else:
        held = f"held by {plain(entry.described)} for {seconds(entry.seconds)}"
        given.line(f"released {plain(entry.name)} in {plain(entry.source)}, token {entry.token}, {held}")


@app.command()
@store
@database
@form
@click.pass_obj
def doctor(given: CliContext, store: tuple[str, ...], database: tuple[str, ...], format: str) -> None:
    """Measure stores and databases, and explain what is unsafe."""
    with given.opened(store, database) as opened:
        findings = [*doctors.examine(*opened), *given.sources.findings(database)]
    given.json(report_dict(findings)) if format == "json" else given.show(Report(findings))
    if unsafe := sum(one.level == "unsafe" for one in findings):
        raise CommandFailed(f"{unsafe} of {len(findings)} findings are unsafe")


@app.command()
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, help="Rows older than this go.")
@click.option("--database", metavar="DATABASE", help="The database with the fence table.")
@form
@click.pass_obj
def purge(given: CliContext, days: int, database: str | None, format: str) -> None:
    """Keep the fence table small.

    Old rows are replaced by a floor that refuses their tokens.
    """
    alias, removed = given.sources.purge(database, days)
    if format == "json":
        given.json({"schema": 1, "database": alias, "days": days, "removed": removed})
    else:
        given.line(f"{removed} fence rows older than {days} days removed from {plain(alias)}")


def _complain(found: Snapshot, opened: OpenSources) -> None:
    if found.unreadable:
        of = len(opened.stores) + len(opened.databases)
        raise CommandFailed(f"{len(found.unreadable)} of {of} stores and databases could not be read")
