"""One lock in full: every holder and waiter with all that it says of itself, and who waits for whom because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click
from rich.text import Text

from dlock_core.cli.listing import counted, grouped, troubles
from dlock_core.cli.text import plain, seconds
from dlock_core.cli.trees import tree
from dlock_core.inspect import Picture
from dlock_core.names import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

    from dlock_core.inspect import Entry

__all__ = ["Details", "called", "part", "spelled"]


def spelled(name: str) -> str:
    """Give a lock's name as stores know it; raises click.UsageError for what can be none."""
    try:
        return canonical(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def called(name: str) -> set[str]:
    """Give the names that somebody may mean by this text: a row as it stands, a lock as it is spelled."""
    try:
        return {name, canonical(name)}
    except ValueError:
        return {name}


def part(whole: Picture, names: set[str]) -> Picture:
    """Keep to some locks, and to the deadlocks that they are part of."""
    cycles = [cycle for cycle in whole.cycles if any(wait.waiter.name in names for wait in cycle.waits)]
    return Picture([entry for entry in whole.entries if entry.name in names], whole.unreadable, cycles)


class Details(NamedTuple):
    """A lock's part of a picture, and all entries, which the tree is made of."""

    picture: Picture
    everything: Sequence[Entry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for lock in grouped(self.picture.entries):
            yield Text(plain(f"{lock[0].kind} {lock[0].name} in {lock[0].source}"), "bold")
            for entry in lock:
                yield from _entry(entry)
        parties = _near(self.everything, {entry.party for entry in self.picture.entries})
        if any(entry.role == "waiter" for entry in self.picture.entries):
            yield Text("")
            yield tree([entry for entry in self.everything if entry.party in parties], options.max_width)
        yield Text(counted(self.picture.entries))
        yield from troubles(self.picture)


def _entry(entry: Entry) -> Iterator[Text]:
    role = f"waiter {entry.place}" if entry.place else entry.role
    yield Text(f"  {role}: {plain(entry.described)}", "dim" if entry.role == "waiter" else "")
    time = f"{'held' if entry.role == 'holder' else 'waits'} for"
    facts = {"mode": entry.mode, time: seconds(entry.seconds), "token": entry.token}
    if entry.expires_in is not None:
        facts["ttl left"] = f"{seconds(entry.expires_in)} (renewed while its process lives)"
    for key, value in {**facts, **entry.owner}.items():
        if value not in (None, ""):
            yield Text(f"    {plain(str(key))}: {plain(' '.join(str(value).split()))}")  # a query has many lines


def _near(entries: Sequence[Entry], parties: set[str]) -> set[str]:
    """Add everybody who has to do with the same locks as these parties, and so on."""
    while True:
        locks = {(entry.source, entry.kind, entry.name) for entry in entries if entry.party in parties}
        more = {entry.party for entry in entries if (entry.source, entry.kind, entry.name) in locks}
        if more <= parties:
            return parties
        parties = parties | more
