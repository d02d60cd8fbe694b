"""Options that several commands have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INTERVAL", "database", "form", "name", "no_input", "store"]

store: Final = click.option(
    "--store", multiple=True, metavar="STORE", help="Look at this store only (may be repeated)."
)
database: Final = click.option(
    "--database", multiple=True, metavar="DATABASE", help="Look at this database only (may be repeated)."
)
form: Final = click.option(
    "--format", type=click.Choice(["table", "json"]), default="table", help="For people, or for programs."
)
no_input: Final = click.option(
    "--no-input", "--noinput", "interactive", is_flag=True, flag_value=False, default=True, help="Ask nothing."
)


def _named(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value or len(value) > 2048:
        raise click.BadParameter("a lock's name has 1 to 512 bytes")
    return value


name: Final[Callable[[Any], Any]] = click.argument("name", callback=_named)


class _Interval(click.ParamType[float] if TYPE_CHECKING else click.ParamType):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0.1 <= seconds <= 3600:
            self.fail(f"expected 0.1 to 3600 seconds, not {value!r}", param, context)
        return seconds


INTERVAL: Final = _Interval()
