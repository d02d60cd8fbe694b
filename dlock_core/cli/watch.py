"""`dlock watch`: the listing, again and again, until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.live import Live
from rich.text import Text

from dlock_core.cli.listing import Listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, ConsoleOptions, RenderableType

    from dlock_core.cli.sources import Given
    from dlock_core.inspect import Picture

__all__ = ["snapshots", "watch"]


class Shot(NamedTuple):
    """A listing under the time at which it was taken."""

    picture: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(time.strftime("%Y-%m-%d %H:%M:%S"), "bold")
        yield Listing(self.picture)


def watch(given: Given, look: Callable[[], Picture], interval: float) -> None:
    """Refresh the whole terminal; without one print one listing after the other. Ctrl-C ends it."""
    if not given.console.is_terminal:
        snapshots(look, interval, lambda picture: given.show(Shot(picture), ""))
        return
    with Live(console=given.console, screen=True, auto_refresh=False) as live:
        snapshots(look, interval, lambda picture: live.update(Shot(picture), refresh=True))


def snapshots(look: Callable[[], Picture], interval: float, show: Callable[[Picture], None]) -> None:
    """Show a picture now and after every interval (seconds), until Ctrl-C."""
    try:
        while True:
            show(look())
            time.sleep(interval)
    except KeyboardInterrupt:
        return
