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

    from dlock_core.cli.sources import CliContext
    from dlock_core.inspect import Snapshot

__all__ = ["snapshots", "watch"]


class Shot(NamedTuple):
    """A listing under the time at which it was taken."""

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(time.strftime("%Y-%m-%d %H:%M:%S"), "bold")
        yield Listing(self.snapshot)


def watch(given: CliContext, look: Callable[[], Snapshot], interval: float) -> None:
    """Refresh the whole terminal; without one print one listing after the other. Ctrl-C ends it."""
    if not given.console.is_terminal:
        snapshots(look, interval, lambda snapshot: given.show(Shot(snapshot), ""))
        return
    with Live(console=given.console, screen=True, auto_refresh=False) as live:
        snapshots(look, interval, lambda snapshot: live.update(Shot(snapshot), refresh=True))


def snapshots(look: Callable[[], Snapshot], interval: float, show: Callable[[Snapshot], None]) -> None:
    """Show a snapshot now and after every interval (seconds), until Ctrl-C."""
    try:
        while True:
            show(look())
            time.sleep(interval)
    except KeyboardInterrupt:
        return
