"""Options that several commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["database", "form", "interval", "name", "no_input", "store"]

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
